"""How the work of attention lies on the ranks: pairs of a query and a key, for the layout of a
batch and for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from longspan import _C
from longspan._attention import plan
from longspan._batch import Reading
from longspan._local_batch import LocalBatch
from longspan._models import Parallelized
from longspan._strategy import Strategy


@dataclass(frozen=True)
class Balance:
    """How the work of attention lies on all ranks, and what other layouts would give."""

    layout: str
    work: tuple[int, ...]  #: of each rank: pairs of a query and a key, of all heads and layers
    pads: float  #: for one real token
    others: dict[str, tuple[float, float]]  #: heaviest rank and pads of other layouts
    #: Which heads a team cannot share evenly, in words; "" where there are none.
    uneven: str = ""

    @property
    def heaviest(self) -> float:
        """What the busiest rank has to do, for one of the mean."""
        return _heaviest(self.work)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"heaviest": self.heaviest}

    def __str__(self) -> str:
        most = self.work.index(max(self.work))
        text = (
            f"balance of {self.layout}: the heaviest rank ({most}) has {self.heaviest:.2f} x the "
            f"mean, {100 * self.pads:.1f} % pads"
        )
        text += f"; {self.uneven}" if self.uneven else ""
        if self.others:
            best = min(self.others, key=lambda name: self.others[name])
            heaviest, pads = self.others[best]
            text += f"; {best} would give {heaviest:.2f} x, {100 * pads:.1f} % pads"
        return text


def balance_of(cut: _C.Cut, batch: Any, state: Parallelized) -> Balance:
    """Of a batch, or of the share that `shard` made of one, which has its documents."""
    if isinstance(batch, LocalBatch):
        rows = _rows_of(cut)
    else:
        rows, _ = Reading(who="explain").rows_of(batch)
    dealt = _dealt(state, cut.ranks)
    others: dict[str, tuple[float, float]] = {}
    mine = "an Ownership"
    for named in _C.named_layouts():
        packed, owners = _C.lay_out(rows, named.name, cut.ranks)
        if owners == cut.ownership and packed.form == cut.form:
            mine = named.name
            continue
        work = _work(packed.packings, owners, dealt)
        others[named.name] = _heaviest(work), _pads(packed.packings)
    work = _work(cut.packings, cut.ownership, dealt)
    return Balance(mine, work, _pads(cut.packings), others, _uneven(dealt))


@dataclass(frozen=True)
class _Dealt:
    """The heads of a layer, as the members of each team of ranks compute them."""

    window: int | None
    ratio: int  #: of tokens to keys
    heads: tuple[int, ...]


def _dealt(state: Parallelized, ranks: int) -> Counter[_Dealt]:
    """How often each comes. Selected keys are as many as slots, and pools as many as tokens
    before have made; teams are for other layers."""
    found: Counter[_Dealt] = Counter()
    for layer in state.layers:
        window = layer.window if layer.selects is None else layer.selects.slots
        if layer.recurrence is not None:
            window = 1  # as much for every token
        alone = (layer.selects, layer.pools, layer.recurrence) != (None, None, None)
        team = 1 if alone else _team(state.strategy, ranks, layer.key_heads)
        found[_Dealt(window, 1, _shares(layer.heads, team))] += 1
        if layer.pools is not None and layer.pools.ratio is not None:
            ratio, selects = layer.pools.ratio, layer.pools.selects
            seen = None if selects is None else selects.slots * ratio
            found[_Dealt(seen, ratio, (layer.heads,))] += 1
    return found


def _team(strategy: Strategy, ranks: int, key_heads: int) -> int:
    """Ranks that share heads, as a plan has it, whatever the tokens."""
    one_each = _C.Ownership.contiguous(ranks, ranks)
    return plan(one_each, strategy=strategy, key_heads=key_heads).strategy.head_ranks or 1


def _shares(heads: int, members: int) -> tuple[int, ...]:
    """Heads of each member: runs that differ by one at most, with the borders of the plan."""
    borders = [heads * before // members for before in range(members + 1)]
    return tuple(end - begin for begin, end in pairwise(borders))


def _uneven(dealt: Counter[_Dealt]) -> str:
    """Which heads their team cannot share evenly."""
    found = dict.fromkeys(one.heads for one in dealt if min(one.heads) != max(one.heads))
    said = (
        f"{sum(heads)} heads over teams of {len(heads)} ranks are {min(heads)} or {max(heads)} each"
        for heads in found
    )
    return ", ".join(said)


def _rows_of(cut: _C.Cut) -> _C.RowBatch:
    """Rows with the documents of a cut, of tokens that say nothing."""
    rows = [list(packing.lengths) for packing in cut.packings]
    most = max(len(row) for row in rows)
    lengths = torch.tensor([row + [-1000] * (most - len(row)) for row in rows])
    ids = torch.zeros(len(rows), max(sum(row) for row in rows), dtype=torch.int64)
    return Reading(who="explain").rows_of({"input_ids": ids, "seq_lens": lengths})[0]


def _pads(packings: Sequence[_C.Packing]) -> float:
    real = sum(packing.real_tokens for packing in packings)
    return sum(packing.tokens for packing in packings) / max(real, 1) - 1.0


def _work(
    packings: Sequence[_C.Packing], owners: _C.Ownership, dealt: Counter[_Dealt]
) -> tuple[int, ...]:
    """Pairs of every rank, of all heads and layers. A team has the queries of all members."""
    totals = [0] * owners.ranks
    for one, layers in dealt.items():
        team = len(one.heads)
        for packing in packings:
            causal = one.window is None
            mask = _C.Mask.causal(packing) if causal else _C.Mask.sliding(packing, one.window or 1)
            pairs = [work.pairs for work in _C.work_per_rank(mask, owners)]
            for rank in range(owners.ranks):
                member = rank % team
                queries = sum(pairs[rank - member : rank - member + team])
                totals[rank] += layers * one.heads[member] * queries // one.ratio
    return tuple(totals)


def _heaviest(work: Sequence[int]) -> float:
    return max(work) * len(work) / max(sum(work), 1)
