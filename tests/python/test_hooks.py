"""Hooks of users: code that no class of a model shows. Those that leave tokens alone stay, the
others are named."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

from oracle import tiny_images
from oracle.tiny_decoders import decoder, packed
from transformers.integrations.neftune import neftune_post_forward_hook

from longspan._local_batch import KEYWORD
from longspan.proof import prove

CASE = packed([7, 5])
MLP = "model.layers.1.mlp"
ATTENTION = "model.layers.1.self_attn"
Put = Callable[[Any], Any]


def centred(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    """Mixes tokens."""
    return out - out.mean(1, keepdim=True)


def doubled(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out * 2


def quiet(*_: Any) -> None:
    """Looks and says nothing."""


def centred_before(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0] - given[0].mean(1, keepdim=True), *given[1:])


def first_token(_: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    hidden = named["hidden_states"]
    return given, named | {"hidden_states": hidden + hidden[:, :1]}


class Centre:
    """A hook with a state, and one as a method."""

    def __call__(self, *call: Any) -> Tensor:
        return centred(*call)

    def method(self, *call: Any) -> Tensor:
        return centred(*call)


def after(place: str, hook: Any) -> Put:
    return lambda model: model.get_submodule(place).register_forward_hook(hook)


def before(place: str, hook: Any, **options: Any) -> Put:
    return lambda model: model.get_submodule(place).register_forward_pre_hook(hook, **options)


def on_all(model: Any) -> None:
    for module in model.modules():
        module.register_forward_hook(quiet)


def message_of(model: Any, group: Any = None) -> str:
    with pytest.raises(NotImplementedError) as raised:
        longspan.parallelize(model, group)
    assert not any("_longspan" in vars(module) for module in model.modules())
    return str(raised.value)


# ---- Before.


MIXING = {
    "after a module": (after(MLP, centred), "centred"),
    "before a module": (before(MLP, centred_before), "centred_before"),
    "on what is handed by name": (
        before(ATTENTION, first_token, with_kwargs=True),
        "first_token",
    ),
    "with more to say": (after(MLP, functools.partial(centred)), "centred"),
    "without gradients": (after(MLP, torch.no_grad()(centred)), "centred"),
    "an object": (after(MLP, Centre()), "Centre"),
    "a method": (after(MLP, Centre().method), "Centre.method"),
    "inside attention": (after(f"{ATTENTION}.k_proj", centred), "centred"),
}


@pytest.mark.parametrize("what", MIXING)
def test_a_hook_that_mixes_tokens_is_named(what: str) -> None:
    put, name = MIXING[what]
    model = decoder("llama")
    put(model)
    message = message_of(model)
    assert message.startswith("parallelize: 'model.layers.1."), message
    assert "mixes tokens outside attention" in message
    assert f"; it was looked at with the hook {name} on 'model.layers.1." in message, message
    found = prove(model)
    assert not found and "mixes tokens outside attention" in str(found)
    longspan.parallelize(model, proof=False)


@pytest.mark.parametrize("when", ["full_backward_hook", "full_backward_pre_hook"])
def test_a_hook_that_mixes_gradients_of_tokens_is_named(when: str) -> None:
    def normed(*call: Any) -> tuple[Tensor]:
        return (call[-1][0] / call[-1][0].norm(),)

    def halved(*call: Any) -> tuple[Tensor]:
        return (call[-1][0] / 2,)

    model = decoder("llama")
    put = getattr(model.get_submodule(f"{MLP}.down_proj"), f"register_{when}")
    for hook in (quiet, halved if when.endswith("pre_hook") else quiet):
        put(hook)
    longspan.restore(longspan.parallelize(model))
    place = model.get_submodule(MLP if when.endswith("pre_hook") else f"{MLP}.act_fn")
    getattr(place, f"register_{when}")(normed)
    message = message_of(model)
    assert "gives back another gradient in training for tokens together than for each" in message
    assert "; it was looked at with the hook " in message
    assert "normed on 'model.layers.1.mlp" in message, message


def test_hooks_that_leave_tokens_alone_stay() -> None:
    """Their answer over two ranks is that of one."""
    seen: list[Tensor] = []
    model = decoder("llama").eval()
    model.model.layers[1].mlp.register_forward_hook(doubled)
    model.model.layers[1].register_forward_hook(lambda _, __, out: seen.append(out))
    models = [model, copy.deepcopy(model)]
    wanted = torch.cat(
        [model(input_ids=ids, use_cache=False).logits for ids in CASE.ids.split([7, 5], 1)], 1
    )

    def body(group: Group) -> Tensor:
        mine = longspan.parallelize(models[group.rank()], group)
        said = longspan.explain(mine, CASE.batch).proof
        assert "isolation and order on the model itself, for the hook" in said
        seen.clear()
        local = longspan.shard(CASE.batch, group, model=mine)
        logits = longspan.unshard(mine(**local).logits, local)
        assert seen
        return logits

    for logits in run_ranks(2, body):
        torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "mamba2"])
def test_somebody_who_looks_everywhere(family: str) -> None:
    model = decoder(family)
    on_all(model)
    longspan.shard(CASE.batch, model=longspan.parallelize(model))


def test_libraries_whose_hooks_are_known() -> None:
    model = decoder("llama")
    nn.utils.spectral_norm(model.model.layers[0].mlp.up_proj)
    model.enable_input_require_grads()
    longspan.parallelize(model)
    assert longspan.explain(model, CASE.batch).proof.endswith("hold on a twin")
    local = longspan.shard({**CASE.batch, "output_hidden_states": True}, model=model)
    assert len(model(**local).hidden_states) > 2  # by hooks of transformers
    longspan.shard(CASE.batch, model=model)


BYPASSED = {
    "a matrix that is absorbed": ("glm_moe_dsa", f"{ATTENTION}.kv_b_proj"),
    "a compressor": ("deepseek_v4", f"{ATTENTION}.compressor"),
}


@pytest.mark.parametrize("what", BYPASSED)
def test_a_hook_that_would_see_no_tokens_is_refused(what: str) -> None:
    family, place = BYPASSED[what]
    model = decoder(family)
    handle = model.get_submodule(place).register_forward_hook(quiet)
    message = message_of(model)
    assert message.startswith(f"parallelize: the hook quiet on '{place}' ("), message
    assert "would not be called with tokens" in message
    handle.remove()
    model.get_submodule(ATTENTION).register_forward_hook(quiet)
    longspan.parallelize(model)


def test_what_chooses_keys_may_be_looked_at_only() -> None:
    """A change of its scores would show in no other module."""
    place = f"{ATTENTION}.indexer.wk"
    model = decoder("deepseek_v32")
    handle = model.get_submodule(place).register_forward_hook(doubled)
    message = message_of(model)
    assert message.startswith(
        f"parallelize: the hook doubled on '{place}' (Linear) changes what this module takes or "
        f"gives, and in a layer that chooses its keys"
    )
    handle.remove()
    model.get_submodule(place).register_forward_hook(quiet)
    longspan.parallelize(model)


def test_a_hook_around_the_model() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(decoder("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    handle = model.register_forward_hook(quiet)
    assert message_of(model).startswith(
        "parallelize: the hook quiet on PeftModel is around LlamaForCausalLM, where nobody looks"
    )
    handle.remove()
    model.base_model.model.register_forward_hook(quiet)
    longspan.parallelize(model)


def test_a_hook_in_a_tower() -> None:
    model = tiny_images.with_eyes("gemma4")
    tower = model.model.vision_tower
    handle = tower.register_forward_hook(quiet)
    message = message_of(model)
    assert message.startswith("parallelize: the hook quiet on 'model.vision_tower' ("), message
    assert "would see the pictures of one rank alone" in message
    handle.remove()
    longspan.parallelize(model)


def test_without_weights_a_hook_cannot_be_looked_at() -> None:
    with torch.device("meta"):
        model = decoder("llama")
    model.model.norm.register_forward_hook(quiet)
    assert "cannot be looked at; parallelize once it has them" in message_of(model.to("meta"))


def test_noise_of_the_size_of_a_share() -> None:
    model = decoder("llama")
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    handle = model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    message = message_of(model)
    assert "adds noise as large as the length of a rank's share says; take it off" in message
    handle.remove()
    longspan.parallelize(model)


def test_hooks_on_all_modules_of_the_process() -> None:
    def mixes(module: nn.Module, _: Any, out: Any) -> Any:
        return centred(module, (), out) if type(module).__name__ == "LlamaMLP" else None

    made = nn.modules.module.register_module_forward_hook(quiet)
    try:
        model = longspan.parallelize(decoder("llama"))
        longspan.shard(CASE.batch, model=model)
    finally:
        made.remove()
    made = nn.modules.module.register_module_forward_hook(mixes)
    try:
        with pytest.raises(ValueError, match=r"mixes on all modules came after the model was"):
            longspan.shard(CASE.batch, model=model)
        assert "(LlamaMLP) mixes tokens outside attention" in message_of(decoder("llama"))
    finally:
        made.remove()
    longspan.shard(CASE.batch, model=model)


# ---- Afterwards.


@pytest.mark.parametrize("put", [after(MLP, centred), before(MLP, quiet)])
def test_a_hook_that_came_later_is_refused_on_every_rank(put: Put) -> None:
    def body(group: Group) -> str:
        model = longspan.parallelize(decoder("llama"), group)
        handle, sent = put(model), group.sent_bytes
        with pytest.raises(ValueError) as raised:
            longspan.shard(CASE.batch, group, model=model)
        assert group.sent_bytes == sent
        handle.remove()
        longspan.shard(CASE.batch, group, model=model)
        return str(raised.value)

    (message,) = set(run_ranks(2, body))
    assert message.startswith("shard: the hook ")
    assert (
        f" on '{MLP}' (LlamaMLP) came after the model was parallelized, and nobody has looked at "
        f"what it does to tokens; put it there before, or call longspan.restore(model)"
    ) in message


def test_hooks_that_go_and_come_back() -> None:
    """As those of a context around each step do."""
    model = decoder("llama")
    handle = model.model.norm.register_forward_hook(quiet)
    longspan.parallelize(model)
    handle.remove()
    longspan.shard(CASE.batch, model=model)
    model.model.norm.register_forward_hook(quiet)
    local = longspan.shard(CASE.batch, model=model)
    seen: list[Any] = []
    with model.model.layers[0].register_forward_hook(lambda *call: seen.append(call[2])):
        model(**local)  # of this call alone
    assert len(seen) == 1
    longspan.shard(CASE.batch, model=model)


def negated(_: nn.Module, __: Any, out: Any) -> Any:
    return type(out)(logits=-out.logits)


OF_ONE_CALL = {
    "after a module": (after(MLP, centred), "LlamaMLP"),
    "before a module": (before(MLP, centred_before), "LlamaMLP"),
    "on what is handed by name": (before(ATTENTION, first_token, with_kwargs=True), "Attention"),
    "in place": (after(MLP, lambda _, __, out: out.mul_(2)), "LlamaMLP"),
    "after the model": (
        after("", lambda _, __, out: type(out)(logits=-out.logits)),
        "LlamaForCausalLM",
    ),
}


@pytest.mark.parametrize("what", OF_ONE_CALL)
def test_a_hook_of_one_call_that_changes_something_is_refused(what: str) -> None:
    put, kind = OF_ONE_CALL[what]
    models = [decoder("llama").eval(), decoder("llama").eval()]

    def body(group: Group) -> str:
        model = longspan.parallelize(models[group.rank()], group)
        local = longspan.shard(CASE.batch, group, model=model)
        right = model(**local).logits
        with put(model), pytest.raises(ValueError) as raised:
            model(**local)
        assert model(**local).logits.equal(right)
        return str(raised.value)

    (message,) = set(run_ranks(2, body))
    assert message.startswith("LlamaForCausalLM: the hook "), message
    assert f"{kind}) came after the batch" in message or f"on {kind} came after" in message
    assert "changes what this module takes or gives; put it there before" in message
    for model in models:
        longspan.restore(model)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_hook_of_one_call_may_look_beside_others_that_change() -> None:
    """As fully_shard's do, which cast; each keeps its turn."""
    model = decoder("llama").eval()
    model.model.norm.register_forward_hook(doubled)
    longspan.parallelize(model)
    local = longspan.shard(CASE.batch, model=model)
    wanted, turns = model(**local).logits, []

    def looks(turn: int, _: nn.Module, __: Any, out: Tensor) -> None:
        turns.append((turn, float(out.detach().sum())))

    with (
        model.model.norm.register_forward_hook(functools.partial(looks, 2)),
        model.model.norm.register_forward_hook(functools.partial(looks, 1), prepend=True),
    ):
        assert model(**local).logits.equal(wanted)
    (one, half), (two, whole) = turns
    assert (one, two) == (1, 2)
    assert whole == pytest.approx(2 * half)


def test_hooks_of_one_call_around_the_model() -> None:
    """Nobody sees what these change, so they may not even look."""
    model = longspan.parallelize(decoder("llama"))
    local = longspan.shard(CASE.batch, model=model)
    around = "came after the batch was cut, and nobody sees there what it does to this call"
    for put in (
        lambda: model.register_forward_pre_hook(quiet),
        lambda: nn.modules.module.register_module_forward_hook(quiet),
    ):
        with put(), pytest.raises(ValueError, match=around):
            model(**local)
    with model.register_forward_hook(quiet):
        model(**local)
    inner = pytest.raises(ValueError, match=f"^LlamaModel: the hook quiet on .* {around}")
    with model.register_forward_hook(quiet), inner:
        model.model(**{key: local[key] for key in ("input_ids", "position_ids", KEYWORD)})
    model(**local)


def test_a_forward_that_came_later_is_refused_on_every_rank() -> None:
    """Of the whole model, which libraries may wrap, and of one call."""
    models = [decoder("llama") for _ in range(2)]

    def body(group: Group) -> tuple[str, str]:
        model = longspan.parallelize(models[group.rank()], group)
        local = longspan.shard(CASE.batch, group, model=model)
        said = []
        for part, call in (
            (model, lambda: longspan.shard(CASE.batch, group, model=model)),
            (model.model.layers[1], lambda: model(**local)),
        ):
            original, own = part.forward, vars(part).get("forward")

            @functools.wraps(original)  # with its names
            def mixes(*given: Any, original: Any = original, **named: Any) -> Any:
                return original(*given, **named)

            part.forward = mixes
            with pytest.raises(ValueError) as raised:
                call()
            said.append(str(raised.value))
            del part.forward
            if own is not None:
                part.forward = own
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        model(**longspan.shard(CASE.batch, group, model=model))
        return said[0], said[1]

    ((at_shard, in_call),) = set(run_ranks(2, body))
    came = (
        "came after the model was parallelized, and nobody has looked at what that does to tokens"
    )
    assert at_shard.startswith("shard: the forward ")
    assert f" of LlamaForCausalLM {came}" in at_shard
    assert in_call.startswith("LlamaForCausalLM: the forward ")
    assert f" of 'model.layers.1' (LlamaDecoderLayer) {came}" in in_call


def test_a_forward_of_ours_that_is_gone() -> None:
    model = longspan.parallelize(decoder("mixtral"))
    del model.forward
    with pytest.raises(
        ValueError, match=r"^shard: the forward .* of MixtralFor.* is gone since the"
    ):
        longspan.shard(CASE.batch, model=model)


def test_one_rank_may_look_alone() -> None:
    """As rank 0 does that writes a log."""

    def body(group: Group) -> None:
        model = decoder("llama")
        if group.rank() == 0:
            model.model.norm.register_forward_hook(quiet)
        longspan.parallelize(model, group)
        longspan.shard(CASE.batch, group, model=model)

    run_ranks(2, body)
