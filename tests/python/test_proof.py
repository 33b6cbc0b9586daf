"""The proof that lets models in: what it leaves alone, what it costs, what it cannot look
at, and models that change behind its back."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

import transformers
from oracle.tiny_decoders import decoder, packed
from processes import outputs_of, start_ranks

from longspan import _admission, _model_inputs
from longspan._sources import Sources
from longspan.proof import prove


def fresh(**options: Any) -> Any:
    """A Llama that this process has not seen: its configuration is a new one."""
    fresh.count += 1  # type: ignore[attr-defined]
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
        initializer_range=1e-2 + 1e-6 * fresh.count, **options,  # type: ignore[attr-defined]
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


fresh.count = 0  # type: ignore[attr-defined]


def everything(model: nn.Module) -> dict[str, Any]:
    """All there is to know about a model, to be compared later."""
    state = {f"state {k}": v.clone() for k, v in model.state_dict().items()}
    return state | {
        f"{name}.{key}": copy.copy(value) if isinstance(value, (dict, list, set)) else value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    } | {f"{name} class": type(module) for name, module in model.named_modules()}  # fmt: skip


def check_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert value.equal(after[key]), key
        elif isinstance(value, (dict, list, set, int, float, str)):
            assert value == after[key], key
        else:
            assert value is after[key], key


# ---- What it says.


def test_it_says_what_holds() -> None:
    found = prove(decoder("gemma3"))
    assert found and found.refusal is None
    assert found.shown == ("numbering", "isolation", "order", "ruler")
    assert str(found).startswith("Gemma3ForCausalLM: numbering, isolation, order, ruler hold on")


def test_it_says_who_is_to_blame() -> None:
    model = decoder("llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x).roll(1, 1)
    found = prove(model)
    assert not found
    assert str(found).startswith(
        "LlamaForCausalLM may not be cut: 'model.layers.0.mlp' (LlamaMLP) mixes tokens outside"
    )
    found = prove(nn.Linear(2, 2))
    assert not found and "holds no transformers model" in str(found)


def test_explain_says_what_let_a_model_in() -> None:
    batch = packed([7]).batch
    said = str(longspan.explain(longspan.parallelize(decoder("llama")), batch)).splitlines()
    assert "let in: LlamaForCausalLM: isolation, order, numbering and ruler hold on a twin" in said
    skipped = longspan.explain(longspan.parallelize(decoder("llama"), proof=False), batch)
    assert "let in: not proved (proof=False)" in str(skipped).splitlines()
    assert skipped.to_json()["proof"] == "not proved (proof=False)"
    assert longspan.explain(decoder("llama"), batch).proof == ""


def test_a_wish_that_is_none() -> None:
    for wish in (True, "yes", None, 3, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r'`proof` is .*; expected "auto", False or a small'):
            longspan.parallelize(decoder("llama"), proof=wish)
    with pytest.raises(TypeError, match=r"prove: `twin` is .*; expected a small model of trans"):
        prove(decoder("llama"), twin=nn.Linear(2, 2))


# ---- What it leaves alone.


def test_random_numbers_and_the_model_are_left_alone() -> None:
    model = fresh()
    before, random = everything(model), torch.get_rng_state()
    assert prove(model)
    check_same(before, everything(model))
    assert torch.get_rng_state().equal(random)
    assert all(p.grad is None for p in model.parameters())


def test_settings_of_the_caller_do_not_reach_it() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert prove(fresh())
    with torch.inference_mode():
        model = fresh()
        assert prove(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert prove(fresh())
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        model = fresh()
        assert prove(model)
    assert next(model.parameters()).is_meta
    longspan.parallelize(model)


def _swap_mixing(model: Any) -> None:
    layer = model.model.layers[1]
    layer.mlp = nn.Sequential(layer.mlp, _Neighbour())


class _Neighbour(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.roll(1, 1)


@pytest.mark.parametrize("why", ["static", "proof", "set up", "swapped"])
def test_a_refused_model_is_as_it_was(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    if why == "static":
        model.config.is_encoder_decoder = True
    elif why == "proof":
        mlp = model.model.layers[0].mlp
        mlp.forward = types.MethodType(lambda self, x: x.roll(1, 1), mlp)
    elif why == "swapped":
        _swap_mixing(model)
    else:
        from longspan import _transformers

        def fail(model: Any) -> Any:
            raise RuntimeError("somewhere in the middle")

        monkeypatch.setattr(_transformers, "entrances", fail)
    model.train()
    model.model.layers[0].eval()
    before = everything(model)
    with pytest.raises((NotImplementedError, RuntimeError)):
        longspan.parallelize(model, proof=False if why == "set up" else "auto")
    check_same(before, everything(model))


# ---- What it costs.


def test_it_is_done_once_for_a_class_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    longspan.restore(longspan.parallelize(model))

    def again(_: Any) -> Any:
        raise AssertionError("it was proved before")

    monkeypatch.setattr(longspan._proving, "prove", again)
    longspan.restore(longspan.parallelize(model))
    with pytest.raises(AssertionError, match="proved before"):
        longspan.parallelize(fresh())


def test_another_configuration_has_a_proof_of_its_own() -> None:
    before = len(_admission._known)
    assert prove(fresh()) and prove(fresh())
    assert len(_admission._known) == before + 2


def test_it_takes_less_than_a_second_or_so() -> None:
    found = min((prove(fresh()) for _ in range(2)), key=lambda one: one.seconds)
    assert found.seconds < 5  # 0.3 s on two idle cores


def test_many_layers_take_no_longer() -> None:
    """Layers of one kind are shown by two of them; kinds that come late are there."""
    config = transformers.Gemma3TextConfig(
        **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 26},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    twin = _admission.known_of(model).twin
    assert twin.config.layer_types == ["sliding_attention", "full_attention"]
    assert len(twin.model.layers) == 2 and twin.config.sliding_window == 5


# ---- Modules that were swapped in before.


def test_a_harmless_swap_is_looked_at_on_the_model_itself() -> None:
    model = fresh()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, nn.Tanh())
    longspan.parallelize(model)
    said = longspan.explain(model, packed([7]).batch).proof
    assert said.endswith(
        "isolation and order on the model itself, for 'model.layers.*.mlp' (Sequential)"
    )


def test_a_swap_that_mixes_is_named() -> None:
    model = fresh()
    _swap_mixing(model)
    message = r"'model.layers.1.mlp.1' \(_Neighbour\) mixes tokens outside attention"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)
    longspan.parallelize(model, proof=False)


def test_a_swap_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = fresh()
        model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp)
    with pytest.raises(NotImplementedError, match=r"on the meta device\) it cannot be looked at"):
        longspan.parallelize(model)


class _Doubled(nn.Embedding):
    """One id at a time."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


class _Parts(_Doubled):
    """Tokens behind the one that begins a part are told so; 37 random ids have it rarely."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + (ids == 4500).cumsum(-1).unsqueeze(-1)


class _Pairs(nn.Module):
    """Looks pairs of ids up, and has no table of single ones."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, channels)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows((ids + 3 * ids.roll(1, -1)) % 7)
        return found


def embedded_by(embeddings: nn.Module) -> Any:
    model = decoder("llama", torch.float32, vocab_size=5000)
    model.set_input_embeddings(embeddings)
    return model


def test_adapters_are_known() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(fresh(), lora)
    longspan.parallelize(model)
    said = longspan.explain(model, packed([7]).batch).proof
    assert said == "LlamaForCausalLM: isolation, order, numbering and ruler hold on a twin"


@pytest.mark.slow
def test_swaps_under_fully_shard_are_looked_at_by_all_ranks() -> None:
    processes = start_ranks("proof_two_ranks.py", 2)
    outputs = outputs_of(processes, timeout=200)
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    for output in outputs:
        lines = output.splitlines()
        expected = ("harmless", "named", "sharded afterwards", "embeddings", "hooks")
        assert all(name in lines for name in expected)


class Holder(nn.Module):
    """Of a user: its own forward around a decoder."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, **batch: Any) -> Any:
        return self.decoder(**batch).logits.cumsum(1)


def test_what_is_around_a_model_of_transformers() -> None:
    message = r"\(Holder\) holds LlamaForCausalLM and is no model of transformers itself, so nobody"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(Holder(fresh()))
    assert "(Holder) holds" in str(prove(Holder(fresh())))
    longspan.parallelize(Holder(fresh()), proof=False)
    longspan.parallelize(torch.compile(fresh()))
    dealing = nn.DataParallel(fresh())
    longspan.parallelize(dealing)  # to one device, or none
    longspan.restore(dealing).device_ids = [0, 1]
    with pytest.raises(NotImplementedError, match=r"\(DataParallel\) deals the rows of a rank's"):
        longspan.parallelize(dealing)


# ---- What is another forward in training.


class _Centered(transformers.models.llama.modeling_llama.LlamaMLP):  # type: ignore[misc]
    """Takes the mean of its tokens off where it learns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        return found - found.mean(1, keepdim=True) if self.training else found


class _Counting(nn.Module):
    """Drops, and keeps something of what it was trained on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("size", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.last = x.detach()[0, 0].sum()
            self.size += self.last
        found: torch.Tensor = nn.functional.dropout(self.inner(x), 0.5, self.training)
        return found


@pytest.mark.parametrize("wrapped", [False, True], ids=["its twin has it", "nobody's twin"])
def test_modules_that_mix_in_training_alone_are_named(wrapped: bool) -> None:
    model = fresh()
    for layer in model.model.layers:
        layer.mlp.__class__ = _Centered
        if wrapped:
            layer.mlp = nn.Sequential(layer.mlp)
    message = r"'model.layers.0.mlp(.0)?' \(_Centered\) mixes tokens outside attention in training"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)


def test_what_drops_and_counts_in_training_is_let_in_as_it_was() -> None:
    model = fresh(attention_dropout=0.0).train()
    for layer in model.model.layers:
        layer.mlp = _Counting(layer.mlp)
    before, random = everything(model), torch.get_rng_state()
    longspan.restore(longspan.parallelize(model))
    check_same(before, everything(model))
    assert torch.get_rng_state().equal(random)
    assert all(layer.mlp.size == 0 for layer in model.model.layers)


class _Remembering(_Counting):
    """And goes by that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.size.sigmoid()


@pytest.mark.parametrize("training", [False, True])
def test_states_that_come_of_the_tokens_of_a_call_are_refused(training: bool) -> None:
    model = fresh().train(training)
    for layer in model.model.layers:
        layer.mlp = _Remembering(layer.mlp)
    before = everything(model)
    message = r"'model.layers.0.mlp.size' keeps in training what the tokens of a call were like"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)
    check_same(before, everything(model))


class _Added(torch.autograd.Function):
    """A loss that is there in backward alone, as some experts balance themselves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient.new_ones(())


class _Balanced(transformers.models.llama.modeling_llama.LlamaMLP):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        if not self.training:
            return found
        loss = self.gate_proj(x).softmax(-1).flatten(0, 1).mean(0).square().sum()
        return _Added.apply(found, loss)  # type: ignore[no-any-return, no-untyped-call]


def test_losses_that_modules_add_in_backward_are_noticed() -> None:
    model = fresh()
    for layer in model.model.layers:
        layer.mlp.__class__ = _Balanced
    message = r"'model.layers.1.\S+' gets another gradient in training from tokens together than"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)


class _Own(nn.Module):
    """A module that no twin has, with a loss of what its gate says; `kind` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate, self.up = kind, nn.Linear(32, 4), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.up(x).relu()
        if self.kind == "balance":
            loss = self.gate(x).softmax(-1).flatten(0, 1).mean(0).square().sum()
        elif self.kind == "balance of a router that learns alone":
            loss = 1e-4 * self.gate(x.detach()).softmax(-1).flatten(0, 1).mean(0).square().sum()
        elif self.kind == "a mean":
            loss = self.gate(x).logsumexp(-1).square().mean()
        elif self.kind == "a sum":
            loss = self.gate(x).logsumexp(-1).square().sum()
        elif self.kind == "a norm of gradients":
            return _Normed.apply(found)  # type: ignore[no-any-return, no-untyped-call]
        else:
            return found + self.gate(x).sum(-1, keepdim=True)
        return _Added.apply(found, loss)  # type: ignore[no-any-return, no-untyped-call]


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / (gradient.norm() + 1e-12)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("balance", r"'model.layers.1.mlp' \(_Own\) gives back"),
        ("balance of a router that learns alone", r"'model.layers.1.mlp.gate.\w+' gets"),
        ("a mean", r"'model.layers.1.mlp' \(_Own\) gives back"),
        ("a norm of gradients", r"'model.layers.1.mlp' \(_Own\) gives back"),
        ("a sum", None),
        ("none", None),
    ],
)
def test_losses_that_swapped_modules_add_in_backward_are_noticed(
    kind: str, where: str | None
) -> None:
    """On the model itself, whose gradients and modes stay as they are."""
    model = fresh().train()
    model.model.layers[1].mlp = _Own(kind)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.model.embed_tokens.requires_grad_(False)
    if where is None:
        longspan.parallelize(model)
    else:
        message = f"parallelize: {where} another gradient in training for tokens together"
        with pytest.raises(NotImplementedError, match=message):
            longspan.parallelize(model)
    graded = [name for name, p in model.named_parameters() if p.grad is not None]
    assert graded == ["lm_head.weight"]
    assert bool((model.lm_head.weight.grad == 1).all())
    assert all(module.training for module in model.modules())


def test_norms_of_a_batch_are_refused() -> None:
    model = fresh()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, nn.BatchNorm1d(48))
    with pytest.raises(NotImplementedError, match=r"mlp.1' \(BatchNorm1d\) mixes tokens outside"):
        longspan.parallelize(model)


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "max_norm"])
def test_tables_that_go_by_the_ids_of_a_batch_are_refused(option: str) -> None:
    model = fresh()
    setattr(model.model.embed_tokens, option, 1.0)
    message = rf"'model.embed_tokens' \(Embedding\) .* \({option}\), and a rank has other ids"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)


# ---- Input embeddings that somebody wrote.


@pytest.mark.parametrize("training", [False, True])
def test_embeddings_of_somebody_else_are_tried_with_every_id(training: bool) -> None:
    model = embedded_by(_Doubled(5000, 32)).train(training)
    longspan.parallelize(model)
    assert model.model.embed_tokens.training == training
    mixing = embedded_by(_Parts(5000, 32))
    before = everything(mixing)
    message = (
        r"parallelize: 'model.embed_tokens' \(_Parts\) looks at other tokens: .*; make the "
        r"embeddings of the whole batch before `shard` and give them as `inputs_embeds`"
    )
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(mixing)
    check_same(before, everything(mixing))
    assert "(_Parts) looks at other tokens" in str(prove(mixing))
    longspan.parallelize(mixing, proof=False)


def test_embeddings_that_are_no_table_are_refused() -> None:
    message = r"'model.embed_tokens' \(_Pairs\) embeds tokens and has no table of ids"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(embedded_by(_Pairs(32)))
    with torch.device("meta"):
        unborn = embedded_by(_Doubled(5000, 32))
    with pytest.raises(NotImplementedError, match=r"\(_Doubled\) .*on the meta device"):
        longspan.parallelize(unborn)


# ---- What cannot be twinned.


class Strange(transformers.LlamaForCausalLM):
    """Takes more than a configuration."""

    def __init__(self, config: Any, more: int) -> None:
        super().__init__(config)
        self.more = more


def test_a_twin_that_does_not_build() -> None:
    model = Strange(fresh().config, 3)
    message = (
        r"parallelize: no twin of this model can be made: Strange with small sizes does not build: "
        r"TypeError: .*'more'; pass proof=\.\.\. a small model of the same classes on the CPU, or "
        r"proof=False to go without"
    )
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)
    longspan.parallelize(model, proof=False)
    longspan.restore(model)
    small = Strange(fresh().config, 5)
    before = everything(small)
    longspan.parallelize(model, proof=small)
    check_same(before, everything(small))
    assert "hold on a twin" in longspan.explain(model, packed([7]).batch).proof


ONLY_FULL = {"layer_types": ["full_attention"] * 2}
NO_TWINS = {
    "another family": (
        "llama", lambda: decoder("qwen3"),
        "is a Qwen3ForCausalLM, which shows nothing about a LlamaForCausalLM; give a small Llama",
    ),
    "a class derived from it": (
        "llama", lambda: Strange(fresh().config, 5),
        "is a Strange, which shows nothing about a LlamaForCausalLM",
    ),
    "no windows": (
        "gemma3", lambda: decoder("gemma3", **ONLY_FULL),
        "has no layer that attends as 'model.layers.0.self_attn' does (a window), so it shows noth",
    ),
    "no softcaps": (
        "gemma2", lambda: decoder("gemma2", attn_logit_softcapping=None),
        "has no layer that attends as 'model.layers.0.self_attn' does (a window, a softcap)",
    ),
    "windows that nothing fills": (
        "mistral", lambda: decoder("mistral", sliding_window=4096),
        "is 4096 tokens, and documents of 74 would not show it; give one with smaller windows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_TWINS)
def test_a_twin_that_shows_nothing_is_refused_on_every_rank(what: str) -> None:
    family, make, message = NO_TWINS[what]

    def body(group: Group) -> str:
        model, sent = decoder(family), group.sent_bytes
        with pytest.raises(ValueError) as raised:
            longspan.parallelize(model, group, proof=make())
        assert group.sent_bytes == sent
        assert not any("_longspan" in vars(module) for module in model.modules())
        return str(raised.value)

    (said,) = set(run_ranks(2, body))
    assert said.startswith("parallelize: ") and "`proof`" in said and message in said, said
    with pytest.raises(ValueError, match=r"prove: .*`twin`"):
        prove(decoder(family), twin=make())


@pytest.mark.parametrize("family", ["llama", "gemma3", "glm_moe_dsa"])
def test_a_twin_of_the_same_classes_is_taken(family: str) -> None:
    longspan.parallelize(decoder(family), proof=decoder(family))


@pytest.mark.parametrize("version", ["4.57.1", "5.16.0", "6.0.0"])
def test_another_transformers(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=f"transformers {version} is installed, and 5.17 up to"):
        longspan.parallelize(model)
    with pytest.raises(ImportError, match="is understood; install one of those"):
        longspan.parallelize(model, proof=False)


# ---- Models that change behind its back.


def test_a_module_swapped_afterwards() -> None:
    model = longspan.parallelize(fresh())
    longspan.shard(packed([7]).batch, model=model)
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp)
    message = (
        r"shard: 'model.layers.1.mlp' of LlamaForCausalLM was LlamaMLP when the model was "
        r"parallelized and is Sequential now, which nobody has looked at; call longspan.restore"
    )
    with pytest.raises(ValueError, match=message):
        longspan.shard(packed([7]).batch, model=model)
    longspan.restore(model)
    longspan.shard(packed([7]).batch, model=longspan.parallelize(model))


def test_a_forward_swapped_afterwards() -> None:
    model = longspan.parallelize(fresh())
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp' of .* is LlamaMLP with the forwar"):
        longspan.shard(packed([7]).batch, model=model)


def _rolls(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 1)


def _halves(x: torch.Tensor) -> torch.Tensor:
    return x.roll(x.shape[-1] // 2, -1)


#: Where somebody puts other code than was proved, by the name that messages have for it.
PATCHED = {
    "LlamaMLP.forward": ("LlamaMLP", "forward", _rolls),
    "LlamaRMSNorm.__call__": ("LlamaRMSNorm", "__call__", _rolls),
    "modeling_llama.rotate_half": (None, "rotate_half", _halves),
}


@pytest.mark.parametrize("patched", PATCHED)
def test_other_code_behind_the_same_classes(patched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof holds for the code that ran in it."""
    module = sys.modules["transformers.models.llama.modeling_llama"]
    home, name, code = PATCHED[patched]
    owner = module if home is None else getattr(module, home)
    config = {"max_position_embeddings": 1024}
    model = longspan.parallelize(decoder("llama", **config))
    batch = packed([7]).batch
    longspan.shard(batch, model=model)
    with monkeypatch.context() as other:
        other.setattr(owner, name, code, raising=name != "__call__")
        message = rf"shard: \S*{patched}, which LlamaForCausalLM runs, is another than when the mod"
        with pytest.raises(ValueError, match=message):
            longspan.shard(batch, model=model)
        if code is _rolls:
            with pytest.raises(NotImplementedError, match="mixes tokens outside attention"):
                longspan.parallelize(decoder("llama", **config))
        else:  # another rotation, and tokens stay alone
            longspan.parallelize(decoder("llama", **config))
    longspan.shard(batch, model=model)
    longspan.parallelize(decoder("llama", **config))


def test_code_that_is_called_by_name_is_followed() -> None:
    kinds = {type(module) for module in fresh().modules()}
    found = {said.rpartition("transformers.")[2] for *_, said in Sources(kinds)._entries}
    assert found >= {
        "LlamaForCausalLM.forward", "LlamaAttention.forward", "Linear.forward",
        "PreTrainedModel.loss_function", "models.llama.modeling_llama.apply_rotary_pos_emb",
        "models.llama.modeling_llama.rotate_half", "masking_utils.find_packed_sequence_indices",
    }  # fmt: skip


def test_adapters_added_afterwards() -> None:
    peft = pytest.importorskip("peft")
    model = longspan.parallelize(fresh())
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    message = r"'model.layers.0.self_attn.q_proj' of .* was Linear when .* and is peft's Linear now"
    with pytest.raises(ValueError, match=message):
        longspan.shard(packed([7]).batch, model=adapted)
    longspan.restore(adapted)
    longspan.shard(packed([7]).batch, model=longspan.parallelize(adapted))


def test_wrappers_afterwards_are_no_change() -> None:
    """Autocast around the whole forward, as trainers put it, and compiled layers."""
    model = longspan.parallelize(fresh())
    plain = model.forward
    model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(plain.__func__), model)
    model.model.layers[1] = torch.compile(model.model.layers[1])
    model.model.layers[0].compile()
    longspan.shard(packed([7]).batch, model=model)


def test_two_models_that_share_a_configuration() -> None:
    one = fresh()
    two = type(one)(one.config)
    ids = packed([7]).ids
    plain = two(input_ids=ids).logits
    longspan.parallelize(one)
    assert two(input_ids=ids).logits.equal(plain)
    longspan.parallelize(two)
    longspan.restore(one)
    assert one(input_ids=ids).logits.shape == plain.shape
    with pytest.raises(ValueError, match="called without a sharded batch"):
        two(input_ids=ids)
    longspan.restore(two)
    assert two(input_ids=ids).logits.equal(plain)
    assert one.config is two.config


# ---- Ranks.


def test_ranks_with_different_families() -> None:
    def body(group: Group) -> str:
        model = decoder(("llama", "qwen3")[group.rank()])
        with pytest.raises(ValueError) as raised:
            longspan.parallelize(model, group)
        return str(raised.value)

    for message, name in zip(run_ranks(2, body), ("Llama", "Qwen3"), strict=True):
        assert message.startswith(
            "parallelize: the ranks of the group were given different `model` (rank 1 differs from "
            "rank 0) and `configuration` (rank 1"
        )
        assert message.endswith(f"this one has {name}ForCausalLM; give every rank the same")


def test_all_ranks_hear_what_rank_0_found() -> None:
    models = [fresh()]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        mlp = model.model.layers[0].mlp
        mlp.forward = types.MethodType(lambda self, x: x.roll(1, 1), mlp)

    def body(group: Group) -> str:
        with pytest.raises(NotImplementedError) as raised:
            longspan.parallelize(models[group.rank()], group)
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first.startswith("parallelize: 'model.layers.0.mlp' (LlamaMLP) mixes tokens")
    assert second.startswith("parallelize: rank 0: NotImplementedError: " + first[:40])


def test_one_rank_that_refuses_for_itself() -> None:
    """The others hear of it, and nobody waits."""

    def body(group: Group) -> str:
        model = fresh() if group.rank() else decoder("llama")
        if group.rank():
            model.config.is_encoder_decoder = True
        with pytest.raises((NotImplementedError, ValueError)) as raised:
            longspan.parallelize(model, group)
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert second in first and "has an encoder; give a decoder" in second


# ---- What a rank cannot answer.


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_cache", True, "a cache holds the keys of whole rows"),
        ("past_key_values", (), "a cache holds the keys of whole rows"),
        ("logits_to_keep", 1, "every rank would keep the last tokens of its own share; take them"),
        ("cross_attention_states", torch.ones(1, 7, 32), "attends to states that are no tokens"),
        ("encoder_hidden_states", torch.ones(1, 7, 32), "attends to states that are no tokens"),
    ],
)
def test_what_a_rank_cannot_answer(key: str, value: Any, message: str) -> None:
    model = longspan.parallelize(decoder("llama"))
    batch = {"input_ids": packed([7]).ids}
    with pytest.raises(NotImplementedError, match=f"shard: got `{key}`: {message}"):
        longspan.shard({**batch, key: value}, model=model)
    local = longspan.shard({**batch, "logits_to_keep": 0, "use_cache": False}, model=model)
    with pytest.raises(NotImplementedError, match=f"LlamaForCausalLM: got `{key}`: {message}"):
        model(**(local | {key: value}))


def test_image_states_of_mllama() -> None:
    """As many as a share has tokens: no shape would show it."""
    config = transformers.MllamaConfig().text_config
    from longspan._shrinking import shrunk

    model = transformers.MllamaForCausalLM(shrunk(config, range(4))).double()
    longspan.parallelize(model)
    batch = {"input_ids": packed([8]).ids, "cross_attention_states": torch.ones(1, 8, 64)}
    with pytest.raises(NotImplementedError, match="got `cross_attention_states`: attends to state"):
        longspan.shard(batch, model=model)


def test_attention_weights_are_none_and_that_is_said_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(_model_inputs, "_warned", False)
    model = longspan.parallelize(decoder("llama"))
    batch = {"input_ids": packed([7]).ids, "output_attentions": True}
    with pytest.warns(UserWarning, match="`output_attentions` gives None for every layer"):
        local = longspan.shard(batch, model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model(**local)
    assert out.attentions is None or all(one is None for one in out.attentions)


# ---- Positions that begin behind the pad.


@pytest.mark.parametrize("family", ["roberta", "glm_moe_dsa"])
def test_parity_knows_what_shard_adds(family: str) -> None:
    """Numbers from behind the pad, and what stands in place of masks."""
    case = packed([6, 8])
    model = roberta().double() if family == "roberta" else decoder(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("key.bias"))  # whose gradient is 0
    models = [model.eval(), copy.deepcopy(model)]

    def body(group: Group) -> None:
        model = longspan.parallelize(models[group.rank()], group)
        longspan.check_parity(model, case.batch, group, tolerance=3e-6).raise_if_different()

    run_ranks(2, body)


def roberta() -> Any:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "pad_token_id": 1, "is_decoder": True},
    )
    return transformers.RobertaForCausalLM(config)


def test_given_positions_of_models_that_count_from_behind_the_pad() -> None:
    model = longspan.parallelize(roberta())
    ids = packed([3, 4]).ids
    made = longspan.shard({"input_ids": ids}, model=model)["position_ids"]
    assert made[0, :7].tolist() == [2, 3, 4, 5, 6, 7, 8]
    restarting = packed([3, 4]).batch
    assert longspan.shard(restarting, model=model)["position_ids"][0, :7].tolist() == [
        *(2, 3, 4),
        *(2, 3, 4, 5),
    ]
    own = {"input_ids": ids, "position_ids": torch.arange(2, 9)[None]}
    assert longspan.shard(own, model=model)["position_ids"][0, :7].tolist() == list(range(2, 9))
    # As DataCollatorWithFlattening(position_ids_start=2) packs.
    own["position_ids"] = torch.tensor([[2, 3, 4, 2, 3, 4, 5]])
    local = longspan.shard(own, model=model)
    assert local["position_ids"][0, :7].tolist() == own["position_ids"][0].tolist()
    assert local.cut.packings[0].lengths == [3, 4]
