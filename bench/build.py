"""How long a newcomer waits: a fresh clone, the two commands, and what one touched
file costs afterwards.

    make bench-build                     all of it, kept in bench/results
    python bench/build.py --only demo

Packages are installed first and are not counted; nothing comes from ccache. Beside
the time on the clock stands the processor time, which other work on the machine
does not lengthen.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from machine import commit, cpu_name, write_whole

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Took(NamedTuple):
    clock: float
    processor: float

    def __str__(self) -> str:
        return f"{shown(self.clock)} | {shown(self.processor)}"


def shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def timed(command: list[str], folder: pathlib.Path, log: pathlib.Path) -> Took:
    """Runs a command, its output in `log`; stops the program where it fails."""
    environment = os.environ | {"CCACHE_DISABLE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    before, start = children(), time.monotonic()
    with log.open("a") as output:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    took = Took(time.monotonic() - start, children() - before)
    if done.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        sys.exit(f"bench-build: {' '.join(command)} failed\n{tail}")
    return took


def children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


#: What is touched, and how long the rebuild may take.
TOUCHED = (
    ("one source of ops", "longspan/ops/fold.cpp", "20 s"),
    ("one header of core", "longspan/core/mask.h", "90 s"),
)


def measure(only: list[str], clone: pathlib.Path, log: pathlib.Path) -> list[tuple[str, Took, str]]:
    rows: list[tuple[str, Took, str]] = []

    def add(what: str, took: Took, bar: str) -> None:
        rows.append((what, took, bar))
        print(f"{what}: {shown(took.clock)}, bar {bar}", file=sys.stderr, flush=True)

    timed(["make", "setup"], clone, log)
    if "demo" in only:
        add("`make demo`, packages there", timed(["make", "demo"], clone, log), "5 min")
    if "rebuild" in only:
        timed(["make", "build"], clone, log)
        for what, file, bar in TOUCHED:
            (clone / file).touch()
            add(f"`make build` after touching {what}", timed(["make", "build"], clone, log), bar)
    if "test" in only:
        shutil.rmtree(clone / "build")
        add("`make test`, from nothing", timed(["make", "test"], clone, log), "20 min")
    if "fast" in only:
        add("`make test-fast`, on a built tree", timed(["make", "test-fast"], clone, log), "3 min")
    if "deep" in only:
        add("`make deep`, which CI adds", timed(["make", "deep"], clone, log), "25 min")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = "demo,rebuild,test,fast,deep"
    parser.add_argument("--only", default=parts, help=f"of {parts}")
    parser.add_argument("--save", type=pathlib.Path, help="a folder to keep the table in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone, log = pathlib.Path(folder) / "longspan", pathlib.Path(folder) / "log"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        rows = measure(options.only.split(","), clone, log)
    table = [
        "# From nothing to an answer",
        "",
        f"- date: {datetime.date.today()}, commit: {commit()}",
        f"- command: `make bench-build`, {os.cpu_count()} cores, {cpu_name()}, no ccache",
        "",
        "| work | on the clock | processor | bar |",
        "| --- | --- | --- | --- |",
        *(f"| {what} | {took} | {bar} |" for what, took, bar in rows),
    ]
    print("\n".join(table))
    if options.save:
        short = "-".join(cpu_name().lower().replace("(r)", "").split()[:2])
        place = options.save / f"build_{short}_{datetime.date.today()}.md"
        write_whole(place, "\n".join(table) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
