"""The drop-in in two processes, as under torchrun."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest


@pytest.mark.slow  # two interpreters start, and compile layers
def test_two_processes_train_as_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = pathlib.Path(__file__).parent / "two_ranks.py"
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("done" in output for output in outputs), "\n----\n".join(outputs)
