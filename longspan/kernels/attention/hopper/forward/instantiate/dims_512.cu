#include "longspan/kernels/attention/hopper/forward/widest.cuh"

namespace longspan::hopper {

template <>
cudaError_t launch_dense_forward<WidestForwardPlan<>>(
    const DenseForwardParams& params, int processors, cudaStream_t stream) {
  return launch_widest_forward<WidestForwardPlan<>>(params, processors, stream);
}

}  // namespace longspan::hopper
