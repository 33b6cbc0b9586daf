"""Gemma4: rows and their side tensors, one run of tokens for each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from longspan import _C
from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import (
    Batch,
    Mesh,
    check_axis,
    check_rows,
    continue_axis,
    cp_rank,
    drop_attention_mask,
    integer,
    labels_or_loss_mask,
    mesh_size,
    pad_axis,
    positions_into,
    primary_of,
    required,
    shape_of,
    share_rows,
    tensor_at,
    unchanged_on_error,
)
from longspan.compat.nemo._edge import public

__all__ = ["make_contiguous_shard_cp_batch_and_ctx"]

ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]

# Per-token tensors with axis 1 and what they are padded with; None: token id.
_PAD_VALUES: dict[str, Any] = {
    "input_ids": None,
    "inputs_embeds": 0,
    "mm_token_type_ids": 0,
    "_packed_seq_ids": 0,
    "per_layer_inputs": 0,
    "padding_mask": True,
    "labels": -100,
    "loss_mask": 0,
}
_KNOWN = {*_PAD_VALUES, "position_ids"}


@public
def _pad_tensor_seq_dim_(tensor: Tensor, seq_dim: int, pad_len: int, value: Any = 0) -> Tensor:
    """Right padding by `value`; the same object when pad_len <= 0."""
    return pad_axis("_pad_tensor_seq_dim_", tensor, seq_dim, pad_len, value)


@public
def _pad_position_ids_seq_dim_(position_ids: Tensor, seq_dim: int, pad_len: int) -> Tensor:
    """Positions that count on; the same object when pad_len <= 0."""
    return continue_axis("_pad_position_ids_seq_dim_", position_ids, seq_dim, pad_len)


@public
def _prepare_manual_cp_batch(
    cp_mesh: Mesh, tp_mesh: Mesh | None, batch: Batch, loss_mask: Tensor | None
) -> tuple[str, int, Tensor, Tensor, int, Tensor | None]:
    """(primary key, length, labels, positions, their axis, loss mask left over).

    Edits the batch: the attention mask becomes a mask of pads, and positions
    that were missing are there.
    """
    who = "_prepare_manual_cp_batch"
    with unchanged_on_error(who, batch):
        pads = drop_attention_mask(who, batch)
        key, primary = primary_of(who, batch)
        rows, length = primary.shape[:2]
        if pads is not None:
            check_rows(who, "attention_mask", pads, rows, length)
            batch["padding_mask"] = pads
        positions, axis = positions_into(who, batch, primary, expand=True)
        labels, loss_mask = labels_or_loss_mask(who, batch, loss_mask)
        check_rows(who, "labels", labels, rows, length)
        if loss_mask is not None:
            check_rows(who, "loss_mask", loss_mask, rows, length)
        return key, length, labels, positions, axis, loss_mask


@public
def _synthesize_single_document_seq_ids(batch: Batch, primary_key: str, seq_len: int) -> None:
    """Adds `_packed_seq_ids`: document 1 everywhere, 0 on pads."""
    if batch.get("_packed_seq_ids") is not None:
        return
    who = "_synthesize_single_document_seq_ids"
    padding = batch.get("padding_mask")
    if padding is not None:
        real = tensor_at(who, "padding_mask", padding).to(torch.bool).logical_not()
        batch["_packed_seq_ids"] = real.to(torch.int64)
        return
    primary = tensor_at(who, primary_key, required(who, batch, primary_key))
    batch["_packed_seq_ids"] = torch.ones(
        primary.shape[0], seq_len, dtype=torch.int64, device=primary.device
    )


def _extras(who: str, batch: Batch, axes: Any, fills: Any) -> list[tuple[str, Tensor, int, Any]]:
    """The declared per-token tensors: key, tensor, axis, pad value."""
    axes = {} if axes is None else axes
    fills = {} if fills is None else fills
    if not isinstance(axes, Mapping) or not isinstance(fills, Mapping):
        raise TypeError(
            f"{who}: `_cp_metadata_seq_dims` and `_cp_metadata_pad_values` map "
            "keys to axes and to pad values"
        )
    extras = []
    for key, axis in axes.items():
        if key in _KNOWN or batch.get(key) is None:
            continue
        tensor = tensor_at(who, key, batch[key])
        extras.append((key, tensor, check_axis(who, tensor, axis), fills.get(key, 0)))
    return extras


@public
def _make_contiguous_shard_cp_batch(
    cp_mesh: Mesh,
    batch: Batch,
    *,
    primary_key: str,
    seq_len: int,
    labels: Tensor,
    position_ids: Tensor,
    pos_seq_dim: int,
    loss_mask: Tensor | None,
    padding_token_id: int,
) -> tuple[ContextFactory, Batch]:
    """Pads every per-token tensor and keeps this rank's run of each."""
    who = "_make_contiguous_shard_cp_batch"
    with unchanged_on_error(who, batch):
        padding_token_id = integer(who, "padding_token_id", padding_token_id)
        ranks = mesh_size(cp_mesh)
        if ranks < 1:
            raise ValueError(f"{who}: a mesh of {ranks} ranks; expected 1 or more")
        primary = tensor_at(who, primary_key, required(who, batch, primary_key))
        _synthesize_single_document_seq_ids(batch, primary_key, seq_len)
        axes = batch.pop("_cp_metadata_seq_dims", None)
        fills = batch.pop("_cp_metadata_pad_values", None)
        extras = _extras(who, batch, axes, fills)

        length = integer(who, "seq_len", seq_len)
        count = _nemo.pads_for("contiguous", length, ranks, share=2)
        given = {"labels": labels, "loss_mask": loss_mask}
        padded: list[tuple[str, Tensor, int]] = []
        for key, fill in _PAD_VALUES.items():
            value = given.get(key)
            if value is None:
                value = batch.get(key)
            if value is None:
                continue
            tensor = tensor_at(who, key, value)
            if tensor.dim() < 2 or tensor.shape[0] != primary.shape[0]:
                raise ValueError(
                    f"{who}: `{key}` is {shape_of(tensor)}; expected "
                    f"[{primary.shape[0]}, {seq_len}] like the tokens"
                )
            fill = padding_token_id if fill is None else fill
            padded.append((key, _pad_tensor_seq_dim_(tensor, 1, count, fill), 1))
        for key, tensor, axis, fill in extras:
            padded.append((key, _pad_tensor_seq_dim_(tensor, axis, count, fill), axis))
        positions = _pad_position_ids_seq_dim_(position_ids, pos_seq_dim, count)
        padded.append(("position_ids", positions, pos_seq_dim))

        rank = cp_rank(who, cp_mesh, torch.distributed, ask_mesh=True)
        tokens = next(t.shape[1] for key, t, _ in padded if key == primary_key)
        if _nemo.pads_for("contiguous", tokens, ranks) > 0:
            raise ValueError(
                f"{who}: the padded length {tokens} is not divisible by cp_size {ranks}"
            )
        ownership = _C.Ownership.contiguous(tokens, ranks)
        for key, tensor, axis in padded:
            batch[key] = share_rows(who, key, tensor, axis, ownership, tokens, rank)
        return contextlib.nullcontext, batch


@public
def make_contiguous_shard_cp_batch_and_ctx(
    cp_mesh: Mesh,
    tp_mesh: Mesh | None,
    batch: Batch,
    *,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
) -> tuple[ContextFactory, Batch]:
    """Pads rows to twice the ranks and keeps this rank's run of each."""
    with unchanged_on_error("make_contiguous_shard_cp_batch_and_ctx", batch):
        key, length, labels, positions, axis, loss_mask = _prepare_manual_cp_batch(
            cp_mesh, tp_mesh, batch, loss_mask
        )
        return _make_contiguous_shard_cp_batch(
            cp_mesh,
            batch,
            primary_key=key,
            seq_len=length,
            labels=labels,
            position_ids=positions,
            pos_seq_dim=axis,
            loss_mask=loss_mask,
            padding_token_id=padding_token_id,
        )
