"""Selected keys on the CPU against plain torch, in one process for each level of
kernels.

    python bench/selected.py build/dev --save bench/results/...md

torch gathers the listed rows and multiplies them in float32, a few queries at a
time; the indexer is an einsum, a relu, another einsum over the heads and
torch.topk, all in the type of the inputs, which is torch's fastest. Answers are
checked before they are timed: attention with at most twice the error of plain
bfloat16, selections by the scores that they miss.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import torch
from harness import Part, Row, in_turns, main, ratio_row

import longspan

ops = torch.ops.longspan
ALONE = "LONGSPAN_BENCH_ALONE"
# Times faster than torch that a level ought to be: forward, and both directions.
BARS = {"avx512": (2.3, 2.5), "avx512_bf16": (2.3, 2.5), "amx": (6.0, 5.0)}
QUERIES, KEYS, HEADS, SLOTS, DIM, VALUE_DIM = 64, 8192, 64, 2048, 576, 512
INDEX_QUERIES, INDEX_KEYS, INDEX_HEADS, INDEX_DIM = 512, 65536, 32, 128


def level() -> str:
    x = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    return longspan.which_kernel(x, x, x).split(",")[0]


def plainly(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    parts = []
    for some in range(0, QUERIES, 16):
        rows = kv[indices[some : some + 16]]
        scores = q[some : some + 16] @ rows.transpose(1, 2) * DIM**-0.5
        parts.append(scores.softmax(-1) @ rows[..., :VALUE_DIM])
    return torch.cat(parts)


def both(
    attend: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def attention_rows(threads: int) -> list[Row]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    inputs = [torch.randn(QUERIES, HEADS, DIM), torch.randn(KEYS, DIM)]
    inputs = [t.bfloat16() for t in inputs]
    dout = torch.randn(QUERIES, HEADS, VALUE_DIM).bfloat16()
    indices = torch.rand(QUERIES, KEYS).topk(SLOTS).indices.sort().values
    slots = indices.int()

    def ours(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return ops.attend_selected(q, kv, slots, None, DIM**-0.5, VALUE_DIM)[0]

    def torchs(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return plainly(q.float(), kv.float(), indices)

    exact = both(lambda q, kv: plainly(q.double(), kv.double(), indices), inputs, dout)
    rounded = both(lambda q, kv: plainly(q, kv, indices), inputs, dout)
    right = all(
        distance(a, b) <= 2 * distance(c, b)
        for a, b, c in zip(both(ours, inputs, dout), exact, rounded, strict=True)
    )
    bars = BARS.get(level(), (None, None))
    work = (
        f"{level()}: {QUERIES} queries, {HEADS} heads, {DIM}/{VALUE_DIM}, {SLOTS} of {KEYS} "
        f"keys, bfloat16, {threads} thread{'s' if threads > 1 else ''}"
    )
    with torch.no_grad():
        times = in_turns(lambda: ours(*inputs), lambda: torchs(*inputs), rounds=5, warm=1)
    rows = [ratio_row(f"{work}, fwd", right, *times, bars[0])]
    times = in_turns(
        lambda: both(ours, inputs, dout), lambda: both(torchs, inputs, dout), rounds=3, warm=0
    )
    return [*rows, ratio_row(f"{work}, fwd+bwd", right, *times, bars[1])]


def torch_select(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found = []
    for some, weights in zip(q.split(8), w.split(8), strict=True):
        products = torch.einsum("qhd,kd->qhk", some, k).relu_()
        scores = torch.einsum("qhk,qh->qk", products, weights.to(q.dtype))
        found.append(torch.topk(scores, SLOTS).indices)
    return torch.cat(found)


def memory(kind: str) -> float:
    """MiB of this process."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) / 1024
    return 0.0


def indexer_rows(dtype: torch.dtype, wanted: float | None) -> list[Row]:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    q = torch.randn(INDEX_QUERIES, INDEX_HEADS, INDEX_DIM).to(dtype)
    k = torch.randn(INDEX_KEYS, INDEX_DIM).to(dtype)
    w = torch.randn(INDEX_QUERIES, INDEX_HEADS)
    start = torch.zeros(INDEX_QUERIES, dtype=torch.int32)
    end = torch.full_like(start, INDEX_KEYS)

    def ours() -> torch.Tensor:
        return ops.select_keys(q, k, w, start, end, SLOTS, False)[1]

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory("VmRSS")
    indices = ours()
    grown = memory("VmHWM") - before
    few = slice(0, 8)  # of the answers, in float64
    products = torch.einsum("qhd,kd->qhk", q[few].double(), k.double()).relu_()
    scores = torch.einsum("qhk,qh->qk", products, w[few].double())
    best = scores.topk(SLOTS).values
    taken = scores.gather(1, indices[few].long()).sort(descending=True).values
    right = bool((best - taken).abs().max() <= 1e-4 * best.abs().max())
    times = in_turns(ours, lambda: torch_select(q, k, w), rounds=2, warm=0)
    name = str(dtype).removeprefix("torch.")
    work = (
        f"{level()}: indexer {INDEX_HEADS} x {INDEX_DIM} and {SLOTS} best, {INDEX_QUERIES} "
        f"queries over {INDEX_KEYS} keys, {name}, 2 threads"
    )
    row = ratio_row(work, right, *times, wanted)
    row["ours"] += f", {grown:.0f} MiB, indices among them"
    return [row]


def top_rows(wanted: float | None) -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    scores = torch.randn(1, INDEX_KEYS)
    order = torch.sort(scores, descending=True, stable=True).indices[:, :SLOTS].sort().values
    right = torch.equal(ops.top_keys(scores, SLOTS, None, None).long(), order)
    times = in_turns(
        lambda: ops.top_keys(scores, SLOTS, None, None),
        lambda: torch.topk(scores, SLOTS),
        rounds=101,
        warm=10,
    )
    return [
        ratio_row(
            f"{level()}: {SLOTS} best of {INDEX_KEYS}, 1 thread, torch.topk", right, *times, wanted
        )
    ]


def rows_of(kernels: str, build: pathlib.Path) -> list[Row]:
    """The rows of another level, from a process of its own: a level is read once."""
    done = subprocess.run(
        [sys.executable, __file__, build, "--json"],
        env=os.environ | {"LONGSPAN_CPU_KERNEL": kernels, ALONE: "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def parts(build: pathlib.Path) -> list[Part]:
    wanted = 2.5 if level() in BARS else None
    mine: list[Part] = [
        lambda: indexer_rows(torch.bfloat16, wanted),
        lambda: indexer_rows(torch.float32, None),
        lambda: top_rows(wanted),
        lambda: attention_rows(1),
        lambda: attention_rows(2),
    ]
    if ALONE in os.environ:
        return [lambda: attention_rows(2)]
    others = [
        known.name
        for known in longspan.testing.kernel_levels()
        if not known.why_not and known.name in BARS and known.name != level()
    ]
    return [*mine, *(lambda n=name: rows_of(n, build) for name in others)]  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", "Selected keys of one rank", "threads as it says", parts))
