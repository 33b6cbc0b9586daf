#include <stdexcept>

#include "longspan/kernels/select_keys/ampere/checks.h"
#include "longspan/kernels/select_keys/ampere/score_backward/launch.h"
#include "longspan/kernels/select_keys/ampere/select_keys.h"

namespace longspan::ampere {

std::optional<std::string> why_not_score_selected_backward(
    const ScoreSelectedBackwardArgs& args) {
  if (auto reason = why_not_score(args)) return reason;
  if (!fits_32_bits(args.rows * args.queries * ((args.heads + 15) / 16))) {
    return "more than 2^30 queries and heads";
  }
  if (!is_aligned(args.dk, 4)) return "dk is not aligned to 16 bytes";
  if (!fits_32_bits(args.dk.token_stride)) {
    return "more than 2^30 elements from one dk to the next";
  }
  if (!is_aligned(args.dq)) return "dq is not aligned to 16 bytes";
  return std::nullopt;
}

void score_selected_backward(const ScoreSelectedBackwardArgs& args,
                             void* stream) {
  if (args.rows * args.queries * args.heads == 0) return;
  if (const auto reason = why_not_score_selected_backward(args)) {
    throw std::invalid_argument("score_selected backward: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  check_launch("score_selected backward",
               args.type == ElementType::bfloat16
                   ? launch_score_backward_bf16(args, on)
                   : launch_score_backward_fp16(args, on));
}

}  // namespace longspan::ampere
