#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/models/layer_share.h"

namespace longspan {

/// What a gated delta rule reads, of this rank's tokens.
struct DeltaTensors {
  at::Tensor q;     ///< [tokens, Hk, K]; Hk divides H, as in grouped heads
  at::Tensor k;     ///< [tokens, Hk, K]
  at::Tensor v;     ///< [tokens, H, V]
  at::Tensor g;     ///< [tokens, H], not above 0: the log of the decay
  at::Tensor beta;  ///< [tokens, H]: how much of the old value is written over
};

struct DeltaOptions {
  bool normalize = true;  ///< q and k to length 1, with 1e-6 under the root
  int64_t chunk = 64;
};

/// The gated delta rule (Qwen3-Next, Gated DeltaNet) over the ranks of a group:
/// what one rank gives for these tokens when it reads each document by itself,
/// token by token, with S [K, V] for each head begun with zeros:
///
///   S = exp(g_t) S_{t-1}
///   S_t = S + beta_t k_t (v_t - S' k_t)'
///   out_t = S_t' q_t / sqrt(K)
///
/// Returns [tokens, H, V] like v; 0 for pads. Summed in float32 (float64 for
/// float64).
///
/// Computed in chunks of at most `chunk` tokens. Over ranks one pair travels
/// for each run, however long: a state [K, V] and a matrix [K, K] a head
/// (carry_states). Differentiable in all five, with the gradient contract of
/// mamba2_scan.
at::Tensor delta_rule(const DeltaTensors& tensors, const LayerShare& share,
                      const DeltaOptions& options = {});

}  // namespace longspan
