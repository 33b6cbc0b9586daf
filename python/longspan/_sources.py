"""The code that a model runs: what stands behind the names that its forwards use. A proof
holds for that code alone, and anybody may put other functions behind those names."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_ABSENT = object()
#: Where calls of a module begin.
_ENTRANCES = ("__call__", "forward")
_known: dict[frozenset[type], Sources] = {}
_lock = threading.Lock()


class Sources:
    """What stood behind the names that the forwards of some classes use, their methods and
    functions of their modules, as far as calls by name can be followed. Functions of torch
    are where that ends, and so are those of packages that none of the classes is from."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = tuple(kinds)
        self._packages = {_package(kind) for kind in self._kinds} - {"torch"}
        self._found: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any, str]] = {}
        self._waiting: list[types.FunctionType] = []
        self._names: set[str] = set()
        self._read: set[types.CodeType] = set()
        for name in _ENTRANCES:
            self._look_at_methods(name)
        while self._waiting:
            self._follow(self._waiting.pop())
        self._entries = tuple(self._found.values())

    def __len__(self) -> int:
        return len(self._entries)

    def changed(self) -> str | None:
        """The name of one that is another now, such as "LlamaMLP.forward"."""
        for names, name, value, said in self._entries:
            if names.get(name, _ABSENT) is not value:
                return said
        return None

    def _look_at_methods(self, name: str) -> None:
        for kind in self._kinds:
            mro = kind.__mro__
            home = next((i for i, base in enumerate(mro) if name in vars(base)), None)
            if home is None or not _functions_in(vars(mro[home])[name]):
                continue
            if _package(mro[home]) == "torch" and name not in _ENTRANCES:
                continue
            # Also where one would be found before it.
            for base in mro[: home + 1]:
                self._keep(base, name, base.__name__)

    def _follow(self, function: types.FunctionType) -> None:
        code = function.__code__
        if code in self._read:
            return
        self._read.add(code)
        for cell in function.__closure__ or ():
            try:
                self._waiting += _functions_in(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        if _package(function) not in self._packages:
            return
        for name in _names_in(code):
            names = function.__globals__
            if isinstance(names.get(name), (types.FunctionType, type)):
                self._keep(names, name, str(names.get("__name__", "?")))
            if name not in self._names:
                self._names.add(name)
                self._look_at_methods(name)

    def _keep(self, owner: type | dict[str, Any], name: str, said: str) -> None:
        if (id(owner), name) in self._found:
            return
        names = vars(owner) if isinstance(owner, type) else owner
        value = names.get(name, _ABSENT)
        self._found[id(owner), name] = (names, name, value, f"{said}.{name}")
        self._waiting += _functions_in(value)


def sources_of(kinds: Iterable[type]) -> Sources:
    """Those of some classes as they are now; looked up once as long as none of them changes."""
    key = frozenset(kinds)
    with _lock:
        known = _known.get(key)
        if known is None or known.changed() is not None:
            known = _known[key] = Sources(sorted(key, key=lambda kind: kind.__qualname__))
    return known


def _package(thing: Any) -> str:
    return str(thing.__module__).partition(".")[0]


def _functions_in(value: Any) -> list[types.FunctionType]:
    """What is called when an attribute is used."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, property):
        return [f for f in (value.fget,) if isinstance(f, types.FunctionType)]
    if isinstance(value, functools.cached_property):
        value = value.func
    return [value] if isinstance(value, types.FunctionType) else []


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
