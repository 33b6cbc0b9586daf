"""Decoders whose layers attend to the keys that an indexer selects: GLM-5.2,
DeepSeek-V3.2 and the families with the same layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, Ownership, run_ranks
from longspan._local_batch import KEYWORD
from longspan._models import LocalAttention, Selection

pytest.importorskip("transformers")

from oracle.tiny_decoders import (
    CASES,
    SELECTING,
    SLOTS,
    Answer,
    Case,
    answer,
    answer_of,
    decoder,
    gradients_of,
    packed,
)
from oracle.whole_models import (
    check,
    check_restored,
    check_rounding,
    exactly,
    over_ranks,
    parts_of,
    sees_no_future,
    sends_what_it_says,
)

RANKS = (1, 2, 3, 4)


def layers_of(model: Any) -> list[Selection]:
    """How each of its layers selects."""
    found = [cost.layer.selects for cost in longspan.explain(model, [8]).layers]
    return [selects for selects in found if selects is not None]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", SELECTING)
def test_it_is_each_document_alone(family: str, case: str, ranks: int) -> None:
    check(over_ranks(family, case, ranks), answer(family, case))


@pytest.mark.parametrize("family", SELECTING)
def test_in_float64_throughout_it_is_that_to_the_last_digits(family: str) -> None:
    exactly(family, "packed", 3)


@pytest.mark.parametrize("family", SELECTING)
def test_its_rounding_is_that_of_the_family(family: str) -> None:
    check_rounding(family, 3)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("family", SELECTING)
def test_embeddings_in_place_of_ids(family: str, ranks: int) -> None:
    true = answer(family, "rows", embeds=True)
    check(over_ranks(family, "rows", ranks, embeds=True), true)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("family", SELECTING)
def test_on_every_device(family: str, device: str) -> None:
    """Of one rank, against each document alone on the CPU; float32 inside, which another
    device adds up in another order."""
    case, model = CASES["rows"](), decoder(family).to(device)
    longspan.parallelize(model)
    batch = {key: value.to(device) for key, value in case.batch.items()}
    local = longspan.shard(batch, model=model)
    out = model(**local)
    out.loss.backward()
    gradients = {name: gradient.cpu() for name, gradient in gradients_of(model).items()}
    logits = longspan.unshard(out.logits.detach(), local).cpu()
    rows = tuple(logits[d.row, d.begin : d.end] for d in case.documents)
    check(Answer(out.loss.item(), gradients, rows), answer(family, "rows"), 1e-5)


@pytest.mark.parametrize("layout", [layout.name for layout in longspan.values.named_layouts()])
def test_every_layout(layout: str) -> None:
    for case in ("rows", "left"):
        check(over_ranks("glm_moe_dsa", case, 3, layout=layout), answer("glm_moe_dsa", case))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout.name for layout in longspan.values.named_layouts()])
@pytest.mark.parametrize("family", SELECTING)
def test_every_layout_of_four_ranks(family: str, layout: str) -> None:
    exactly(family, "rows", 4, layout=layout)


@pytest.mark.parametrize("family", SELECTING)
def test_an_uneven_ownership_and_a_rank_of_pads(family: str) -> None:
    for sizes in ([3, 1, 19], [12, 11, 3]):  # of 23 tokens a row
        uneven = Ownership.of_sizes(sizes)
        check(over_ranks(family, "rows", 3, layout=uneven), answer(family, "rows"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SELECTING)
def test_ranks_select_other_keys_by_rounding_alone(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots in which whole models over ranks differ from one rank are few (none, as a rule), and
    their scores lie within rounding of the last that was chosen."""
    case, plain = packed([57, 130]), decoder(family, dtype)
    kept: dict[LocalAttention, list[tuple[Tensor, ...]]] = {}
    select = LocalAttention.select_keys

    def keeping(self: LocalAttention, *given: Tensor, slots: int) -> Tensor:
        made = select(self, *given, slots=slots)
        kept.setdefault(self, []).append((made, *given))
        return made

    monkeypatch.setattr(LocalAttention, "select_keys", keeping)

    def body(group: Group) -> list[list[Tensor]]:
        """What each layer selects, and the indexer's queries, keys and weights, of all tokens."""
        model = longspan.parallelize(copy.deepcopy(plain), group, proof=False)
        local = longspan.shard(case.batch, group, model=model)
        with torch.no_grad():
            model(**local)
        layers = kept[local[KEYWORD]]
        return [[longspan.unshard(one, local)[0] for one in layer] for layer in layers]

    (one,) = run_ranks(1, body)
    assert len(one) == sum(not layer.shared for layer in layers_of(plain))
    for ranks in (2, 3):
        for (mine, *_), (true, q, k, weights) in zip(run_ranks(ranks, body)[0], one, strict=True):
            found = longspan.dsa.compare_selections(true, mine, q, k, weights)
            assert found.queries <= len(true) // 50, found
            assert found.worst_gap <= 16 * torch.finfo(dtype).eps, found


@pytest.mark.parametrize("family", SELECTING)
def test_nobody_sees_another_document_or_the_future(family: str) -> None:
    case = packed([6, 8, 9], [21, 2])

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family), group)
        assert longspan.leak_probe(model, case.batch, group) == []
        sees_no_future(model, packed([19]), group, (0, 9, 10, 17, 18))

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", SELECTING)
def test_it_sends_what_explain_says(family: str, dtype: torch.dtype) -> None:
    """A latent row and an index key a token, and no key of a shared selection; rows'
    gradients go home."""
    case = packed([6, 8, 9], [21, 2])

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family, dtype), group)
        said, local = sends_what_it_says(model, case.batch, group)
        row = (16 + 4) * dtype.itemsize
        for cost in said.layers:
            assert cost.layer.selects is not None
            key = 0 if cost.layer.selects.shared else 8 * 4
            assert cost.sent_forward == 2 * (group.size() - 1) * local.cut.local_tokens * (
                row + key
            )
            assert cost.pairs <= SLOTS * 2 * local.cut.local_tokens

    run_ranks(3, body)


def test_explain_counts_the_pairs_of_selected_keys() -> None:
    case = packed([6, 8, 9])
    said = longspan.explain(decoder("glm_moe_dsa"), case.batch)
    pairs = sum(min(at + 1, SLOTS) for d in case.documents for at in range(d.end - d.begin))
    assert [cost.pairs for cost in said.layers] == [pairs] * 3
    assert "6 selected" in str(said) and "6 shared" in str(said)


def test_layers_by_the_name_that_they_had_first() -> None:
    """transformers 5.17 has another word, in its configuration and for the mask."""
    model = decoder("glm_moe_dsa")
    model.config.layer_types = ["deepseek_sparse_attention"] * 3
    longspan.parallelize(model, proof=False)
    masks = longspan.shard(packed([7, 5]).batch, model=model)["attention_mask"]
    assert masks["deepseek_sparse_attention"] is masks["indexed_attention"]


# ---- What stays untouched, and what is refused.


@pytest.mark.parametrize("family", SELECTING)
def test_restore_undoes_it(family: str) -> None:
    check_restored(decoder(family), packed([7, 5]).batch)


def test_a_refused_model_stays_as_it_was() -> None:
    """The last layer is to blame, when the others have been redirected."""
    model = decoder("glm_moe_dsa")
    attention = model.model.layers[2].self_attn
    attention.expand_kv = attention.expand_kv
    before = parts_of(model)
    message = "`expand_kv` of 'model.layers.2.self_attn' was replaced already"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)
    assert parts_of(model) == before


def test_without_a_sharded_batch() -> None:
    model = longspan.parallelize(decoder("glm_moe_dsa"))
    with pytest.raises(ValueError, match="without a sharded batch"):
        model(input_ids=torch.ones(1, 5, dtype=torch.long))


def test_dropout_is_refused() -> None:
    model = longspan.parallelize(decoder("glm_moe_dsa", attention_dropout=0.1)).train()
    with pytest.raises(
        NotImplementedError, match=r"GlmMoeDsaAttention: drops 0.1 of its attention"
    ):
        model(**longspan.shard(packed([7, 5]).batch, model=model))


def check_step(model: Any, case: Case, true: Answer) -> None:
    """That the gradients of a parallelized model are those of the plain one."""
    model(**longspan.shard(case.batch, model=model)).loss.backward()
    gradients = gradients_of(model)
    assert gradients.keys() == true.gradients.keys()
    for name, gradient in true.gradients.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= 3e-6 * gradient.abs().max(), name


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_a_forward_that_somebody_wrapped(family: str) -> None:
    """It stays, as hooks of accelerate do, and gets its rows from `expand_kv`."""
    case, model = packed([6, 8, 9]), decoder(family)
    true, calls = answer_of(model, case), []
    model.zero_grad()
    for layer in model.model.layers:
        plain = layer.self_attn.forward

        def wrapped(*given: Any, plain: Any = plain, **named: Any) -> Any:
            calls.append(plain)
            return plain(*given, **named)

        layer.self_attn.forward = wrapped
    longspan.parallelize(model, proof=False)
    check_step(model, case, true)
    assert len(calls) == len(model.model.layers)
    longspan.restore(model)
    assert all("expand_kv" not in vars(layer.self_attn) for layer in model.model.layers)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_a_cache_of_a_layer(family: str) -> None:
    model = longspan.parallelize(decoder(family))
    local = longspan.shard(packed([7, 5]).batch, model=model)

    def with_cache(_: Any, given: Any, named: dict[str, Any]) -> Any:
        return given, named | {"past_key_values": object()}

    with_cache.__module__ = "transformers"  # nobody else's may change what a layer is given
    model.model.layers[0].self_attn.register_forward_pre_hook(with_cache, with_kwargs=True)
    with pytest.raises(ValueError, match=r"Attention: got a cache, which would hold this rank's"):
        model(**local)


def adapted(**options: Any) -> Any:
    """GLM-5.2 with an adapter on the matrices that queries are multiplied by."""
    peft = pytest.importorskip("peft")
    model = decoder("glm_moe_dsa")
    lora = peft.LoraConfig(
        r=2, target_modules=["kv_b_proj"], init_lora_weights=False, lora_alpha=16, **options
    )
    return peft.get_peft_model(model, lora)


def test_adapters_are_absorbed() -> None:
    """On each linear layer and over ranks: test_models_torch.py."""
    case, model = packed([7, 5]), adapted()
    true = answer_of(model, case)
    model.zero_grad()
    longspan.parallelize(model)
    assert true.gradients and all("lora" in name for name in true.gradients)
    check_step(model, case, true)


def test_adapters_that_cannot_be_absorbed() -> None:
    model = longspan.parallelize(adapted(lora_dropout=0.5)).train()
    local = longspan.shard(packed([7, 5]).batch, model=model)
    with pytest.raises(NotImplementedError, match=r"kv_b_proj: an adapter drops 0.5"):
        model(**local)
    assert model.eval()(**local).loss.isfinite()
    with pytest.raises(NotImplementedError, match=r"self_attn.kv_b_proj' has a bias"):
        longspan.parallelize(adapted(lora_bias=True))
