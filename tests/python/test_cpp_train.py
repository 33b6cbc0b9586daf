"""`examples/cpp_train.cpp`: a model made of layers of C++ learns over thread ranks, with the same
losses for every number of them."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

BUILD = pathlib.Path(os.environ.get("LONGSPAN_BUILD", "build/dev"))
PROGRAM = BUILD / "examples" / "cpp_train"
pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="built without models in C++")

LAYERS = ("mamba2", "delta", "glm_dsa", "deepseek_v4")


def train(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def text(tmp_path: pathlib.Path) -> str:
    """Paragraphs that straddle ranks, of two bytes, and one that is too short."""
    lines = [f"{n} times {m} is {n * m}, and that is that." for n in range(9) for m in range(5)]
    parts = [" ".join(lines[i : i + 1 + i % 4]) for i in range(0, len(lines), 4)]
    path = tmp_path / "some.txt"
    path.write_text("\n\n".join([*parts, "ab", "c"]))
    return str(path)


def losses(text: str, layer: str, ranks: int, *words: str) -> list[float]:
    settings = ("--layer", layer, "--ranks", str(ranks), "--steps", "20", "--tokens", "90")
    done = train("--text", text, "--type", "float64", *settings, *words)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step \d+ of 20: loss (\S+),", done.stdout, re.MULTILINE)
    return [float(loss) for loss in found]


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_losses_are_those_of_one_rank(text: str, layer: str) -> None:
    """90 tokens over 4 ranks are padded to 96."""
    one, four = losses(text, layer, 1), losses(text, layer, 4)
    assert len(one) == len(four) == 20
    assert max(abs(a - b) for a, b in zip(one, four, strict=True)) <= 1e-10
    assert one[-1] < one[0] - 1  # it learns


def test_training_goes_on_from_what_was_saved(text: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "model.safetensors")
    saved = losses(text, "mamba2", 1, "--save", path)
    assert losses(text, "mamba2", 2, "--start", path)[0] < saved[0] - 1


def test_what_makes_no_sense_is_refused(text: str, tmp_path: pathlib.Path) -> None:
    for words, message in (
        ((), "cpp_train: give --text FILE"),
        (("--text", text, "--layer", "rnn"), "cpp_train: --layer rnn is not one of mamba2"),
        (("--text", text, "--ranks", "0"), "cpp_train: '--ranks 0' is no option"),
        (("--text", text, "--ranks"), "cpp_train: '--ranks ' is no option"),
        (("--text", text, "--type", "int8"), "cpp_train: --type int8 is not one of"),
        (("--text", str(tmp_path / "none")), "cannot be read, or has no paragraph"),
        (("--text", text, "--start", text), "safetensors: "),
    ):
        done = train(*words)
        assert done.returncode == 1
        assert message in done.stderr
