"""Choosing keys on the CPU against torch's operators, taken in turns.

    python bench/selection.py build/dev [--queries 512] [--threads 2]

Ours is bench/selection_bench, kernels without torch. Times are of the
processor, all threads together, the best of several runs: other users of a
machine then disturb least.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import time
from collections.abc import Callable

import torch

HEADS, CHANNELS, KEYS, SLOTS = 32, 128, 65536, 2048
AT_ONCE = 8  # queries whose products torch keeps at a time


def ours(program: pathlib.Path, *words: str) -> dict[str, float]:
    """Processor milliseconds by case."""
    lines = subprocess.run(
        [program, *words], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    return {row["case"]: row["processor_ms"] for row in found}


def best(run: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        run()
        times.append((time.process_time() - start) * 1e3)
    return min(times)


def torch_select(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, kept: str) -> None:
    """`kept`: the type of what is summed over heads."""
    for some, weights in zip(q.split(AT_ONCE), w.split(AT_ONCE), strict=True):
        products = torch.einsum("qhd,kd->qhk", some, k).relu_()
        if kept == "float32":
            products = products.float()
        scores = torch.einsum("qhk,qh->qk", products, weights.to(products.dtype))
        torch.topk(scores, SLOTS)


def torch_time(dtype: torch.dtype, queries: int, kept: str) -> float:
    q = torch.randn(queries, HEADS, CHANNELS).to(dtype)
    k = torch.randn(KEYS, CHANNELS).to(dtype)
    w = torch.randn(queries, HEADS)
    return best(lambda: torch_select(q, k, w, kept), 2)


def row(what: str, mine: float, other: float) -> None:
    print(f"| {what} | {mine:.3g} | {other:.3g} | {other / mine:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="avx512_bf16")
    options = parser.parse_args()
    program = options.build / "bench" / "selection_bench"
    print("| work | ours, ms | torch, ms | ratio |\n| --- | --- | --- | --- |")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    scores = torch.randn(KEYS)
    mine = ours(program, "--kernels", options.kernels, "--case", "top_keys")["top_keys"]
    for order in (True, False):
        other = best(lambda s=order: torch.topk(scores, SLOTS, sorted=s), 60)  # type: ignore[misc]
        row(f"{SLOTS} best of {KEYS}, 1 thread, torch sorted={order}", mine, other)

    torch.set_num_threads(options.threads)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        words = ["--kernels", options.kernels, "--type", name, "--case", "select"]
        words += ["--queries", str(options.queries), "--threads", str(options.threads)]
        mine = ours(program, *words, "--runs", "3")["select"]
        work = f"{options.queries} queries x {KEYS} keys, {HEADS} x {CHANNELS} {name}"
        for kept in ("bfloat16", "float32") if dtype == torch.bfloat16 else ("float32",):
            row(f"{work}, {options.threads} threads, torch sums {kept}", mine,
                torch_time(dtype, options.queries, kept))  # fmt: skip


if __name__ == "__main__":
    main()
