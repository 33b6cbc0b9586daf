#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

/// x / sqrt(mean of x^2 + eps) * weight over the last axis, like x; without a
/// weight where it is undefined. Computed in float32 (float64 for float64) and
/// rounded once.
at::Tensor rms_normed(const at::Tensor& x, const at::Tensor& weight,
                      double eps);

}  // namespace longspan
