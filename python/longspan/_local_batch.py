"""One rank's share of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longspan import _C
from longspan._group import Group

#: Where `shard` puts how a model's layers attend to this batch.
KEYWORD = "longspan"


class LocalBatch(dict[str, Any]):
    """One rank's share of a batch: a dictionary for ``model(**local)`` that also
    carries the `cut` it came from, and the `group` it was cut for where there is one, so that
    ``unshard(tensor, local)`` needs nothing else. With `as_row` a stream [T, ...] lies
    in the tensors as one row [1, T, ...], as models want it."""

    cut: _C.Cut
    group: Group | None
    as_row: bool

    def __init__(
        self,
        entries: Mapping[str, Any],
        cut: _C.Cut | None = None,
        group: Group | None = None,
        as_row: bool = False,
    ) -> None:
        super().__init__(entries)
        if cut is None:
            # Trainers rebuild the mappings they move to a device, as type(batch)(entries).
            attention = self.get(KEYWORD)
            if attention is None:
                raise TypeError(
                    "LocalBatch: entries alone do not say how they were cut; shard makes them "
                    "with a model, or give the cut"
                )
            cut, group = attention.cut, attention.group
            as_row = attention.cut.form == "stream"
        assert cut is not None
        self.cut = cut
        self.group = group
        self.as_row = as_row

    def __repr__(self) -> str:
        return f"LocalBatch({super().__repr__()}, {self.cut})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Groups do not leave their process, nor does what attends over them.
        entries = {key: value for key, value in self.items() if key != KEYWORD}
        return LocalBatch, (entries, self.cut, None, self.as_row)

    def copy(self) -> LocalBatch:
        return self | {}

    __copy__ = copy

    def __or__(self, other: Mapping[str, Any]) -> LocalBatch:  # type: ignore[override]
        return LocalBatch(dict(self) | dict(other), self.cut, self.group, self.as_row)


def real_tokens(cut: _C.Cut) -> torch.Tensor:
    """Which of a rank's tokens are no pads: [rows, tokens], or one row for a stream."""
    mine = cut.ownership.tokens_of(cut.rank)
    rows = []
    for packing in cut.packings:
        real = torch.ones(packing.tokens, dtype=torch.bool)
        for pads in packing.pads():
            real[pads.begin : pads.end] = False
        rows.append(real[mine])
    return torch.stack(rows)
