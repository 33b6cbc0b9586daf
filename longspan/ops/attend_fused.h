#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "longspan/ops/attend_tiles.h"

namespace longspan {

/// One call of a fused kernel: queries of a line against one run of keys. Key j
/// of query i is visible when j - i, counted from the last query and the last
/// key, lies in [-left, right]; -1 is no bound.
struct FusedSegment {
  int64_t row = 0;
  TokenRange queries, keys;
  int64_t left = -1, right = -1;
};

/// The same pairs as the line, in at most three segments.
std::vector<FusedSegment> fused_segments(const KeyLines& line);

/// Why torch's flash kernel cannot run this call, or nothing.
///
/// Its other fused kernels that return the log-sum-exp are not used. The
/// derivatives of "efficient" are wrong where keys and values have different
/// channels, and in float32 its errors are larger than our promise; cuDNN's
/// takes no windows.
std::optional<std::string> why_not_flash(const AttentionInputs& inputs);

/// Runs the kernel, if why_not_flash() had nothing to say.
void attend_tiles_flash(const AttentionInputs& inputs,
                        std::span<const FusedSegment> segments,
                        PartialAttention& running);
void attend_tiles_backward_flash(const AttentionInputs& inputs,
                                 std::span<const FusedSegment> segments,
                                 AttentionGradients& gradients);

}  // namespace longspan
