"""Batches for models: what `shard(..., model=model)` adds to a rank's share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from longspan import _C
from longspan._arguments import said, wrong
from longspan._group import Group
from longspan._groups_of_tokens import groups_in
from longspan._local_batch import LocalBatch
from longspan._models import AttentionLayer, LocalAttention, Parallelized
from longspan._remarks import targets_of

_IGNORED = -100
#: For callers of attend; models would not know them.
_NOT_FOR_MODELS = ("padding_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def add_attention(
    local: LocalBatch,
    packed: _C.PackedBatch,
    tokens: Set[str],
    targets: torch.Tensor | None,
    state: Parallelized,
) -> None:
    """Makes a rank's share of `packed` one for ``model(**local)``; `tokens` names its
    per-token tensors."""
    _check_shares(local.cut)
    for key in _NOT_FOR_MODELS:
        local.pop(key, None)
    if local.cut.form == "stream":
        for key in tokens & local.keys() | {"position_ids"}:
            # [T, ...], or [planes, T]
            planes = key == "position_ids" and local[key].dim() == 2
            local[key] = local[key].unsqueeze(1 if planes else 0)
        local.as_row = True
    if targets is not None:
        local.setdefault("labels", local["shift_labels"])
        local.setdefault("num_items_in_batch", targets)
    local["use_cache"] = False
    groups = groups_in(packed)
    attention = LocalAttention(local.cut, state.group, state.strategy, state.sights, groups)
    attention.prepare(state.layers)
    attention.targets = targets_of(state, local, targets)
    local.update(state.inputs_of(attention))


def check_group(who: str, state: Parallelized, group: Any) -> None:
    """A group that is given beside a model must be the model's."""
    if group is None:
        return
    given = Group.of(group)
    if given.size() == state.group.size() == 1:
        return
    if (given.name, given.rank(), given.size()) != (
        state.group.name,
        state.group.rank(),
        state.group.size(),
    ):
        raise ValueError(
            f"{who}: the model was parallelized over {state.group}, but the batch is to be cut "
            f"over {given}; give the same group"
        )


def _check_shares(cut: _C.Cut) -> None:
    """transformers cannot reshape tensors without tokens."""
    sizes = [cut.ownership.local_tokens(rank) for rank in range(cut.ranks)]
    if cut.rows == 0 or 0 in sizes:
        raise ValueError(
            f"shard: ranks would hold {', '.join(map(str, sizes))} tokens of {cut.rows} rows; a "
            f"model needs some on every rank, so give more tokens or another layout"
        )


def with_targets(rows: _C.RowBatch) -> tuple[_C.RowBatch, torch.Tensor | None]:
    """The rows with `shift_labels`, and how many targets they hold: the label of
    the next token in the row, and nothing to learn where the token is a pad."""
    names = dict(rows.tokens)
    if "shift_labels" not in names:
        if "labels" not in names:
            return rows, None
        rows = _C.shift_left(rows, "labels", "shift_labels")
    rows = _C.clear_pads(rows, "shift_labels")
    targets = dict(rows.tokens)["shift_labels"].ne(_IGNORED).sum()
    # A batch with nothing to learn has loss 0, not 0 / 0.
    return rows, targets.clamp(min=1)


def check_counting(who: str, rows: _C.RowBatch, layers: Sequence[AttentionLayer]) -> None:
    """Pools begin with their document, and a token sees those that ended before its place in it:
    for layers that have any, given positions must be these places."""
    given = dict(rows.tokens).get("position_ids")
    pools = next((one for one in layers if one.pools is not None and one.pools.ratio), None)
    if pools is None or given is None:
        return
    if given.dim() != 2:
        raise wrong(who, "position_ids", given, "[rows, tokens], as layers with pools take them")
    packings = _C.pack(rows, "rows").packings
    places = torch.stack([_C.position_ids(packing) for packing in packings])
    pads = torch.stack([_C.padding_mask(packing) for packing in packings])
    positions = given.expand_as(places).to(places.device)
    other = (positions.ne(places) & ~pads).nonzero()
    if len(other):
        row, token = other[0].tolist()
        raise ValueError(
            f"{who}: `position_ids` has {positions[row, token]} for token {token} of row {row}, "
            f"which is number {places[row, token]} of its document, and '{pools.name}' makes and "
            f"shows pools by these numbers; count 0, 1, 2, ... in every document, or leave "
            f"`position_ids` out and give `seq_lens`"
        )


#: What says where documents lie, beside positions.
_BORDERS = ("seq_lens", "cu_seq_lens_q", "attention_mask", "padding_mask", "seq_idx")


def check_jumps(who: str, batch: Any, first: int) -> None:
    """Where positions alone say where documents lie, transformers takes every one that is not the
    next for a border, and `shard` those that begin to count."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.is_meta:
        return
    if any(batch.get(key) is not None for key in _BORDERS):
        return
    begins = 0 if first and bool((positions == 0).any()) else first
    here, before = positions[:, 1:], positions[:, :-1]
    jumps = (here != before + 1) & (here != begins)
    labels = batch.get("labels", batch.get("shift_labels"))
    if isinstance(labels, torch.Tensor) and labels.shape == positions.shape:
        # Behind the last one that is learned there may be pads.
        learned = labels[:, 1:].ne(_IGNORED).to(jumps.device)
        jumps = jumps & learned.flip(1).cumsum(1).flip(1).bool()
    jumps = jumps.nonzero()
    if len(jumps):
        row, at = jumps[0].tolist()
        raise ValueError(
            f"{who}: `position_ids` goes from {before[row, at]} to {here[row, at]} at token "
            f"{at + 1} of row {row}, where a model of transformers sees another document and "
            f"shard, which looks for {begins}, does not; say where documents lie by `seq_lens`, or "
            f"count {begins}, {begins + 1}, ... in each"
        )


def counted_from_zero(batch: Mapping[str, Any], first: int) -> Mapping[str, Any]:
    """A batch whose positions begin documents with 0, where it had those of a model that
    begins with `first`."""
    positions = batch.get("position_ids") if first and isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor) or bool((positions == 0).any()):
        return batch
    return {**batch, "position_ids": positions - first}


def documents_of_seq_idx(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch without `seq_idx`, the number of each token's document, which collators add for
    layers that no parallelized model has. Where nothing else says where documents lie, it
    does; where something does, both must say the same."""
    numbers = batch.get("seq_idx") if isinstance(batch, Mapping) else None
    if numbers is None:
        return batch
    rest = {key: value for key, value in batch.items() if key != "seq_idx"}
    tokens = next((batch[k] for k in ("input_ids", "inputs_embeds") if k in batch), None)
    if not isinstance(numbers, torch.Tensor) or not isinstance(tokens, torch.Tensor):
        raise TypeError(
            f"shard: `seq_idx` is {said(numbers)}; expected a tensor, one entry a token"
        )
    if numbers.shape != tokens.shape[:2]:
        raise ValueError(
            f"shard: `seq_idx` is {list(numbers.shape)} beside {list(tokens.shape[:2])} tokens; "
            f"expected one entry a token"
        )
    borders = numbers[:, 1:] != numbers[:, :-1]
    found = _borders_of(rest, borders)
    if found is None:
        mask = rest.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.shape != numbers.shape:
            if mask is not None:
                raise ValueError(
                    f"shard: `attention_mask` is {said(mask)} beside `seq_idx`; expected a tensor "
                    f"{list(numbers.shape)}"
                )
            mask = torch.ones_like(numbers)
        borders = borders | (mask[:, 1:] != mask[:, :-1])
        # Other numbers than 0 and 1 in a mask tell documents apart.
        ids = torch.nn.functional.pad(borders, (1, 0)).cumsum(1) + 1
        rest["attention_mask"] = ids * mask.ne(0)
    elif not found[1].equal(borders.to(found[1].device)):
        raise ValueError(
            f"shard: `seq_idx` and `{found[0]}` place the borders of documents differently; leave "
            f"`seq_idx` out, or make them agree"
        )
    return rest


def _borders_of(batch: Mapping[str, Any], like: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """Where documents begin, but for the first of a row, as another entry has it."""
    offsets, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if isinstance(offsets, torch.Tensor) and like.shape[0] == 1 and offsets.dim() == 1:
        borders = torch.zeros(1, like.shape[1] + 1, dtype=torch.bool)
        inside = offsets[(offsets > 0) & (offsets <= like.shape[1])]
        borders[0, inside.to("cpu", torch.int64)] = True
        return "cu_seq_lens_q", borders[:, 1:]
    if isinstance(positions, torch.Tensor) and positions.dim() == 2:
        return "position_ids", positions[:, 1:].eq(0).expand_as(like)
    if batch.get("seq_lens") is not None:
        raise ValueError("shard: the batch has both `seq_lens` and `seq_idx`; leave one out")
    return None
