"""The drop-in is part of the installed wheel, and a package of its own in this tree."""

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[3]
SITE = ROOT / "build" / "wheel" / "site"


@pytest.mark.skipif(not SITE.exists(), reason="no wheel was built here")
def test_the_wheel_has_it():
    lines = (
        "from longspan.compat.nemo import _nemo\n"
        "from longspan.compat.nemo.components.distributed import cp_utils\n"
        "assert 'site' in cp_utils.__file__ and 'site' in _nemo.__file__\n"
        "assert cp_utils.make_cp_batch_and_ctx(None, {'input_ids': 1})[1] == {'input_ids': 1}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", lines],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SITE)},
        cwd=SITE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not SITE.exists(), reason="no wheel was built here")
def test_the_wheel_has_all_of_it_and_no_more():
    (wheel,) = (SITE.parent / "dist").glob("*.whl")
    names = [
        re.sub(r"\.cpython-.*\.so$", ".so", name) for name in zipfile.ZipFile(wheel).namelist()
    ]
    found = {name for name in names if name.startswith("longspan/compat/")}
    source = ROOT / "compat" / "nemo" / "python"
    expected = {"longspan/compat/nemo/_nemo.so"} | {
        f"longspan/compat/nemo/{path.relative_to(source)}"
        for path in source.rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert found == expected


def test_nothing_else_knows_it():
    """Only the build, the tools and the pages name the drop-in."""
    words = ("compat", "_nemo", "longspan::nemo")
    for folder in ("longspan", "python", "cli", "examples", "bench", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".txt"}:
                continue
            text = path.read_text().replace("incompatible", "")
            found = [word for word in words if word in text]
            assert not found, f"{path.relative_to(ROOT)} names {found}"
