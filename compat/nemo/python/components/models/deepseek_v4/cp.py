"""DeepSeek V4: rows cut into one run of tokens for each rank."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan import _C
from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import (
    INT32_MAX,
    Batch,
    Mesh,
    check_rows,
    continue_axis,
    cp_enabled,
    cp_rank,
    drop_attention_mask,
    integer,
    labels_or_loss_mask,
    mesh_size,
    pad_axis,
    positions_into,
    primary_of,
    rank_in,
    shape_of,
    share_rows,
    size_of,
    tensor_at,
    unchanged_on_error,
)
from longspan.compat.nemo._edge import public
from longspan.compat.nemo._gather import gather_activations, gather_metadata

__all__ = [
    "build_dsv4_cp_causal_padding_mask",
    "dsv4_cp_all_gather",
    "dsv4_cp_all_gather_metadata",
    "dsv4_cp_enabled",
    "dsv4_cp_local_seq_multiple",
    "dsv4_cp_rank",
    "dsv4_cp_size",
    "make_dsv4_contiguous_shard_cp_batch_and_ctx",
]

ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]


def _lcm(a: int, b: int) -> int:
    """Least common multiple; with a zero, the larger of the two."""
    return math.lcm(a, b) if a and b else max(a, b)


@public
def _pad_tensor_seq_dim_(tensor: Tensor, seq_dim: int, pad_len: int, value: Any) -> Tensor:
    """Right padding by `value`; the same object when pad_len <= 0."""
    return pad_axis("_pad_tensor_seq_dim_", tensor, seq_dim, pad_len, value)


@public
def _pad_position_ids_seq_dim_(position_ids: Tensor, seq_dim: int, pad_len: int) -> Tensor:
    """Positions that count on; the same object when pad_len <= 0."""
    return continue_axis("_pad_position_ids_seq_dim_", position_ids, seq_dim, pad_len)


def dsv4_cp_enabled(cp_group: Any) -> bool:
    """Whether the group has more than one rank and the runtime is up."""
    return cp_enabled(cp_group, dist)


def dsv4_cp_rank(cp_group: Any) -> int:
    """This process in the group; 0 when CP is off."""
    return rank_in(cp_group, dist) if dsv4_cp_enabled(cp_group) else 0


def dsv4_cp_size(cp_group: Any) -> int:
    """Ranks in the group; 1 when CP is off."""
    return size_of(cp_group, dist) if dsv4_cp_enabled(cp_group) else 1


@public
def dsv4_cp_all_gather(tensor: Tensor, *, dim: int, cp_group: Any) -> Tensor:
    """All ranks' tensors on `dim`; the same object when CP is off.

    Backward gives each rank the sum over all ranks of its part's gradient.
    """
    if not dsv4_cp_enabled(cp_group):
        return tensor
    return gather_activations("dsv4_cp_all_gather", tensor, dim, cp_group)


@public
def dsv4_cp_all_gather_metadata(tensor: Tensor | None, *, dim: int, cp_group: Any) -> Tensor | None:
    """`dsv4_cp_all_gather` for masks and ids, without gradient; None stays None."""
    if tensor is None or not dsv4_cp_enabled(cp_group):
        return tensor
    return gather_metadata("dsv4_cp_all_gather_metadata", tensor, dim, cp_group, dist)


@public
def dsv4_cp_local_seq_multiple(model_or_config: Any) -> int:
    """What the local length must be a multiple of, from the layers' ratios.

    Ratios are integers of any type of numbers; those not above 0 ask for nothing.
    """
    config = getattr(model_or_config, "config", model_or_config)
    ratios = getattr(config, "compress_ratios", None)
    if ratios is None:
        return 1
    if isinstance(ratios, str) or not isinstance(ratios, Iterable):
        raise TypeError(
            f"dsv4_cp_local_seq_multiple: `compress_ratios` is {ratios!r}; "
            "expected one ratio for each layer"
        )
    whole = [_ratio(ratio) for ratio in ratios]
    return int(_C.share_multiple([ratio for ratio in whole if ratio > 0]))


def _ratio(value: Any) -> int:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, numbers.Number) and not isinstance(number, complex):
        with contextlib.suppress(OverflowError, ValueError):  # infinities, NaN
            whole = int(number)  # type: ignore[call-overload]
            if whole == number and abs(whole) <= INT32_MAX:
                return int(whole)
    raise ValueError(
        f"dsv4_cp_local_seq_multiple: `compress_ratios` holds {value!r}; expected integers "
        f"up to {INT32_MAX}"
    )


@public
def build_dsv4_cp_causal_padding_mask(
    *,
    position_ids: Tensor,
    key_len: int,
    dtype: torch.dtype,
    device: torch.device | str,
    cp_group: Any,
    padding_mask: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Additive mask [B, 1, L, key_len]: 0, or the dtype's lowest finite value."""
    who = "build_dsv4_cp_causal_padding_mask"
    positions = tensor_at(who, "position_ids", position_ids)
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    if positions.dim() != 2:
        raise ValueError(
            f"{who}: `position_ids` is {shape_of(positions)}; expected "
            "[rows, local tokens] or [local tokens]"
        )
    key_len = integer(who, "key_len", key_len)
    if key_len < 0:
        raise ValueError(f"{who}: key_len is {key_len}; expected 0 or more")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{who}: dtype is {dtype}; expected a floating dtype")
    if sliding_window is not None:
        sliding_window = integer(who, "sliding_window", sliding_window)
    pads = dsv4_cp_all_gather_metadata(padding_mask, dim=1, cp_group=cp_group)
    if pads is not None:
        pads = tensor_at(who, "padding_mask", pads).to(device=device, dtype=torch.bool)
        if tuple(pads.shape) != (positions.shape[0], key_len):
            raise ValueError(
                f"{who}: `padding_mask` of all ranks is {shape_of(pads)}; expected "
                f"[{positions.shape[0]}, {key_len}]"
            )
    return _nemo.dense_causal_mask(positions.to(device), key_len, dtype, pads, sliding_window)


@public
def make_dsv4_contiguous_shard_cp_batch_and_ctx(
    cp_mesh: Mesh,
    tp_mesh: Mesh | None,
    batch: Batch,
    *,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
    pad_multiple: int | None = None,
) -> tuple[ContextFactory, Batch]:
    """Pads rows to the model's multiple and keeps this rank's run of each."""
    who = "make_dsv4_contiguous_shard_cp_batch_and_ctx"
    with unchanged_on_error(who, batch):
        if "cu_seqlens" in batch or batch.get("qkv_format") == "thd":
            raise NotImplementedError(
                f"{who}: packed sequences are not supported; pass rows of one document each"
            )
        padding_token_id = integer(who, "padding_token_id", padding_token_id)
        multiple = max(integer(who, "pad_multiple", pad_multiple or 2), 2)
        ranks = mesh_size(cp_mesh)
        if ranks < 1:
            raise ValueError(f"{who}: a mesh of {ranks} ranks; expected 1 or more")
        pads = drop_attention_mask(who, batch)
        primary_key, primary = primary_of(who, batch)
        rows, length = primary.shape[:2]
        if pads is not None:
            batch["padding_mask"] = pads
        positions, axis = positions_into(who, batch, primary, expand=False)
        labels, loss_mask = labels_or_loss_mask(who, batch, loss_mask)
        group = cp_mesh.get_group()

        fields: list[tuple[str, Any, int, Any]] = [
            (primary_key, primary, 1, 0),
            ("labels", labels, 1, -100),
            ("position_ids", positions, axis, None),
        ]
        if primary_key == "input_ids":
            fields[0] = (primary_key, primary, 1, padding_token_id)
        if batch.get("padding_mask") is not None:
            fields.append(("padding_mask", batch["padding_mask"], 1, True))
        if loss_mask is not None:
            fields.append(("loss_mask", loss_mask, 1, 0))
        for key, value, _, _ in fields:
            if key != "position_ids":
                check_rows(who, key, value, rows, length)

        count = _nemo.pads_for("contiguous", length, ranks, share=multiple)
        tokens = length + count
        rank = cp_rank(who, cp_mesh, dist, ask_mesh=True)
        ownership = _C.Ownership.contiguous(tokens, ranks)
        for key, value, at, fill in fields:
            if key == "position_ids":
                value = _pad_position_ids_seq_dim_(value, at, count)
            else:
                value = _pad_tensor_seq_dim_(value, at, count, fill)
            batch[key] = share_rows(who, key, value, at, ownership, tokens, rank)
        batch["_dsv4_cp_group"] = group
        return contextlib.nullcontext, batch
