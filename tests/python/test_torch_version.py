"""Another torch than the one it was built with is refused, by name and version."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from longspan import _built_with
from longspan._torch_version import why_not


def test_it_was_built_with_this_torch() -> None:
    assert _built_with.TORCH.split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("built", "here", "runs"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0+cu130", True),
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0+cu130", "2.13.0+cpu", False),
        ("2.13.0+cpu", "2.13.1+cpu", False),
        ("2.13.0+cpu", "2.14.0a0+git123", False),
    ],
)
def test_versions_that_fit(built: str, here: str, runs: bool) -> None:
    why = why_not(built, here)
    assert (why is None) == runs
    if why is not None:
        assert why.startswith(f"longspan: built with torch {built}, but this interpreter has")
        assert here in why


def test_the_import_is_refused() -> None:
    lines = "import torch\ntorch.__version__ = '2.99.1+cpu'\nimport longspan\n"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: longspan: built with torch ")
    assert "this interpreter has torch 2.99.1+cpu; build it again" in last
