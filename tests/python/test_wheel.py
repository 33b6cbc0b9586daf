"""The installed wheel works without the build tree."""

import os
import pathlib
import subprocess
import sys

import pytest

SITE = pathlib.Path(__file__).parents[2] / "build" / "wheel" / "site"

pytestmark = pytest.mark.skipif(not SITE.exists(), reason="no wheel was built here")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(SITE))
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=SITE,
        check=False,
    )


def test_it_shards_and_joins() -> None:
    done = run(
        "-c",
        "import torch, longspan\n"
        "assert 'site' in longspan.__file__\n"
        "ids = torch.arange(16).view(2, 8)\n"
        "shares = [longspan.shard({'input_ids': ids}, rank=r, ranks=2) for r in range(2)]\n"
        "assert torch.equal(longspan.unshard([s['input_ids'] for s in shares], shares[0]), ids)\n",
    )
    assert done.returncode == 0, done.stderr


def test_its_command_line_draws() -> None:
    done = run("-m", "longspan", "draw", "--tokens", "16", "--ranks", "2")
    if "no command line" in done.stderr:
        pytest.skip("built without the command line")
    assert done.returncode == 0, done.stderr
    assert "rank 1" in done.stdout
