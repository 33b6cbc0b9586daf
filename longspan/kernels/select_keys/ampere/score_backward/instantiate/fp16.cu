#include "longspan/kernels/select_keys/ampere/score_backward/backward.cuh"
#include "longspan/kernels/select_keys/ampere/score_backward/launch.h"

namespace longspan::ampere {

cudaError_t launch_score_backward_fp16(const ScoreSelectedBackwardArgs& args,
                                       cudaStream_t stream) {
  return launch_score_backward<__half>(args, stream);
}

}  // namespace longspan::ampere
