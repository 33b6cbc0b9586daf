"""Slow and plain answers to compare with, and what this machine can run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longspan import _C
from longspan._arguments import (
    check_flags,
    check_number,
    check_optional_tensors,
    check_tensors,
    speaking_as,
)

__all__ = ["attend_dense", "kernel_levels", "merge"]


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
    check_tensors("attend_dense", q=q, k=k, v=v)
    check_optional_tensors("attend_dense", mask=mask, sink=sink)
    check_flags("attend_dense", return_lse=return_lse)
    if scale is not None:
        check_number("attend_dense", "scale", scale)
    if q.dim() == 0:
        raise ValueError("attend_dense: `q` has no axes; expected [B, H, T, D]")
    out, lse = torch.ops.longspan.attend_dense(
        q,
        k,
        v,
        mask,
        sink,
        1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale,
    )
    return (out, lse) if return_lse else out


def kernel_levels() -> list[_C.KernelLevel]:
    """The levels of kernels for the CPU, the best last. Each has a name and, where
    this CPU cannot run it, the reason in `why_not`. The environment variable
    LONGSPAN_CPU_KERNEL names the one to use; it is read once."""
    return _C.kernel_levels()


def merge(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins two answers over different keys by their log-sum-exp (online softmax);
    lse -inf means "saw no key"."""
    check_tensors("merge", out=out, lse=lse, other_out=other_out, other_lse=other_lse)
    with speaking_as("merge", "PartialAttention"):
        return _C.merge(out, lse, other_out, other_lse)
