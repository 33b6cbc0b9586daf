"""The examples of trainers, models of one's own, perplexity and prompts, as users run them."""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import sys

import pytest
from processes import outputs_of, start_ranks

pytest.importorskip("transformers")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run_here(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> str:
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_a_model_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_here("own_model.py", monkeypatch, capsys, "--ranks", "3").splitlines()
    assert [line.split(":")[0] for line in said] == ["by attend", "by context"]
    assert all("on 3 ranks" in line for line in said)


def test_perplexity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(EXAMPLES.parent / "pyproject.toml")
    options = ["--text", text, "--length", "256"]
    assert "targets, perplexity" in run_here("perplexity.py", monkeypatch, capsys, *options)


def test_prefill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1000 tokens on 1 ranks, then [" in run_here("prefill.py", monkeypatch, capsys)


def lines_of(output: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


LOOP = """
import runpy, sys
import torch._dynamo, torch.distributed.fsdp, transformers
from forked import run_forked
del sys.argv[0]
run_forked(2, lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
"""


@pytest.mark.slow
def test_the_loop_trains_alike_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps", "2", "--length", "48", "--json", "--compile"]
    true = lines_of(run_here("fsdp_cp.py", monkeypatch, capsys, *options, "no"))
    assert [line["step"] for line in true] == [0, 1]
    here = pathlib.Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    example = str(EXAMPLES / "fsdp_cp.py")
    (parent,) = start_ranks("-c", 1, LOOP, example, *options, "eager", "--cp", "2")
    (output,) = outputs_of([parent])
    assert parent.returncode == 0, output
    for ours, theirs in zip(lines_of(output), true, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
