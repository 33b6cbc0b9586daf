"""attend_selected, select_keys and what belongs to them, on one rank: against the
slow answers, with derivatives, in every form, traced, and with bad input."""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle.selected_attention import forward, greatest, index_scores, times_listed
from torch._dynamo.utils import counters

import longspan  # noqa: F401  (registers the operators)

ops = torch.ops.longspan
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])


@dataclass(frozen=True)
class Case:
    name: str
    queries: int = 9
    keys: int = 40
    heads: int = 4
    groups: int = 1
    slots: int = 12
    dim: int = 16
    value_dim: int = 16
    rows: int = 0  # 0: no such axis
    sink: bool = False
    lists: str = "chosen"

    def tensors(self, dtype: torch.dtype, device: str) -> dict[str, Any]:
        g = torch.Generator().manual_seed(sum(map(ord, self.name)))
        rows = (self.rows,) if self.rows else ()

        def normal(*sizes: int) -> torch.Tensor:
            made = torch.randn(*rows, *sizes, generator=g, dtype=torch.float64)
            return made.to(dtype).to(device)

        q = normal(self.queries, self.heads, self.dim)
        kv = normal(self.keys, self.groups, self.dim)
        dout = normal(self.queries, self.heads, self.value_dim)
        sink = torch.randn(self.heads, generator=g, dtype=torch.float64).to(device)
        shape = (*rows, self.queries, self.groups, self.slots)
        if self.lists == "chosen":
            ranks = torch.rand(*shape[:-1], max(self.keys, self.slots), generator=g)
            indices = ranks.argsort(-1)[..., : self.slots].sort(-1).values
            indices = indices.masked_fill(indices >= self.keys, -1)
        elif self.lists == "empty":
            indices = torch.full(shape, -1)
        else:  # wild: unsorted, twice, and outside
            indices = torch.randint(-3, self.keys + 4, shape, generator=g)
            indices[..., ::5] = INT_MIN
            indices[..., 1::5] = INT_MAX
        return {
            "q": q,
            "kv": kv,
            "dout": dout,
            "indices": indices.to(torch.int32).to(device),
            "sink": sink.to(torch.float64 if dtype == torch.float64 else torch.float32)
            if self.sink
            else None,
        }


CASES = [
    Case("usual"),
    Case("latent", dim=36, value_dim=32, heads=8),
    Case("shared_key_value_with_sink", sink=True, heads=3),
    Case("large_heads", queries=3, keys=70, heads=64, slots=66, dim=576, value_dim=512),
    Case("large_with_sink", queries=2, heads=20, slots=33, dim=512, value_dim=512, sink=True),
    Case("odd", queries=5, heads=1, dim=7, value_dim=5, slots=3),
    Case("groups", heads=6, groups=3),
    Case("rows", rows=3, sink=True),
    Case("rows_and_groups", rows=2, heads=4, groups=2, value_dim=9),
    Case("wild", lists="wild", sink=True),
    Case("wild_groups", lists="wild", heads=4, groups=2, rows=2),
    Case("nobody_listed", lists="empty", sink=True),
    Case("more_slots_than_keys", keys=5, slots=12),
    Case("one_key", keys=1, slots=1, queries=4),
    Case("no_slots", slots=0),
    Case("no_keys", keys=0, lists="wild"),
    Case("no_queries", queries=0),
]  # fmt: skip
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def answer(call: Any, t: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, lse and the gradients of q, kv and the sink, computed in a type."""
    leaves = [t["q"].to(dtype), t["kv"].to(dtype)]
    if t["sink"] is not None:
        leaves.append(t["sink"].to(torch.float64 if dtype == torch.float64 else torch.float32))
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out, lse = call(*leaves[:2], t["indices"], *(leaves[2:] or [None]))
    grads = torch.autograd.grad(out, leaves, t["dout"].to(out.dtype))
    return [out.detach(), lse.detach(), *grads]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    assert torch.equal(a.isinf(), b.isinf()) and not a.isnan().any()
    a, b = a.nan_to_num(neginf=0), b.nan_to_num(neginf=0)
    size = b.norm().clamp_min(0.1 * b.numel() ** 0.5)  # what is 0 may be rounding
    return float((a - b).norm() / size) if b.numel() else 0.0


@devices
@dtypes
@cases
def test_attends_to_the_listed_keys(case: Case, dtype: torch.dtype, device: str) -> None:
    t = case.tensors(dtype, device)
    scale = 1 / math.sqrt(case.dim)

    def ours(q: Any, kv: Any, indices: Any, sink: Any) -> Any:
        return ops.attend_selected(q, kv, indices, sink, scale, case.value_dim)

    def slow(q: Any, kv: Any, indices: Any, sink: Any) -> Any:
        return forward(q, kv, indices, scale=scale, value_dim=case.value_dim, sink=sink)

    exact = answer(slow, t, torch.float64)
    got = answer(ours, t, dtype)
    plain = answer(slow, t, dtype)
    floor = {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 4e-3)
    for name, a, b, c in zip(("out", "lse", "dq", "dkv", "dsink"), got, exact, plain, strict=False):
        assert a.shape == b.shape, name
        error = distance(c, b) if torch.equal(c.isinf(), b.isinf()) and c.isfinite().any() else 0
        assert distance(a, b) <= max(2 * error, floor), name
    assert got[0].dtype == dtype
    assert got[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@devices
def test_groups_and_lists_may_be_left_out_or_shared(device: str) -> None:
    t = Case("shared", heads=4, groups=2).tensors(torch.float32, device)
    one = t["indices"][:, :1]
    both = ops.attend_selected(t["q"], t["kv"], one.expand(-1, 2, -1), None, 0.3, 0)
    for lists in (one, one.squeeze(1), one.squeeze(1).long()):
        for a, b in zip(
            ops.attend_selected(t["q"], t["kv"], lists, None, 0.3, 0), both, strict=True
        ):
            assert torch.equal(a, b)
    kv = t["kv"][:, 0]
    plain = ops.attend_selected(t["q"], kv, one.squeeze(1), None, 0.3, 0)[0]
    assert torch.equal(plain, ops.attend_selected(t["q"], kv.unsqueeze(1), one, None, 0.3, 0)[0])


def test_wide_indices_do_not_wrap_around() -> None:
    t = Case("wide").tensors(torch.float32, "cpu")
    wide = t["indices"].long() + 2**32
    out, lse = ops.attend_selected(t["q"], t["kv"], wide, None, 0.3, 0)
    assert not out.any() and lse.isneginf().all()


@devices
def test_strided_and_offset_inputs_are_as_good(device: str) -> None:
    t = Case("strided", heads=4).tensors(torch.float32, device)
    q = torch.zeros(4, 11, 24, device=device)[:, 1:10, 3:19].transpose(0, 1)
    q.copy_(t["q"])
    kv = torch.zeros(16, 1, 81, device=device).permute(2, 1, 0)[::2][:40]
    kv.copy_(t["kv"])
    lists = torch.zeros(12, 1, 9, dtype=torch.int32, device=device).permute(2, 1, 0)
    lists.copy_(t["indices"])
    got = ops.attend_selected(q, kv, lists, None, 0.3, 11)
    want = ops.attend_selected(t["q"], t["kv"], t["indices"], None, 0.3, 11)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@devices
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_reaches_only_those_who_list_it(device: str, poison: float) -> None:
    t = Case("poison", queries=8, keys=12, slots=4).tensors(torch.float32, device)
    kv = t["kv"].clone()
    kv[5] = poison
    out, _ = ops.attend_selected(t["q"], kv, t["indices"], None, 0.3, 0)
    lists = (t["indices"] == 5).any(-1).squeeze(-1)
    assert lists.any() and not lists.all()
    assert out[~lists].isfinite().all()
    assert out[lists].isnan().flatten(1).any(1).all()


def test_exact_dkv_keeps_the_accumulation_type() -> None:
    t = Case("exact", sink=True).tensors(torch.bfloat16, "cpu")
    args = t["q"], t["kv"], t["indices"], t["sink"]
    out, lse = ops.attend_selected(*args, 0.3, 0)
    exact = ops.attend_selected_backward(t["dout"], *args, out, lse, 0.3, 0, True)[1]
    rounded = ops.attend_selected_backward(t["dout"], *args, out, lse, 0.3, 0, False)[1]
    assert exact.dtype == torch.float32
    assert torch.equal(exact.bfloat16(), rounded)


def test_the_lse_has_no_gradient_and_there_is_no_second_derivative() -> None:
    t = Case("once").tensors(torch.float64, "cpu")
    q = t["q"].requires_grad_()
    out, lse = ops.attend_selected(q, t["kv"], t["indices"], None, 0.3, 0)
    assert not lse.requires_grad
    with pytest.raises((ValueError, RuntimeError), match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


# Weights


@devices
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
def test_weights_are_the_mean_attention_over_heads(device: str, sink: bool) -> None:
    t = Case("weights", heads=4, sink=sink).tensors(torch.float64, device)
    lists = t["indices"].squeeze(1)
    _, lse = ops.attend_selected(t["q"], t["kv"], t["indices"], t["sink"], 0.3, 0)
    got = ops.selected_weights(t["q"], t["kv"].squeeze(1), lists, lse, t["sink"], 0.3)
    scores = torch.einsum("thd,sd->ths", t["q"], t["kv"].squeeze(1)) * 0.3
    scores = scores.gather(-1, lists.long().unsqueeze(1).expand(-1, 4, -1))
    if sink:
        columns = t["sink"].view(1, 4, 1).expand(lists.shape[0], -1, -1)
        heads = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    else:
        heads = scores.softmax(-1)
    want = heads.sum(1)
    torch.testing.assert_close(got, want / want.sum(-1, keepdim=True))


@devices
def test_weights_of_empty_slots_are_nothing(device: str) -> None:
    t = Case("no_weights", lists="wild").tensors(torch.float32, device)
    t["indices"][3] = -1
    _, lse = ops.attend_selected(t["q"], t["kv"], t["indices"], None, 0.3, 0)
    got = ops.selected_weights(t["q"], t["kv"], t["indices"], lse, None, 0.3)
    empty = (t["indices"] < 0) | (t["indices"] >= 40)
    assert not got[empty].any() and not got[3].any()
    seen = (~empty).any(-1)
    torch.testing.assert_close(got.sum(-1)[seen], torch.ones_like(got.sum(-1)[seen]))


# Choosing


@dataclass(frozen=True)
class Indexer:
    name: str
    queries: int = 10
    keys: int = 60
    heads: int = 4
    dim: int = 8
    slots: int = 7
    rows: int = 0

    def tensors(self, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(sum(map(ord, self.name)))
        rows = (self.rows,) if self.rows else ()
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        q = torch.randn(*rows, self.queries, self.heads, self.dim, generator=g)
        k = torch.randn(*rows, self.keys, self.dim, generator=g)
        w = torch.randn(*rows, self.queries, self.heads, generator=g)
        start = torch.randint(-5, max(self.keys, 1), (*rows, self.queries), generator=g)
        end = start + torch.randint(-3, self.keys + 9, (*rows, self.queries), generator=g)
        return [
            q.to(dtype).to(device),
            k.to(dtype).to(device),
            w.to(sums).to(device),
            start.int().to(device),
            end.int().to(device),
        ]


INDEXERS = [
    Indexer("usual"),
    Indexer("many_heads", heads=32, dim=64, keys=200, slots=50),
    Indexer("one_head", heads=1, dim=1),
    Indexer("odd", heads=3, dim=7, keys=33, slots=5),
    Indexer("rows", rows=3),
    Indexer("more_slots_than_keys", keys=4, slots=9),
    Indexer("no_slots", slots=0),
    Indexer("no_keys", keys=0),
    Indexer("no_queries", queries=0),
]
indexers = pytest.mark.parametrize("case", INDEXERS, ids=lambda c: c.name)


@devices
@indexers
def test_chooses_the_best_keys(case: Indexer, device: str) -> None:
    q, k, w, start, end = case.tensors(torch.float64, device)
    scores, indices = ops.select_keys(q, k, w, start, end, case.slots, True)
    assert indices.dtype == torch.int32
    all_scores = index_scores(q, k, w)
    assert torch.equal(indices.cpu(), greatest(all_scores, case.slots, start, end))
    empty = indices < 0
    assert scores[empty].isneginf().all()
    if case.keys:
        listed = all_scores.gather(-1, indices.long().clamp_min(0))
        torch.testing.assert_close(scores[~empty], listed[~empty])
    alone = ops.select_keys(q, k, w, start, end, case.slots, False)
    assert torch.equal(alone[1], indices) and alone[0].numel() == 0
    torch.testing.assert_close(ops.score_selected(q, k, w, indices), scores)


@dtypes
@indexers
def test_half_types_choose_by_their_own_scores(case: Indexer, dtype: torch.dtype) -> None:
    """Selections follow the float32 scores of the operator itself, exactly."""
    q, k, w, start, end = case.tensors(dtype, "cpu")
    everything = torch.arange(case.keys, dtype=torch.int32).expand(*start.shape, case.keys)
    scores = ops.score_selected(q, k, w, everything.contiguous())
    _, indices = ops.select_keys(q, k, w, start, end, case.slots, False)
    assert torch.equal(indices, greatest(scores, case.slots, start, end))


@devices
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("cut", [1, 3, 4])
def test_the_same_choice_however_queries_are_cut(cut: int, dim: int, device: str) -> None:
    case = Indexer("cut", queries=12, heads=8, dim=dim)
    q, k, w, start, end = case.tensors(torch.bfloat16, device)
    whole = ops.select_keys(q, k, w, start, end, 9, True)
    parts = []
    for i in range(0, 12, cut):
        some = slice(i, i + cut)
        parts.append(ops.select_keys(q[some], k, w[some], start[some], end[some], 9, True))
    for a, b in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(a, torch.cat(b))


ROWS = {
    "all_equal": lambda n: [1.5] * n,
    "all_zero": lambda n: [0.0] * n,
    "both_zeros": lambda n: [0.0 if i % 3 else -0.0 for i in range(n)],
    "all_but_one": lambda n: [2.0] * (n // 2) + [1.0] + [2.0] * (n - n // 2 - 1),
    "one_better": lambda n: [1.0] * (n - 1) + [1.0000001],
    "ascending": lambda n: [float(i) for i in range(n)],
    "descending": lambda n: [float(-i) for i in range(n)],
    "nans": lambda n: [float("nan") if i % 4 == 1 else float(i % 7) for i in range(n)],
    "infinities": lambda n: [(float("inf"), float("-inf"), 0.5)[i % 3] for i in range(n)],
    "nothing_but_minus_infinity": lambda n: [float("-inf")] * n,
    "close": lambda n: [1 + (i * 37 % n) * 2.0**-23 for i in range(n)],
}


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", ROWS)
def test_top_keys_of_hard_rows(kind: str, dtype: torch.dtype, device: str) -> None:
    slots = 40
    for keys in (1, slots - 1, slots, slots + 1, 300, 6001, 20000):
        row = torch.tensor(ROWS[kind](keys), dtype=dtype)
        windows = [
            (0, keys),
            (0, 0),
            (3, 4),
            (5, 5 + slots - 1),
            (5, 5 + slots),
            (5, 6 + slots),
            (7, 2),
        ]
        start = torch.tensor([a for a, _ in windows], dtype=torch.int32)
        end = torch.tensor([b for _, b in windows], dtype=torch.int32)
        scores = row.expand(len(windows), keys).contiguous()
        got = ops.top_keys(scores.to(device), slots, start.to(device), end.to(device))
        assert torch.equal(got.cpu(), greatest(scores, slots, start, end)), (keys, kind)
        assert torch.equal(ops.top_keys(row.to(device), slots, None, None), got[0])


@devices
def test_top_keys_of_a_million(device: str) -> None:
    g = torch.Generator().manual_seed(4)
    scores = torch.randn(2, 1 << 20, generator=g)
    scores[1] = scores[1].sort().values
    got = ops.top_keys(scores.to(device), 2048, None, None).cpu()
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :2048]
    assert torch.equal(got.long(), order.sort(-1).values)


def test_ties_of_relu_go_to_the_lower_key() -> None:
    q = torch.ones(1, 2, 4)
    k = torch.full((50, 4), -1.0)  # every product is negative: every score 0
    w = torch.tensor([[1.0, -1.0]])
    window = torch.tensor([3]), torch.tensor([50])
    _, indices = ops.select_keys(q, k, w, window[0].int(), window[1].int(), 6, False)
    assert indices.tolist() == [[3, 4, 5, 6, 7, 8]]


# Derivatives


def test_scores_have_derivatives() -> None:
    q, k, w, _, _ = Indexer("derivative", queries=5, keys=9).tensors(torch.float64, "cpu")
    lists = torch.randint(-2, 11, (5, 6), generator=torch.Generator().manual_seed(1)).int()

    def scores(*args: torch.Tensor) -> torch.Tensor:
        found = ops.score_selected(*args, lists)
        return found.masked_fill(found.isinf(), 0)

    leaves = [t.requires_grad_() for t in (q, k, w)]
    assert torch.autograd.gradcheck(scores, leaves)


@devices
@dtypes
def test_chosen_scores_carry_their_gradient(dtype: torch.dtype, device: str) -> None:
    case = Indexer("carry", heads=8, dim=16, slots=20)
    q, k, w, start, end = case.tensors(dtype, device)
    leaves = [t.clone().requires_grad_() for t in (q, k, w)]
    scores, indices = ops.select_keys(*leaves, start, end, case.slots, True)
    assert not indices.requires_grad
    g = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2)).to(scores)
    got = torch.autograd.grad(scores.masked_fill(indices < 0, 0), leaves, g)

    def plainly(kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        mine = [t.detach().to(kind).requires_grad_() for t in leaves]
        found = index_scores(*mine).gather(-1, indices.long().clamp_min(0))
        found = found.masked_fill(indices < 0, 0)
        return torch.autograd.grad(found, mine, g.to(found.dtype))

    exact, plain = plainly(torch.float64), plainly(dtype)
    floor = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 4e-3)
    for a, b, c in zip(got, exact, plain, strict=True):
        assert distance(a, b) <= max(2 * distance(c, b), floor)


def test_the_loss_is_the_divergence_and_has_its_derivative() -> None:
    g = torch.Generator().manual_seed(3)
    scores = torch.randn(6, 5, generator=g, dtype=torch.float64)
    target = torch.rand(6, 5, generator=g, dtype=torch.float64).softmax(-1)
    want = (target * (target.log() - scores.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(ops.index_loss(scores, target), want)
    assert torch.autograd.gradcheck(lambda s: ops.index_loss(s, target), [scores.requires_grad_()])


@devices
def test_empty_slots_and_blind_queries_lose_nothing(device: str) -> None:
    ninf = float("-inf")
    scores = torch.tensor([[1.0, 2.0, ninf], [ninf, ninf, ninf]], device=device).requires_grad_()
    target = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]], device=device)
    loss = ops.index_loss(scores, target)
    loss.sum().backward()
    assert loss[1] == 0 and not scores.grad[1].any() and scores.grad[0, 2] == 0
    shares = torch.tensor([1.0, 2.0]).softmax(0)
    torch.testing.assert_close(scores.grad[0, :2].cpu(), shares - torch.tensor([0.25, 0.75]))


# Tracing


@pytest.mark.slow
@devices
def test_operators_pass_torchs_own_checks(device: str) -> None:
    t = Case("opcheck", sink=True, groups=2).tensors(torch.float32, device)
    q, kv, sink = (t[n].requires_grad_() for n in ("q", "kv", "sink"))
    torch.library.opcheck(ops.attend_selected.default, (q, kv, t["indices"], sink, 0.3, 9))
    _, lse = ops.attend_selected(q, kv, t["indices"], sink, 0.3, 9)
    torch.library.opcheck(ops.selected_weights.default, (q, kv, t["indices"], lse, sink, 0.3))
    iq, ik, w, start, end = Indexer("opcheck").tensors(torch.float32, device)
    leaves = [x.requires_grad_() for x in (iq, ik, w)]
    # Wide windows: torch adds the outputs up, and infinities would say nothing.
    start, end = torch.zeros_like(start), torch.full_like(end, 60)
    torch.library.opcheck(ops.select_keys.default, (*leaves, start, end, 7, True))
    torch.library.opcheck(ops.select_keys.default, (*leaves, start, end, 7, False))
    scores, indices = ops.select_keys(*leaves, start, end, 7, True)
    torch.library.opcheck(ops.score_selected.default, (*leaves, indices))
    torch.library.opcheck(ops.top_keys.default, (scores.detach(), 3, None, None))
    target = scores.detach().softmax(-1)
    torch.library.opcheck(ops.index_loss.default, (scores.detach().requires_grad_(), target))


def layer(q: Any, kv: Any, iq: Any, ik: Any, w: Any, start: Any, end: Any) -> Any:
    scores, indices = ops.select_keys(iq, ik, w, start, end, 8, True)
    out, lse = ops.attend_selected(q, kv, indices, None, 0.3, 12)
    target = ops.selected_weights(q, kv, indices, lse, None, 0.3)
    return out.square().sum() + ops.index_loss(scores, target).sum()


@devices
def test_a_layer_is_one_graph_for_all_lengths(device: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (24, 37, 51):
        g = torch.Generator().manual_seed(tokens)
        shapes = [(tokens, 4, 16), (tokens, 16), (tokens, 2, 8), (tokens, 8), (tokens, 2)]
        ends = torch.arange(1, tokens + 1, dtype=torch.int32, device=device)
        both = []
        for run in (layer, compiled):
            g.manual_seed(tokens)
            leaves = [
                torch.randn(s, generator=g, dtype=torch.float64).to(device).requires_grad_()
                for s in shapes
            ]
            loss = run(*leaves, torch.zeros_like(ends), ends)
            loss.backward()
            both.append([loss.detach(), *(t.grad for t in leaves)])
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b)
    assert counters["stats"]["unique_graphs"] == 1


def test_autocast_runs_in_its_type() -> None:
    t = Case("autocast").tensors(torch.float32, "cpu")
    q, k, w, start, end = Indexer("autocast").tensors(torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ops.attend_selected(t["q"], t["kv"], t["indices"], None, 0.3, 0)
        scores, _ = ops.select_keys(q, k, w.bfloat16(), start, end, 4, True)
    assert out.dtype == torch.bfloat16 and scores.dtype == torch.float32


# Memory


def test_scratch_stays_small() -> None:
    """64 queries over 200,000 keys: the scores alone would be 51 MB for each of
    the four heads. Choosing takes a few."""

    def memory(kind: str) -> int:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(kind))

    q, k = torch.randn(64, 4, 16), torch.randn(200_000, 16)
    w = torch.randn(64, 4)
    window = torch.zeros(64, dtype=torch.int32), torch.full((64,), 200_000, dtype=torch.int32)
    ops.select_keys(q[:2], k, w[:2], window[0][:2], window[1][:2], 512, False)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory("VmRSS")
    ops.select_keys(q, k, w, *window, 512, False)
    grown = memory("VmHWM") - before
    assert grown < 32 * 1024, f"{grown} KiB"


@pytest.mark.cuda
def test_cuda_never_waits_for_the_host_and_stays_small() -> None:
    tokens, keys, slots = 2048, 65536, 256
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        made = torch.randn(*sizes, generator=g, device="cuda", dtype=torch.bfloat16)
        return made.requires_grad_()

    q, kv = normal(tokens, 8, 64), normal(keys, 64)
    iq, ik = normal(tokens, 8, 32), normal(keys, 32)
    w = torch.randn(tokens, 8, generator=g, device="cuda").requires_grad_()
    start = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    end = torch.full_like(start, keys)

    def run() -> None:
        scores, indices = ops.select_keys(iq, ik, w, start, end, slots, True)
        out, lse = ops.attend_selected(q, kv, indices, None, 0.3, 48)
        target = ops.selected_weights(q, kv, indices, lse, None, 0.3)
        (out.float().sum() + ops.index_loss(scores, target).sum()).backward()

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The scores of all keys alone would be 512 MiB.
    assert torch.cuda.max_memory_allocated() - before < 400 << 20


@devices
def test_strided_indexers_are_as_good(device: str) -> None:
    q, k, w, start, end = Indexer("strided").tensors(torch.float32, device)
    wide = torch.zeros(4, 12, 11, device=device)[:, 1:11, 2:10].transpose(0, 1)
    wide.copy_(q)
    keys = torch.zeros(8, 121, device=device).t()[1::2]
    keys.copy_(k)
    heads = torch.zeros(4, 10, device=device).t()
    heads.copy_(w)
    borders = [torch.stack([t, t], 1)[:, 0] for t in (start, end)]
    got = ops.select_keys(wide, keys, heads, *borders, 7, True)
    want = ops.select_keys(q, k, w, start, end, 7, True)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])


# Refusals


def refused(match: str, call: Any, *args: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match=match):
        call(*args)


def test_attend_selected_refuses_what_does_not_fit() -> None:
    q, kv = torch.randn(5, 4, 8), torch.randn(9, 8)
    lists = torch.zeros(5, 3, dtype=torch.int32)
    rows, wide = torch.randn(2, 5, 4, 8), torch.randn(3, 1, 577)

    def no(match: str, q: Any = q, kv: Any = kv, lists: Any = lists, **other: Any) -> None:
        given = {"sink": None, "scale": 1.0, "value_dim": 0, **other}
        refused(match, ops.attend_selected, q, kv, lists, *given.values())

    no(r"attend_selected: `q` is float32 \[5, 8\]; expected", q[:, 0])
    no("expected float32, bfloat16", q.int(), kv.int())
    no("the channels differ", q, kv[:, :5])
    no("they have the same type", q, kv.double())
    no("expected int32 or int64", lists=lists.float())
    no("a list for each query", lists=lists[:4])
    no("a list for each group, or one for all", lists=lists.unsqueeze(1).expand(5, 2, 3))
    no("value_dim is 9", value_dim=9)
    no("value_dim is -1", value_dim=-1)
    no("must divide the heads", kv=torch.randn(9, 3, 8))
    no("a logit for each", sink=torch.zeros(3))
    no("scale is nan", scale=float("nan"))
    no("1 to 576 channels", wide, wide.squeeze(1), lists[:3])
    no("the rows differ", rows, torch.randn(3, 9, 8), lists.expand(2, 5, 3))
    lse = torch.zeros(5, 3)
    refused("what attend_selected returned", ops.selected_weights, q, kv, lists, lse, None, 1.0)


def test_derivatives_refuse_what_does_not_fit() -> None:
    """These are operators too, for those who want dkv in float32."""
    q, kv, lists = torch.randn(5, 4, 8), torch.randn(9, 8), torch.zeros(5, 3).int()
    out, lse = ops.attend_selected(q, kv, lists, None, 1.0, 6)

    def no(match: str, **other: Any) -> None:
        given = {"dout": out, "out": out, "lse": lse, **other}
        refused(
            match, ops.attend_selected_backward, given["dout"], q, kv, lists, None,
            given["out"], given["lse"], 1.0, 6, True,
        )  # fmt: skip

    no("attend_selected_backward: `dout` is bfloat16", dout=out.bfloat16())
    no(r"`dout` is float32 \[5, 1, 6\]", dout=out[:, :1])
    no("`out` is float64", out=out.double())
    no("`lse` is float64", lse=lse.double())
    w = torch.randn(5, 4)
    scores = ops.score_selected(q, kv, w, lists)
    back = ops.score_selected_backward
    refused("`dscores` is float64", back, scores.double(), q, kv, w, lists, False)
    refused(r"`dscores` is float32 \[5, 2\]", back, scores[:, :2], q, kv, w, lists, False)


@devices
@pytest.mark.parametrize(
    ("dim", "values", "dtype"),
    [(8, 8, torch.float32), (8, 8, torch.bfloat16), (576, 512, torch.bfloat16)],
    ids=str,
)
def test_no_heads_and_diverged_heads_are_not_hidden(
    dim: int, values: int, dtype: torch.dtype, device: str
) -> None:
    lists = torch.tensor([[0, 1, -1]], device=device).int()
    kv = torch.randn(4, dim).to(device, dtype)
    empty = torch.zeros(1, 0, dim, device=device, dtype=dtype)
    out, lse = ops.attend_selected(empty, kv, lists, None, 1.0, values)
    assert out.shape == (1, 0, values)
    assert not ops.selected_weights(empty, kv, lists, lse, None, 1.0).any()
    bad = torch.full((1, 2, dim), float("nan"), device=device, dtype=dtype).requires_grad_()
    out, lse = ops.attend_selected(bad, kv, lists, None, 1.0, values)
    assert out.isnan().all() and lse.isnan().all()
    assert ops.selected_weights(bad, kv, lists, lse, None, 1.0)[0, :2].isnan().all()
    assert torch.autograd.grad(out.sum(), bad)[0].isnan().all()


@devices
@dtypes
@pytest.mark.parametrize("heads", [3, 64])
def test_a_nan_product_passes_the_gradient_of_a_score(
    heads: int, dtype: torch.dtype, device: str
) -> None:
    """As torch's relu does; small integers, so that every sum is exact."""
    g = torch.Generator().manual_seed(3)

    def whole(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randint(-2, 3, sizes, generator=g).to(device, dtype)

    sums = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = whole(3, heads, 64), whole(40, 64)
    weights, change = whole(3, heads, dtype=sums), whole(3, 20, dtype=sums)
    q[0, 1, 2] = k[5, 3] = float("nan")
    lists = torch.stack([torch.arange(first, first + 20) for first in (20, 0, 10)])
    lists[1, 1] = -1  # only query 1 lists key 5
    lists = lists.int().to(device)
    leaves = [x.requires_grad_() for x in (q, k, weights)]
    got = torch.autograd.grad(ops.score_selected(q, k, weights, lists), leaves, change)
    products = torch.einsum("qhd,qsd->qhs", q.double(), k.double()[lists.clamp_min(0)])
    scores = (products.relu() * weights.double().unsqueeze(-1)).sum(1)
    expected = torch.autograd.grad(scores, leaves, change.double().masked_fill(lists < 0, 0))
    for mine, relu in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, relu, rtol=0, atol=0, equal_nan=True)
    assert got[0][0, 1].isfinite().all() and got[0][2].isfinite().all()


def test_select_keys_refuses_what_does_not_fit() -> None:
    q, k, w = torch.randn(5, 4, 8), torch.randn(9, 8), torch.randn(5, 4)
    window = torch.zeros(5, dtype=torch.int32)

    def no(match: str, q: Any = q, k: Any = k, w: Any = w, **other: Any) -> None:
        given = {"start": window, "end": window, "slots": 2, **other}
        refused(match, ops.select_keys, q, k, w, *given.values(), False)

    no("one for each query and head", w=w[:, :3])
    no("what scores are summed in", w=w.double())
    no("with the same channels", k=k[:, :4])
    no("they have the same type", k=k.half())
    no("`start` is float32", start=window.float())
    no(r"`end` is int32 \[4\]", end=window[:4])
    no("-1 slots", slots=-1)
    refused("score_selected: `indices`", ops.score_selected, q, k, w, torch.zeros(4, 2).int())
    refused("one of `start` and `end` is missing", ops.top_keys, w, 2, window, None)
    refused("expected float32 or float64", ops.top_keys, w.half(), 2, None, None)
    refused("they are alike", ops.index_loss, w, w[:, :2])


def test_listings_count_twice_what_is_listed_twice() -> None:
    assert times_listed(torch.tensor([[1, 1, 3, -1, 9]]), 4).tolist() == [[0, 2, 0, 1]]
