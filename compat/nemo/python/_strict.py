"""The one switch of the drop-in: the reference's rules, also where they are wrong."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from types import TracebackType

# The `with strict():` blocks that this thread or task is inside.
_entered: ContextVar[tuple[strict, ...]] = ContextVar("longspan.compat.nemo.strict", default=())


class strict(contextlib.ContextDecorator):
    """Inside this context the drop-in follows the reference's rules where they differ.

    Arguments are still checked, and bad ones refused with the same messages. It
    holds for the current thread and task only, and may be nested.
    """

    def __enter__(self) -> strict:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Left in another thread or task than it was entered in, there is nothing
        # of this block here to end.
        entered = _entered.get()
        for i in reversed(range(len(entered))):
            if entered[i] is self:
                _entered.set(entered[:i] + entered[i + 1 :])
                return


def is_strict() -> bool:
    """Whether the caller is inside ``with strict():``."""
    return bool(_entered.get())
