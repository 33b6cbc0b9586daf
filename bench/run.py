"""Runs the benchmarks of one build and prints one table.

    make bench                          the table
    python bench/run.py build/dev --save bench/results/...md

Every row checks its answer before it is timed, and compares with a plain-torch
version of the reference algorithm (bench/baseline.py) in the same process, one
thread each, in turns. Ratios carry over between machines; times do not.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import baseline
import torch
from harness import Part, Row, in_turns, main, ratio_row

import longspan

TOKENS = 1 << 20


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


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def shard_rows() -> list[Row]:
    ranks, rank = 8, 3
    batch = packed_rows(1000, 2 * ranks)

    def ours() -> longspan.values.LocalBatch:
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
        ratio_row("pack + pad + shard, 1 M tokens, 8 ranks", right, t_cold, t_plain, 10.0),
        ratio_row("  against the machine's copy of the moved bytes", right, t_warm, t_moved, 0.5),
        ratio_row("  the same, caches cold", right, t_cold, t_moved, 0.5),
    ]


def window_rows() -> list[Row]:
    batch = packed_rows(1000, 16)
    lengths, slots = batch["seq_lens"][0], batch["seq_lens_padded"][0]
    packing = longspan.Packing.of(lengths.tolist(), slots.tolist())
    mask = longspan.Mask.causal(packing).with_seeing_pads()
    cu, cu_padded = offsets(lengths), offsets(slots)
    expected = baseline.padded_windows(cu, cu_padded)
    right = all(
        torch.equal(a, b) for a, b in zip(longspan.values.key_windows(mask), expected, strict=True)
    )
    t_values, t_plain = in_turns(
        lambda: longspan.values.key_windows(mask),
        lambda: baseline.padded_windows(cu, cu_padded),
    )
    return [ratio_row("key windows of 1 M tokens, from a mask", right, t_values, t_plain, 10.0)]


def core_rows(build: pathlib.Path) -> list[Row]:
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


def parts(build: pathlib.Path) -> list[Part]:
    return [lambda: core_rows(build), shard_rows, window_rows]


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", "Index math and batches", "one thread", parts))
