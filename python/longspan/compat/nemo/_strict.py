"""The one switch of the drop-in: follow the reference even where it is wrong."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from types import TracebackType

# How many `with strict():` blocks this thread or task is inside.
_depth: ContextVar[int] = ContextVar("longspan.compat.nemo.strict", default=0)


class strict(contextlib.ContextDecorator):
    """Inside this context the drop-in follows the reference to the letter.

    It holds for the current thread and task only, and may be nested.
    """

    def __enter__(self) -> strict:
        _depth.set(_depth.get() + 1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _depth.set(_depth.get() - 1)


def is_strict() -> bool:
    """Whether the caller is inside ``with strict():``."""
    return _depth.get() > 0
