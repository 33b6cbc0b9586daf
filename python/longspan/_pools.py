"""What lies beyond the borders of a rank's share: the tokens before each of its runs, and
pools of tokens that straddle ranks. Plans are made once a batch from owners and documents;
nothing that moves depends on data."""

from __future__ import annotations

from typing import Any

import torch

from longspan import _C
from longspan._agreement import tells_ranks
from longspan._arguments import (
    check_flags,
    check_kind,
    check_optional_tensors,
    check_tensors,
    check_whole,
)
from longspan._attention import AttentionLayout
from longspan._group import ranks_of


class HaloPlan:
    """Which tokens lie before each run of this rank, and who sends what for them.

    A run is a contiguous piece of one document that a rank holds (`values.runs_of`). For
    each of them `tokens_before` gives the last `count` tokens of its document before it,
    zeros where the document has not begun. Made once a batch, outside of compiled code,
    from an `AttentionLayout`, of which only owners and packings count. Tensors are
    [L, ..], or [rows, L, ..] where `rows` is given.
    """

    def __init__(
        self, attention: AttentionLayout, count: int, *, group: Any = None, rows: int | None = None
    ) -> None:
        check_whole("HaloPlan", "count", count, 0)
        self._share = Share("HaloPlan", attention, group, rows)
        self.count = int(count)
        self._plan = _C.HaloPlan.of(
            self._share.ownership, self._share.masks, self.count, *self._share.place
        )
        #: Tokens that come to this rank, those of its own that its other runs need included.
        self.received = self._plan.received
        #: int64 [n, 4] on the CPU, as `exchange_needed` takes it.
        self.sends = self._plan.sends
        self._places = OnDevices(self._plan.places)
        self._seen: OnDevices | None = None

    @property
    def runs(self) -> list[tuple[int, _C.DocumentRun]]:
        """The rank's runs, each with its row of the batch, in the order of the result."""
        return self._plan.runs

    def places(self, device: torch.device) -> torch.Tensor:
        """For each row of the result its place among the tokens that come; int64
        [runs * count], `received` where there is none."""
        return self._places.on(device)

    def seen(self, device: torch.device) -> torch.Tensor:
        """What a window of count + 1 tokens shows each local token, itself last: places
        in [local tokens; tokens that come], -1 for none. int32 [tokens, count + 1]."""
        if self._seen is None:
            self._seen = OnDevices(self._plan.seen)
        return self._seen.on(device)

    def sent_bytes(self, direction: str, *, bytes_per_token: int) -> int:
        """Bytes that this rank sends to others, "forward" or "backward"."""
        return self._plan.sent_bytes(direction, bytes_per_token)

    def __repr__(self) -> str:
        return repr(self._plan)


@tells_ranks
def tokens_before(x: torch.Tensor, halo: HaloPlan, *, group: Any = None) -> torch.Tensor:
    """The `count` tokens before each run of this rank, the nearest one last, from however
    many ranks they lie on (halo exchange): [runs * count, ..], zeros where a document has
    not begun. Backward adds gradients home.

    ``x`` is [L, ..], the rank's tokens in local order, or [rows, L, ..].
    """
    ranks = ranks_of(group)
    check_tensors("tokens_before", x=x)
    check_kind("tokens_before", "halo", halo, HaloPlan, "a HaloPlan")
    before: torch.Tensor = torch.ops.longspan.tokens_before(
        halo._share.flat("tokens_before", "x", x),
        halo.sends,
        halo.places(x.device),
        halo.received,
        ranks.name,
    )
    return before


class PoolPlan:
    """Pools of `ratio` tokens: which there are, who makes them, and what must travel.

    Every whole window of `ratio` tokens, counted from the beginning of its document,
    makes one pool; with `overlap` a pool also looks at the window before its own. A pool
    belongs to the rank that holds the last token of its window. Made once a batch, outside
    of compiled code; `rows` as for a `HaloPlan`.
    """

    def __init__(
        self,
        attention: AttentionLayout,
        ratio: int,
        *,
        overlap: bool = False,
        group: Any = None,
        rows: int | None = None,
    ) -> None:
        check_whole("PoolPlan", "ratio", ratio, 1)
        check_flags("PoolPlan", overlap=overlap)
        self._share = Share("PoolPlan", attention, group, rows)
        self.ratio, self.overlap = int(ratio), overlap
        self._plan = _C.PoolPlan.of(
            self._share.ownership, self._share.masks, self.ratio, overlap, *self._share.place
        )
        #: Pools of each rank.
        self.sizes = self._plan.sizes
        #: Pools of this rank, and of all.
        self.here, self.total = self.sizes[self._share.place[0]], sum(self.sizes)
        lists, self.sends, merges, order, in_stream = self._plan.tables
        self._tables = [OnDevices(table) for table in (lists, merges, order)]
        self._in_stream = OnDevices(in_stream)
        self._positions = OnDevices(self._plan.positions)
        self._windows = [OnDevices(side) for side in self._plan.windows]
        self._ended: OnDevices | None = None
        self.whole, self.received = self._plan.whole, self._plan.received
        self.halves = self._plan.halves

    def positions(self, device: torch.device) -> torch.Tensor:
        """Of each pool of this rank the position of its first token in its document."""
        return self._positions.on(device)

    def windows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For each local token [start, end): the pools of its document that have ended,
        in the order of `gather_pools`; int32 [tokens] each, as `select_keys` takes them."""
        start, end = self._windows
        return start.on(device), end.on(device)

    def ended(self, device: torch.device) -> torch.Tensor:
        """The same as lists, -1 behind the last: int32 [tokens, most that one sees]."""
        if self._ended is None:
            self._ended = OnDevices(self._plan.ended)
        return self._ended.on(device)

    def tables(self, device: torch.device) -> list[torch.Tensor]:
        """Lists of slots, of parts to merge, and of pools in order: for `pool_tokens`."""
        return [table.on(device) for table in self._tables]

    def in_stream(self, device: torch.device) -> torch.Tensor:
        """Where each pool of the stream lies when the ranks' pools follow one another."""
        return self._in_stream.on(device)

    def sent_bytes(self, direction: str, *, channels: int, bytes_per_sum: int = 4) -> int:
        """Bytes that `pool_tokens` sends from this rank, "forward" or "backward"; pools
        have `channels`, and parts of them travel in the type of sums."""
        return self._plan.sent_bytes(direction, channels, bytes_per_sum)

    def gathered_bytes(self, direction: str, *, bytes_per_pool: int) -> int:
        """Bytes that `gather_pools` sends from this rank."""
        return self._plan.gathered_bytes(direction, bytes_per_pool)

    def __repr__(self) -> str:
        return repr(self._plan)


@tells_ranks
def pool_tokens(
    values: torch.Tensor,
    gates: torch.Tensor,
    bias: torch.Tensor | None,
    pools: PoolPlan,
    *,
    group: Any = None,
) -> torch.Tensor:
    """Softmax pooling of tokens over windows that begin at each document: this rank's
    pools in the order of the stream (row by row), [pools.here, C], as one rank gives them,
    whatever the ownership. Differentiable in all three.

    ``values`` and ``gates`` are [L, C] or [rows, L, C], ``bias`` [ratio, C] is added to
    the gates of every window. Each channel has a softmax of its own over the slots of a
    pool. With an overlap tensors have 2 C channels: the first C count for the pool of the
    window after a token's own, the others for its own window. Incomplete windows give
    nothing. Parts of pools that lie on several ranks travel to the owner, who merges them.
    """
    ranks = ranks_of(group)
    check_tensors("pool_tokens", values=values, gates=gates)
    check_optional_tensors("pool_tokens", bias=bias)
    check_kind("pool_tokens", "pools", pools, PoolPlan, "a PoolPlan")
    lists, merges, order = pools.tables(values.device)
    made: torch.Tensor = torch.ops.longspan.pool_tokens(
        pools._share.flat("pool_tokens", "values", values),
        pools._share.flat("pool_tokens", "gates", gates),
        bias,
        lists,
        pools.sends,
        merges,
        order,
        pools.whole,
        pools.received,
        pools.halves,
        ranks.name,
    )
    return made


@tells_ranks
def gather_pools(x: torch.Tensor, pools: PoolPlan, *, group: Any = None) -> torch.Tensor:
    """The pools of all ranks in the order of the stream (row by row): [pools.here, ..] ->
    [pools.total, ..]. Backward sums over the ranks."""
    ranks = ranks_of(group)
    check_tensors("gather_pools", x=x)
    check_kind("gather_pools", "pools", pools, PoolPlan, "a PoolPlan")
    if x.dim() == 0 or x.shape[0] != pools.here:
        raise ValueError(
            f"gather_pools: `x` is {list(x.shape)}; expected [{pools.here}, ..], a row for each "
            f"pool of this rank"
        )
    if ranks.size() > 1:
        x = torch.ops.longspan.all_gather_tokens(x, 0, pools.sizes, ranks.name)
    return x.index_select(0, pools.in_stream(x.device))


class OnDevices:
    """A tensor made on the host, and its copies where they were asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copies = {tensor.device: tensor}

    def on(self, device: torch.device) -> torch.Tensor:
        found = self._copies.get(device)
        if found is None:
            found = next(iter(self._copies.values())).to(device)
            self._copies[device] = found
        return found


class Share:
    """Whose tokens a plan is about, and how many there are of them."""

    def __init__(self, who: str, attention: Any, group: Any, rows: Any) -> None:
        check_kind(who, "attention", attention, AttentionLayout, "an AttentionLayout")
        if rows is not None:
            check_whole(who, "rows", rows, 0)
        ranks = ranks_of(group)
        self.ownership, self.masks = attention.ownership, attention.masks
        if ranks.size() != self.ownership.ranks:
            raise ValueError(
                f"{who}: the ownership is over {self.ownership.ranks} ranks but the group has "
                f"{ranks.size()}"
            )
        self.place = ranks.rank(), 1 if rows is None else rows
        tokens = self.ownership.local_tokens(ranks.rank())
        self.before = (tokens,) if rows is None else (rows, tokens)

    def flat(self, who: str, name: str, x: torch.Tensor) -> torch.Tensor:
        """Rows of a batch end to end."""
        axes = len(self.before)
        if tuple(x.shape[:axes]) != self.before:
            expected = ", ".join(map(str, self.before))
            raise ValueError(f"{who}: `{name}` is {list(x.shape)}; expected [{expected}, ..]")
        return x.flatten(0, 1) if axes == 2 else x
