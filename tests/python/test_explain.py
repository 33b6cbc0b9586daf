"""What `explain` says is what the model then does."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import longspan
from longspan import Group, run_ranks
from longspan._models import LocalAttention

pytest.importorskip("transformers")

from oracle.tiny_decoders import FAMILIES, OTHERS, decoder, packed, padded

ROWS = ([30, 26, 8], [57, 7])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("strategy", longspan.Strategy.names())
@pytest.mark.parametrize("family", ["llama", "gemma4", "gpt_oss"])
def test_bytes_are_those_that_travel(family: str, strategy: str, ranks: int) -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family, torch.float32), group, strategy=strategy)
        local = longspan.shard(packed(*ROWS).batch, group, model=model)
        said = longspan.explain(model, local, group)
        before = group.sent_bytes
        loss = model(**local).loss
        forward = group.sent_bytes
        loss.backward()
        assert forward - before == sum(cost.sent_forward for cost in said.layers)
        assert group.sent_bytes - forward == sum(cost.sent_backward for cost in said.layers)

    run_ranks(ranks, body)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bytes_of_a_router_loss_are_said(family: str) -> None:
    def body(group: Group) -> tuple[str, ...]:
        model = longspan.parallelize(decoder(family, torch.float32), group)
        asked = {"output_router_logits": True, **packed(*ROWS).batch}
        said = longspan.explain(model, asked, group)
        local = longspan.shard(asked, group, model=model)
        before = group.sent_bytes
        model(**local)
        beside = group.sent_bytes - before - sum(cost.sent_forward for cost in said.layers)
        assert said.routers[0] in str(said) and f", {beside} B from this one" in said.routers[0]
        return said.routers

    for said in run_ranks(3, body):
        assert said == (
            "router loss, with output_router_logits=True: counts of 4 experts, of 2 layers "
            "together, are summed over ranks in forward, 64 B from this one",
        )
    for other in ("llama", "glm_moe_dsa"):  # no experts; and a bias, no loss
        assert longspan.explain(decoder(other), packed([7]).batch).routers == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_there(family: str) -> None:
    model = decoder(family, torch.float32)
    said = longspan.explain(model, padded([13, 17], 17, "left").batch)
    assert [cost.layer.name for cost in said.layers] == [
        f"model.layers.{i}.self_attn" for i in range(model.config.num_hidden_layers)
    ]
    for cost in said.layers:
        module = model.get_submodule(cost.layer.name)
        assert module.q_proj.out_features == cost.layer.heads * cost.layer.head_dim
        if getattr(module, "k_proj", None) is not None:
            assert module.k_proj.out_features == cost.layer.key_heads * cost.layer.head_dim
        window = cost.layer.window or 17
        assert cost.pairs == sum(min(i + 1, window) for n in (13, 17) for i in range(n))
        assert cost.kernel
    assert model.config._attn_implementation != "longspan"  # nothing was done to it


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_layers_are_what_reaches_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = longspan.parallelize(decoder(family, torch.float32))
    local = longspan.shard(packed([16, 8]).batch, model=model)
    attend, found = LocalAttention.attend, []

    def watched(self: LocalAttention, q: Any, k: Any, v: Any, **options: Any) -> Any:
        sizes = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        found.append((*sizes, options["window"], options["softcap"], options["sink"] is not None))
        return attend(self, q, k, v, **options)

    monkeypatch.setattr(LocalAttention, "attend", watched)
    model(**local)
    said = [cost.layer for cost in longspan.explain(model, local).layers]
    assert found == [
        (a.heads, a.key_heads, a.head_dim, a.value_dim, a.window, a.softcap, a.sink) for a in said
    ]


def test_the_type_of_a_wrapper_can_be_given() -> None:
    model, batch = decoder("llama", torch.float32), packed([16, 8]).batch

    def body(group: Group) -> tuple[int, int]:
        full = longspan.explain(model, batch, group).layers[0].sent_forward
        half = longspan.explain(model, batch, group, dtype=torch.bfloat16).layers[0].sent_forward
        return full, half

    for full, half in run_ranks(2, body):
        assert full == 2 * half > 0


def test_pairs_add_up_over_ranks() -> None:
    model, batch = decoder("gemma3"), packed(*ROWS).batch

    def body(group: Group) -> list[int]:
        return [cost.pairs for cost in longspan.explain(model, batch, group).layers]

    alone = body(Group())
    assert [sum(pairs) for pairs in zip(*run_ranks(3, body), strict=True)] == alone


def test_it_reads_well_and_as_json() -> None:
    said = longspan.explain(decoder("gpt_oss", torch.bfloat16), packed([16, 8]).batch)
    text = str(said).splitlines()
    assert text[0] == "rank 0 of 1, 24 tokens"
    assert text[1].split() == [
        *("layer", "heads", "dims", "sees", "strategy", "steps", "pairs"),
        *("sends", "forward", "backward", "kernel"),
    ]
    assert text[2].startswith("model.layers.0.self_attn  4/2    8     window 5 sink  ring")
    assert json.loads(json.dumps(said.to_json()))["layers"][1]["pairs"] == 16 * 17 / 2 + 36
    llama = str(longspan.explain(decoder("llama"), packed([16, 8]).batch))
    assert "model.layers.0.self_attn and 1 more" in llama


def test_what_it_refuses() -> None:
    with pytest.raises(TypeError, match="holds no transformers model"):
        longspan.explain(torch.nn.Linear(2, 2), packed([3]).batch)

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"))
        with pytest.raises(ValueError, match="explain: the model was parallelized over Group"):
            longspan.explain(model, packed([3]).batch, group)

    run_ranks(2, body)


def test_a_model_without_memory_is_explained_as_on_this_cpu() -> None:
    model = decoder("llama", torch.float32)
    batch = packed(*ROWS).batch
    here = longspan.explain(model, batch)
    nowhere = longspan.explain(model.to("meta"), batch)
    for cost, real in zip(nowhere.layers, here.layers, strict=True):
        assert cost.kernel == f"on this CPU {real.kernel}"
        assert "CUDA" not in cost.kernel
        assert (cost.pairs, cost.sent_forward) == (real.pairs, real.sent_forward)


def test_an_explanation_is_a_table_in_a_notebook() -> None:
    model = longspan.parallelize(decoder("gemma4", torch.float32))
    said = longspan.explain(model, packed(*ROWS).batch)
    lines = str(said).splitlines()
    shown = ElementTree.fromstring(said._repr_html_())
    assert shown.findtext("table/caption") == lines[0]
    rows = [["".join(cell.itertext()) for cell in row] for row in shown.iter("tr")]
    for row, line in zip(rows, lines[1:], strict=False):
        assert all(cell in line for cell in row)
    below = ["".join(one.itertext()) for one in shown.iter("p")]
    assert below == lines[1 + len(rows) :]
    assert below[0].startswith("let in: ") and "logits as they are" in below[1]
