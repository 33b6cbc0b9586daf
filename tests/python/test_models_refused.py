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

from longspan import _model_inputs

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


def set_routers(model: Any) -> None:
    model.config.output_router_logits = True


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
        "llama", "output_router_logits is set, but LlamaForCausalLM", after=set_routers
    ),
    "wants a cache": Refused("llama", "got `use_cache`: a cache holds", batch={"use_cache": True}),
    "has a cache": Refused(
        "llama", "got `past_key_values`: a cache holds", batch={"past_key_values": ()}
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
