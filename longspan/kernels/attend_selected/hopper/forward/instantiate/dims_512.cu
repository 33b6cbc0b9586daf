#include "longspan/kernels/attend_selected/hopper/forward/forward.cuh"

namespace longspan::hopper {

template cudaError_t launch_forward<512>(const ForwardParams&, int,
                                         cudaStream_t);

}  // namespace longspan::hopper
