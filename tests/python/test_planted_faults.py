"""The proof has teeth: each of these faults, planted into a decoder that is right, is
refused by a message that names the module where it was planted."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import longspan

pytest.importorskip("transformers")

import transformers
from oracle.tiny_decoders import WINDOW
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Fault:
    """A change of one module of a model, and the name it is to be found under."""

    plant: Callable[[Any], None]
    where: str
    family: str = "llama"


def _model(family: str) -> Any:
    made = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)),
        "mistral": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**_SIZES, sliding_window=WINDOW)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=256)
        ),
    }[family]()
    return made.double()


MLP = "model.layers.1.mlp"
ATTENTION = "model.layers.1.self_attn"


def _around(place: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """What a module gives, changed: a class of its own with another forward."""

    def plant(model: Any) -> None:
        module = model.get_submodule(place)
        plain = type(module)

        def forward(self: Any, *args: Any, **options: Any) -> Any:
            out = plain.forward(self, *args, **options)
            if isinstance(out, tuple):
                return (change(out[0]), *out[1:])
            return change(out)

        module.__class__ = type(f"Planted{plain.__name__}", (plain,), {"forward": forward})

    return plant


def _before(place: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """What a module takes, changed, by a forward of the instance."""

    def plant(model: Any) -> None:
        module = model.get_submodule(place)
        plain = type(module).forward

        def forward(self: Any, hidden: Tensor, *args: Any, **options: Any) -> Any:
            return plain(self, change(hidden), *args, **options)

        module.forward = types.MethodType(forward, module)

    return plant


def _padded(x: Tensor) -> Tensor:
    """The token before, by padding."""
    return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def _convolved(x: Tensor) -> Tensor:
    kernel = torch.full((x.shape[-1], 1, 3), 0.3, dtype=x.dtype)
    moved = nn.functional.pad(x.transpose(1, 2), (2, 0))
    return nn.functional.conv1d(moved, kernel, groups=x.shape[-1]).transpose(1, 2)


def _over_tokens(x: Tensor) -> Tensor:
    """Normed over tokens where it should be over channels."""
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)


def _own_positions(x: Tensor) -> Tensor:
    return x * (1 + 0.1 * torch.arange(x.shape[1], dtype=x.dtype))[None, :, None]


def _from_the_end(x: Tensor) -> Tensor:
    return x + 0.1 * torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[None, :, None]


def _by_parity(x: Tensor) -> Tensor:
    """Every other place is treated otherwise."""
    odd = torch.arange(x.shape[1]) % 2
    return x * (1 + odd[None, :, None])


def _smoothed(x: Tensor) -> Tensor:
    return x.cumsum(1) / 10


def _first_token(x: Tensor) -> Tensor:
    """A summary token that everybody sees."""
    return x + 0.5 * x[:, :1]


def _by_capacity(x: Tensor) -> Tensor:
    """The strongest tokens are kept, as many as a share of the call."""
    scores = x.norm(dim=-1)
    kept = scores.topk(max(x.shape[1] // 2, 1), dim=1).indices
    mask = torch.zeros_like(scores).scatter(1, kept, 1.0)
    return x * mask[..., None]


def _sorted(x: Tensor) -> Tensor:
    return x + 0.1 * x.sort(dim=1).values


def _normed_by_largest(x: Tensor) -> Tensor:
    """A scale from the whole tensor, as quantization makes it."""
    return x / x.abs().amax()


def _softmax_of_tokens(x: Tensor) -> Tensor:
    return x * x.softmax(1)


def _by_length(x: Tensor) -> Tensor:
    """By how many tokens there are."""
    return x * (1 + x.shape[1] / 100)


def _chunked(x: Tensor) -> Tensor:
    """Means over pairs."""
    pairs = x.shape[1] // 2 * 2
    means = x[:, :pairs].unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1)
    return torch.cat((means, x[:, pairs:]), 1)


def _fourier(x: Tensor) -> Tensor:
    return x + 0.1 * torch.fft.fft(x, dim=1).real


# ---- Attention that is not what it seems.


class _OffByOne(mistral.MistralAttention):
    """Its mask has a window of one more than it says."""

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor):
            near = torch.ones(mask.shape[-2:], dtype=torch.bool).tril().triu(-WINDOW)
            options["attention_mask"] = near.expand_as(mask)
        return super().forward(hidden_states, position_embeddings, **options)


class _Unwindowed(mistral.MistralAttention):
    """A window in the configuration that its mask does not have."""

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor):
            causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
            options["attention_mask"] = causal.expand_as(mask)
        return super().forward(hidden_states, position_embeddings, **options)


class _Biased(llama.LlamaAttention):
    """Adds a bias by distance to its mask."""

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        tokens = hidden_states.shape[1]
        if options.get("longspan") is None:
            apart = torch.arange(tokens)[None] - torch.arange(tokens)[:, None]
            bias = torch.where(apart > 0, -torch.inf, 0.3 * apart).to(hidden_states.dtype)
            options["attention_mask"] = bias[None, None]
        return super().forward(hidden_states, position_embeddings, **options)


class _RolledKeys(llama.LlamaAttention):
    """Rolls what its keys are made from, inside."""

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        weight = self.k_proj.weight
        plain = nn.functional.linear

        class Rolled(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return plain(x.roll(1, 1), weight)

        kept, self._modules["k_proj"] = self.k_proj, Rolled()
        try:
            return super().forward(hidden_states, position_embeddings, **options)
        finally:
            self._modules["k_proj"] = kept


class _CutOff(llama.LlamaAttention):
    """Over ranks it has no gradient for what it takes."""

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        if options.get("longspan") is not None:
            hidden_states = hidden_states.detach()
        return super().forward(hidden_states, position_embeddings, **options)


class _Deaf(llama.LlamaAttention):
    """Hands no keywords on."""

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        options.pop("longspan", None)
        return super().forward(hidden_states, position_embeddings, **options)


class _Sloped(llama.LlamaAttention):
    """Adds a bias by distance, as steep as an attribute of its own says, which no twin has."""

    slope: float

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        tokens = hidden_states.shape[1]
        if options.get("longspan") is None:
            apart = torch.arange(tokens)[None] - torch.arange(tokens)[:, None]
            bias = torch.where(apart > 0, -torch.inf, self.slope * apart).to(hidden_states.dtype)
            options["attention_mask"] = bias[None, None]
        return super().forward(hidden_states, position_embeddings, **options)


class _Forgetting(llama.LlamaAttention):
    """Sees some tokens back only, where it is handed a mask."""

    reach: int

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        if isinstance(options.get("attention_mask"), Tensor) or "longspan" not in options:
            tokens = hidden_states.shape[1]
            near = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-self.reach)
            options["attention_mask"] = near[None, None]
        return super().forward(hidden_states, position_embeddings, **options)


class _Counting(llama.LlamaAttention):
    """Does what the family does, and has an attribute of its own."""

    calls: int

    def forward(self, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        self.calls += 1
        return super().forward(hidden_states, position_embeddings, **options)


def _swapped(place: str, kind: type, **attributes: Any) -> Callable[[Any], Any]:
    """A module of a class that has attributes of its own."""

    def plant(model: Any) -> Any:
        module = model.get_submodule(place)
        module.__class__ = kind
        vars(module).update(attributes)
        return model

    return plant


def _replaced(place: str, kind: type) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        model.get_submodule(place).__class__ = kind

    return plant


def _numbered_from_one(model: Any) -> None:
    """Positions that begin at 1 where none are given; learned ones, for rotary ones would
    not show it."""
    plain = type(model.transformer)

    class Numbered(plain):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
            if position_ids is None:
                position_ids = torch.arange(1, 1 + input_ids.shape[1])[None]
            return super().forward(input_ids=input_ids, position_ids=position_ids, **options)

    model.transformer.__class__ = Numbered


def _deaf_to_positions(model: Any) -> None:
    """Numbers the tokens at hand whatever it is told."""
    plain = type(model.model)

    class Deaf(plain):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
            positions = torch.arange(input_ids.shape[1])[None]
            return super().forward(input_ids=input_ids, position_ids=positions, **options)

    model.model.__class__ = Deaf


FAULTS: dict[str, Fault] = {
    "a rolled tensor": Fault(_around(MLP, lambda x: x + x.roll(1, 1)), MLP),
    "a tensor rolled in an instance's forward": Fault(_before(MLP, lambda x: x.roll(-1, 1)), MLP),
    "the token before, by padding": Fault(_around(MLP, _padded), MLP),
    "a convolution in a function": Fault(_around(MLP, _convolved), MLP),
    "a norm over tokens": Fault(_around("model.norm", _over_tokens), "model.norm"),
    "an own arange": Fault(_around(MLP, _own_positions), MLP),
    "a ramp over the call": Fault(_around(MLP, _from_the_end), MLP),
    "every other place": Fault(_around(MLP, _by_parity), MLP),
    "a running sum": Fault(_around(MLP, _smoothed), MLP),
    "pooling over a row": Fault(_around(MLP, lambda x: x + x.mean(1, keepdim=True)), MLP),
    "a mean over the batch": Fault(_around(MLP, lambda x: x - x.mean()), MLP),
    "the largest of a row": Fault(_around(MLP, lambda x: x + x.amax(1, keepdim=True)), MLP),
    "the first token for all": Fault(_around(MLP, _first_token), MLP),
    "expert choice by capacity": Fault(_around(MLP, _by_capacity), MLP),
    "sorted tokens": Fault(_around(MLP, _sorted), MLP),
    "a scale of the whole tensor": Fault(_around(MLP, _normed_by_largest), MLP),
    "a softmax of tokens": Fault(_around(MLP, _softmax_of_tokens), MLP),
    "means of pairs": Fault(_around(MLP, _chunked), MLP),
    "a transform over tokens": Fault(_around(MLP, _fourier), MLP),
    "tokens flipped in attention": Fault(
        _around(ATTENTION, lambda x: x + 0.5 * x.flip(1)), ATTENTION
    ),
    "keys rolled inside attention": Fault(_replaced(ATTENTION, _RolledKeys), ATTENTION),
    "no keywords handed on": Fault(_replaced(ATTENTION, _Deaf), ATTENTION),
    "embeddings that see a neighbour": Fault(
        _around("model.embed_tokens", lambda x: x + x.roll(1, 1)), "model.embed_tokens"
    ),
    "a rolled head": Fault(_around("lm_head", lambda x: x + x.roll(1, 1)), "lm_head"),
    "a rolled output of a layer": Fault(
        _around("model.layers.0", lambda x: x + x.roll(1, 1)), "model.layers.0"
    ),
    "a rolled gpt2": Fault(
        _around("transformer.h.1.mlp", lambda x: x.roll(1, 1)), "transformer.h.1.mlp", "gpt2"
    ),
    "a window off by one": Fault(_replaced(ATTENTION, _OffByOne), ATTENTION, "mistral"),
    "a window only in the configuration": Fault(
        _replaced(ATTENTION, _Unwindowed), ATTENTION, "mistral"
    ),
    "a slope of its own": Fault(_swapped(ATTENTION, _Sloped, slope=0.3), ATTENTION),
    "a reach of its own": Fault(_swapped(ATTENTION, _Forgetting, reach=4), ATTENTION),
    "a bias added inside": Fault(_replaced(ATTENTION, _Biased), ATTENTION),
    "positions from 1": Fault(_numbered_from_one, "transformer", "gpt2"),
    "deaf to positions": Fault(_deaf_to_positions, "model"),
    "by the length of the call": Fault(_around(MLP, _by_length), MLP),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_module_is_named(name: str) -> None:
    fault = FAULTS[name]
    model = _model(fault.family)
    fault.plant(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(NotImplementedError) as raised:
        longspan.parallelize(model)
    message = str(raised.value)
    assert message.startswith(f"parallelize: '{fault.where}' ("), message
    assert {key: bool(value.equal(before[key])) for key, value in model.state_dict().items()} == (
        dict.fromkeys(before, True)
    )
    assert not any("_longspan" in vars(module) for module in model.modules())


def test_a_gradient_that_is_lost_is_named() -> None:
    """The answer is right, and what it learns is not."""
    model = _model("llama")
    _replaced(ATTENTION, _CutOff)(model)
    message = r"'model\.layers\.[01]\.\S+' gets another gradient over one rank than in the plain"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)


class _Forgetful(transformers.LlamaForCausalLM):
    """Shifts labels itself, whatever it is told."""

    def forward(self, *args: Any, **options: Any) -> Any:
        options.pop("shift_labels", None)
        return super().forward(*args, **options)


def test_a_loss_of_other_targets_is_refused() -> None:
    model = _Forgetful(transformers.LlamaConfig(**_SIZES))
    with pytest.raises(NotImplementedError, match="the model counts another loss over one rank th"):
        longspan.parallelize(model)


# ---- Attention that no twin can have.

SWAPPED = {
    "wrong": _swapped(ATTENTION, _Sloped, slope=0.3),
    "right": _swapped(ATTENTION, _Counting, calls=0),
}


@pytest.mark.parametrize("what", SWAPPED)
def test_attention_with_attributes_of_its_own_is_shown_on_a_twin_that_is_given(what: str) -> None:
    """A call of the model itself, with attention of single tokens, would let both in."""
    model = SWAPPED[what](_model("llama"))
    message = (
        rf"'model.layers.1.self_attn' \({type(model.get_submodule(ATTENTION)).__name__}\) does "
        r"not fit into a twin of LlamaForCausalLM, .*; pass proof=twin, a small model on the CPU"
    )
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)
    twin = SWAPPED[what](_model("llama"))
    if what == "right":
        longspan.parallelize(model, proof=twin)
    else:
        with pytest.raises(NotImplementedError, match=r"self_attn.*gives another answer over one"):
            longspan.parallelize(model, proof=twin)
    plain = _model("llama")
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(SWAPPED[what](_model("llama")), proof=plain)


def test_a_forward_that_only_moves_tensors_is_no_other_attention() -> None:
    """accelerate puts one into every module, where weights are quantized say."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = _model("llama")
    hooks.attach_execution_device_hook(model, "cpu")
    assert "forward" in vars(model.get_submodule(ATTENTION))
    longspan.parallelize(model)
    told = longspan.explain(model, {"input_ids": torch.ones(1, 8, dtype=torch.long)}).proof
    assert told.endswith("hold on a twin")
    longspan.restore(model)

    class Rolled(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def post_forward(self, _: Any, output: Tensor) -> Tensor:
            return output.roll(1, 1)

    hooks.add_hook_to_module(model.get_submodule(MLP), Rolled(), append=True)
    with pytest.raises(NotImplementedError, match=rf"'{MLP}' \(LlamaMLP\) mixes tokens"):
        longspan.parallelize(model)


# ---- Masks that somebody else makes.


class _Prefix(llama.LlamaModel):
    """Tokens of a prefix, as long as an attribute of its own says, see each other."""

    prefix: int

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1])[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
            or_mask_function=lambda b, h, q, k: k < self.prefix,
        )
        angles = self.rotary_emb(hidden, position_ids=position_ids)
        options |= {"attention_mask": mask, "position_embeddings": angles}
        for layer in self.layers:
            hidden = layer(hidden, **options)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def _widens(_: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    """A hook that looks one token ahead where it is handed a mask."""
    mask = named.get("attention_mask")
    if isinstance(mask, Tensor):
        named["attention_mask"] = mask.masked_fill(torch.ones_like(mask).tril(1).bool(), 0)
    return given, named


@pytest.mark.parametrize("what", ["a model", "a hook", "a hook of a layer"])
def test_a_mask_that_attention_over_ranks_would_not_get_is_refused(what: str) -> None:
    """transformers drops what it knows no mask for, and ours come from the layers."""
    model = _model("llama")
    if what == "a model":
        _swapped("model", _Prefix, prefix=4)(model)
    else:
        place = ATTENTION if what == "a hook" else "model.layers.1"
        model.get_submodule(place).register_forward_pre_hook(_widens, with_kwargs=True)
    where = "model.layers.0.self_attn" if what == "a model" else ATTENTION
    message = rf"'{where}' \(LlamaAttention\) is handed a mask of other tokens than it says itself"
    with pytest.raises(NotImplementedError, match=message):
        longspan.parallelize(model)
    assert model.model.layers[1].self_attn.config is model.config


class _Louder(llama.LlamaDecoderLayer):
    strength: float

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        return self.strength * super().forward(hidden_states, *args, **options)


class _Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.layer(*args, **options)


def _compiled(model: Any) -> None:
    for module in (model.get_submodule(ATTENTION), model.model.layers[0]):
        module.forward = torch.compile(module.forward, backend="eager")


def _checkpointed(model: Any) -> None:
    module = model.get_submodule(ATTENTION)
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def _wrapped(model: Any) -> None:
    model.model.layers[1] = _Around(model.model.layers[1])


NEIGHBOURS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a layer": ("llama", _swapped("model.layers.1", _Louder, strength=1.5)),
    "a layer with a window": ("mistral", _wrapped),
    "a layer in another": ("llama", _wrapped),
    "compiled forwards": ("llama", _compiled),
    "checkpointed attention": ("llama", _checkpointed),
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_what_hands_masks_on_stays(what: str) -> None:
    family, plant = NEIGHBOURS[what]
    model = _model(family)
    plant(model)
    longspan.parallelize(model)
