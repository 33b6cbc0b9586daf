#include <stdexcept>

#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "longspan/kernels/attend_selected/hopper/weights/weights.cuh"
#include "longspan/kernels/common/hopper/checks.h"

namespace longspan::hopper {

namespace {

template <int kHeadDim>
cudaError_t launch(const SelectedWeightsArgs& args, cudaStream_t stream) {
  using Plan = WeightsPlan<kHeadDim>;
  const cudaError_t error = cudaFuncSetAttribute(
      weights_kernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
      Plan::kSharedBytes);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(args.rows * args.queries);
  weights_kernel<kHeadDim>
      <<<blocks, Plan::kThreads, Plan::kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

std::optional<std::string> why_not_selected_weights(
    const SelectedWeightsArgs& args) {
  if (args.head_dim != 512 && args.head_dim != 576) {
    return "no kernel for " + std::to_string(args.head_dim) +
           " channels (has 512 and 576)";
  }
  SelectedAttentionArgs alike = args;
  alike.value_dim = 512;  // nobody reads values
  return why_not_attend_selected(alike);
}

void selected_weights(const SelectedWeightsArgs& args, void* stream) {
  if (args.rows * args.queries * args.heads * args.slots == 0) return;
  if (const auto reason = why_not_selected_weights(args)) {
    throw std::invalid_argument("selected_weights: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  check_launch("selected_weights", args.head_dim == 576
                                       ? launch<576>(args, on)
                                       : launch<512>(args, on));
}

}  // namespace longspan::hopper
