#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "longspan/ops/attend_tiles.h"
#include "longspan/ops/fused_segments.h"

namespace longspan {

/// The pairs of a call, by the kernel of torch that takes them. It follows from
/// shapes, the mask and torch's settings, not from values.
struct FusedChoice {
  std::optional<std::string>
      why_not_hopper;  ///< our own kernel takes all pairs
  std::vector<FusedSegment> cudnn, flash;
  std::string why_flash;  ///< and not cuDNN, for the first that flash takes
  std::optional<std::string> why_blocked;  ///< then both lists are empty

  static FusedChoice of(const AttentionInputs& inputs,
                        std::span<const KeyLines> lines);
  /// `is_all`: no other call adds to these derivatives.
  static FusedChoice of_backward(const AttentionInputs& inputs,
                                 std::span<const KeyLines> lines, bool is_all);
  static FusedChoice of_torch(const AttentionInputs& inputs,
                              std::span<const KeyLines> lines,
                              std::string why_not_hopper);

  /// "cudnn", "flash, not cudnn: it takes no windows", "cudnn, and flash for 2
  /// of 3 parts: ...", "blocked, not flash: it has no softcap".
  std::string to_string() const;
};

/// On CUDA: in the kernels of the choice, or block by block.
void attend_tiles_fused(const AttentionInputs& inputs,
                        std::span<const KeyLines> lines, Accumulator& running);
void attend_tiles_backward_fused(const AttentionInputs& inputs,
                                 std::span<const KeyLines> lines,
                                 const AttentionAnswer& answer,
                                 AttentionGradients& gradients);

}  // namespace longspan
