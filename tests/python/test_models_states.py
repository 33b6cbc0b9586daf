"""Families with recurrent and convolutional layers over ranks: rows that convolutions see over
borders, and states that runs hand on, against each document alone."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, Ownership, run_ranks
from longspan._local_batch import KEYWORD
from longspan._models import Recurrence

pytest.importorskip("transformers")

from oracle.all_double import AllDouble
from oracle.tiny_decoders import (
    CASES,
    STATEFUL,
    Answer,
    Case,
    answer_of,
    decoder,
    gradients_of,
    packed,
)
from oracle.whole_models import (
    check,
    check_as_exact,
    check_restored,
    over_ranks,
    parts_of,
    put_together,
    sees_no_future,
    sends_what_it_says,
)

pytestmark = pytest.mark.slow  # whole models over ranks

#: One of each kind: convolutions alone, a matrix, a number and a vector as transition.
KINDS = ("lfm2", "qwen3_next", "mamba2", "mamba")
#: Documents that lie in several chunks and on several ranks, of one token, and shorter than a
#: convolution; and rows of other documents.
LONG: dict[str, Case] = {
    "long": packed([57]),
    "middling": packed([33]),
    "long_rows": packed([40, 1, 3, 13], [5, 52]),
    "straddling": packed([4, 22, 1, 2, 8], [36, 1]),
}
EVERY = {**CASES, **{name: functools.partial(lambda case: case, c) for name, c in LONG.items()}}
#: Layers of a model.
LAYERS = {
    "lfm2": lambda model: model.model.layers[0].conv,
    "qwen3_next": lambda model: model.model.layers[0].linear_attn,
    "mamba2": lambda model: model.backbone.layers[0].mixer,
    "mamba": lambda model: model.backbone.layers[0].mixer,
}


@functools.cache
def alone(family: str, case: str, embeds: bool = False) -> Answer:
    """Every document alone, in float64 throughout."""
    model = decoder(family)
    with AllDouble():
        return answer_of(model, EVERY[case](), embeds)


def exactly(family: str, case: str, ranks: int, **options: Any) -> None:
    """The proof is shown elsewhere, for every family of these."""
    found = over_ranks(family, EVERY[case](), ranks, inside=AllDouble, proof=False, **options)
    check(found, alone(family, case, options.get("embeds", False)), tolerance=1e-11)


@pytest.mark.parametrize("family", STATEFUL)
def test_every_family(family: str) -> None:
    exactly(family, "straddling", 3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", ["packed", "rows", "slots", "left", "long"])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_it_is_each_document_alone(family: str, case: str, ranks: int) -> None:
    exactly(family, case, ranks)


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_pads_and_embeddings(family: str) -> None:
    exactly(family, "left", 2)
    exactly(family, "slots", 4)
    exactly(family, "packed", 2, embeds=True)


@pytest.mark.parametrize("layout", [layout.name for layout in longspan.values.named_layouts()])
def test_every_layout(layout: str) -> None:
    exactly("qwen3_next", "straddling", 3, layout=layout)
    exactly("mamba2", "straddling", 4, layout=layout)


@pytest.mark.parametrize(
    "sizes",
    [[12, 1, 20], [2, 29, 2], [33, 33, 3]],
    ids=["uneven", "ends", "ranks_of_pads"],
)
@pytest.mark.parametrize("family", KINDS)
def test_documents_cut_anywhere(family: str, sizes: list[int]) -> None:
    exactly(family, "middling", 3, layout=Ownership.of_sizes(sizes))


@pytest.mark.parametrize("family", KINDS)
def test_scattered_tokens(family: str) -> None:
    """Two tokens here, three there: no run is as long as a convolution and a chunk."""
    pieces: list[list[tuple[int, int]]] = [[], [], []]
    at = 0
    for i, size in enumerate([2, 3] * 6 + [3]):
        pieces[(i * 2) % 3].insert(0, (at, at + size))
        at += size
    assert at == 33
    exactly(family, "middling", 3, layout=Ownership.of_ranges(pieces))


@pytest.mark.parametrize("family", KINDS)
def test_a_nan_stays_in_its_document(family: str) -> None:
    case = packed([17, 23, 17])
    model = decoder(family)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(case.ids)
    ill = embeds.clone()
    ill[0, 20] = torch.nan

    def body(group: Group) -> list[Tensor]:
        mine = longspan.parallelize(decoder(family), group, proof=False, layout="head-tail")
        answers = []
        for x in (embeds, ill):
            batch = {"inputs_embeds": x, "position_ids": case.batch["position_ids"]}
            local = longspan.shard(batch, group, model=mine)
            with torch.no_grad():
                answers.append(longspan.unshard(mine(**local).logits, local)[0])
        return answers

    well, with_nan = run_ranks(2, body)[0]
    for d in case.documents:
        if d.begin <= 20 < d.end:
            # Functions of chunks may take some tokens before it along.
            assert with_nan[20 : d.end].isnan().all()
        else:
            assert with_nan[d.begin : d.end].equal(well[d.begin : d.end])


@pytest.mark.parametrize("family", ["qwen3_next"])
def test_nobody_sees_another_document(family: str) -> None:
    case = packed([26, 8, 23], [55, 2])

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family), group, proof=False)
        assert longspan.leak_probe(model, case.batch, group) == []

    run_ranks(2, body)


@pytest.mark.parametrize("family", KINDS)
def test_nobody_sees_the_future(family: str) -> None:
    """Bit for bit: what a convolution or a state carries over borders comes from before."""
    case = LONG["middling"]

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family), group, proof=False)
        sees_no_future(model, case, group, (0, 10, 11, 12, 22, 32))

    run_ranks(3, body)


@pytest.mark.parametrize("family", KINDS)
def test_it_sends_what_explain_says(family: str) -> None:
    case = LONG["long_rows"]

    def body(group: Group) -> list[str]:
        model = longspan.parallelize(decoder(family), group, proof=False)
        said, _ = sends_what_it_says(model, case.batch, group)
        assert "convolution of" in str(said)
        return [cost.strategy for cost in said.layers]

    strategies = run_ranks(3, body)[0]
    assert strategies[0] == ("borders" if family == "lfm2" else "borders and states")


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "mamba"])
def test_heavy_states_go_in_rounds(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight runs of one document: 3 exchanges, the same answers, and the bytes that it said."""
    monkeypatch.setattr(Recurrence, "pair", (1 << 20, 1 << 20, 1))
    exactly(family, "long", 4, layout="head-tail")

    def body(group: Group) -> int:
        model = longspan.parallelize(decoder(family), group, proof=False, layout="head-tail")
        said, _ = sends_what_it_says(model, LONG["long"].batch, group)
        return next(cost.steps for cost in said.layers if cost.layer.recurrence)

    assert run_ranks(4, body) == [3] * 4


@pytest.mark.parametrize("family", KINDS)
def test_bytes_do_not_grow_with_the_length(family: str) -> None:
    model = decoder(family, max_position_embeddings=1 << 16)
    sent = [
        [(cost.sent_forward, cost.sent_backward) for cost in said.layers if cost.layer.recurrence]
        for said in (
            longspan.explain(model, [tokens], ranks=4, rank=1, layout="contiguous-rows")
            for tokens in (4096, 65536)
        )
    ]
    assert sent[0] == sent[1] and sent[0][0][0] > 0


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm2"])
def test_bfloat16_is_as_exact_as_one_rank(family: str) -> None:
    case = LONG["long_rows"]
    true = alone(family, "long_rows")
    plain = answer_of(decoder(family, torch.bfloat16), case)

    def body(group: Group) -> tuple[float, dict[str, Tensor]]:
        model = longspan.parallelize(decoder(family, torch.bfloat16), group, proof=False)
        out = model(**longspan.shard(case.batch, group, model=model))
        out.loss.backward()
        return out.loss.item(), gradients_of(model)

    found = run_ranks(3, body)
    check_as_exact([loss for loss, _ in found], [g for _, g in found], true, plain)


@pytest.mark.parametrize(
    ("family", "reentrant"), [("qwen3_next", False), ("mamba2", True), ("jamba", False)]
)
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    case = LONG["straddling"]

    def body(group: Group) -> tuple[float, dict[str, Tensor], Tensor]:
        model = decoder(family).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model = longspan.parallelize(model, group, proof=False)
        local = longspan.shard(case.batch, group, model=model)
        with AllDouble():
            out = model(**local)
            out.loss.backward()
        return (
            out.loss.item(),
            gradients_of(model),
            longspan.unshard(out.logits.detach(), local),
        )

    found = put_together(run_ranks(2, body), case.documents)
    if reentrant:  # routers and inputs without a gradient are its own affair
        assert found.loss == pytest.approx(alone(family, "straddling").loss, rel=1e-11)
    else:
        check(found, alone(family, "straddling"), tolerance=1e-11)


@pytest.mark.parametrize("family", KINDS)
def test_one_graph(family: str) -> None:
    """A layer compiles whole, and gives what it gives without."""
    torch._dynamo.reset()
    model = longspan.parallelize(decoder(family), proof=False)
    layer = LAYERS[family](model)
    local = longspan.shard(packed([21, 1, 19]).batch, model=model)
    tokens = local["input_ids"].shape[1]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    answers = []
    for call in (compiled, layer):
        x = torch.linspace(-1, 1, tokens * 32, dtype=torch.float64).view(1, tokens, 32)
        x = x.sin().requires_grad_()
        layer.zero_grad()
        out = call(hidden_states=x, **{KEYWORD: local[KEYWORD]})
        out.square().sum().backward()
        answers.append([out.detach(), x.grad, *gradients_of(layer).values()])
    for mine, plain in zip(*answers, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.deep  # half a minute to compile
@pytest.mark.parametrize(
    ("family", "experts"), [("mamba", None), ("falcon_mamba", None), ("jamba", "batched_mm")]
)
def test_whole_models_are_one_graph(family: str, experts: str | None) -> None:
    """Also where forwards hand nothing on. Jamba's loop over experts breaks by itself, so it
    takes the experts that compile."""
    torch._dynamo.reset()
    model = decoder(family)
    if experts is not None:
        model.set_experts_implementation(experts)
    longspan.parallelize(model, proof=False)
    local = longspan.shard(packed([9, 1, 6]).batch, model=model)
    answers = []
    for call in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
        model.zero_grad()
        out = call(**local)
        out.loss.backward()
        answers.append([out.logits.detach(), *gradients_of(model).values()])
    for mine, plain in zip(*answers, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-14)


def test_copies_of_a_layer_do_not_share_batches() -> None:
    model = longspan.parallelize(decoder("mamba"), proof=False)
    layer = LAYERS["mamba"](model)
    other = copy.deepcopy(layer)
    local = longspan.shard(packed([9, 8]).batch, model=model)
    x = torch.linspace(-1, 1, 17 * 32, dtype=torch.float64).view(1, 17, 32).sin()
    given = {"hidden_states": x, KEYWORD: local[KEYWORD]}
    assert other(**given).equal(layer(**given))
    one, two = (each.forward.args[1] for each in (layer, other))
    assert one is not two and one._local is two._local is None


# ---- What stays untouched, and what is refused.


@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_restore_undoes_it(family: str) -> None:
    """Let in by the proof."""
    check_restored(decoder(family), packed([17, 5]).batch)


def test_paused_it_decodes() -> None:
    model = decoder("qwen3_next", torch.float32).eval()
    prompt = packed([9]).ids
    plain = model.generate(prompt, max_new_tokens=4, do_sample=False)
    longspan.parallelize(model, proof=False)
    with pytest.raises(RuntimeError, match="generate: this model is parallelized"):
        model.generate(prompt)
    with longspan.paused(model):
        assert model.generate(prompt, max_new_tokens=4, do_sample=False).equal(plain)
    assert "forward" in vars(LAYERS["qwen3_next"](model))


def test_the_class_stays_as_it_was() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    before = dict(vars(module)), module.Qwen3NextGatedDeltaNet.forward
    one, other = decoder("qwen3_next"), decoder("qwen3_next")
    longspan.parallelize(one, proof=False)
    assert (dict(vars(module)), module.Qwen3NextGatedDeltaNet.forward) == before
    ids = packed([12]).ids
    assert other(input_ids=ids).logits.isfinite().all()


def test_a_forward_that_calls_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    def forward(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
        out: Tensor = self.out_proj(module.causal_conv1d_fn(hidden_states))
        return out

    model = decoder("qwen3_next")
    before = parts_of(model)
    monkeypatch.setattr(module.Qwen3NextGatedDeltaNet, "forward", forward)
    message = (
        r"parallelize: the forward of 'model.layers.0.linear_attn' \(Qwen3NextGatedDeltaNet\) of "
        r"transformers 5.* does not call `causal_conv1d_fn`"
    )
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model, proof=False)
    assert parts_of(model) == before

    class Around:
        def __init__(self, function: Any) -> None:
            self.__wrapped__ = function

        def __get__(self, module: Any, kind: Any) -> Any:
            return self

    monkeypatch.setattr(module.Qwen3NextGatedDeltaNet, "forward", Around(forward))
    with pytest.raises(NotImplementedError, match="is decorated by something of None"):
        longspan.parallelize(model, proof=False)


@pytest.mark.parametrize("family", KINDS)
def test_seams_that_are_taken(family: str) -> None:
    model = decoder(family)
    layer = LAYERS[family](model)
    layer.forward = layer.forward
    with pytest.raises(NotImplementedError, match=r"`forward` of .* was replaced already"):
        longspan.parallelize(model, proof=False)


@pytest.mark.parametrize("family", KINDS)
def test_without_a_sharded_batch(family: str) -> None:
    model = longspan.parallelize(decoder(family), proof=False)
    with pytest.raises(ValueError, match="without a sharded batch"):
        model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "mamba"])
def test_caches_are_refused(family: str) -> None:
    from transformers import DynamicCache

    model = longspan.parallelize(decoder(family), proof=False)
    local = longspan.shard(packed([17, 5]).batch, model=model)
    with pytest.raises(NotImplementedError, match="got `use_cache`"):
        model(**{**local, "use_cache": True})
    cache = DynamicCache(config=model.config)
    layer = LAYERS[family](model)
    x = torch.zeros(1, 22, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="got a cache, which would hold this rank's tokens"):
        layer(hidden_states=x, cache_params=cache, **{KEYWORD: local[KEYWORD]})


@pytest.mark.parametrize(
    ("family", "module", "name"),
    [
        ("mamba2", "mamba2.modeling_mamba2", "mamba2_split_conv1d_scan_combined"),
        ("mamba", "mamba.modeling_mamba", "mamba_inner_fn"),
    ],
)
def test_kernels_that_hide_the_seams_stay_off(
    family: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training; ours call the module's other functions, whatever those are."""
    home = importlib.import_module(f"transformers.models.{module}")

    def fused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel that knows nothing of borders was called")

    calls = []
    plain = home.causal_conv1d_fn

    def convolution(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return plain(*arguments, **options)

    monkeypatch.setattr(home, name, fused)
    monkeypatch.setattr(home, "causal_conv1d_fn", convolution)
    model = longspan.parallelize(decoder(family).train(), proof=False)
    out = model(**longspan.shard(packed([17, 5]).batch, model=model))
    assert out.loss.isfinite() and calls


@pytest.mark.parametrize(
    ("family", "owners"),
    [("mamba2", Ownership.contiguous), ("qwen3_next", Ownership.head_tail)],
)
def test_batches_are_cut_into_few_runs(family: str, owners: Any) -> None:
    case = packed([40, 24])

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family), group, proof=False)
        for wish in ({}, {"layout": "auto"}):
            local = longspan.shard(case.batch, group, model=model, **wish)
            assert local.cut.ownership == owners(64, 4)
        other = longspan.shard(case.batch, group, model=model, layout="per-document-head-tail")
        assert other.cut.ownership != owners(64, 4)

    run_ranks(4, body)
    said = longspan.explain(decoder(family), [40, 24], ranks=4, rank=1)
    assert f"balance of {'contiguous-rows' if family == 'mamba2' else 'head-tail'}:" in str(said)


def test_training_gives_the_same_losses() -> None:
    """Twenty steps on 1 and 4 ranks, float64 throughout."""
    case = packed([11, 17, 1, 8])

    def train(group: Group) -> list[float]:
        model = longspan.parallelize(decoder("mamba2"), group, proof=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(20):
            local = longspan.shard(case.batch, group, model=model)
            with AllDouble():
                loss = model(**local).loss
                loss.backward()
            longspan.sum_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    alone = run_ranks(1, train)[0]
    over = [sum(step) for step in zip(*run_ranks(4, train), strict=True)]
    assert alone[-1] < alone[0]
    assert over == pytest.approx(alone, rel=1e-10)


def test_autocast_sends_what_explain_says() -> None:
    """Rows before a border travel in autocast's type, states in float32."""
    case = LONG["straddling"]

    def body(group: Group) -> float:
        model = longspan.parallelize(decoder("qwen3_next", torch.float32), group, proof=False)
        local = longspan.shard(case.batch, group, model=model)
        before = group.sent_bytes
        with torch.autocast("cpu", torch.bfloat16):
            said = longspan.explain(model, case.batch, group)
            loss = model(**local).loss
        assert sum(cost.sent_forward for cost in said.layers) == group.sent_bytes - before
        loss.backward()
        return float(loss.detach())

    assert sum(run_ranks(2, body)) == pytest.approx(run_ranks(1, body)[0], rel=5e-3)


@pytest.mark.parametrize(
    ("family", "adapted"), [("qwen3_next", ["in_proj_qkvz", "q_proj"]), ("mamba2", ["in_proj"])]
)
def test_adapters_learn_what_they_learn_on_one_rank(family: str, adapted: list[str]) -> None:
    peft = pytest.importorskip("peft")
    case = LONG["straddling"]
    torch.manual_seed(0)
    model = peft.get_peft_model(
        decoder(family), peft.LoraConfig(r=2, target_modules=adapted, lora_dropout=0.0)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)

    def learned(ranks: int) -> dict[str, Tensor]:
        copies = [copy.deepcopy(model) for _ in range(ranks)]

        def body(group: Group) -> dict[str, Tensor]:
            mine = longspan.parallelize(copies[group.rank()], group, proof=False)
            with AllDouble():
                mine(**longspan.shard(case.batch, group, model=mine)).loss.backward()
            return gradients_of(mine)

        shares = run_ranks(ranks, body)
        return {name: sum(share[name] for share in shares) for name in shares[0]}  # type: ignore[misc]

    one, two = learned(1), learned(2)
    assert one and one.keys() == two.keys()
    for name, gradient in one.items():
        assert (two[name] - gradient).abs().max() <= 1e-11 * gradient.abs().max(), name
