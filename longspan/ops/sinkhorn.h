#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

/// Matrices x [.., rows, columns] made nearly doubly stochastic: softmax of
/// each row plus eps, columns divided by (their sum + eps), then repeat - 1
/// times rows and columns likewise. Of the type of x, computed in the
/// accumulation type; differentiable once. Never a view of x.
///
/// torch.ops.longspan.sinkhorn_normalize(x, repeat, eps)
at::Tensor sinkhorn_normalize(const at::Tensor& x, int64_t repeat, double eps);

}  // namespace longspan
