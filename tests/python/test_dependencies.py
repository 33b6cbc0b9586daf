"""What the package imports is what it declares, no more and no less."""

import ast
import pathlib
import re
import sys

import pytest

import longspan

PYPROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"
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


def test_tensors_never_become_arrays() -> None:
    """`.numpy()` would need a package that nobody declares."""
    for path in PACKAGE.rglob("*.py"):
        assert ".numpy(" not in path.read_text(), path
