#include "longspan/kernels/attend_selected/ampere/backward/backward.cuh"

#include <stdexcept>

#include "longspan/kernels/attend_selected/ampere/attend_selected.h"
#include "longspan/kernels/common/ampere/launch.h"

namespace longspan::ampere {

namespace {

template <class Plan, class Element>
cudaError_t launch(const SelectedBackwardArgs& args, cudaStream_t stream) {
  const size_t bytes = Plan::shared_bytes(args.head_dim, args.value_dim);
  return launch_blocks(backward_kernel<Plan, Element>, args, Plan::kHeads,
                       Plan::kThreads, bytes, stream);
}

using Wide = BackwardPlan<32, 64, 576>;
using Slim = BackwardPlan<16, 64, 576>;
using Short = BackwardPlan<16, 32, 576>;
using SmallWide = BackwardPlan<32, 64, 256>;
using SmallSlim = BackwardPlan<16, 64, 256>;

template <class Element>
cudaError_t launch(const SelectedBackwardArgs& args, cudaStream_t stream) {
  const bool few = args.heads / args.key_heads <= 16;
  if (args.head_dim <= 256) {
    return few ? launch<SmallSlim, Element>(args, stream)
               : launch<SmallWide, Element>(args, stream);
  }
  const size_t most = block_memory();
  const auto fits = [&](size_t bytes) { return bytes <= most; };
  if (!few && fits(Wide::shared_bytes(args.head_dim, args.value_dim))) {
    return launch<Wide, Element>(args, stream);
  }
  if (fits(Slim::shared_bytes(args.head_dim, args.value_dim))) {
    return launch<Slim, Element>(args, stream);
  }
  return launch<Short, Element>(args, stream);
}

}  // namespace

std::optional<std::string> why_not_attend_selected_backward(
    const SelectedBackwardArgs& args) {
  if (auto reason = why_not_attend_selected(args)) return reason;
  if (!is_aligned(args.dout) || !is_aligned(args.dq)) {
    return "dout or dq is not aligned to 16 bytes";
  }
  if (!is_aligned(args.dkv, 4)) return "dkv is not aligned to 16 bytes";
  return std::nullopt;
}

void selected_attention_backward(const SelectedBackwardArgs& args,
                                 void* stream) {
  if (args.rows * args.queries * args.heads == 0) return;
  if (const auto reason = why_not_attend_selected_backward(args)) {
    throw std::invalid_argument("attend_selected backward: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  check_launch("attend_selected backward", args.type == ElementType::bfloat16
                                               ? launch<__nv_bfloat16>(args, on)
                                               : launch<__half>(args, on));
}

}  // namespace longspan::ampere
