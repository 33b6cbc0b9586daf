"""Unmodified decoders over ranks: loss and every gradient are those of the same
model on each document alone."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, Ownership, run_ranks
from longspan._walking import attribute, has, of_classes, remembered, still, walked
from longspan.values import LocalBatch

pytest.importorskip("transformers")

from oracle.tiny_decoders import (
    CASES,
    FAMILIES,
    OTHERS,
    WINDOW,
    Answer,
    answer,
    decoder,
    embedded,
    packed,
    padded,
)
from oracle.whole_models import (
    check,
    check_rounding,
    exactly,
    over_ranks,
    parts_of,
    sees_no_future,
)

RANKS = (1, 2, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_each_document_alone(family: str, case: str, ranks: int) -> None:
    check(over_ranks(family, case, ranks), answer(family, case))


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_throughout_it_is_that_to_the_last_digits(family: str) -> None:
    exactly(family, "packed", 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_rounding_is_that_of_the_family(family: str) -> None:
    check_rounding(family, 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("strategy", [s for s in longspan.Strategy.names() if s != "ring"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy(family: str, strategy: str, ranks: int) -> None:
    check(over_ranks(family, "rows", ranks, strategy=strategy), answer(family, "rows"))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_in_place_of_ids(family: str, ranks: int) -> None:
    true = answer(family, "rows", embeds=True)
    check(over_ranks(family, "rows", ranks, embeds=True), true)


@pytest.mark.parametrize("layout", [layout.name for layout in longspan.values.named_layouts()])
@pytest.mark.parametrize("case", ["rows", "left"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4"])
def test_every_layout(family: str, case: str, layout: str) -> None:
    check(over_ranks(family, case, 3, layout=layout), answer(family, case))
    check(over_ranks(family, case, 2, cut={"layout": layout}), answer(family, case))


def test_an_uneven_ownership_of_rows() -> None:
    uneven = Ownership.of_sizes([3, 1, 19])
    check(over_ranks("mistral", "rows", 3, layout=uneven), answer("mistral", "rows"))
    check(over_ranks("mistral", "rows", 3, cut={"layout": uneven}), answer("mistral", "rows"))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("family", OTHERS)
def test_other_decoders_need_nothing_of_their_own(family: str, ranks: int) -> None:
    check(over_ranks(family, "rows", ranks), answer(family, "rows"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_as_exact_as_one_rank(family: str, ranks: int) -> None:
    true = answer(family, "rows")
    plain = answer(family, "rows", torch.float32)
    ours = over_ranks(family, "rows", ranks, dtype=torch.float32)
    assert abs(ours.loss - true.loss) <= 2 * abs(plain.loss - true.loss) + 1e-6 * true.loss

    def errors(of: Answer) -> Tensor:
        return torch.stack(
            [
                (of.gradients[name].double() - gradient).norm() / gradient.norm()
                for name, gradient in true.gradients.items()
            ]
        )

    # Errors of single parameters are a matter of luck; their size is not.
    assert errors(ours).max() <= 2 * errors(plain).max()
    assert errors(ours).mean() <= 2 * errors(plain).mean()


# ---- What shard hands to a model.


def test_what_a_model_gets() -> None:
    model = longspan.parallelize(decoder("mistral"))
    case = packed([4, 9, 1, 11])
    local = longspan.shard(case.batch | {"name": "b7"}, model=model)
    assert list(local) == [
        "input_ids",
        "labels",
        "position_ids",
        "name",
        "shift_labels",
        "num_items_in_batch",
        "use_cache",
        "longspan",
    ]
    assert local["use_cache"] is False
    # Padded from 25 to 26 tokens, two chunks of one rank.
    targets = torch.nn.functional.pad(case.targets(), (0, 1), value=-100)
    assert local["shift_labels"].equal(targets)
    assert local["num_items_in_batch"] == targets.ne(-100).sum()
    assert repr(local["longspan"]).startswith(f"LocalAttention(causal, window {WINDOW}; ring")
    assert "input_ids" in case.batch  # and not changed
    for key, value in packed([4, 9, 1, 11]).batch.items():
        assert case.batch[key].equal(value)


@pytest.mark.parametrize("side", ["left", "right"])
def test_targets_of_pads_are_ignored(side: str) -> None:
    """The last left pad would learn the first real token; a row's last real token
    keeps the label that stands after it, even on a pad."""
    case = padded([3, 5], 5, side)
    batch = {**case.batch, "labels": case.ids.clone()}
    local = longspan.shard(batch, model=longspan.parallelize(decoder("llama")))
    learned = local["shift_labels"][:, :5].ne(-100)
    expected = case.batch["attention_mask"].bool()
    expected[:, -1] = False
    assert learned.equal(expected)
    assert local["num_items_in_batch"] == expected.sum()


def test_positions_are_those_of_documents_and_given_ones_stay() -> None:
    model = longspan.parallelize(decoder("llama"))
    left = longspan.shard(padded([3, 5], 5, "left").batch, model=model)
    assert left["position_ids"][0, 2:5].tolist() == [0, 1, 2]
    given = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    given["position_ids"] = torch.tensor([[7, 8, 9, 10]])
    assert longspan.shard(given, model=model)["position_ids"].tolist() == [[7, 8, 9, 10]]


def test_positions_that_jump_say_two_things() -> None:
    """transformers sees a border in every jump, shard in every 0."""
    model = longspan.parallelize(decoder("llama"))
    ids = torch.arange(9)[None] + 3
    positions = torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5, 6]])
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids}
    said = "^shard: `position_ids` goes from 3 to 2 at token 4 of row 0, where .* by `seq_lens`, or"
    with pytest.raises(ValueError, match=said):
        longspan.shard(batch, model=model)
    for more in (
        {"seq_lens": torch.tensor([[4, 5]])},
        {"attention_mask": torch.ones_like(ids)},  # transformers sees no borders with one
        {"labels": torch.where(torch.arange(9) < 4, ids, -100)},  # of pads
    ):
        assert "position_ids" in longspan.shard({**batch, **more}, model=model)


def test_without_labels_it_is_a_plain_forward() -> None:
    model = longspan.parallelize(decoder("llama"))
    ids = packed([7, 5]).batch["input_ids"]
    local = longspan.shard({"input_ids": ids}, model=model)
    assert "labels" not in local and "num_items_in_batch" not in local
    out = model(**local)
    assert out.loss is None and out.logits.shape[1] == 12


def test_shift_labels_and_counts_that_are_given_stay() -> None:
    model = longspan.parallelize(decoder("llama"))
    case = packed([7, 5])
    given = {"input_ids": case.ids, "shift_labels": case.targets(), "num_items_in_batch": 640}
    local = longspan.shard(given, model=model)
    assert local["shift_labels"].equal(case.targets())
    assert local["num_items_in_batch"] == 640
    one_document = longspan.shard({"input_ids": case.ids, "labels": case.ids}, model=model)
    given = {"input_ids": case.ids, "labels": case.ids, "num_items_in_batch": 640}
    ours = model(**longspan.shard(given, model=model)).loss * 640 / 11
    torch.testing.assert_close(ours, model(**one_document).loss)


def test_nothing_to_learn_is_loss_zero() -> None:
    model = longspan.parallelize(decoder("llama"))
    ids = packed([6]).ids
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    loss = model(**longspan.shard(batch, model=model)).loss
    assert loss == 0
    loss.backward()
    assert not model.lm_head.weight.grad.any()


def test_a_local_batch_travels_without_its_group() -> None:
    model = longspan.parallelize(decoder("llama"))
    local = longspan.shard(packed([7, 5]).batch, model=model, layout="contiguous-stream")
    again = pickle.loads(pickle.dumps(local))
    assert isinstance(again, LocalBatch) and "longspan" not in again and again.as_row
    assert (local | {"more": 1}).as_row and local.copy()["longspan"] is local["longspan"]
    assert longspan.unshard(again["input_ids"], again).equal(packed([7, 5]).ids)


def test_documents_of_a_flattening_collator() -> None:
    """All the forms in which transformers' own collator says where documents lie."""
    from transformers import DataCollatorWithFlattening

    model = longspan.parallelize(decoder("llama"))
    features = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11]}]
    forms = [{}, {"return_flash_attn_kwargs": True}]
    forms += [{"return_flash_attn_kwargs": True, "return_position_ids": False}]
    logits = []
    for options in forms:
        batch = DataCollatorWithFlattening(return_tensors="pt", **options)(features)
        local = longspan.shard(batch, model=model)
        assert not any(key.startswith(("cu_seq_lens", "max_length")) for key in local)
        assert local.cut.packings[0].documents == 2
        # The collator leaves the first token of every document out of the labels.
        assert local["num_items_in_batch"] == 5
        logits.append(model(**local).logits)
    assert logits[0].equal(logits[1]) and logits[0].equal(logits[2])


def test_trainers_rebuild_batches() -> None:
    model = longspan.parallelize(decoder("llama"))
    local = longspan.shard(packed([7, 5]).batch, model=model, layout="contiguous-stream")
    moved = type(local)({key: value for key, value in local.items()})
    assert moved.as_row and moved.cut.ownership == local.cut.ownership
    assert model(**moved).loss == model(**copy.copy(local)).loss
    with pytest.raises(TypeError, match="entries alone do not say how they were cut"):
        LocalBatch({"input_ids": moved["input_ids"]})


# ---- Ranks that were given different things, and one that refuses.


def _error_of(call: Any) -> str:
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return ""


def test_ranks_agree_on_more_than_tensors() -> None:
    case = packed([7, 5])

    def strategies(group: Group) -> str:
        strategy = ("ring", "gathered")[group.rank()]
        model = longspan.parallelize(decoder("llama"), group, strategy=strategy)
        return _error_of(lambda: longspan.shard(case.batch, group, model=model))

    def divisors(group: Group) -> str:
        model = longspan.parallelize(decoder("llama"), group)
        batch = {**case.batch, "num_items_in_batch": 20 + group.rank()}
        return _error_of(lambda: longspan.shard(batch, group, model=model))

    def keys(group: Group) -> str:
        model = longspan.parallelize(decoder("llama"), group)
        batch = dict(case.batch)
        if group.rank():
            del batch["labels"]
        return _error_of(lambda: longspan.shard(batch, group, model=model))

    assert all("strategy" in error for error in run_ranks(2, strategies))
    assert all("num_items_in_batch" in error for error in run_ranks(2, divisors))
    assert all("batches with different keys" in error for error in run_ranks(2, keys))


@pytest.mark.parametrize("with_model", [True, False])
def test_a_rank_that_refuses_tells_the_others(with_model: bool) -> None:
    case = packed([7, 5])

    def body(group: Group) -> str:
        lengths = torch.tensor([[7, 5 + 9 * group.rank()]])
        batch = {"input_ids": case.ids, "seq_lens": lengths}
        model = longspan.parallelize(decoder("llama"), group) if with_model else None
        return _error_of(lambda: longspan.shard(batch, group, model=model))

    first, second = run_ranks(2, body)
    assert second.startswith("shard: the documents of row 0 take")
    assert first.startswith(f"shard: rank 1: ValueError: {second}")


# ---- Checks that users run.


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_parity_and_leaks_of_parallelized_models(family: str) -> None:
    case = packed([6, 8, 9], [21, 2])

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family), group, layout="contiguous-stream")
        found = longspan.check_parity(model, case.batch, group, tolerance=3e-6)
        found.raise_if_different()
        assert len(found.differences) == 2 + len(list(model.parameters()))
        assert longspan.leak_probe(model, case.batch, group) == []

    run_ranks(2, body)


@pytest.mark.parametrize("family", FAMILIES)
def test_nobody_sees_another_document_or_the_future(family: str) -> None:
    case = packed([6, 8, 9], [21, 2])

    def body(group: Group) -> None:
        model = longspan.parallelize(decoder(family), group)
        assert longspan.leak_probe(model, case.batch, group) == []
        sees_no_future(model, packed([19]), group, (0, 9, 10, 17, 18))

    run_ranks(2, body)


def test_a_leak_is_found() -> None:
    """A model that ignores where documents begin."""
    model = longspan.parallelize(decoder("llama"))

    def forgetful(model: Any, local: LocalBatch, _: Group) -> tuple[None, Tensor]:
        ids = local["input_ids"]
        one_document = longspan.shard({"input_ids": ids}, model=model)["longspan"]
        return None, model(**(local | {"longspan": one_document})).logits

    leaks = longspan.leak_probe(model, packed([6, 8]).batch, run=forgetful)
    assert [(leak.changed_document, leak.moved_document) for leak in leaks] == [(1, 2)]


# ---- What stays untouched, and what is refused.


def test_only_the_instance_changes_and_restore_undoes_it() -> None:
    model, batch = decoder("gemma3"), packed([7, 5]).batch
    config = model.config
    neighbour = type(model)(config).double()
    before = parts_of(model)
    function = type(model).forward
    assert longspan.parallelize(model) is model
    assert model.config is not config and model.model.config is model.config
    assert config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "longspan"
    assert neighbour(input_ids=batch["input_ids"]).logits.isfinite().all()
    assert neighbour.config is config
    assert longspan.restore(model) is model
    assert parts_of(model) == before
    assert model.config is config and type(model).forward is function
    plain = model(input_ids=batch["input_ids"]).logits
    again = longspan.parallelize(model)(
        **longspan.shard({"input_ids": batch["input_ids"]}, model=model)
    )
    torch.testing.assert_close(again.logits, plain, rtol=1e-5, atol=1e-5)


def test_two_models_with_two_settings() -> None:
    """No global switch: both are right at once, on the same threads."""

    def body(group: Group) -> None:
        one = longspan.parallelize(decoder("llama"), group)
        two = longspan.parallelize(
            decoder("llama"), group, strategy="gathered", layout="contiguous-rows"
        )
        case = packed([7, 5])
        logits = [
            longspan.unshard(m(**local).logits, local)
            for m in (one, two)
            for local in [longspan.shard(case.batch, group, model=m)]
        ]
        torch.testing.assert_close(*logits)

    run_ranks(2, body)


class _Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)


def _tiny(name: str, config: str, **options: Any) -> Any:
    import transformers

    common = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 11}
    made = getattr(transformers, config)(**(common | {"pad_token_id": 0} | options))
    return getattr(transformers, name)(made)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: 3, TypeError, "parallelize: `model` is an int; expected a torch.nn.Module"),
        (_Plain, TypeError, "_Plain holds no transformers model; for other models call"),
        (
            lambda: _tiny("LlamaForSequenceClassification", "LlamaConfig"),
            NotImplementedError,
            "LlamaForSequenceClassification makes one answer from tokens of a whole row",
        ),
        (
            lambda: _tiny("BertModel", "BertConfig"),
            NotImplementedError,
            "attends to both sides",
        ),
        (
            lambda: _tiny("RwkvForCausalLM", "RwkvConfig"),
            NotImplementedError,
            "RwkvForCausalLM does not look its attention up by name",
        ),
        (
            lambda: _tiny(
                "MiniMaxForCausalLM", "MiniMaxConfig", num_local_experts=2, head_dim=8,
                layer_types=["linear_attention", "full_attention"],
            ),
            NotImplementedError,
            "layers of kind 'linear_attention'",
        ),
        (
            lambda: _tiny("LlamaForQuestionAnswering", "LlamaConfig"),
            NotImplementedError,
            "makes one answer from tokens of a whole row",
        ),
    ],
    ids=["no-module", "plain", "classifier", "encoder", "rwkv", "linear", "answers"],
)  # fmt: skip
def test_models_that_cannot_be_cut(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        longspan.parallelize(make())


def test_options_that_make_no_sense() -> None:
    model = decoder("llama")
    with pytest.raises(ValueError, match="parallelize: 'rings' is not one of ring, "):
        longspan.parallelize(model, strategy="rings")
    with pytest.raises(ValueError, match="parallelize: layout 'zigzag' is not one of head-tail"):
        longspan.parallelize(model, layout="zigzag")
    with pytest.raises(ValueError, match="the ownership has 3 ranks, the group 1"):
        longspan.parallelize(model, layout=Ownership.contiguous(12, 3))
    with pytest.raises(ValueError, match="restore: this model is not parallelized"):
        longspan.restore(model)
    with pytest.raises(ValueError, match="shard: this LlamaForCausalLM is not parallelized"):
        longspan.shard(packed([3]).batch, model=model)
    longspan.parallelize(model)
    with pytest.raises(ValueError, match=r"parallelized already; call longspan.restore\(model\)"):
        longspan.parallelize(model)
    with pytest.raises(ValueError, match="leave `rank`, `ranks` and `shift_labels` out"):
        longspan.shard(packed([3]).batch, model=model, rank=0, ranks=1)
    with pytest.raises(TypeError, match="restore the model, copy it, and parallelize both"):
        copy.deepcopy(model)


def test_a_batch_for_another_group() -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"))
        with pytest.raises(ValueError, match="the model was parallelized over Group"):
            longspan.shard(packed([3]).batch, group, model=model)

    run_ranks(2, body)


def test_ranks_without_tokens() -> None:
    def body(group: Group) -> None:
        model = longspan.parallelize(decoder("llama"), group)
        with pytest.raises(ValueError, match="ranks would hold 0, 12 tokens of 1 rows; a model"):
            longspan.shard(packed([12]).batch, model=model, layout=Ownership.of_sizes([0, 12]))
        with pytest.raises(ValueError, match="ranks would hold 0, 0 tokens of 0 rows"):
            longspan.shard({"input_ids": torch.zeros(0, 0, dtype=torch.long)}, model=model)

    run_ranks(2, body)


def test_calls_that_would_be_wrong() -> None:
    model = longspan.parallelize(decoder("llama"))
    ids = packed([7]).ids
    with pytest.raises(ValueError, match="called without a sharded batch; call model"):
        model(input_ids=ids)
    local = longspan.shard({"input_ids": ids}, model=model)
    for shape in [(1, 1, 8, 8), (1, 8)]:
        mask = torch.ones(shape, dtype=torch.bool)
        with pytest.raises(ValueError, match="got an attention_mask beside the sharded batch"):
            model(**local, attention_mask=mask)
    with pytest.raises(RuntimeError, match="generate: this model is parallelized"):
        model.generate(input_ids=ids)
    with pytest.raises(RuntimeError, match="set_attn_implementation: this model is"):
        model.set_attn_implementation("eager")
    longspan.restore(model)
    assert model(ids, attention_mask=torch.ones(1, 7)).logits.shape[:2] == (1, 7)
    assert model.generate(input_ids=ids, max_new_tokens=2).shape == (1, 9)


def test_dropout_inside_attention_is_refused() -> None:
    model = decoder("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    longspan.parallelize(model)
    local = longspan.shard(packed([7]).batch, model=model)
    model.eval()(**local)
    with pytest.raises(NotImplementedError, match="attention over ranks has no dropout"):
        model.train()(**local)


def test_per_layer_inputs_cannot_be_guessed_from_embeddings() -> None:
    model = longspan.parallelize(decoder("gemma4"))
    batch = embedded(model, packed([7]).batch)
    del batch["per_layer_inputs"]
    with pytest.raises(ValueError, match="give `per_layer_inputs` too"):
        longspan.shard(batch, model=model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_local_positions(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope |= {"original_max_position_embeddings": 64}
    model = _tiny("LlamaForCausalLM", "LlamaConfig", rope_parameters=rope)

    def body(group: Group) -> None:
        with pytest.raises(NotImplementedError, match=f"rope_type '{kind}'"):
            longspan.parallelize(model, group)

    for ranks in (1, 2):  # on one rank, too, the pads of a cut have the longest position
        run_ranks(ranks, body)


def test_a_loss_for_tokens_is_refused() -> None:
    model = longspan.parallelize(_tiny("LlamaForTokenClassification", "LlamaConfig"))
    ids = packed([7]).ids % 11
    with pytest.raises(NotImplementedError, match="TokenClassification has a loss of its own"):
        longspan.shard({"input_ids": ids, "labels": ids % 2}, model=model)
    model(**longspan.shard({"input_ids": ids, "labels": None}, model=model))


def test_edits_of_the_configuration_stay() -> None:
    model = decoder("llama")
    config = model.config
    longspan.parallelize(model)
    model.resize_token_embeddings(70)
    model.config.pad_token_id = 3
    longspan.restore(model)
    assert model.config is config
    assert (config.vocab_size, config.pad_token_id) == (70, 3)
    assert config._attn_implementation == "sdpa"
    assert model(input_ids=packed([7]).ids, labels=packed([7]).ids).loss.isfinite()


def test_a_group_of_one_is_one_rank() -> None:
    """A solo model takes batches cut for any group of one rank."""
    model = longspan.parallelize(decoder("llama"))
    local = longspan.shard(packed([7]).batch, Group.solo(), model=model)
    assert local.cut.ranks == 1


def test_a_loss_of_its_own_is_refused() -> None:
    model = decoder("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    longspan.parallelize(model)
    with pytest.raises(NotImplementedError, match="has a loss of its own"):
        longspan.shard(packed([7]).batch, model=model)
    assert longspan.shard({"input_ids": packed([7]).ids}, model=model)


def test_seq_idx_says_where_documents_lie() -> None:
    model = longspan.parallelize(decoder("llama"))
    ids = torch.arange(3, 26)[None]
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    numbers = torch.tensor([0] * 9 + [1] * 14, dtype=torch.int32)[None]
    offsets = torch.tensor([0, 9, 23], dtype=torch.int32)

    def lengths(**entries: Any) -> list[int]:
        cut = longspan.shard({"input_ids": ids, **entries}, model=model).cut
        return [length for packing in cut.packings for length in packing.lengths]

    assert lengths(seq_idx=numbers) == [9, 14]
    assert lengths(seq_idx=numbers, position_ids=positions) == [9, 14]
    assert lengths(seq_idx=numbers, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets) == [9, 14]
    mask = torch.ones_like(ids)
    mask[:, 20:] = 0
    assert lengths(seq_idx=numbers, attention_mask=mask) == [9, 11]
    assert lengths(seq_idx=torch.zeros_like(numbers)) == [23]
    with pytest.raises(ValueError, match="`seq_idx` and `position_ids` place the borders"):
        lengths(seq_idx=torch.zeros_like(numbers), position_ids=positions)
    with pytest.raises(ValueError, match="`seq_idx` and `cu_seq_lens_q` place the borders"):
        lengths(seq_idx=numbers.roll(1), cu_seq_lens_q=offsets)
    with pytest.raises(ValueError, match=r"`seq_idx` is \[1, 22\] beside \[1, 23\] tokens"):
        lengths(seq_idx=numbers[:, 1:])
    with pytest.raises(TypeError, match="`seq_idx` is a list; expected a tensor"):
        lengths(seq_idx=[0, 1])


def test_walking_is_named_modules() -> None:
    shared = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = torch.nn.ModuleDict({"a": shared, "b": torch.nn.ModuleList([shared, decoder("llama")])})
    model.register_module("none", None)
    assert list(walked(model)) == list(model.named_modules())
    inner = model["b"][1].model
    assert list(walked(model, {inner})) == list(model.named_modules(memo={inner}))


def test_classes_are_asked_about_once() -> None:
    """And their modules come in the order of the model."""
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2), torch.nn.Tanh())
    model.append(torch.nn.Sequential(torch.nn.ReLU()))
    asked: list[type] = []

    def wanted(kind: type) -> bool:
        asked.append(kind)
        return issubclass(kind, (torch.nn.Tanh, torch.nn.ReLU))

    assert [name for name, _ in of_classes(model, wanted)] == ["0", "2", "3.0"]
    assert asked == [torch.nn.Sequential, torch.nn.ReLU, torch.nn.Linear, torch.nn.Tanh]
    assert of_classes(model, lambda kind: kind is torch.nn.GELU) == []


def test_what_a_module_has_is_what_hasattr_says() -> None:
    class Own(torch.nn.Linear):
        number = 3

        @property
        def broken(self) -> int:
            raise AttributeError

    class Further(Own):
        def __getattr__(self, name: str) -> Any:
            return 4 if name == "elsewhere" else super().__getattr__(name)

    names = ("number", "weight", "bias", "inner", "kept", "mine", "broken", "elsewhere", "none")
    for module in (Own(2, 2), Own(2, 2, bias=False), Further(2, 2)):
        module.inner, module.mine = torch.nn.ReLU(), None
        module.register_buffer("kept", torch.zeros(1))
        for name in names:
            assert has(module, name) == hasattr(module, name), name
            assert attribute(module, name, 5) is getattr(module, name, 5), name


def test_what_stands_still_is_gone_over_once() -> None:
    """In this thread and while it lasts; then modules that came are seen."""
    looked: list[torch.nn.Module] = []

    @remembered
    def names(model: torch.nn.Module) -> list[str]:
        looked.append(model)
        return [name for name, _ in model.named_modules()]

    model, other = torch.nn.Sequential(torch.nn.ReLU()), torch.nn.ReLU()
    with still(model):
        assert names(model) is names(model)
        assert list(walked(model)) == list(model.named_modules())
        assert list(walked(model[0])) == [("", model[0])]
        with still(other), ThreadPoolExecutor(1) as thread:
            assert names(other) is names(other)
            names(model)
            thread.submit(names, other).result()
        assert names(model) is names(model)
    assert looked == [model, other, model, other]
    model.append(torch.nn.ReLU())
    assert names(model) == ["", "0", "1"]
    assert list(walked(model)) == list(model.named_modules())
    with pytest.raises(KeyError), still(model):
        raise KeyError
    model.append(torch.nn.ReLU())
    assert list(walked(model)) == list(model.named_modules())
