#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace longspan {

/// How positions turn pairs of channels.
struct RotaryConfig {
  int64_t channels = 0;         ///< how many turn; even
  double theta = 10000;         ///< pair j turns by theta^(-2 j / channels)
  at::Tensor frequencies = {};  ///< [channels / 2] in place of theta (inv_freq)
  double scaling = 1;           ///< of cosines and sines (attention_scaling)
};

/// Cosines and sines of some positions, [n, channels / 2] each; without a
/// gradient.
struct RotaryAngles {
  at::Tensor cos, sin;
};

/// Of positions int64 [n], in float32, or in float64 for `type` float64.
RotaryAngles rotary_angles(const at::Tensor& positions,
                           const RotaryConfig& config, at::ScalarType type);

/// Which channels of x turn, and which way.
enum class RotaryPlace { first, last };
enum class RotaryTurn { forward, back };

/// x [n, .., D] with its first or last channels turned, 2j and 2j + 1 together.
/// Differentiable in x; computed in float32 (float64 for float64) and rounded
/// once.
at::Tensor rotated(const at::Tensor& x, const RotaryAngles& angles,
                   RotaryPlace place, RotaryTurn turn = RotaryTurn::forward);

}  // namespace longspan
