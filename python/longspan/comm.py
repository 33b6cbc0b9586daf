"""What the ranks of a group do together: differentiable collectives, agreement, and
seeds of their own. Every rank of the group calls the same collectives in the same order,
forward and backward; sizes are along an axis, one for each rank. A group
is whatever `Group.of` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longspan import _C
from longspan._agreement import in_layer, tells_ranks
from longspan._arguments import check_tensors, check_whole, speaking_as, whole_numbers
from longspan._C import needed_table, received_ranges
from longspan._group import Group, LostPeer, agree
from longspan._pools import HaloPlan, tokens_before
from longspan._randomness import rank_seed, seeded_ranks
from longspan._states import StatePlan, carry_states

__all__ = [
    "HaloPlan",
    "LostPeer",
    "StatePlan",
    "agree",
    "all_gather_tokens",
    "all_to_all_heads",
    "all_to_all_tokens",
    "carry_states",
    "exchange_needed",
    "in_layer",
    "needed_table",
    "rank_seed",
    "received_ranges",
    "reduce_scatter_tokens",
    "return_needed",
    "roll",
    "rotate",
    "seeded_ranks",
    "tokens_before",
]


#: Of one rank, where a number alone says how many there are.
_MOST_TOKENS = 1 << 28


@tells_ranks
def all_gather_tokens(
    x: torch.Tensor, *, axis: int, sizes: Sequence[int], group: Any
) -> torch.Tensor:
    """The tokens of all ranks, in the order of the ranks. Backward is
    `reduce_scatter_tokens`."""
    ranks = Group.of(group)
    check_tensors("all_gather_tokens", x=x)
    check_whole("all_gather_tokens", "axis", axis)
    here = whole_numbers("all_gather_tokens", "sizes", sizes)
    if ranks.size() == 1:
        return x
    return _call("all_gather_tokens", x, axis, here, ranks.name)


@tells_ranks
def reduce_scatter_tokens(
    x: torch.Tensor, *, axis: int, sizes: Sequence[int], group: Any
) -> torch.Tensor:
    """This rank's tokens of the sum over all ranks, taken in the order of the ranks
    and in float32 for half types. Backward is `all_gather_tokens`."""
    ranks = Group.of(group)
    check_tensors("reduce_scatter_tokens", x=x)
    check_whole("reduce_scatter_tokens", "axis", axis)
    here = whole_numbers("reduce_scatter_tokens", "sizes", sizes)
    if ranks.size() == 1:
        return x
    return _call("reduce_scatter_tokens", x, axis, here, ranks.name)


@tells_ranks
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
    check_tensors("all_to_all_heads", x=x)
    check_whole("all_to_all_heads", "token_axis", token_axis)
    check_whole("all_to_all_heads", "head_axis", head_axis)
    tokens = whole_numbers("all_to_all_heads", "token_sizes", token_sizes)
    heads = whole_numbers("all_to_all_heads", "head_sizes", head_sizes)
    if ranks.size() == 1:
        return x
    return _call("all_to_all_heads", x, token_axis, head_axis, tokens, heads, ranks.name)


@tells_ranks
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
    check_tensors("all_to_all_tokens", x=x)
    check_whole("all_to_all_tokens", "token_axis", token_axis)
    check_whole("all_to_all_tokens", "head_axis", head_axis)
    tokens = whole_numbers("all_to_all_tokens", "token_sizes", token_sizes)
    heads = whole_numbers("all_to_all_tokens", "head_sizes", head_sizes)
    if ranks.size() == 1:
        return x
    return _call("all_to_all_tokens", x, token_axis, head_axis, tokens, heads, ranks.name)


@tells_ranks
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
    check_tensors("rotate", x=x)
    check_whole("rotate", "hops", hops)
    check_whole("rotate", "axis", axis, -x.dim(), x.dim() - 1)
    given = None if sizes is None else whole_numbers("rotate", "sizes", sizes)
    if hops % ranks.size() == 0:
        return x
    here = [x.shape[axis]] * ranks.size() if given is None else given
    return _call("rotate", x, hops, axis, here, ranks.name)


@tells_ranks
def roll(
    x: torch.Tensor, shift: int, *, axis: int, sizes: Sequence[int], group: Any
) -> torch.Tensor:
    """Rolls the stream that the ranks hold as one run each: token t goes to token
    t + shift, around the end. Backward rolls by -shift."""
    ranks = Group.of(group)
    check_tensors("roll", x=x)
    check_whole("roll", "shift", shift)
    check_whole("roll", "axis", axis)
    here = whole_numbers("roll", "sizes", sizes)
    total = sum(here)
    if total == 0 or shift % total == 0:
        return x
    return _call("roll", x, axis, shift, here, ranks.name)


@tells_ranks
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
    check_tensors("exchange_needed", x=x, sends=sends)
    check_whole("exchange_needed", "axis", axis)
    if received is not None:
        check_whole("exchange_needed", "received", received)
    if received is None:
        with speaking_as("exchange_needed", "received_tokens"):
            received = _C.received_tokens(sends, ranks.rank())
    return _call("exchange_needed", x, axis, sends, received, ranks.name)


@tells_ranks
def return_needed(
    x: torch.Tensor, sends: torch.Tensor, *, axis: int, tokens: int, group: Any
) -> torch.Tensor:
    """The adjoint of `exchange_needed`: adds every piece to the local tokens it came
    from, of which there are `tokens` here."""
    ranks = Group.of(group)
    check_tensors("return_needed", x=x, sends=sends)
    check_whole("return_needed", "axis", axis)
    check_whole("return_needed", "tokens", tokens, 0, _MOST_TOKENS)
    return _call("return_needed", x, axis, sends, tokens, ranks.name)


def _call(name: str, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = getattr(torch.ops.longspan, name)(*arguments)
    return result
