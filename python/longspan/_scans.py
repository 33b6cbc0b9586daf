"""How one rank's runs are convolved and scanned by the functions that a model calls itself,
which know nothing of documents and borders. Made once a batch."""

from __future__ import annotations

import torch

from longspan import _C
from longspan._pools import HaloPlan, OnDevices
from longspan._states import StatePlan


class Borders:
    """Where convolutions of `count` + 1 tokens look over the borders of this rank's runs of
    [rows, L, ..]: at the first `count` tokens of each, which see what `tokens_before` brings.
    """

    def __init__(self, halo: HaloPlan, tokens: int, real: torch.Tensor) -> None:
        self.halo = halo
        begins = torch.tensor(
            [row * tokens + run.local for row, run in halo.runs], dtype=torch.int64
        )
        lengths = torch.tensor([len(run) for _, run in halo.runs], dtype=torch.int64)
        steps = torch.arange(halo.count)
        there = (steps < lengths.unsqueeze(1)).flatten()
        places = (begins.unsqueeze(1) + steps).flatten()
        #: Of the first tokens of each run their places in [rows * L], 0 where it is shorter.
        self.places = OnDevices(torch.where(there, places, 0))
        #: Whether they are there, [runs * count].
        self.there = OnDevices(there)
        #: The places of those that are, and which of them these are.
        self.targets = OnDevices(places[there])
        self.written = OnDevices(there.nonzero().flatten())
        #: Which of [rows, L] are no pads; None where all are.
        self.real = None if bool(real.all()) else OnDevices(real)


class RunGroup:
    """Runs of one rank that are scanned in one call, side by side: as long as each other, up to
    what a kernel fills its chunks with anyway. All of them go on with a document, or none."""

    def __init__(
        self,
        runs: list[tuple[int, _C.DocumentRun]],
        chained: list[int],
        chunk: int,
        tokens: int,
        rows: int,
    ) -> None:
        self.continues = runs[0][1].position > 0
        #: What a kernel with small enough chunks computes for each.
        self.chunk = min(chunk, max(chunked(len(run), chunk) for _, run in runs))
        self.width = max(len(run) for _, run in runs)
        #: Which of its runs are chained: (place in the group, place among the chained).
        self.chained = [(i, at) for i, at in enumerate(chained) if at >= 0]
        self.handing = OnDevices(torch.tensor([i for i, _ in self.chained], dtype=torch.int64))
        self.getting = OnDevices(torch.tensor([at for _, at in self.chained], dtype=torch.int64))
        begins = torch.tensor([row * tokens + run.local for row, run in runs])
        lengths = torch.tensor([len(run) for _, run in runs])
        steps = torch.arange(self.width)
        there = steps < lengths.unsqueeze(1)
        #: Places in [rows * L], [runs, width], and which of them are there.
        self.places = OnDevices(torch.where(there, begins.unsqueeze(1) + steps, 0).flatten())
        self.there = None if bool(there.all()) else OnDevices(there)
        self.tokens = (begins.unsqueeze(1) + steps)[there]
        self.size = len(runs)
        self._only = (runs[0][0], runs[0][1].local) if len(runs) == 1 else None
        self.whole = self.size == rows and self.width == tokens and self.there is None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Its tokens of [rows, L, ..]: [runs, width, ..], zeros behind the shorter ones."""
        if self.whole:
            return x
        if self._only is not None:
            row, begin = self._only
            return x[row : row + 1, begin : begin + self.width]
        found = x.flatten(0, 1).index_select(0, self.places.on(x.device))
        found = found.view(self.size, self.width, *x.shape[2:])
        if self.there is None:
            return found
        there = self.there.on(x.device)
        return torch.where(there.view(*there.shape, *[1] * (x.dim() - 2)), found, 0)


class Scans:
    """How the runs of this rank are scanned: in groups, each by one call."""

    def __init__(self, plan: StatePlan, chunk: int, tokens: int, rows: int) -> None:
        self.plan = plan
        at = {run: i for i, run in enumerate(plan.chained)}
        kinds: dict[tuple[bool, int], list[int]] = {}
        for i, (_, run) in enumerate(plan.runs):
            kinds.setdefault((run.position > 0, chunked(len(run), chunk)), []).append(i)
        self.groups = [
            RunGroup(
                [plan.runs[i] for i in runs], [at.get(i, -1) for i in runs], chunk, tokens, rows
            )
            for runs in kinds.values()
        ]
        handed = [place for group in self.groups for _, place in group.chained]
        #: From the order of the groups to that of the plan.
        self.order = OnDevices(torch.tensor(handed, dtype=torch.int64).argsort())
        #: For each token its row among the answers of all groups; pads have the row behind.
        rows_of = torch.full((rows * tokens,), -1)
        count = 0
        for group in self.groups:
            there = torch.arange(group.size * group.width)
            if group.there is not None:
                there = there[group.there.on(there.device).flatten()]
            rows_of[group.tokens] = there + count
            count += group.size * group.width
        self.pads = bool((rows_of < 0).any())
        self.rows = OnDevices(torch.where(rows_of < 0, count, rows_of))
        self._shape = (rows, tokens)
        #: Whether any rank carries anything.
        self.carries = bool(plan.tables[0].shape[0]) or bool(plan.chained)

    def together(self, answers: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """What the groups answered, [runs, width, ..] each, as [rows, L, ..]; zeros for pads.
        `like` has the shape and the type of an answer where there is no group."""
        if len(self.groups) == 1 and self.groups[0].whole:
            return answers[0]
        parts = [answer.flatten(0, 1) for answer in answers]
        if self.pads or not parts:
            parts.append(like.new_zeros(1, *like.shape[2:]))
        rows = torch.cat(parts).index_select(0, self.rows.on(like.device))
        return rows.view(*self._shape, *like.shape[2:])


def chunked(length: int, chunk: int) -> int:
    """So many tokens a kernel with such chunks computes for a run of so many."""
    if length > chunk:
        return -(-length // chunk) * chunk
    return min(chunk, max(16, 1 << (length - 1).bit_length()))
