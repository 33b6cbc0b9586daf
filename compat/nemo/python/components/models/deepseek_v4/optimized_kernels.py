"""DeepSeek V4's sparse attention: index lists, attention over them, the indexer; and
the Sinkhorn normalisation of its hyper-connections.

All backends run the operators of this library, on CPU and CUDA. What a backend
still decides is what the reference ties to it: "tilelang" refuses tensors that
are not on a device, and the kernel's scores are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import longspan
from longspan.compat.nemo._batch import integer, is_integral, shape_of, tensor_at
from longspan.compat.nemo._edge import public, renamed
from longspan.compat.nemo._strict import is_strict
from longspan.compat.nemo.components.models.glm_moe_dsa.optimized_kernels import (
    should_use_tilelang,
)

__all__ = [
    "Dsv4IndexerBackend",
    "Dsv4SinkhornBackend",
    "Dsv4SparseAttentionBackend",
    "build_dsv4_sparse_topk_indices",
    "dsv4_indexer_scores",
    "dsv4_indexer_topk_scores",
    "dsv4_sinkhorn_normalize",
    "dsv4_sparse_attention",
    "is_dsv4_kernel_available",
]

Dsv4SparseAttentionBackend = Literal["torch", "sparse_torch", "tilelang", "auto"]
Dsv4IndexerBackend = Literal["torch", "tilelang", "auto"]
Dsv4SinkhornBackend = Literal["torch", "tilelang", "auto"]

# What messages call the kernels; this library has them all.
_KERNELS = {"sinkhorn": "sinkhorn", "sparse_attn": "sparse attention", "indexer": "indexer"}
_PLAIN = ("torch", "sparse_torch")
_BACKENDS = (*_PLAIN, "tilelang", "auto")


@public
def is_dsv4_kernel_available(name: str) -> bool:
    """Whether "sinkhorn", "sparse_attn" and "indexer" run: yes, on CPU too."""
    if name not in _KERNELS:
        raise ValueError(
            f"is_dsv4_kernel_available: no kernel {name!r}; there are "
            f"{', '.join(map(repr, _KERNELS))}"
        )
    return True


def _uses_kernel(
    who: str, backend: str, kernel: str, tensors: Sequence[Tensor], *, bf16: bool = True
) -> bool:
    if backend in _PLAIN:
        return False
    if backend not in _BACKENDS:
        if is_strict():
            return False
        raise ValueError(
            f"{who}: no backend {backend!r}; there are {', '.join(map(repr, _BACKENDS))}"
        )
    return should_use_tilelang(
        backend,
        available=is_dsv4_kernel_available(kernel),
        kernel_name=_KERNELS[kernel],
        tensors=tensors,
        require_bf16=bf16,
    )


def _alike(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their types, which the operators want."""
    if not (q.is_floating_point() and keys.is_floating_point()):
        return q, keys
    wide = torch.promote_types(q.dtype, keys.dtype)
    return q.to(wide), keys.to(wide)


def _axes(who: str, name: str, value: Any, axes: str) -> Tensor:
    """A tensor with as many axes as `axes` names."""
    tensor = tensor_at(who, name, value)
    if tensor.dim() != axes.count(",") + 1:
        raise ValueError(f"{who}: `{name}` is {shape_of(tensor)}; expected {axes}")
    return tensor


def _count(who: str, name: str, value: Any, least: int = 0) -> int:
    number = integer(who, name, value)
    if number < least:
        raise ValueError(f"{who}: {name} is {number}; expected {least} or more")
    return number


@public
def build_dsv4_sparse_topk_indices(
    *,
    batch_size: int,
    seq_len: int,
    key_len: int,
    window_size: int,
    device: torch.device | str,
    attention_mask: Tensor | None = None,
    compress_ratio: int = 0,
    compressed_topk: Tensor | None = None,
    n_pooled: int = 0,
    vanilla_key_len: int | None = None,
    q_positions: Tensor | None = None,
) -> Tensor:
    """Which keys each query sees, int64 [B, L, M]: its window, then pools; -1 = none."""
    who = "build_dsv4_sparse_topk_indices"
    batch_size, seq_len = _count(who, "batch_size", batch_size), _count(who, "seq_len", seq_len)
    key_len = _count(who, "key_len", key_len)
    window = _count(who, "window_size", window_size)
    pools = _count(who, "n_pooled", n_pooled)
    given = seq_len if vanilla_key_len is None else vanilla_key_len
    vanilla = _count(who, "vanilla_key_len", given)
    chosen = None
    if pools and compressed_topk is not None:
        chosen = _axes(who, "compressed_topk", compressed_topk, "[rows, tokens, pools]")
        _check_rows(who, "compressed_topk", chosen, batch_size, seq_len)
        chosen = chosen.to(device).expand(batch_size, -1, -1)
    elif pools:
        compress_ratio = _count(who, "compress_ratio", compress_ratio, 1)
    positions = _positions(who, q_positions, batch_size, seq_len, device)
    with renamed(queries="q_positions", chosen="compressed_topk"):
        lists = longspan.dsa.window_lists(
            positions,
            # Without pools behind them, keys end where the list's keys end.
            keys=vanilla if pools else max(vanilla, key_len),
            window=window,
            pools=pools,
            ratio=integer(who, "compress_ratio", compress_ratio),
            chosen=chosen,
        )
    if not pools:
        lists = lists[..., : min(vanilla, window)]
    if key_len < (vanilla + pools if pools else vanilla):
        lists = lists.masked_fill(lists >= key_len, -1)
    if attention_mask is not None:
        lists = _hide(who, lists, attention_mask, key_len)
    return lists.contiguous()


def _check_rows(who: str, name: str, value: Tensor, rows: int, tokens: int) -> None:
    """[rows, tokens, ...], or one row for all."""
    if not is_integral(value):
        raise ValueError(f"{who}: `{name}` is {value.dtype}; expected integers")
    if value.shape[0] not in (1, rows) or value.shape[1] != tokens:
        raise ValueError(
            f"{who}: `{name}` is {shape_of(value)}; expected {rows} rows (or one) of {tokens}"
        )


def _positions(who: str, given: Any, rows: int, tokens: int, device: torch.device | str) -> Tensor:
    if given is None:
        return torch.arange(tokens, device=device).expand(rows, -1)
    positions = tensor_at(who, "q_positions", given)
    if positions.dim() == 2:
        _check_rows(who, "q_positions", positions, rows, tokens)
    elif positions.dim() != 1 or positions.shape[0] != tokens or not is_integral(positions):
        raise ValueError(
            f"{who}: `q_positions` is {positions.dtype} {shape_of(positions)}; expected "
            f"integers [{tokens}] or [{rows}, {tokens}]"
        )
    return positions.to(device=device, dtype=torch.int64).expand(rows, -1)


def _hide(who: str, lists: Tensor, given: Any, key_len: int) -> Tensor:
    """-1 where the mask hides the key; strict: where a number is below 0."""
    mask = tensor_at(who, "attention_mask", given)
    if mask.dim() != 4:
        raise ValueError(
            f"{who}: `attention_mask` is {shape_of(mask)}; expected rank 4, [rows, 1, tokens, keys]"
        )
    rows, tokens = lists.shape[:2]
    fits = mask.shape[0] in (1, rows) and mask.shape[2] == tokens and mask.shape[3] >= key_len
    if not fits or (mask.shape[1] != 1 and not is_strict()):
        raise ValueError(
            f"{who}: `attention_mask` is {shape_of(mask)}; expected "
            f"[{rows}, 1, {tokens}, {key_len}]"
        )
    mask = mask[:, 0].to(lists.device)
    if is_strict() and mask.dtype == torch.bool:
        mask = mask.to(torch.int32)
    hidden: Tensor = torch.ops.longspan.hide_listed(lists, mask)
    return hidden


@public
def dsv4_sparse_attention(
    q: Tensor,
    kv: Tensor,
    sinks: Tensor,
    topk_idxs: Tensor,
    sm_scale: float,
    *,
    backend: str,
) -> Tensor:
    """Attention of each query to its listed keys, which are values too: [B, S, H, D].

    `sinks` [H] is a logit without a value. An index outside [0, K) is no key, and a
    query without keys gets 0 and passes no gradient.
    """
    who = "dsv4_sparse_attention"
    _axes(who, "q", q, "[rows, tokens, heads, channels]")
    _axes(who, "kv", kv, "[rows, keys, channels]")
    _axes(who, "sinks", sinks, "[heads]")
    _axes(who, "topk_idxs", topk_idxs, "[rows, tokens, slots]")
    _uses_kernel(who, backend, "sparse_attn", (q, kv))
    queries, keys = _alike(q, kv)
    with renamed(sink="sinks", indices="topk_idxs"):
        out, _ = torch.ops.longspan.attend_selected(
            queries, keys, topk_idxs, sinks, float(sm_scale), 0
        )
    return out.to(q.dtype)  # type: ignore[no-any-return]


def _index_inputs(
    who: str, q: Any, pooled_kv: Any, weights: Any, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q and keys of one type, and the weights with the scale in them, in what scores
    are summed in."""
    _axes(who, "q", q, "[rows, tokens, heads, channels]")
    _axes(who, "pooled_kv", pooled_kv, "[rows, pools, channels]")
    _axes(who, "weights", weights, "[rows, tokens, heads]")
    queries, keys = _alike(q, pooled_kv)
    sums = torch.float64 if queries.dtype == torch.float64 else torch.float32
    return queries, keys, weights.to(sums) * float(softmax_scale)


@public
def dsv4_indexer_scores(
    q: Tensor,
    pooled_kv: Tensor,
    weights: Tensor,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: str,
    query_start: int = 0,
    query_total_len: int | None = None,
) -> Tensor:
    """The indexer's score of every pool for every query, float32 [B, S, P].

    Unmasked, except where the backend is the kernel: then a query at token
    ``query_start + i`` has -inf for pools that did not end at or before it.
    """
    who = "dsv4_indexer_scores"
    queries, keys, scaled = _index_inputs(who, q, pooled_kv, weights, softmax_scale)
    first = _count(who, "query_start", query_start)
    rows, tokens = q.shape[:2]
    if query_total_len is not None:
        total = integer(who, "query_total_len", query_total_len)
        if first + tokens > total:
            raise ValueError(
                f"{who}: {tokens} queries from {first} on do not fit query_total_len {total}"
            )
    start = end = None
    if _uses_kernel(who, backend, "indexer", (q, pooled_kv)):
        ratio = _count(who, "compress_ratio", compress_ratio, 1)
        at = torch.arange(first, first + tokens, device=q.device, dtype=torch.int32)
        end = torch.ops.longspan.ended_pools(at, ratio).expand(rows, -1)
        start = torch.zeros_like(end)
    with renamed(k="pooled_kv"):
        return longspan.dsa.index_scores(queries, keys, scaled, start=start, end=end)


@public
def dsv4_indexer_topk_scores(
    q: Tensor,
    pooled_kv: Tensor,
    weights: Tensor,
    topk_indices: Tensor,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: str,
) -> Tensor:
    """The scores of listed pools, float32 [B, S, slots]; -inf where there is no pool.

    Differentiable in q, pooled_kv and weights. `compress_ratio` changes nothing: the
    list already tells which pools there are.
    """
    who = "dsv4_indexer_topk_scores"
    queries, keys, scaled = _index_inputs(who, q, pooled_kv, weights, softmax_scale)
    _axes(who, "topk_indices", topk_indices, "[rows, tokens, slots]")
    _uses_kernel(who, backend, "indexer", (q, pooled_kv))
    with renamed(k="pooled_kv", indices="topk_indices"):
        scores: Tensor = torch.ops.longspan.score_selected(queries, keys, scaled, topk_indices)
    return scores


@public
def dsv4_sinkhorn_normalize(
    x: Tensor, *, backend: Dsv4SinkhornBackend, repeat: int, eps: float
) -> Tensor:
    """Matrices [.., rows, columns] made nearly doubly stochastic, like `x`.

    Softmax over the last dimension plus eps, columns divided by (their sum + eps),
    then `repeat - 1` times rows and columns likewise.
    """
    who = "dsv4_sinkhorn_normalize"
    tensor_at(who, "x", x)
    _uses_kernel(who, backend, "sinkhorn", (x,), bf16=False)
    steps = integer(who, "repeat", repeat)
    if is_strict():
        steps = max(steps, 1)
    with renamed():
        out: Tensor = torch.ops.longspan.sinkhorn_normalize(x, steps, float(eps))
    return out


# The same in plain torch: slow, obvious, and what the operators are compared with.


def sinkhorn_normalize_torch(x: Tensor, repeat: int, eps: float) -> Tensor:
    """`dsv4_sinkhorn_normalize`."""
    y = x.softmax(-1) + eps
    y = y / (y.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        y = y / (y.sum(-1, keepdim=True) + eps)
        y = y / (y.sum(-2, keepdim=True) + eps)
    return y


def _with_sink(scores: Tensor, sinks: Tensor, values: Tensor) -> Tensor:
    """Attention of scores [.., H, keys], -inf where there is no key, with a logit more
    for each head that has no value. Of no keys at all: 0, without gradient."""
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    extra = sinks.to(scores.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, extra.masked_fill(empty, 0)], -1).softmax(-1)[..., :-1]
    return (weights @ values).masked_fill(empty, 0)


def sparse_attention_torch(
    q: Tensor, kv: Tensor, sinks: Tensor, topk_idxs: Tensor, sm_scale: float
) -> Tensor:
    """`dsv4_sparse_attention`, by gathering every query's keys."""
    wide = torch.promote_types(q.dtype, torch.float32)
    there = (topk_idxs >= 0) & (topk_idxs < kv.shape[1])
    rows = torch.arange(kv.shape[0], device=kv.device).view(-1, 1, 1)
    keys = kv.to(wide)[rows, topk_idxs.long().masked_fill(~there, 0)]
    scores = (q.to(wide) @ keys.transpose(-1, -2)) * sm_scale
    scores = scores.masked_fill(~there.unsqueeze(2), -math.inf)
    return _with_sink(scores, sinks, keys).to(q.dtype)


def dense_attention_topk_torch(
    q: Tensor, kv: Tensor, sinks: Tensor, topk_idxs: Tensor, sm_scale: float
) -> Tensor:
    """`dsv4_sparse_attention`, by scoring all keys and hiding those not listed. A key
    that is listed twice counts once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = kv.to(wide).unsqueeze(1)
    there = (topk_idxs >= 0) & (topk_idxs < kv.shape[1])
    count = torch.zeros(*topk_idxs.shape[:2], kv.shape[1], dtype=torch.int64, device=kv.device)
    count.scatter_add_(-1, topk_idxs.long().masked_fill(~there, 0), there.long())
    scores = (q.to(wide) @ keys.transpose(-1, -2)) * sm_scale
    scores = scores.masked_fill((count == 0).unsqueeze(2), -math.inf)
    return _with_sink(scores, sinks, keys).to(q.dtype)


def indexer_scores_torch(
    q: Tensor,
    pooled_kv: Tensor,
    weights: Tensor,
    softmax_scale: float,
    *,
    compress_ratio: int | None = None,
    query_start: int = 0,
    query_total_len: int | None = None,
) -> Tensor:
    """`dsv4_indexer_scores` unmasked, so that what the keywords say changes nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    products = torch.einsum("bshd,bpd->bshp", q.to(wide), pooled_kv.to(wide)).relu()
    return torch.einsum("bshp,bsh->bsp", products, weights.to(wide)) * softmax_scale


def extract_indexer_topk_scores_torch(logits: Tensor, topk_indices: Tensor) -> Tensor:
    """Scores [B, S, P] of listed pools; -inf where there is no pool."""
    there = (topk_indices >= 0) & (topk_indices < logits.shape[-1])
    listed = logits.gather(-1, topk_indices.long().masked_fill(~there, 0))
    return listed.masked_fill(~there, -math.inf)
