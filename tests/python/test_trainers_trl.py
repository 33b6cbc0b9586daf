"""TRL's SFTTrainer over ranks, against the plain one in one process."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from processes import outputs_of, start_ranks

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("peft")

import trl
import trl_cases as cases
from trainer_cases import STEPS, experts

import longspan

pytestmark = pytest.mark.slow  # processes train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What two ranks wrote."""
    made = tmp_path_factory.mktemp("trl")
    (parent,) = start_ranks("trl_ranks.py", 1, str(made))
    (output,) = outputs_of([parent], timeout=400)
    assert parent.returncode == 0, output
    return made


def check_equal(found: Any, true: Any, lines: int) -> None:
    """The same weights, and so many equal lines of the logs."""
    assert len(found["logs"]) == len(true["logs"]) >= lines
    for ours, theirs in zip(found["logs"][:lines], true["logs"], strict=False):
        assert ours == pytest.approx(theirs, rel=2e-6)
    for key, weight in true["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", cases.CASES)
def test_two_ranks_train_as_one_process(
    name: str, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    found: Any = torch.load(folder / f"{name}.pt", weights_only=False)
    check_equal(found, cases.run(name, trl.SFTTrainer, tmp_path), len(found["logs"]))


def test_replicas_of_two_ranks_train_as_one_process(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    found: Any = torch.load(folder / "replicas.pt", weights_only=False)
    # In evaluation TRL takes the mean of the means of replicas.
    check_equal(found, cases.run("completions", trl.SFTTrainer, tmp_path), STEPS)


def test_losses_of_whole_sequences_are_refused() -> None:
    kinds = (trl.DPOTrainer, trl.GRPOTrainer, trl.KTOTrainer, trl.RLOOTrainer, trl.RewardTrainer)
    for kind in kinds:
        with pytest.raises(NotImplementedError, match=rf"compute_loss of {kind.__name__} \(trl"):
            longspan.hf.trainer(kind)(model=None)


def test_router_losses_of_a_share_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotImplementedError, match=r"pass router_aux_loss_coef=0\.0, or use"):
        longspan.hf.trainer(trl.SFTTrainer)(
            model=experts(),
            args=trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
            train_dataset=cases.rows(),
            processing_class=cases.tokenizer(),
        )


def test_options_that_its_head_goes_around_are_refused(tmp_path: pathlib.Path) -> None:
    for name, value in (("loss_tile", 16), ("offload", "hidden")):
        with pytest.raises(ValueError, match=f"so `{name}` would go unheard; leave it out"):
            longspan.hf.trainer(trl.SFTTrainer, **{name: value})(
                model=cases.llama(),
                args=trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
                train_dataset=cases.rows(),
                processing_class=cases.tokenizer(),
            )
