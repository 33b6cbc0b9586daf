"""Ranks that are about to exchange tensors first compare what they were given."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from longspan import _C
from longspan._group import Group, agree


class Agreement:
    """Comparisons over a group, as a ``with`` block around everything that may raise
    before the first comparison: a rank that raises tells the others, which would
    otherwise wait for it.

    Without a group, or with one rank, nothing is compared."""

    def __init__(self, who: str, group: Group | None, wanted: bool = True) -> None:
        self._who = who
        self._group = group if wanted and group is not None and group.size() > 1 else None
        self._begun = False

    def compare(self, fields: Mapping[str, Any]) -> None:
        """ValueError on every rank where a field differs, or where a rank refused."""
        self._begun = True
        if self._group is None:
            return
        try:
            agree(self._group, fields)
        except _C.DifferentFields as error:
            raise ValueError(
                f"{self._who}: the ranks were given batches with different keys, or a rank "
                f"refused its batch and its own error says why ({error})"
            ) from None

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        refused = isinstance(error, (ValueError, TypeError, NotImplementedError))
        if self._group is None or self._begun or not refused:
            return
        # This rank raises anyway, whether or not the others did.
        with contextlib.suppress(ValueError):
            agree(self._group, {f"{self._who} refused": True})
