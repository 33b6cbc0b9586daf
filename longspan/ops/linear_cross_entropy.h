#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace longspan {

/// How logits are made from products, and losses from logits.
struct CrossEntropyOptions {
  double scale = 1;    ///< of the logits
  double softcap = 0;  ///< softcap * tanh(logits / softcap); 0: none
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;  ///< times the square of lse, added to a token's loss
  int64_t tile = 0;   ///< tokens whose logits exist at a time; 0: chosen
};

/// What a sweep over the tokens finds; all in the accumulation type of hidden.
/// A token whose label is ignored has 0 in all.
struct TokenLosses {
  at::Tensor loss;     ///< scalar: the sum over the tokens
  at::Tensor losses;   ///< [tokens]
  at::Tensor lse;      ///< [tokens], log of the sum of exp(logit)
  at::Tensor entropy;  ///< [tokens], of the distribution
  at::Tensor right;    ///< bool [tokens]: the label has the greatest logit,
                       ///< equal ones go to the lower word
};

/// The cross entropy of labels [tokens] under logits hidden weight^T + bias,
/// which never exist whole: tiles of tokens are multiplied, reduced to their
/// losses, and, where a gradient will be asked for, multiplied on at once, so
/// that backward has no product left to do. `loss` is differentiable, once, in
/// hidden [tokens, channels], weight [words, channels] and bias [words]; the
/// rest is for the log.
///
/// The vocabulary is not sharded over ranks: every rank has all of `weight`.
///
/// torch.ops.longspan.linear_cross_entropy(hidden, weight, labels, bias, scale,
///   softcap, ignore_index, label_smoothing, z_loss, tile, wanted): `wanted` is
/// the sum of 1, 2 and 4 for a gradient of hidden, weight and bias.
TokenLosses linear_cross_entropy(
    const at::Tensor& hidden, const at::Tensor& weight,
    const at::Tensor& labels,
    const std::optional<at::Tensor>& bias = std::nullopt,
    const CrossEntropyOptions& options = {});

/// The losses of the tokens, each with a gradient of its own: backward makes
/// the products again. `loss` is left undefined.
///
/// torch.ops.longspan.linear_token_losses(hidden, weight, labels, bias, scale,
///   softcap, ignore_index, label_smoothing, z_loss, tile)
TokenLosses linear_token_losses(
    const at::Tensor& hidden, const at::Tensor& weight,
    const at::Tensor& labels,
    const std::optional<at::Tensor>& bias = std::nullopt,
    const CrossEntropyOptions& options = {});

}  // namespace longspan
