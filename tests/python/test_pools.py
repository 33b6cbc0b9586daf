"""The tokens before each run, and pools of tokens, over N ranks: what one rank gives, for
every ownership, and as many bytes as their plans say."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import layouts
import pytest
import torch

import longspan
from longspan import AttentionLayout, Group, Mask, Ownership, Packing, comm, dsa, run_ranks

ops = torch.ops.longspan
RANKS = (1, 2, 3, 4, 7)
CHANNELS = 5


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    rows: tuple[Packing, ...]
    batched: bool = False  # tensors have an axis for rows

    def fitted(self, ranks: int) -> list[Packing]:
        """What every ownership can cut; rows may differ in their documents only."""
        multiple = 2 * ranks
        rows = [p.with_slots_multiple_of(multiple) for p in self.rows]
        longest = max(p.tokens for p in rows)
        longest += -longest % multiple
        return [
            Packing.of(p.lengths, [p.padded_length(d) for d in range(p.documents)], longest)
            for p in rows
        ]


CASES = [
    Case("one_document", (Packing.single(40),)),
    # One token, none, shorter than a window, straddling; then a rank that is all pads.
    Case("documents_with_pads", (Packing.of([23, 1, 0, 17, 3, 9], [24, 2, 1, 17, 3, 60]),)),
    Case("one_token_each", (Packing.of([1] * 13),)),
    Case("nothing_but_pads", (Packing.of([0], [16]),)),
    Case("a_row", (Packing.of([13, 9, 6]),), batched=True),
    Case(
        "rows_of_different_documents",
        (Packing.of([13, 9, 6]), Packing.of([28]), Packing.of([1, 26])),
        batched=True,
    ),
]
BY_NAME = {case.name: case for case in CASES}
POOLS = [(1, False), (3, False), (8, False), (1, True), (4, True)]


def ownerships(packing: Packing, ranks: int) -> dict[str, Ownership]:
    last = Ownership.of_sizes([0] * (ranks - 1) + [packing.tokens])
    return {**layouts.ownerships(packing, ranks), "all_on_the_last": last}


def runs(case: Case, ranks: int) -> list[tuple[str, Ownership, list[Packing]]]:
    rows = case.fitted(ranks)
    return [(name, owners, rows) for name, owners in ownerships(rows[0], ranks).items()]


def layout_of(owners: Ownership, rows: list[Packing]) -> AttentionLayout:
    return AttentionLayout(owners, [Mask.causal(packing) for packing in rows])


class Stream:
    """Whole tensors on one rank, and what a rank holds of them."""

    def __init__(self, case: Case, rows: list[Packing], channels: int) -> None:
        self.case, self.rows = case, rows
        random = torch.Generator().manual_seed(5)
        shape = (len(rows), rows[0].tokens, channels)
        self.x, self.gates = (
            torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
            for _ in range(2)
        )

    def share(self, x: torch.Tensor, owners: Ownership, rank: int) -> torch.Tensor:
        mine = x.detach()[:, owners.tokens_of(rank)]
        return (mine if self.case.batched else mine.squeeze(0)).clone().requires_grad_()

    def whole(self, shares: list[torch.Tensor], owners: Ownership) -> torch.Tensor:
        """Shares put together, as rows of the stream."""
        order = torch.cat([owners.tokens_of(rank) for rank in range(owners.ranks)]).argsort()
        rows = [s if self.case.batched else s.unsqueeze(0) for s in shares]
        return torch.cat(rows, dim=1)[:, order]

    def options(self, group: Group) -> dict[str, Any]:
        return {"group": group, "rows": len(self.rows) if self.case.batched else None}


# ---- Runs.


def test_runs_say_where_they_lie() -> None:
    packing, owners = Packing.of([40, 24]), Ownership.head_tail(64, 4)
    first, second = longspan.values.runs_of(packing, owners, 1)
    assert (first.document, tuple(first.tokens), first.local, first.position) == (0, (8, 16), 0, 8)
    assert (second.document, tuple(second.tokens)) == (1, (48, 56))
    assert (second.local, second.position, len(second)) == (8, 8, 8)
    assert first.before == (0, longspan.values.TokenRange(0, 8))
    assert second.before == (2, longspan.values.TokenRange(40, 48))
    assert longspan.values.runs_of(packing, owners, 0)[0].before is None
    assert repr(first) == "DocumentRun(document 0, tokens [8, 16), local 0, position 8)"


# ---- Tokens before each run.


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_run_sees_the_tokens_before_it(case: Case, ranks: int) -> None:
    """Forward is exact; backward sends a one home for each place that a token came to."""
    cases = [(*run, count) for run in runs(case, ranks) for count in (0, 1, 3, 11)]

    def body(group: Group) -> list[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]]:
        found = []
        for _, owners, rows, count in cases:
            stream = Stream(case, rows, CHANNELS)
            x = stream.share(stream.x, owners, group.rank())
            halo = comm.HaloPlan(layout_of(owners, rows), count, **stream.options(group))
            sent = [group.sent_bytes]
            out = comm.tokens_before(x, halo, group=group)
            sent.append(group.sent_bytes)
            out.sum().backward()
            sent.append(group.sent_bytes)
            assert x.grad is not None
            found.append((out.detach(), x.grad, (sent[1] - sent[0], sent[2] - sent[1])))
            for i, direction in enumerate(("forward", "backward")):
                planned = halo.sent_bytes(direction, bytes_per_token=CHANNELS * 8)
                assert sent[i + 1] - sent[i] == planned
        return found

    parts = run_ranks(ranks, body)
    for i, (name, owners, rows, count) in enumerate(cases):
        stream = Stream(case, rows, CHANNELS)
        expected = torch.zeros_like(stream.x)
        for rank in range(ranks):
            before = []
            for row, packing in enumerate(rows):
                for run in longspan.values.runs_of(packing, owners, rank):
                    for back in range(count, 0, -1):
                        token = run.tokens.begin - back
                        there = back <= run.position
                        before.append(
                            stream.x.detach()[row, token]
                            if there
                            else torch.zeros(CHANNELS, dtype=torch.float64)
                        )
                        if there:
                            expected[row, token] += 1
            empty = torch.zeros(0, CHANNELS, dtype=torch.float64)
            truth = torch.stack(before) if before else empty
            assert parts[rank][i][0].equal(truth), f"{name}, {count} before, rank {rank}"
        home = stream.whole([part[i][1] for part in parts], owners)
        assert home.equal(expected), f"{name}, {count} before: gradients"


def test_a_border_costs_its_tokens() -> None:
    """Contiguous shares of one document send `count` tokens to the next rank."""
    attention = AttentionLayout(Ownership.contiguous(32, 4))

    def body(group: Group) -> int:
        halo = comm.HaloPlan(attention, 3, group=group)
        comm.tokens_before(torch.randn(8, 2), halo, group=group)
        return group.sent_bytes

    assert run_ranks(4, body) == [24, 24, 24, 0]


# ---- Pools.


def pooled_alone(
    stream: Stream, bias: torch.Tensor, ratio: int, overlap: bool
) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """By loops over documents and windows; (row, last token, position) of each pool."""
    pools, places = [], []
    half = stream.x.shape[-1] // (2 if overlap else 1)
    for row, packing in enumerate(stream.rows):
        for d in range(packing.documents):
            first = packing.real(d).begin
            for w in range(packing.length(d) // ratio):
                begin = first + w * ratio
                own = slice(begin, begin + ratio)
                # With an overlap the second half of the channels is the window's own.
                mine = slice(half, None) if overlap else slice(None)
                values, gates = stream.x[row, own, mine], (stream.gates[row, own] + bias)[:, mine]
                if overlap and w > 0:
                    last = slice(begin - ratio, begin)
                    values = torch.cat([stream.x[row, last, :half], values])
                    gates = torch.cat([(stream.gates[row, last] + bias)[:, :half], gates])
                pools.append((gates.softmax(0) * values).sum(0))
                places.append((row, begin + ratio - 1, w * ratio))
    empty = stream.x.new_zeros(0, half) + 0 * (stream.x.sum() + stream.gates.sum() + bias.sum())
    return torch.stack(pools) if pools else empty, places


def check_pools(case: Case, ranks: int, ratio: int, overlap: bool, dtype: torch.dtype) -> None:
    wide = CHANNELS * (2 if overlap else 1)
    random = torch.Generator().manual_seed(7)
    bias = torch.randn(ratio, wide, generator=random, dtype=torch.float64)
    tried = runs(case, ranks)
    stream = Stream(case, tried[0][2], wide)  # the same for every ownership
    learned = bias.clone().requires_grad_()
    pools, places = pooled_alone(stream, learned, ratio, overlap)
    dout = torch.randn(pools.shape, generator=random, dtype=torch.float64)
    grads = torch.autograd.grad(pools, (stream.x, stream.gates, learned), dout)
    answers = [pools.detach(), *grads]

    def body(group: Group) -> list[tuple[Any, ...]]:
        found = []
        for _, owners, rows in tried:
            x, gates = (
                stream.share(t, owners, group.rank()).detach().to(dtype).requires_grad_()
                for t in (stream.x, stream.gates)
            )
            mine = bias.to(dtype).requires_grad_()
            plan = dsa.PoolPlan(
                layout_of(owners, rows), ratio, overlap=overlap, **stream.options(group)
            )
            sent = [group.sent_bytes]
            made = dsa.pool_tokens(x, gates, mine, plan, group=group)
            sent.append(group.sent_bytes)
            every = dsa.gather_pools(made, plan, group=group)
            sent.append(group.sent_bytes)
            assert every.shape == (plan.total, CHANNELS) and made.dtype == dtype
            # Each rank looks at some of all pools, so that gradients add over the ranks.
            part = dout.to(dtype) * (group.rank() + 1) * 2 / (ranks * (ranks + 1))
            (dmade,) = torch.autograd.grad(every, made, part, retain_graph=True)
            sent.append(group.sent_bytes)
            grads = torch.autograd.grad(made, (x, gates, mine), dmade, allow_unused=True)
            sent.append(group.sent_bytes)
            sums = 8 if dtype == torch.float64 else 4
            moved = [after - before for before, after in itertools.pairwise(sent)]
            pool_bytes = CHANNELS * dtype.itemsize
            assert moved == [
                plan.sent_bytes("forward", channels=CHANNELS, bytes_per_sum=sums),
                plan.gathered_bytes("forward", bytes_per_pool=pool_bytes),
                plan.gathered_bytes("backward", bytes_per_pool=pool_bytes),
                plan.sent_bytes("backward", channels=CHANNELS, bytes_per_sum=sums),
            ]
            found.append((every.detach(), grads, plan))
        return found

    parts = run_ranks(ranks, body)
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    wrong = []
    for i, (name, owners, rows) in enumerate(tried):
        for rank, part in enumerate(parts):
            assert part[i][0].equal(parts[0][i][0]), "every rank gathers the same"
            plan, held = part[i][2], owners.tokens_of(rank).tolist()
            owned = [p for p in places if p[1] in held]
            assert plan.positions(torch.device("cpu")).tolist() == [p[2] for p in owned]
            start, end = plan.windows(torch.device("cpu"))
            for row, packing in enumerate(rows):
                for local, token in enumerate(held):
                    at = row * len(held) + local
                    ended = [
                        j
                        for j, (r, last, _) in enumerate(places)
                        if r == row
                        and last <= token
                        and not packing.is_pad(token)
                        and packing.locate(last)[0] == packing.locate(token)[0]
                    ]
                    assert list(range(int(start[at]), int(end[at]))) == ended
                    listed = plan.ended(torch.device("cpu"))[at]
                    assert listed[listed >= 0].tolist() == ended
        found = [
            parts[0][i][0],
            stream.whole([part[i][1][0] for part in parts], owners),
            stream.whole([part[i][1][1] for part in parts], owners),
            sum(part[i][1][2] for part in parts),
        ]
        names = ("pools", "dx", "dgates", "dbias")
        for what, mine, truth in zip(names, found, answers, strict=True):
            error = (mine.double() - truth).norm()
            if not error <= bound * max(float(truth.norm()), 1.0):
                wrong.append(f"{name}: {what}: {error:.3g}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("ratio, overlap", POOLS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_gives_the_one_rank_pools(
    case: Case, ratio: int, overlap: bool, ranks: int
) -> None:
    check_pools(case, ranks, ratio, overlap, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_and_single_give_the_one_rank_pools(dtype: torch.dtype) -> None:
    check_pools(BY_NAME["documents_with_pads"], 3, 4, True, dtype)


def test_pools_that_straddle_are_those_of_aligned_shares() -> None:
    """Bit for bit but for the merged ones, which differ by rounding."""
    rows = [Packing.single(48)]
    stream = Stream(CASES[0], rows, CHANNELS)

    def pools(sizes: list[int]) -> torch.Tensor:
        owners = Ownership.of_sizes(sizes)

        def body(group: Group) -> torch.Tensor:
            plan = dsa.PoolPlan(layout_of(owners, rows), 8, group=group)
            x, gates = (stream.share(t, owners, group.rank()) for t in (stream.x, stream.gates))
            return dsa.gather_pools(
                dsa.pool_tokens(x, gates, None, plan, group=group), plan, group=group
            ).detach()

        return run_ranks(3, body)[0]

    aligned, straddling = pools([16, 16, 16]), pools([13, 22, 13])
    same = (aligned == straddling).all(1)
    assert same.tolist() == [True, False, True, True, False, True]
    torch.testing.assert_close(straddling, aligned, rtol=1e-14, atol=1e-14)


# ---- As torch operators.


def operators(group: Group) -> list[tuple[Any, tuple[Any, ...]]]:
    packing = Packing.of([13, 1, 10])
    owners = Ownership.of_sizes([11, 13]) if group.size() == 2 else Ownership.contiguous(24, 1)
    attention = AttentionLayout(owners, Mask.causal(packing))
    halo = comm.HaloPlan(attention, 2, group=group)
    plan = dsa.PoolPlan(attention, 4, overlap=True, group=group)
    here = owners.local_tokens(group.rank())
    draw = torch.Generator().manual_seed(group.rank())

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    cpu = torch.device("cpu")
    lists, merges, order = plan.tables(cpu)
    x, gates, bias = leaf(here, 6), leaf(here, 6), leaf(4, 6)
    return [
        (ops.pool_listed, (leaf(2 * here, 3), leaf(2 * here, 3), leaf(8, 3), lists)),
        (ops.pool_listed, (leaf(2 * here, 3), leaf(2 * here, 3), None, lists)),
        (ops.tokens_before, (x, halo.sends, halo.places(cpu), halo.received, group.name)),
        (ops.pool_tokens, (x, gates, bias, lists, plan.sends, merges, order, plan.whole,
                           plan.received, plan.halves, group.name)),
    ]  # fmt: skip


def test_operator_checks_pass() -> None:
    for op, args in operators(Group.solo()):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_they_compile_whole(dynamic: bool) -> None:
    """One graph, for lengths that differ; ranks are one here, the plans are not."""

    def layer(
        x: torch.Tensor, gates: torch.Tensor, bias: torch.Tensor, halo: Any, plan: Any
    ) -> torch.Tensor:
        made = dsa.gather_pools(dsa.pool_tokens(x, gates, bias, plan), plan)
        return made.sum() + comm.tokens_before(x, halo).square().sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in ([13, 9], [20, 1, 17]):
        attention = AttentionLayout(
            Ownership.contiguous(sum(lengths), 1), Mask.causal(Packing.of(lengths))
        )
        plan, halo = dsa.PoolPlan(attention, 4, overlap=True), comm.HaloPlan(attention, 3)
        results = []
        for function in (layer, compiled):
            torch.manual_seed(3)
            inputs = [
                torch.randn(shape, dtype=torch.float64, requires_grad=True)
                for shape in ((sum(lengths), 6), (sum(lengths), 6), (4, 6))
            ]
            out = function(*inputs, halo, plan)
            results.append([out.detach(), *torch.autograd.grad(out, inputs)])
        for mine, truth in zip(*results, strict=True):
            torch.testing.assert_close(mine, truth, rtol=1e-14, atol=1e-14)


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    plan = dsa.PoolPlan(AttentionLayout(Ownership.contiguous(8, 1)), 4)
    out = dsa.pool_tokens(x, x, None, plan)
    with pytest.raises(RuntimeError, match="pool_tokens: there is no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_a_gate_of_minus_infinity_has_no_weight() -> None:
    """A pool without a finite gate is 0 and passes nothing on, also when it is merged."""
    owners = Ownership.of_sizes([3, 5])
    gates = torch.full((8, 1), -torch.inf, dtype=torch.float64)
    gates[5] = 0.5

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        plan = dsa.PoolPlan(AttentionLayout(owners), 4, group=group)
        mine = owners.tokens_of(group.rank())
        x = mine.double().unsqueeze(1).requires_grad_()
        out = dsa.pool_tokens(x, gates[mine], None, plan, group=group)
        out.sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    parts = run_ranks(2, body)
    assert torch.cat([part[0] for part in parts]).flatten().tolist() == [0, 5]
    assert torch.cat([part[1] for part in parts]).flatten().tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_device_gives_what_the_cpu_gives(dtype: torch.dtype) -> None:
    packing = Packing.of([37, 1, 26])
    attention = AttentionLayout(Ownership.contiguous(64, 1), Mask.causal(packing))
    plan, halo = dsa.PoolPlan(attention, 4, overlap=True), comm.HaloPlan(attention, 3)
    random = torch.Generator().manual_seed(3)
    shapes = ((64, 260), (64, 260), (4, 260))
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]

    def answers(device: str) -> list[torch.Tensor]:
        inputs = [t.to(device, dtype).requires_grad_() for t in drawn]
        pools = dsa.pool_tokens(*inputs, plan)
        before = comm.tokens_before(inputs[0], halo)
        loss = pools.double().square().sum() + before.double().sum()
        grads = torch.autograd.grad(loss, inputs)
        return [t.detach().cpu().double() for t in (pools, before, *grads)]

    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for there, here in zip(answers("cuda"), answers("cpu"), strict=True):
        assert (there - here).norm() <= bound * here.norm()


# ---- What is refused.


def test_refusals() -> None:
    attention = AttentionLayout(Ownership.contiguous(8, 1))
    plan = dsa.PoolPlan(attention, 4, overlap=True)
    halo = comm.HaloPlan(attention, 2, rows=2)
    x = torch.randn(8, 6)
    two = AttentionLayout(Ownership.contiguous(8, 2))
    hidden = AttentionLayout(
        Ownership.contiguous(8, 1), Mask.causal(Packing.single(8)).with_hidden([(0, 2)])
    )
    refused = [
        (lambda: dsa.PoolPlan(attention, 0), "PoolPlan: `ratio` is 0; expected 1 or more"),
        (lambda: dsa.PoolPlan(two, 4), "the ownership is over 2 ranks but the group has 1"),
        (lambda: dsa.PoolPlan(hidden, 4), "hides tokens; give a packing in which pads lie outside"),
        (lambda: comm.HaloPlan(attention, -1), "HaloPlan: `count` is -1; expected 0 or more"),
        (lambda: comm.HaloPlan(attention, 2**40), "a plan has at most 134217728"),
        (lambda: plan.sent_bytes("sideways", channels=2), "pass 'sideways' is not one of forward"),
        (lambda: comm.tokens_before(x, halo), r"`x` is \[8, 6\]; expected \[2, 8, ..\]"),
        (lambda: dsa.pool_tokens(x, x[:7], None, plan), r"pool_tokens: `gates` is \[7, 6\]"),
        (lambda: dsa.pool_tokens(x, x[:, :4], None, plan), r"`gates` is float32 \[8, 4\] but"),
        (lambda: dsa.pool_tokens(x[:, :5], x[:, :5], None, plan), "one half of the channels"),
        (lambda: dsa.pool_tokens(x, x, x[:3], plan), r"expected floating \[4, 6\]"),
        (lambda: dsa.gather_pools(x, plan), r"`x` is \[8, 6\]; expected \[2, ..\]"),
    ]  # fmt: skip
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="`halo` is an int; expected a HaloPlan"):
        comm.tokens_before(x, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`pools` is an int; expected a PoolPlan"):
        dsa.pool_tokens(x, x, None, 4)  # type: ignore[arg-type]
