#include "longspan/kernels/attend_selected/hopper/backward/backward.cuh"

namespace longspan::hopper {

template cudaError_t launch_backward<512>(const BackwardParams&, cudaStream_t);

}  // namespace longspan::hopper
