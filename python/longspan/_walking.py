"""Going over the modules of a model, which every batch does."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

#: Where a parallelized module keeps what was done to it.
MARK = "_longspan"

Found = TypeVar("Found")
Named = tuple[str, nn.Module]


def walked(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterable[Named]:
    """What `named_modules` gives, in the same order and sooner: its generators nest as deep as
    the modules do. Those of `but` are left out, with what is in them alone."""
    walk = _walk(model, but) if but else _whole_walk(model)
    return zip(walk.names, walk.modules, strict=True)


def modules_in(model: nn.Module) -> Sequence[nn.Module]:
    """The same without names."""
    return _whole_walk(model).modules


def of_classes(model: nn.Module, wanted: Callable[[type], object]) -> list[Named]:
    """The modules of some classes, in the order of the model. A class is asked about once: models
    have thousands of modules, of a dozen classes."""
    kinds = {kind for kind in classes_in(model) if wanted(kind)}
    return [one for one in walked(model) if type(one[1]) in kinds] if kinds else []


def has(module: nn.Module, name: str) -> bool:
    """What hasattr says, and sooner: it takes torch long to say what a module does not have."""
    own = module.__dict__
    if name in own:
        return True
    kind: Any = type(module)
    if kind.__getattr__ is not nn.Module.__getattr__ or hasattr(kind, name):
        return hasattr(module, name)
    return name in own["_parameters"] or name in own["_buffers"] or name in own["_modules"]


def attribute(module: nn.Module, name: str, default: Any = None) -> Any:
    """What getattr gives, and sooner."""
    return getattr(module, name) if has(module, name) else default


@contextlib.contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """While this lasts nobody adds modules to the model or takes any out, so that this thread
    goes over it once."""
    outside = _still.inside, _still.answers
    try:
        _still.inside, _still.answers = {id(model)}, {}
        _still.inside.update(map(id, modules_in(model)))
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
    inside: set[int]  #: by number; `answers` keep them, so that no other module gets it
    answers: dict[Any, Any]

    def __init__(self) -> None:
        self.inside, self.answers = set(), {}

    def has(self, model: nn.Module) -> bool:
        return id(model) in self.inside


_still = _Still()


class _Walk(NamedTuple):
    names: list[str]
    modules: list[nn.Module]


def _walk(model: nn.Module, but: Collection[nn.Module] = ()) -> _Walk:
    seen = {id(module) for module in but}
    found = _Walk([], [])

    def enter(before: str, children: Mapping[str, nn.Module | None]) -> None:
        for key, module in children.items():
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            name = before + key
            found.names.append(name)
            found.modules.append(module)
            if module._modules:
                enter(f"{name}." if name else "", module._modules)

    enter("", {"": model})
    return found


_whole_walk = remembered(_walk)


@remembered
def classes_in(model: nn.Module) -> Collection[type]:
    """Those of its modules, in the order of the model."""
    return dict.fromkeys(map(type, modules_in(model)))
