"""A plan knows, to the byte, what attention will send."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch

import longspan
from longspan import Group, Mask, Ownership, Packing, Plan, Strategy, run_ranks

HEADS, KEY_HEADS, DIM, VALUE_DIM = 6, 2, 5, 3
PACKING = Packing.of([21, 1, 0, 14, 3], [24, 2, 2, 16, 4])  # 48 tokens, for 1 to 4 ranks

MASKS: dict[str, Callable[[int], list[Mask]]] = {
    "causal": lambda rows: [Mask.causal(Packing.single(48))],
    "full": lambda rows: [Mask.full(Packing.single(48))],
    "documents": lambda rows: [Mask.causal(PACKING)],
    "window": lambda rows: [Mask.sliding(Packing.single(48), 5)],
    "groups": lambda rows: [Mask.sliding(PACKING, 3).with_groups([(10, 15)])],
    "groups_in_the_window": lambda rows: [
        Mask.sliding(PACKING, 3).with_groups([(8, 17)]).with_group_reach("within_window")
    ],
    "a_mask_for_each_row": lambda rows: [Mask.causal(PACKING), Mask.full(Packing.single(48))][
        :rows
    ],
    "nothing_but_pads": lambda rows: [Mask.causal(Packing.of([0], [48]))],
}


def ownerships(ranks: int) -> dict[str, Ownership]:
    sizes = [0] * ranks
    sizes[0] = 7  # then ranks without tokens, and the rest on the last
    sizes[-1] += 41
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for i, begin in enumerate(range(0, 48, 3)):
        pieces[(i * 5 + 2) % ranks].insert(0, (begin, begin + 3))
    made = {
        "contiguous": Ownership.contiguous(48, ranks),
        "head-tail": Ownership.head_tail(48, ranks),
        "uneven": Ownership.of_sizes(sizes),
        "scattered": Ownership.of_ranges(pieces),
    }
    if ranks <= 2:  # the documents are padded for two
        made["per-document"] = Ownership.per_document_head_tail(
            PACKING.with_slots_multiple_of(2 * ranks).with_tokens_multiple_of(2 * ranks), ranks
        )
    return {name: owners for name, owners in made.items() if owners.tokens == 48}


def strategies(ranks: int) -> list[tuple[str, int]]:
    teams = [n for n in range(1, ranks + 1) if ranks % n == 0]
    fixed = ("ring", "gathered", "needed", "head_parallel", "head_parallel_ring")
    return [(name, 0) for name in fixed] + [("head_parallel_ring", n) for n in teams]


@dataclasses.dataclass(frozen=True)
class Call:
    owners_name: str
    owners: Ownership
    mask_name: str
    masks: list[Mask]
    strategy: str
    head_ranks: int
    rows: int  # 0: packed

    def plan_of(self, rank: int) -> Plan:
        return longspan.plan(
            self.owners,
            self.masks,
            strategy=Strategy(self.strategy, self.head_ranks),
            rank=rank,
            key_heads=KEY_HEADS,
            rows=max(self.rows, 1),
        )

    def inputs(self, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
        tokens = self.owners.local_tokens(rank)

        def draw(heads: int, dim: int) -> torch.Tensor:
            shape = (self.rows, heads, tokens, dim) if self.rows else (tokens, heads, dim)
            return torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_()

        return [draw(HEADS, DIM), draw(KEY_HEADS, DIM), draw(KEY_HEADS, VALUE_DIM)]

    def __str__(self) -> str:
        team = f"({self.head_ranks})" if self.head_ranks else ""
        return f"{self.strategy}{team} over {self.owners_name}, {self.mask_name}, rows {self.rows}"


def calls(ranks: int, names: Iterable[str] = MASKS) -> list[Call]:
    return [
        Call(owners_name, owners, name, MASKS[name](max(rows, 1)), strategy, head_ranks, rows)
        for owners_name, owners in ownerships(ranks).items()
        for name in names
        for strategy, head_ranks in strategies(ranks)
        for rows in ((2, 0) if name == "documents" else (2,))
    ]


def sent(group: Group, call: Call, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that forward, and then backward, sent from here."""
    inputs = call.inputs(group.rank(), dtype)
    counts = [group.sent_bytes]
    out = longspan.attend(
        *inputs,
        mask=call.masks,
        layout=call.owners,
        group=group,
        strategy=Strategy(call.strategy, call.head_ranks),
    )
    assert isinstance(out, torch.Tensor)
    counts.append(group.sent_bytes)
    out.sum().backward()
    counts.append(group.sent_bytes)
    return counts[1] - counts[0], counts[2] - counts[1]


def planned(call: Call, rank: int, dtype: torch.dtype) -> tuple[int, int]:
    plan = call.plan_of(rank)
    forward, backward = (
        plan.sent_bytes(
            direction,
            heads=HEADS,
            key_heads=KEY_HEADS,
            head_dim=DIM,
            value_dim=VALUE_DIM,
            bytes_per_element=dtype.itemsize,
        )
        for direction in ("forward", "backward")
    )
    return forward, backward


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_attention_sends_what_its_plan_says(dtype: torch.dtype, ranks: int) -> None:
    # Sizes of elements and masks have nothing to do with each other.
    every = calls(ranks, MASKS if dtype == torch.float32 else ("documents",))
    found = run_ranks(ranks, lambda group: [sent(group, call, dtype) for call in every])
    wrong = [
        f"{call}, rank {rank}: sent {found[rank][i]}, planned {planned(call, rank, dtype)}"
        for i, call in enumerate(every)
        for rank in range(ranks)
        if found[rank][i] != planned(call, rank, dtype)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_send_is_an_arrival_of_its_peer(ranks: int) -> None:
    for call in calls(ranks):
        plans = [call.plan_of(rank) for rank in range(ranks)]
        steps = {len(plan.steps) for plan in plans}
        assert len(steps) == 1, str(call)
        for step in range(steps.pop()):
            for rank in range(ranks):
                here = plans[rank].steps[step]
                for mine, theirs in (("sends", "arrivals"), ("returns", "homecomings")):
                    for peer, tokens in getattr(here, mine):
                        assert (rank, tokens) in getattr(plans[peer].steps[step], theirs), (
                            f"{call}: {mine} of rank {rank} at step {step}"
                        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_visible_pair_is_computed_once(ranks: int) -> None:
    # In a team every member computes its own heads.
    alone = [call for call in calls(ranks) if not call.strategy.startswith("head_parallel")]
    assert alone
    for call in alone:
        masks = call.masks if len(call.masks) > 1 else call.masks * max(call.rows, 1)
        pairs = sum(mask.pairs((0, 48), (0, 48)) for mask in masks)
        assert pairs == sum(
            step.pairs for rank in range(ranks) for step in call.plan_of(rank).steps
        ), str(call)


def test_one_rank_sends_nothing() -> None:
    for call in calls(1):
        assert planned(call, 0, torch.float32) == (0, 0), str(call)


@pytest.mark.parametrize("strategy", ["ring", "needed"])
def test_documents_that_stay_at_home_send_nothing(strategy: str) -> None:
    """Each rank holds whole documents, so no key is needed elsewhere."""
    owners = Ownership.contiguous(48, 4)
    mask = Mask.causal(Packing.of([12, 3, 9, 12, 12]))

    def body(group: Group) -> int:
        inputs = [torch.randn(12, 2, 4, requires_grad=True) for _ in range(3)]
        out = longspan.attend(*inputs, mask=mask, layout=owners, group=group, strategy=strategy)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
        return group.sent_bytes

    assert run_ranks(4, body) == [0] * 4


@pytest.mark.parametrize("unknown", ["", "sideways"])
def test_a_plan_refuses_other_directions(unknown: str) -> None:
    plan = longspan.plan(Ownership.contiguous(4, 2))
    with pytest.raises(ValueError, match="forward"):
        plan.sent_bytes(unknown, heads=1, key_heads=1, head_dim=1)
