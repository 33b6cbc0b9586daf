"""Twins: a model's own classes in small, with random weights, on the CPU. What a model does
to tokens its twin does too, as far as both are made of the same modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from longspan._images import is_tower, without_towers
from longspan._shrinking import depth, shrunk
from longspan._walking import classes_in, modules_in, walked

#: Modules that hold another one and leave its calls as they are.
_WRAPPERS = {"OptimizedModule": "_orig_mod", "CheckpointWrapper": "_checkpoint_wrapped_module"}
#: Of peft, those whose adapters take tokens one by one, as the layers in them do. Adapters begin
#: as nothing, so a call would not show that Lily's experts, say, are weighed by all tokens of it.
_TUNERS = {
    "adalora", "adamss", "beft", "boft", "bone", "c3a", "deft", "delora", "fourierft", "frod",
    "glora", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "oft",
    "osf", "peanut", "poly", "psoft", "pvera", "randlora", "road", "shira", "supertuning",
    "tinylora", "trainable_tokens", "unilora", "vblora", "vera", "waveft", "xlora",
}  # fmt: skip
#: transformers builds modules under settings of the process.
_building = threading.Lock()


class CannotTwin(Exception):
    """The model's classes cannot be made small; the text says why."""


@dataclass(frozen=True)
class Part:
    """A kind of module at a place in a model, whatever the number of its layer."""

    place: str
    kind: Any  #: a class
    forward: Any  #: what is called: the class's, or one that somebody put into the instance
    traits: tuple[tuple[str, Any], ...] = ()  #: what tells instances of a class apart

    @property
    def place_and_kind(self) -> tuple[str, type, Any]:
        return self.place, self.kind, self.forward

    def __str__(self) -> str:
        return f"'{self.place}' ({self.kind.__name__})" if self.place else self.kind.__name__


def kind_of(module: nn.Module) -> Any:
    """Its class; fully_shard gives modules one of its own, made from theirs."""
    kind: Any = type(module)
    return _own_kind(kind)


@functools.cache
def _own_kind(kind: Any) -> Any:
    if kind.__name__.startswith("FSDP") and any(b.__name__ == "FSDPModule" for b in kind.__mro__):
        return next(base for base in kind.__bases__ if base.__name__ != "FSDPModule")
    return kind


def parts_of(model: nn.Module) -> frozenset[Part]:
    """What a model is made of. Wrappers and adapters of peft are looked through."""
    found = set()
    for name, module in modules_of(model):
        kind = kind_of(module)
        forward = forward_of(module, kind, root=not name)
        found.add(Part(place_of(name), kind, forward, _traits(module)))
    return frozenset(found)


def unwrapped(name: str) -> str:
    """A module's name without what wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS.values())


def place_of(name: str) -> str:
    """A module's name without the numbers of layers."""
    return re.sub(r"\d+", "*", name)


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name, as if nobody had wrapped or adapted them; towers for images, which
    see no tokens, are left out."""
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        module = looked_through(module)
        yield name, module
        prefix = name + "." if name else ""
        for key, child in reversed(module._modules.items()):
            if child is not None and not is_tower(module, key):
                stack.append((prefix + key, child))


def looked_through(module: nn.Module) -> nn.Module:
    """What a wrapper holds, or an adapter of peft adapts."""
    while True:
        inner = _held(module)
        if inner is None and is_adapter(module):
            inner = module._modules["base_layer"]
        if inner is None:
            return module
        module = inner


def _held(module: nn.Module) -> nn.Module | None:
    held = _WRAPPERS.get(type(module).__name__)
    return None if held is None else module._modules.get(held)


def is_adapter(module: nn.Module) -> bool:
    """Whether peft put it around a layer."""
    return is_of_tuner(type(module)) and "base_layer" in module._modules


def is_of_tuner(kind: type) -> bool:
    """Whether it is a class of peft's adapters."""
    return kind.__module__.startswith("peft.tuners.")


def strange_tuner(module: nn.Module) -> str | None:
    """What peft calls an adapter, if nobody has looked at what it does to tokens."""
    if not is_adapter(module):
        return None
    tuner = type(module).__module__.split(".")[2]
    return None if tuner in _TUNERS else tuner


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What a model consists of now, cheap enough for every batch. Adapters count here."""
    found: list[Any] = []
    stack: list[nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        if module is None:
            continue
        own = module.__dict__
        children = own["_modules"]
        outer: Any = type(module)
        kind, held = _kind_and_held(outer)
        if held is not None and held in children:
            stack.append(children[held])
            continue
        found.append(kind)
        if "forward" in own and module is not model:
            found.append(id(own["forward"]))
        if children:
            stack.extend(children.values())
    return tuple(found)


@functools.cache
def _kind_and_held(kind: Any) -> tuple[Any, str | None]:
    """The class of a module by its type, and what it holds if it is a wrapper."""
    return _own_kind(kind), _WRAPPERS.get(kind.__name__)


def kinds_in(model: nn.Module) -> set[type]:
    """The classes of its modules."""
    return {_own_kind(kind) for kind in classes_in(model)}


def has_own_forwards(model: nn.Module) -> bool:
    """Whether somebody put a forward into a module inside."""
    return any("forward" in one.__dict__ for one in modules_in(model) if one is not model)


#: The class of every module by its name, and the forward that somebody put into it.
Kinds = dict[str, type | tuple[type, str]]


def named_kinds(model: nn.Module) -> Kinds:
    """Of a model as it is now, see `in_words`."""
    found: Kinds = {}
    for name, module in walked(model):
        own = module.__dict__.get("forward")
        kind = type(module)
        found[name] = (kind, f"{getattr(own, '__qualname__', own)}") if own and name else kind
    return found


def in_words(kinds: Kinds) -> dict[str, str]:
    """For those who tell two apart, which hardly ever happens."""
    found = {}
    for name, known in kinds.items():
        kind, forward = known if isinstance(known, tuple) else (known, None)
        swapped = "" if forward is None else f" with the forward {forward}"
        adapts = is_of_tuner(kind) and f"{name}.base_layer" in kinds
        found[name] = ("peft's " if adapts else "") + _own_kind(kind).__name__ + swapped
    return found


def forward_of(module: nn.Module, kind: Any, *, root: bool = False) -> Any:
    """What a call of it runs: its class's forward, or somebody's."""
    own = vars(module).get("forward")
    if own is not None and _moves_only(module, own):
        own = vars(module)["_old_forward"]
    own = _inside_torch(own)
    if own is None:
        return kind.forward
    function = getattr(own, "__func__", own)
    # Trainers wrap the forward of the whole model into autocast.
    if root and inspect.unwrap(getattr(function, "model_forward", function)) is inspect.unwrap(
        kind.forward
    ):
        return kind.forward
    return function


def _inside_torch(function: Any) -> Any:
    """What torch was asked to compile, to checkpoint or to call under some setting."""
    while True:
        if isinstance(function, functools.partial) and function.func is checkpoint:
            function = function.args[0] if function.args else None
        elif getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            inner = getattr(function, "__wrapped__", None)
            if inner is None:
                return function
            function = inner
        else:
            return function


def _moves_only(module: nn.Module, forward: Any) -> bool:
    """Whether accelerate put it there, to bring tensors to a device and nothing else."""
    hook = vars(module).get("_hf_hook")
    every = (hook, *getattr(hook, "hooks", ()))
    homes = {type(one).__module__ for one in every} | {
        getattr(getattr(forward, "func", None), "__module__", "")
    }
    return homes == {"accelerate.hooks"} and "_old_forward" in vars(module)


def _traits(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Switches and absent things: layers of one class differ in them."""
    found = []
    for key, value in vars(module).items():
        if key.startswith("_") or "idx" in key or key in ("training", "gradient_checkpointing"):
            continue
        if value is None or isinstance(value, (bool, str)):
            found.append((key, value))
        elif isinstance(value, int):
            found.append((key, value != 0))
    return tuple(found)


def build_twin(model: Any) -> Any:
    """A twin of a model of transformers, with as few layers as show every kind; in
    float64. Neither the model nor anybody's random numbers are touched."""
    config = model.config
    wanted = parts_of(model)
    stack, choices = _choices(model, depth(config))
    why: Exception | None = None
    best: Any = None  # made of the same, but for switches that some layers have
    for layers in choices:
        try:
            twin = _built(kind_of(model), without_towers(shrunk(config, layers)))
        except Exception as error:  # whatever constructors raise
            why = why or error
            continue
        _take_over(model, twin, stack, layers)
        if parts_of(twin) == wanted:
            return _filled(twin)
        if best is None or not strangers(model, twin):
            best = twin
    if best is not None:
        return _filled(best)
    said = "" if why is None else f": {type(why).__name__}: {' '.join(str(why).split())}"
    raise CannotTwin(f"{kind_of(model).__name__} with small sizes does not build{said}")


def _take_over(model: nn.Module, twin: nn.Module, stack: str, layers: Sequence[int]) -> None:
    """Gives modules of the twin the classes and forwards that somebody put into the
    model, where they fit: a class derived from theirs with no attributes of its own."""
    places = {f"{stack}.{layer}": f"{stack}.{place}" for place, layer in enumerate(layers)}
    theirs = dict(modules_of(twin))
    for name, module in modules_of(model):
        layer = re.match(rf"{re.escape(stack)}\.\d+", name) if stack else None
        if layer is not None:
            if layer[0] not in places:
                continue
            name = places[layer[0]] + name[layer.end() :]
        mine, kind = theirs.get(name), kind_of(module)
        if mine is None or (kind is type(mine) and "forward" not in vars(module)):
            continue
        own = vars(module).get("forward")
        if issubclass(kind, type(mine)) and vars(module).keys() - {"forward"} == vars(mine).keys():
            mine.__class__ = kind
            if isinstance(own, types.MethodType) and own.__self__ is module:
                mine.forward = types.MethodType(own.__func__, mine)


def strangers(model: nn.Module, twin: nn.Module) -> list[Part]:
    """What the model is made of and its twin is not: somebody put it there."""
    known = {part.place_and_kind for part in parts_of(twin)}
    found = {p.place: p for p in parts_of(model) if p.place_and_kind not in known}
    return [found[place] for place in sorted(found)]


def _choices(model: nn.Module, every: int) -> tuple[str, list[Sequence[int]]]:
    """Where the layers are, and which of them a twin could have: one of every kind, or the
    first ones until every kind was there, or all."""
    stack = next(
        (n for n, m in modules_of(model) if isinstance(m, nn.ModuleList) and len(m) == every), None
    )
    if stack is None or every == 0:
        return "", [range(min(every, 2)), range(every)]
    kinds = [parts_of(layer) for layer in model.get_submodule(stack).children()]
    first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    few = min(every, 2)
    some = sorted({*first.values(), *(range(few) if len(first) == 1 else ())})
    prefix = range(max(*first.values(), few - 1) + 1)
    # Layers that share weights with the next of their kind want it there.
    again = {kind: layer for layer, kind in reversed(list(enumerate(kinds))) if layer not in some}
    return stack, [some, prefix, sorted({*some, *again.values()}), range(every)]


def _built(kind: type, config: Any) -> Any:
    for one in _configs(config):
        one._attn_implementation_internal = _implementation(one)
        one._experts_implementation_internal = "eager"  # others take no float64
    with _building, OwnRandomness(), torch.no_grad():
        made = kind(config)
    return made.to(torch.float64).eval()


def _implementation(config: Any) -> str | None:
    """What transformers would choose; its SDPA leaves softcaps out."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "_attn_implementation_internal"):
            yield from _configs(value)


@torch.no_grad()
def _filled(twin: nn.Module) -> nn.Module:
    """Random weights, also where they start as zeros and ones."""
    random = torch.Generator().manual_seed(16)

    def noise(like: Tensor) -> Tensor:
        return 0.15 * torch.randn(like.shape, generator=random, dtype=torch.float64)

    for parameter in twin.parameters():
        values = noise(parameter)
        parameter.copy_(values if parameter.dim() > 1 else parameter + values)
    kept = twin.state_dict(keep_vars=True)
    for name, buffer in twin.named_buffers():
        if name in kept and buffer.is_floating_point():
            buffer.add_(noise(buffer))
    return twin


class OwnRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random numbers in it are drawn from a generator of its own: those of the process,
    and of other threads, stay as they are."""

    def __init__(self, seed: int = 16) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if any(one.name == "generator" for one in function._schema.arguments):
            given["generator"] = self._generator
        elif torch.Tag.nondeterministic_seeded in function.tags:
            with_generator = getattr(function._overloadpacket, "generator", None)
            if with_generator is not None:
                return with_generator(*args, **given, generator=self._generator)
        return function(*args, **given)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Settings of the caller that must not reach a twin: no_grad, autocast, a device."""
    elsewhere = torch.get_default_device().type != "cpu"
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu") if elsewhere else contextlib.nullcontext(),
    ):
        yield
