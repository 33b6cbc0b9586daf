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
    selecting = ("glm_moe_dsa", "deepseek_v32", "deepseek_v4")
    for family in ("llama", "gpt_oss", *selecting, "qwen3_next", "mamba2"):
        for kind in ("fsdp two axes", "fsdp flat", "fsdp replicas", "fsdp first", "ddp"):
            assert f"{family} {kind}" in lines
    for kind in ("fsdp tiles whole", "fsdp tiles apart", "fsdp tiles first", "ddp tiles"):
        assert f"llama {kind}" in lines
    assert "llama fsdp compiled" in lines
    for family in ("glm_moe_dsa", "deepseek_v4"):
        assert f"{family} checkpoint" in lines
    for family in ("llama", "deepseek_v4"):
        assert f"{family} fsdp restored" in lines and f"{family} ddp restored" in lines


def over(ranks: int, *options: str) -> list[dict[str, float]]:
    """What the example tells of its steps as so many processes."""
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


class Here:
    """The example in this process, on one rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def __call__(self, *options: str) -> list[dict[str, float]]:
        short = ["--steps", "3", "--length", "96", "--json"]
        self._patch.setattr(sys, "argv", [str(EXAMPLE), *short, *options])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return [json.loads(line) for line in self._capsys.readouterr().out.splitlines()]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)


def test_the_example_trains_alike_on_any_number_of_ranks(here: Here) -> None:
    """A family with attention and states; the README's lines run on two ranks alone."""
    family = ("--family", "qwen3_next")
    alone = here(*family)
    assert [line["step"] for line in alone] == [0, 1, 2]
    # Replicas of two ranks.
    ours = over(4, "--cp", "2", "--strategy", "gathered", "--checkpointing", *family)
    for one, true in zip(ours, alone, strict=True):
        assert one["loss"] == pytest.approx(true["loss"], rel=2e-4)
        assert one["norm"] == pytest.approx(true["norm"], rel=2e-3)


#: One of each kind: attention, a state with numbers, with matrices, a convolution, selected keys,
#: and layers that share parameters.
KINDS = ("llama", "mamba2", "qwen3_next", "lfm2", "glm_moe_dsa", "zamba2")


@pytest.mark.parametrize("family", KINDS)
def test_the_example_takes_any_family(family: str, here: Here) -> None:
    alone = here("--family", family)
    assert len(alone) == 3 and alone[-1]["loss"] < alone[0]["loss"]


def test_the_example_knows_no_other_family(here: Here) -> None:
    with pytest.raises(SystemExit, match=r"hf_finetune: 'mamba3' is neither .* like it are mamba"):
        here("--family", "mamba3")


def test_the_example_names_numbers_that_do_not_divide(here: Here) -> None:
    message = "1 ranks and 2 rows a step do not divide into replicas of --cp 3"
    with pytest.raises(SystemExit, match=message):
        here("--cp", "3")
