#include "longspan/kernels/attention/hopper/backward/widest.cuh"

namespace longspan::hopper {

template cudaError_t launch_widest<WidestPlan<Derivative::of_queries, true>>(
    const DenseQueriesParams&, int, cudaStream_t);
template cudaError_t launch_widest<WidestPlan<Derivative::of_keys, true>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t launch_widest<WidestPlan<Derivative::of_values, true>>(
    const DenseKeysParams&, int, cudaStream_t);

}  // namespace longspan::hopper
