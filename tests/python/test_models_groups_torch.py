"""Gemma 4 with images beside what people use with it: torch.compile, gradient checkpointing,
autocast, adapters, checks of users."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

from oracle.tiny_decoders import Case, gradients_of, packed
from oracle.tiny_images import CASES, FAMILIES, answer_of, embedded, text_of, whole, with_images
from oracle.whole_models import check_as_exact
from processes import outputs_of, start_ranks
from test_models_torch import Graphs, _fresh_compiler, check_same, step  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow  # graphs are compiled


def every_third_is_text(lengths: list[int]) -> Case:
    return with_images(packed(lengths), [[int(at % 3 > 0) for at in range(sum(lengths))]])


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_for_changing_images(family: str) -> None:
    model = whole(family, torch.float32)
    text = longspan.parallelize(text_of(model))
    graphs = Graphs("aot_eager")
    compiled = torch.compile(text, backend=graphs, dynamic=True, fullgraph=True)
    for lengths in ([4, 9, 1, 11], [21, 2, 8], [40]):
        local = longspan.shard(embedded(model, every_third_is_text(lengths)), model=text)
        assert local["longspan"].groups
        loss, _ = step(text, local)
        plain = loss, gradients_of(text)
        compiled.zero_grad()
        made = compiled(**local).loss
        made.backward()
        check_same((made.detach(), gradients_of(text)), plain, 1e-5)
        if lengths == [4, 9, 1, 11]:
            first = len(graphs.attention)
    assert len(graphs.attention) == first, "other images made a new graph"
    assert set(graphs.attention) == {text.config.num_hidden_layers}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family: str) -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(whole(family), group).train()
        batch = embedded(model, CASES["rows"]())
        local = longspan.shard(batch, group, model=model)
        plain = step(model, local)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        check_same(step(model, local), plain, 0.0)

    run_ranks(2, body)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family: str) -> None:
    """As far from float64 as one rank is under autocast, with each document alone."""
    case = CASES["rows"]()
    true, model = answer_of(whole(family), case), whole(family, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = answer_of(copy.deepcopy(model), case)

    def body(group: Group) -> tuple[float, dict[str, Tensor]]:
        mine = longspan.parallelize(copy.deepcopy(model), group)
        local = longspan.shard(embedded(model, case), group, model=mine)
        with torch.autocast("cpu", torch.bfloat16):
            loss = mine(**local).loss
        loss.backward()
        return loss.item(), gradients_of(mine)

    losses, gradients = zip(*run_ranks(2, body), strict=True)
    check_as_exact(losses, gradients, true, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_every_linear_layer(family: str) -> None:
    peft = pytest.importorskip("peft")
    case, model = CASES["rows"](), whole(family)
    batch = embedded(model, case)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)

    def by(called: Any, group: Group) -> dict[str, Tensor]:
        longspan.parallelize(called, group)
        called(**longspan.shard(batch, group, model=called)).loss.backward()
        return gradients_of(called.base_model.model)

    adapted.zero_grad()
    parts = run_ranks(3, lambda group: by(copy.deepcopy(adapted), group))
    true = answer_of(adapted.base_model.model, case)
    assert true.gradients and all("lora" in name for name in true.gradients)
    for name, gradient in true.gradients.items():
        error = (sum(part[name] for part in parts) - gradient).abs().max()
        assert error <= 3e-6 * gradient.abs().max() + 1e-12, name


@pytest.mark.parametrize("family", FAMILIES)
def test_users_can_check_it(family: str) -> None:
    model = whole(family)
    batch = embedded(model, CASES["rows"]())

    def body(group: Group) -> bool:
        mine = longspan.parallelize(copy.deepcopy(model), group)
        return bool(longspan.check_parity(mine, batch, group, tolerance=1e-5))

    assert run_ranks(2, body) == [True, True]


def test_replicas_of_two_ranks_equal_one_rank() -> None:
    processes = start_ranks("images_four_ranks.py", 4)
    outputs = outputs_of(processes, timeout=400)
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    said = [f"{family} {kind}" for family in (*FAMILIES, "towers") for kind in ("fsdp", "ddp")]
    assert [line for line in outputs[0].splitlines() if line in said] == said
