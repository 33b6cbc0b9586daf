"""The loss of a vocabulary whose logits never exist whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longspan._arguments import (
    check_choice,
    check_number,
    check_optional_tensors,
    check_tensors,
    check_whole,
    wrong,
)

_REDUCTIONS = ("sum", "mean", "none")
#: Gradients that the sweep makes: bits of the operator's `wanted`.
_HIDDEN, _WEIGHT, _BIAS = 1, 2, 4


class TokenLosses(NamedTuple):
    """What `linear_cross_entropy` returns. Only `loss` has a gradient; of tokens that are
    ignored all is 0."""

    loss: Tensor  #: as `reduction` says
    losses: Tensor  #: of each token
    entropy: Tensor  #: of each token's distribution
    right: Tensor  #: whether the label has the greatest logit, for accuracy
    lse: Tensor  #: log of the sum of exp(logit), the z of z-loss


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "sum",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    *,
    tile: int | None = None,
) -> TokenLosses:
    """Cross entropy of `labels` [..] under the logits ``hidden @ weight.T + bias``, which exist
    for `tile` tokens at a time (fused linear cross entropy); chosen by the memory they take
    unless given.

    ``hidden`` is [.., channels], ``weight`` [words, channels] and ``bias`` [words], of one type.
    Logits are multiplied by `scale`, then capped: ``softcap * tanh(logits / softcap)``.
    `label_smoothing` is torch's; `z_loss` times the square of `lse` is added to every token's
    loss. Sums are float32 (float64 for float64).

    With `reduction` "sum" or "mean" gradients are made in the same sweep, for what requires
    them then: backward only multiplies. "none" gives every token's loss a gradient of its
    own, so backward makes the logits again. Every rank has the whole vocabulary; it is not
    sharded over a group.

    "mean" divides by the labels of this call that are not ignored, NaN where there are none, as
    torch's does. Of a share of a batch take the "sum", and the mean over the ranks from
    ``reduce_loss(found.loss, (labels != ignore_index).sum(), group)``.
    """
    who = "linear_cross_entropy"
    check_tensors(who, hidden=hidden, weight=weight, labels=labels)
    check_optional_tensors(who, bias=bias)
    for name, value in (("scale", scale), ("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        check_number(who, name, value)
    if softcap is not None:
        check_number(who, "softcap", softcap)
        if not softcap > 0:
            raise ValueError(f"{who}: `softcap` is {softcap}; expected a positive number, or None")
    check_whole(who, "ignore_index", ignore_index)
    check_choice(who, "reduction", reduction, _REDUCTIONS)
    if tile is not None:
        check_whole(who, "tile", tile)
        if tile < 1:
            raise ValueError(f"{who}: `tile` is {tile}; expected at least 1 token, or None")
    if hidden.dim() < 1 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{who}: `labels` is {list(labels.shape)} and `hidden` {list(hidden.shape)}; expected "
            f"a label for each of its rows of channels"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise wrong(who, "labels", labels, "int64")
    given = (
        hidden.reshape(labels.numel(), hidden.shape[-1]),
        weight,
        labels.reshape(-1).long(),
        bias,
        float(scale),
        0.0 if softcap is None else float(softcap),
        ignore_index,
        float(label_smoothing),
        float(z_loss),
        tile or 0,
    )
    ops = torch.ops.longspan
    if reduction == "none":
        losses, lse, entropy, right = ops.linear_token_losses(*given)
        loss = losses.view(labels.shape)
    else:
        wanted = 0
        if torch.is_grad_enabled():
            wanted += _HIDDEN * hidden.requires_grad + _WEIGHT * weight.requires_grad
            wanted += _BIAS * (bias is not None and bias.requires_grad)
        loss, losses, lse, entropy, right, *_ = ops.linear_cross_entropy(*given, wanted)
        if reduction == "mean":
            loss = loss / (labels != ignore_index).sum()
    shape = labels.shape
    return TokenLosses(
        loss,
        losses.detach().view(shape),
        entropy.view(shape),
        right.view(shape),
        lse.view(shape),
    )
