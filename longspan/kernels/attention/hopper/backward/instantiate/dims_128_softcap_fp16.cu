#include "longspan/kernels/attention/hopper/backward/keys.cuh"
#include "longspan/kernels/attention/hopper/backward/queries.cuh"

namespace longspan::hopper {

template cudaError_t
launch_dense_keys<DenseKeysPlan<128, 128, true, true, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t
launch_dense_keys<DenseKeysPlan<128, 128, true, false, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t
launch_dense_queries<DenseQueriesPlan<128, 128, true, ElementType::float16>>(
    const DenseQueriesParams&, int, cudaStream_t);

}  // namespace longspan::hopper
