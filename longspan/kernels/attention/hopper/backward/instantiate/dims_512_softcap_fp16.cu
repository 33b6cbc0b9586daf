#include "longspan/kernels/attention/hopper/backward/widest.cuh"

namespace longspan::hopper {

template cudaError_t
launch_widest<WidestPlan<Derivative::of_queries, true, ElementType::float16>>(
    const DenseQueriesParams&, int, cudaStream_t);
template cudaError_t
launch_widest<WidestPlan<Derivative::of_keys, true, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t
launch_widest<WidestPlan<Derivative::of_values, true, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);

}  // namespace longspan::hopper
