"""Slow answers, one token at a time, for what lists of keys are made of."""

from __future__ import annotations

import math

from torch import Tensor


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
