"""Ranks as children of one process that has imported what they need, which takes seconds."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable


def run_forked(ranks: int, body: Callable[[], None]) -> None:
    """Runs `body` in so many processes with torchrun's variables; ends this one where a rank
    failed. Nothing may have made a group or started a thread before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    sys.stdout.flush()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
            _run(rank, body)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"ranks of {ranks} ended with {codes}")


def _run(rank: int, body: Callable[[], None]) -> None:
    code = 1
    try:
        os.environ["RANK"] = str(rank)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
