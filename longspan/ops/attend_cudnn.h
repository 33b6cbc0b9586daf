#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "longspan/ops/attend_tiles.h"
#include "longspan/ops/fused_segments.h"

namespace longspan {

/// Why cuDNN's attention, as torch has it, cannot run such a call whatever the
/// mask, or nothing. On Hopper it is about twice as fast as flash.
std::optional<std::string> why_not_cudnn(const AttentionInputs& inputs);

/// Segments of fewer queries or keys are left to others.
inline constexpr int64_t kLeastTokensOfCudnn = 1024;

/// Why cuDNN does not take these pairs, or nothing. It knows rectangles and
/// causal squares, and builds a plan for each shape in each thread, which takes
/// 60 ms and more: only long segments with round lengths are worth it, since
/// they come again.
std::optional<std::string> why_not_cudnn(const FusedSegment& segment);

/// Whether two tensors of a shape have the same strides where it matters. Where
/// q, out and dout do, the derivative copies none of them.
bool lie_alike(const at::Tensor& a, const at::Tensor& b);

/// Runs the kernel. Only where why_not_cudnn() returns nothing.
void attend_tiles_cudnn(const AttentionInputs& inputs,
                        std::span<const FusedSegment> segments,
                        Accumulator& running);
void attend_tiles_backward_cudnn(const AttentionInputs& inputs,
                                 std::span<const FusedSegment> segments,
                                 const AttentionAnswer& answer,
                                 AttentionGradients& gradients);

}  // namespace longspan
