#include "longspan/kernels/attention/hopper/backward/keys.cuh"

namespace longspan::hopper {

template cudaError_t launch_dense_keys<DenseKeysPlan<64, 64, true>>(
    const DenseKeysParams&, int, cudaStream_t);

}  // namespace longspan::hopper
