"""Ranks that are about to exchange tensors first compare what they were given, and those
that raise tell the others."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from longspan import _C
from longspan._group import Group, LostPeer, agree, ranks_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

#: How a rank hears of an error of another one, as `tell` words it.
_RAISED = re.compile(r"another rank raised: (rank \d+: (\w+): .*)", re.DOTALL)


def tell(group: Group | None, error: BaseException) -> None:
    """Ranks that wait for this one, now or in their next call, raise what it raised."""
    if group is not None and group.size() > 1:
        _C.tell_raised(group.name, f"{type(error).__name__}: {error}")


def tell_unless_known(group: Group, error: BaseException) -> None:
    """For blocks around the calls of others, which tell by themselves."""
    if not isinstance(error, LostPeer) and not _C.raised_last(group):
        tell(group, error)


def tells_ranks(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """For functions with a `group` that call an operator over its ranks: what they raise
    before it, say of a wrong argument, the other ranks hear of. Operators tell by
    themselves."""

    place = list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def told(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        group = arguments[place] if len(arguments) > place else options.get("group")
        if group is None or torch.compiler.is_compiling():
            return function(*arguments, **options)
        try:
            ranks = ranks_of(group)
            before = _C.calls_of(ranks)
        except Exception:  # no group: the function says so
            return function(*arguments, **options)
        try:
            return function(*arguments, **options)
        except LostPeer:
            raise
        except BaseException as error:
            if _C.calls_of(ranks) == before:
                tell(ranks, error)
            raise

    return told


@contextlib.contextmanager
def in_layer(name: str) -> Iterator[None]:
    """Calls inside say that they are in this layer, so that ranks of which one leaves a
    layer out, or takes another first, are told which. Models of `parallelize` name their
    layers."""
    before = _C.name_layer(str(name))
    try:
        yield
    finally:
        _C.name_layer(before)


def in_layer_of(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """The same for a module of transformers; compiled code has no names."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    index = getattr(module, "layer_idx", None)
    return in_layer(type(module).__name__ + ("" if index is None else f" {index}"))


class Agreement:
    """Comparisons over a group, as a ``with`` block around everything that may raise:
    a rank that raises tells the others, which would otherwise wait for it, and they
    raise the same.

    Without a group, or with one rank, nothing is compared."""

    def __init__(self, who: str, group: Group | None, wanted: bool = True) -> None:
        self._who = who
        self._group = group if wanted and group is not None and group.size() > 1 else None
        self._compares = False

    def compare(self, fields: Mapping[str, Any]) -> None:
        """ValueError on every rank where a field differs; what another rank raised where
        one did."""
        if self._group is None:
            return
        self._compares = True  # all ranks know of what it raises
        try:
            agree(self._group, fields)
        except _C.DifferentFields as error:
            raise ValueError(
                f"{self._who}: the ranks were given batches with different keys ({error})"
            ) from None
        except ValueError as error:
            told = _RAISED.search(str(error))
            if told is None:
                raise
            raise _builtin(told[2])(f"{self._who}: {told[1]}") from None
        self._compares = False

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._group is None or error is None or self._compares:
            return
        if not isinstance(error, LostPeer):
            tell(self._group, error)


def _builtin(name: str) -> type[Exception]:
    """The type of an error of another rank, where it is one of Python's own."""
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return RuntimeError
    # Those take more than a text.
    return RuntimeError if issubclass(kind, UnicodeError) else kind
