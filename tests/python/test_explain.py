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


# ---- Options that would go unheard.

OTHERS_THAN = [
    ({"strategy": "head_parallel"}, "strategy='ring', so strategy='head_parallel'"),
    ({"layout": "head-tail"}, "layout='auto', so layout='head-tail'"),
    ({"layout": longspan.Ownership.contiguous(24, 1)}, "layout='auto', so layout=Ownership"),
    ({"loss_tile": "auto"}, "loss_tile=8, so loss_tile='auto'"),
    ({"mlp_tile": 16}, "mlp_tile=None, so mlp_tile=16"),
    ({"offload": "hidden"}, "offload=None, so offload='hidden'"),
]


@pytest.mark.parametrize(("options", "words"), OTHERS_THAN, ids=lambda value: str(value)[:24])
def test_other_options_than_the_models(options: dict[str, Any], words: str) -> None:
    model = longspan.parallelize(decoder("llama"), loss_tile=8)
    with pytest.raises(ValueError, match=f"^explain: .* parallelized with {words}.* go unheard"):
        longspan.explain(model, [16, 8], **options)


def test_options_that_the_model_has() -> None:
    teams = longspan.Strategy("head_parallel_ring", head_ranks=1)
    model = longspan.parallelize(decoder("llama"), strategy=teams, loss_tile=8, layout="head-tail")
    bare = longspan.explain(model, [16, 8])
    named = longspan.explain(
        model, [16, 8], strategy=teams, loss_tile=8, mlp_tile=None, layout="head-tail"
    )
    assert str(named) == str(bare)
    assert bare.layers[0].strategy == teams.name


def test_a_batch_that_is_cut_has_its_layout() -> None:
    model, local = decoder("llama"), longspan.shard(packed([16, 8]).batch, rank=0, ranks=2)
    with pytest.raises(ValueError, match="cut by shard, so `layout` would go unheard"):
        longspan.explain(model, local, layout="contiguous-rows")
    assert longspan.explain(model, local, strategy="gathered").layers[0].strategy == "gathered"


@pytest.mark.parametrize("parallelized", [False, True])
def test_nothing_waits_on_the_host_without_checkpoints(parallelized: bool) -> None:
    model, options = decoder("llama").train(), {"offload": "hidden"}
    if parallelized:
        model = longspan.parallelize(model, **options)
    with pytest.raises(ValueError, match=r"explain: offload=.hidden. moves what gradient checkp"):
        longspan.explain(model, [16, 8], device="cpu", **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert longspan.explain(model, [16, 8], device="cpu", **options).memory is not None
