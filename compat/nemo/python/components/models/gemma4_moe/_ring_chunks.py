"""Attention to one chunk of keys, and joining two answers, in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from longspan.compat.nemo.components.models.gemma4_moe._ring_masks import (
    DOCUMENTS,
    GROUPS,
    PADS,
    TYPES,
    Metadata,
    sees_vision_groups,
    vision_group_ids,
    window_of,
)


def base_mask(module: Any, ctx: Any, q_idx: Any, kv_idx: Any, kv_global_start: int = 0) -> Any:
    """Causality and the window between local queries and the keys of a chunk."""
    query = q_idx + ctx.seq_global_start
    key = kv_idx + kv_global_start
    allowed = key <= query
    if not ctx.is_causal:
        allowed = torch.ones_like(allowed)
    window = window_of(module)
    return allowed if window is None else allowed & (query - key < window)


def chunk_mask(
    module: Any, ctx: Any, base: Any, metadata_chunk: Metadata, keys: int, kv_global_start: int
) -> tuple[Tensor, Tensor | None]:
    """[B or 1, L, keys] of what is seen, and the queries [B, L] whose output is 0."""
    device = ctx.query.device
    q_idx = torch.arange(ctx.query.shape[2], device=device).unsqueeze(1)
    kv_idx = torch.arange(keys, device=device).unsqueeze(0)
    allowed = base(module, ctx, q_idx, kv_idx, kv_global_start).unsqueeze(0)
    first = (kv_idx == 0).unsqueeze(0)
    empty: Tensor | None = None

    if sees_vision_groups(module):
        mine, theirs = _groups(ctx.metadata), _groups(metadata_chunk)
        if mine is not None and theirs is not None:
            same = mine.unsqueeze(2) == theirs.unsqueeze(1)
            allowed = allowed | (same & (mine >= 0).unsqueeze(2))
    q_documents, k_documents = ctx.metadata.get(DOCUMENTS), metadata_chunk.get(DOCUMENTS)
    if q_documents is not None:
        empty = q_documents <= 0
    if q_documents is not None and k_documents is not None:
        allowed = allowed & (q_documents.unsqueeze(2) == k_documents.unsqueeze(1))
        # No row is left without a key; what it then answers is taken away again.
        allowed = torch.where((q_documents <= 0).unsqueeze(2), first, allowed)
    q_pads, k_pads = ctx.metadata.get(PADS), metadata_chunk.get(PADS)
    if k_pads is not None:
        allowed = allowed & ~k_pads.to(torch.bool).unsqueeze(1)
    if q_pads is not None:
        pads = q_pads.to(torch.bool)
        allowed = torch.where(pads.unsqueeze(2), first, allowed)
        empty = pads if empty is None else empty | pads
    return allowed, empty


def _groups(metadata: Metadata) -> Tensor | None:
    groups, types = metadata.get(GROUPS), metadata.get(TYPES)
    return vision_group_ids(types) if groups is None and types is not None else groups


def attend_to_chunk(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, in float32 or more; 0 and -inf where nothing is seen."""
    with torch.autocast(q.device.type, enabled=False):
        return _attend_to_chunk(q, k, v, allowed, scale)


def _attend_to_chunk(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    shared = q.shape[1] // k.shape[1]
    queries = q.to(wide).reshape(q.shape[0], k.shape[1], shared, *q.shape[2:])
    keys, values = k.to(wide).unsqueeze(2), v.to(wide).unsqueeze(2)
    allowed = allowed.unsqueeze(1).unsqueeze(1)
    blind = ~allowed.any(dim=-1, keepdim=True)
    # Blind queries see all keys for a moment: softmax of nothing has no gradient.
    scores = (queries @ keys.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~(allowed | blind), -math.inf)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(blind.squeeze(-1), -math.inf)
    out = (torch.softmax(scores, dim=-1) @ values).masked_fill(blind, 0)
    return out.flatten(1, 2), lse.flatten(1, 2)


def run_chunk(
    module: Any,
    ctx: Any,
    base: Any,
    *,
    key_chunk: Tensor,
    value_chunk: Tensor,
    metadata_chunk: Metadata,
    kv_global_start: int,
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Output, log-sum-exp, rows without an output, and the head dimension rounded up
    to a power of two; `base` is the mask without metadata."""
    keys = key_chunk.shape[2]
    allowed, empty = chunk_mask(module, ctx, base, metadata_chunk, keys, kv_global_start)
    out, lse = attend_to_chunk(ctx.query, key_chunk, value_chunk, allowed, ctx.scale)
    return without_rows(out, empty), lse, empty, 1 << (ctx.query.shape[-1] - 1).bit_length()


def without_rows(out: Tensor, empty: Tensor | None) -> Tensor:
    return out if empty is None else out.masked_fill(empty[:, None, :, None], 0)


def merge(out: Tensor, lse: Tensor, chunk_out: Tensor, chunk_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two answers over different keys become one; -inf saw no key. Differentiable."""
    blind = torch.isneginf(lse) & torch.isneginf(chunk_lse)
    lse, chunk_lse = lse.masked_fill(blind, 0), chunk_lse.masked_fill(blind, 0)
    both = torch.logaddexp(lse, chunk_lse)
    weight = torch.exp(lse - both).masked_fill(blind, 0).unsqueeze(-1)
    chunk_weight = torch.exp(chunk_lse - both).masked_fill(blind, 0).unsqueeze(-1)
    return out * weight + chunk_out * chunk_weight, both.masked_fill(blind, -math.inf)
