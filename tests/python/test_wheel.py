"""The installed wheel works without the build tree."""

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

import longspan

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


def test_its_contents_are_these() -> None:
    """The package as it lies in the tree, the libraries once, the program, and what
    describes them; nothing of tests, builds or benchmarks. Folders inside of the package
    are listed by their own tests."""
    source = SITE.parents[2] / "python" / "longspan"
    (wheel,) = (SITE.parent / "dist").glob("*.whl")
    found = {
        re.sub(r"\.cpython-\d+-[\w-]+\.so$", ".so", name)
        for name in zipfile.ZipFile(wheel).namelist()
        if re.match(r"longspan/([^/]+|bin/.*|lib/.*)$", name) or not name.startswith("longspan/")
    }
    expected = {"longspan/_built_with.py", "longspan/_C.so"}
    expected |= {f"longspan/{path.name}" for path in source.iterdir() if path.is_file()}
    expected |= {f"longspan/lib/liblongspan_{name}.so" for name in ("core", "kernels", "torch")}
    facts = f"longspan-{longspan.__version__}.dist-info"
    expected |= {
        f"{facts}/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    # The command line is built where its two libraries are.
    assert found - {"longspan/bin/longspan"} == expected


def test_it_says_what_it_was_built_with() -> None:
    done = run("-c", "import torch\ntorch.__version__ = '2.99.1'\nimport longspan\n")
    assert "ImportError: longspan: built with torch " in done.stderr
