"""Runs a script of this folder as the processes of one group."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
from typing import Any


class _Nursery:
    """A process that forks ranks; see nursery.py."""

    def __init__(self) -> None:
        become_child_subreaper = 36
        if ctypes.CDLL(None).prctl(become_child_subreaper, 1, 0, 0, 0) != 0:
            raise OSError("ranks of another process cannot be waited for here")
        self._channel, there = socket.socketpair()
        path = pathlib.Path(__file__).parent / "nursery.py"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, str(path), str(there.fileno())],
            pass_fds=[there.fileno()],
            env=environment,
        )
        there.close()

    def fork(self, arguments: list[str], environment: dict[str, str], files: list[int]) -> int:
        request = json.dumps({"arguments": arguments, "environment": environment}).encode()
        socket.send_fds(self._channel, [struct.pack("I", len(request))], files)
        self._channel.sendall(request)
        answer = self._channel.recv(4)
        if len(answer) < 4:
            raise OSError("the process that forks ranks has ended")
        return int(struct.unpack("I", answer)[0])


@functools.cache
def _nursery() -> _Nursery | None:
    try:
        return _Nursery()
    except (OSError, AttributeError):
        return None


class _Forked(subprocess.Popen[str]):
    """A process of Python that begins with its imports done."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        env = more[5]
        read_in, _, _, write_out, _, write_err = more[9:15]
        nursery = _nursery()
        assert nursery is not None
        try:
            self.pid = nursery.fork(args[1:], env, [read_in, write_out, write_err])
            self._child_created = True
        finally:
            self._close_pipe_fds(*more[9:15])  # type: ignore[attr-defined]


def start_ranks(
    script: str, ranks: int, *arguments: str, fresh: bool = False
) -> list[subprocess.Popen[str]]:
    """One process a rank, with torchrun's variables, over gloo on this machine. With
    "-c" for a script the first argument is the program. Ranks are forked from a process that
    has imported torch, unless they are to be `fresh`, as those whose end is looked at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = script if script == "-c" else pathlib.Path(__file__).parent / script
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
    }
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen if fresh or _nursery() is None else _Forked
    return [
        process(
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
