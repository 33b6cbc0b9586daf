#pragma once

#include <optional>
#include <span>
#include <string>

#include "longspan/ops/attend_tiles.h"
#include "longspan/ops/fused_segments.h"

namespace longspan {

/// Why torch's flash kernel cannot run such a call, or nothing.
///
/// Of torch's other fused kernels that return the log-sum-exp, "efficient" is
/// not used: its derivatives are wrong where keys and values have different
/// channels, and in float32 its errors are larger than our promise.
std::optional<std::string> why_not_flash(const AttentionInputs& inputs);

/// Runs the kernel. Only where why_not_flash() returns nothing.
void attend_tiles_flash(const AttentionInputs& inputs,
                        std::span<const FusedSegment> segments,
                        Accumulator& running);
void attend_tiles_backward_flash(const AttentionInputs& inputs,
                                 std::span<const FusedSegment> segments,
                                 const AttentionAnswer& answer,
                                 AttentionGradients& gradients);

}  // namespace longspan
