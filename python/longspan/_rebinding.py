"""A method's own code in which some names of its module mean something else.

Layers with recurrences call functions of their module by name: a convolution, a scan. For
one instance, its class's forward is made again from the same code, with a table of names in
which those are ours; neither the class nor the module changes."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

#: Where decorators come from that call what they hold and leave its arguments alone.
_KNOWN_DECORATORS = ("transformers.integrations.accelerate",)


class CannotRebind(Exception):
    """The code is not what a recipe was written for; the text says why."""


def named_in(function: Any, name: str) -> Any:
    """What the code of a method means by a name of its module."""
    code = _undecorated(function)[-1]
    if name not in _names_in(code.__code__) or name not in code.__globals__:
        raise CannotRebind(f"does not call `{name}`")
    return code.__globals__[name]


def rebound(function: Any, table: Mapping[str, Callable[..., Any]]) -> Any:
    """The same function with other meanings of some names, each of which it must use.
    Decorators that are known stay around it."""
    *around, made = _undecorated(function)
    for name in table:
        named_in(function, name)
    # Without a name of the module: what compiles it would look names up there.
    scope = {key: value for key, value in made.__globals__.items() if key != "__name__"}
    made = _again(made, {**scope, **table}, made.__closure__)
    for decorator in reversed(around):
        cells = tuple(
            types.CellType(made) if cell.cell_contents is decorator.__wrapped__ else cell
            for cell in decorator.__closure__ or ()
        )
        made = _again(decorator, decorator.__globals__, cells)
    return made


def _undecorated(function: Any) -> list[Any]:
    """The decorators around a function, outermost first, and it itself."""
    found = [function]
    while hasattr(found[-1], "__wrapped__"):
        home = getattr(found[-1], "__globals__", {}).get("__name__")
        if home not in _KNOWN_DECORATORS:
            raise CannotRebind(f"is decorated by something of {home}, which is not known")
        found.append(found[-1].__wrapped__)
    if not isinstance(found[-1], types.FunctionType):
        raise CannotRebind("is no plain function")
    return found


def _again(function: Any, scope: dict[str, Any], cells: Any) -> Any:
    made = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    return made


def _names_in(code: types.CodeType) -> set[str]:
    inside = (_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inside)
