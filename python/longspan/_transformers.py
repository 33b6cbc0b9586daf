"""Decoders of Hugging Face transformers: how their attention comes to us.

transformers looks attention functions up by a name in each module's configuration.
We register one name, and give the modules of a parallelized model copies of their
configurations that say it. The name has no mask function, so transformers builds no
[S, S] masks; masks come from the batch's documents instead.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from longspan import _routers, _tiles
from longspan._agreement import in_layer_of
from longspan._groups_of_tokens import check_groups, reach_of
from longspan._hooks import AGAIN, guests_in, newcomers
from longspan._images import beside_towers, check_pictures, configured, has_eyes
from longspan._images import redirect as redirect_images
from longspan._local_batch import KEYWORD
from longspan._model_inputs import check_divisor, check_inputs
from longspan._models import AttentionLayer, Inventory, LocalAttention, Parallelized
from longspan._recipes import recipe_for, recipes_in, selected_keys
from longspan._recipes.recipe import Recipe, check_no_dropout, not_sharded
from longspan._remarks import looks_again, remark_on_missing_count, remark_on_own_mean
from longspan._settings import Settings
from longspan._sources import sources_of
from longspan._twins import fingerprint, in_words, kinds_in, named_kinds
from longspan._walking import (
    MARK,
    attribute,
    classes_in,
    has,
    modules_in,
    of_classes,
    remembered,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "longspan"
#: Kinds of layers whose tokens meet in attention alone.
_LAYER_KINDS = ("full_attention", "sliding_attention")
#: What builds masks for sliding layers in transformers.
_MASKS_WITH_WINDOWS = ("create_sliding_window_causal_mask", "create_masks_for_generate")
#: Heads whose answer is one for a row, made from tokens that may lie elsewhere.
_ROW_HEADS = ("ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice")


#: In training at the latest, as norms of a batch do.
_MIXING = (
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.RNNBase,
    torch.nn.modules.batchnorm._BatchNorm,
)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    indices: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: [B, H, L, D] in, [B, L, H, Dv] out."""
    local = rest.get(KEYWORD)
    if not isinstance(local, LocalAttention):
        raise not_sharded(module)
    _check_no_mask(module, attention_mask)
    if position_bias is not None:
        raise NotImplementedError(
            f"{type(module).__name__}: adds a bias to scores, which attention over ranks does "
            f"not have"
        )
    if is_causal is False:
        raise NotImplementedError(f"{type(module).__name__}: asked for attention to both sides")
    if indices is not None:
        check_no_dropout(module, dropout)
        assert scaling is not None
        with in_layer_of(module):
            out = selected_keys.attend(
                module, local, query, key, indices, scale=scaling, sink=s_aux
            )
        return out, None
    window = _window(module)
    if sliding_window is not None and sliding_window != window:
        raise ValueError(
            f"{type(module).__name__}: was called with a window of {sliding_window}, but says "
            f"{window} itself; this model's windows are not understood"
        )
    with in_layer_of(module):
        out = local.attend(
            query,
            key,
            value,
            window=window,
            groups=reach_of(module.config, window),
            scale=scaling,
            softcap=softcap,
            sink=s_aux,
            dropout_p=dropout,
        )
    # Some families view it as [B, L, H * Dv].
    return out.transpose(1, 2).contiguous(), None


def attention_layers(model: torch.nn.Module) -> list[AttentionLayer]:
    """The attention layers of a model, or an error that names what cannot be cut."""
    found = _pretrained(model)
    if not found:
        raise TypeError(
            f"parallelize: {type(model).__name__} holds no transformers model; for other models "
            f"call longspan.attend in place of their attention"
        )
    _check_adapters(model)
    known = recipes_in(model)
    for part in found:
        _check_model(part, recipes_in(part) if known else ())
    _check_rotation(model, found)
    carried = [name for name, _, recipe in known if recipe.carries]
    for name, module in beside_towers(model, of_classes(model, _mixes_or_embeds)):
        if name.rpartition(".")[0] in carried:
            continue  # a recipe answers for it
        if isinstance(module, _MIXING):
            raise NotImplementedError(
                f"parallelize: '{name}' ({type(module).__name__}) mixes tokens outside attention, "
                f"which cutting the tokens would change"
            )
        assert isinstance(module, torch.nn.Embedding)
        _check_table(name, module)
    layers = []
    # What has no configuration only a recipe answers for.
    for name, module in beside_towers(model) if known else configured(model):
        recipe = recipe_for(module)
        if recipe is not None and recipe.layer is not None and recipe.carries:
            layers.append(recipe.layer(name, module))
        elif is_attention(module):
            if not module.is_causal:
                raise NotImplementedError(
                    f"parallelize: '{name}' attends to both sides; only causal decoders are "
                    f"understood"
                )
            _check_window(name, module)
            _check_softcap(name, module)
            made = _layer if recipe is None else recipe.layer
            assert made is not None
            layers.append(made(name, module))
    if not layers:
        raise _nothing_attends(model)
    return layers


def _mixes_or_embeds(kind: type) -> bool:
    return issubclass(kind, (*_MIXING, torch.nn.Embedding))


def _nothing_attends(model: torch.nn.Module) -> Exception:
    """Why no layer of a model can be redirected."""
    out = "call longspan.attend in place of its attention"
    for name, module in beside_towers(model):
        kind = type(module).__name__
        if "Attention" in kind:
            return NotImplementedError(
                f"parallelize: '{name}' ({kind}) does not say that it is causal (is_causal), as "
                f"layers do that leave masks to transformers: which keys it sees is its own "
                f"matter, and nobody has looked at it; {out}"
            )
    return TypeError(f"parallelize: found no attention layers in {type(model).__name__}; {out}")


def entrances(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The object itself, and the transformers models and wrappers inside that
    callers may hold on to."""
    kinds: Any = classes_in(model)
    known = {kind for kind in kinds if _is_entrance(kind)}
    # Those look elsewhere for what they do not have.
    asked = {kind for kind in kinds if kind.__getattr__ is not torch.nn.Module.__getattr__}
    inside = [
        module
        for module in modules_in(model)
        if module is not model
        and (
            type(module) in known
            or "generate" in module.__dict__
            or (type(module) in asked and hasattr(module, "generate"))
        )
    ]
    return [model, *inside]


def _is_entrance(kind: type) -> bool:
    return issubclass(kind, _pretrained_class()) or hasattr(kind, "generate")


def whole_models(model: torch.nn.Module) -> list[PreTrainedModel]:
    """The models of transformers in it that are in no other one."""
    if isinstance(model, _pretrained_class()):
        return [model]
    found: list[PreTrainedModel] = []
    inside: set[int] = set()
    for part in _pretrained(model):
        if id(part) not in inside:
            found.append(part)
            inside.update(map(id, modules_in(part)))
    return found


def inventory(model: torch.nn.Module) -> list[Inventory]:
    """The models in it, each as it is now."""
    return [
        Inventory(part, fingerprint(part), named_kinds(part), sources_of(kinds_in(part)))
        for part in whole_models(model)
    ]


def settings_of(model: torch.nn.Module, state: Parallelized) -> Settings:
    """What configurations and layers say now, of a model that is redirected."""
    ours = {id(config): config for _, config, _ in state.configs}
    return Settings(
        ours.values(),
        [original for original, _, _ in state.configs],
        [(name, m) for name, m in configured(model) if id(vars(m)["config"]) in ours],
    )


def check_settings(who: str, state: Parallelized) -> None:
    """That configurations and layers say what they said when the model was let in."""
    assert state.settings is not None
    if (changed := state.settings.other_attention()) is not None:
        raise ValueError(
            f"{who}: {changed}: another attention would see this rank's tokens alone; {AGAIN}"
        )
    if (changed := state.settings.changed()) is not None:
        raise ValueError(f"{who}: {changed}, which nobody has looked at; set it back, or {AGAIN}")


def check_unchanged(state: Parallelized, model: torch.nn.Module) -> None:
    """That a model still consists of what was let in."""
    check_settings("shard", state)
    came = newcomers(guests_in(model), state.guests)
    if came:
        raise ValueError(
            f"shard: {came[0]} came after the model was parallelized, and nobody has looked at "
            f"what it does to tokens; put it there before, or {AGAIN}"
        )
    for part, before, kinds, sources in state.seen:
        if fingerprint(part) == before:
            if (changed := sources.changed()) is not None:
                raise ValueError(
                    f"shard: {changed}, which {type(part).__name__} runs, is another than when the "
                    f"model was parallelized, and nobody has looked at it; {AGAIN}"
                )
            continue
        was, now = in_words(kinds), in_words(named_kinds(part))
        name = next((name for name in (*now, *was) if now.get(name) != was.get(name)), "the model")
        what = now.get(name, "gone")
        raise ValueError(
            f"shard: '{name}' of {type(part).__name__} was {was.get(name, 'not there')} when the "
            f"model was parallelized and is {what} now, which nobody has looked at; {AGAIN}"
        )
    if state.lookout is not None:
        state.lookout.check_forwards("shard")


def redirect(model: torch.nn.Module, state: Parallelized) -> None:
    """Has the modules call our function, and recipes change theirs."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, attention)
    name_attention(model, state, _NAME)
    for name, module, recipe in recipes_in(model):
        recipe.redirect(name, module, state)
        state.masks = tuple(dict.fromkeys(state.masks + recipe.masks))
    parts = _pretrained(model)
    redirect_images(parts, state)
    _tiles.redirect(whole_models(model), state)
    routed = _routers.has_routers(model)
    for part in parts:
        state.look_before(part, functools.partial(_look_for_mask, bool(state.masks)))
        if has_loss(part) and state.group.size() > 1:
            state.look_after(part, _look_at_logits)
        if routed:
            _routers.redirect(part, state)


def name_attention(model: torch.nn.Module, state: Parallelized, name: str) -> None:
    """Gives the modules configurations of their own that name an attention function."""
    copies: dict[int, Any] = {}
    ours: dict[int, Any] = {}
    for _, module in configured(model):
        config = vars(module)["config"]
        if not _is_config(config):
            continue
        if id(config) not in ours:
            made: Any = copy.deepcopy(config, copies)
            made._attn_implementation_internal = name
            ours[id(config)] = made
            state.configs.append((config, made, vars(made).copy()))
        state.replace(module, "config", ours[id(config)])


def _look_for_mask(
    wants_ours: bool,
    module: torch.nn.Module,
    in_order: tuple[Any, ...],
    arguments: dict[str, Any],
) -> None:
    """Refuses masks of pads, which would never reach our function: transformers drops
    them for attention functions without a mask function; and what asks for more than a
    rank has. Where a model wants what we put in place of a mask, one that lacks it would
    fall over it."""
    if arguments.get(KEYWORD) is None:
        if wants_ours:
            raise not_sharded(module)
        return
    given = _by_name(module, in_order) | arguments if in_order else arguments
    _check_no_mask(module, given.get("attention_mask"))
    check_inputs(type(module).__name__, given)
    if not torch.compiler.is_compiling():
        state = vars(module)[MARK]
        check_settings(type(module).__name__, state)
        state.lookout.begin(module)
        _check_shifted(module, given)
        check_every_layer(type(module).__name__, module)
    if has_loss(module):
        state = vars(module)[MARK]
        remark_on_missing_count(state, module, given)
        count = given.get("num_items_in_batch")
        if isinstance(count, torch.Tensor) and looks_again(state, "divisor"):
            check_divisor(type(module).__name__, count, on_device=True)


def _by_name(module: torch.nn.Module, in_order: tuple[Any, ...]) -> dict[str, Any]:
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, in_order, strict=False))


def check_every_layer(who: str, part: torch.nn.Module) -> None:
    """That training skips no layers: ranks would draw others, and exchange keys of one layer with
    those of the next."""
    share = vars(part).get("layerdrop") or 0
    if part.training and share > 0 and vars(part)[MARK].group.size() > 1:
        raise NotImplementedError(
            f"{who}: {type(part).__name__} skips layers at random in training (layerdrop is "
            f"{share:g}), and every rank would skip others; set its layerdrop to 0"
        )


def _check_shifted(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """That a model is not left to shift labels itself, among the tokens of one rank."""
    alone = given.get("labels") is not None and given.get("shift_labels") is None
    if alone and has_loss(module) and vars(module)[MARK].group.size() > 1:
        raise ValueError(
            f"{type(module).__name__}: got `labels` without `shift_labels`, and would shift them "
            f"among this rank's tokens, whose neighbours may lie on another; give `labels` to "
            f"shard, and pass on all that it gave, as model(**local)"
        )


def _look_at_logits(
    module: torch.nn.Module, in_order: tuple[Any, ...], arguments: dict[str, Any], output: Any
) -> None:
    local = arguments.get(KEYWORD)
    if torch.compiler.is_compiling() or not isinstance(local, LocalAttention):
        return
    remark_on_own_mean(vars(module)[MARK], local.targets, getattr(output, "logits", None))


def _check_no_mask(module: torch.nn.Module, mask: Any) -> None:
    if mask is None:
        return
    ours = mask.values() if isinstance(mask, dict) else (mask,)
    if not all(one is None or isinstance(one, LocalAttention) for one in ours):
        raise ValueError(
            f"{type(module).__name__}: got an attention_mask beside the sharded batch, whose "
            f"documents already say who sees whom; give the mask to shard instead"
        )


def check_batch(model: torch.nn.Module, batch: Any) -> None:
    """What the model would get wrong about this batch."""
    if isinstance(batch, Mapping):
        check_inputs("shard", batch)
    parts = _pretrained(model)
    check_pictures("shard", parts, batch)
    check_groups("shard", type(model).__name__, [part.config for part in parts], batch)
    _routers.check_batch(model, parts, batch)
    for recipe in {recipe.family: recipe for _, _, recipe in recipes_in(model)}.values():
        if recipe.check_batch is not None:
            recipe.check_batch("shard", model, batch)
    for part in parts:
        check_every_layer("shard", part)
        if any(batch.get(key) is not None for key in ("labels", "shift_labels")):
            _check_loss(part)
        embeds = batch.get("inputs_embeds") is not None
        if (
            embeds
            and getattr(part.config, "hidden_size_per_layer_input", None)
            and batch.get("per_layer_inputs") is None
        ):
            raise ValueError(
                f"shard: {type(part).__name__} looks up its per-layer inputs by token, and "
                f"`inputs_embeds` has no ids; give `per_layer_inputs` too, from "
                f"get_per_layer_inputs(input_ids, None)"
            )


def losses_of_routers(model: torch.nn.Module, ranks: int) -> tuple[str, ...]:
    """What those of its models send, in words."""
    said = (_routers.describe(part, ranks) for part in _pretrained(model))
    return tuple(text for text in said if text is not None)


def has_loss(part: torch.nn.Module) -> bool:
    """Whether it makes a loss: a decoder without a head makes none."""
    name = type(part).__name__
    return "For" in name or "LMHead" in name


def _check_loss(part: PreTrainedModel) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    name = type(part).__name__
    if not has_loss(part):
        return
    if part.loss_function is not ForCausalLMLoss:
        raise NotImplementedError(
            f"shard: {name} has a loss of its own "
            f"({getattr(part.loss_function, '__name__', part.loss_function)}), which may not take "
            f"shift_labels and num_items_in_batch; leave `labels` out and reduce the loss with "
            f"longspan.reduce_loss"
        )


def _check_model(
    part: PreTrainedModel, recipes: Sequence[tuple[str, torch.nn.Module, Recipe]]
) -> None:
    name, config = type(part).__name__, part.config
    for head in _ROW_HEADS:
        if name.endswith(head):
            raise NotImplementedError(
                f"parallelize: {name} makes one answer from tokens of a whole row; its decoder "
                f"can be parallelized, its head cannot"
            )
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"parallelize: {name} has an encoder; give a decoder")
    for tower in ("vision_config", "audio_config"):
        if getattr(config, tower, None) is not None and not has_eyes(config):
            raise NotImplementedError(
                f"parallelize: {name} also reads images or sound ({tower}); give its text "
                f"decoder, as in the ...ForCausalLM class of the family"
            )
    known = set(_LAYER_KINDS).union(*(recipe.layer_kinds for _, _, recipe in recipes))
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in known:
            raise NotImplementedError(
                f"parallelize: {name} has layers of kind '{kind}'; understood are "
                f"{' and '.join(_LAYER_KINDS)}"
            )
    # Families with states do without this word, and the ruler sees how they attend.
    by_name = any(recipe.carries for _, _, recipe in recipes)
    if not by_name and not getattr(part, "_supports_attention_backend", False):
        raise NotImplementedError(
            f"parallelize: {name} does not look its attention up by name "
            f"(_supports_attention_backend is not set), so it cannot be redirected"
        )
    _routers.check_model(part)


def _check_adapters(model: torch.nn.Module) -> None:
    """Of peft: those that want the whole row are not cut with it."""
    for module in modules_in(model):
        own = module.__dict__
        adapters = own.get("peft_config") or own.get("_peft_config")
        for name, config in adapters.items() if isinstance(adapters, dict) else ():
            if getattr(config, "alora_invocation_tokens", None):
                what = "an aLoRA: it looks for alora_invocation_tokens in whole rows"
            elif getattr(config, "is_prompt_learning", False):
                kind = getattr(config.peft_type, "value", config.peft_type)
                what = f"of kind {kind}: it puts tokens of its own before whole rows"
            else:
                continue
            raise NotImplementedError(
                f"parallelize: the adapter '{name}' is {what}, and a rank has a part of each; use "
                f"LoRA (without alora_invocation_tokens) instead"
            )


def _check_table(name: str, table: torch.nn.Embedding) -> None:
    """Of some options the ids of a whole batch matter, and a rank has its own."""
    for option, what in (
        ("scale_grad_by_freq", "divides gradients by how often an id is in the batch"),
        ("max_norm", "writes the rows of the ids that it is given"),
    ):
        if getattr(table, option):
            raise NotImplementedError(
                f"parallelize: '{name}' ({type(table).__name__}) {what} ({option}), and a rank has "
                f"other ids than the next; leave {option} out"
            )


def _check_rotation(model: torch.nn.Module, parts: Sequence[PreTrainedModel]) -> None:
    for part in parts:
        rope = getattr(part.config, "rope_parameters", None) or {}
        for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            _check_fixed(type(part).__name__, str(one.get("rope_type", "default")), "give it")
    # Modules go by what the configuration said when they were made.
    for name, module in beside_towers(model):
        kinds = module.__dict__.get("rope_type")
        if kinds is None:
            continue
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            _check_fixed(f"'{name}'", str(kind), "make the model with")


def _check_fixed(who: str, kind: str, out: str) -> None:
    if kind == "longrope" or "dynamic" in kind:
        raise NotImplementedError(
            f"parallelize: {who} chooses its rotary frequencies by the longest position at hand "
            f"(rope_type '{kind}'), which differs from rank to rank, and with pads; {out} a "
            f"rope_type with fixed frequencies, such as 'yarn' or 'default'"
        )


def _layer(name: str, module: Any) -> AttentionLayer:
    config, window = module.config, _window(module)
    heads = int(config.num_attention_heads)
    groups = int(attribute(module, "num_key_value_groups", 1))
    known = has(module, "head_dim")
    head_dim = int(module.head_dim if known else config.hidden_size // heads)
    return AttentionLayer(
        name=name,
        heads=heads,
        key_heads=heads // groups,
        head_dim=int(attribute(module, "qk_head_dim", head_dim)),
        value_dim=int(attribute(module, "v_head_dim", head_dim)),
        window=window,
        softcap=attribute(module, "attn_logit_softcapping"),
        sink=isinstance(attribute(module, "sinks"), torch.Tensor),
        groups=reach_of(config, window),
    )


def _window(module: Any) -> int | None:
    """How many keys a layer sees. Not all families hand it to the attention function:
    some only build their masks by it, and some have a number that nobody looks at."""
    kind: Any = type(module)
    if not _builds_windows(kind):
        return None
    config, index = module.config, getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and index is not None and kinds[index] == "full_attention":
        return None
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return window or None


def _check_window(name: str, module: Any) -> None:
    """That a layer's own window is that of its configuration: masks are made by the one, and
    attention functions are called with the other."""
    kind: Any = type(module)
    if "sliding_window" not in vars(module) or not _builds_windows(kind):
        return
    config, index = module.config, getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    sees = kinds[index] if kinds and index is not None else "sliding_attention"
    own, said = module.sliding_window, getattr(config, "sliding_window", None)
    if sees in _LAYER_KINDS and (own or None) != (said or None):
        if sees == "full_attention" and not own:
            return
        raise ValueError(
            f"parallelize: `sliding_window` of '{name}' is {own}, and its {type(config).__name__} "
            f"says {said}: masks are made by the one and attention is called with the other; set "
            f"both to the same"
        )


def _check_softcap(name: str, module: Any) -> None:
    """That the plain model has the softcap that we give its scores: SDPA takes none, and some
    versions of transformers choose it all the same."""
    softcap = attribute(module, "attn_logit_softcapping")
    if softcap and getattr(module.config, "_attn_implementation", None) == "sdpa":
        raise ValueError(
            f"parallelize: '{name}' has a softcap of {softcap:g}, which SDPA leaves out, and the "
            f"model attends by SDPA; load it with attn_implementation='eager' to have the softcap "
            f"on one rank too, or with attn_logit_softcapping=None to go without"
        )


@functools.cache
def _builds_windows(kind: Any) -> bool:
    """Whether the file of a class of attention knows how masks with windows are made."""
    return any(
        name in vars(sys.modules.get(one.__module__, object))
        for one in kind.__mro__
        for name in _MASKS_WITH_WINDOWS
    )


def first_position(model: torch.nn.Module) -> int:
    """The position of a document's first token: RoBERTa and its kin count from behind
    the padding index of their table of positions."""
    for module in modules_in(model):
        table = module._modules.get("position_embeddings")
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0


def is_attention(module: Any) -> bool:
    """Whether it is an attention layer of transformers."""
    return _is_config(vars(module).get("config")) and has(module, "is_causal")


def is_redirected(module: Any) -> bool:
    """Whether an attention layer looks up our function."""
    return getattr(module.config, "_attn_implementation", None) == _NAME


@functools.cache  # transformers looks for its names anew each time
def _config_class() -> Any:
    from transformers import PreTrainedConfig

    return PreTrainedConfig


@functools.cache
def _pretrained_class() -> Any:
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return ()  # nothing is one
    return PreTrainedModel


def _is_config(value: Any) -> bool:
    return value is not None and isinstance(value, _config_class())


@remembered
def _pretrained(model: torch.nn.Module) -> list[PreTrainedModel]:
    kind = _pretrained_class()
    found: Any = beside_towers(model, of_classes(model, lambda one: issubclass(one, kind)))
    return [module for _, module in found]
