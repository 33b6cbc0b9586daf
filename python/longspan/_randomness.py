"""Random numbers outside of attention: ranks that hold different tokens must draw
different ones, whatever else they do alike."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from longspan._arguments import said
from longspan._group import ranks_of

_WORD = (1 << 64) - 1


def rank_seed(seed: int, group: Any = None, *streams: int) -> int:
    """A seed of this rank's own: always the same for the same seed, rank in the
    group and `streams` (a data-parallel rank, a step), and unrelated for others. One
    rank alone is rank 0. Fits torch, numpy and Python: 0 to 2**63 - 1."""
    ranks = ranks_of(group)
    state = 0
    for number in (seed, ranks.rank(), *streams):
        try:
            word = operator.index(number)
        except TypeError:
            raise TypeError(f"rank_seed: expected whole numbers, got {said(number)}") from None
        state = _mixed(state ^ (word & _WORD))
    return state >> 1


def seed_ranks(seed: int, group: Any = None, *streams: int) -> int:
    """Seeds torch's generators (of the CPU and of every device) with `rank_seed`,
    which it returns. Parameters must exist by then: they are drawn from one seed that
    all ranks share."""
    own = rank_seed(seed, group, *streams)
    torch.manual_seed(own)
    return own


@contextmanager
def seeded_ranks(seed: int, group: Any = None, *streams: int) -> Iterator[int]:
    """`seed_ranks` inside; afterwards the generators of the CPU and of the current
    CUDA device are as they were before."""
    own = rank_seed(seed, group, *streams)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(own)
        if devices:
            torch.cuda.manual_seed(own)
        yield own


def _mixed(state: int) -> int:
    """One step of the splitmix64 generator: a bijection in which every bit of the
    state reaches every bit of the result."""
    state = (state + 0x9E3779B97F4A7C15) & _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)
