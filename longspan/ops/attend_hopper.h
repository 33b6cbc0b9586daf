#pragma once

#include <optional>
#include <span>
#include <string>

#include "longspan/ops/attend_tiles.h"

namespace longspan {

/// Why our own kernel for Hopper cannot run such a call, or nothing. It takes
/// any lines.
std::optional<std::string> why_not_hopper(const AttentionInputs& inputs,
                                          std::span<const KeyLines> lines);
std::optional<std::string> why_not_hopper_backward(
    const AttentionInputs& inputs, std::span<const KeyLines> lines);

/// Runs the kernel. Only where why_not_hopper() returns nothing.
void attend_tiles_hopper(const AttentionInputs& inputs,
                         std::span<const KeyLines> lines, Accumulator& running);
void attend_tiles_backward_hopper(const AttentionInputs& inputs,
                                  std::span<const KeyLines> lines,
                                  const AttentionAnswer& answer,
                                  AttentionGradients& gradients);

}  // namespace longspan
