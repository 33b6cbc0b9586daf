"""What a model under context parallelism will compute and send, before it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from longspan import _C, _transformers
from longspan._agreement import Agreement
from longspan._arguments import check_kind
from longspan._attention import plan
from longspan._batch import Place, Reading, share
from longspan._group import ranks_of
from longspan._kernels import which_kernel
from longspan._local_batch import KEYWORD, LocalBatch, real_tokens
from longspan._model_batch import check_group
from longspan._models import (
    AUTO,
    AttentionLayer,
    Groups,
    Parallelized,
    Pooling,
    Selection,
    check_layout,
    find_state,
)
from longspan._strategy import Strategy
from longspan._tables import html_table

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

    def to_json(self) -> dict[str, Any]:
        """For machines: plain dictionaries, lists and numbers."""
        return {
            "rank": self.rank,
            "ranks": self.ranks,
            "tokens": self.tokens,
            "layers": [cost.to_json() for cost in self.layers],
            "proof": self.proof,
        }

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
        return html_table(self._head, _TITLES, self._rows())

    def __str__(self) -> str:
        table = [_TITLES, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        last = [f"let in: {self.proof}"] if self.proof else []
        return "\n".join([self._head, *lines, *last])


def explain(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    group: Any = None,
    *,
    strategy: str | Strategy = "ring",
    layout: str | _C.Ownership = AUTO,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """What the attention layers of `model` will compute and send on this rank for
    this batch: strategy, bytes, kernel, and why not a faster one. Nothing is sent.

    `batch` is what a collator gives, or what `shard` made of it. A model that is not
    parallelized yet is explained as `parallelize` would set it up with `group`,
    `strategy` and `layout`. `dtype` is what attention will compute in where a
    wrapper casts (FSDP2's policy); by default autocast's, or the parameters'. Of a model
    on the meta device the kernel is the one that this CPU would run.
    """
    check_kind("explain", "model", model, torch.nn.Module, "a torch.nn.Module")
    if dtype is not None:
        check_kind("explain", "dtype", dtype, torch.dtype, "a dtype of torch")
    state = find_state(model)
    if state is None:
        check_layout("explain", layout, ranks_of(group).size())
        ranks = ranks_of(group)
        layers = _transformers.attention_layers(model)
        state = Parallelized(ranks, Strategy.of(strategy), layout, layers)
    else:
        check_group("explain", state, group)
    if isinstance(batch, LocalBatch):
        local = batch
    else:
        nobody = Agreement("explain", None)
        reading = Reading(who="explain")
        local = share(batch, Place.in_group(state.group), nobody, state, reading)
    cut = local.cut
    groups = local[KEYWORD].groups if KEYWORD in local else ()
    dtypes = _dtypes(model) if dtype is None else {}
    device = next(model.parameters()).device
    nowhere = device.type == "meta"
    if nowhere:  # kernels are chosen by device, so ask for the one that is here
        device = torch.device("cpu")
    costs = tuple(
        _cost(layer, state, cut, groups, dtype or dtypes[layer.name], device)
        for layer in state.layers
    )
    if nowhere:
        costs = tuple(replace(cost, kernel=f"on this CPU {cost.kernel}") for cost in costs)
    return Explanation(cut.rank, cut.ranks, cut.local_tokens, costs, state.proof)


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
    made = plan(
        cut.ownership,
        layer.masks(cut, groups),
        strategy=state.strategy,
        rank=cut.rank,
        key_heads=layer.key_heads,
        rows=len(cut.packings),
    )

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
        one = torch.empty(1, dtype=dtype, device=device)
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
