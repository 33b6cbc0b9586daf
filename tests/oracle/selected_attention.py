"""The slow obvious answer for selected keys: every score written out, and what was
not selected masked away.

All tensors may have rows before. Run in float64 it is the oracle; run in the dtype
under test it is the plain computation whose error sets the tolerance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Attended(NamedTuple):
    out: torch.Tensor  # [.., Tq, H, value_dim]
    lse: torch.Tensor  # [.., Tq, H], over the keys alone
    dq: torch.Tensor
    dkv: torch.Tensor
    dsink: torch.Tensor | None


class Indexed(NamedTuple):
    scores: torch.Tensor  # [.., Tq, slots], -inf for an empty slot
    dq: torch.Tensor
    dk: torch.Tensor
    dweights: torch.Tensor


def times_listed(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """How often each key is in a list: [.., keys]; what is no key is nowhere."""
    listed = indices.long()
    listed = torch.where((listed >= 0) & (listed < keys), listed, keys)
    zeros = torch.zeros(*listed.shape[:-1], keys + 1, dtype=torch.long, device=indices.device)
    return zeros.scatter_add(-1, listed, torch.ones_like(listed))[..., :keys]


def forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    value_dim: int | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiable; kv [.., Tk, D] or [.., Tk, G, D], indices [.., Tq, slots] or
    [.., Tq, G, slots]."""
    if kv.dim() != q.dim():
        kv = kv.unsqueeze(-2)
    heads, groups = q.shape[-2], kv.shape[-2]
    keys = kv.repeat_interleave(heads // groups, dim=-2).movedim(-2, -3)  # [.., H, Tk, D]
    listed = times_listed(indices, kv.shape[-3])
    if indices.dim() != q.dim():
        listed = listed.unsqueeze(-2)
    listed = listed.expand(*listed.shape[:-2], groups, listed.shape[-1])
    listed = listed.repeat_interleave(heads // groups, dim=-2).movedim(-2, -3)  # [.., H, Tq, Tk]
    seen = listed > 0
    scores = q.movedim(-2, -3) @ keys.transpose(-1, -2) * scale
    scores = scores + torch.where(seen, listed, 1).to(q.dtype).log()
    # Rows that see nothing would be 0 / 0: give them all keys and take them away.
    blind = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | blind), -math.inf)
    if scores.shape[-1] == 0:
        lse = torch.full(scores.shape[:-1], -math.inf, dtype=q.dtype, device=q.device)
    else:
        lse = torch.logsumexp(scores, -1).masked_fill(blind.squeeze(-1), -math.inf)
    if sink is not None:
        column = sink.to(q.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, -1)[..., : seen.shape[-1]]
    weights = torch.where(seen, weights, torch.zeros_like(weights))
    out = weights @ keys[..., : value_dim or keys.shape[-1]]
    return out.movedim(-3, -2), lse.transpose(-1, -2)


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    dout: torch.Tensor,
    *,
    scale: float,
    value_dim: int | None = None,
    sink: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Attended:
    """Both directions, in `dtype`."""
    q, kv = (t.detach().to(dtype).requires_grad_() for t in (q, kv))
    logits = None if sink is None else sink.detach().to(dtype).requires_grad_()
    out, lse = forward(q, kv, indices, scale=scale, value_dim=value_dim, sink=logits)
    out.backward(dout.to(dtype))
    dq, dkv = (torch.zeros_like(t) if t.grad is None else t.grad for t in (q, kv))
    return Attended(out.detach(), lse.detach(), dq, dkv, None if logits is None else logits.grad)


def weights_of_heads(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the heads of a query look at, for kv [.., Tk, D]: [.., Tq, slots]."""
    keys = kv.shape[-2]
    scores = q.movedim(-2, -3) @ kv.unsqueeze(-3).transpose(-1, -2) * scale
    place = indices.long().clamp(0, max(keys - 1, 0)).unsqueeze(-3)
    empty = ((indices < 0) | (indices >= keys)).unsqueeze(-3)
    listed = scores.gather(-1, place.expand(*scores.shape[:-1], -1)).masked_fill(empty, -math.inf)
    column = torch.full(q.shape[-2:-1], -math.inf) if sink is None else sink
    column = column.to(q.dtype).view(-1, 1, 1).expand(*listed.shape[:-1], 1)
    share = torch.softmax(torch.cat([listed, column], -1), -1)[..., :-1].nan_to_num(0).sum(-3)
    return (share / share.sum(-1, keepdim=True)).nan_to_num(0)


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[.., Tq, Tk], differentiable."""
    products = q.movedim(-2, -3) @ k.unsqueeze(-3).transpose(-1, -2)
    return (weights.transpose(-1, -2).unsqueeze(-1) * products.relu()).sum(-3)


def greatest(
    scores: torch.Tensor, slots: int, start: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """The greatest of each row in its window, NaN before all, ties to the lower key:
    one by one."""
    keys = scores.shape[-1]
    rows = scores.reshape(-1, keys).tolist() if keys else [[]] * start.numel()
    borders = zip(rows, start.flatten().tolist(), end.flatten().tolist(), strict=True)
    lists = []
    for row, begin, stop in borders:
        window = range(max(begin, 0), min(stop, keys))
        order = sorted(window, key=lambda key: (not math.isnan(row[key]), -row[key], key))
        best = sorted(order[:slots])
        lists.append(best + [-1] * (slots - len(best)))
    shape = (*scores.shape[:-1], slots)
    return torch.tensor(lists, dtype=torch.int32).reshape(shape)


def indexer(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    dscores: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> Indexed:
    """The scores of given keys, both directions, in `dtype`."""
    q, k, weights = (t.detach().to(dtype).requires_grad_() for t in (q, k, weights))
    keys = k.shape[-2]
    empty = (indices < 0) | (indices >= keys)
    place = indices.long().clamp(0, max(keys - 1, 0))
    scores = index_scores(q, k, weights).gather(-1, place)
    (scores * dscores.to(dtype).masked_fill(empty, 0)).sum().backward()
    assert q.grad is not None and k.grad is not None and weights.grad is not None
    return Indexed(scores.detach().masked_fill(empty, -math.inf), q.grad, k.grad, weights.grad)
