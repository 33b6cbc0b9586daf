#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/comm/group.h"

namespace longspan {

/// The tokens before each run of a rank's share, from wherever they lie: what a
/// window or a convolution looks at beyond its border (halo exchange).
///
/// x [tokens, ..] of this rank; a HaloPlan knows the rest: `sends`, as
/// exchange_needed takes it, and for each row of the result its place among the
/// `received` tokens, int64 [n] beside x; `received` itself stands for zeros.
/// Differentiable: backward adds the gradients home, zeros' aside. What moves
/// is known on every rank, so nothing waits for data.
///
/// torch.ops.longspan.tokens_before(x, sends, places, received, group)
at::Tensor tokens_before(const at::Tensor& x, const at::Tensor& sends,
                         const at::Tensor& places, int64_t received,
                         const Group& group);

}  // namespace longspan
