"""What the benchmarks share: times taken in turns, rows, and the table of them."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from machine import commit, cpu_name, write_whole

import longspan

Row = dict[str, Any]
Part = Callable[[], list[Row]]


def in_turns(*functions: Callable[[], Any], rounds: int = 31, warm: int = 3) -> list[float]:
    """Median milliseconds of each function, called one after another."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(warm):
        for function in functions:
            function()
    for _ in range(rounds):
        for function, took in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            took.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(took) for took in times]


def ratio_row(work: str, right: bool, ours: float, other: float, wanted: float | None) -> Row:
    """Milliseconds of ours and of what it is compared with, and how many times
    faster ours ought to be."""

    def shown(milliseconds: float) -> str:
        return f"{milliseconds:.{1 if milliseconds >= 10 else 3}f} ms"

    return {
        "work": work,
        "right": right,
        "ours": shown(ours),
        "other": shown(other),
        "ratio": f"{other / ours:.3g}x",
        "bar": "" if wanted is None else f">= {wanted:.2g}x",
        "met": wanted is None or other / ours >= wanted,
        "ours_ms": ours,
        "other_ms": other,
    }


def kernel_name() -> str:
    """Of float32 and of bfloat16."""
    q = torch.zeros(1, 1, 1, 1)
    names = [longspan.which_kernel(t, t, t) for t in (q, q.bfloat16())]
    return " and ".join(dict.fromkeys(name.split(",")[0] for name in names))


def versions() -> str:
    return (
        f"versions: torch {torch.__version__}, Python {platform.python_version()}, "
        f"longspan {longspan.__version__}"
    )


def report(rows: Sequence[Row], title: str, threads: str, command: str = "make bench") -> str:
    lines = [
        f"# {title}",
        "",
        f"- date: {datetime.date.today()}, commit: {commit()}",
        f"- command: `{command}`, {threads}, {cpu_name()}, kernels: {kernel_name()}",
        f"- {versions()}",
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


def main(
    description: str, title: str, threads: str, parts: Callable[[pathlib.Path], Sequence[Part]]
) -> int:
    """Runs the parts of one benchmark, each with one thread of torch to begin
    with, and prints their rows. 1 where an answer is wrong."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--save", type=pathlib.Path, help="also write the table here")
    parser.add_argument("--parts", help="only these, counted from 1, such as 2,5")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args()
    rows: list[Row] = []
    todo = parts(options.build)
    command = "make bench"
    if options.parts:
        todo = [todo[int(one) - 1] for one in options.parts.split(",")]
        script = pathlib.Path(sys.argv[0])
        command = f"python {script.parent.name}/{script.name} build/dev --parts {options.parts}"
    for i, part in enumerate(todo):
        if sys.stderr.isatty():
            print(f"\rbench {i + 1}/{len(todo)} ", end="", file=sys.stderr, flush=True)
        torch.set_num_threads(1)
        rows += part()
        if options.save:  # whoever stops it keeps what there is
            write_whole(options.save, report(rows, title, threads, command))
    if sys.stderr.isatty():
        print("\r" + " " * 20 + "\r", end="", file=sys.stderr)
    text = report(rows, title, threads, command)
    print(json.dumps(rows, indent=2) + "\n" if options.json else text, end="")
    return 0 if all(r["right"] for r in rows) else 1
