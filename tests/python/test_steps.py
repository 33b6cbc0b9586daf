"""Optimizers do not step on gradients that nobody summed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import longspan
from longspan import Group, _steps, run_ranks

pytest.importorskip("transformers")

from oracle.tiny_decoders import decoder, packed
from processes import silent_two_ranks

BATCH = packed([13, 9, 10]).batch


def backward(model: Any, group: Group) -> None:
    model(**longspan.shard(BATCH, group, model=model)).loss.backward()


def made(group: Group, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = longspan.parallelize(decoder("llama"), group, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_a_step_without_the_sum_names_the_line() -> None:
    def body(group: Group) -> None:
        model, optimizer = made(group)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        backward(model, group)
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        text = str(error.value)
        assert text.startswith("AdamW.step: the gradient of `lm_head.weight` is not that of the ")
        assert "the 2 ranks of LlamaForCausalLM" in text
        assert "add the line longspan.sum_gradients(model, group)" in text
        for name, p in model.named_parameters():
            assert p.equal(before[name]), name
        longspan.sum_gradients(model, group)
        optimizer.step()

    run_ranks(2, body)


@pytest.mark.parametrize("trained", [True, False])
def test_weights_that_differ_between_ranks_are_refused(trained: bool) -> None:
    """As those of adapters that were drawn after seed_ranks, or of a file that one rank missed."""

    def body(group: Group) -> None:
        model, _ = made(group)
        weight = model.model.layers[1].mlp.up_proj.weight.requires_grad_(trained)
        kept = weight.detach().clone()
        if group.rank() == 1:
            weight.detach().mul_(1.001)
        backward(model, group)
        said = "^sum_gradients: `model.layers.1.mlp.up_proj.weight` has other values on rank 1 than"
        with pytest.raises(ValueError, match=said):
            longspan.sum_gradients(model, group)
        weight.detach().copy_(kept)
        model.zero_grad()
        backward(model, group)
        longspan.sum_gradients(model, group)

    run_ranks(2, body)


@pytest.mark.parametrize("thaws", [True, False])
def test_the_first_parameter_may_thaw_and_freeze(thaws: bool) -> None:
    """Which others stand behind as long as it rests."""

    def body(group: Group) -> None:
        model, optimizer = made(group)
        first = model.get_input_embeddings()
        for trains in (not thaws, thaws):
            first.requires_grad_(trains)
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                backward(model, group)
                if trains == thaws:
                    with pytest.raises(RuntimeError, match="nobody summed"):
                        optimizer.step()
                longspan.sum_gradients(model, group)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()

    run_ranks(2, body)


def test_clipping_by_torch_does_not_hide_it() -> None:
    def body(group: Group) -> None:
        model, optimizer = made(group)
        backward(model, group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(RuntimeError, match="nobody summed"):
            optimizer.step()
        # In the right order both kinds of clipping are fine.
        optimizer.zero_grad()
        backward(model, group)
        longspan.sum_gradients(model, group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    run_ranks(2, body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_every_step_needs_its_own_sum(set_to_none: bool) -> None:
    def body(group: Group) -> None:
        model, optimizer = made(group)
        for _ in range(2):
            backward(model, group)
            backward(model, group)  # they add up first
            longspan.sum_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, group)
        with pytest.raises(RuntimeError, match="nobody summed"):
            optimizer.step()

    run_ranks(2, body)


def test_a_closure_is_looked_at_when_it_has_run() -> None:
    def body(group: Group) -> None:
        model, optimizer = made(group)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            backward(model, group)
            if sums:
                longspan.sum_gradients(model, group)
            return torch.tensor(1.0)

        sums = True
        optimizer.step(closure)
        optimizer.step(closure=closure)
        sums = False
        with pytest.raises(RuntimeError, match="nobody summed"):
            optimizer.step(closure)

    run_ranks(2, body)


def test_copies_of_a_sum_are_told_apart() -> None:
    """In the words of docs/gradients.md."""

    def body(group: Group) -> None:
        model, optimizer = made(group)
        backward(model, group)
        longspan.sum_gradients(model, group)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone()
        with pytest.raises(ValueError, match="was not summed over the group"):
            longspan.clip_grad_norm(model, 1.0, group)
        with pytest.raises(RuntimeError, match="nobody summed"):
            optimizer.step()
        with pytest.raises(ValueError, match="is a copy of one that was summed already"):
            longspan.sum_gradients(model, group)
        # What is written into stays, and so does what was copied before.
        optimizer.zero_grad()
        backward(model, group)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone()
        longspan.sum_gradients(model, group)
        for parameter in model.parameters():
            parameter.grad.copy_(parameter.grad.clone())
        optimizer.step()

    run_ranks(2, body)


def test_master_copies_are_nobodys() -> None:
    def body(group: Group) -> None:
        model, _ = made(group)
        masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.AdamW(masters)
        backward(model, group)
        longspan.sum_gradients(model, group)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.clone()
        optimizer.step()

    run_ranks(2, body)


def test_whoever_sums_by_hand_says_so() -> None:
    def body(group: Group) -> None:
        model, optimizer = made(group, check_steps=False)
        backward(model, group)
        optimizer.step()

    run_ranks(2, body)


def test_one_rank_has_nothing_to_sum() -> None:
    gc.collect()
    before = _steps.guards()
    model, optimizer = made(Group())
    backward(model, Group())
    optimizer.step()
    assert _steps.guards() == before


def test_other_models_are_left_alone_and_restoring_ends_it() -> None:
    def body(group: Group) -> None:
        model, optimizer = made(group)
        other = torch.nn.Linear(3, 3)
        other(torch.ones(1, 3)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        with longspan.paused(model):
            model(input_ids=BATCH["input_ids"], labels=BATCH["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        backward(model, group)
        with pytest.raises(RuntimeError, match="nobody summed"):
            optimizer.step()
        longspan.restore(model)
        optimizer.step()

    run_ranks(2, body)
    gc.collect()
    assert _steps.guards() == 0
    assert not _global_optimizer_pre_hooks


def test_a_model_that_is_gone_is_forgotten() -> None:
    def body(group: Group) -> None:
        made(group)

    run_ranks(2, body)
    gc.collect()
    assert _steps.guards() == 0
    assert not _global_optimizer_pre_hooks


@pytest.mark.slow
def test_wrappers_that_average_need_the_sum_too() -> None:
    for text in silent_two_ranks():
        lines = [line for line in text.splitlines() if line.startswith("step: ")]
        assert lines == [
            *("step: ddp raised", "step: fsdp raised", "step: ddp stepped", "step: fsdp stepped"),
            "step: factor stepped",
        ], text
