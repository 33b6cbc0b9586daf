"""Listed keys, slowly: every score of every key written out.

Run in float64 it is the oracle; run in the dtype under test it is the plain
computation whose error sets the tolerance.
"""

from __future__ import annotations

import torch


def listings(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """How often each key is listed: [.., slots] -> [.., keys]. Wild slots count
    for nobody."""
    wild = (indices < 0) | (indices >= keys)
    places = indices.long().masked_fill(wild, keys)
    counts = torch.zeros(*indices.shape[:-1], keys + 1, device=indices.device)
    return counts.scatter_add(-1, places, torch.ones_like(places, dtype=counts.dtype))[..., :keys]


def attend_listed(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [.., Tq, H, D], kv [.., Tk, G, D], indices [.., Tq, G, slots]."""
    groups = kv.shape[-2]
    each = q.shape[-2] // groups
    counts = listings(indices, kv.shape[-3]).repeat_interleave(each, dim=-2)
    keys = kv.repeat_interleave(each, dim=-2).movedim(-3, -1)  # [.., H, D, Tk]
    scores = torch.einsum("...thd,...hds->...ths", q, keys) * scale
    # A key that is listed twice is there twice.
    scores = scores + counts.to(scores.dtype).log()
    blind = (counts == 0).all(-1, keepdim=True)
    # Rows that see nothing would be 0 / 0: show them everything, then take it away.
    scores = torch.where(blind, torch.zeros_like(scores), scores)
    lse = scores.logsumexp(-1)
    whole = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    weights = (scores - whole.unsqueeze(-1)).exp().masked_fill(blind, 0)
    out = torch.einsum("...ths,...hds->...thd", weights, keys[..., :value_dim, :])
    return out, lse.masked_fill(blind.squeeze(-1), float("-inf"))


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[.., Tq, Tk]: relu(q . k) weighted and summed over heads."""
    products = torch.einsum("...thd,...sd->...ths", q, k).relu()
    return torch.einsum("...ths,...th->...ts", products, weights.to(products.dtype))


def choose(row: list[float], start: int, end: int, slots: int) -> list[int]:
    """The best of row[start:end] by a stable sort, ascending, then -1."""
    seen = range(max(start, 0), min(end, len(row)))
    order = sorted(seen, key=lambda s: (row[s] == row[s], -row[s] if row[s] == row[s] else 0))
    best = sorted(order[:slots])
    return best + [-1] * (slots - len(best))
