"""Runs the benchmarks of one build and prints one table.

    make bench                          the table
    python bench/run.py build/dev --save bench/results/...md

Every row checks its answer before it is timed, and compares with a plain-torch
version of the reference algorithm (bench/baseline.py) in the same process, one
thread each, in turns. Ratios carry over between machines; times do not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import baseline
import torch

import longspan
from longspan import _C

TOKENS = 1 << 20


def in_turns(*functions: Callable[[], Any], rounds: int = 31) -> list[float]:
    """Median milliseconds of each function, called one after another."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(3):
        for function in functions:
            function()
    for _ in range(rounds):
        for function, took in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            took.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(took) for took in times]


def packed_rows(documents: int, multiple: int) -> dict[str, torch.Tensor]:
    """One row of TOKENS tokens: documents with pads, slots a multiple."""
    random = torch.Generator().manual_seed(3)
    slots = torch.full((documents,), TOKENS // documents // multiple * multiple)
    slots[: (TOKENS - int(slots.sum())) // multiple] += multiple
    pads = torch.randint(0, multiple, (documents,), generator=random)
    return {
        "input_ids": torch.randint(1, 1000, (1, TOKENS), generator=random),
        "labels": torch.randint(0, 1000, (1, TOKENS), generator=random),
        "position_ids": torch.arange(TOKENS).unsqueeze(0),
        "seq_lens": (slots - pads).unsqueeze(0),
        "seq_lens_padded": slots.unsqueeze(0),
    }


def shard_rows() -> list[dict[str, Any]]:
    ranks, rank = 8, 3
    batch = packed_rows(1000, 2 * ranks)

    def ours() -> longspan.LocalBatch:
        return longspan.shard(batch, rank=rank, ranks=ranks, layout="per-document-head-tail")

    def plain() -> dict[str, torch.Tensor]:
        return baseline.shard_packed(batch, ranks, rank)

    mine, theirs = ours(), plain()
    right = all(
        torch.equal(mine[key], theirs[key])
        for key in ("input_ids", "labels", "position_ids", "padding_mask")
    )
    moved = sum(mine[key].nbytes for key in ("input_ids", "labels", "position_ids", "padding_mask"))
    # The machine's copy bandwidth: more than the caches hold, into memory that
    # is there already.
    source = torch.zeros(64 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    # The first of two calls finds the caches as the others left them, the second
    # as a loader does that has just written the batch.
    t_plain, t_copy, t_cold, t_warm = in_turns(plain, lambda: target.copy_(source), ours, ours)
    t_moved = t_copy * moved / source.nbytes
    return [
        row("pack + pad + shard, 1 M tokens, 8 ranks", right, t_cold, t_plain, ">= 10x"),
        row("  against the machine's copy of the moved bytes", right, t_warm, t_moved, ">= 0.5x"),
        row("  the same, caches cold", right, t_cold, t_moved, ">= 0.5x"),
    ]


def window_rows() -> list[dict[str, Any]]:
    batch = packed_rows(1000, 16)
    lengths, slots = batch["seq_lens"][0], batch["seq_lens_padded"][0]
    packing = longspan.Packing.of(lengths.tolist(), slots.tolist())
    mask = longspan.Mask.causal(packing).with_seeing_pads()
    zero = torch.zeros(1, dtype=torch.int64)
    cu = torch.cat([zero, lengths.cumsum(0)]).to(torch.int32)
    cu_padded = torch.cat([zero, slots.cumsum(0)]).to(torch.int32)
    expected = baseline.padded_windows(cu, cu_padded)
    right = all(
        torch.equal(a, b)
        for answer in (longspan.key_windows(mask), _C.padded_windows(cu, cu_padded))
        for a, b in zip(answer, expected, strict=True)
    )
    t_values, t_lists, t_plain = in_turns(
        lambda: longspan.key_windows(mask),
        lambda: _C.padded_windows(cu, cu_padded),
        lambda: baseline.padded_windows(cu, cu_padded),
    )
    return [
        row("key windows of 1 M tokens, from a mask", right, t_values, t_plain, ">= 10x"),
        row("key windows of 1 M tokens, from offsets", right, t_lists, t_plain, ">= 10x"),
    ]


class Mesh:
    """As much of a device mesh as the drop-in asks for."""

    mesh_dim_names = ("cp",)

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __getitem__(self, name: str) -> Mesh:
        return self

    def size(self) -> int:
        return self.ranks

    def get_group(self) -> None:
        return None


def drop_in_rows() -> list[dict[str, Any]]:
    from longspan.compat.nemo.components.distributed.cp_utils import make_cp_batch_and_ctx

    tokens, mesh = 128 * 1024 - 5, Mesh(8)
    full = {
        "input_ids": torch.arange(tokens).unsqueeze(0),
        "labels": torch.arange(tokens).unsqueeze(0),
        "position_ids": torch.arange(tokens).unsqueeze(0),
    }

    def drop_in() -> dict[str, torch.Tensor]:
        return make_cp_batch_and_ctx(mesh, dict(full))[1]

    def direct() -> list[torch.Tensor]:
        return [
            _C.pad_tokens(full["input_ids"], 1, 5, 0),
            _C.pad_tokens(full["labels"], 1, 5, -100),
            _C.pad_tokens(full["position_ids"], 1, 5, 0),
        ]

    made = drop_in()
    right = all(torch.equal(made[key], tensor) for key, tensor in zip(full, direct(), strict=True))
    t_drop_in, t_direct = in_turns(drop_in, direct, rounds=201)
    extra = (t_drop_in - t_direct) * 1e3
    return [
        {
            "work": "drop-in make_cp_batch_and_ctx over the C++ calls, 128 k tokens",
            "right": right,
            "ours": f"{extra:.0f} us more",
            "other": f"{t_direct:.3f} ms",
            "ratio": "",
            "bar": "< 100 us",
            "met": extra < 100,
        }
    ]


def core_rows(build: pathlib.Path) -> list[dict[str, Any]]:
    bars = {
        "head-tail + every ring tile": (100.0, 64.0),
        "one rank of per-document head-tail": (10.0, 16.0),
    }
    rows = []
    out = subprocess.run(
        [build / "bench" / "core_bench"], check=True, capture_output=True, text=True
    ).stdout
    for line in out.splitlines():
        result = json.loads(line)
        most_ms, most_mb = bars[result["name"]]
        rows.append(
            {
                "work": f"{result['name']}, 10 k documents, 1 M tokens, 512 ranks",
                "right": result["right"],
                "ours": f"{result['p50_ms']:.2f} ms (p99 {result['p99_ms']:.2f}), "
                f"{result['peak_mb']:.1f} MB",
                "other": "",
                "ratio": "",
                "bar": f"< {most_ms:.0f} ms, < {most_mb:.0f} MB",
                "met": result["p50_ms"] < most_ms and result["peak_mb"] < most_mb,
            }
        )
    return rows


def row(work: str, right: bool, ours: float, other: float, bar: str) -> dict[str, Any]:
    wanted = float(bar.removeprefix(">= ").removesuffix("x"))
    return {
        "work": work,
        "right": right,
        "ours": f"{ours:.3f} ms",
        "other": f"{other:.3f} ms",
        "ratio": f"{other / ours:.2g}x",
        "bar": bar,
        "met": other / ours >= wanted,
    }


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def report(
    rows: list[dict[str, Any]],
    title: str = "Index math and batches",
    threads: str = "one thread",
) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    lines = [
        f"# {title}",
        "",
        f"- date: {datetime.date.today()}, commit: {commit}",
        f"- command: `make bench`, {threads}, {cpu_name()}",
        f"- versions: torch {torch.__version__}, Python {platform.python_version()}, "
        f"longspan {longspan.__version__}",
        "",
        "| work | answer | ours | compared with | ratio | bar | met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        lines.append(
            f"| {r['work']} | {'equal' if r['right'] else 'WRONG'} | {r['ours']} | {r['other']} "
            f"| {r['ratio']} | {r['bar']} | {'yes' if r['met'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--save", type=pathlib.Path, help="also write the table here")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    parts: list[Callable[[], list[dict[str, Any]]]] = [
        lambda: core_rows(options.build),
        shard_rows,
        window_rows,
        drop_in_rows,
    ]
    for i, part in enumerate(parts):
        if sys.stderr.isatty():
            print(f"\rbench {i + 1}/{len(parts)} ", end="", file=sys.stderr, flush=True)
        rows += part()
    if sys.stderr.isatty():
        print("\r" + " " * 20 + "\r", end="", file=sys.stderr)
    text = report(rows)
    print(json.dumps(rows, indent=2) if options.json else text, end="")
    if options.save:
        options.save.write_text(text)
    return 0 if all(r["right"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
