"""A parallelized model put aside for a while, and what it saves."""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import pytest
import torch

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

from oracle.all_double import AllDouble
from oracle.tiny_decoders import POOLING, SELECTING, decoder, gradients_of, packed
from oracle.whole_models import parts_of

BATCH = packed([7, 5]).batch
ALL = ("llama", "gemma3", "gemma4", "gpt_oss", *SELECTING, *POOLING)


@pytest.mark.parametrize("family", ALL)
def test_inside_it_is_the_plain_model_and_after_the_parallelized_one(family: str) -> None:
    model = decoder(family).eval()
    before = parts_of(model)
    plain = model.generate(BATCH["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
    longspan.parallelize(model)
    during, local = parts_of(model), longspan.shard(BATCH, model=model)
    loss = model(**local).loss
    with longspan.paused(model) as same:
        assert same is model and parts_of(model) == before
        again = model.generate(BATCH["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
        assert again.equal(plain)
    assert parts_of(model) == during  # the same objects, hooks as well
    assert model(**local).loss.equal(loss)
    assert longspan.restore(model) is model and parts_of(model) == before


def test_inside_the_share_of_one_rank_is_the_whole_and_of_two_is_not() -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"), group)
        during, local = parts_of(model), longspan.shard(BATCH, group, model=model)
        message = "^Llama.* got a rank's share of a batch inside of longspan.paused"
        with longspan.paused(model):
            model(**BATCH, use_cache=False)
            for part in (model, model.model) if group.size() > 1 else ():
                with pytest.raises(ValueError, match=message):
                    part(**local)
            if group.size() == 1:
                model(**local)
        assert parts_of(model) == during
        model(**local)

    for ranks in (1, 2):
        run_ranks(ranks, body)


def test_after_an_exception_too() -> None:
    model = longspan.parallelize(decoder("llama"))
    during = parts_of(model)
    with pytest.raises(ZeroDivisionError), longspan.paused(model):
        raise ZeroDivisionError
    assert parts_of(model) == during
    with pytest.raises(RuntimeError, match=r"inside `with longspan.paused\(model\):`"):
        model.generate(BATCH["input_ids"])


def test_edits_of_the_configuration_pass_through() -> None:
    model = decoder("llama")
    config = model.config
    longspan.parallelize(model)
    model.config.temperature = 0.5
    with longspan.paused(model):
        assert model.config is config and config.temperature == 0.5
        model.config.temperature = 0.25
    assert model.config is not config and model.config.temperature == 0.25
    assert model.config._attn_implementation == "longspan"
    longspan.restore(model)
    assert model.config is config and config.temperature == 0.25
    assert config._attn_implementation == "sdpa"


def test_only_parallelized_models_are_paused() -> None:
    with pytest.raises(ValueError, match="paused: this LlamaForCausalLM is not parallelized"):
        longspan.paused(decoder("llama")).__enter__()
    with pytest.raises(TypeError, match=r"paused: `model` is an int; expected a torch.nn.Module"):
        longspan.paused(3).__enter__()  # type: ignore[type-var]


# ---- What is saved.


@pytest.mark.parametrize("family", ALL)
def test_what_is_saved_is_that_of_the_plain_model(family: str, tmp_path: pathlib.Path) -> None:
    model = decoder(family)
    model.save_pretrained(tmp_path / "plain")
    state = copy.deepcopy(model.state_dict())
    longspan.parallelize(model)
    ours = model.state_dict()
    assert list(ours) == list(state)
    assert all(ours[name].equal(value) for name, value in state.items())
    model.save_pretrained(tmp_path / "ours")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "ours").iterdir())
    for name in files:
        theirs, mine = (tmp_path / "plain" / name), (tmp_path / "ours" / name)
        if name.endswith(".json"):
            assert json.loads(mine.read_text()) == json.loads(theirs.read_text()), name
        else:
            assert mine.read_bytes() == theirs.read_bytes(), name


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v4"])
def test_training_goes_on_with_another_number_of_ranks(family: str) -> None:
    """Four steps on two ranks and then four on three, or all on one, float64 throughout: the
    same losses."""

    def steps(group: Group, model: Any, optimizer: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            local = longspan.shard(BATCH, group, model=model)
            with AllDouble():
                loss = model(**local).loss
                loss.backward()
            longspan.sum_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad()
            share = loss.detach()[None]
            sizes = [1] * group.size()
            losses.append(
                longspan.comm.all_gather_tokens(share, axis=0, sizes=sizes, group=group)
                .sum()
                .item()
            )
        return losses

    def trained(ranks: int, count: int, state: Any) -> tuple[list[float], Any]:
        def body(group: Group) -> tuple[list[float], Any]:
            model = longspan.parallelize(decoder(family), group)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(copy.deepcopy(state[1]))
            losses = steps(group, model, optimizer, count)
            return losses, (copy.deepcopy(model.state_dict()), optimizer.state_dict())

        return run_ranks(ranks, body)[0]

    alone, _ = trained(1, 8, None)
    first, state = trained(2, 4, None)
    second, _ = trained(3, 4, state)
    assert alone[0] > alone[-1]
    assert first + second == pytest.approx(alone, rel=1e-10)


def test_gradients_of_a_paused_step_are_plain_ones() -> None:
    model = longspan.parallelize(decoder("llama"))
    with longspan.paused(model):
        model(input_ids=BATCH["input_ids"], labels=BATCH["input_ids"]).loss.backward()
    assert gradients_of(model).keys() == dict(model.named_parameters()).keys()
