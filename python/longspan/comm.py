"""What the ranks of a group do together: differentiable collectives, agreement, and
seeds of their own. Every rank of the group calls the same collectives in the same order,
forward and backward; sizes are along an axis, one for each rank. A group
is whatever `Group.of` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longspan import _C
from longspan._C import needed_table, received_ranges
from longspan._group import Group, LostPeer, agree
from longspan._randomness import rank_seed, seeded_ranks

__all__ = [
    "LostPeer",
    "agree",
    "all_gather_tokens",
    "all_to_all_heads",
    "all_to_all_tokens",
    "exchange_needed",
    "needed_table",
    "rank_seed",
    "received_ranges",
    "reduce_scatter_tokens",
    "return_needed",
    "roll",
    "rotate",
    "seeded_ranks",
]


def all_gather_tokens(
    x: torch.Tensor, *, axis: int, sizes: Sequence[int], group: Any
) -> torch.Tensor:
    """The tokens of all ranks, in the order of the ranks. Backward is
    `reduce_scatter_tokens`."""
    ranks = Group.of(group)
    if ranks.size() == 1:
        return x
    return _call("all_gather_tokens", x, axis, list(sizes), ranks.name)


def reduce_scatter_tokens(
    x: torch.Tensor, *, axis: int, sizes: Sequence[int], group: Any
) -> torch.Tensor:
    """This rank's tokens of the sum over all ranks, taken in the order of the ranks
    and in float32 for half types. Backward is `all_gather_tokens`."""
    ranks = Group.of(group)
    if ranks.size() == 1:
        return x
    return _call("reduce_scatter_tokens", x, axis, list(sizes), ranks.name)


def all_to_all_heads(
    x: torch.Tensor,
    *,
    token_axis: int,
    head_axis: int,
    token_sizes: Sequence[int],
    head_sizes: Sequence[int],
    group: Any,
) -> torch.Tensor:
    """From this rank's tokens with all heads to all tokens with this rank's heads
    (the all-to-all of DeepSpeed-Ulysses).
    Inverse and backward are `all_to_all_tokens`."""
    ranks = Group.of(group)
    if ranks.size() == 1:
        return x
    return _call(
        "all_to_all_heads",
        x,
        token_axis,
        head_axis,
        list(token_sizes),
        list(head_sizes),
        ranks.name,
    )


def all_to_all_tokens(
    x: torch.Tensor,
    *,
    token_axis: int,
    head_axis: int,
    token_sizes: Sequence[int],
    head_sizes: Sequence[int],
    group: Any,
) -> torch.Tensor:
    """From all tokens with this rank's heads to this rank's tokens with all heads.
    Inverse and backward are `all_to_all_heads`."""
    ranks = Group.of(group)
    if ranks.size() == 1:
        return x
    return _call(
        "all_to_all_tokens",
        x,
        token_axis,
        head_axis,
        list(token_sizes),
        list(head_sizes),
        ranks.name,
    )


def rotate(
    x: torch.Tensor,
    hops: int = 1,
    *,
    group: Any,
    axis: int = 0,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """The tensor of rank r goes to rank r + hops; without `sizes` all ranks have the
    same shape. Backward rotates by -hops."""
    ranks = Group.of(group)
    if hops % ranks.size() == 0:
        return x
    here = [x.shape[axis]] * ranks.size() if sizes is None else list(sizes)
    return _call("rotate", x, hops, axis, here, ranks.name)


def roll(
    x: torch.Tensor, shift: int, *, axis: int, sizes: Sequence[int], group: Any
) -> torch.Tensor:
    """Rolls the stream that the ranks hold as one run each: token t goes to token
    t + shift, around the end. Backward rolls by -shift."""
    total = sum(sizes)
    if total == 0 or shift % total == 0:
        return x
    return _call("roll", x, axis, shift, list(sizes), Group.of(group).name)


def exchange_needed(
    x: torch.Tensor,
    sends: torch.Tensor,
    *,
    axis: int,
    group: Any,
    received: int | None = None,
) -> torch.Tensor:
    """Sends ranges of tokens to the ranks that need them. `sends` is int64 [n, 4] on the
    CPU, equal on all ranks, with rows (from, to, local begin, length); `needed_table`
    makes it from a mask. The result has the pieces for this rank, by sender and then
    by row. Under torch.compile give `received`, its number of tokens."""
    ranks = Group.of(group)
    if received is None:
        received = _C.received_tokens(sends, ranks.rank())
    return _call("exchange_needed", x, axis, sends, received, ranks.name)


def return_needed(
    x: torch.Tensor, sends: torch.Tensor, *, axis: int, tokens: int, group: Any
) -> torch.Tensor:
    """The adjoint of `exchange_needed`: adds every piece to the local tokens it came
    from, of which there are `tokens` here."""
    return _call("return_needed", x, axis, sends, tokens, Group.of(group).name)


def _call(name: str, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = getattr(torch.ops.longspan, name)(*arguments)
    return result
