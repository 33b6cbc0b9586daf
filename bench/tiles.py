"""Attention of one rank on the CPU against torch's own, in one process.

    python bench/tiles.py build/dev --save bench/results/...md

Answers are checked before they are timed: float32 against torch's, bfloat16
against torch's float32, with at most twice the error of torch's bfloat16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from attention import close, step
from harness import Part, Row, in_turns, main, ratio_row

import longspan
from longspan import Mask, Ownership, Packing

HEADS, DIM = 8, 128
Attend = Callable[..., torch.Tensor]


def ours_over(mask: Mask, tokens: int) -> Attend:
    layout = longspan.AttentionLayout(Ownership.contiguous(tokens, 1), mask)
    return lambda q, k, v: longspan.attend(q, k, v, attention=layout)  # type: ignore[return-value]


def torch_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def as_exact(ours: list[torch.Tensor], torchs: list[torch.Tensor],
             exact: list[torch.Tensor]) -> bool:  # fmt: skip
    """Whether ours are off by at most twice what torch's are."""

    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        return (a.float() - b).abs().max().item()

    return all(error(a, c) <= 2 * error(b, c) for a, b, c in zip(ours, torchs, exact, strict=True))


def causal_rows(dtype: torch.dtype, threads: int, wanted: float | None) -> list[Row]:
    torch.set_num_threads(threads)
    tokens = 4096
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, tokens, DIM).to(dtype) for _ in range(3)]
    ours = ours_over(Mask.causal(Packing.single(tokens)), tokens)
    mine, torchs = step(ours, *inputs), step(torch_causal, *inputs)
    right = (
        close(mine, torchs)
        if dtype == torch.float32
        else as_exact(mine, torchs, step(torch_causal, *(t.float() for t in inputs)))
    )
    name = str(dtype).removeprefix("torch.")
    work = f"causal, {tokens} tokens, {HEADS} x {DIM}, {name}, {threads} thread"
    work += "s" if threads > 1 else ""
    rows = []
    with torch.no_grad():
        t_ours, t_torch = in_turns(
            lambda: ours(*inputs), lambda: torch_causal(*inputs), rounds=9, warm=1
        )
        rows.append(ratio_row(f"{work}, fwd", right, t_ours, t_torch, wanted))
    t_ours, t_torch = in_turns(
        lambda: step(ours, *inputs), lambda: step(torch_causal, *inputs), rounds=5, warm=0
    )
    rows.append(ratio_row(f"{work}, fwd+bwd", right, t_ours, t_torch, wanted))
    return rows


def sparse_rows(name: str, mask: Mask, visible: torch.Tensor, wanted: float) -> list[Row]:
    """Forward and backward against torch with the mask as a matrix."""
    torch.set_num_threads(2)
    tokens = visible.size(0)
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, tokens, DIM) for _ in range(3)]
    ours = ours_over(mask, tokens)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, visible)

    right = close(step(ours, *inputs), step(dense, *inputs))
    t_ours, t_dense = in_turns(
        lambda: step(ours, *inputs), lambda: step(dense, *inputs), rounds=3, warm=0
    )
    work = f"{name} in {tokens} tokens, against the dense mask, float32, 2 threads, fwd+bwd"
    return [ratio_row(work, right, t_ours, t_dense, wanted)]


def packed_rows() -> list[Row]:
    packing = Packing.rows(16, 512)
    document = torch.arange(packing.tokens) // 512
    visible = (document[:, None] == document[None, :]).tril()
    return sparse_rows("16 packed documents of 512", Mask.causal(packing), visible, 10.0)


def window_rows() -> list[Row]:
    tokens, window = 8192, 512
    place = torch.arange(tokens)
    visible = (place[:, None] - place[None, :] < window).tril()
    mask = Mask.sliding(Packing.single(tokens), window)
    return sparse_rows(f"a window of {window}", mask, visible, 8.0)


def parts() -> list[Part]:
    causal: list[Part] = []
    for dtype in (torch.float32, torch.bfloat16):
        for threads in range(1, min(2, os.cpu_count() or 1) + 1):
            causal.append(lambda d=dtype, t=threads: causal_rows(d, t, 1.0))  # type: ignore[misc]
    return [*causal, packed_rows, window_rows]


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", "Attention of one rank", "threads as it says", lambda _: parts()))
