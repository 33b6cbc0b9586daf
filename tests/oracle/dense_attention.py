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
    lse = torch.logsumexp(scores, -1).masked_fill(blind.squeeze(-1), float("-inf"))
    if sink is not None:
        # Softmax knows no infinite logit; a quarter of the largest is as good.
        most = torch.finfo(q.dtype).max / 4
        column = sink.to(q.dtype).clamp(-most, most).view(1, -1, 1, 1)
        column = column.expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    # Not exp(scores - lse): at 1e4 that would round weights by 1e-12.
    weights = torch.softmax(scores, -1)[..., : visible.shape[-1]]
    weights = torch.where(visible, weights, torch.zeros_like(weights))
    return weights @ v, lse


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
    return Answer(out.detach(), lse.detach(), dq, dk, dv, None if logits is None else logits.grad)


def dense_by_formula(
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
    seed: int = 0,
) -> Answer:
    """Attention and its gradients by the formulas of blockwise attention, which know
    only the output and its log-sum-exp: P = exp(S - lse), dS = P (dP - sum(out dout)).
    Sums over channels run in an order drawn from `seed`. Any such computation may
    differ from the oracle by as much as this one does."""
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(q.shape[3], generator=random)
    value_order = torch.randperm(v.shape[3], generator=random)
    home, value_home = order.argsort(), value_order.argsort()
    q, k = (t.to(dtype)[..., order] for t in (q, k))
    v, dout = (t.to(dtype)[..., value_order] for t in (v, dout))
    group = q.shape[1] // k.shape[1]
    k_all, v_all = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k_all.transpose(-1, -2) * scale
    bend = torch.ones_like(scores)
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, bend = softcap * bent, 1 - bent * bent
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, -1, keepdim=True)
    blind = lse == float("-inf")
    logits = None if sink is None else sink.to(dtype).view(1, -1, 1, 1)
    total = lse if logits is None else torch.logaddexp(lse, logits)
    weights = torch.exp(scores - total.masked_fill(blind, 0)).masked_fill(~visible, 0)
    out = weights @ v_all
    delta = (out * dout)[..., value_home].sum(-1, keepdim=True)
    ds = weights * (dout @ v_all.transpose(-1, -2) - delta) * bend * scale

    def over_group(grad: torch.Tensor) -> torch.Tensor:
        return grad.unflatten(1, (k.shape[1], group)).sum(2)

    dsink = None
    if logits is not None:
        weight = torch.sigmoid(logits - lse).masked_fill(blind, 0)
        dsink = -(weight * delta).sum((0, 2, 3))
    return Answer(
        out[..., value_home],
        lse.squeeze(-1),
        (ds @ k_all)[..., home],
        over_group(ds.transpose(-1, -2) @ q)[..., home],
        over_group(weights.transpose(-1, -2) @ dout)[..., value_home],
        dsink,
    )
