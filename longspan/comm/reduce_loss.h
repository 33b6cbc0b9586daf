#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/comm/group.h"

namespace longspan {

/// The mean loss over the tokens of all ranks: the sum of all sums over the sum
/// of all counts, the same bits on every rank; 0 where no rank counts a token.
///
/// sum: this rank's summed loss, one floating number; count: how many tokens it
/// counted, one number of any type.
///
/// The derivative is that of this rank's part alone, sum / all counts, so that
/// after backward on every rank parameter gradients sum over the group to those
/// of the mean. Also torch.ops.longspan.reduce_loss(sum, count, group).
at::Tensor reduce_loss(const at::Tensor& sum, const at::Tensor& count,
                       const Group& group);

}  // namespace longspan
