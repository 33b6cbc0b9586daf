"""What the package imports is what it declares, no more and no less."""

import ast
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

import longspan

PYPROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"
BACKEND = PYPROJECT.parent / "tools" / "backend"
CALL_BACKEND = """
import sys
sys.path.insert(0, sys.argv[1])
import longspan_backend
longspan_backend.build_wheel("somewhere")
"""
PACKAGE = pathlib.Path(longspan.__file__).parent


def imported() -> set[str]:
    """First words of all imports in the package, without Python's own and ours."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module)
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"longspan"}


def test_imports_are_the_declared_dependencies() -> None:
    project = pytest.importorskip("tomllib").loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(name for extra in extras.values() for name in extra)]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in declared}
    assert imported() == names


def test_a_build_without_its_packages_names_them() -> None:
    """As pip calls it with --no-build-isolation, in an interpreter that has nothing."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CALL_BACKEND, str(BACKEND)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"longspan: {sys.executable} has no scikit-build-core>=0.10 and no torch>=2.11, which a "
        "build without isolation takes from there; run: pip install "
        '"scikit-build-core>=0.10" "torch>=2.11" cmake ninja'
    ]


def test_the_backend_names_what_the_project_requires() -> None:
    project = pytest.importorskip("tomllib").loads(PYPROJECT.read_text())["build-system"]
    assert project["backend-path"] == ["tools/backend"]
    backend = runpy.run_path(str(BACKEND / f"{project['build-backend']}.py"))
    assert list(backend["NEEDED"].values()) == project["requires"]


def test_with_its_packages_the_backend_is_that_of_scikit_build() -> None:
    build = pytest.importorskip("scikit_build_core.build")
    hook = runpy.run_path(str(BACKEND / "longspan_backend.py"))["__getattr__"]
    assert hook("build_wheel") is build.build_wheel


def test_tensors_never_become_arrays() -> None:
    """`.numpy()` would need a package that nobody declares."""
    for path in PACKAGE.rglob("*.py"):
        assert ".numpy(" not in path.read_text(), path
