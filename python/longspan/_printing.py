"""Answers of commands on standard output."""

from __future__ import annotations

import sys


def printed(who: str, text: str) -> int:
    """Writes an answer; returns the exit status, 1 where nobody can read it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        sys.stderr.write(f"{who}: cannot write to standard output\n")
        sys.stderr.flush()
        sys.stdout = None  # nothing to flush at the end
        return 1
    return 0
