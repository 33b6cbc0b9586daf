"""The slow obvious answer: all tokens on one rank, every score written out.

Run in float64 it is the oracle; run in the dtype under test it is the plain
computation whose error sets the tolerance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from longspan import Mask


class Answer(NamedTuple):
    out: torch.Tensor  # [B, H, T, Dv]
    lse: torch.Tensor  # [B, H, T], over the keys alone
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None


def visible_pairs(masks: list[Mask], rows: int) -> torch.Tensor:
    """[B, 1, T, T], pair by pair from `allows`."""
    if len(masks) == 1:
        masks = masks * rows
    made: dict[int, torch.Tensor] = {}
    for mask in masks:
        if id(mask) not in made:
            seen = torch.zeros(mask.queries, mask.keys, dtype=torch.bool)
            for query in range(mask.queries):
                for key in mask.key_ranges_of(query):
                    seen[query, key.begin : key.end] = True
            made[id(mask)] = seen
    return torch.stack([made[id(mask)] for mask in masks]).unsqueeze(1)


def dense_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # Rows that see nothing would be 0 / 0: give them a key and take it away.
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | blind), float("-inf"))
    lse = torch.logsumexp(scores, -1, keepdim=True)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(q.dtype).view(1, -1, 1, 1))
    weights = torch.exp(scores - total)
    weights = torch.where(visible, weights, torch.zeros_like(weights))
    out = weights @ v
    return out, lse.squeeze(-1).masked_fill(blind.squeeze(-1), float("-inf"))


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Answer:
    """Both directions, in `dtype`."""
    inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    logits = None if sink is None else sink.detach().to(dtype).requires_grad_()
    out, lse = dense_forward(*inputs, visible, scale=scale, softcap=softcap, sink=logits)
    out.backward(dout.to(dtype))
    dq, dk, dv = (t.grad for t in inputs)
    assert dq is not None and dk is not None and dv is not None
    return Answer(
        out.detach(), lse.detach(), dq, dk, dv, None if logits is None else logits.grad
    )
