#include "longspan/kernels/attention/hopper/backward/widest.cuh"

namespace longspan::hopper {

template cudaError_t
launch_widest<WidestPlan<Derivative::of_queries, false, ElementType::float16>>(
    const DenseQueriesParams&, int, cudaStream_t);
template cudaError_t
launch_widest<WidestPlan<Derivative::of_keys, false, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t
launch_widest<WidestPlan<Derivative::of_values, false, ElementType::float16>>(
    const DenseKeysParams&, int, cudaStream_t);

}  // namespace longspan::hopper
