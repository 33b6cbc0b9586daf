"""What every table of results says about where it was made. Needs no torch."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import subprocess


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def write_whole(place: pathlib.Path, text: str) -> None:
    """Writes a report beside its place and renames it, so that a full disk or a signal
    leaves the old one whole."""
    beside = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        beside.write_text(text)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def resident(key: str) -> int:
    """KiB of this process, by a key of its status: VmRSS now, VmHWM at most."""
    found = re.search(rf"{key}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])
