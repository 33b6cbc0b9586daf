"""Bad input of models: every rank says the same, in our words, before anything is sent."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

import transformers
from oracle.tiny_decoders import decoder, packed
from oracle.whole_models import parts_of

from longspan import _families, _model_inputs

BATCH = packed([17, 5]).batch
Change = Callable[[Any], None]


def _nothing(_: Any) -> None:
    pass


@dataclass(frozen=True)
class Refused:
    """A family with options, what is done to a model after `parallelize`, what is added
    to the batch, and what then is said; with `by_shard` not before the batch is there, and
    with `when_equal` not before ranks know that theirs are equal."""

    family: str
    message: str
    options: dict[str, Any] = field(default_factory=dict)
    after: Change = _nothing
    batch: dict[str, Any] = field(default_factory=dict)
    layout: Any = None
    by_shard: bool = True
    when_equal: bool = False


def at_once(family: str, message: str, **options: Any) -> Refused:
    return Refused(family, message, options, by_shard=False)


def swap_mlp(model: Any) -> None:
    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp)


def adapt(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))


def adapted(kind: str, **options: Any) -> Any:
    """A model with an adapter of peft."""
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(decoder("llama"), config).double()


def configured(**settings: Any) -> Change:
    """Sets them in the configuration that the model has then."""

    def change(model: Any) -> None:
        for key, value in settings.items():
            setattr(model.config, key, value)

    return change


def turn_faster(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 5.0


def widen_a_window(model: Any) -> None:
    model.model.layers[2].self_attn.sliding_window = 9


def configure_a_layer(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "sdpa"


V4_RATES = {"compressed_sparse_attention": 0, "heavily_compressed_attention": 8}
CASES = {
    "no keys selected": at_once(
        "glm_moe_dsa", "'model.layers.0.self_attn.indexer' selects 0 keys", index_topk=0
    ),
    "fewer than none": at_once(
        "deepseek_v32", "'model.layers.0.self_attn.indexer' selects -1 keys", index_topk=-1
    ),
    "no pools selected": at_once(
        "deepseek_v4",
        "'model.layers.1.self_attn.compressor.indexer' selects 0 pools",
        index_topk=0,
    ),
    "the first layer shares": at_once(
        "glm_moe_dsa",
        "'model.layers.0.self_attn' takes over a selection, but no layer comes before it",
        indexer_types=["shared", "full", "shared"],
    ),
    "no pools": at_once(
        "deepseek_v4",
        "'model.layers.1.self_attn.compressor' makes pools of 0 tokens",
        compress_rates=V4_RATES,
    ),
    "groups in text": Refused(
        "llama",
        "`mm_token_type_ids` names images, but LlamaForCausalLM has no groups of tokens",
        batch={"mm_token_type_ids": torch.ones(1, 22, dtype=torch.long)},
    ),
    "groups of another length": Refused(
        "gemma4",
        "`mm_token_type_ids` is int64 [1, 21]; expected 1 rows of 22 tokens",
        batch={"mm_token_type_ids": torch.ones(1, 21, dtype=torch.long)},
    ),
    "pools of tokens that are counted by twos": Refused(
        "deepseek_v4",
        "`position_ids` has 2 for token 1 of row 0, which is number 1 of its document, and "
        "'model.layers.1.self_attn' makes and shows pools by these numbers; count 0, 1, 2, ...",
        batch={"position_ids": BATCH["position_ids"] * 2},
        when_equal=True,
    ),
    "pools of tokens that are counted from elsewhere": Refused(
        "deepseek_v4",
        "`position_ids` has 24 for token 17 of row 0, which is number 0 of its document",
        batch={
            "position_ids": BATCH["position_ids"] + 24 * (torch.arange(22) > 16),
            "seq_lens": torch.tensor([[17, 5]]),
        },
        when_equal=True,
    ),
    "embeddings without ids": Refused(
        "deepseek_v4",
        "'model.layers.0.mlp.gate' chooses experts by token id",
        batch={
            "input_ids": None,
            "inputs_embeds": torch.ones(1, 22, 32, dtype=torch.float64),
        },
    ),
    "routers without experts": Refused(
        "llama",
        "output_router_logits is set, but LlamaForCausalLM",
        batch={"output_router_logits": True},
    ),
    "routers in the configuration": Refused(
        "llama",
        "output_router_logits is set, but LlamaForCausalLM",
        after=configured(output_router_logits=True),
    ),
    "another attention": Refused(
        "llama",
        "`_attn_implementation` of its LlamaConfig was 'longspan' when the model was parallelized "
        "and is 'sdpa' now: another attention would see this rank's tokens alone; call "
        "longspan.restore(model) and longspan.parallelize(model, group) again",
        after=configured(_attn_implementation="sdpa"),
    ),
    "another attention in a layer": Refused(
        "llama",
        "`config` of 'model.layers.1.self_attn' is another LlamaConfig than when it was",
        after=configure_a_layer,
    ),
    "another window": Refused(
        "gemma4",
        "`sliding_window` of its Gemma4TextConfig was 5 when the model was parallelized and is 3 "
        "now, which nobody has looked at; set it back, or call longspan.restore(model) and",
        after=configured(sliding_window=3),
    ),
    "a window of one layer": Refused(
        "gemma4",
        "`sliding_window` of 'model.layers.2.self_attn' was 5 when the model was parallelized and "
        "is 9 now",
        after=widen_a_window,
    ),
    "a layer of another kind": Refused(
        "gemma4",
        "`layer_types[0]` of its Gemma4TextConfig was 'sliding_attention' when the model was "
        "parallelized and is 'full_attention' now",
        after=configured(layer_types=["full_attention"] * 4),
    ),
    "another cap": Refused(
        "gemma4",
        "`final_logit_softcapping` of its Gemma4TextConfig was None",
        after=configured(final_logit_softcapping=2.0),
    ),
    "other rotary positions": Refused(
        "llama",
        "`rope_parameters['rope_theta']` of its LlamaConfig was 10000.0 when the model was "
        "parallelized and is 5.0 now",
        after=turn_faster,
    ),
    "rotary positions by length": Refused(
        "llama",
        "`rope_type` of 'model.rotary_emb' was 'default' when the model was parallelized and is "
        "'dynamic' now",
        after=lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"),
    ),
    "another loss": Refused(
        "bamba",
        "`z_loss_coefficient` of the model was 0.0 when the model was parallelized and is 0.5 now",
        after=lambda model: setattr(model, "z_loss_coefficient", 0.5),
    ),
    "both ways": Refused(
        "llama",
        "`is_causal` of its LlamaConfig was not there when the model was parallelized and is "
        "False now",
        after=configured(is_causal=False),
    ),
    "wants a cache": Refused("llama", "got `use_cache`: a cache holds", batch={"use_cache": True}),
    "has a cache": Refused(
        "llama", "got `past_key_values`: a cache holds", batch={"past_key_values": ()}
    ),
    "another sign for nothing to learn": Refused(
        "llama",
        "got `ignore_index`: targets that teach nothing are -100",
        batch={"ignore_index": 5},
    ),
    "one token's logits": Refused(
        "llama",
        "got `logits_to_keep`: every rank would keep",
        batch={"logits_to_keep": torch.tensor(0)},
    ),
    "an ownership of other tokens": Refused(
        "deepseek_v4",
        "the ownership has 16 tokens",
        layout=longspan.Ownership.contiguous(16, 2),
        when_equal=True,
    ),
    "an ownership of other ranks": Refused(
        "deepseek_v4",
        "the ownership has 3 ranks, the group 2",
        layout=longspan.Ownership.contiguous(24, 3),
    ),
    "a module swapped": Refused(
        "llama", "'model.layers.1.mlp' of LlamaForCausalLM was LlamaMLP when", after=swap_mlp
    ),
    "adapters added": Refused(
        "llama", "'model.layers.0.self_attn.q_proj' of LlamaForCausalLM was Linear", after=adapt
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_says_so_before_anything_is_sent(name: str) -> None:
    case = CASES[name]

    def body(group: Group) -> str:
        model = decoder(case.family, **case.options)
        sent = group.sent_bytes
        if not case.by_shard:
            with pytest.raises((ValueError, NotImplementedError)) as raised:
                longspan.parallelize(model, group)
        else:
            longspan.parallelize(model, group)
            case.after(model)
            batch = {key: value for key, value in (BATCH | case.batch).items() if value is not None}
            sent = group.sent_bytes
            with pytest.raises((ValueError, NotImplementedError)) as raised:
                longspan.shard(batch, group, model=model, layout=case.layout)
        assert case.when_equal or group.sent_bytes == sent
        return str(raised.value)

    for said in run_ranks(2, body):
        who = "shard" if case.by_shard else "parallelize"
        assert re.match(f"{who}: {re.escape(case.message)}", said), said


def test_labels_that_a_rank_would_shift_alone() -> None:
    def body(group: Group) -> str:
        model = longspan.parallelize(decoder("llama"), group)
        local = longspan.shard(BATCH, group, model=model)
        assert model(**local).loss.isfinite()
        sent = group.sent_bytes
        with pytest.raises(ValueError) as raised:
            model(**{key: value for key, value in local.items() if key != "shift_labels"})
        assert group.sent_bytes == sent
        return str(raised.value)

    (message,) = set(run_ranks(2, body))
    assert message.startswith("LlamaForCausalLM: got `labels` without `shift_labels`, and would")


def test_layers_that_ranks_would_skip_at_random() -> None:
    (opt,) = (family for family in _families.families() if family.name == "opt")

    def body(group: Group) -> tuple[str, str]:
        model = longspan.parallelize(_families.made(opt, vocabulary=61), group)
        model.model.decoder.layerdrop = 0.5
        local = longspan.shard(BATCH, group, model=model)
        assert model(**local).loss.isfinite()  # nothing is skipped but in training
        sent = group.sent_bytes
        model.train()
        with pytest.raises(NotImplementedError) as by_shard:
            longspan.shard(BATCH, group, model=model)
        with pytest.raises(NotImplementedError) as by_call:
            model(**local)
        assert group.sent_bytes == sent
        model.model.decoder.layerdrop = 0.0
        assert model(**longspan.shard(BATCH, group, model=model)).loss.isfinite()
        return str(by_shard.value), str(by_call.value)

    (said,) = set(run_ranks(2, body))
    for who, message in zip(("shard", "OPTDecoder"), said, strict=True):
        assert message.startswith(
            f"{who}: OPTDecoder skips layers at random in training (layerdrop"
        )


@pytest.mark.parametrize("tile", [None, 4])
def test_what_a_call_says_that_changes_nothing_is_taken(tile: int | None) -> None:
    model = longspan.parallelize(decoder("llama"), loss_tile=tile)
    local = longspan.shard(BATCH, model=model)
    loss = model(**local).loss
    assert model(**local, ignore_index=-100, logits_to_keep=0).loss.equal(loss)
    for given in ({"ignore_index": 0}, {"ignore_index": None}, {"logits_to_keep": torch.tensor(0)}):
        with pytest.raises(
            NotImplementedError, match=f"LlamaForCausalLM: got `{next(iter(given))}`"
        ):
            model(**local, **given)


def test_an_edit_that_changes_no_answer_is_taken_and_one_set_back_too() -> None:
    model = longspan.parallelize(decoder("gemma4"))
    expected = model(**longspan.shard(BATCH, model=model)).loss
    configured(use_cache=True, pad_token_id=7, architectures=["Mine"], a_note_of_mine="x")(model)
    configured(layer_types=["full_attention"] * 4, sliding_window=4)(model)
    configured(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=5)(model)
    assert model(**longspan.shard(BATCH, model=model)).loss.equal(expected)


def test_positions_of_pads_are_free_beside_pools() -> None:
    model = longspan.parallelize(decoder("deepseek_v4"))
    mask = (torch.arange(12) >= 3).long()[None]
    batch = {"input_ids": BATCH["input_ids"][:, :12], "attention_mask": mask}
    expected = model(**longspan.shard(batch, model=model)).logits[:, 3:]
    batch["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as generate has it
    found = model(**longspan.shard(batch, model=model)).logits[:, 3:]
    assert found.equal(expected)


def test_an_edit_after_the_batch_was_cut_is_seen_by_the_call() -> None:
    model = longspan.parallelize(decoder("llama"))
    local = longspan.shard(BATCH, model=model)
    plain = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: `_attn_implementation` of its Llama"):
        model(**local)
    model.config._attn_implementation = plain
    assert model(**local).loss.isfinite()


def test_the_configuration_that_a_model_was_made_with() -> None:
    """Without us the model would go by it, so an edit does not pass unheard."""
    model = decoder("llama")
    config = model.config
    longspan.parallelize(model)
    config.rms_norm_eps = 0.5
    with pytest.raises(ValueError, match="shard: `rms_norm_eps` of its LlamaConfig was 1e-06 when"):
        longspan.shard(BATCH, model=model)
    longspan.parallelize(longspan.restore(model))  # the way out
    assert model(**longspan.shard(BATCH, model=model)).loss.isfinite()


def test_rotary_tables_that_a_configuration_says_no_more() -> None:
    """Modules keep what it said when they were made."""

    def make() -> Any:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        model = decoder("llama", rope_parameters=rope)
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
        return model

    assert told(make, NotImplementedError) == (
        "parallelize: 'model.rotary_emb' chooses its rotary frequencies by the longest position "
        "at hand (rope_type 'dynamic'), which differs from rank to rank, and with pads; make the "
        "model with a rope_type with fixed frequencies, such as 'yarn' or 'default'"
    )


@pytest.mark.parametrize("window", [9, None])
def test_a_layer_with_another_window_than_its_configuration(window: int | None) -> None:
    def make() -> Any:
        model = decoder("gemma4")
        model.model.layers[2].self_attn.sliding_window = window
        return model

    assert told(make, ValueError).startswith(
        f"parallelize: `sliding_window` of 'model.layers.2.self_attn' is {window}, and its "
        f"Gemma4TextConfig says 5: masks are made by the one and attention is called with the other"
    )


def test_a_softcap_that_the_plain_model_leaves_out() -> None:
    """Some versions of transformers choose SDPA for Gemma 2, which takes no softcap."""

    def make(softcap: float | None = 2.0, attends: str = "sdpa") -> Any:
        model = decoder("gemma2", attn_logit_softcapping=softcap)
        model.config._attn_implementation = attends
        return model

    def logits(model: Any) -> torch.Tensor:
        return model(input_ids=torch.arange(1, 9)[None], use_cache=False).logits

    without = logits(make(None))
    assert not torch.allclose(logits(make(attends="eager")), without)
    try:
        torch.testing.assert_close(logits(make()), without)
    except ValueError as error:  # as newer versions say themselves
        assert "softcap" in str(error)

    assert told(make, ValueError) == (
        "parallelize: 'model.layers.0.self_attn' has a softcap of 2, which SDPA leaves out, and "
        "the model attends by SDPA; load it with attn_implementation='eager' to have the softcap "
        "on one rank too, or with attn_logit_softcapping=None to go without"
    )
    longspan.restore(longspan.parallelize(make(None)))
    longspan.restore(longspan.parallelize(make(attends="eager")))


# ---- What two ranks are told alike of models themselves.


class Strange(transformers.LlamaForCausalLM):
    """Takes more than a configuration, so that no twin of it can be built."""

    def __init__(self, config: Any, more: int) -> None:
        super().__init__(config)
        self.more = more


def told(make: Callable[[], Any], kind: type[Exception]) -> str:
    """What `parallelize` tells both ranks, before anything is sent."""

    def body(group: Group) -> str:
        model, sent = make(), group.sent_bytes
        before = parts_of(model)
        with pytest.raises(kind) as raised:
            longspan.parallelize(model, group)
        assert group.sent_bytes == sent and parts_of(model) == before
        return str(raised.value)

    (message,) = set(run_ranks(2, body))
    return message


@pytest.mark.parametrize("version", ["5.16.0", "6.0.0"])
def test_every_rank_names_a_transformers_outside_of_the_range(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    assert told(lambda: decoder("llama"), ImportError).startswith(
        f"parallelize: transformers {version} is installed, and 5.17 up to below 6 is understood"
    )


def test_every_rank_names_an_attention_with_masks_of_its_own() -> None:
    (doge,) = (family for family in _families.families() if family.name == "doge")
    assert told(lambda: _families.made(doge), NotImplementedError) == (
        "parallelize: 'model.layers.0.self_attn' (DogeAttention) does not say that it is causal "
        "(is_causal), as layers do that leave masks to transformers: which keys it sees is its "
        "own matter, and nobody has looked at it; call longspan.attend in place of its attention"
    )


def test_every_rank_names_a_twin_that_does_not_build() -> None:
    config = decoder("llama").config
    assert told(lambda: Strange(copy.deepcopy(config), 3), NotImplementedError).startswith(
        "parallelize: no twin of this model can be made: Strange with small sizes does not build: "
        "TypeError: "
    )


ON_QUERIES = {"target_modules": ["q_proj"]}
OF_WHOLE_ROWS = {
    "LoraConfig": ("an aLoRA: it looks for", {**ON_QUERIES, "alora_invocation_tokens": [3]}),
    "PromptTuningConfig": ("of kind PROMPT_TUNING: it puts tok", {"num_virtual_tokens": 2}),
    "PromptEncoderConfig": ("of kind P_TUNING: it puts tok", {"num_virtual_tokens": 2}),
    "PrefixTuningConfig": ("of kind PREFIX_TUNING: it puts tok", {"num_virtual_tokens": 2}),
}


@pytest.mark.parametrize("kind", OF_WHOLE_ROWS)
def test_every_rank_names_an_adapter_that_wants_whole_rows(kind: str) -> None:
    what, options = OF_WHOLE_ROWS[kind]
    message = told(lambda: adapted(kind, **options), NotImplementedError)
    assert message.startswith(f"parallelize: the adapter 'default' is {what}"), message
    assert message.endswith("use LoRA (without alora_invocation_tokens) instead")


def test_every_rank_names_an_adapter_that_is_not_known() -> None:
    """The experts of Lily are weighed by all tokens, which shows once it has learned."""
    message = told(lambda: adapted("LilyConfig", **ON_QUERIES), NotImplementedError)
    assert message.startswith(
        "parallelize: 'base_model.model.model.layers.0.self_attn.q_proj' is an adapter of kind "
        "lily, which is not known to take tokens one by one; use another, such as LoRA"
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LoraConfig", ON_QUERIES),
        ("LoraConfig", {**ON_QUERIES, "use_dora": True}),
        ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": []}),
    ],
)
def test_adapters_of_tokens_are_let_in(kind: str, options: dict[str, Any]) -> None:
    longspan.shard(BATCH, model=longspan.parallelize(adapted(kind, **options)))


def test_attention_weights_are_none_on_every_rank_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_model_inputs, "_warned", False)

    def body(group: Group) -> Any:
        model = longspan.parallelize(decoder("llama"), group)
        local = longspan.shard({**BATCH, "output_attentions": True}, group, model=model)
        return model(**local).attentions

    with pytest.warns(UserWarning, match="`output_attentions` gives None for every layer") as said:
        answers = run_ranks(2, body)
    assert len([one for one in said if "output_attentions" in str(one.message)]) == 1
    assert all(one is None for weights in answers for one in weights or ())


def test_two_models_that_share_a_configuration_on_every_rank() -> None:
    """One is parallelized and the other stays plain; each says what it misses."""

    def body(group: Group) -> tuple[str, str]:
        one = decoder("llama")
        two = type(one)(one.config).double()
        plain = two(input_ids=BATCH["input_ids"]).logits
        longspan.parallelize(one, group)
        assert two.config is not one.config
        assert two(input_ids=BATCH["input_ids"]).logits.equal(plain)
        sent = group.sent_bytes
        with pytest.raises(ValueError) as unsharded:
            one(input_ids=BATCH["input_ids"])
        with pytest.raises(ValueError) as unknown:
            longspan.shard(BATCH, group, model=two)
        assert group.sent_bytes == sent
        longspan.restore(one)
        assert two.config is one.config
        return str(unsharded.value), str(unknown.value)

    ((unsharded, unknown),) = set(run_ranks(2, body))
    assert "called without a sharded batch" in unsharded
    assert unknown.startswith("shard: this LlamaForCausalLM is not parallelized")


# ---- By what a loss is divided.

COUNTS: list[tuple[Any, str]] = [
    (0, "is 0, by which the loss is divided; expected the targets of the whole batch"),
    (-5, "is -5, by which"),
    (float("nan"), "is nan, by which"),
    (float("inf"), "is inf, by which"),
    (torch.tensor(-5), "is -5, by which"),
    (torch.tensor(float("nan")), "is nan, by which"),
    (True, "is a bool; expected a number"),
    ("7", "is a str; expected a number"),
    (torch.tensor(True), r"is a bool tensor \[\]; expected one number"),
    (torch.tensor([3, 3]), r"is an int64 tensor \[2\]; expected one number"),
]


@pytest.mark.parametrize(("count", "words"), COUNTS, ids=lambda value: str(value)[:24])
def test_a_count_that_is_none(count: Any, words: str) -> None:
    model = longspan.parallelize(decoder("llama"))
    given = BATCH | {"labels": BATCH["input_ids"], "num_items_in_batch": count}
    with pytest.raises((ValueError, TypeError), match=f"^shard: `num_items_in_batch` {words}"):
        longspan.shard(given, model=model)
    local = longspan.shard(BATCH, model=model) | {"num_items_in_batch": count}
    with pytest.raises((ValueError, TypeError), match=f"^LlamaForCausalLM: `num_items_.*` {words}"):
        model(**local)


@pytest.mark.parametrize("count", [7, 7.0, torch.tensor(7), torch.tensor([7.0])], ids=str)
def test_a_count_of_any_type(count: Any) -> None:
    model = longspan.parallelize(decoder("llama"))
    local = longspan.shard(BATCH, model=model)
    expected = model(**local).loss * local["num_items_in_batch"] / 7
    found = model(**local | {"num_items_in_batch": count}).loss
    torch.testing.assert_close(found.sum(), expected, check_dtype=False)
