"""States that runs of documents hand on, over N ranks: what reading each document from its
beginning gives, for every ownership, and as many bytes as the plan says."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import layouts
import pytest
import torch

import longspan
from longspan import AttentionLayout, Group, Mask, Ownership, Packing, comm, run_ranks

ops = torch.ops.longspan
RANKS = (1, 2, 3, 4, 7)
HEADS, K, V = 2, 3, 4
WAYS = ("direct", "scan")
KINDS: dict[str, tuple[int, ...]] = {"scalar": (), "vector": (K,), "matrix": (K, K)}

#: One token, none, straddling, and pads that fill a rank; and rows of other documents.
CASES: dict[str, list[list[tuple[int, int]]]] = {
    "one": [[(40, 42)]],
    "several": [[(23, 24), (1, 2), (0, 1), (17, 17), (3, 3), (9, 37)]],
    "rows": [[(13, 14), (28, 28)], [(42, 42)], [(1, 1), (26, 41)]],
}


def packings(case: str, ranks: int) -> list[Packing]:
    rows = [Packing.of(*map(list, zip(*row, strict=True))) for row in CASES[case]]
    rows = [p.with_slots_multiple_of(2 * ranks) for p in rows]
    longest = max(p.tokens for p in rows)
    return [
        Packing.of(p.lengths, [p.padded_length(d) for d in range(p.documents)], longest)
        for p in rows
    ]


def layout_of(owners: Ownership, rows: list[Packing]) -> AttentionLayout:
    return AttentionLayout(owners, [Mask.causal(packing) for packing in rows])


def pair(row: int, token: int, kind: str) -> list[torch.Tensor]:
    """What the run that begins there makes of a state, whoever holds it."""
    random = torch.Generator().manual_seed(1000 * row + token)
    return [
        torch.randn(shape, generator=random, dtype=torch.float64)
        for shape in ((HEADS, *KINDS[kind]), (HEADS, K, V))
    ]


def apply(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    if transition.dim() == 3:
        return transition @ state
    return transition.view(*transition.shape, *[1] * (3 - transition.dim())) * state


def read(
    owners: Ownership, rows: list[Packing], kind: str
) -> tuple[dict[tuple[int, int], list[torch.Tensor]], dict[tuple[int, int], torch.Tensor]]:
    """Every document from its beginning, run by run: the pairs, and what comes in."""
    pairs, incoming = {}, {}
    for row, packing in enumerate(rows):
        found = [
            run
            for rank in range(owners.ranks)
            for run in longspan.values.runs_of(packing, owners, rank)
        ]
        state = torch.zeros(())
        for run in sorted(found, key=lambda run: tuple(run.tokens)):
            at = row, run.tokens.begin
            pairs[at] = [x.requires_grad_() for x in pair(*at, kind)]
            if run.position == 0:
                state = torch.zeros(HEADS, K, V, dtype=torch.float64)
            incoming[at] = state
            state = apply(pairs[at][0], state) + pairs[at][1]
    return pairs, incoming


def weight(row: int, token: int) -> torch.Tensor:
    return pair(row, token + 500, "scalar")[1]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_reading_each_document(case: str, ranks: int) -> None:
    rows = packings(case, ranks)
    every = list(itertools.product(layouts.ownerships(rows[0], ranks).items(), KINDS, WAYS))

    def body(group: Group) -> list[dict[tuple[int, int], list[torch.Tensor]]]:
        found = []
        for (_, owners), kind, way in every:
            attention = layout_of(owners, rows)
            plan = comm.StatePlan(attention, group=group, rows=len(rows), way=way)
            assert plan.way == way
            runs = [plan.runs[i] for i in plan.chained]
            names = [(row, run.tokens.begin) for row, run in runs]
            mine = [pair(*at, kind) for at in names]
            transition, state = (
                torch.stack([pair[i] for pair in mine]) if mine else pair(0, 0, kind)[i][None][:0]
                for i in range(2)
            )
            leaves = [transition.requires_grad_(), state.requires_grad_()]
            bytes_ = {"bytes_per_transition": leaves[0][0].numel() * 8} if mine else {}
            sent = [group.sent_bytes]
            out = comm.carry_states(*leaves, plan, group=group)
            sent.append(group.sent_bytes)
            weights = [weight(*at) for at in names]
            (out * torch.stack(weights) if mine else out).sum().backward()
            sent.append(group.sent_bytes)
            for direction, before, after in (("forward", *sent[:2]), ("backward", *sent[1:])):
                said = plan.sent_bytes(
                    direction,
                    bytes_per_state=HEADS * K * V * 8,
                    **(bytes_ or {"bytes_per_transition": 0}),
                )
                assert said == after - before, direction
            grads = [leaf.grad for leaf in leaves]
            assert all(grad is not None for grad in grads)
            found.append({at: [t[i] for t in (out.detach(), *grads)] for i, at in enumerate(names)})
        return found

    shares = run_ranks(ranks, body)
    for i, ((name, owners), kind, way) in enumerate(every):
        pairs, incoming = read(owners, rows, kind)
        loss = sum((incoming[at] * weight(*at)).sum() for at in incoming)
        if torch.is_tensor(loss) and loss.requires_grad:
            loss.backward()
        ours = {at: of for share in shares for at, of in share[i].items()}
        for at, (out, *grads) in ours.items():
            torch.testing.assert_close(out, incoming[at].detach(), rtol=1e-12, atol=1e-12)
            for mine, leaf in zip(grads, pairs[at], strict=True):
                true = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                torch.testing.assert_close(
                    mine, true, rtol=1e-12, atol=1e-12, msg=f"{name} {kind} {way}"
                )
        # Documents of one run carry nothing.
        assert all(not incoming[at].any() for at in incoming.keys() - ours.keys())


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_every_time(way: str) -> None:
    rows = packings("several", 4)
    owners = Ownership.head_tail(rows[0].tokens, 4)

    def body(group: Group) -> list[torch.Tensor]:
        plan = comm.StatePlan(layout_of(owners, rows), group=group, way=way)
        here = len(plan.chained)
        random = torch.Generator().manual_seed(group.rank())
        m = torch.randn(here, 2, 16, 16, generator=random)
        s = torch.randn(here, 2, 16, 32, generator=random)
        return [comm.carry_states(m, s, plan, group=group) for _ in range(3)]

    for first, *others in run_ranks(4, body):
        assert first.dtype == torch.float32
        assert all(other.equal(first) for other in others)


@pytest.mark.parametrize("way", WAYS)
def test_a_nan_stays_in_its_document(way: str) -> None:
    """Also where a transition of a document's first run is one: nobody asks for it."""
    packing = Packing.of([10, 14])
    owners = Ownership.contiguous(24, 4)

    def body(group: Group) -> list[tuple[int, int, bool]]:
        plan = comm.StatePlan(layout_of(owners, [packing]), group=group, way=way)
        runs = [plan.runs[i][1] for i in plan.chained]
        state = torch.ones(len(runs), 1, 2, 2)
        transition = torch.ones(len(runs), 1)
        for i, run in enumerate(runs):
            if run.document == 0:
                state[i] = torch.nan
            if run.position == 0:
                transition[i] = torch.nan
        out = comm.carry_states(transition, state, plan, group=group)
        return [
            (run.document, run.position, bool(o.isnan().any()))
            for run, o in zip(runs, out, strict=True)
        ]

    for document, position, bad in itertools.chain(*run_ranks(4, body)):
        assert bad == (document == 0 and position > 0)


def test_half_types_are_carried_in_float32() -> None:
    owners = Ownership.contiguous(6, 3)

    def body(group: Group) -> tuple[torch.Tensor, int]:
        plan = comm.StatePlan(AttentionLayout(owners), group=group)
        before = group.sent_bytes
        out = comm.carry_states(
            torch.full((1, 1), 1.0, dtype=torch.bfloat16),
            torch.full((1, 1, 1, 1), 1 + 2**-7 if group.rank() else 2**-9, dtype=torch.bfloat16),
            plan,
            group=group,
        )
        return out, group.sent_bytes - before

    outs = run_ranks(3, body)
    assert [out.dtype for out, _ in outs] == [torch.float32] * 3
    assert outs[2][0].item() == 1 + 2**-7 + 2**-9  # more digits than bfloat16 has
    assert [sent for _, sent in outs] == [8, 8, 0]


# ---- Which way they go.


def test_heavy_pairs_of_many_runs_go_in_rounds() -> None:
    """As many exchanges as the plan says, and the way that it was chosen by weight."""

    def body(group: Group) -> list[tuple[str, int]]:
        attention = AttentionLayout(Ownership.contiguous(8, 4))
        return [
            (plan.way, plan.rounds)
            for plan in (
                comm.StatePlan(attention, group=group, **given)
                for given in (
                    {},
                    {"bytes_per_state": 10**4},
                    {"bytes_per_state": 10**6},
                    {"bytes_per_state": 10**6, "way": "direct"},
                    {"way": "scan"},
                )
            )
        ]

    for ways in run_ranks(4, body):
        assert ways == [("direct", 1), ("direct", 1), ("scan", 2), ("direct", 1), ("scan", 2)]


def test_ranks_that_choose_differently_are_told() -> None:
    def body(group: Group) -> str:
        plan = comm.StatePlan(
            AttentionLayout(Ownership.contiguous(8, 4)),
            group=group,
            way="scan" if group.rank() == 2 else "direct",
        )
        with pytest.raises(Exception, match="carry_states") as caught:
            comm.carry_states(torch.ones(1, 1), torch.ones(1, 1, 2, 2), plan, group=group)
        return str(caught.value)

    for message in run_ranks(4, body):
        assert "rank 2" in message and "table" in message, message


# ---- As a torch operator.


def example(group: Group) -> tuple[Any, ...]:
    owners = Ownership.of_sizes([11, 13]) if group.size() == 2 else Ownership.contiguous(24, 1)
    plan = comm.StatePlan(layout_of(owners, [Packing.of([3, 21])]), group=group)
    here = len(plan.chained)
    draw = torch.Generator().manual_seed(group.rank())
    m, s = (
        torch.randn(here, 2, 3, width, generator=draw, dtype=torch.float64).requires_grad_()
        for width in (3, 4)
    )
    return m, s, *plan.tables, group.name


#: Five runs of one rank, no two of which follow each other in its share.
FIVE = [(20, 24), (16, 20), (9, 16), (4, 9), (0, 4)]


def test_operator_checks_pass() -> None:
    torch.library.opcheck(ops.carry_states, example(Group.solo()))
    # Two runs of one rank, which is what a scattered share looks like.
    for pieces, way in (([(12, 24), (0, 12)], "direct"), (FIVE, "scan")):
        plan = comm.StatePlan(AttentionLayout(Ownership.of_ranges([pieces])), way=way)
        m, s = (
            torch.randn(len(pieces), 2, 3, w, dtype=torch.float64, requires_grad=True)
            for w in (3, 4)
        )
        torch.library.opcheck(ops.carry_states, (m, s, *plan.tables, Group.solo().name))


def test_its_gradient_is_that_of_small_changes() -> None:
    for shape, way in itertools.product(KINDS.values(), WAYS):
        pieces = FIVE if way == "scan" else [(16, 24), (8, 16), (0, 8)]
        plan = comm.StatePlan(AttentionLayout(Ownership.of_ranges([pieces])), way=way)
        m, s = (
            torch.randn(len(pieces), 1, *size, dtype=torch.float64, requires_grad=True)
            for size in (shape, (K, 2))
        )
        carry = functools.partial(comm.carry_states, plan=plan)
        assert torch.autograd.gradcheck(carry, (m, s))
        assert torch.autograd.gradgradcheck(carry, (m, s))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_whole(dynamic: bool) -> None:
    """One graph for any documents: tables are tensors."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def layer(m: torch.Tensor, s: torch.Tensor, plan: Any) -> torch.Tensor:
        return comm.carry_states(m, s, plan).square().sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    for pieces, way in (([(12, 24), (0, 12)], "direct"), (FIVE[2:], "direct"), (FIVE, "scan")):
        plan = comm.StatePlan(AttentionLayout(Ownership.of_ranges([pieces])), way=way)
        results = []
        for function in (layer, compiled):
            torch.manual_seed(3)
            leaves = [
                torch.randn(len(pieces), 2, 3, w, dtype=torch.float64, requires_grad=True)
                for w in (3, 4)
            ]
            out = function(*leaves, plan)
            results.append([out.detach(), *torch.autograd.grad(out, leaves)])
        for mine, truth in zip(*results, strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-14, atol=1e-14)


# ---- What is refused.


def test_wrong_arguments() -> None:
    owners = Ownership.of_ranges([[(12, 24), (0, 12)]])
    plan = comm.StatePlan(AttentionLayout(owners))
    state = torch.zeros(2, 3, 4, 4)

    def carried(steps: list[tuple[int, ...]]) -> torch.Tensor:
        tables = plan.tables[0], torch.tensor(steps), *plan.tables[2:]
        out: torch.Tensor = ops.carry_states(torch.zeros(2, 3), state, *tables, Group.solo().name)
        return out

    for call, message in (
        (lambda: comm.carry_states(torch.zeros(2, 3), state[:1], plan), r"expected \[2, ..\]"),
        (lambda: comm.carry_states(torch.zeros(2, 2), state, plan), r"`transition` is .*\[2, 2\]"),
        (lambda: comm.carry_states(torch.zeros(2, 3, 4, 3), state, plan), r"\[runs, .., K, K\]"),
        (lambda: comm.carry_states(torch.zeros(2), torch.zeros(2, 3), plan), "`state` is"),
        (
            lambda: ops.carry_states(torch.zeros(2, 3), state, plan.tables[0][:, 1:],
                                     *plan.tables[1:], Group.solo().name),
            r"`sends` is .*; expected int64 \[n, 5\]",
        ),
        (
            lambda: ops.carry_states(torch.zeros(2, 3), state, *plan.tables[1:], plan.tables[0],
                                     Group.solo().name),
            r"`sends` has the row \(0, 1, 0, 1, 0\) in a group of 1",
        ),
        (lambda: carried([(0, 5, 0, 0, 0)]), r"`steps` has the row \(0, 5, .* with 2 runs here"),
        (lambda: carried([(0, 0, 0, 2, 0)]), "`steps` names place 2 of rank 0, which has 2 runs"),
        (
            lambda: carried([(0, 0, 0, 1, 0), (0, 0, 1, -1, 0), (0, 0, 0, 2, 1)]),
            "names place 2 with its transition of rank 0",
        ),
        (lambda: carried([(0, 0, 1, 0, 1)]), "`steps` keeps a pair with nothing at hand"),
        (lambda: carried([(2, 0, 0, 0, 1), (1, 0, 0, 0, 1)]), "after round 2"),
        (lambda: comm.StatePlan(AttentionLayout(owners), way="ring"), "`way` is 'ring'; expected"),
        (lambda: comm.StatePlan(AttentionLayout(owners), matrix_rows=0), "`matrix_rows` is 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="`plan` is an int; expected a StatePlan"):
        comm.carry_states(torch.zeros(2, 3), state, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the ownership is over 2 ranks but the group has 1"):
        comm.StatePlan(AttentionLayout(Ownership.contiguous(8, 2)))
