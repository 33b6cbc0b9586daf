"""The blocks of the pages run as printed."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from processes import outputs_of, start_ranks

pytestmark = pytest.mark.slow  # programs start, and one is compiled

ROOT = pathlib.Path(__file__).parents[2]
BUILD = pathlib.Path(os.environ.get("LONGSPAN_BUILD", ROOT / "build" / "dev"))
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_first_screen_has_a_picture_and_both_languages() -> None:
    assert len(blocks("cpp")) == 1
    assert len(blocks("python")) == 2
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).exists()


def test_both_commands_are_named() -> None:
    assert "make demo" in README
    assert "make test" in README


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_promises_name_tests_that_exist() -> None:
    rows = re.findall(r"^\|.*`test_.*\|$", (ROOT / "docs" / "promises.md").read_text(), re.M)
    assert len(rows) > 15
    for row in rows:
        for name in re.findall(r"`(test_\w+\.py)`", row):
            assert (ROOT / "tests" / "python" / name).exists(), name


def test_the_python_lines_run_as_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[1]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 4" in done.stdout


def test_the_lines_with_a_model_run_on_any_number_of_ranks() -> None:
    pytest.importorskip("transformers")
    lines = blocks("python")[0]
    alone = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=False
    )
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("rank 0: 100 tokens, norm ")
    facts = alone.stdout.split("norm ")[1]
    processes = start_ranks("-c", 2, lines)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    for rank, output in enumerate(outputs):
        assert f"rank {rank}: 50 tokens, norm {facts}" in output


def test_the_cpp_lines_compile_and_run_as_printed(tmp_path: pathlib.Path) -> None:
    library = BUILD / "longspan"
    if not library.exists():
        pytest.skip("no build tree here")
    source = tmp_path / "readme.cpp"
    source.write_text(blocks("cpp")[0])
    program = tmp_path / "readme"
    command = ["c++", "-std=c++20", f"-I{ROOT}", str(source), "-o", str(program)]
    command += [f"-L{library}", "-llongspan_core", f"-Wl,-rpath,{library}"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    lines = subprocess.run(
        [program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("16 tokens, ") for line in lines)
