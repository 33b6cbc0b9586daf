#pragma once

#include <cuda_runtime.h>

#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan::ampere {

/// A file each, so that they compile side by side.
cudaError_t launch_score_backward_bf16(const ScoreSelectedBackwardArgs& args,
                                       cudaStream_t stream);
cudaError_t launch_score_backward_fp16(const ScoreSelectedBackwardArgs& args,
                                       cudaStream_t stream);

}  // namespace longspan::ampere
