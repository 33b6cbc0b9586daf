#include "longspan/kernels/attention/hopper/backward/keys.cuh"
#include "longspan/kernels/attention/hopper/backward/queries.cuh"

namespace longspan::hopper {

template cudaError_t
launch_dense_keys<DenseKeysPlan<64, 64, true, true, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t
launch_dense_keys<DenseKeysPlan<64, 64, true, false, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t
launch_dense_queries<DenseQueriesPlan<64, 64, true, ElementType::float16>>(
    const DenseQueriesParams&, int, cudaStream_t);

}  // namespace longspan::hopper
