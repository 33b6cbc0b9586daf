#include "longspan/kernels/attend_selected/ampere/weights/weights.cuh"

#include <stdexcept>

#include "longspan/kernels/attend_selected/ampere/attend_selected.h"
#include "longspan/kernels/common/ampere/launch.h"

namespace longspan::ampere {

namespace {

template <class Plan, class Element>
cudaError_t launch_plan(const SelectedWeightsArgs& args, cudaStream_t stream) {
  const int group = static_cast<int>(args.heads / args.key_heads);
  return launch_blocks(weights_kernel<Plan, Element>, args, group,
                       Plan::kThreads, Plan::shared_bytes(args.head_dim),
                       stream);
}

template <int kHeads, class Element>
cudaError_t launch_heads(const SelectedWeightsArgs& args, cudaStream_t stream) {
  using Small = WeightsPlan<kHeads, 64, 256>;
  using Large = WeightsPlan<kHeads, 32, 576>;
  return args.head_dim <= Small::kMostChannels
             ? launch_plan<Small, Element>(args, stream)
             : launch_plan<Large, Element>(args, stream);
}

template <class Element>
cudaError_t launch(const SelectedWeightsArgs& args, cudaStream_t stream) {
  const int64_t group = args.heads / args.key_heads;
  if (group > 32) return launch_heads<64, Element>(args, stream);
  if (group > 16) return launch_heads<32, Element>(args, stream);
  return launch_heads<16, Element>(args, stream);
}

}  // namespace

void selected_weights(const SelectedWeightsArgs& args, void* stream) {
  if (args.rows * args.queries * args.heads * args.slots == 0) return;
  if (const auto reason = why_not_attend_selected(args)) {
    throw std::invalid_argument("selected_weights: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  check_launch("selected_weights", args.type == ElementType::bfloat16
                                       ? launch<__nv_bfloat16>(args, on)
                                       : launch<__half>(args, on));
}

}  // namespace longspan::ampere
