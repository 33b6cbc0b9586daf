"""Slow answers from the formulas, one query at a time, for keys chosen by lists.

Everything is plain torch, so that autograd gives the derivatives; pass float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEVER = float("-inf")


def windows(cu: list[int], cu_padded: list[int] | None, tokens: int) -> list[tuple[int, int]]:
    """[start, end) of each token, document by document."""
    real = [x for x in cu if x >= 0]
    slots = real if cu_padded is None else [x for x in cu_padded if x >= 0]
    out = [(t, t + 1) for t in range(tokens)]
    for i in range(len(slots) - 1):
        for t in range(slots[i], min(slots[i + 1], tokens)):
            start = slots[i]
            stop = min(t + 1, start + real[i + 1] - real[i])
            out[t] = (start, max(stop, start + 1))
    return out


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """[Tq, Tk] of q [Tq, H, D], k [Tk, D], w [Tq, H]."""
    scores = torch.zeros(q.shape[0], k.shape[0], dtype=q.dtype)
    for head in range(q.shape[1]):
        scores = scores + w[:, head : head + 1] * torch.relu(q[:, head] @ k.T)
    return scores


def top_keys(scores: Tensor, start: int, end: int, slots: int) -> list[int]:
    """The best keys of one query in [start, end), lower keys first among equals."""
    listed = scores.tolist()
    order = sorted(range(start, end), key=lambda key: (-listed[key], key))
    best = sorted(order[:slots])
    return best + [-1] * (slots - len(best))


def attend_listed(
    q: Tensor, kv: Tensor, lists: Tensor, scale: float, values: int, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [Tq, H, D], kv [Tk, D], lists [Tq, slots]: out [Tq, H, values], lse [Tq, H]."""
    outs, sums = [], []
    for query in range(q.shape[0]):
        keys = [int(i) for i in lists[query] if 0 <= int(i) < kv.shape[0]]
        if not keys:
            outs.append(q.new_zeros(q.shape[1], values))
            sums.append(q.new_full((q.shape[1],), NEVER))
            continue
        chosen = kv[keys]
        scores = scale * q[query] @ chosen.T
        sums.append(torch.logsumexp(scores, -1))
        if sink is not None:
            scores = torch.cat([scores, sink[:, None]], -1)
        weights = torch.softmax(scores, -1)[:, : len(keys)]
        outs.append(weights @ chosen[:, :values])
    return torch.stack(outs), torch.stack(sums)


def rotate(x: Tensor, angles: Tensor, first: int, pairs: str) -> Tensor:
    """x [T, D], angles [T, count / 2]: pair by pair."""
    out = x.clone()
    count = angles.shape[1]
    for j in range(count):
        a, b = (2 * j, 2 * j + 1) if pairs == "interleaved" else (j, j + count)
        for t in range(x.shape[0]):
            cos, sin = math.cos(float(angles[t, j])), math.sin(float(angles[t, j]))
            left, right = float(x[t, first + a]), float(x[t, first + b])
            out[t, first + a] = left * cos - right * sin
            out[t, first + b] = left * sin + right * cos
    return out


def window_list(
    query: int, keys: int, window: int, pools: int, ratio: int, chosen: list[int] | None = None
) -> list[int]:
    """The list of one query."""
    first = max(query - window + 1, 0)
    near = [first + o for o in range(min(keys, window))]
    near = [key if key <= query and key < keys else -1 for key in near]
    if chosen is not None:
        return near + [keys + p if 0 <= p < pools else -1 for p in chosen]
    return near + [keys + p if (p + 1) * ratio <= query + 1 else -1 for p in range(pools)]
