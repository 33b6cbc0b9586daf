"""Attention to listed keys against plain torch, taken in turns.

    python bench/selected.py build/dev [--kernels amx] [--threads 2] [--rounds 5]

Ours is `selected_bench`, with bfloat16 inputs. torch gathers the listed rows and
multiplies them in float32, a few queries at a time, as one writes it first.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import time
from collections.abc import Callable

import torch

QUERIES, KEYS, HEADS, SLOTS, HEAD_DIM, VALUE_DIM = 64, 8192, 64, 2048, 576, 512


def ours(build: pathlib.Path, kernels: str, threads: int) -> list[dict[str, float]]:
    """Milliseconds of forward and of both directions, by clock and by processor."""
    command = [build / "bench/selected_bench", "--type", "bfloat16", "--runs", "2"]
    command += ["--threads", str(threads), "--kernels", kernels]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    forward, backward = (json.loads(line) for line in lines.splitlines()[:2])
    both = {name: forward[name] + backward[name] for name in ("ms", "cpu_ms")}
    return [forward, both]


def attend(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    parts = []
    for some in range(0, QUERIES, 16):
        rows = kv[indices[some : some + 16]]
        scores = q[some : some + 16] @ rows.transpose(1, 2) * HEAD_DIM**-0.5
        parts.append(scores.softmax(-1) @ rows[..., :VALUE_DIM])
    return torch.cat(parts)


def timed(work: Callable[[], object]) -> dict[str, float]:
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return {
        "ms": (time.perf_counter() - clock) * 1e3,
        "cpu_ms": (time.process_time() - cpu) * 1e3,
    }


def torchs(inputs: list[torch.Tensor], dout: torch.Tensor) -> list[dict[str, float]]:
    q, kv, indices = inputs

    def both() -> None:
        leaves = [t.float().requires_grad_() for t in (q, kv)]
        attend(*leaves, indices).backward(dout.float())

    with torch.no_grad():
        forward = timed(lambda: attend(q.float(), kv.float(), indices).to(q.dtype))
    return [forward, timed(both)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--kernels", default="avx512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    q = torch.randn(QUERIES, HEADS, HEAD_DIM).bfloat16()
    kv = torch.randn(KEYS, HEAD_DIM).bfloat16()
    dout = torch.randn(QUERIES, HEADS, VALUE_DIM).bfloat16()
    indices = torch.rand(QUERIES, KEYS).topk(SLOTS).indices.sort().values
    rounds = []
    for _ in range(options.rounds):
        rounds.append(
            (
                ours(options.build, options.kernels, options.threads),
                torchs([q, kv, indices], dout),
            )
        )
    for i, name in enumerate(("forward", "both directions")):
        for unit in ("ms", "cpu_ms"):
            mine, other = (min(r[who][i][unit] for r in rounds) for who in (0, 1))
            print(f"{name:16} {unit:7} {mine:9.1f} torch {other:9.1f} ratio {other / mine:.2f}")


if __name__ == "__main__":
    main()
