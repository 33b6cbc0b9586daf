"""GLM's sparse attention: key windows, backend choice, kernel entry points.

The two kernels are operators of this library, on CPU and CUDA; TileLang is not
needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import longspan
from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import integer, is_integral, shape_of, tensor_at
from longspan.compat.nemo._edge import public, renamed
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

# The channels of the reference's kernel: latent, and rotary behind them.
_LATENT = 512
_ROPE = 64


# The three entry points below are replaceable; the functions of this module look
# them up when called.


@public
def _slime_generate_varlen_mask_params(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Key windows of documents without pads: starts int32, ends int64."""
    who = "_slime_generate_varlen_mask_params"
    return _nemo.compact_windows(_offsets(who, "cu_seqlens", cu_seqlens))


@public
def _slime_lighting_indexer(
    index_q: Tensor,
    index_k: Tensor,
    head_weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(scores, indices) of the best keys of each query, [Tq, topk] both.

    Indices ascend, equal scores go to the lower key, and an empty slot is -1 with
    a score of -inf. The scores carry a gradient. In strict mode scores descend.
    """
    scores, indices = _select(index_q, index_k, head_weights, starts, ends, topk, True)
    if is_strict():
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        indices = indices.gather(-1, order)
    return scores, indices


@public
def _sparse_mla(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) over the chosen keys: [Tq, n, C] and [Tq, n].

    Values are the first C = `value_dim` channels of kv. Unless told, C is 512 of
    576 channels, the only shape of the reference; of others all channels come
    back, and the caller takes those that are values. The logarithm is natural
    (-inf: saw no key), base 2 in strict mode.
    """
    who = "_sparse_mla"
    for name, value in (("q", q), ("kv", kv), ("indices", indices)):
        tensor_at(who, name, value)
    if value_dim is None:
        value_dim = _LATENT if q.dim() and q.shape[-1] == _LATENT + _ROPE else 0
    with renamed():
        out, lse = torch.ops.longspan.attend_selected(q, kv, indices, None, float(scale), value_dim)
    return out, lse * math.log2(math.e) if is_strict() else lse


class _slime_sparse_mla:
    apply = staticmethod(_sparse_mla)


# Ours, to see whether users have put something in their place.
_COMPACT = _slime_generate_varlen_mask_params
_INDEXER = _slime_lighting_indexer
_MLA = _slime_sparse_mla.apply


def _select(
    index_q: Tensor,
    index_k: Tensor,
    head_weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    with_scores: bool,
) -> tuple[Tensor, Tensor]:
    who = "_slime_lighting_indexer"
    for name, value in (("index_q", index_q), ("index_k", index_k), ("head_weights", head_weights)):
        tensor_at(who, name, value)
    topk = integer(who, "topk", topk)
    if is_strict() and index_k.dim() and topk > index_k.shape[0]:
        raise RuntimeError(f"{who}: selected {topk} keys of {index_k.shape[0]}")
    names = {"q": "index_q", "k": "index_k", "weights": "head_weights"}
    with renamed(**names, start="starts", end="ends"):
        scores, indices = torch.ops.longspan.select_keys(
            index_q, index_k, _weights(index_q, head_weights), starts, ends, topk, with_scores
        )
    return scores, indices


def _weights(index_q: Tensor, head_weights: Tensor) -> Tensor:
    """[Tq, Hi] in what scores are summed in; a single head may have lost its axis."""
    if index_q.dim() == 3 and head_weights.dim() == 1 and index_q.shape[1] == 1:
        head_weights = head_weights.unsqueeze(-1)
    elif head_weights.dim() == index_q.dim() and head_weights.shape[-1] == 1:
        head_weights = head_weights.squeeze(-1)
    return head_weights.to(torch.float64 if index_q.dtype == torch.float64 else torch.float32)


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
    return _nemo.padded_windows(
        _offsets(who, "cu_seqlens", cu_seqlens),
        _offsets(who, "cu_seqlens_padded", cu_seqlens_padded),
    )


_PADDED = _generate_padded_varlen_mask_params


def _all_cuda(*tensors: Tensor) -> bool:
    """Whether every tensor is on a CUDA device; true for none."""
    return all(tensor.is_cuda for tensor in tensors)


@public
def is_dsa_kernel_available(name: str) -> bool:
    """Whether the kernel "indexer" or "sparse_attn" can run here: both, on CPU too."""
    if name not in _KERNELS:
        raise ValueError(
            f"is_dsa_kernel_available: no kernel {name!r}; there are "
            f"{' and '.join(map(repr, _KERNELS))}"
        )
    return True


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


def _windows(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, stream: Any
) -> tuple[Tensor, Tensor]:
    """The key windows of a stream. On a device nothing is read back: the rule with
    slots gives the compact windows too where the two lists are equal."""
    ours = (
        _slime_generate_varlen_mask_params is _COMPACT
        and _generate_padded_varlen_mask_params is _PADDED
        and not is_strict()
    )
    if ours and isinstance(stream, Tensor) and stream.dim() and _on_device(cu_seqlens):
        who = "tilelang_indexer_topk"
        slots = None if cu_seqlens_padded is cu_seqlens else cu_seqlens_padded
        if slots is not None:
            slots = _offsets(who, "cu_seqlens_padded", slots).to(cu_seqlens.device)
        return longspan.dsa.document_windows(
            _offsets(who, "cu_seqlens", cu_seqlens), slots, tokens=stream.shape[0]
        )
    if (
        cu_seqlens_padded is None
        or cu_seqlens_padded is cu_seqlens
        or torch.equal(cu_seqlens, cu_seqlens_padded)
    ):
        starts, ends = _slime_generate_varlen_mask_params(cu_seqlens)
    else:
        starts, ends = _generate_padded_varlen_mask_params(cu_seqlens, cu_seqlens_padded)
    return (starts, ends) if is_strict() else _to_the_end(starts, ends, stream)


def _on_device(offsets: Any) -> bool:
    return isinstance(offsets, Tensor) and offsets.device.type != "cpu"


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

    Tokens behind the last document see only themselves. No gradient.
    """
    stream = index_q if query_indices is None else index_k
    starts, ends = _windows(cu_seqlens, cu_seqlens_padded, stream)
    if query_indices is not None:
        rows = query_indices.reshape(-1).to(torch.int64)
        starts = starts.index_select(0, rows)
        ends = ends.index_select(0, rows)
    windows = (starts.to(torch.int32), ends.to(torch.int32))
    indexer = _slime_lighting_indexer
    if indexer is _INDEXER and not is_strict():  # nobody asks for the scores
        _, indices = _select(index_q, index_k, head_weights, *windows, index_topk, False)
    else:
        _, indices = indexer(index_q, index_k, head_weights, *windows, index_topk)
    return indices.to(torch.int32).unsqueeze(1).contiguous()


@public
def tilelang_sparse_attention(
    q: Tensor,
    kv_latent: Tensor,
    topk_indices: Tensor,
    w_vc: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Attention over chosen latent keys, projected to values: [Tq, n, dv].

    `w_vc` [n, dv, C] tells how many channels of a key are its value. Give the
    weight that the model really uses, adapters included.
    """
    who = "tilelang_sparse_attention"
    if tensor_at(who, "w_vc", w_vc).dim() != 3:
        raise ValueError(f"{who}: `w_vc` is {shape_of(w_vc)}; expected [heads, dv, C]")
    channels = w_vc.shape[2]
    apply = _slime_sparse_mla.apply
    if apply is _MLA:
        with renamed(kv="kv_latent", indices="topk_indices"):
            latent, _ = apply(q, kv_latent, topk_indices, softmax_scale, channels)
    else:
        latent, _ = apply(q, kv_latent, topk_indices, softmax_scale)
    if latent.shape[-1] > channels:
        latent = latent[..., :channels]
    if tuple(latent.shape[-2:]) != (w_vc.shape[0], channels):
        raise ValueError(
            f"{who}: `w_vc` is {shape_of(w_vc)} but attention gave {shape_of(latent)}; "
            "expected [heads, dv, C] for [tokens, heads, C]"
        )
    return torch.einsum("thc,hdc->thd", latent, w_vc)
