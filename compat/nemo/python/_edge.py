"""The public edge: a message begins with the name of the function that was called."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PACKAGE = __name__.rpartition(".")[0]

# How a message names the function inside that refused.
_NAME = re.compile(r"[A-Za-z_]\w*(?:::\w+)*(?:\(\))?: ")


def public(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refusals of this package that leave `function` speak with its name.

    What a caller's own function raises on the way passes as it is.
    """

    @functools.wraps(function)
    def edge(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError) as error:
            if _is_ours(error):
                _rename(error, function.__name__)
            raise

    return edge


@contextlib.contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Refusals of an operator call its tensors what the caller called them."""
    try:
        yield
    except ValueError as error:
        text = re.sub(r"`(\w+)`", lambda m: f"`{names.get(m[1], m[1])}`", str(error))
        raise ValueError(text) from None


def _is_ours(error: Exception) -> bool:
    """Whether a function behind the edge raised it, or the C++ that it called."""
    frame = error.__traceback__
    if frame is None or frame.tb_next is None:  # the call itself did not fit
        return False
    while frame.tb_next is not None:
        frame = frame.tb_next
    module = str(frame.tb_frame.f_globals.get("__name__", ""))
    return module.startswith(_PACKAGE + ".")


def _rename(error: Exception, name: str) -> None:
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    (text,) = error.args
    inner = _NAME.match(text)
    if inner is not None:
        error.args = (f"{name}: {text[inner.end() :]}",)
    elif isinstance(error, ValueError):
        error.args = (f"{name}: {text}",)
