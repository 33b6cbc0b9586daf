#include "longspan/kernels/attention/hopper/forward/forward.cuh"

namespace longspan::hopper {

template cudaError_t
launch_dense_forward<DenseForwardPlan<128, 128, false, ElementType::float16>>(
    const DenseForwardParams&, int, cudaStream_t);

}  // namespace longspan::hopper
