#pragma once

#include <ATen/core/Tensor.h>

#include "longspan/kernels/token_loss/token_loss.h"

namespace longspan {

/// What the kernels of token_loss.h give, of a tile [tokens, words].
struct LossesOfTile {
  at::Tensor losses, lse, entropy, right;  ///< [tokens]
  at::Tensor dlogits;                      ///< [tokens, words]
};

/// The same by torch's operations, as devices without our kernel do it, and as
/// tests compare it. `bias` and `weights` may be undefined.
LossesOfTile token_losses_by_torch(const at::Tensor& logits,
                                   const at::Tensor& bias,
                                   const at::Tensor& labels,
                                   const at::Tensor& weights,
                                   const TokenLossOptions& options);

}  // namespace longspan
