"""Hooks that users put on modules: code of a model that no class shows, so no twin has it.

Those of libraries whose hooks leave tokens alone are known. Of the others, those that were there
when a model was parallelized are watched while it is looked at; later ones are refused, but for
those of one call that only look.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_all

from longspan._walking import remembered, walked

#: They wrap, cast, checkpoint and capture; what each does to tokens is known.
_KNOWN = frozenset({"torch", "transformers", "accelerate", "peft", "trl", "wandb", "longspan"})
_NOISE = "transformers.integrations.neftune"
_FORWARD = "forward"
AGAIN = "call longspan.restore(model) and longspan.parallelize(model, group) again"


@dataclass(frozen=True)
class Guest:
    """A hook, and where it is; one on all modules of the process has no module."""

    name: str
    module: nn.Module | None
    hook: Any

    @property
    def where(self) -> str:
        if self.module is None:
            return "all modules"
        kind = type(self.module).__name__
        return f"'{self.name}' ({kind})" if self.name else kind

    def __str__(self) -> str:
        return f"the hook {name_of(self.hook)} on {self.where}"


@remembered
def guests_in(model: nn.Module) -> list[Guest]:
    """The hooks around the calls of its modules that nobody knows."""
    found = [
        Guest("", None, hook)
        for hooks in (of_all._global_forward_pre_hooks, of_all._global_forward_hooks)
        for hook in hooks.values()
        if not is_known(hook)
    ]
    for name, module in walked(model):
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            found += [Guest(name, module, hook) for hook in guests_of(module)]
    return found


def backward_guests_in(model: nn.Module) -> list[Guest]:
    """Those around the gradients of its modules."""
    return [
        Guest(name, module, hook)
        for name, module in walked(model)
        for hook in (*module._backward_pre_hooks.values(), *module._backward_hooks.values())
        if not is_known(hook)
    ]


def guests_of(module: nn.Module) -> list[Any]:
    """The unknown hooks on one module."""
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in every if not is_known(hook)]


def newcomers(now: Iterable[Guest], before: Iterable[Guest]) -> list[Guest]:
    """Those that were not there before."""
    known: dict[int, list[Any]] = {}
    for guest in before:
        known.setdefault(id(guest.module), []).append(guest.hook)
    return [one for one in now if one.hook not in known.get(id(one.module), ())]


def adds_noise(guest: Guest) -> bool:
    """NEFTune's noise is as large as the number of tokens at hand says, in training only."""
    return home_of(guest.hook) == _NOISE


@contextlib.contextmanager
def changes(modules: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """The names of those whose hooks changed, inside, what they take or give."""
    found: set[str] = set()
    handles: list[Any] = []
    for name, module in modules.items():
        note, compare = _pair(functools.partial(found.add, name))
        for begin in (
            functools.partial(module.register_forward_pre_hook, with_kwargs=True),
            functools.partial(module.register_forward_hook, with_kwargs=True),
        ):
            handles += [begin(note, prepend=True), begin(compare)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _pair(tell: Callable[[], Any]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks for before and after others, which tell when those changed something."""
    before: list[Any] = []

    def note(_: Any, *seen: Any) -> None:
        before.append(_versions(seen))

    def compare(_: Any, *seen: Any) -> None:
        if before.pop() != _versions(seen):
            tell()

    return note, compare


def _watch(module: nn.Module, hooks: Sequence[Any], tell: Callable[[], Any]) -> list[Any]:
    """Tells when these hooks on a module changed something; handles to end that. Others, which
    cast and wrap, keep their places and are not looked at."""
    handles: list[Any] = []
    every: Any
    for every, register in (
        (module._forward_pre_hooks, module.register_forward_pre_hook),
        (module._forward_hooks, module.register_forward_hook),
    ):
        begin = functools.partial(register, with_kwargs=True)
        for key in list(every) if any(one in hooks for one in every.values()) else ():
            pair = _pair(tell) if every[key] in hooks else ()
            handles += map(begin, pair[:1])
            every.move_to_end(key)
            handles += map(begin, pair[1:])
    return handles


class Lookout:
    """What came after `shard` had a look. Hooks of one call that only look may stay; one that
    changes what its module takes or gives is refused when it does."""

    def __init__(self, model: nn.Module, before: Iterable[Guest]) -> None:
        self._model = model
        self._before = list(before)
        every: list[Mapping[int, Any]] = [
            of_all._global_forward_pre_hooks,
            of_all._global_forward_hooks,
        ]
        modules = list(walked(model))
        for _, module in modules:
            every += (module._forward_pre_hooks, module._forward_hooks)
        self._every = every
        self._named = [(name, type(module)) for name, module in modules]
        self._attributes = [vars(module) for _, module in modules]
        self._forwards = self._own_forwards()
        #: The numbers that torch gave hooks when there was no newcomer; it gives each once.
        self._usual = self._numbers()
        #: While a call is watched: those of its modules, and what there was in all.
        self._inside: set[int] = set()
        self._watched: list[int] = []
        self._handles: list[Any] = []

    def check_forwards(self, who: str) -> None:
        """That nobody puts other code in the place of a module's; libraries that are known wrap
        that of the whole model."""
        now = self._own_forwards()
        if now == self._forwards:
            return
        for (name, kind), own, before in zip(self._named, now, self._forwards, strict=True):
            gone = own is None and _code_home(before).startswith("longspan.")
            if own is before or (not gone and (own is None or _is_of_library(own))):
                continue
            where = f"'{name}' ({kind.__name__})" if name else kind.__name__
            how = "is gone since" if gone else "came after"
            raise ValueError(
                f"{who}: the forward {name_of(before if gone else own)} of {where} {how} the model "
                f"was parallelized, and nobody has looked at what that does to tokens; put it "
                f"{'back' if gone else 'there before'}, or {AGAIN}"
            )
        self._forwards = now

    def _own_forwards(self) -> list[Any]:
        return [own.get(_FORWARD) for own in self._attributes]

    def begin(self, part: nn.Module) -> None:
        """A call of a model of transformers begins, perhaps inside of another's."""
        self.check_forwards(type(part).__name__)
        now = self._numbers()
        if now == self._usual or (now == self._watched and id(part) in self._inside):
            return
        if self._handles:  # of a call that raised
            self.end()
            now = self._numbers()
        came = newcomers(guests_in(self._model), self._before)
        if came:
            self._look_at(part, came)
        else:
            self._usual = now

    def _look_at(self, part: nn.Module, came: Iterable[Guest]) -> None:
        who = type(part).__name__
        self._inside = {id(module) for _, module in walked(part)}
        for guest in came:
            if _is_around(guest, part):
                _refuse(who, guest, "nobody sees there what it does to this call")
        hooked: dict[int, list[Guest]] = {}
        for guest in came:
            if id(guest.module) in self._inside:
                hooked.setdefault(id(guest.module), []).append(guest)
        for first, *more in hooked.values():
            why = "changes what this module takes or gives"
            tell = functools.partial(_refuse, who, first, why)
            assert first.module is not None
            self._handles += _watch(first.module, [one.hook for one in (first, *more)], tell)
        self._handles.append(part.register_forward_hook(lambda *_: self.end()))
        self._watched = self._numbers()

    def _numbers(self) -> list[int]:
        return list(chain.from_iterable(self._every))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched = []


def _is_around(guest: Guest, part: nn.Module) -> bool:
    """Whether it had its turn before a call of `part` could be watched, or has it afterwards."""
    if guest.module is None:
        return True
    if guest.module is part:
        return guest.hook in part._forward_pre_hooks.values()
    return any(module is part for _, module in walked(guest.module))


def _refuse(who: str, guest: Guest, why: str) -> None:
    raise ValueError(
        f"{who}: {guest} came after the batch was cut, and {why}; put it there before "
        f"longspan.parallelize, or let it look only, from a module inside"
    )


def _versions(value: Any) -> list[Any]:
    """Which tensors these are, and how often each was written."""
    if isinstance(value, Tensor):
        return [(id(value), 0 if value.is_inference() else value._version)]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value if isinstance(value, (bool, int, float, str)) else id(value)]
    return [one for part in value for one in _versions(part)]


def is_known(hook: Any) -> bool:
    """Whether it is from a library whose hooks leave tokens alone."""
    home = home_of(hook)
    return home.partition(".")[0] in _KNOWN and home != _NOISE


def _is_of_library(forward: Any) -> bool:
    """By the code itself: wrappers copy the names of what they wrap."""
    return _code_home(forward).partition(".")[0] in _KNOWN


def _code_home(forward: Any) -> str:
    function = _bare(forward)
    return str(getattr(function, "__globals__", {}).get("__name__") or type(function).__module__)


def home_of(hook: Any) -> str:
    """The module of Python that its code is from."""
    function = _bare(hook)
    return str(getattr(function, "__module__", None) or type(function).__module__)


def name_of(hook: Any) -> str:
    function = _bare(hook)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def names_in(function: Any) -> tuple[str, ...]:
    """What its code looks up by name."""
    bare = inspect.unwrap(_bare(function))
    code = getattr(bare, "__code__", None) or getattr(type(bare).__call__, "__code__", None)
    return () if code is None else code.co_names


def _bare(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)
