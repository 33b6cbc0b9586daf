"""Trainers of transformers over ranks, against the plain trainer in one process."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from processes import outputs_of, start_ranks

import longspan

pytest.importorskip("transformers")
pytest.importorskip("peft")

import trainer_cases as cases
from accelerate.state import AcceleratorState
from oracle.tiny_decoders import packed
from transformers import Trainer

from longspan import _replicas


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What two ranks wrote, and four, which go on from their checkpoints."""
    made = tmp_path_factory.mktemp("trainers")
    (parent,) = start_ranks("trainers_ranks.py", 1, str(made))
    (output,) = outputs_of([parent], timeout=400)
    assert parent.returncode == 0, output
    return made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The plain trainer of a case, in this process, trained once."""
    known: dict[str, Any] = {}

    def trained(name: str) -> Any:
        if name not in known:
            known[name] = cases.run(name, Trainer, tmp_path_factory.mktemp("alone"))
        return known[name]

    return trained


def read(path: pathlib.Path) -> Any:
    return torch.load(path, weights_only=False)


def check_equal(found: Any, true: Any, tolerance: float, steps: slice = slice(None)) -> None:
    """The same logs and the same weights as a trainer has, or as were recorded."""
    expected = true if isinstance(true, dict) else cases.record(true)
    told, true = found["logs"][steps], expected["logs"][steps]
    assert len(told) == len(true)
    for ours, theirs in zip(told, true, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=tolerance), (key, ours, theirs)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_two_ranks_train_as_one_process(
    name: str, folder: pathlib.Path, alone: Callable[[str], Any]
) -> None:
    check_equal(read(folder / f"{name}.2.pt"), alone(name), cases.CASES[name].tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("replicas", "padded"),
        ("streamed", "streamed"),
        ("strided", "flattened"),
        ("sharded", "padded"),
    ],
)
def test_replicas_of_two_ranks_train_as_one_process(
    name: str, case: str, folder: pathlib.Path, alone: Callable[[str], Any]
) -> None:
    check_equal(read(folder / f"{name}.4.pt"), alone(case), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [("tiled", "padded"), ("tiled smoothed", "smoothed")])
def test_losses_in_tiles_are_the_same(
    name: str, case: str, folder: pathlib.Path, alone: Callable[[str], Any]
) -> None:
    check_equal(read(folder / f"{name}.2.pt"), alone(case), 1e-6)


@pytest.mark.slow
def test_a_loop_with_accelerate(folder: pathlib.Path) -> None:
    check_equal(read(folder / "loop.2.pt"), cases.loop(), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "adapters"])
def test_four_ranks_go_on_where_two_were(
    name: str, folder: pathlib.Path, alone: Callable[[str], Any]
) -> None:
    found = read(folder / f"resumed {name}.4.pt")
    # train_loss is that of the steps since.
    check_equal(found, alone(name), 1e-6, slice(0, cases.STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "rows"),
    [
        ("judged.2", "padded", 9),
        ("judged tiled.2", "padded", 9),
        ("judged.4", "padded", 8),
        ("judged strided.4", "flattened", 8),
    ],
)
def test_whole_logits_stand_beside_whole_labels(
    name: str, case: str, rows: int, folder: pathlib.Path, alone: Callable[[str], Any]
) -> None:
    found, true = read(folder / f"{name}.pt"), cases.judged(alone(case), rows)
    assert found["loss"] == pytest.approx(true["loss"], rel=1e-6)
    assert found["logits"].shape[:2] == found["labels"].shape
    if case == "flattened":  # the rows of a replica are one
        return
    assert np.array_equal(found["labels"], true["labels"])
    for row, length in enumerate(cases.HELD_OUT[:rows]):
        ours, theirs = found["logits"][row, :length], true["logits"][row, :length]
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_one_rank_is_an_ordinary_case(tmp_path: pathlib.Path, alone: Callable[[str], Any]) -> None:
    made = cases.run("padded", longspan.hf.trainer(Trainer), tmp_path)
    check_equal(cases.record(made), alone("padded"), 1e-6)


def test_a_model_that_is_made_for_each_training(tmp_path: pathlib.Path) -> None:
    made = longspan.hf.trainer(Trainer)(
        model_init=cases.llama,
        args=cases.arguments(tmp_path, max_steps=1),
        train_dataset=cases.Rows(),
        data_collator=cases.padded,
    )
    first = made.model
    made.train()
    assert made.model is not first
    assert "loss" in made.state.log_history[0]


def test_predictions_without_labels(tmp_path: pathlib.Path) -> None:
    made = longspan.hf.trainer(Trainer)(
        model=cases.llama(), args=cases.arguments(tmp_path, prediction_loss_only=False)
    )
    rows = [{"input_ids": torch.arange(3, 16)}, {"input_ids": torch.arange(7, 20)}]
    found = made.predict(rows)
    assert found.predictions.shape == (2, 13, 61) and found.label_ids is None


def test_targets_are_counted_as_they_are_learned(tmp_path: pathlib.Path) -> None:
    """Labels of pads are none, but for the one that follows a row's last token."""
    batch = cases.padded([cases.Rows()[0], cases.Rows()[3]])
    labels = batch["labels"].where(batch["attention_mask"] == 1, 7)
    made = longspan.hf.trainer(Trainer)(model=cases.llama(), args=cases.arguments(tmp_path))
    for one, more in ((batch, 0), (batch | {"labels": labels}, 1)):
        count = made._get_num_items_in_batch([one, one], "cpu")
        assert count == 2 * (batch["labels"][:, 1:].ne(-100).sum() + more)
        assert count == 2 * longspan.shard(one, model=made.model)["num_items_in_batch"]


def test_the_total_loss_is_that_of_one_rank() -> None:
    batch = packed([17, 9, 11]).batch

    def body(group: longspan.Group) -> torch.Tensor:
        model = longspan.parallelize(cases.llama(), group)
        part = model(**longspan.shard(batch, group, model=model)).loss
        total = longspan.total_loss(part, group)
        assert total.shape == part.shape and not total.requires_grad
        return total

    alone, *_ = longspan.run_ranks(1, body)
    for ranks in (2, 3):
        for total in longspan.run_ranks(ranks, body):  # transformers makes its loss in float32
            torch.testing.assert_close(total, alone, rtol=1e-6, atol=0)


def test_a_total_of_something_else_is_refused() -> None:
    for wrong in (torch.ones(2), torch.tensor(1)):
        with pytest.raises(ValueError, match="expected this rank's part, one floating-point"):
            longspan.total_loss(wrong)


class TestRefusals:
    def made(self, kind: Any = None, model: Any = None, folder: Any = "", **options: Any) -> Any:
        others = {key: options.pop(key) for key in ("compute_loss_func", "group") if key in options}
        return (kind or longspan.hf.trainer(Trainer))(
            model=model or cases.llama(),
            args=cases.arguments(folder, **options),
            train_dataset=cases.Rows(),
            data_collator=cases.padded,
            **others,
        )

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"neftune_noise_alpha": 5.0}, "ask for neftune_noise_alpha"),
            ({"accelerator_config": {"dispatch_batches": True}}, "ask for dispatch_batches=True"),
            ({"train_sampling_strategy": "batch_rebalance"}, "ask for train_sampling_strategy"),
            ({"eval_use_gather_object": True}, "ask for eval_use_gather_object"),
            ({"optim": "lomo"}, "ask for optim='lomo', which steps inside backward"),
            ({"optim": "adalomo"}, "ask for optim='adalomo', which steps inside"),
            ({"optim": "galore_adamw_layerwise"}, "ask for optim='galore_adamw_layerwise'"),
            ({"optim": "apollo_adamw_layerwise"}, "such as 'adamw_torch' or 'adafactor'"),
            ({"compute_loss_func": print}, "`compute_loss_func` would get a rank's share"),
        ],
    )
    def test_arguments(self, options: Any, words: str, tmp_path: pathlib.Path) -> None:
        with pytest.raises(
            NotImplementedError, match=f"^TrainerMixin: .*{words}|^TrainerMixin: {words}"
        ):
            self.made(folder=tmp_path, **options)

    @pytest.mark.parametrize(
        ("found", "words"),
        [
            ({"is_deepspeed_enabled": True}, "deepspeed, whose engine sums gradients by itself"),
            (
                {"fsdp_plugin": types.SimpleNamespace(fsdp_version=1)},
                "version 1 of FSDP, whose flat parameters hide the gradients; use version 2",
            ),
            (
                {"parallelism_config": types.SimpleNamespace(tp_size=1, cp_size=4, sp_size=2)},
                "ParallelismConfig with cp_size, sp_size; leave that to `group`",
            ),
            (
                {"_n_gpu": 2},
                r"several GPUs in one process \(DataParallel\); start one process a GPU",
            ),
            ({"use_liger_kernel": True}, "use_liger_kernel, which replaces forwards that were"),
        ],
    )
    def test_what_accelerate_found(
        self, found: Any, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Most want GPUs, processes or packages; here the trainer is told that they are there."""
        ((name, value),) = found.items()

        class Told(Trainer):  # type: ignore[misc]
            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                if name == "is_deepspeed_enabled":
                    self.is_deepspeed_enabled = value
                elif name in ("_n_gpu", "use_liger_kernel"):
                    monkeypatch.setattr(self.args, name, value)
                else:
                    monkeypatch.setitem(AcceleratorState._shared_state, name, value)

        with pytest.raises(
            NotImplementedError, match=f"^TrainerMixin: the arguments ask for {words}"
        ):
            self.made(longspan.hf.trainer(Told), folder=tmp_path)

    def test_a_model_that_takes_no_count(self, tmp_path: pathlib.Path) -> None:
        model = cases.llama()
        model.accepts_loss_kwargs = False
        message = (
            r"^TrainerMixin: LlamaForCausalLM takes no num_items_in_batch \(accepts_loss_kwargs is "
            r"False\), so its loss would be that of a rank's share"
        )
        with pytest.raises(NotImplementedError, match=message):
            self.made(model=model, folder=tmp_path)

    @pytest.mark.parametrize("groups", [[[0], [1, 2], [1, 2]], [[0, 1], [0, 1], [1, 2]]])
    def test_groups_that_are_no_replicas(
        self, groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As rank 0 of three hears it."""

        def gather(every: list[Any], mine: list[int]) -> None:
            assert mine == groups[0]
            every[:] = groups

        world = types.SimpleNamespace(
            is_initialized=lambda: True, get_world_size=lambda: 3, all_gather_object=gather
        )
        monkeypatch.setattr(_replicas, "dist", world)
        monkeypatch.setattr(_replicas, "world_ranks", lambda _: frozenset(groups[0]))
        message = r"expected every one of the 3 ranks in one group, all of one size"
        with pytest.raises(ValueError, match=rf"^TrainerMixin: the groups of the .*; {message}"):
            _replicas.Replicas.around("TrainerMixin", longspan.Group.solo())

    def test_a_count_of_no_targets(self, tmp_path: pathlib.Path) -> None:
        made, batch = self.made(folder=tmp_path), cases.padded([cases.Rows()[0], cases.Rows()[3]])
        for count in (0, torch.tensor(-4)):
            with pytest.raises(ValueError, match="TrainerMixin: `num_items_in_batch` is"):
                made.compute_loss(made.model, batch, num_items_in_batch=count)
        assert made.compute_loss(made.model, batch, num_items_in_batch=torch.tensor(4)).isfinite()

    def test_an_optimizer_that_steps_in_backward(self, tmp_path: pathlib.Path) -> None:
        made = self.made(folder=tmp_path, optim="adafactor")
        made.accelerator.has_lomo_optimizer = True  # as accelerate notes when it gets one
        before = [weight.detach().clone() for weight in made.model.parameters()]
        with pytest.raises(NotImplementedError, match="the optimizer is one of lomo_optim, which"):
            made.train()
        assert all(map(torch.equal, before, made.model.parameters()))

    def test_a_loss_that_nobody_knows(self, tmp_path: pathlib.Path) -> None:
        class Preferences(Trainer):  # type: ignore[misc]
            def compute_loss(self, *arguments: Any, **others: Any) -> Any:
                return super().compute_loss(*arguments, **others)

        with pytest.raises(
            NotImplementedError, match=r"compute_loss of Preferences \(test_trainers"
        ):
            self.made(longspan.hf.trainer(Preferences), folder=tmp_path)

        class Known(longspan.hf.TrainerMixin, Preferences):  # type: ignore[misc]
            own_loss = True

        self.made(Known, folder=tmp_path)

    def test_what_is_no_trainer(self) -> None:
        with pytest.raises(TypeError, match="trainer: `trainer_class` is a str; expected a class"):
            longspan.hf.trainer("Trainer")
        with pytest.raises(
            TypeError, match="trainer: `stratgy` is no option of parallelize, which"
        ):
            longspan.hf.trainer(Trainer, stratgy="ring")
        with pytest.raises(TypeError, match=r"TrainerMixin has no transformers\.Trainer among"):
            longspan.hf.TrainerMixin()

    def test_threads(self, tmp_path: pathlib.Path) -> None:
        def body(group: longspan.Group) -> None:
            self.made(folder=tmp_path, group=group)

        with pytest.raises(ValueError, match=r"TrainerMixin: .* is not of torch.distributed"):
            longspan.run_ranks(2, body)

    def test_a_model_that_was_parallelized_before(self, tmp_path: pathlib.Path) -> None:
        model = longspan.parallelize(cases.llama(), strategy="gathered")
        self.made(model=model, folder=tmp_path)
        assert longspan.restore(model) is model
        longspan.parallelize(model)
        with pytest.raises(ValueError, match="parallelized already, so strategy would go unheard"):
            self.made(longspan.hf.trainer(Trainer, strategy="ring"), model, tmp_path)
