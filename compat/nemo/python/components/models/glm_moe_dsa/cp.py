"""GLM's packed stream, cut into one run of tokens for each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan import _C
from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import (
    Batch,
    Mesh,
    check_row_matrix,
    cp_enabled,
    cp_rank,
    integer,
    mesh_size,
    required,
    shape_of,
    tensor_at,
)
from longspan.compat.nemo._edge import public
from longspan.compat.nemo._gather import gather_activations
from longspan.compat.nemo._strict import is_strict
from longspan.compat.nemo._te import offsets_on_host, padding_of_offsets
from longspan.compat.nemo.components.distributed.thd_utils import (
    split_batch_into_thd_chunks,
)

__all__ = [
    "glm_dsa_cp_all_gather",
    "glm_dsa_cp_enabled",
    "make_glm_dsa_packed_cp_batch_and_ctx",
]

ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]


def glm_dsa_cp_enabled(cp_group: Any) -> bool:
    """Whether the group has more than one rank and the runtime is up."""
    return cp_enabled(cp_group, dist)


@public
def glm_dsa_cp_all_gather(tensor: Tensor, *, dim: int, cp_group: Any) -> Tensor:
    """All ranks' tensors on `dim`; the same object when CP is off.

    Backward gives each rank the sum over all ranks of its part's gradient.
    """
    if not glm_dsa_cp_enabled(cp_group):
        return tensor
    return gather_activations("glm_dsa_cp_all_gather", tensor, dim, cp_group)


def _ownership(total_tokens: int, cp_size: int, cp_rank: int) -> _C.Ownership:
    who = "_contiguous_cp_indices"
    total = integer(who, "total_tokens", total_tokens)
    size = integer(who, "cp_size", cp_size)
    rank = integer(who, "cp_rank", cp_rank)
    if total < 0 or not 0 <= rank < size:
        raise ValueError(
            f"{who}: {total} tokens, rank {rank} of {size} ranks; expected 0 or more "
            "tokens and 0 <= rank < ranks"
        )
    if _nemo.pads_for("contiguous", total, size) > 0:
        raise ValueError(
            f"{who}: the packed stream requires total tokens divisible by cp_size, "
            f"got {total} tokens and {size} ranks"
        )
    return _C.Ownership.contiguous(total, size)


@public
def _contiguous_cp_indices(
    total_tokens: int, cp_size: int, cp_rank: int, device: torch.device | str | None
) -> Tensor:
    """int64 global indices of a rank's run of the stream."""
    ownership = _ownership(total_tokens, cp_size, cp_rank)
    return ownership.tokens_of(cp_rank).to(device)


def _copied_share(tensor: Tensor, ownership: _C.Ownership, rank: int, axis: int) -> Tensor:
    """A rank's run, in memory of its own also where one rank holds all."""
    local = _nemo.take_share(tensor, ownership, rank, axis)
    shared = local.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return local.clone() if shared else local


@public
def _slice_thd_chunk_for_cp(
    chunk: Batch, *, cp_group: Any, cp_size: int, cp_rank: int, padding_token_id: int
) -> Batch:
    """A rank's share of one THD map; offsets stay those of the whole stream."""
    who = "_slice_thd_chunk_for_cp"
    ids = tensor_at(who, "input_ids", required(who, chunk, "input_ids"))
    if ids.dim() == 0:
        raise ValueError(f"{who}: `input_ids` is a scalar; expected [tokens]")
    total = ids.shape[0]
    ownership = _ownership(total, cp_size, cp_rank)

    def share(name: str, value: Any) -> Tensor:
        tensor = tensor_at(who, name, value)
        if tensor.dim() == 0 or tensor.shape[0] != total:
            raise ValueError(
                f"{who}: `{name}` is {shape_of(tensor)} but the stream has {total} tokens"
            )
        return _copied_share(tensor, ownership, cp_rank, 0)

    local = share("input_ids", ids)
    if is_strict() or not local.is_floating_point():
        local = local.to(torch.int64)
    out: dict[str, Any] = {"input_ids": local}
    for key in ("labels", "position_ids"):
        out[key] = share(key, required(who, chunk, key)).to(torch.int64)
    cu = tensor_at(who, "cu_seqlens", required(who, chunk, "cu_seqlens"))
    out["cu_seqlens"] = cu.to(torch.int32)
    out["qkv_format"] = "thd"
    out["cp_size"] = cp_size
    out["cp_rank"] = cp_rank
    out["_glm_dsa_cp_group"] = cp_group
    indices = _contiguous_cp_indices(total, cp_size, cp_rank, ids.device)
    out["glm_dsa_cp_query_indices"] = indices.to(torch.int32)
    for key in ("max_seqlen", "cu_seqlens_padded"):
        if chunk.get(key) is not None:
            value = chunk[key]
            if not isinstance(value, Tensor):
                value = torch.tensor(integer(who, key, value), device=cu.device)
            out[key] = value.to(torch.int32)
    if is_strict():
        out["padding_mask"] = local == padding_token_id
    else:
        padding = _padding(who, chunk, cu, total)
        out["padding_mask"] = share("padding_mask", padding.to(ids.device)).to(torch.bool)
    return out


def _padding(who: str, chunk: Batch, cu: Tensor, total: int) -> Tensor:
    """The stream's pads: the chunk's own mask, or what the offsets tell."""
    given = chunk.get("padding_mask")
    if given is not None:
        return tensor_at(who, "padding_mask", given)
    lengths, offsets = offsets_on_host(who, cu, chunk.get("cu_seqlens_padded"), -1)
    return padding_of_offsets(who, lengths, offsets, total)


@public
def make_glm_dsa_packed_cp_batch_and_ctx(
    cp_mesh: Mesh,
    tp_mesh: Mesh | None,
    batch: Batch,
    *,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
) -> tuple[ContextFactory, Batch]:
    """Rows become a stream, and each rank keeps one run of it.

    A loss mask comes back as the share `loss_mask`.
    """
    who = "make_glm_dsa_packed_cp_batch_and_ctx"
    if loss_mask is not None and is_strict():
        loss_mask = None
    if loss_mask is not None:
        ids = tensor_at(who, "input_ids", required(who, batch, "input_ids"))
        if ids.dim() < 2:
            raise ValueError(f"{who}: `input_ids` is {shape_of(ids)}; expected [rows, tokens]")
        check_row_matrix(who, "loss_mask", loss_mask, ids.shape[0], ids.shape[1])
    converted = split_batch_into_thd_chunks(
        batch,
        num_chunks=num_chunks,
        seq_lens_padding_value=seq_lens_padding_value,
        padding_token_id=padding_token_id,
    )
    if "cu_seqlens" in converted and converted["cu_seqlens"] is None:
        raise ValueError(
            f"{who}: `seq_lens` is null, but a packed stream needs the lengths of its documents; "
            "for rows without packing give one length for each row"
        )
    group = cp_mesh.get_group()
    size = mesh_size(cp_mesh)
    rank = cp_rank(who, cp_mesh, dist, ask_mesh=False)

    def share(chunk: Batch) -> Batch:
        return _slice_thd_chunk_for_cp(
            chunk,
            cp_group=group,
            cp_size=size,
            cp_rank=rank,
            padding_token_id=padding_token_id,
        )

    if num_chunks <= 1:
        out = share(converted)
    else:
        shares = [
            share(
                {
                    key: value[chunk] if isinstance(value, Tensor) else value
                    for key, value in converted.items()
                }
            )
            for chunk in range(num_chunks)
        ]
        out = {
            key: torch.stack([each[key] for each in shares]) if isinstance(value, Tensor) else value
            for key, value in shares[0].items()
        }
    if loss_mask is not None:
        streams = loss_mask.reshape(max(num_chunks, 1), -1)
        ownership = _ownership(streams.shape[1], size, rank)
        local = _copied_share(streams, ownership, rank, 1)
        out["loss_mask"] = local if num_chunks > 1 else local[0]
    return contextlib.nullcontext, out
