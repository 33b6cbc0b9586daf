#include "longspan/kernels/attention/hopper/backward/queries.cuh"
#include "longspan/kernels/attention/hopper/backward/wide_keys.cuh"

namespace longspan::hopper {

template cudaError_t
launch_wide_keys<WideKeysPlan<256, 256, false, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t
launch_dense_queries<DenseQueriesPlan<256, 256, false, ElementType::float16>>(
    const DenseQueriesParams&, int, cudaStream_t);

}  // namespace longspan::hopper
