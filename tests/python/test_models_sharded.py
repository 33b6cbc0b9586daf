"""Decoders under FSDP2 and DDP over processes, and the example that trains so."""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest
from processes import outputs_of, start_ranks

pytestmark = pytest.mark.slow  # processes train

pytest.importorskip("transformers")

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "hf_finetune.py"


def test_replicas_of_two_ranks_equal_one_rank() -> None:
    processes = start_ranks("models_four_ranks.py", 4)
    outputs = outputs_of(processes, timeout=400)
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    lines = outputs[0].splitlines()
    for family in ("llama", "gpt_oss", "glm_moe_dsa", "deepseek_v4", "qwen3_next", "mamba2"):
        for kind in ("fsdp two axes", "fsdp flat", "fsdp replicas", "fsdp first", "ddp"):
            assert f"{family} {kind}" in lines
    for kind in ("fsdp tiles whole", "fsdp tiles apart", "fsdp tiles first", "ddp tiles"):
        assert f"llama {kind}" in lines
    assert "llama fsdp compiled" in lines
    assert "glm_moe_dsa checkpoint" in lines


def example(ranks: int, *options: str) -> list[dict[str, float]]:
    command = [sys.executable, str(EXAMPLE)]
    if ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(EXAMPLE)]
    done = subprocess.run(
        [*command, "--steps", "3", "--length", "96", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_example_trains_alike_on_any_number_of_ranks() -> None:
    alone = example(1)
    assert [line["step"] for line in alone] == [0, 1, 2]
    assert alone[-1]["loss"] < alone[0]["loss"]
    # Replicas of two ranks; the README's lines run on two ranks alone.
    over = example(4, "--cp", "2", "--strategy", "gathered", "--checkpointing")
    for ours, theirs in zip(over, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=2e-3)


#: One of each kind: a state with numbers, with matrices, a convolution alone, selected keys, and
#: layers that share parameters.
KINDS = ("mamba2", "qwen3_next", "lfm2", "glm_moe_dsa", "zamba2")


@pytest.mark.parametrize("family", KINDS)
def test_the_example_takes_any_family(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--family", family, "--steps", "3", "--length", "96", "--json"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    alone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(alone) == 3 and alone[-1]["loss"] < alone[0]["loss"]
    if family != "mamba2":
        return
    over = example(2, "--cp", "2", "--family", family, "--checkpointing")
    for ours, theirs in zip(over, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=2e-3)


def test_the_example_knows_no_other_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--family", "mamba3"])
    with pytest.raises(SystemExit, match=r"hf_finetune: 'mamba3' is neither .* like it are mamba"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_example_names_numbers_that_do_not_divide() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--cp", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "1 ranks and 2 rows a step do not divide into replicas of --cp 3" in done.stderr
