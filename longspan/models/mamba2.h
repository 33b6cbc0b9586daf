#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/models/layer_share.h"

namespace longspan {

/// What the scan of Mamba 2 reads, of this rank's tokens: convolved, and with
/// steps of time that are past their bias and softplus.
struct Mamba2Tensors {
  at::Tensor x;   ///< [tokens, H, P]
  at::Tensor dt;  ///< [tokens, H], not below 0
  at::Tensor A;   ///< [H], below 0
  at::Tensor B;   ///< [tokens, G, N]; G divides H
  at::Tensor C;   ///< [tokens, G, N]
  at::Tensor D;   ///< [H], or undefined
};

/// The scan of Mamba 2 (SSD) over the ranks of a group: what one rank gives for
/// these tokens when it reads each document by itself, token by token,
///
///   S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t',   out_t = S_t C_t + D x_t
///
/// with S [P, N] for each head, begun with zeros by every document. Returns
/// [tokens, H, P] like x; 0 for pads. Summed in float32 (float64 for float64).
///
/// Computed in chunks of at most `chunk` tokens. Over ranks one pair travels
/// for each run, however long: a state and one number a head (carry_states).
/// Differentiable in all six. When every rank backpropagates the loss of its
/// own tokens, gradients are those of the sum of all losses; those of A and D
/// **sum** over the ranks. Every rank must run backward.
at::Tensor mamba2_scan(const Mamba2Tensors& tensors, const LayerShare& share,
                       int64_t chunk = 64);

}  // namespace longspan
