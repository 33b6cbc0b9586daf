"""GLM's sparse attention: key windows, backend choice, kernel entry points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from longspan import _C
from longspan.compat.nemo._batch import is_integral, shape_of, tensor_at
from longspan.compat.nemo._edge import public
from longspan.compat.nemo._strict import is_strict

__all__ = [
    "DsaIndexerBackend",
    "DsaSparseAttentionBackend",
    "is_dsa_kernel_available",
    "should_use_tilelang",
    "tilelang_indexer_topk",
    "tilelang_sparse_attention",
]

DsaIndexerBackend = Literal["torch", "tilelang", "auto"]
DsaSparseAttentionBackend = Literal["torch", "tilelang", "auto"]

_KERNELS = ("indexer", "sparse_attn")
_BACKENDS = ("torch", "tilelang", "auto")


# The three entry points below are replaceable; the functions of this module look
# them up when called.


@public
def _slime_generate_varlen_mask_params(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Key windows of documents without pads: starts int32, ends int64."""
    who = "_slime_generate_varlen_mask_params"
    return _C.compact_windows(_offsets(who, "cu_seqlens", cu_seqlens))


def _slime_lighting_indexer(
    index_q: Tensor,
    index_k: Tensor,
    head_weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(scores, indices) of the best keys of each query."""
    raise NotImplementedError("tilelang_indexer_topk: comes with the lightning indexer kernels")


class _slime_sparse_mla:
    @staticmethod
    def apply(q: Tensor, kv: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp) over the chosen keys."""
        raise NotImplementedError(
            "tilelang_sparse_attention: comes with the sparse attention kernels"
        )


def _offsets(who: str, name: str, value: Any) -> Tensor:
    offsets = tensor_at(who, name, value)
    if offsets.dim() != 1 or not is_integral(offsets) or offsets.numel() == 0:
        raise ValueError(
            f"{who}: `{name}` is {offsets.dtype} {shape_of(offsets)}; expected a "
            "vector of integer offsets"
        )
    return offsets.to(torch.int32)


@public
def _generate_padded_varlen_mask_params(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor
) -> tuple[Tensor, Tensor]:
    """Key windows [start, end) of every token when documents carry pads."""
    who = "_generate_padded_varlen_mask_params"
    return _C.padded_windows(
        _offsets(who, "cu_seqlens", cu_seqlens),
        _offsets(who, "cu_seqlens_padded", cu_seqlens_padded),
    )


def _all_cuda(*tensors: Tensor) -> bool:
    """Whether every tensor is on a CUDA device; true for none."""
    return all(tensor.is_cuda for tensor in tensors)


@public
def is_dsa_kernel_available(name: str) -> bool:
    """Whether the kernel "indexer" or "sparse_attn" can run here."""
    if name not in _KERNELS:
        raise ValueError(
            f"is_dsa_kernel_available: no kernel {name!r}; there are "
            f"{' and '.join(map(repr, _KERNELS))}"
        )
    return False


@public
def should_use_tilelang(
    backend: str,
    *,
    available: bool,
    kernel_name: str,
    tensors: Sequence[Tensor],
    require_bf16: bool = False,
) -> bool:
    """Whether a layer with this backend runs the kernel on these tensors."""
    if backend == "torch":
        return False
    if backend not in _BACKENDS:
        if is_strict():
            return False
        raise ValueError(
            f"should_use_tilelang: no backend {backend!r}; there are "
            f"{', '.join(map(repr, _BACKENDS))}"
        )
    fits = (
        available
        and _all_cuda(*tensors)
        and (not require_bf16 or all(t.dtype == torch.bfloat16 for t in tensors))
    )
    if not fits and backend == "tilelang":
        raise RuntimeError(
            f"TileLang backend was requested for {kernel_name}, but it needs the "
            f"kernel (available: {available}) and CUDA"
            f"{' bfloat16' if require_bf16 else ''} tensors, got "
            f"{[f'{t.device} {t.dtype}' for t in tensors]}"
        )
    return bool(fits)


def _to_the_end(starts: Tensor, ends: Tensor, stream: Any) -> tuple[Tensor, Tensor]:
    """Windows for every token of the stream; behind the documents each sees itself."""
    covered = starts.shape[0]
    if not isinstance(stream, Tensor) or stream.dim() == 0 or stream.shape[0] <= covered:
        return starts, ends
    behind = torch.arange(covered, stream.shape[0], device=starts.device)
    return (
        torch.cat([starts, behind.to(starts.dtype)]),
        torch.cat([ends, (behind + 1).to(ends.dtype)]),
    )


@public
def tilelang_indexer_topk(
    index_q: Tensor,
    index_k: Tensor,
    head_weights: Tensor,
    cu_seqlens: Tensor,
    index_topk: int,
    query_indices: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """The best keys of every query, [Tq, 1, K] int32, -1 = empty slot.

    Tokens behind the last document see only themselves.
    """
    if cu_seqlens_padded is None or torch.equal(cu_seqlens, cu_seqlens_padded):
        starts, ends = _slime_generate_varlen_mask_params(cu_seqlens)
    else:
        starts, ends = _generate_padded_varlen_mask_params(cu_seqlens, cu_seqlens_padded)
    if not is_strict():
        stream = index_q if query_indices is None else index_k
        starts, ends = _to_the_end(starts, ends, stream)
    if query_indices is not None:
        rows = query_indices.reshape(-1).to(torch.int64)
        starts = starts.index_select(0, rows)
        ends = ends.index_select(0, rows)
    _, indices = _slime_lighting_indexer(
        index_q,
        index_k,
        head_weights,
        starts.to(torch.int32),
        ends.to(torch.int32),
        index_topk,
    )
    return indices.to(torch.int32).unsqueeze(1).contiguous()


def tilelang_sparse_attention(
    q: Tensor,
    kv_latent: Tensor,
    topk_indices: Tensor,
    w_vc: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Attention over chosen latent keys, projected to values: [Tq, n, dv]."""
    latent, _ = _slime_sparse_mla.apply(q, kv_latent, topk_indices, softmax_scale)
    return torch.einsum("thc,hdc->thd", latent, w_vc)
