#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/models/layer_share.h"

namespace longspan {

/// A causal convolution of each channel by itself (depthwise, causal_conv1d)
/// that begins anew with every document and looks over the borders of ranks:
///
///   out[t, c] = bias[c] + sum over k < K of weight[c, 0, k] x[t - K + 1 + k,
///   c]
///
/// where tokens before the document are 0. x [tokens, C] of this rank, weight
/// [C, 1, K] as a Conv1d of C groups has it, bias [C] or undefined. Pads give
/// 0. Like x, summed in float32 (float64 for float64) and rounded once.
///
/// K - 1 rows travel to each run from wherever they lie; backward adds their
/// gradients home. Differentiable in all three; gradients of weight and bias
/// **sum** over the ranks.
at::Tensor convolve_runs(const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias, const LayerShare& share);

}  // namespace longspan
