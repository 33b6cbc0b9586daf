"""The Python blocks of the pages run as printed, those of a page one after the other."""

import pathlib
import re

import pytest
from processes import outputs_of, start_ranks

pytestmark = pytest.mark.slow  # programs start

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# Alone and over two ranks, where a page makes its group of the environment.
PAGES = [
    ("batches", 1),
    ("estimates", 1),
    ("gradients", 1),
    ("gradients", 2),
    ("groups", 1),
    ("memory", 2),
    ("pools", 1),
    ("selected", 1),
    ("states", 1),
    ("strategies", 1),
    ("trainers", 1),
    ("trainers", 2),
]
#: Packages that a page has beyond transformers.
NEEDED = {"trainers": ("datasets", "peft", "trl")}
# The drop-in's tests run its pages; the lines of models go on from those of the README
# with a model of the reader's.
ELSEWHERE = {"drop-in", "reference-map", "models"}


def program(page: str) -> str:
    text = (DOCS / f"{page}.md").read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))


def test_no_page_is_forgotten() -> None:
    with_blocks = {path.stem for path in DOCS.glob("*.md") if program(path.stem)}
    assert with_blocks == {page for page, _ in PAGES} | ELSEWHERE


@pytest.mark.parametrize(("page", "ranks"), PAGES)
def test_the_blocks_run_as_printed(page: str, ranks: int) -> None:
    for package in NEEDED.get(page, ()):
        pytest.importorskip(package)
    processes = start_ranks("-c", ranks, program(page))
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0] * ranks, outputs
