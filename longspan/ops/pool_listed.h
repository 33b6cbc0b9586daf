#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/ops/tensors.h"

namespace longspan {

/// Pools and the logs of their weights, for each channel.
struct Pooled {
  at::Tensor out;  ///< [pools, C], accumulation type of values
  at::Tensor lse;  ///< [pools, C], natural log, -inf = saw no row
};

/// Softmax pooling of listed rows, for each channel on its own: weights are the
/// softmax of gates[list] + bias over the slots of a pool.
///
/// values, gates: floating [rows, C]; bias: floating [slots, C] or undefined;
/// lists: int32 [pools, slots], where an entry outside of [0, rows) is an empty
/// slot. Both results are differentiable once, so pools can be pooled again
/// with their lse as gates: that merges parts.
///
/// torch.ops.longspan.pool_listed(values, gates, bias, lists) -> (out, lse)
Pooled pool_listed(const at::Tensor& values, const at::Tensor& gates,
                   const OptionalTensor& bias, const at::Tensor& lists);

/// pool_listed by torch's operations, as devices without our kernel do it, and
/// its gradients (of values, gates and bias); declared here so that it can be
/// tested without such a device. No derivative.
Pooled pool_listed_by_torch(const at::Tensor& values, const at::Tensor& gates,
                            const OptionalTensor& bias,
                            const at::Tensor& lists);
Tensors3 pool_listed_backward_by_torch(
    const at::Tensor& dout, const at::Tensor& dlse, const at::Tensor& values,
    const at::Tensor& gates, const OptionalTensor& bias,
    const at::Tensor& lists, const Pooled& pooled);

}  // namespace longspan
