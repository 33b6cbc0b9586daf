"""Gemma4: attention over ranks that hold one run of every row each.

The ring is `longspan.attend`, with masks made of the batch's documents, pads and
vision groups. Where a module global below was replaced, or no mask of runs says what
the metadata says (a document or a group in several pieces), it goes chunk by chunk
through `_run_gemma4_flex_chunk` instead. Both give the same.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from longspan import _C, Group, attend
from longspan.comm import rotate
from longspan.compat.nemo._batch import Mesh, check_rank, cp_rank, mesh_size, shape_of, tensor_at
from longspan.compat.nemo._edge import public
from longspan.compat.nemo._strict import is_strict
from longspan.compat.nemo.components.models.gemma4_moe import _sdpa_route as sdpa_route
from longspan.compat.nemo.components.models.gemma4_moe._chunk_ring import (
    Chunk,
    ChunkRing,
    Metadata,
    collect_chunks,
)
from longspan.compat.nemo.components.models.gemma4_moe._ring_chunks import (
    base_mask,
    merge,
    run_chunk,
)
from longspan.compat.nemo.components.models.gemma4_moe._ring_masks import (
    GROUPS,
    METADATA_KEYS,
    TYPES,
    Rows,
    rows_of,
    vision_group_ids,
)
from longspan.compat.nemo.components.models.gemma4_moe._segments import build_segments

__all__ = [
    "CPRingAttentionContext",
    "attach_gemma4_cp_ring_attention",
    "gemma4_vision_group_ids",
    "replace",
]

logger = logging.getLogger(__name__)

#: True after the first ring forward, which is logged.
_GEMMA4_CP_FLEX_RING_OK_LOGGED = False


@dataclass(frozen=True)
class CPRingAttentionContext:
    """Inputs of one attention: q [B, H, L, D], k and v [B, Hkv, L, D], where L are
    this rank's tokens [seq_global_start, seq_global_start + seq_local)."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    cp_mesh: Any
    cp_group: Any
    cp_size: int
    cp_rank: int
    seq_local: int
    seq_full: int
    seq_global_start: int
    attn_mask: Any
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    kwargs: dict[str, Any]
    metadata: Metadata
    metadata_seq_dims: dict[str, int]


@public
def gemma4_vision_group_ids(mm_token_type_ids: Tensor) -> Tensor:
    """Runs of vision tokens (types 1 and 2), numbered from 0 in each row; -1 for
    all others."""
    return vision_group_ids(
        tensor_at("gemma4_vision_group_ids", "mm_token_type_ids", mm_token_type_ids)
    )


def _base_gemma4_cp_mask(
    attention_module: Any, ctx: Any, q_idx: Any, kv_idx: Any, kv_global_start: int = 0
) -> Any:
    """Whether causality and the window let local queries see keys of a chunk."""
    return base_mask(attention_module, ctx, q_idx, kv_idx, kv_global_start)


def _metadata_like(metadata: Metadata) -> Metadata:
    """Buffers to receive the same metadata of another rank."""
    return {key: None if t is None else torch.empty_like(t) for key, t in metadata.items()}


def _detach_metadata(metadata: Metadata) -> Metadata:
    return {key: None if t is None else t.detach().contiguous() for key, t in metadata.items()}


def _zero_if_none(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _merge_flex_chunk(
    out_acc: Tensor | None, lse_acc: Tensor | None, out_step: Tensor, lse_step: Tensor
) -> tuple[Tensor, Tensor]:
    """Joins answers over different keys; -inf on either side, or both, saw no key."""
    if out_acc is None or lse_acc is None:
        return out_step, lse_step
    return merge(out_acc, lse_acc, out_step, lse_step)


@public
def _run_gemma4_flex_chunk(
    attention_module: Any,
    ctx: Any,
    *,
    key_chunk: Tensor,
    value_chunk: Tensor,
    metadata_chunk: Metadata,
    kv_global_start: int,
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Local queries and the keys of one rank: output, log-sum-exp, rows without an
    output, and the head dimension rounded up to a power of two."""
    out, lse, empty, padded = _wide_chunk(
        attention_module,
        ctx,
        key_chunk=key_chunk,
        value_chunk=value_chunk,
        metadata_chunk=metadata_chunk,
        kv_global_start=kv_global_start,
    )
    return out.to(ctx.query.dtype), lse, empty, padded


def _wide_chunk(module: Any, ctx: Any, **chunk: Any) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """`_run_gemma4_flex_chunk` with an output in float32 or more."""
    return run_chunk(module, ctx, _base_gemma4_cp_mask, **chunk)


def _ring_exchange(
    tensors: list[tuple[Tensor, Tensor]], *, cp_group: Any, cp_rank: int, cp_size: int
) -> None:
    """Pairs (mine, buffer): mine goes to the next rank, the buffer gets the previous
    rank's."""
    for mine, buffer in tensors:
        buffer.copy_(rotate(mine.contiguous(), 1, group=Group.of(cp_group)))


def _direct_exchange(
    tensors: list[tuple[Tensor, Tensor]],
    *,
    cp_group: Any,
    cp_rank: int,
    send_cp_rank: int,
    recv_cp_rank: int,
) -> None:
    """Pairs (mine, buffer): mine goes to `send_cp_rank`, the buffer gets that of
    `recv_cp_rank`; the distance is the same on all ranks."""
    for mine, buffer in tensors:
        buffer.copy_(rotate(mine.contiguous(), send_cp_rank - cp_rank, group=Group.of(cp_group)))


def _collect_ring_kv_chunks(ctx: Any) -> list[Chunk]:
    """Every rank's keys, this rank's first, then against the order of ranks."""
    return collect_chunks(sys.modules[__name__], ctx)


# What these were when nobody had replaced them.
_OWN = {
    name: globals()[name]
    for name in (
        "_run_gemma4_flex_chunk",
        "_collect_ring_kv_chunks",
        "_ring_exchange",
        "_direct_exchange",
    )
}


def _is_replaced() -> bool:
    return any(globals()[name] is not own for name, own in _OWN.items())


def _chunk_function() -> Callable[..., tuple[Tensor, Tensor, Tensor | None, int]]:
    own = _run_gemma4_flex_chunk is _OWN["_run_gemma4_flex_chunk"]
    return _wide_chunk if own else _run_gemma4_flex_chunk


def _ring(who: str, module: Any, ctx: Any) -> Tensor:
    if ctx.dropout_p:
        raise NotImplementedError(
            f"{who}: dropout_p is {ctx.dropout_p}; attention over ranks has no dropout; set it to 0"
        )
    group = functools.partial(_group_of, who, ctx)
    if _is_replaced():
        return _ring_of_chunks(who, module, ctx, group, None)
    rows = rows_of(who, ctx.metadata, ctx.query, group())
    layout = rows.layout(ctx.cp_size, module, bool(ctx.is_causal))
    if layout is None:
        return _ring_of_chunks(who, module, ctx, group, rows)
    out = attend(
        ctx.query,
        ctx.key,
        ctx.value,
        attention=layout,
        group=group(),
        strategy="ring",
        scale=None if ctx.scale is None else float(ctx.scale),
    )
    assert isinstance(out, Tensor)
    return out


def _ring_of_chunks(
    who: str, module: Any, ctx: Any, group: Callable[[], Group], rows: Rows | None
) -> Tensor:
    """Chunk by chunk. Groups that are known from token types alone are numbered over
    whole rows first: numbers of a shard would meet others on the next."""
    metadata = dict(ctx.metadata)
    ctx = replace(ctx, module=module)
    types_alone = metadata.get(TYPES) is not None and metadata.get(GROUPS) is None
    if ctx.cp_size > 1 and types_alone and not is_strict():
        rows = rows_of(who, metadata, ctx.query, group()) if rows is None else rows
        assert rows.groups is not None
        at = ctx.cp_rank * ctx.seq_local
        groups = rows.groups[:, at : at + ctx.seq_local]
        ctx = replace(ctx, metadata=metadata | {GROUPS: groups.to(ctx.query.device)})
    out: Tensor = ChunkRing.apply(ctx.query, ctx.key, ctx.value, ctx, sys.modules[__name__])  # type: ignore[no-untyped-call]
    return out


def _group_of(who: str, ctx: Any) -> Group:
    if ctx.cp_size == 1:
        return Group()
    group = Group.of(ctx.cp_group)
    if (group.rank(), group.size()) != (ctx.cp_rank, ctx.cp_size):
        raise ValueError(
            f"{who}: rank {ctx.cp_rank} of {ctx.cp_size} by the mesh, but rank {group.rank()} of "
            f"{group.size()} by its group"
        )
    return group


def _logged(ctx: Any, out: Tensor) -> Tensor:
    global _GEMMA4_CP_FLEX_RING_OK_LOGGED
    if not _GEMMA4_CP_FLEX_RING_OK_LOGGED:
        _GEMMA4_CP_FLEX_RING_OK_LOGGED = True
        logger.info(
            "Gemma4 attention over %s ranks: q %s, local k %s",
            ctx.cp_size,
            shape_of(ctx.query),
            shape_of(ctx.key),
        )
    return out


@public
def _run_gemma4_cp_ring_attention_forward(attention_module: Any, ctx: Any) -> Tensor:
    """The attention of this rank's queries to the keys of all, without gradients."""
    with torch.no_grad():
        return _logged(ctx, _ring("_run_gemma4_cp_ring_attention_forward", attention_module, ctx))


@public
def _run_gemma4_cp_ring_attention(attention_module: Any, ctx: Any) -> Tensor:
    """The attention of this rank's queries to the keys of all ranks. Every rank calls,
    with the same metadata tensors there or absent, forward and backward."""
    return _logged(ctx, _ring("_run_gemma4_cp_ring_attention", attention_module, ctx))


@public
def _gemma4_cp_manual_attention(
    attention_module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp_mesh: Mesh,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kwargs: dict[str, Any],
) -> Tensor:
    """The ring with the metadata that the hooks, or the caller, left on the module.
    `attn_mask` is not read: the metadata says who sees whom."""
    who = "_gemma4_cp_manual_attention"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor_at(who, name, tensor).dim() != 4:
            raise ValueError(
                f"{who}: `{name}` is {shape_of(tensor)}; expected [rows, heads, tokens, width]"
            )
    if query.shape[2] != key.shape[2] or key.shape[2] != value.shape[2]:
        raise ValueError(
            f"{who}: `query`, `key` and `value` have {query.shape[2]}, {key.shape[2]} and "
            f"{value.shape[2]} tokens; expected this rank's tokens in each"
        )
    group, size = cp_mesh.get_group(), mesh_size(cp_mesh)
    rank = _rank_of(who, cp_mesh, group, size)
    tokens = key.shape[2]
    ctx = CPRingAttentionContext(
        module=attention_module,
        query=query,
        key=key,
        value=value,
        cp_mesh=cp_mesh,
        cp_group=group,
        cp_size=size,
        cp_rank=rank,
        seq_local=tokens,
        seq_full=tokens * size,
        seq_global_start=rank * tokens,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=bool(enable_gqa) or query.shape[1] != key.shape[1],
        kwargs=kwargs,
        metadata=dict(sdpa_route.metadata_of(attention_module)),
        metadata_seq_dims=dict(
            getattr(attention_module, "_cp_manual_metadata_seq_dims", None) or {}
        ),
    )
    return _run_gemma4_cp_ring_attention(attention_module, ctx)


def _rank_of(who: str, mesh: Any, group: Any, size: int) -> int:
    if isinstance(group, _C.Group):
        return check_rank(who, group.rank(), size)
    if size == 1:
        return 0
    return cp_rank(who, mesh, torch.distributed, ask_mesh=True)


@public
def _build_packed_ring_segments(q_ids: Tensor, k_ids: Tensor) -> dict[str, Any] | None:
    """Tokens of the documents that two shards [B, S] share, as paired segments; None
    where they share none."""
    return build_segments(q_ids, k_ids)


def _routed(cp_mesh: Any, module: Any, call: dict[str, Any]) -> Tensor:
    """scaled_dot_product_attention, called inside of `module`."""
    q, k, v = (sdpa_route.as_autocast(call.pop(name)) for name in ("query", "key", "value"))
    call.pop("is_causal", None)
    # Looked up when called, as everything that users replace.
    return _gemma4_cp_manual_attention(
        module,
        q,
        k,
        v,
        cp_mesh=cp_mesh,
        attn_mask=call.pop("attn_mask", None),
        dropout_p=call.pop("dropout_p", 0.0),
        is_causal=True,
        scale=call.pop("scale", None),
        enable_gqa=call.pop("enable_gqa", False),
        kwargs=call,
    )


def _install_gemma4_cp_ring_sdpa(attention_module: Any, cp_mesh: Any) -> None:
    if not isinstance(attention_module, torch.nn.Module):
        kind = type(attention_module).__name__
        raise TypeError(f"setup_cp_attention: the module is a {kind}; hooks need a Module")
    sdpa_route.install(attention_module, functools.partial(_routed, cp_mesh))
    attention_module._cp_uses_attention_hook = True  # type: ignore[assignment]


def _manual(attention_module: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    return _gemma4_cp_manual_attention(attention_module, *args, **kwargs)


@public
def attach_gemma4_cp_ring_attention(attention_module: Any, *, use_ffpa: bool = False) -> None:
    """Marks an attention module with its metadata and gives it `setup_cp_attention`,
    which takes the mesh and routes the module's attention over its ranks, and
    `run_cp_manual_attention`, the attention itself.

    There is one path for all head dimensions: `use_ffpa` changes nothing.
    """
    attention_module._gemma4_cp_use_ffpa = bool(use_ffpa)
    attention_module._cp_manual_metadata_keys = METADATA_KEYS
    attention_module._cp_manual_metadata_seq_dims = {key: 1 for key in METADATA_KEYS}
    attention_module.run_cp_manual_attention = MethodType(_manual, attention_module)
    attention_module.setup_cp_attention = MethodType(_install_gemma4_cp_ring_sdpa, attention_module)
