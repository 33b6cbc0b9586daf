"""Going over the modules of a model, which every batch does."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

Found = TypeVar("Found")


def walked(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterable[tuple[str, nn.Module]]:
    """What `named_modules` gives, in the same order and sooner: its generators nest as deep as
    the modules do. Those of `but` are left out, with what is in them alone."""
    return _walk(model, but) if but or not _still.has(model) else _every(model)


@contextlib.contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """While this lasts nobody adds modules to the model or takes any out, so that this thread
    goes over it once."""
    outside = _still.inside, _still.answers
    _still.inside, _still.answers = {id(part): part for _, part in _walk(model)}, {}
    try:
        yield
    finally:
        _still.inside, _still.answers = outside


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Its modules train afterwards where they did before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def remembered(find: Callable[[nn.Module], Found]) -> Callable[[nn.Module], Found]:
    """For what follows from the modules of a model: looked for once while that is still."""

    @functools.wraps(find)
    def found(model: nn.Module) -> Found:
        if not _still.has(model):
            return find(model)
        key = id(model), find
        if key not in _still.answers:
            _still.answers[key] = find(model)
        answer: Found = _still.answers[key]
        return answer

    return found


class _Still(threading.local):
    #: Kept, so that no other module gets its number.
    inside: dict[int, nn.Module]
    answers: dict[Any, Any]

    def __init__(self) -> None:
        self.inside, self.answers = {}, {}

    def has(self, model: nn.Module) -> bool:
        return id(model) in self.inside


_still = _Still()


def _walk(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    seen = set(but)
    stack: list[tuple[str, nn.Module | None]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        yield name, module
        children = module._modules
        if children:
            before = f"{name}." if name else ""
            stack += [(before + key, children[key]) for key in reversed(children)]


@remembered
def _every(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(_walk(model))
