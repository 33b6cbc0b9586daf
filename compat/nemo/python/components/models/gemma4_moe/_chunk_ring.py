"""The ring chunk by chunk: every rank's keys pass by, and answers are joined.

Its parts are looked up in the module that users see (`seams`) when they are called,
in backward too, so that replacing them has an effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspan.compat.nemo import _nemo
from longspan.compat.nemo.components.models.gemma4_moe._ring_chunks import without_rows

Metadata = dict[str, Tensor | None]
#: Owner, keys, values and metadata of one rank's share.
Chunk = tuple[int, Tensor, Tensor, Metadata]


def collect_chunks(seams: Any, ctx: Any) -> list[Chunk]:
    metadata = {k: None if t is None else t.contiguous() for k, t in ctx.metadata.items()}
    chunks: list[Chunk] = [(ctx.cp_rank, ctx.key.contiguous(), ctx.value.contiguous(), metadata)]
    for step in range(1, ctx.cp_size):
        _, key, value, metadata = chunks[-1]
        next_key, next_value = torch.empty_like(key), torch.empty_like(value)
        next_metadata = seams._metadata_like(metadata)
        pairs = [(key, next_key), (value, next_value)]
        for name in sorted(metadata):
            mine, buffer = metadata[name], next_metadata[name]
            if mine is not None and buffer is not None:
                pairs.append((mine, buffer))
        seams._ring_exchange(pairs, cp_group=ctx.cp_group, cp_rank=ctx.cp_rank, cp_size=ctx.cp_size)
        owner = _nemo.ring_owner(ctx.cp_rank, step, ctx.cp_size)
        chunks.append((owner, next_key, next_value, next_metadata))
    return chunks


def attend_chunks(seams: Any, ctx: Any, chunks: list[Chunk]) -> Tensor:
    """Local queries and all chunks, in the order given."""
    chunk = seams._chunk_function()
    out: Tensor | None = None
    lse: Tensor | None = None
    empty: Tensor | None = None
    for owner, key, value, metadata in chunks:
        chunk_out, chunk_lse, empty, _ = chunk(
            ctx.module,
            ctx,
            key_chunk=key,
            value_chunk=value,
            metadata_chunk=metadata,
            kv_global_start=owner * ctx.seq_local,
        )
        out, lse = seams._merge_flex_chunk(out, lse, chunk_out, chunk_lse)
    if out is None:
        raise RuntimeError("_run_gemma4_cp_ring_attention: the ring gave no output chunks")
    return without_rows(out, empty).to(ctx.query.dtype)


class ChunkRing(torch.autograd.Function):
    """Keeps q, k, v and metadata; backward goes around the ring again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Any, seams: Any
    ) -> Tensor:
        ctx.seams = seams
        ring = replace(ring, query=query, key=key, value=value)
        ctx.save_for_backward(query, key, value)
        nothing: Any = None
        ctx.ring = replace(
            ring,
            query=nothing,
            key=nothing,
            value=nothing,
            metadata=seams._detach_metadata(ring.metadata),
        )
        return attend_chunks(seams, ring, seams._collect_ring_kv_chunks(ring))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        seams = ctx.seams
        query, key, value = (t.detach() for t in ctx.saved_tensors)
        ring = replace(ctx.ring, query=query.requires_grad_(), key=key, value=value)
        chunks = [
            (owner, k.detach().requires_grad_(), v.detach().requires_grad_(), metadata)
            for owner, k, v, metadata in seams._collect_ring_kv_chunks(ring)
        ]
        with torch.enable_grad():
            out = attend_chunks(seams, ring, chunks)
        leaves = [query, *(t for _, k, v, _ in chunks for t in (k, v))]
        found = torch.autograd.grad(out, leaves, grads[0], allow_unused=True)
        of_leaves = [seams._zero_if_none(g, leaf) for g, leaf in zip(found, leaves, strict=True)]
        keys = {chunk[0]: g for chunk, g in zip(chunks, of_leaves[1::2], strict=True)}
        values = {chunk[0]: g for chunk, g in zip(chunks, of_leaves[2::2], strict=True)}
        return of_leaves[0], *_home(seams, ring, keys, values), None, None


def _home(
    seams: Any, ring: Any, keys: dict[int, Tensor], values: dict[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients for every owner become the sum of all ranks' for this one."""
    own = keys[ring.cp_rank], values[ring.cp_rank]
    sums = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in own]
    for distance in range(1, ring.cp_size):
        to = _nemo.ring_owner(ring.cp_rank, distance, ring.cp_size)
        buffers = [torch.empty_like(g) for g in own]
        seams._direct_exchange(
            [(keys[to], buffers[0]), (values[to], buffers[1])],
            cp_group=ring.cp_group,
            cp_rank=ring.cp_rank,
            send_cp_rank=to,
            recv_cp_rank=_nemo.ring_owner(ring.cp_rank, ring.cp_size - distance, ring.cp_size),
        )
        sums = [total + buffer for total, buffer in zip(sums, buffers, strict=True)]
    return sums[0].to(own[0].dtype), sums[1].to(own[1].dtype)
