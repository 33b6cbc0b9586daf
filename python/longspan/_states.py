"""States of recurrences over ranks: every run of a document makes something of the state that
comes in, and hands it to the next one. Plans are made once a batch from owners and
documents; what moves is pairs of runs, however long these are."""

from __future__ import annotations

from typing import Any

import torch

from longspan import _C
from longspan._agreement import tells_ranks
from longspan._arguments import check_choice, check_kind, check_tensors, check_whole
from longspan._attention import AttentionLayout
from longspan._group import ranks_of
from longspan._pools import Share


class StatePlan:
    """Which runs of this rank hand a state on, and who gets what for that.

    A run is a contiguous piece of one document that a rank holds (`values.runs_of`). Those
    of documents that lie in several runs are *chained*: `carry_states` takes and gives one
    row for each of them. Made once a batch, outside of compiled code, from an
    `AttentionLayout`, of which only owners and packings count; `rows` as for a `HaloPlan`.

    `way` says how pairs travel: "direct", in one exchange, from every run to all behind it;
    "scan", in rounds with twice the reach of the one before, combined on the way. "auto"
    takes what is quicker for pairs of `bytes_per_transition` and `bytes_per_state`, and
    transitions that are matrices of `matrix_rows` rows (1: numbers); without bytes that is
    "direct". The way is the same on all ranks, and so must be what is given here.
    """

    def __init__(
        self,
        attention: AttentionLayout,
        *,
        group: Any = None,
        rows: int | None = None,
        way: str = "auto",
        bytes_per_transition: int = 0,
        bytes_per_state: int = 0,
        matrix_rows: int = 1,
    ) -> None:
        check_choice("StatePlan", "way", way, ("auto", "direct", "scan"))
        pair = bytes_per_transition, bytes_per_state, matrix_rows
        for name, value, least in zip(
            ("bytes_per_transition", "bytes_per_state", "matrix_rows"), pair, (0, 0, 1), strict=True
        ):
            check_whole("StatePlan", name, value, least)
        self._share = Share("StatePlan", attention, group, rows)
        owners, masks, place = self._share.ownership, self._share.masks, self._share.place
        if way == "auto":
            way = _C.StatePlan.choose(owners, masks, place[1], *map(int, pair))
        self._plan = _C.StatePlan.of(owners, masks, *place, way)
        #: "direct" or "scan", and how many exchanges that takes a pass.
        self.way = self._plan.way
        self.rounds = self._plan.rounds
        #: The rank's runs, each with its row of the batch, in local order.
        self.runs = self._plan.runs
        #: Which of `runs` are chained, ascending.
        self.chained = self._plan.chained
        #: Plain numbers on the CPU: who sends what, how it is folded, and both backward.
        self.tables = self._plan.tables

    def sent_bytes(self, direction: str, *, bytes_per_transition: int, bytes_per_state: int) -> int:
        """Bytes that this rank sends to others, "forward" or "backward"; numbers travel in
        float32, or in float64 where one of the two has that."""
        return self._plan.sent_bytes(direction, bytes_per_transition, bytes_per_state)

    def __repr__(self) -> str:
        return repr(self._plan)


@tells_ranks
def carry_states(
    transition: torch.Tensor, state: torch.Tensor, plan: StatePlan, *, group: Any = None
) -> torch.Tensor:
    """The state that comes into each chained run of this rank, where a run makes
    ``transition * incoming + state`` of it and the next run of its document gets that; zeros
    at the beginning of a document. One exchange, or one a round of a plan whose way is
    "scan"; as many backward, with transposed transitions.

    ``state`` is [chained runs, .., K, V]. ``transition`` is one number for each of its
    matrices, [runs, ..]; one for each of their rows, [runs, .., K]; or a matrix,
    [runs, .., K, K]. The result is like ``state``, in float32, or float64 where one of the two
    is.
    """
    ranks = ranks_of(group)
    check_tensors("carry_states", transition=transition, state=state)
    check_kind("carry_states", "plan", plan, StatePlan, "a StatePlan")
    if state.dim() == 0 or state.shape[0] != len(plan.chained):
        raise ValueError(
            f"carry_states: `state` is {list(state.shape)}; expected [{len(plan.chained)}, ..], a "
            f"row for each chained run of this rank"
        )
    incoming: torch.Tensor = torch.ops.longspan.carry_states(
        transition, state, *plan.tables, ranks.name
    )
    return incoming
