#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

/// Which two channels turn together.
enum class ChannelPairs {
  interleaved,  ///< 2j and 2j + 1
  halves,       ///< j and j + count / 2
};

struct RotateOptions {
  int64_t first = 0;  ///< of the channels that turn; below 0 from the end
  ChannelPairs pairs = ChannelPairs::interleaved;
  bool inverse = false;  ///< back by the same angles
};

/// Rotary positions: count = 2 * pairs channels of x [.., D] turn,
/// (a, b) -> (a cos - b sin, a sin + b cos); the others stay as they are.
///
/// cos and sin are [.., pairs] of any floating type, and their other axes
/// broadcast to those of x: [T, 1, pairs] for x [B, T, H, D]. They carry no
/// gradient. Computed in the accumulation type, rounded once to the type of x.
/// The derivative is the rotation by the opposite angles. Never a view of x.
///
/// torch.ops.longspan.rotate_channels(x, cos, sin, first, interleaved, inverse)
at::Tensor rotate_channels(const at::Tensor& x, const at::Tensor& cos,
                           const at::Tensor& sin, const RotateOptions& options);

}  // namespace longspan
