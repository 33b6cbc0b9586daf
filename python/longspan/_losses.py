"""Losses over the tokens of all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from longspan._agreement import tells_ranks
from longspan._arguments import check_number, check_tensors, check_whole, is_whole, said, wrong
from longspan._gradients import stacked
from longspan._group import ranks_of


@tells_ranks
def reduce_loss(sum: torch.Tensor, count: torch.Tensor | int, group: Any = None) -> torch.Tensor:
    """The mean loss over the tokens of all ranks: the sum of all sums over the sum
    of all counts, the same on every rank; 0 where no rank counts a token.

    Its derivative is that of this rank's part alone, so that after backward on
    every rank parameter gradients **sum** over the group to those of the mean.
    """
    ranks = ranks_of(group)
    check_tensors("reduce_loss", sum=sum)
    if isinstance(count, torch.Tensor):
        check_tensors("reduce_loss", count=count)
        if count.dtype == torch.bool or count.is_complex():
            raise wrong("reduce_loss", "count", count, "the number of this rank's tokens")
        known = _value_of(count)
        if known is not None:
            _check_count(known)
    else:
        check_number("reduce_loss", "count", count)
        if is_whole(count):
            check_whole("reduce_loss", "count", count)
        _check_count(count)
        count = torch.tensor(count, device=sum.device)
    mean: torch.Tensor = torch.ops.longspan.reduce_loss(sum, count, ranks.name)
    return mean


def _value_of(count: torch.Tensor) -> Any:
    """None where the host would wait for it, and where transforms and tracing have no values."""
    plain = type(count) is torch.Tensor and count.is_cpu and count.numel() == 1
    if not plain or torch.compiler.is_compiling():
        return None
    try:
        return count.item()
    except RuntimeError:  # inside of vmap
        return None


def _check_count(count: Any) -> None:
    if not 0 <= count < math.inf:
        raise ValueError(
            f"reduce_loss: `count` is {count}; expected the number of this rank's tokens, 0 or more"
        )


@torch.no_grad()
@tells_ranks
def total_loss(loss: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The loss of the whole batch, for logs and for perplexity: the sum of the parts that
    ``model(**local).loss`` is on each rank, the same on every rank, without a gradient."""
    ranks = ranks_of(group)
    check_tensors("total_loss", loss=loss)
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"total_loss: `loss` is {said(loss)} {list(loss.shape)}; expected this rank's part, "
            f"one floating-point number"
        )
    return stacked(loss.detach(), ranks).sum(0)
