#include "longspan/kernels/attention/hopper/backward/widest.cuh"

namespace longspan::hopper {

template cudaError_t launch_widest<WidestPlan<Derivative::of_queries, false>>(
    const DenseQueriesParams&, int, cudaStream_t);
template cudaError_t launch_widest<WidestPlan<Derivative::of_keys, false>>(
    const DenseKeysParams&, int, cudaStream_t);
template cudaError_t launch_widest<WidestPlan<Derivative::of_values, false>>(
    const DenseKeysParams&, int, cudaStream_t);

}  // namespace longspan::hopper
