"""Small operators of one rank that models need around attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PAIRS = ("interleaved", "halves")


def rotate_channels(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    first: int = 0,
    pairs: str = "interleaved",
    inverse: bool = False,
) -> Tensor:
    """Rotary positions on ``2 * cos.shape[-1]`` channels of `x`, from `first` on.

    A negative `first` counts from the end. `pairs` says which two channels turn
    together: neighbours, or the same place in both halves. `cos` and `sin`
    broadcast to the other axes of `x`; keep them in float32, the rotation is
    computed there (float64 for float64) and rounded once. `inverse` turns back.
    """
    if pairs not in PAIRS:
        raise ValueError(
            f"rotate_channels: no pairs {pairs!r}; there are {' and '.join(map(repr, PAIRS))}"
        )
    rotated: Tensor = torch.ops.longspan.rotate_channels(
        x, cos, sin, first, pairs == "interleaved", inverse
    )
    return rotated


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Eager attention of one rank with every score written out, for comparison.

    ``q`` is [B, H, T, D], ``k`` and ``v`` [B, G, Tk, ..]. `mask` broadcasts to
    [B, H, T, Tk]: bool, true = may see, or floating, added to the scores. `sink`
    [H] is a logit without a value. A query that sees no key gets 0.
    """
    out, lse = torch.ops.longspan.attend_dense(
        q,
        k,
        v,
        mask,
        sink,
        1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale,
    )
    return (out, lse) if return_lse else out


def document_windows(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None, *, tokens: int
) -> tuple[Tensor, Tensor]:
    """Causal key windows [start, end) of a stream of documents, int32 [tokens].

    Made where the offsets are, without a read to the host, so once a batch is
    enough. Tokens behind the last document see only themselves.
    """
    start, end = torch.ops.longspan.document_windows(cu_seqlens, cu_seqlens_padded, tokens)
    return start, end


def window_lists(
    queries: Tensor,
    *,
    keys: int,
    window: int,
    pools: int = 0,
    ratio: int = 0,
    chosen: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The keys of each query: a sliding window, then compressed keys behind it.

    `queries` [B, T] are tokens of the whole stream, which has `keys` of them; key
    ``keys + p`` stands for ``ratio`` tokens from ``p * ratio`` on. All pools that
    ended, or those of `chosen` [B, T, slots]. `mask` [B, T, keys + pools] hides
    what is false or below 0. -1 = empty slot.
    """
    lists: Tensor = torch.ops.longspan.window_lists(queries, keys, window, pools, ratio, chosen)
    if mask is not None:
        lists = torch.ops.longspan.hide_listed(lists, mask)
    return lists


def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    start: Tensor | None = None,
    end: Tensor | None = None,
) -> Tensor:
    """The lightning indexer's score of every key, [Tq, Tk], differentiable.

    Keys outside a query's window [start, end) get -inf.
    """
    scores: Tensor = torch.ops.longspan.index_scores(q, k, weights, start, end)
    return scores
