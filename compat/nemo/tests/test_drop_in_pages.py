"""The Python blocks of the drop-in's pages run as printed."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # programs start

DOCS = pathlib.Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("page", "ranks"), [("drop-in", 2), ("reference-map", 1)])
def test_the_blocks_run_as_printed(page: str, ranks: int) -> None:
    text = (DOCS / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", "\n".join(blocks)],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, outputs
