"""Attention over the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from longspan import _C
from longspan.group import ranks_of
from longspan.local_batch import LocalBatch

STRATEGIES = ("ring", "gathered", "needed", "head_parallel", "head_parallel_ring")


def attention_layout(
    owners: _C.Ownership | LocalBatch | _C.Cut,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
) -> torch.Tensor:
    """Who owns which token and who may see whom, as the tensor that `attend`
    takes: int64 on the CPU, made once a batch, also outside of compiled code.

    `owners` is an ownership, or what `shard` returned; with the latter the mask
    is causal inside the batch's documents unless one is given (or one a row).
    """
    if isinstance(owners, LocalBatch):
        owners = owners.cut
    if isinstance(owners, _C.Cut):
        ownership = owners.ownership
        if mask is None:
            mask = [_C.Mask.causal(packing) for packing in owners.packings]
    elif isinstance(owners, _C.Ownership):
        ownership = owners
        if mask is None:
            mask = _C.Mask.causal(_C.Packing.single(ownership.tokens))
    else:
        raise TypeError(
            "attention_layout: expected an Ownership or what shard returned, "
            f"got {type(owners).__name__}"
        )
    masks = [mask] if isinstance(mask, _C.Mask) else list(mask)
    for one in masks:
        if not isinstance(one, _C.Mask):
            raise TypeError(f"attention_layout: a mask is a {type(one).__name__}, not a Mask")
    return _C.attention_layout(ownership, masks)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    ownership: _C.Ownership | None = None,
    layout: torch.Tensor | None = None,
    group: Any = None,
    strategy: str = "ring",
    head_ranks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks of `group`:
    what one rank would give for these tokens, forward and backward.

    ``q`` is [B, H, L, D] or packed [L, H, D], ``k`` and ``v`` likewise with H heads
    or fewer (GQA); L are the rank's own tokens in the ownership's local order.
    `mask` (causal by default) and `ownership` speak about the whole stream;
    `layout` gives both at once, from `attention_layout`. Without a group there is
    one rank. `strategy` is one of `STRATEGIES`; all give the same result.

    Local losses backpropagated on every rank give parameter gradients whose sum
    over the group is the full gradient. A query that sees no key gets 0.
    """
    ranks = ranks_of(group)
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"attend: dropout_p is {dropout_p}; attention over ranks has no dropout, "
            "since its random numbers would depend on the ranks; set it to 0"
        )
    if q.dim() == 0:
        raise ValueError("attend: `q` has no axes; expected [B, H, L, D] or [L, H, D]")
    if layout is None:
        if ownership is None:
            if ranks.size() != 1:
                raise ValueError(
                    f"attend: {ranks.size()} ranks need an ownership; give `ownership` or `layout`"
                )
            ownership = _C.Ownership.contiguous(q.shape[2 if q.dim() == 4 else 0], 1)
        layout = attention_layout(ownership, mask)
    elif mask is not None or ownership is not None:
        raise ValueError("attend: `layout` already holds mask and ownership; leave them out")
    out, lse = torch.ops.longspan.attend(
        q,
        k,
        v,
        sink,
        layout,
        1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale,
        0.0 if softcap is None else softcap,
        strategy,
        head_ranks,
        ranks.name,
    )
    return (out, lse) if return_lse else out


def which_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    softcap: float | None = None,
) -> str:
    """Which kernel computes such a call on one rank, and why a faster one does
    not: "avx512", "cudnn", "flash, not cudnn: it takes no windows", "blocked, not
    flash: it has no softcap". `mask` is causal by default."""
    masks = [mask] if isinstance(mask, _C.Mask) else list(mask or ())
    return _C.which_kernel(q, k, v, masks, 0.0 if softcap is None else softcap)


def kernel_levels() -> list[_C.KernelLevel]:
    """The levels of kernels for the CPU, the best last. Each has a name and, where
    this CPU cannot run it, the reason in `why_not`. The environment variable
    LONGSPAN_CPU_KERNEL names the one to use; it is read once."""
    return _C.kernel_levels()


def merge(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two answers over different keys become one; -inf means "saw no key"."""
    return _C.merge(out, lse, other_out, other_lse)


def plan(
    ownership: _C.Ownership,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    *,
    strategy: str = "ring",
    rank: int = 0,
    key_heads: int = 1,
    head_ranks: int = 0,
    rows: int = 1,
) -> _C.Plan:
    """What a rank will compute, send and receive; print it to see the steps."""
    if mask is None:
        mask = _C.Mask.causal(_C.Packing.single(ownership.tokens))
    masks = [mask] if isinstance(mask, _C.Mask) else list(mask)
    return _C.Plan.of(ownership, masks, strategy, rank, key_heads, head_ranks, rows)
