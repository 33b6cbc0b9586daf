"""Runs a script of this folder as the processes of one group."""

from __future__ import annotations

import functools
import os
import pathlib
import socket
import subprocess
import sys


def start_ranks(script: str, ranks: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """One process a rank, with torchrun's variables, over gloo on this machine. With
    "-c" for a script the first argument is the program."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = script if script == "-c" else pathlib.Path(__file__).parent / script
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
    }
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return [
        subprocess.Popen(
            [sys.executable, str(path), *arguments],
            env=environment | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def outputs_of(processes: list[subprocess.Popen[str]], timeout: float = 240) -> list[str]:
    """What every rank wrote; none is left running."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


@functools.cache
def silent_two_ranks() -> tuple[str, ...]:
    """What that program wrote on each rank; it runs once for all who ask."""
    processes = start_ranks("silent_two_ranks.py", 2)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    return tuple(outputs)
