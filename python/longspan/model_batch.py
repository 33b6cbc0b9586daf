"""Batches for models: what `shard(..., model=model)` adds to a rank's share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from longspan import _C, transformers_models
from longspan.agreement import Agreement
from longspan.batch import share
from longspan.group import Group
from longspan.local_batch import KEYWORD, LocalBatch
from longspan.models import LocalAttention, Parallelized, state_of

_IGNORED = -100
#: For callers of attend; models would not know them.
_NOT_FOR_MODELS = ("padding_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def shard_for_model(
    batch: Mapping[str, Any],
    group: Any,
    model: torch.nn.Module,
    layout: str | None,
    ownership: _C.Ownership | None,
    multiple: int,
    read_rows: Callable[[], tuple[_C.RowBatch, dict[str, Any]]],
    check_agreement: bool,
) -> LocalBatch:
    """One rank's share of a batch, for ``model(**local)``."""
    state = state_of("shard", model)
    check_group("shard", state, group)
    with Agreement("shard", state.group, check_agreement) as agreement:
        transformers_models.check_batch(model, batch)
        rows, others = read_rows()
        return shard_for_layers(batch, rows, others, state, layout, ownership, multiple, agreement)


def shard_for_layers(
    batch: Mapping[str, Any],
    rows: _C.RowBatch,
    others: Mapping[str, Any],
    state: Parallelized,
    layout: str | None,
    ownership: _C.Ownership | None,
    multiple: int,
    agreement: Agreement,
) -> LocalBatch:
    """The same, for whatever has such layers."""
    ranks = state.group
    layout, ownership = _cut_of(state, layout, ownership)
    rows, targets = _with_targets(rows)
    divisor = batch.get("num_items_in_batch")
    also = {
        "strategy": state.strategy,
        "num_items_in_batch": None if divisor is None else float(divisor),
    }
    local = share(
        batch,
        rows,
        others,
        ranks.rank(),
        ranks.size(),
        layout,
        ownership,
        multiple,
        ranks,
        agreement,
        also,
    )
    _check_shares(local.cut)
    for key in _NOT_FOR_MODELS:
        local.pop(key, None)
    if local.cut.form == "stream":
        for key in dict(rows.tokens).keys() & local.keys() | {"position_ids"}:
            # [T, ...], or [planes, T]
            planes = key == "position_ids" and local[key].dim() == 2
            local[key] = local[key].unsqueeze(1 if planes else 0)
        local.as_row = True
    if targets is not None:
        local.setdefault("labels", local["shift_labels"])
        local.setdefault("num_items_in_batch", targets)
    local["use_cache"] = False
    local[KEYWORD] = LocalAttention(local.cut, ranks, state.strategy, state.windows)
    return local


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


def _cut_of(
    state: Parallelized, layout: str | None, ownership: _C.Ownership | None
) -> tuple[str, _C.Ownership | None]:
    """This batch's own wish, else what the model was told."""
    if ownership is not None:
        return layout or "rows", ownership
    if layout is not None:
        return layout, None
    if isinstance(state.ownership, _C.Ownership):
        return "rows", state.ownership
    return state.ownership, None


def _check_shares(cut: _C.Cut) -> None:
    """transformers cannot reshape tensors without tokens."""
    sizes = [cut.ownership.local_tokens(rank) for rank in range(cut.ranks)]
    if cut.rows == 0 or 0 in sizes:
        raise ValueError(
            f"shard: ranks would hold {', '.join(map(str, sizes))} tokens of {cut.rows} rows; a "
            f"model needs some on every rank, so give more tokens or another ownership"
        )


def _with_targets(rows: _C.RowBatch) -> tuple[_C.RowBatch, torch.Tensor | None]:
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
