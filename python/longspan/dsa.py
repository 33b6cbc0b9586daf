"""Attention to selected keys (sparse attention, DeepSeek's DSA), on one rank or over the
ranks of a group.

An indexer chooses `slots` keys for each query (`select_keys`), and attention looks
at those alone (`attend_selected`); `select_and_attend` is one layer of both. Queries
and keys are those of the rank's own tokens in the ownership's local order; `indices`
and windows are tokens of the stream. Tensors may have rows before: [B, L, ..]. Owners
and masks come as `layout` and `mask`, or as `attention`, which holds both: see `attend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from longspan import _C
from longspan._agreement import tells_ranks
from longspan._arguments import (
    check_choice,
    check_flags,
    check_number,
    check_optional_tensors,
    check_tensors,
    check_whole,
)
from longspan._attention import (
    AttentionLayout,
    attention_tensor,
    layout_named,
    masks_of,
    ownership_of,
)
from longspan._group import Group, ranks_of
from longspan._pools import PoolPlan, gather_pools, pool_tokens

__all__ = [
    "FETCHES",
    "PoolPlan",
    "SelectedAnswer",
    "attend_selected",
    "compare_selections",
    "document_windows",
    "gather_pools",
    "index_loss",
    "index_scores",
    "pool_tokens",
    "rotate_channels",
    "score_selected",
    "select_and_attend",
    "select_keys",
    "selected_weights",
    "top_keys",
    "window_lists",
]

#: Ways for selected keys to reach their queries.
FETCHES = ("gathered", "needed")
_PAIRS = ("interleaved", "halves")


class SelectedAnswer(NamedTuple):
    """What `select_and_attend` returns; None for results that were not asked for."""

    out: torch.Tensor
    indices: torch.Tensor
    lse: torch.Tensor
    scores: torch.Tensor | None
    target: torch.Tensor | None


@tells_ranks
def select_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    *,
    slots: int,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    layout: str | _C.Ownership | None = None,
    attention: AttentionLayout | None = None,
    group: Any = None,
    balanced: bool = False,
    scores: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The `slots` keys of each query (top-k) with the greatest
    ``sum_h weights[t, h] * max(0, q[t, h] . k[s])``: int32 [L, slots], ascending,
    then -1. Of equal scores the lower key wins.

    ``q`` is [L, Hi, Di], ``k`` [L, Di], ``weights`` [L, Hi] in float32 (float64 for
    float64). Keys are those of the window [start, end); by default what the mask
    (causal unless given) lets the query see. `scores` also returns those, [L, slots],
    with gradients to q, k and weights; -inf for an empty slot. `balanced` spreads the
    queries evenly over the ranks and sends the selections back: the same bits, and
    faster where the layout leaves causal work uneven. Without a group there is one rank.
    """
    ranks = ranks_of(group)
    check_tensors("select_keys", q=q, k=k, weights=weights)
    check_optional_tensors("select_keys", start=start, end=end)
    check_whole("select_keys", "slots", slots)
    check_flags("select_keys", balanced=balanced, scores=scores)
    found, indices = torch.ops.longspan.select_keys(
        q,
        k,
        weights,
        start,
        end,
        slots,
        scores,
        balanced,
        _attention("select_keys", mask, layout, attention, ranks),
        ranks.name,
    )
    return (indices, found) if scores else indices


@tells_ranks
def attend_selected(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    value_dim: int | None = None,
    sink: torch.Tensor | None = None,
    layout: str | _C.Ownership | None = None,
    attention: AttentionLayout | None = None,
    group: Any = None,
    fetch: str = "gathered",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query to the keys of its own list (sparse attention); the list
    may be that of an earlier layer.

    ``q`` is [L, H, D], ``kv`` [L, D] or [L, G, D], ``indices`` [L, slots] or
    [L, G, slots]; values are the first `value_dim` channels of keys (all by default).
    A slot outside of the stream is empty; a query without keys gets 0 and lse -inf.
    `fetch` is "gathered", all rows of keys to every rank, or "needed", only rows that
    some query there selected: fewer bytes, but their number is known from the data
    alone, so the host waits.
    """
    ranks = ranks_of(group)
    check_tensors("attend_selected", q=q, kv=kv, indices=indices)
    check_optional_tensors("attend_selected", sink=sink)
    _check_options("attend_selected", scale, value_dim, fetch)
    check_flags("attend_selected", return_lse=return_lse)
    out, lse = torch.ops.longspan.attend_selected(
        q,
        kv,
        indices,
        sink,
        scale,
        0 if value_dim is None else value_dim,
        _owners("attend_selected", layout, attention, ranks),
        fetch,
        ranks.name,
    )
    return (out, lse) if return_lse else out


@tells_ranks
def select_and_attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    slots: int,
    scale: float,
    value_dim: int | None = None,
    sink: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    layout: str | _C.Ownership | None = None,
    attention: AttentionLayout | None = None,
    group: Any = None,
    fetch: str = "gathered",
    balanced: bool = False,
    scores: bool = False,
    target: bool = False,
) -> SelectedAnswer:
    """One layer: `select_keys` of the indexer's tensors, then `attend_selected`.

    Gathered, `kv` and `index_k` (of one type) travel together in one exchange;
    needed, index keys come first and then the selected rows of `kv`. With `scores`
    the indexer is trained: scores carry gradients to its three tensors. `target`
    adds the heads' attention weights for `index_loss`, without another exchange.
    """
    ranks = ranks_of(group)
    who = "select_and_attend"
    check_tensors(who, q=q, kv=kv, index_q=index_q, index_k=index_k, weights=weights)
    check_optional_tensors(who, sink=sink, start=start, end=end)
    check_whole(who, "slots", slots)
    _check_options(who, scale, value_dim, fetch)
    check_flags(who, balanced=balanced, scores=scores, target=target)
    out, lse, found, shares, indices = torch.ops.longspan.select_and_attend(
        q,
        kv,
        index_q,
        index_k,
        weights,
        start,
        end,
        sink,
        slots,
        scale,
        0 if value_dim is None else value_dim,
        scores,
        target,
        balanced,
        _attention("select_and_attend", mask, layout, attention, ranks),
        fetch,
        ranks.name,
    )
    return SelectedAnswer(out, indices, lse, found if scores else None, shares if target else None)


@tells_ranks
def score_selected(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    layout: str | _C.Ownership | None = None,
    attention: AttentionLayout | None = None,
    group: Any = None,
    fetch: str = "gathered",
) -> torch.Tensor:
    """The indexer's scores of given keys, [L, slots], differentiable in q, k and
    weights; -inf for a slot outside of the stream."""
    ranks = ranks_of(group)
    check_tensors("score_selected", q=q, k=k, weights=weights, indices=indices)
    check_choice("score_selected", "fetch", fetch, FETCHES)
    scores: torch.Tensor = torch.ops.longspan.score_selected(
        q,
        k,
        weights,
        indices,
        _owners("score_selected", layout, attention, ranks),
        fetch,
        ranks.name,
    )
    return scores


@tells_ranks
def selected_weights(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
    layout: str | _C.Ownership | None = None,
    attention: AttentionLayout | None = None,
    group: Any = None,
    fetch: str = "gathered",
) -> torch.Tensor:
    """Attention weights summed over the heads of a query and normalised over its
    slots: [L, slots], or [L, G, slots]. `lse` is that of `attend_selected`. No
    gradient: this is the target of `index_loss`."""
    ranks = ranks_of(group)
    check_tensors("selected_weights", q=q, kv=kv, indices=indices, lse=lse)
    check_optional_tensors("selected_weights", sink=sink)
    _check_options("selected_weights", scale, None, fetch)
    weights: torch.Tensor = torch.ops.longspan.selected_weights(
        q,
        kv,
        indices,
        lse,
        sink,
        scale,
        _owners("selected_weights", layout, attention, ranks),
        fetch,
        ranks.name,
    )
    return weights


def top_keys(
    scores: torch.Tensor,
    *,
    slots: int,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
) -> torch.Tensor:
    """The greatest `slots` of each row of scores [.., T, Tk] inside its window, in
    the order of `select_keys`: int32 [.., T, slots]. No windows: all keys."""
    check_tensors("top_keys", scores=scores)
    check_optional_tensors("top_keys", start=start, end=end)
    check_whole("top_keys", "slots", slots)
    indices: torch.Tensor = torch.ops.longspan.top_keys(scores, slots, start, end)
    return indices


def index_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss that trains an indexer: for each query the KL divergence of
    softmax(scores) from `target` over its slots, [L]. Empty slots and queries without keys count 0.

    Losses belong to the rank's own queries. Their sum divided by the number of
    queries of *all* ranks (``reduce_loss(loss.sum(), count, group)``) gives gradients
    that sum over the ranks to those of one rank.
    """
    check_tensors("index_loss", scores=scores, target=target)
    loss: torch.Tensor = torch.ops.longspan.index_loss(scores, target)
    return loss


@tells_ranks
def compare_selections(
    a: torch.Tensor,
    b: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    *,
    layout: str | _C.Ownership | None = None,
    attention: AttentionLayout | None = None,
    group: Any = None,
) -> _C.SelectionComparison:
    """How far two selections for the same queries differ; print it to see.

    ``differing`` slots hold a key that the other selection lacks, in ``queries``
    queries; ``worst_gap`` is the farthest that the score of such a key lies from the
    least score of `a`, relative to the size of the scores. Where inputs differ by
    rounding it is a few epsilons of their type. Over ranks each compares its own
    queries, and all must call it.
    """
    ranks = ranks_of(group)
    check_tensors("compare_selections", a=a, b=b, q=q, k=k, weights=weights)
    made = _owners("compare_selections", layout, attention, ranks)
    return _C.compare_selections(a, b, q, k, weights, made, ranks)


def rotate_channels(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    first: int = 0,
    pairs: str = "interleaved",
    inverse: bool = False,
) -> torch.Tensor:
    """Rotary positions on ``2 * cos.shape[-1]`` channels of `x`, from `first` on.

    A negative `first` counts from the end. `pairs` says which two channels turn
    together: neighbours, or the same place in both halves. `cos` and `sin`
    broadcast to the other axes of `x`; keep them in float32, the rotation is
    computed there (float64 for float64) and rounded once. `inverse` turns back.
    """
    check_tensors("rotate_channels", x=x, cos=cos, sin=sin)
    check_whole("rotate_channels", "first", first)
    check_choice("rotate_channels", "pairs", pairs, _PAIRS)
    check_flags("rotate_channels", inverse=inverse)
    rotated: torch.Tensor = torch.ops.longspan.rotate_channels(
        x, cos, sin, first, pairs == "interleaved", inverse
    )
    return rotated


def document_windows(
    cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor | None = None, *, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal key windows [start, end) of a stream of documents, int32 [tokens].

    Made where the offsets are, without a read to the host, so once a batch is
    enough. Tokens behind the last document see only themselves.
    """
    check_tensors("document_windows", cu_seqlens=cu_seqlens)
    check_optional_tensors("document_windows", cu_seqlens_padded=cu_seqlens_padded)
    check_whole("document_windows", "tokens", tokens)
    start, end = torch.ops.longspan.document_windows(cu_seqlens, cu_seqlens_padded, tokens)
    return start, end


def window_lists(
    queries: torch.Tensor,
    *,
    keys: int,
    window: int,
    pools: int = 0,
    ratio: int = 0,
    chosen: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The keys of each query: a sliding window, then compressed keys behind it.

    `queries` [B, T] are tokens of the whole stream, which has `keys` of them; key
    ``keys + p`` stands for ``ratio`` tokens from ``p * ratio`` on. All pools that
    ended, or those of `chosen` [B, T, slots]. `mask` [B, T, keys + pools] hides
    what is false or below 0. -1 = empty slot.
    """
    check_tensors("window_lists", queries=queries)
    check_optional_tensors("window_lists", chosen=chosen, mask=mask)
    for name, value in (("keys", keys), ("window", window), ("pools", pools), ("ratio", ratio)):
        check_whole("window_lists", name, value)
    lists: torch.Tensor = torch.ops.longspan.window_lists(
        queries, keys, window, pools, ratio, chosen
    )
    if mask is not None:
        lists = torch.ops.longspan.hide_listed(lists, mask)
    return lists


def index_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    *,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
) -> torch.Tensor:
    """The lightning indexer's score of every key, [Tq, Tk], differentiable.

    Keys outside a query's window [start, end) get -inf.
    """
    check_tensors("index_scores", q=q, k=k, weights=weights)
    check_optional_tensors("index_scores", start=start, end=end)
    scores: torch.Tensor = torch.ops.longspan.index_scores(q, k, weights, start, end)
    return scores


def _check_options(who: str, scale: float, value_dim: int | None, fetch: str) -> None:
    check_number(who, "scale", scale)
    if value_dim is not None:
        check_whole(who, "value_dim", value_dim)
    check_choice(who, "fetch", fetch, FETCHES)


def _owners(
    who: str,
    layout: str | _C.Ownership | None,
    attention: AttentionLayout | None,
    ranks: Group,
) -> torch.Tensor | None:
    """What the operators take where lists of keys stand for a mask."""
    if attention is None and isinstance(layout, str) and ranks.size() > 1:
        layout_named(who, layout)
        raise ValueError(
            f"{who}: layout '{layout}' does not say how many tokens there are; give an "
            f"Ownership, or `attention`"
        )
    return _attention(who, None, layout, attention, ranks)


def _attention(
    who: str,
    mask: _C.Mask | Sequence[_C.Mask] | None,
    layout: str | _C.Ownership | None,
    attention: AttentionLayout | None,
    ranks: Group,
) -> torch.Tensor | None:
    """What the operators take; None where one rank holds the whole stream."""
    if attention is not None:
        if mask is not None or layout is not None:
            raise ValueError(f"{who}: `attention` already holds mask and owners; leave them out")
        return attention_tensor(who, attention)
    if mask is None and ranks.size() == 1 and not isinstance(layout, _C.Ownership):
        if layout is not None:
            layout_named(who, layout)
        return None
    masks = masks_of(who, mask)
    here = masks[0].queries if masks else 0
    return AttentionLayout(ownership_of(who, layout, mask, ranks.size(), here), mask).tensor
