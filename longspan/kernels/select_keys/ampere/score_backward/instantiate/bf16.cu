#include "longspan/kernels/select_keys/ampere/score_backward/backward.cuh"
#include "longspan/kernels/select_keys/ampere/score_backward/launch.h"

namespace longspan::ampere {

cudaError_t launch_score_backward_bf16(const ScoreSelectedBackwardArgs& args,
                                       cudaStream_t stream) {
  return launch_score_backward<__nv_bfloat16>(args, stream);
}

}  // namespace longspan::ampere
