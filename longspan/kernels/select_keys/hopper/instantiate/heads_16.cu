#include "longspan/kernels/select_keys/hopper/scores.cuh"

namespace longspan::hopper {

template cudaError_t launch_scores<16, 64>(const SelectParams&, int, bool,
                                           cudaStream_t);
template cudaError_t launch_scores<16, 128>(const SelectParams&, int, bool,
                                            cudaStream_t);

}  // namespace longspan::hopper
