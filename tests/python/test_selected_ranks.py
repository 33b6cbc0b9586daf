"""Selection and attention over N ranks give what one rank gives, for every ownership
and mask and either way of fetching keys."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import layouts
import pytest
import torch
from oracle import selected_attention as oracle
from processes import outputs_of, start_ranks

import longspan
from longspan import Group, Mask, Ownership, Packing, run_ranks

ops = torch.ops.longspan
RANKS = (1, 2, 3, 4, 7)
SCALE = 0.4


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    packing: Packing
    masks: Callable[[Packing], list[Mask]] = lambda packing: [Mask.causal(packing)]
    rows: int | None = None  # None: no rows before
    groups: int | None = None  # of kv
    slots: int = 5
    sink: bool = True
    windows: bool = False  # given as tensors

    def fitted(self, multiple: int) -> Packing:
        return self.packing.with_slots_multiple_of(multiple).with_tokens_multiple_of(multiple)


DOCUMENTS = Packing.of([23, 1, 0, 17, 9], [24, 2, 1, 17, 12])

CASES = [
    Case("causal", Packing.single(40)),
    Case("documents_with_pads", DOCUMENTS, slots=7),
    Case("window", Packing.single(45), lambda p: [Mask.sliding(p, 7)], sink=False),
    Case("rows_of_different_documents", Packing.single(28), lambda p: [
        Mask.causal(Packing.of([13, 9], [13, p.tokens - 13])),
        Mask.full(p),
    ], rows=2, groups=2),
    Case("same_mask_in_every_row", DOCUMENTS, rows=2, slots=3),
    Case("more_slots_than_keys", Packing.of([3, 4, 2]), slots=9),
    Case("nothing_but_pads", Packing.of([0], [16])),
    Case("given_windows", Packing.single(30), windows=True),
    Case("given_windows_of_rows", Packing.single(20), rows=2, windows=True, slots=4),
]  # fmt: skip

BY_NAME = {case.name: case for case in CASES}


def ownerships(packing: Packing, ranks: int) -> dict[str, Ownership]:
    last = Ownership.of_sizes([0] * (ranks - 1) + [packing.tokens])
    return {**layouts.ownerships(packing, ranks), "all_on_the_last": last}


@dataclasses.dataclass
class Inputs:
    """A whole layer on one rank; tokens are axis -3 of queries and so on."""

    case: Case
    masks: list[Mask]
    q: torch.Tensor
    kv: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor
    weights: torch.Tensor
    sink: torch.Tensor | None
    start: torch.Tensor
    end: torch.Tensor
    dout: torch.Tensor
    dscores: torch.Tensor

    @staticmethod
    def of(case: Case, packing: Packing, dtype: torch.dtype) -> Inputs:
        random = torch.Generator().manual_seed(5)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        before = () if case.rows is None else (case.rows,)
        tokens = packing.tokens

        def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            shape = (*before, tokens, *shape)
            return torch.randn(shape, generator=random, dtype=torch.float64).to(kind)

        masks = case.masks(packing)
        if case.windows:
            first = torch.randint(-3, tokens, (*before, tokens), generator=random)
            last = first + torch.randint(-2, 14, (*before, tokens), generator=random)
        else:
            each = masks if len(masks) > 1 else masks * (case.rows or 1)
            borders = [[mask.keys_of(t) for t in range(tokens)] for mask in each]
            first, last = (
                torch.tensor([[getattr(keys, side) for keys in row] for row in borders])
                for side in ("begin", "end")
            )
            first, last = (t.reshape(*before, tokens) for t in (first, last))
        groups = () if case.groups is None else (case.groups,)
        return Inputs(
            case, masks, draw(4, 6), draw(*groups, 6), draw(2, 3), draw(3),
            draw(2, kind=sums), torch.linspace(-1, 2, 4, dtype=sums) if case.sink else None,
            first.int(), last.int(), draw(4, 5), draw(case.slots, kind=sums),
        )  # fmt: skip

    @property
    def axis(self) -> int:
        return 0 if self.case.rows is None else 1

    def indices(self) -> torch.Tensor:
        """By the operator of one rank."""
        one: torch.Tensor = ops.select_keys(
            self.index_q, self.index_k, self.weights, self.start, self.end, self.case.slots, False
        )[1]
        return one

    def answer(self, indices: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        one = oracle.attention(
            self.q, self.kv, indices, self.dout, scale=SCALE, value_dim=5, sink=self.sink,
            dtype=dtype,
        )  # fmt: skip
        index = oracle.indexer(
            self.index_q, self.index_k, self.weights, indices, self.dscores, dtype=dtype
        )
        found = {
            "out": one.out, "lse": one.lse, "dq": one.dq, "dkv": one.dkv, "scores": index.scores,
            "diq": index.dq, "dik": index.dk, "dweights": index.dweights,
        }  # fmt: skip
        if one.dsink is not None:
            found["dsink"] = one.dsink
        if self.case.groups is None:
            sink = None if self.sink is None else self.sink.to(dtype)
            found["target"] = oracle.weights_of_heads(
                self.q.to(dtype), self.kv.to(dtype), indices, scale=SCALE, sink=sink
            )
        return found


@dataclasses.dataclass
class Share:
    """What one rank holds of a layer, as leaves."""

    inputs: Inputs
    group: Group
    owners: Ownership

    def __post_init__(self) -> None:
        whole = self.inputs
        self.tokens = self.owners.tokens_of(self.group.rank())
        names = ("q", "kv", "index_q", "index_k", "weights")
        self.leaves = [self.of(getattr(whole, name)).requires_grad_() for name in names]
        if whole.sink is not None:
            self.leaves.append(whole.sink.clone().requires_grad_())
        self.sink = self.leaves[5] if whole.sink is not None else None
        self.dout, self.dscores = self.of(whole.dout), self.of(whole.dscores)
        self.where: dict[str, Any] = {"layout": self.owners, "group": self.group}
        self.window: dict[str, Any] = (
            {"start": self.of(whole.start), "end": self.of(whole.end)}
            if whole.case.windows
            else {"mask": whole.masks}
        )

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.index_select(self.inputs.axis, self.tokens)

    def layer(self, **options: Any) -> dict[str, torch.Tensor]:
        """In one call."""
        found = longspan.dsa.select_and_attend(
            *self.leaves[:5], slots=self.inputs.case.slots, scale=SCALE, value_dim=5,
            sink=self.sink, scores=True, target=True, **self.where, **self.window, **options,
        )  # fmt: skip
        assert found.scores is not None and found.target is not None
        assert not found.lse.requires_grad and not found.target.requires_grad
        return self.with_gradients(
            {"out": found.out, "lse": found.lse, "scores": found.scores, "target": found.target,
             "indices": found.indices}
        )  # fmt: skip

    def apart(self, fetch: str = "gathered", balanced: bool = False) -> dict[str, torch.Tensor]:
        """By a call for each thing."""
        q, kv, index_q, index_k, weights = self.leaves[:5]
        indices, scores = longspan.dsa.select_keys(
            index_q, index_k, weights, slots=self.inputs.case.slots, balanced=balanced,
            scores=True, **self.where, **self.window,
        )  # fmt: skip
        assert isinstance(indices, torch.Tensor)
        out, lse = longspan.dsa.attend_selected(
            q, kv, indices, scale=SCALE, value_dim=5, sink=self.sink, fetch=fetch,
            return_lse=True, **self.where,
        )  # fmt: skip
        target = longspan.dsa.selected_weights(
            q, kv, indices, lse, scale=SCALE, sink=self.sink, fetch=fetch, **self.where
        )
        again = longspan.dsa.score_selected(
            index_q, index_k, weights, indices, fetch=fetch, **self.where
        )
        close(again.detach(), scores.detach().double(), 1e-12 if q.dtype == torch.float64 else 1e-5)
        return self.with_gradients(
            {"out": out, "lse": lse, "scores": scores, "target": target, "indices": indices}
        )

    def with_gradients(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = self.dscores.masked_fill(found["scores"].isneginf(), 0)
        grads = torch.autograd.grad([found["out"], found["scores"]], self.leaves, [self.dout, kept])
        names = ("dq", "dkv", "diq", "dik", "dweights", "dsink")
        found = {name: tensor.detach() for name, tensor in found.items()}
        return found | dict(zip(names, grads, strict=False))


def joined(parts: list[dict[str, torch.Tensor]], owners: Ownership, axis: int) -> dict[str, Any]:
    order = torch.cat([owners.tokens_of(rank) for rank in range(owners.ranks)]).argsort()
    whole = {}
    for name in parts[0]:
        column = [part[name] for part in parts]
        if name == "dsink":
            whole[name] = torch.stack(column).sum(0)
        else:
            whole[name] = torch.cat(column, dim=axis).index_select(axis, order)
    return whole


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius distance; infinities must match by place."""
    x, truth = x.double(), truth.double()
    odd = ~truth.isfinite()
    if not torch.equal(~x.isfinite(), odd) or not torch.equal(x[odd], truth[odd]):
        return math.inf
    return float((x - truth)[~odd].norm())


def close(x: torch.Tensor, truth: torch.Tensor, bound: float) -> None:
    size = float(truth.double()[truth.isfinite()].norm())
    assert error(x, truth) <= bound * max(size, 1.0)


def check_case(case: Case, ranks: int, dtype: torch.dtype) -> None:
    packing = case.fitted(2 * ranks)
    inputs = Inputs.of(case, packing, dtype)
    indices = inputs.indices()
    truth = inputs.answer(indices, torch.float64)
    plain = inputs.answer(indices, dtype)
    # A few numbers may be rounded luckily in the plain computation.
    floor = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(torch.float32).eps
    if dtype == torch.float64:
        exact = oracle.index_scores(inputs.index_q, inputs.index_k, inputs.weights)
        ordered = oracle.greatest(exact, case.slots, inputs.start, inputs.end)
        assert torch.equal(indices, ordered)
    options = [
        {"fetch": fetch, "balanced": balanced}
        for fetch in longspan.dsa.FETCHES
        for balanced in (False, True)
    ]
    runs = [
        (f"{name} {option}", owners, option)
        for name, owners in ownerships(packing, ranks).items()
        for option in options
    ]

    def work(group: Group) -> list[dict[str, torch.Tensor]]:
        return [Share(inputs, group, owners).layer(**option) for _, owners, option in runs]

    parts = run_ranks(ranks, work)
    wrong = []
    for i, (name, owners, _) in enumerate(runs):
        got = joined([part[i] for part in parts], owners, inputs.axis)
        if not torch.equal(got["indices"], indices):
            wrong.append(f"{name}: indices")
        for key, t in truth.items():
            size = float(t[t.isfinite()].norm())
            allowed = max(2 * error(plain[key], t), floor * max(size, 1.0))
            if not error(got[key], t) <= allowed:
                wrong.append(f"{name}: {key}: error {error(got[key], t):.3g} > {allowed:.3g}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_gives_the_one_rank_answer(case: Case, ranks: int) -> None:
    check_case(case, ranks, torch.float64)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["documents_with_pads", "rows_of_different_documents"])
def test_half_and_single_give_the_one_rank_answer(
    name: str, dtype: torch.dtype, ranks: int
) -> None:
    check_case(BY_NAME[name], ranks, dtype)


def share_of(name: str, group: Group, kind: str, dtype: torch.dtype = torch.float32) -> Share:
    case = BY_NAME[name]
    packing = case.fitted(2 * group.size())
    owners = ownerships(packing, group.size())[kind]
    return Share(Inputs.of(case, packing, dtype), group, owners)


@pytest.mark.parametrize("fetch", longspan.dsa.FETCHES)
@pytest.mark.parametrize("name", ["documents_with_pads", "same_mask_in_every_row"])
def test_one_call_gives_the_bits_of_a_call_for_each_thing(name: str, fetch: str) -> None:
    def body(group: Group) -> None:
        share = share_of(name, group, "head-tail")
        together, apart = share.layer(fetch=fetch), share.apart(fetch)
        if fetch == "needed":  # there select_keys gathers, and sums in another order
            close(apart.pop("dik"), together.pop("dik").double(), 1e-6)
        assert not [key for key in apart if not torch.equal(apart[key], together[key])]

    run_ranks(3, body)


@pytest.mark.parametrize("fetch", longspan.dsa.FETCHES)
def test_every_run_gives_the_same_bits(fetch: str) -> None:
    def body(group: Group) -> None:
        share = share_of("documents_with_pads", group, "scattered")
        first, again = share.layer(fetch=fetch), share.layer(fetch=fetch)
        assert not [key for key in first if not torch.equal(first[key], again[key])]

    run_ranks(3, body)


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("lists", ["one_for_all", "one_a_group"])
def test_lists_of_an_earlier_layer_may_be_anything(lists: str, rows: int | None) -> None:
    """Repeated, out of order, wild, of 64 bits, and another for each group."""
    owners = ownerships(Packing.single(24), 3)["scattered"]
    random = torch.Generator().manual_seed(2)
    before = () if rows is None else (rows,)
    axis = len(before)
    each = (2,) if lists == "one_a_group" else ()
    indices = torch.randint(-4, 28, (*before, 24, *each, 6), generator=random)
    indices[..., 0] = indices[..., 1]
    indices[..., 2] = 2**40
    q, kv, dout = (
        torch.randn(*before, 24, *s, generator=random, dtype=torch.float64)
        for s in ((4, 6), (2, 6), (4, 6))
    )
    truth = oracle.attention(q, kv, indices, dout, scale=SCALE)

    def body(group: Group) -> list[dict[str, torch.Tensor]]:
        tokens = owners.tokens_of(group.rank())
        answers = []
        for fetch in longspan.dsa.FETCHES:
            leaves = [t.index_select(axis, tokens).requires_grad_() for t in (q, kv)]
            out, lse = longspan.dsa.attend_selected(
                *leaves, indices.index_select(axis, tokens), scale=SCALE, layout=owners,
                group=group, fetch=fetch, return_lse=True,
            )  # fmt: skip
            dq, dkv = torch.autograd.grad(out, leaves, dout.index_select(axis, tokens))
            answers.append({"out": out.detach(), "lse": lse, "dq": dq, "dkv": dkv})
        return answers

    parts = run_ranks(3, body)
    for i in range(len(longspan.dsa.FETCHES)):
        got = joined([part[i] for part in parts], owners, axis)
        for key in got:
            close(got[key], getattr(truth, key), 1e-12)


# ---- One rank.


def test_one_rank_needs_no_group_and_gives_the_bits_of_the_operators() -> None:
    inputs = Inputs.of(BY_NAME["causal"], Packing.single(40), torch.float32)
    q, kv, index_q, index_k, weights = (
        getattr(inputs, name).requires_grad_()
        for name in ("q", "kv", "index_q", "index_k", "weights")
    )
    scores, indices = ops.select_keys(index_q, index_k, weights, inputs.start, inputs.end, 5, True)
    out, lse = ops.attend_selected(q, kv, indices, None, SCALE, 5)
    found = longspan.dsa.select_and_attend(
        q, kv, index_q, index_k, weights, slots=5, scale=SCALE, value_dim=5, scores=True,
        target=True,
    )  # fmt: skip
    assert found.scores is not None and found.target is not None
    target = longspan.dsa.selected_weights(q, kv, indices, lse, scale=SCALE)
    expected = (out, indices, lse, scores, target)
    assert all(map(torch.equal, found, expected))
    leaves = (q, kv, index_q, index_k, weights)
    upstream = [inputs.dout, inputs.dscores.masked_fill(scores.isneginf(), 0)]
    got = torch.autograd.grad([found.out, found.scores], leaves, upstream)
    assert all(map(torch.equal, got, torch.autograd.grad([out, scores], leaves, upstream)))


def test_one_rank_may_have_other_keys_than_queries() -> None:
    q, kv = torch.randn(3, 4, 6), torch.randn(11, 6)
    index_q, index_k, weights = torch.randn(3, 2, 3), torch.randn(11, 3), torch.randn(3, 2)
    start, end = torch.tensor([0, 4, 9]), torch.tensor([11, 8, 9])
    found = longspan.dsa.select_and_attend(
        q, kv, index_q, index_k, weights, slots=4, scale=SCALE, start=start, end=end
    )
    expected = oracle.greatest(oracle.index_scores(index_q, index_k, weights), 4, start, end)
    assert torch.equal(found.indices, expected) and found.scores is None
    assert not found.out[2].any() and found.lse[2].isneginf().all()
    out = longspan.dsa.attend_selected(q, kv, expected, scale=SCALE)
    assert isinstance(out, torch.Tensor) and torch.equal(out, found.out)


# ---- What travels.

BYTES = Packing.single(48)


def sent_by(ranks: int, body: Callable[[Group], Any]) -> list[int]:
    def counted(group: Group) -> int:
        before = group.sent_bytes
        body(group)
        return group.sent_bytes - before

    return run_ranks(ranks, counted)


def drawn(owners: Ownership, group: Group) -> list[torch.Tensor]:
    held = owners.local_tokens(group.rank())
    shapes = ((held, 4, 6), (held, 6), (held, 2, 3), (held, 3), (held, 2))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("trained", [False, True])
def test_gathered_moves_all_keys_in_one_exchange(trained: bool) -> None:
    owners = Ownership.head_tail(48, 4)

    def layer(group: Group, back: bool) -> None:
        tensors = drawn(owners, group)
        found = longspan.dsa.select_and_attend(
            *tensors, slots=4, scale=SCALE, layout=owners, group=group, scores=trained
        )
        if back:
            loss = found.out.sum()
            if found.scores is not None:
                loss = loss + found.scores[found.scores.isfinite()].sum()
            loss.backward()
            assert (tensors[3].grad is not None) == trained

    forward = sent_by(4, lambda group: layer(group, False))
    both = sent_by(4, lambda group: layer(group, True))
    channels = 6 + 3 if trained else 6
    assert forward == [3 * 12 * (6 + 3) * 4] * 4
    assert both == [f + 3 * 12 * channels * 4 * 2 for f in forward]


def test_needed_sends_each_selected_row_once_to_each_rank_that_asks() -> None:
    owners = Ownership.contiguous(48, 4)
    # Rank r lists only the first tokens of rank 0, in every query.
    lists = torch.tensor([[0, 1, 2, -1, 99]] * 12, dtype=torch.int32)

    def attention(group: Group, fetch: str, back: bool) -> None:
        q, kv = drawn(owners, group)[:2]
        out = longspan.dsa.attend_selected(
            q, kv, lists, scale=SCALE, layout=owners, group=group, fetch=fetch
        )
        assert isinstance(out, torch.Tensor)
        if back:
            out.sum().backward()

    asks = 3 * 8  # counts, to everybody
    places, row = 3 * 4, 3 * 6 * 4  # three rows, to or from one rank
    forward = sent_by(4, lambda group: attention(group, "needed", False))
    assert forward == [asks + 3 * row] + [asks + places] * 3
    both = sent_by(4, lambda group: attention(group, "needed", True))
    assert both == [2 * forward[0]] + [2 * forward[1] + row] * 3
    gathered = sent_by(4, lambda group: attention(group, "gathered", True))
    assert gathered == [3 * (3 * 12 * 6 * 4)] * 4


def test_empty_selections_are_ordinary() -> None:
    owners = Ownership.head_tail(16, 2)

    def body(group: Group) -> None:
        q, kv = drawn(owners, group)[:2]
        for fetch in longspan.dsa.FETCHES:
            for slots in (0, 3):
                lists = torch.full((8, slots), -1)
                out, lse = longspan.dsa.attend_selected(
                    q, kv, lists, scale=SCALE, layout=owners, group=group, fetch=fetch,
                    return_lse=True,
                )  # fmt: skip
                dq, dkv = torch.autograd.grad(out.sum(), (q, kv))
                assert not out.any() and lse.isneginf().all() and not dq.any() and not dkv.any()
        for balanced in (False, True):
            found = longspan.dsa.select_and_attend(
                *drawn(owners, group), slots=0, scale=SCALE, layout=owners, group=group,
                balanced=balanced,
            )  # fmt: skip
            assert found.indices.shape == (8, 0) and not found.out.any()

    run_ranks(2, body)


@pytest.mark.parametrize("rows", [0, 2])
def test_no_rows_and_no_tokens_are_ordinary(rows: int) -> None:
    owners = Ownership.contiguous(8 if rows == 0 else 0, 2)

    def body(group: Group) -> None:
        held = owners.local_tokens(group.rank())
        shapes = ((4, 6), (6,), (2, 3), (3,), (2,))
        tensors = [torch.randn(rows, held, *shape).requires_grad_() for shape in shapes]
        for fetch in longspan.dsa.FETCHES:
            for balanced in (False, True):
                found = longspan.dsa.select_and_attend(
                    *tensors, slots=3, scale=SCALE, layout=owners, group=group, fetch=fetch,
                    balanced=balanced, scores=True,
                )  # fmt: skip
                assert found.out.shape == (rows, held, 4, 6) and found.scores is not None
                (found.out.sum() + found.scores.sum()).backward()

    run_ranks(2, body)


def test_balanced_work_is_even_where_the_ownership_is_not() -> None:
    """The index keys are gathered and every query travels at most once each way."""
    owners = Ownership.of_sizes([0, 0, 48])
    slots, head = 4, 4 * (2 * 3 + 2)  # bytes of an index query and its weights

    def selection(group: Group, balanced: bool) -> None:
        _, _, index_q, index_k, weights = drawn(owners, group)
        longspan.dsa.select_keys(
            index_q, index_k, weights, slots=slots, layout=owners, group=group,
            balanced=balanced,
        )  # fmt: skip

    plain = sent_by(3, lambda group: selection(group, False))
    traded = sent_by(3, lambda group: selection(group, True))
    extra = [t - p for t, p in zip(traded, plain, strict=True)]
    # 1176 pairs: 392 are seen by the first 28 queries, 784 by the first 40.
    assert extra == [28 * slots * 4, 12 * slots * 4, 40 * head]


# ---- Training the indexer.


def indexer_gradients(
    group: Group | None, owners: Ownership, whole: list[torch.Tensor], fetch: str
) -> list[torch.Tensor]:
    """Of one projection for queries and one for keys of the indexer, shared by all
    ranks."""
    rank = 0 if group is None else group.rank()
    x, q, kv = (t.index_select(0, owners.tokens_of(rank)) for t in whole[:3])
    to_q, to_k, to_w = (t.clone().requires_grad_() for t in whole[3:])
    found = longspan.dsa.select_and_attend(
        q, kv, (x @ to_q).unflatten(-1, (2, 3)), x @ to_k, x @ to_w, slots=5, scale=SCALE,
        layout=owners, group=group, fetch=fetch, scores=True, target=True,
    )  # fmt: skip
    assert found.scores is not None and found.target is not None
    losses = longspan.dsa.index_loss(found.scores, found.target)
    loss = longspan.reduce_loss(losses.sum(), losses.numel(), group)
    return [loss.detach(), *torch.autograd.grad(loss, (to_q, to_k, to_w))]


@pytest.mark.parametrize("fetch", longspan.dsa.FETCHES)
def test_losses_of_indexers_have_gradients_that_sum_to_those_of_one_rank(fetch: str) -> None:
    random = torch.Generator().manual_seed(3)
    shapes = ((24, 5), (24, 4, 6), (24, 6), (5, 6), (5, 3), (5, 2))
    whole = [torch.randn(s, generator=random, dtype=torch.float64) for s in shapes]
    one = indexer_gradients(None, Ownership.contiguous(24, 1), whole, fetch)
    for ranks in (2, 3):
        owners = Ownership.head_tail(24, ranks)
        parts = run_ranks(
            ranks, lambda group, owners=owners: indexer_gradients(group, owners, whole, fetch)
        )
        assert all(torch.allclose(part[0], one[0]) for part in parts)
        for i in (1, 2, 3):
            close(torch.stack([part[i] for part in parts]).sum(0), one[i], 1e-11)


# ---- Comparing selections.


def test_compared_selections_that_agree_say_so() -> None:
    inputs = Inputs.of(BY_NAME["causal"], Packing.single(40), torch.float32)
    a = inputs.indices()
    shuffled = a.flip(-1).long()
    same = longspan.dsa.compare_selections(
        a, shuffled, inputs.index_q, inputs.index_k, inputs.weights
    )
    assert (same.differing, same.queries, same.worst_gap) == (0, 0, 0.0)
    assert repr(same) == "selections agree in all 200 slots"


def test_selections_that_differ_by_rounding_differ_at_the_last_score() -> None:
    random = torch.Generator().manual_seed(1)
    q, k, weights = (torch.randn(s, generator=random) for s in ((64, 2, 8), (64, 8), (64, 2)))
    k = k[:8].repeat(8, 1)  # eight keys each of equal scores
    noisy = k * (1 + 1e-6 * torch.randn(k.shape, generator=random))
    a, b = (longspan.dsa.select_keys(q, keys, weights, slots=9) for keys in (k, noisy))
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    found = longspan.dsa.compare_selections(a, b, q, k, weights)
    assert found.differing > 0 and found.queries > 0 and found.worst_gap < 1e-6
    assert found.per_query.sum() == found.differing
    assert "selections differ in" in repr(found) and "worst gap" in repr(found)
    # A key that was dropped for no reason is seen.
    best = torch.ops.longspan.score_selected(q, k, weights, a)[63].argmax()
    wrong = a.clone()
    wrong[63, best] = -1
    found = longspan.dsa.compare_selections(a, wrong, q, k, weights)
    assert (found.differing, found.queries, found.worst_query) == (1, 1, 63)
    assert found.worst_gap > 1e-3
    assert found.per_query.tolist() == [0] * 63 + [1]


def test_ranks_compare_their_own_queries() -> None:
    inputs = Inputs.of(BY_NAME["causal"], Packing.single(40), torch.float32)
    a = inputs.indices()
    b = a.clone()
    b[39, 0] = -1
    b[7] = -1
    owners = Ownership.head_tail(40, 2)

    def body(group: Group) -> tuple[int, int]:
        tokens = owners.tokens_of(group.rank())
        mine = (t[tokens] for t in (a, b, inputs.index_q, inputs.index_k, inputs.weights))
        found = longspan.dsa.compare_selections(*mine, layout=owners, group=group)
        return found.differing, found.queries

    assert run_ranks(2, body) == [(6, 2), (0, 0)]


# ---- Torch.


@pytest.mark.slow
def test_operators_of_one_rank_pass_opcheck() -> None:
    owners = Ownership.of_ranges([[(9, 14), (0, 9)]])
    layout = longspan.AttentionLayout(owners).tensor
    tensors = drawn(owners, Group())
    q, kv, index_q, index_k, weights = tensors
    sink = torch.randn(4, requires_grad=True)
    torch.library.opcheck(
        ops.select_keys.default,
        (index_q, index_k, weights, None, None, 4, True, True, layout, ""),
    )
    with torch.no_grad():
        found = ops.select_and_attend(
            *tensors, None, None, sink, 4, SCALE, 5, True, True, False, layout, "needed", ""
        )
    out, lse, scores, _, indices = found
    plain = [t.detach() for t in tensors]
    checks: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.score_selected, (index_q, index_k, weights, indices, layout, "needed", "")),
        (ops.score_selected_backward,
         (torch.randn_like(scores), *plain[2:], indices, False, layout, "gathered", "")),
        (ops.attend_selected,
         (q, kv, indices, sink, SCALE, 5, layout, "gathered", "")),
        (ops.attend_selected_backward,
         (torch.randn_like(out), *plain[:2], indices, sink.detach(), out, lse, SCALE, 5, False,
          layout, "gathered", "")),
        (ops.selected_weights,
         (*plain[:2], indices, lse, None, SCALE, layout, "gathered", "")),
        (ops.select_and_attend,
         (*tensors, None, None, sink, 4, SCALE, 5, True, True, False, layout, "gathered", "")),
        (ops.select_and_attend_backward,
         (torch.randn_like(out), torch.randn_like(scores), *plain, indices, None, out, lse,
          SCALE, 5, True, layout, "gathered", "")),
    ]  # fmt: skip
    for op, arguments in checks:
        torch.library.opcheck(op.default, arguments)


@pytest.mark.slow
def test_two_processes_pass_opcheck_and_compile_once_for_every_length() -> None:
    outputs = outputs_of(start_ranks("selected_two_ranks.py", 2))
    assert all("done" in output for output in outputs), "\n----\n".join(outputs)


def test_one_rank_compiles_without_group_or_layout() -> None:
    def layers(q: torch.Tensor, kv: torch.Tensor, *indexer: torch.Tensor) -> torch.Tensor:
        index_q, index_k, weights = indexer
        found = longspan.dsa.select_and_attend(
            q, kv, *indexer, slots=3, scale=SCALE, scores=True, target=True
        )
        assert found.scores is not None and found.target is not None
        lists = longspan.dsa.select_keys(index_q, index_k, weights, slots=2)
        again = longspan.dsa.attend_selected(found.out, kv, lists, scale=SCALE)
        return again.sum() + longspan.dsa.index_loss(found.scores, found.target).sum()

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (12, 20):
        tensors = drawn(Ownership.contiguous(tokens, 1), Group())
        answers = []
        for function in (layers, compiled):
            loss = function(*tensors)
            answers.append((loss.detach(), *torch.autograd.grad(loss, tensors)))
        assert all(map(torch.equal, *answers))
    torch.compiler.reset()


@pytest.mark.parametrize("fetch", longspan.dsa.FETCHES)
def test_autocast_casts_tokens_and_keeps_weights(fetch: str) -> None:
    owners = Ownership.head_tail(16, 2)

    def body(group: Group) -> None:
        tensors = drawn(owners, group)
        options: dict[str, Any] = {"slots": 3, "scale": SCALE, "layout": owners,
                                   "group": group, "fetch": fetch, "scores": True}  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16):
            found = longspan.dsa.select_and_attend(*tensors, **options)
        half = [t.detach().bfloat16() for t in tensors[:4]]
        plain = longspan.dsa.select_and_attend(*half, tensors[4], **options)
        assert found.out.dtype == torch.bfloat16 and found.scores is not None
        assert torch.equal(found.out, plain.out) and torch.equal(found.indices, plain.indices)
        grads = torch.autograd.grad(found.out.sum() + found.scores.exp().sum(), tensors)
        assert all(g.dtype == torch.float32 for g in grads)

    run_ranks(2, body)


def test_the_page_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "selected.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M):
        exec(block, names)
    assert "selections" in capsys.readouterr().out
    tokens = [Ownership.head_tail(64, 4).tokens_of(rank) for rank in range(4)]
    for share, held in zip(names["shares"], tokens, strict=True):
        one = longspan.dsa.select_and_attend(
            *(names[name] for name in ("q", "kv", "index_q", "index_k", "weights")),
            slots=16, scale=32**-0.5,
        )  # fmt: skip
        close(share, one.out[held].double(), 1e-6)


# ---- Refusals: the whole sentence, before anything is sent.

OWNERS = Ownership.head_tail(16, 2)
TORN = Mask.causal(Packing.single(16)).with_hidden([(3, 5)])


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fetch", {"fetch": "sent"},
     "select_and_attend: `fetch` is 'sent'; expected one of gathered, needed"),
    ("slots", {"slots": -1}, "select_and_attend: -1 slots; expected 0 to 1048576"),
    ("ranks", {"layout": Ownership.contiguous(16, 4)},
     "select_and_attend: the ownership is over 4 ranks but the group has 2"),
    ("tokens", {"layout": Ownership.head_tail(24, 2)},
     "select_and_attend: `q` is float32 [8, 4, 6] but rank RANK holds 12 tokens"),
    ("no_layout", {"layout": None},
     "select_and_attend: 2 ranks need a layout; give `layout` or `attention`"),
    ("one_border", {"start": zeros(8, dtype=torch.int)},
     "select_and_attend: one of `start` and `end` is missing; give both or none"),
    ("short_window", {"start": zeros(8, dtype=torch.int), "end": zeros(7, dtype=torch.int)},
     "select_and_attend: `end` is int32 [7]; expected int32 [8], a border for each query"),
    ("keys_of_others", {"kv": zeros(9, 6), "index_k": zeros(9, 3)},
     "select_and_attend: `kv` is float32 [9, 6] but `q` float32 [8, 4, 6]; "
     "each rank brings the keys of its own tokens"),
    ("two_types", {"index_q": zeros(8, 2, 3, dtype=torch.bfloat16),
                   "index_k": zeros(8, 3, dtype=torch.bfloat16)},
     "select_and_attend: `index_k` is bfloat16 [8, 3] but `kv` float32 [8, 6]; "
     "they travel together, so they have the same type"),
    ("index_tokens", {"index_k": zeros(7, 3)},
     "select_and_attend: `index_k` is float32 [7, 3] but `kv` float32 [8, 6]; "
     "they have the same tokens"),
    ("index_queries", {"index_q": zeros(7, 2, 3), "weights": zeros(7, 2)},
     "select_and_attend: `index_q` is float32 [7, 2, 3] but `q` float32 [8, 4, 6]; "
     "they have the same queries"),
    ("weights", {"weights": zeros(8, 3)},
     "select_and_attend: `weights` is float32 [8, 3] but `q` float32 [8, 2, 3]; "
     "expected one for each query and head"),
    ("torn_mask", {"mask": TORN},
     "select_and_attend: document 0 has pads between its real tokens, so the keys of a query "
     "are not one range; use key_ranges_of, or move the pads to the ends"),
    ("three_masks", {"mask": [Mask.causal(Packing.single(16))] * 3},
     "select_and_attend: 3 masks for 1 rows; give one for all rows, or one for each"),
    ("scale", {"scale": math.nan}, "select_and_attend: scale is nan"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), [r[1:] for r in REFUSED],
                         ids=[r[0] for r in REFUSED])  # fmt: skip
def test_refuses_before_anything_is_sent(changed: dict[str, Any], message: str) -> None:
    def body(group: Group) -> None:
        arguments: dict[str, Any] = {
            "q": zeros(8, 4, 6), "kv": zeros(8, 6), "index_q": zeros(8, 2, 3),
            "index_k": zeros(8, 3), "weights": zeros(8, 2), "slots": 3, "scale": SCALE,
            "layout": OWNERS, "group": group,
        }  # fmt: skip
        with pytest.raises(ValueError) as raised:
            longspan.dsa.select_and_attend(**(arguments | changed))
        assert str(raised.value) == message.replace("RANK", str(group.rank()))
        assert group.sent_bytes == 0

    run_ranks(2, body, timeout=5)


def test_refuses_a_second_derivative_and_two_layouts() -> None:
    q, kv = zeros(8, 4, 6).requires_grad_(), zeros(8, 6)
    lists = zeros(8, 2, dtype=torch.int)
    out = longspan.dsa.attend_selected(q, kv, lists, scale=SCALE)
    assert isinstance(out, torch.Tensor)
    with pytest.raises(RuntimeError, match=r"^attend_selected: there is no second derivative"):
        torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)
    layout = longspan.AttentionLayout(Ownership.contiguous(8, 1))
    with pytest.raises(ValueError, match="already holds mask and owners"):
        longspan.dsa.attend_selected(
            q, kv, lists, scale=SCALE, attention=layout, layout=Ownership.contiguous(8, 1)
        )


def test_lists_and_logs_are_checked_before_anything_is_sent() -> None:
    def body(group: Group) -> None:
        where: dict[str, Any] = {"layout": OWNERS, "group": group}
        q, kv, lists = zeros(8, 4, 6), zeros(8, 6), zeros(8, 2, dtype=torch.int)
        index = (zeros(8, 2, 3), zeros(8, 3), zeros(8, 2))
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: longspan.dsa.score_selected(*index, lists[1:], **where),
             "score_selected: `indices` is int32 [7, 2] but `q` float32 [8, 2, 3]; "
             "expected int32 or int64 [Tq, slots] after as many rows"),
            (lambda: longspan.dsa.attend_selected(q, kv, lists.float(), scale=SCALE, **where),
             "attend_selected: `indices` is float32 [8, 2]; expected int32 or int64"),
            (lambda: longspan.dsa.selected_weights(q, kv, lists, zeros(8), scale=SCALE, **where),
             "selected_weights: `lse` is float32 [8] but `q` float32 [8, 4, 6]; "
             "expected what attend_selected returned"),
            (lambda: longspan.dsa.select_keys(*index, slots=3, start=lists[:, 0], **where),
             "select_keys: one of `start` and `end` is missing; give both or none"),
            (lambda: longspan.dsa.attend_selected(
                q, kv, lists, scale=SCALE, layout="head-tail", group=group),
             "attend_selected: layout 'head-tail' does not say how many tokens there are; give an "
             "Ownership, or `attention`"),
        ]  # fmt: skip
        for call, message in calls:
            with pytest.raises(ValueError) as raised:
                call()
            assert str(raised.value) == message
        assert group.sent_bytes == 0

    run_ranks(2, body, timeout=5)


@pytest.mark.parametrize("fetch", longspan.dsa.FETCHES)
def test_ranks_with_different_owners_of_equal_sizes_end_in_time(fetch: str) -> None:
    def body(group: Group) -> str:
        owners = Ownership.head_tail(16, 2) if group.rank() else Ownership.contiguous(16, 2)
        with pytest.raises(ValueError) as raised:
            longspan.dsa.select_and_attend(
                *drawn(owners, group), slots=3, scale=SCALE, layout=owners, group=group,
                fetch=fetch,
            )  # fmt: skip
        return str(raised.value)

    for words in run_ranks(2, body, timeout=60):
        assert words.startswith("select_and_attend: the ranks of the group do different things")
        assert "head-tail" in words
