#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/core/moves.h"

namespace longspan {

/// Moves tokens along one axis into a new tensor; target tokens that nothing
/// moves to get `fill`. Differentiable: the derivative is the inverse move with
/// zero fill. Returns the argument itself when every token stays.
///
/// source: any dtype and device, source.size(axis) == moves.source_tokens().
/// Also the operator torch.ops.longspan.move_tokens(source, axis, runs,
/// target_tokens, fill) with runs int64 [n, 3] = (source, target, length) on
/// the CPU, in any order.
at::Tensor move_tokens(const at::Tensor& source, int64_t axis,
                       const Moves& moves, const at::Scalar& fill = 0);

/// One move for several tensors, prepared once.
class TokenMover {
 public:
  explicit TokenMover(Moves moves);
  const Moves& moves() const { return moves_; }
  at::Tensor operator()(const at::Tensor& source, int64_t axis,
                        const at::Scalar& fill = 0) const;

 private:
  Moves moves_;
  at::Tensor runs_;
};

/// move_tokens by index vectors, as devices other than the CPU do it; declared
/// here so that it can be tested without such a device. No derivative.
at::Tensor move_tokens_by_index(const at::Tensor& source, int64_t axis,
                                const Moves& moves, const at::Scalar& fill = 0);

/// The runs of a move as the operator takes them.
at::Tensor runs_tensor(const Moves& moves);

}  // namespace longspan
