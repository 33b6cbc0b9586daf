"""What is probably not meant is said once, and nothing is said of what is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan import Group, _remarks, run_ranks

pytest.importorskip("transformers")

from oracle.tiny_decoders import decoder, packed
from processes import silent_two_ranks

CASE = packed([13, 9, 10])


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is said inside, by all threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(one.message) for one in caught if one.category is UserWarning]


def said_by(body: Callable[[Group], Any], ranks: int = 2) -> list[str]:
    with heard() as texts:
        run_ranks(ranks, body)
    return texts


# ---- Labels.


def batch_with(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": CASE.batch["input_ids"], "labels": labels}


def test_labels_one_token_ahead() -> None:
    ids = CASE.batch["input_ids"]
    ahead = ids.roll(-1, 1)
    ahead[:, -1] = -100
    model = longspan.parallelize(decoder("llama"))
    with heard() as texts:
        longspan.shard(batch_with(ahead), model=model)
        longspan.shard(batch_with(ahead), model=model)
    assert len(texts) == 1
    assert texts[0].startswith("shard: `labels` of a whole row are the `input_ids` one token ahead")
    assert "`shift_labels`" in texts[0]


@pytest.mark.parametrize(
    "labels",
    [
        lambda ids: ids,
        lambda ids: ids.masked_fill(torch.arange(ids.shape[1]) < 12, -100),
        lambda ids: torch.full_like(ids, -100),
        lambda ids: ids.roll(-1, 1).masked_fill(torch.arange(ids.shape[1]) > 4, -100),  # too few
    ],
    ids=["unshifted", "completion", "none", "few"],
)
def test_labels_that_are_meant(labels: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = longspan.parallelize(decoder("llama"))
    with heard() as texts:
        longspan.shard(batch_with(labels(CASE.batch["input_ids"])), model=model)
    assert texts == []


def shifted_without_a_model(batch: dict[str, Any], **options: Any) -> list[str]:
    with heard() as texts:
        for _ in range(2):
            longspan.shard(batch, rank=0, ranks=2, **options)
            longspan.values.shard_chunks(batch, 1, rank=0, ranks=2, **options)
    return texts


def test_labels_one_token_ahead_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_remarks, "_asked_to_shift", False)
    ids = CASE.batch["input_ids"]
    ahead = batch_with(ids.roll(-1, 1))
    # As they are meant: taken as they are, or unshifted and to be shifted.
    assert shifted_without_a_model(ahead) == []
    texts = shifted_without_a_model(ahead, shift_labels=True)
    assert len(texts) == 1 and "`shift_labels=True` shifts them by one token more" in texts[0]
    assert texts[0].startswith("shard: `labels` of a whole row")


@pytest.mark.parametrize(
    "labels",
    [
        lambda ids: ids,
        lambda ids: ids.masked_fill(torch.arange(ids.shape[1]) < 12, -100),
        lambda ids: ids.roll(-1, 1).masked_fill(torch.arange(ids.shape[1]) > 4, -100),
        lambda ids: ids.roll(-1, 1) + (torch.arange(ids.shape[1]) == 3),
    ],
    ids=["unshifted", "completion", "few", "one differs"],
)
def test_labels_to_be_shifted(
    labels: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_remarks, "_asked_to_shift", False)
    batch = batch_with(labels(CASE.batch["input_ids"]))
    assert shifted_without_a_model(batch, shift_labels=True) == []


def test_one_word_over_and_over_tells_nothing() -> None:
    ids = torch.full((2, 32), 7)
    assert _remarks.labels_are_shifted(ids, ids) is None
    assert _remarks.labels_are_shifted(ids[:, :1], ids[:, :1]) is None


# ---- Losses.


def test_a_count_that_did_not_reach_the_model() -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"), group)
        local = longspan.shard(CASE.batch, group, model=model)
        kept = {key: value for key, value in local.items() if key != "num_items_in_batch"}
        for _ in range(2):
            model(**kept).loss.backward()

    texts = said_by(body)
    assert [text for text in texts if "without `num_items_in_batch`" in text] == texts[:1]
    assert "model(**local)" in texts[0]


@pytest.mark.parametrize("mean", [True, False])
def test_a_mean_of_the_users_own(mean: bool) -> None:
    labels = CASE.batch["input_ids"].clone()
    labels[:, :9] = -100  # so that ranks have other counts

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"), group)
        for _ in range(2):
            local = longspan.shard(CASE.batch | {"labels": labels}, group, model=model)
            targets, count = local["shift_labels"], local["num_items_in_batch"]
            for key in ("labels", "shift_labels", "num_items_in_batch"):
                local.pop(key)
            logits = model(**local).logits
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (losses / ((targets != -100).sum() if mean else count)).backward()

    texts = said_by(body)
    if not mean:
        assert texts == []
        return
    assert len(texts) == 2  # each rank knows its own
    assert all("is a mean over its own" in text for text in texts)
    assert all("longspan.reduce_loss" in text for text in texts)


def test_logits_that_nothing_flows_to() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    state = longspan._models.Parallelized(Group(), longspan.Strategy("ring"), "auto", [])
    weight = torch.ones(1, 3, 5, requires_grad=True)
    logits = 2 * weight
    _remarks.remark_on_own_mean(state, _remarks.Targets(3, 6, 0), logits)
    Nothing.apply(logits).backward()
    assert weight.grad is None or not weight.grad.any()


def test_by_what_a_loss_was_divided() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11, requires_grad=True)
    F.cross_entropy(logits, torch.arange(5)).backward()
    assert logits.grad is not None
    row = logits.detach()[2].clone()
    assert _remarks.divisor_of(row, logits.grad[2]) == pytest.approx(5, rel=1e-4)
    assert _remarks.divisor_of(row, torch.randn(11)) is None
    assert _remarks.divisor_of(row, torch.zeros(11)) is None


def test_a_right_step_hears_nothing() -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"), group)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(**longspan.shard(CASE.batch, group, model=model)).loss.backward()
            longspan.sum_gradients(model, group)
            longspan.clip_grad_norm(model, 0.1, group)
            optimizer.step()
            optimizer.zero_grad()

    assert said_by(body) == []


# ---- What ranks tell each other.


def test_clipping_before_the_sum() -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"), group)
        for _ in range(4):
            model(**longspan.shard(CASE.batch, group, model=model)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            longspan.sum_gradients(model, group)
            model.zero_grad()

    texts = said_by(body)
    assert len(texts) == 1
    assert "scaled by other factors on each rank" in texts[0]
    assert "longspan.clip_grad_norm" in texts[0]


def test_the_same_factor_everywhere_is_fine() -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"), group)
        for _ in range(3):
            (1024 * model(**longspan.shard(CASE.batch, group, model=model)).loss).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 1024
            longspan.sum_gradients(model, group)
            model.zero_grad()

    assert said_by(body) == []


@pytest.mark.slow
def test_one_seed_for_the_dropout_of_all_ranks() -> None:
    first, second = (
        [line for line in text.splitlines() if line.startswith("seed: ")]
        for text in silent_two_ranks()
    )
    assert first[0] == "seed: own"
    assert first[1].startswith("seed: one sum_gradients: random numbers are in the same state on ")
    assert "`model.layers.0.mlp.drop` draws dropout" in first[1]
    assert "longspan.seed_ranks(seed, group)" in first[1]
    assert second == ["seed: own", "seed: one"]  # rank 0 speaks


class Clipping:
    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.clip(-1, 1)


def clip_after(parameter: Any) -> None:
    parameter.grad.clamp_(-1, 1)


def looks_only(grad: torch.Tensor) -> None:
    grad.norm()


@pytest.mark.parametrize(
    ("put", "hook", "clips"),
    [
        ("register_hook", lambda grad: torch.clamp(grad, -1, 1), True),
        ("register_hook", Clipping(), True),
        ("register_post_accumulate_grad_hook", clip_after, True),
        ("register_hook", lambda grad: grad * torch.tensor([0.0, 1.0]), False),
        ("register_hook", looks_only, False),
    ],
)
def test_hooks_that_clip_a_part_of_a_gradient(put: str, hook: Any, clips: bool) -> None:
    def body(group: Group) -> None:
        model = torch.nn.Linear(2, 2)
        getattr(model.bias, put)(hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2)).sum().backward()
            longspan.sum_gradients(model, group)

    texts = said_by(body)
    assert len(texts) == clips
    said = "on the gradient of `bias` clips it in backward, where each rank has a part of it"
    assert all(text.startswith("sum_gradients: the hook ") and said in text for text in texts)


def test_data_dealt_out_is_refused() -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"), group)
        ids = CASE.batch["input_ids"] + group.rank()
        with pytest.raises(ValueError, match="feed every rank of a group the same batch"):
            longspan.shard({"input_ids": ids, "labels": ids}, group, model=model)

    run_ranks(2, body)
