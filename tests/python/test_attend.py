"""Every strategy, ownership and mask gives on N ranks what one rank gives."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import ownerships
from oracle.dense_attention import (
    Answer,
    dense_attention,
    dense_by_formula,
    visible_pairs,
)

import longspan
from longspan import Group, Mask, Ownership, Packing, Strategy, run_ranks

RANKS = (1, 2, 3, 4, 7)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    packing: Packing
    masks: Callable[[Packing], list[Mask]] = lambda packing: [Mask.causal(packing)]
    rows: int = 1
    heads: int = 4
    key_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    softcap: float = 0.0
    sink: str | None = None
    magnitude: float = 1.0  # of the scores
    packed: bool = False  # [T, H, D] instead of [B, H, T, D]

    def fitted(self, multiple: int) -> Packing:
        """Slots and tail rounded up, so that every ownership can cut them."""
        return self.packing.with_slots_multiple_of(multiple).with_tokens_multiple_of(multiple)


def one(make: Callable[[Packing], Mask]) -> Callable[[Packing], list[Mask]]:
    return lambda packing: [make(packing)]


def groups_across_borders(packing: Packing) -> list[Mask]:
    """Vision groups of 5 tokens at every 16th token of the first document."""
    length = packing.length(0)
    groups = [(at, min(at + 5, length)) for at in range(9, length - 1, 16)]
    return [Mask.sliding(packing, 6).with_groups(groups)]


def images_longer_than_the_window(packing: Packing) -> list[Mask]:
    """As in Gemma 4's sliding layers: ahead to the end of the image, back as far as
    the window goes."""
    groups = [(3, 21), (21, 27), (33, packing.tokens)]
    return [Mask.sliding(packing, 5).with_groups(groups).with_group_reach("within_window")]


def torn(packing: Packing) -> list[Mask]:
    """Pads at the front, in the middle and one by one."""
    return [Mask.causal(packing).with_hidden([(0, 3), (11, 14), (17, 18), (19, 20)])]


DOCUMENTS = Packing.of([23, 1, 0, 17, 9], [24, 2, 1, 17, 12])

CASES = [
    Case("one_token", Packing.single(1)),
    Case("causal", Packing.single(40)),
    Case("full", Packing.single(37), one(Mask.full)),
    Case("documents", DOCUMENTS),
    Case("documents_full", DOCUMENTS, one(Mask.full), packed=True),
    Case("rows_of_different_documents", Packing.single(40), lambda p: [
        Mask.causal(Packing.of([13, 27][: p.tokens], [13, p.tokens - 13])),
        Mask.full(p),
        Mask.causal(p).with_hidden([(0, 7)]),
    ], rows=3),
    Case("same_mask_in_every_row", DOCUMENTS, rows=2, key_heads=4),
    Case("window", Packing.single(45), one(lambda p: Mask.sliding(p, 7))),
    Case("window_longer_than_the_stream", Packing.single(19), one(lambda p: Mask.sliding(p, 99))),
    Case("window_of_one", Packing.single(21), one(lambda p: Mask.sliding(p, 1))),
    Case("band", DOCUMENTS, one(lambda p: Mask.banded(p, 5, 3))),
    Case("groups_across_borders", Packing.of([50, 6]), groups_across_borders),
    Case("images_longer_than_the_window", Packing.of([24, 20]), images_longer_than_the_window),
    Case("prefix", Packing.of([20, 22]), one(lambda p: Mask.causal(p).with_prefix([9, 4]))),
    Case("torn_documents", Packing.of([25, 20]), torn),
    Case("pads_that_see", DOCUMENTS, one(lambda p: Mask.causal(p).with_seeing_pads())),
    Case("mostly_pads", Packing.of([5], [60]), packed=True),
    Case("nothing_but_pads", Packing.of([0], [16])),
    Case("one_token_documents", Packing.of([1] * 23), packed=True),
    Case("gqa_8_to_1", Packing.single(24), heads=16, key_heads=2),
    Case("mqa", Packing.single(24), heads=6, key_heads=1, packed=True),
    Case("three_heads", Packing.single(20), heads=3, key_heads=3),
    Case("key_and_value_dims_differ", Packing.of([11, 9]), dim=192, value_dim=128, heads=2),
    Case("odd_dims", Packing.single(18), dim=5, value_dim=3),
    Case("softcap", DOCUMENTS, softcap=3.0, magnitude=4.0),
    Case("sink", DOCUMENTS, sink="usual", packed=True),
    Case("sinks_at_their_extremes", DOCUMENTS, sink="extreme"),
    Case("sink_and_softcap_in_a_window", DOCUMENTS, one(lambda p: Mask.sliding(p, 5)),
         sink="usual", softcap=2.0),
    Case("scores_of_ten_thousand", Packing.of([20, 14]), magnitude=1e4),
]  # fmt: skip

BY_NAME = {case.name: case for case in CASES}


def strategies(ranks: int) -> list[tuple[str, int]]:
    teams = [n for n in range(2, ranks) if ranks % n == 0]
    return [
        ("ring", 0),
        ("gathered", 0),
        ("needed", 0),
        ("head_parallel", 0),
        *(("head_parallel_ring", n) for n in teams),
    ]


@dataclasses.dataclass
class Inputs:
    case: Case
    masks: list[Mask]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    sink: torch.Tensor | None
    scale: float

    @staticmethod
    def of(case: Case, packing: Packing, dtype: torch.dtype) -> Inputs:
        random = torch.Generator().manual_seed(7)

        def draw(heads: int, dim: int) -> torch.Tensor:
            shape = (case.rows, heads, packing.tokens, dim)
            return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

        q = draw(case.heads, case.dim)
        k = draw(case.key_heads, case.dim)
        sink = None
        if case.sink == "usual":
            sink = torch.linspace(-1, 2, case.heads, dtype=torch.float32)
        elif case.sink == "extreme":
            sink = torch.tensor([math.inf, -math.inf, 1e4, -1e4] * case.heads)[: case.heads]
        return Inputs(
            case,
            case.masks(packing),
            q,
            k,
            draw(case.key_heads, case.value_dim),
            draw(case.heads, case.value_dim),
            sink if sink is None or dtype != torch.float64 else sink.double(),
            case.magnitude / math.sqrt(case.dim),
        )

    def answer(self, dtype: torch.dtype, how: Callable[..., Answer] = dense_attention) -> Answer:
        visible = visible_pairs(self.masks, self.case.rows)
        return how(
            self.q, self.k, self.v, self.dout, visible,
            scale=self.scale, softcap=self.case.softcap, sink=self.sink, dtype=dtype,
        )  # fmt: skip


def attend_on(group: Group, inputs: Inputs, owners: Ownership, strategy: tuple[str, int]) -> Answer:
    """This rank's part of the answer, laid out as [B, H, L, D]."""
    tokens = owners.tokens_of(group.rank()).to(inputs.q.device)
    packed = inputs.case.packed

    def share(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.index_select(2, tokens)
        return local[0].transpose(0, 1).contiguous() if packed else local

    def back(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1).unsqueeze(0) if packed else tensor

    q, k, v = (share(t).requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    sink = None if inputs.sink is None else inputs.sink.clone().requires_grad_()
    out, lse = longspan.attend(
        q, k, v, mask=inputs.masks, layout=owners, group=group, strategy=Strategy(*strategy),
        scale=inputs.scale, softcap=inputs.case.softcap, sink=sink,
        return_lse=True,
    )  # fmt: skip
    assert not lse.requires_grad
    out.backward(share(inputs.dout))
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return Answer(
        back(out.detach()), back(lse), back(q.grad), back(k.grad), back(v.grad),
        None if sink is None else sink.grad,
    )  # fmt: skip


def joined(parts: list[Answer], owners: Ownership) -> Answer:
    order = torch.cat([owners.tokens_of(rank) for rank in range(owners.ranks)]).argsort()

    def join(tensors: list[Any]) -> torch.Tensor:
        return torch.cat(tensors, dim=2).index_select(2, order)

    columns = list(zip(*parts, strict=True))
    dsinks = [d for d in columns[5] if d is not None]
    return Answer(
        *(join(list(column)) for column in columns[:5]),
        torch.stack(dsinks).sum(0) if dsinks else None,
    )


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius distance; infinities and NaNs must match by place."""
    x, truth = x.double(), truth.double()
    odd = ~truth.isfinite()
    if not torch.equal(~x.isfinite(), odd) or not torch.equal(x[odd], truth[odd]):
        return math.inf
    return float((x - truth)[~odd].norm())


def complaints(got: Answer, truth: Answer, plain: list[Answer], floor: float) -> list[str]:
    """Where the error is more than twice that of a plain computation."""
    found = []
    for name, x, t, *others in zip(Answer._fields, got, truth, *plain, strict=True):
        if t is None:
            assert x is None
            continue
        size = float(t.double()[t.isfinite()].norm())
        assert not t.isnan().any(), "the oracle itself is not a number"
        plain_error = max(e for e in (error(p, t) for p in others) if e < math.inf)
        allowed = max(2 * plain_error, floor * max(size, 1.0))
        if not error(x, t) <= allowed:
            found.append(f"{name}: error {error(x, t):.3g}, allowed {allowed:.3g}")
    return found


def check_case(case: Case, ranks: int, dtype: torch.dtype) -> None:
    packing = case.fitted(2 * ranks)
    inputs = Inputs.of(case, packing, dtype)
    truth = inputs.answer(torch.float64)
    # Plain computations: by autograd, and by the formulas of blocks with sums in
    # several orders. Where one row with two equal scores makes all of the error, or
    # an answer is four numbers, one order alone would be a matter of luck.
    plain = [inputs.answer(dtype)]
    for seed in range(8 if case.magnitude > 1e3 or case.sink else 1):
        plain.append(inputs.answer(dtype, functools.partial(dense_by_formula, seed=seed)))
    floor = 1e-12 if dtype == torch.float64 else torch.finfo(torch.float32).eps
    runs = [
        (name, owners, strategy)
        for name, owners in ownerships(packing, ranks).items()
        for strategy in strategies(ranks)
    ]

    def work(group: Group) -> list[Answer]:
        return [attend_on(group, inputs, owners, strategy) for _, owners, strategy in runs]

    parts = run_ranks(ranks, work)
    wrong = []
    for i, (name, owners, strategy) in enumerate(runs):
        got = joined([part[i] for part in parts], owners)
        for complaint in complaints(got, truth, plain, floor):
            wrong.append(f"{strategy} over {name}: {complaint}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_gives_the_one_rank_answer(case: Case, ranks: int) -> None:
    check_case(case, ranks, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        "causal", "documents", "groups_across_borders", "sink_and_softcap_in_a_window",
        "key_and_value_dims_differ", "mqa", "torn_documents", "scores_of_ten_thousand",
        "images_longer_than_the_window",
    ],
)  # fmt: skip
def test_half_and_single_give_the_one_rank_answer(
    name: str, dtype: torch.dtype, ranks: int
) -> None:
    check_case(BY_NAME[name], ranks, dtype)
