#include "longspan/ops/token_losses_by_torch.h"

#include <ATen/ATen.h>

#include <cmath>

namespace longspan {

LossesOfTile token_losses_by_torch(const at::Tensor& logits,
                                   const at::Tensor& bias,
                                   const at::Tensor& labels,
                                   const at::Tensor& weights,
                                   const TokenLossOptions& options) {
  const int64_t words = logits.size(1);
  at::Tensor x = bias.defined() ? logits + bias : logits.clone();
  x.mul_(options.scale);
  if (options.softcap != 0) {
    x = x.div_(options.softcap).tanh_().mul_(options.softcap);
  }
  const at::Tensor ignored = labels == options.ignored;
  const at::Tensor known = (labels >= 0).logical_and_(labels < words);
  const at::Tensor safe = labels.masked_fill(known.logical_not(), 0);
  const at::Tensor lse = at::logsumexp(x, {1});
  const at::Tensor p = (x - lse.unsqueeze(1)).exp_();
  const at::Tensor wanted = x.gather(1, safe.unsqueeze(1)).squeeze(1);
  at::Tensor losses = lse - wanted;
  if (options.smoothing != 0) {
    losses = losses + options.smoothing * (wanted - x.mean(1));
  }
  losses = losses + options.z_loss * lse.square();
  const at::Tensor seen = at::where(p > 0, p * (x - lse.unsqueeze(1)), 0);
  at::Tensor d = p * (1 + 2 * options.z_loss * lse).unsqueeze(1);
  d.sub_(options.smoothing / static_cast<double>(words));
  d.scatter_add_(
      1, safe.unsqueeze(1),
      at::full_like(safe, options.smoothing - 1, d.options()).unsqueeze(1));
  if (options.softcap != 0) d.mul_(1 - (x / options.softcap).square());
  d.mul_(options.scale);
  if (weights.defined()) d.mul_(weights.unsqueeze(1));
  const auto said = [&](const at::Tensor& t) {
    const at::Tensor bad = known.logical_or(ignored).logical_not();
    return t.masked_fill(bad, NAN).masked_fill(ignored, 0);
  };
  const at::Tensor silent = ignored.unsqueeze(1);
  const at::Tensor bad = known.logical_or(ignored).logical_not().unsqueeze(1);
  return {.losses = said(losses),
          .lse = said(lse),
          .entropy = said(-seen.sum(1)),
          .right = (x.argmax(1) == labels).logical_and_(known),
          .dlogits = d.masked_fill(bad, NAN).masked_fill(silent, 0)};
}

}  // namespace longspan
