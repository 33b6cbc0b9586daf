#include "longspan/kernels/select_keys/ampere/score/score.cuh"

#include <stdexcept>

#include "longspan/kernels/select_keys/ampere/checks.h"
#include "longspan/kernels/select_keys/ampere/select_keys.h"

namespace longspan::ampere {

namespace {

template <class Element, int kDepth>
cudaError_t launch_scores(const ScoreSelectedArgs& args, cudaStream_t stream) {
  using Plan = ScorePlan<Element, kDepth>;
  return launch(score_selected_kernel<Element, kDepth>,
                args.rows * args.queries, Plan::kThreads,
                Plan::shared_bytes(args.heads), stream, args);
}

template <class Element>
cudaError_t launch_scores(const ScoreSelectedArgs& args, cudaStream_t stream) {
  if (args.head_dim <= 64) return launch_scores<Element, 64>(args, stream);
  return args.head_dim <= 128 ? launch_scores<Element, 128>(args, stream)
                              : launch_scores<Element, 256>(args, stream);
}

size_t shared_bytes(const ScoreSelectedArgs& args) {
  // Both kinds of elements have two bytes.
  if (args.head_dim <= 64) {
    return ScorePlan<__half, 64>::shared_bytes(args.heads);
  }
  return args.head_dim <= 128
             ? ScorePlan<__half, 128>::shared_bytes(args.heads)
             : ScorePlan<__half, 256>::shared_bytes(args.heads);
}

}  // namespace

std::optional<std::string> why_not_score_selected(
    const ScoreSelectedArgs& args) {
  if (auto reason = why_not_score(args)) return reason;
  return why_not_shared(shared_bytes(args));
}

void score_selected(const ScoreSelectedArgs& args, void* stream) {
  if (args.rows * args.queries * args.slots == 0) return;
  if (const auto reason = why_not_score_selected(args)) {
    throw std::invalid_argument("score_selected: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  check_launch("score_selected", args.type == ElementType::bfloat16
                                     ? launch_scores<__nv_bfloat16>(args, on)
                                     : launch_scores<__half>(args, on));
}

}  // namespace longspan::ampere
