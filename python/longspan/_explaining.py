"""What a model under context parallelism will compute and send, before it does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

import torch

from longspan import _C, _transformers
from longspan._admission import with_tails
from longspan._agreement import Agreement
from longspan._arguments import (
    check_choice,
    check_kind,
    check_whole,
    is_dense,
    is_whole,
    said,
    speaking_as,
    whole_numbers,
)
from longspan._balance import Balance, balance_of
from longspan._batch import Place, Reading, share
from longspan._group import ranks_of
from longspan._kernels import which_kernel
from longspan._local_batch import KEYWORD, LocalBatch, real_tokens
from longspan._memory import DEVICES, OPTIMIZERS, Memory, Wishes, estimate, fits_in, learns
from longspan._model_batch import check_group
from longspan._models import (
    AttentionLayer,
    Groups,
    Parallelized,
    Pooling,
    Recurrence,
    Selection,
    check_layout,
    find_state,
    parallelize,
)
from longspan._strategy import Strategy
from longspan._tables import aligned, html_table
from longspan._tiles import Tiles, check_offload

#: Of lengths in place of a batch; more are a slip in a number.
_MOST_TOKENS = 1 << 28
_TITLES: tuple[str, ...] = (
    "layer",
    "heads",
    "dims",
    "sees",
    "strategy",
    "steps",
    "pairs",
    "sends forward",
    "backward",
    "kernel",
)


@dataclass(frozen=True)
class LayerCost:
    """One attention layer on this rank, for one batch."""

    layer: AttentionLayer
    strategy: str
    steps: int
    #: Pairs of a query and a key that it sees, of one head.
    pairs: int
    sent_forward: int  #: bytes
    sent_backward: int  #: bytes
    #: Which kernel computes it, and why a faster one does not.
    kernel: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Explanation:
    """What each attention layer costs on one rank; print it for a table, which it is in a
    notebook."""

    rank: int
    ranks: int
    tokens: int  #: local ones
    layers: tuple[LayerCost, ...]
    proof: str = ""  #: what let the model in; "" where it is not parallelized yet
    tiled: tuple[str, ...] = ()  #: what is made in parts (docs/memory.md), and what is not
    routers: tuple[str, ...] = ()  #: what losses of routers would send, beside the layers
    #: Over all ranks; None for one.
    balance: Balance | None = None
    device: str = ""  #: whose memory was asked for
    memory: Memory | None = None
    no_memory: str = ""  #: why it is not known

    def to_json(self) -> dict[str, Any]:
        """For machines: plain dictionaries, lists and numbers."""
        return {
            "rank": self.rank,
            "ranks": self.ranks,
            "tokens": self.tokens,
            "layers": [cost.to_json() for cost in self.layers],
            "proof": self.proof,
            "tiled": list(self.tiled),
            "routers": list(self.routers),
            "balance": None if self.balance is None else self.balance.to_json(),
            "device": self.device,
            "memory": None if self.memory is None else asdict(self.memory),
            "no_memory": self.no_memory,
            "fits": self.fits,
        }

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; None where either is not known."""
        total = DEVICES.get(self.device)
        return None if self.memory is None or total is None else self.memory.peak <= total * 10**9

    @property
    def _head(self) -> str:
        return f"rank {self.rank} of {self.ranks}, {self.tokens} tokens"

    def _rows(self) -> list[tuple[str, ...]]:
        """Layers that cost the same share a row."""
        rows: dict[tuple[str, ...], list[str]] = {}
        for cost in self.layers:
            rows.setdefault(_columns(cost), []).append(cost.layer.name)
        table = []
        for columns, names in rows.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            table.append((names[0] + others, *columns))
        return table

    def _repr_html_(self) -> str:
        table = html_table(self._head, _TITLES, self._rows())
        below = "".join(f"<p>{escape(line)}</p>" for line in self._remarks())
        return f"<div>{table}{below}</div>"

    def __str__(self) -> str:
        table = [_TITLES, *self._rows()]
        return "\n".join([self._head, *aligned(table), *self._remarks()])

    def _remarks(self) -> list[str]:
        last = [f"let in: {self.proof}"] if self.proof else []
        last += [*self.tiled, *self.routers]
        if self.balance is not None:
            last.append(str(self.balance))
        if self.no_memory:
            last.append(f"memory: not known, since {self.no_memory}")
        if self.memory is not None:
            parts = ", ".join(f"{name} {_bytes(size)}" for name, size in self.memory.rows())
            last.append(f"memory: {parts}")
            told = fits_in(self.memory, self.device)
            last += [told] if told else []
        return last


class _Unsaid:
    """An option that nobody gave: as the model has it, or as `parallelize` has it by default."""

    def __repr__(self) -> str:
        return "as it is"


_UNSAID = _Unsaid()


def explain(
    model: torch.nn.Module,
    batch: Mapping[str, Any] | Sequence[int] | torch.Tensor | int,
    group: Any = None,
    *,
    ranks: int | None = None,
    rank: int | None = None,
    device: str | None = None,
    strategy: str | Strategy | _Unsaid = _UNSAID,
    layout: str | _C.Ownership | _Unsaid = _UNSAID,
    dtype: torch.dtype | None = None,
    optimizer: str = "adamw",
    shards: int = 1,
    loss_tile: str | int | _Unsaid | None = _UNSAID,
    mlp_tile: int | _Unsaid | None = _UNSAID,
    offload: str | _Unsaid | None = _UNSAID,
) -> Explanation:
    """What the attention layers of `model` will compute and send on this rank for
    this batch: strategy, bytes, kernel, and why not a faster one. Nothing is sent.

    `batch` is what a collator gives, what `shard` made of it, or the lengths of the documents of
    one row: [4096, 512, 512], also as a tensor, or 1_000_000. A model that is not parallelized yet
    is explained as `parallelize` would set it up with `group`, `strategy` and `layout`. With
    `ranks`, of which `rank` is asked for (0), no group is needed, and the model may be on the meta
    device. `dtype` is what layers will compute in where a wrapper casts (FSDP2's policy); by
    default autocast's, or the parameters'. Of a model on the meta device the kernel is the one
    that this CPU would run.

    `device` ("h200", "h100", "a100", "b200", "cpu") asks for the memory of a training step too,
    by part and at its peak: the model's own code runs on the meta device, with activation
    checkpointing where that is on. `optimizer` ("adamw", "momentum", "sgd") says what is kept
    for a parameter, and `shards` over how many ranks fully_shard spreads all that.

    `strategy`, `layout`, `loss_tile`, `mlp_tile` and `offload` are those of `parallelize`, for a
    model that it was not called on. One that it was called on has them; others are refused.
    """
    check_kind("explain", "model", model, torch.nn.Module, "a torch.nn.Module")
    if dtype is not None:
        check_kind("explain", "dtype", dtype, torch.dtype, "a dtype of torch")
    if device is not None:
        check_choice("explain", "device", device, (*DEVICES, "cpu"))
    check_choice("explain", "optimizer", optimizer, tuple(OPTIMIZERS))
    check_whole("explain", "shards", shards, 1)
    place = _place(group, ranks, rank)
    state = find_state(model)
    parallelized = state is not None
    over = ranks_of(group) if state is None else state.group
    said_of = {
        "strategy": strategy,
        "layout": layout,
        "loss_tile": loss_tile,
        "mlp_tile": mlp_tile,
        "offload": offload,
    }
    wish = _Wish.of(said_of, state, over.size() if place is None else place.ranks)
    if state is None:
        layers = _transformers.attention_layers(model)
        state = Parallelized(over, wish.strategy, wish.layout, layers)
    else:
        check_group("explain", state, group)
    if wish.tiles.offload is not None and (device is not None or not parallelized):
        for part in _transformers.whole_models(model):
            check_offload("explain", part)
    given: Any = _of_lengths(batch)
    if isinstance(given, LocalBatch):
        if layout is not _UNSAID and not parallelized:
            raise ValueError(
                "explain: the batch was cut by shard, so `layout` would go unheard; leave it out, "
                "or give the batch as it was before"
            )
        if place is not None:
            raise ValueError(
                "explain: the batch was cut by shard for its rank; leave `ranks` and `rank` out, "
                "or give the batch as it was before"
            )
        local = given
    else:
        nobody = Agreement("explain", None)
        reading = Reading(who="explain")
        # Plans of layers ask a group; what we need of them is made below.
        cutting = state
        if place is not None:
            cutting = replace(state, layers=[], layout=state.layout_for())
        local = share(given, place or Place.in_group(state.group), nobody, cutting, reading)
    cut = local.cut
    groups = local[KEYWORD].groups if KEYWORD in local else ()
    dtypes = _dtypes(model) if dtype is None else {}
    home = next(model.parameters()).device
    nowhere = home.type == "meta"
    if nowhere:  # kernels are chosen by device, so ask for the one that is here
        home = torch.device("cpu")
    known: dict[Any, LayerCost] = {}  # layers that differ in their names alone cost the same
    for layer in state.layers:
        kind = replace(layer, name=""), dtype or dtypes[layer.name]
        if kind not in known:
            known[kind] = _cost(layer, state, cut, groups, kind[1], home)
    costs = tuple(
        replace(known[replace(layer, name=""), dtype or dtypes[layer.name]], layer=layer)
        for layer in state.layers
    )
    if nowhere:
        costs = tuple(replace(cost, kernel=f"on this CPU {cost.kernel}") for cost in costs)
    said = Explanation(
        cut.rank,
        cut.ranks,
        cut.local_tokens,
        costs,
        state.proof,
        tuple(state.tiled),
        _transformers.losses_of_routers(model, cut.ranks),
    )
    if cut.ranks > 1:
        said = replace(said, balance=balance_of(cut, given, state))
    if device is None:
        return said
    if not learns(model, local):
        why = f"nothing in {type(model).__name__} learns: no parameter requires a gradient"
        return replace(said, device=device, no_memory=why)
    try:
        tiles = state.tiles if parallelized else with_tails(model, "auto", wish.tiles)
        wishes = Wishes(state.strategy, dtype, optimizer, shards, tiles, device == "cpu")
        memory = estimate(model, local, state.layers, wishes)
    except Exception as error:  # the code of others, without values
        why = (
            f"{type(model).__name__} does not run without values ({type(error).__name__}: {error})"
        )
        return replace(said, device=device, no_memory=why)
    return replace(said, device=device, memory=memory)


@dataclass(frozen=True)
class _Wish:
    """What `parallelize` was told, or would be."""

    strategy: Strategy
    layout: str | _C.Ownership
    tiles: Tiles

    @staticmethod
    def of(given: Mapping[str, Any], state: Parallelized | None, ranks: int) -> _Wish:
        """From the options of `explain`, where a parallelized model has its own."""
        has = _options_of(state)
        asked = {name: value for name, value in given.items() if value is not _UNSAID}
        every = has | asked
        with speaking_as("explain", "Strategy", "parallelize"):
            every["strategy"] = Strategy.of(every["strategy"])
            tiles = Tiles.of(every["loss_tile"], every["mlp_tile"], every["offload"])
        if "layout" in asked:
            check_layout("explain", every["layout"], ranks)
        for name in asked if state is not None else ():
            if every[name] != has[name]:
                raise ValueError(
                    f"explain: the model was parallelized with {name}={_word(has[name])}, so "
                    f"{name}={_word(every[name])} would go unheard; leave it out, or call "
                    f"longspan.restore(model) first"
                )
        return _Wish(every["strategy"], every["layout"], tiles)


def _options_of(state: Parallelized | None) -> dict[str, Any]:
    """What a model was parallelized with; else the defaults of `parallelize`."""
    if state is None:
        named = inspect.signature(parallelize).parameters
        options = ("strategy", "layout", "loss_tile", "mlp_tile", "offload")
        return {name: named[name].default for name in options}
    tiles = state.tiles or Tiles()
    return {
        "strategy": state.strategy,
        "layout": state.layout,
        "loss_tile": tiles.loss,
        "mlp_tile": tiles.mlp,
        "offload": tiles.offload,
    }


def _word(value: Any) -> str:
    plain = isinstance(value, Strategy) and value == Strategy(value.name)
    return repr(value.name if plain else value)


def _place(group: Any, ranks: int | None, rank: int | None) -> Place | None:
    """The rank that was asked for by number."""
    if ranks is None and rank is None:
        return None
    if group is not None:
        raise ValueError("explain: give a group, or rank and ranks, not both")
    if ranks is None:
        raise ValueError("explain: `rank` goes with `ranks`; give both")
    return Place(0 if rank is None else rank, ranks, None).checked("explain")


def _of_lengths(batch: Any) -> Any:
    """A batch of one row with documents of these lengths, where lengths came."""
    if isinstance(batch, torch.Tensor):
        whole = is_dense(batch) and not (batch.is_floating_point() or batch.is_complex())
        if not whole or batch.is_meta or batch.dim() > 1:
            raise TypeError(
                f"explain: `batch` is {said(batch)} of {batch.dim()} axes; expected a batch as a "
                f"mapping, or lengths of documents: whole numbers, in a tensor along one axis"
            )
        batch = batch.tolist()
    if is_whole(batch):
        batch = [batch]
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)):
        return batch
    lengths = whole_numbers("explain", "batch", batch)
    for length in lengths:
        check_whole("explain", "batch", length, 1, _MOST_TOKENS)
    if not lengths or sum(lengths) > _MOST_TOKENS:
        raise ValueError(
            f"explain: `batch` has {sum(lengths)} tokens; expected documents of 1 to "
            f"{_MOST_TOKENS} together"
        )
    ids = torch.zeros(1, sum(lengths), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([lengths])}


def _cost(
    layer: AttentionLayer,
    state: Parallelized,
    cut: _C.Cut,
    groups: Groups,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerCost:
    if layer.selects is not None:
        return _selected_cost(layer, layer.selects, cut, dtype, device)
    if layer.pools is not None:
        return _pooled_cost(layer, layer.pools, cut, dtype, device)
    if layer.recurrence is not None:
        return _recurrent_cost(layer, layer.recurrence, cut, dtype)
    made = layer.plan(cut, state.strategy, groups)

    def sent(which: str) -> int:
        return made.sent_bytes(
            which,
            heads=layer.heads,
            key_heads=layer.key_heads,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            bytes_per_element=dtype.itemsize,
        )

    rows, tokens = len(cut.packings), cut.ownership.tokens

    def tensor(heads: int, dim: int) -> torch.Tensor:
        one = torch.empty(dim, dtype=dtype, device=device)  # channels lie together: no copies
        return one.expand(rows, heads, tokens, dim)

    kernel = which_kernel(
        tensor(layer.heads, layer.head_dim),
        tensor(layer.key_heads, layer.head_dim),
        tensor(layer.key_heads, layer.value_dim),
        mask=layer.masks(cut, groups),
        softcap=layer.softcap,
    )
    return LayerCost(
        layer=layer,
        strategy=state.strategy.name,
        steps=len(made.steps),
        pairs=sum(step.pairs for step in made.steps),
        sent_forward=sent("forward"),
        sent_backward=sent("backward"),
        kernel=kernel,
    )


def _selected_cost(
    layer: AttentionLayer,
    selects: Selection,
    cut: _C.Cut,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerCost:
    """Rows and index keys of all ranks come to every rank, and gradients of rows go
    home; the strategy is for other layers."""
    rows = len(cut.packings)
    to_others = (cut.ranks - 1) * cut.local_tokens * rows
    scored = torch.float32 if dtype == torch.float64 else dtype
    index_key = 0 if selects.shared else selects.head_dim * scored.itemsize
    gradient = max(dtype.itemsize, 4)

    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(1, dtype=of, device=device).expand(rows, *shape)

    here, keys = cut.local_tokens, cut.ownership.tokens
    kernel = which_kernel(
        tensor(here, layer.heads, layer.head_dim),
        tensor(keys, layer.head_dim),
        tensor(here, selects.slots, of=torch.int32),
        "attend_selected",
        value_dim=layer.value_dim,
    )
    if not selects.shared:
        chosen = which_kernel(
            tensor(here, selects.heads, selects.head_dim, of=scored),
            tensor(keys, selects.head_dim, of=scored),
            tensor(here, selects.heads, of=torch.float32),
            "select_keys",
            slots=selects.slots,
        )
        kernel += f"; selects by {chosen}"
    return LayerCost(
        layer=layer,
        strategy="selected",
        steps=1,
        pairs=_selected_pairs(cut, selects.slots),
        sent_forward=to_others * (layer.head_dim * dtype.itemsize + index_key),
        sent_backward=to_others * layer.head_dim * (dtype.itemsize + gradient),
        kernel=kernel,
    )


def _pooled_cost(
    layer: AttentionLayer,
    pools: Pooling,
    cut: _C.Cut,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerCost:
    """Rows of the window come over borders, and finished pools to every rank; what an
    indexer sees learns nothing, so it has no backward."""
    rows, masks, here = len(cut.packings), layer.masks(cut), cut.local_tokens
    assert layer.window is not None
    halo = _C.HaloPlan.of(cut.ownership, masks, layer.window - 1, cut.rank, rows)
    row = layer.head_dim * dtype.itemsize
    sums = max(dtype.itemsize, 4)
    sent = {way: halo.sent_bytes(way, row) for way in ("forward", "backward")}
    slots, pairs = layer.window, _selected_pairs(cut, layer.window)
    keys, chosen = rows * here + halo.received, ""

    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(1, dtype=of, device=device).expand(shape)

    if pools.ratio is not None:
        made = _C.PoolPlan.of(cut.ownership, masks, pools.ratio, pools.overlap, cut.rank, rows)
        total = sum(made.sizes)
        for way in sent:
            sent[way] += made.sent_bytes(way, layer.head_dim, sums) + made.gathered_bytes(way, row)
        start, end = made.windows
        seen = end.long() - start
        most = int(seen.max()) if seen.numel() else 0
        if pools.selects is not None:
            scored = torch.float32 if dtype == torch.float64 else dtype
            channels, most = pools.selects.head_dim, min(pools.selects.slots, total)
            sent["forward"] += made.sent_bytes("forward", channels, sums)
            sent["forward"] += made.gathered_bytes("forward", channels * scored.itemsize)
            name = which_kernel(
                tensor(rows * here, pools.selects.heads, channels, of=scored),
                tensor(total, channels, of=scored),
                tensor(rows * here, pools.selects.heads, of=torch.float32),
                "select_keys",
                slots=most,
            )
            chosen = f"; selects by {name}"
        slots, pairs, keys = slots + most, pairs + int(seen.clamp(max=most).sum()), keys + total
    kernel = which_kernel(
        tensor(rows * here, layer.heads, layer.head_dim),
        tensor(keys, layer.head_dim),
        tensor(rows * here, slots, of=torch.int32),
        "attend_selected",
    )
    return LayerCost(
        layer=layer,
        strategy="borders" if pools.ratio is None else "borders and pools",
        steps=1,
        pairs=pairs,
        sent_forward=sent["forward"],
        sent_backward=sent["backward"],
        kernel=kernel + chosen,
    )


def _recurrent_cost(
    layer: AttentionLayer, made: Recurrence, cut: _C.Cut, dtype: torch.dtype
) -> LayerCost:
    """Rows of the convolution come over borders, and a state for each run, however long. A
    token is counted once for each head."""
    rows, masks = len(cut.packings), layer.masks(cut)
    halo = _C.HaloPlan.of(cut.ownership, masks, made.kernel - 1, cut.rank, rows)
    way = made.way(cut.ownership, masks, rows)
    plan = _C.StatePlan.of(cut.ownership, masks, cut.rank, rows, way)
    pair = made.bytes_of_state(made.itemsize(dtype))
    sent = {
        way: halo.sent_bytes(way, made.channels * dtype.itemsize) + plan.sent_bytes(way, *pair)
        for way in ("forward", "backward")
    }
    return LayerCost(
        layer=layer,
        strategy="borders" if made.transition is None else "borders and states",
        steps=max(1, plan.rounds) if made.transition is not None else 1,
        pairs=sum(len(run) for _, run in halo.runs),
        sent_forward=sent["forward"],
        sent_backward=sent["backward"],
        kernel="the model's own",
    )


def _selected_pairs(cut: _C.Cut, slots: int) -> int:
    """Keys of this rank's queries: all before in the document, or so many."""
    mine = cut.ownership.tokens_of(cut.rank)
    pairs = 0
    for packing, real in zip(cut.packings, real_tokens(cut), strict=True):
        begins = _C.cumulative_padded_lengths(packing)[:-1].to(mine.dtype)
        document = torch.searchsorted(begins, mine[real], right=True) - 1
        pairs += int((mine[real] - begins[document] + 1).clamp(max=slots).sum())
    return pairs


def _dtypes(model: torch.nn.Module) -> dict[str, torch.dtype]:
    """In which type each module computes: autocast's, or that of its parameters."""
    device = next(model.parameters()).device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
        return {name: autocast for name, _ in model.named_modules()}
    return {
        name: next((p.dtype for p in module.parameters()), torch.float32)
        for name, module in model.named_modules()
    }


def _columns(cost: LayerCost) -> tuple[str, ...]:
    layer = cost.layer
    dims = str(layer.head_dim)
    if layer.value_dim != layer.head_dim:
        dims += f"/{layer.value_dim}"
    sees = "causal" if layer.window is None else f"window {layer.window}"
    sees += " groups" if layer.groups else ""
    if layer.selects is not None:
        sees = f"{layer.selects.slots} {'shared' if layer.selects.shared else 'selected'}"
    if layer.pools is not None and layer.pools.ratio is not None:
        chosen = layer.pools.selects
        sees += f", {f'{chosen.slots} ' if chosen else ''}pools of {layer.pools.ratio}"
    if layer.recurrence is not None:
        sees = f"convolution of {layer.recurrence.kernel}"
        if layer.recurrence.transition is not None:
            sees += ", state"
    sees += " softcap" if layer.softcap else ""
    sees += " sink" if layer.sink else ""
    return (
        f"{layer.heads}/{layer.key_heads}",
        dims,
        sees,
        cost.strategy,
        str(cost.steps),
        f"{cost.pairs:,}",
        _bytes(cost.sent_forward),
        _bytes(cost.sent_backward),
        cost.kernel,
    )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
