"""Hooks that users put on modules: code of a model that no class shows, so no twin has it.

Those of libraries whose hooks leave tokens alone are known. Of the others, those that were there
when a model was parallelized are watched while it is looked at; later ones are refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_all

from longspan._walking import remembered, walked

#: They wrap, cast, checkpoint and capture; what each does to tokens is known.
_KNOWN = frozenset({"torch", "transformers", "accelerate", "peft", "trl", "wandb", "longspan"})
_NOISE = "transformers.integrations.neftune"


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
        if not _is_known(hook)
    ]
    for name, module in walked(model):
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            found += [Guest(name, module, hook) for hook in guests_of(module)]
    return found


def guests_of(module: nn.Module) -> list[Any]:
    """The unknown hooks on one module."""
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in every if not _is_known(hook)]


def newcomer(now: Iterable[Guest], before: Iterable[Guest]) -> Guest | None:
    """One that was not there before."""
    known: dict[int, list[Any]] = {}
    for guest in before:
        known.setdefault(id(guest.module), []).append(guest.hook)
    return next((one for one in now if one.hook not in known.get(id(one.module), ())), None)


def adds_noise(guest: Guest) -> bool:
    """NEFTune's noise is as large as the number of tokens at hand says, in training only."""
    return home_of(guest.hook) == _NOISE


@contextlib.contextmanager
def changes(modules: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """The names of those whose hooks changed, inside, what they take or give."""
    found: set[str] = set()
    handles = []
    for name, module in modules.items():
        before: list[Any] = []

        def note(_: Any, *seen: Any, before: list[Any] = before) -> None:
            before.append(_versions(seen))

        def compare(_: Any, *seen: Any, before: list[Any] = before, name: str = name) -> None:
            if before.pop() != _versions(seen):
                found.add(name)

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


def _versions(value: Any) -> list[Any]:
    """Which tensors these are, and how often each was written."""
    if isinstance(value, Tensor):
        return [(id(value), 0 if value.is_inference() else value._version)]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value if isinstance(value, (bool, int, float, str)) else id(value)]
    return [one for part in value for one in _versions(part)]


def _is_known(hook: Any) -> bool:
    home = home_of(hook)
    return home.partition(".")[0] in _KNOWN and home != _NOISE


def home_of(hook: Any) -> str:
    """The module of Python that its code is from."""
    function = _bare(hook)
    return str(getattr(function, "__module__", None) or type(function).__module__)


def name_of(hook: Any) -> str:
    function = _bare(hook)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _bare(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)
