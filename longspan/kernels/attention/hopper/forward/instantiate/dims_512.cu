#include "longspan/kernels/attention/hopper/forward/widest.cuh"

namespace longspan::hopper {

template <>
cudaError_t launch_dense_forward<WidestForwardPlan>(
    const DenseForwardParams& params, int processors, cudaStream_t stream) {
  const int64_t items = int64_t{params.block_count} * params.heads;
  return ampere::launch(widest_forward_kernel<WidestForwardPlan>,
                        std::min<int64_t>(items, processors),
                        WidestForwardPlan::kThreads,
                        WidestForwardPlan::kSharedBytes, stream, params);
}

}  // namespace longspan::hopper
