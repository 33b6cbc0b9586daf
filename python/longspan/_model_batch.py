"""Batches for models: what `shard(..., model=model)` adds to a rank's share."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from longspan import _C
from longspan._group import Group
from longspan._groups_of_tokens import groups_in
from longspan._local_batch import KEYWORD, LocalBatch
from longspan._models import LocalAttention, Parallelized
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
    local[KEYWORD] = attention
    if state.masks:
        local["attention_mask"] = dict.fromkeys(state.masks, attention)


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
