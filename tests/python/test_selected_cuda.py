"""Selected keys by the kernels for CUDA: what they promise beyond the answers that
test_selected.py holds them to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle.selected_attention import (
    attention,
    greatest,
    index_scores,
    weights_of_heads,
)

import longspan

pytestmark = pytest.mark.cuda
ops = torch.ops.longspan


def indexer(
    queries: int, keys: int, heads: int, dim: int, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*sizes, generator=g, device="cuda", dtype=dtype)

    end = torch.randint(0, keys + 1, (queries,), generator=g, device="cuda").int()
    start = torch.minimum(end, torch.randint(0, keys, (queries,), generator=g, device="cuda").int())
    start[::2] = 0
    weights = normal(queries, heads, dtype=torch.float32)
    return normal(queries, heads, dim), normal(keys, dim), weights, start, end


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_choice_is_a_stable_sort_of_its_own_scores(heads: int, dim: int) -> None:
    queries, keys, slots = 37, 700, 96
    q, k, w, start, end = indexer(queries, keys, heads, dim)
    all_scores, listed = ops.select_keys(q, k, w, start, end, keys, True)
    rows = torch.full((queries, keys), -math.inf)
    kept = listed.cpu() >= 0
    where = kept.nonzero()[:, 0], listed.cpu()[kept].long()
    rows[where] = all_scores.cpu()[kept]
    exact = index_scores(q.double(), k.double(), w.double()).cpu()
    error = (rows[where].double() - exact[where]).abs().max() / exact.abs().max()
    assert error < 1e-6
    scores, indices = ops.select_keys(q, k, w, start, end, slots, True)
    want = greatest(rows, slots, start.cpu(), end.cpu())
    assert torch.equal(indices.cpu(), want)
    picked = rows.gather(1, want.long().clamp_min(0)).masked_fill(want < 0, -math.inf)
    assert torch.equal(scores.cpu(), picked)
    # Some of the queries have the bits that they have among all.
    some = slice(11, 30)
    alone = ops.select_keys(q[some], k, w[some], start[some], end[some], slots, True)
    assert torch.equal(alone[0], scores[some]) and torch.equal(alone[1], indices[some])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (5, 40), (24, 72), (32, 128), (70, 256)])
def test_any_indexer_is_as_exact_as_a_plain_one(heads: int, dim: int, dtype: torch.dtype) -> None:
    queries, keys, slots = 23, 300, 77
    q, k, w, start, end = indexer(queries, keys, heads, dim)
    q, k = (t.to(dtype) for t in (q, k))
    scores, indices = ops.select_keys(q, k, w, start, end, slots, True)
    exact = index_scores(q.double(), k.double(), w.double())
    truth = exact.gather(1, indices.long().clamp_min(0))
    empty = indices < 0
    assert empty.any() and torch.equal(scores.isneginf(), empty)
    size = exact.abs().max()
    assert ((scores.double() - truth)[~empty].abs().max() / size) < 1e-6
    # What is left out is no better than what is chosen.
    seen = torch.arange(keys, device="cuda")
    seen = (seen >= start[:, None]) & (seen < end[:, None])
    places = indices.long().masked_fill(empty, keys)
    chosen = torch.zeros(queries, keys + 1, dtype=torch.bool, device="cuda")
    chosen = chosen.scatter(1, places, True)[:, :keys]
    best_left = exact.masked_fill(~seen | chosen, -math.inf).amax(1)
    worst = truth.masked_fill(empty, math.inf).amin(1)
    assert (best_left <= worst + 1e-6 * size).all()
    assert torch.equal((~empty).sum(1), seen.sum(1).clamp_max(slots))

    leaves = [t.clone().requires_grad_() for t in (q, k, w)]
    listed = ops.score_selected(*leaves, indices)
    assert torch.equal(listed.isneginf(), empty)
    assert ((listed.double() - truth)[~empty].abs().max() / size) < 1e-6
    g = torch.Generator("cuda").manual_seed(9)
    dscores = torch.randn(listed.shape, generator=g, device="cuda")
    grads = torch.autograd.grad(listed, leaves, dscores)
    rounded = [t.detach().double().requires_grad_() for t in (q, k, w)]
    picked = index_scores(*rounded).gather(1, indices.long().clamp_min(0))
    kept = dscores.double().masked_fill(empty, 0)
    for a, b in zip(grads, torch.autograd.grad(picked, rounded, kept), strict=True):
        assert (a.double() - b).norm() <= 6e-3 * b.norm()


def attending(queries: int, heads: int, dim: int, slots: int, seed: int = 1) -> tuple[Any, ...]:
    g = torch.Generator("cuda").manual_seed(seed)
    keys = 900
    q = torch.randn(queries, heads, dim, generator=g, device="cuda").bfloat16()
    kv = torch.randn(keys, dim, generator=g, device="cuda").bfloat16()
    ranks = torch.rand(queries, keys, generator=g, device="cuda")
    indices = ranks.argsort(-1)[:, :slots].sort(-1).values.int()
    for query in range(queries):  # tails as a causal stream has them
        indices[query, (query * 37) % (slots + 1) :] = -1
    sink = torch.randn(heads, generator=g, device="cuda")
    dout = torch.randn(queries, heads, 512, generator=g, device="cuda").bfloat16()
    return q, kv, indices, sink, dout


@pytest.mark.parametrize("heads", [1, 16, 64, 80, 128])
@pytest.mark.parametrize("dim", [512, 576])
@pytest.mark.parametrize("slots", [65, 320])
def test_large_heads_are_as_exact_as_plain_bfloat16(heads: int, dim: int, slots: int) -> None:
    q, kv, indices, sink, dout = attending(9, heads, dim, slots)
    leaves = [t.clone().requires_grad_() for t in (q, kv, sink)]
    scale = dim**-0.5
    out, lse = ops.attend_selected(leaves[0], leaves[1], indices, leaves[2], scale, 512)
    grads = torch.autograd.grad(out, leaves, dout)
    given = [t.cpu() for t in (q, kv, indices, dout)]
    options: dict[str, Any] = {"scale": scale, "value_dim": 512, "sink": sink.cpu()}
    exact = attention(*given, **options)
    plain = attention(*given, **options, dtype=torch.bfloat16)
    for name, a, b, c in [
        ("out", out, exact.out, plain.out),
        ("dq", grads[0], exact.dq, plain.dq),
        ("dkv", grads[1], exact.dkv, plain.dkv),
        ("dsink", grads[2], exact.dsink, plain.dsink),
    ]:
        size = b.norm()
        ours, theirs = ((x.detach().cpu().double() - b).norm() / size for x in (a, c))
        assert ours <= max(2 * theirs, 4e-3), name
    blind = exact.lse.isneginf()
    assert blind.any() and torch.equal(lse.isneginf().cpu(), blind)
    assert not out.cpu()[blind].any() and not grads[0].cpu()[blind].any()
    torch.testing.assert_close(lse.cpu()[~blind].double(), exact.lse[~blind], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "values"),
    [(1, 1, 64, 64), (5, 1, 72, 40), (24, 2, 192, 128), (64, 1, 256, 256), (16, 8, 128, 8),
     (80, 1, 576, 512), (64, 1, 576, 512)],
)  # fmt: skip
def test_any_half_type_and_shape_is_as_exact_as_a_plain_one(
    heads: int, groups: int, dim: int, values: int, dtype: torch.dtype
) -> None:
    rows, queries, keys, slots = 2, 7, 300, 131
    g = torch.Generator("cuda").manual_seed(heads)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=g, device="cuda").to(dtype)

    q, kv = normal(rows, queries, heads, dim), normal(rows, keys, groups, dim)
    indices = torch.randint(
        -40, keys + 40, (rows, queries, groups, slots), generator=g, device="cuda"
    ).int()
    indices[0, 2] = -1
    indices[1, 3, :, 64:] = keys
    sink, dout = normal(heads).float(), normal(rows, queries, heads, values)
    leaves = [t.clone().requires_grad_() for t in (q, kv, sink)]
    scale = dim**-0.5
    out, lse = ops.attend_selected(leaves[0], leaves[1], indices, leaves[2], scale, values)
    grads = torch.autograd.grad(out, leaves, dout)
    given = [t.cpu() for t in (q, kv, indices, dout)]
    options: dict[str, Any] = {"scale": scale, "value_dim": values, "sink": sink.cpu()}
    exact = attention(*given, **options)
    plain = attention(*given, **options, dtype=dtype)
    for name, a, b, c in [
        ("out", out, exact.out, plain.out),
        ("dq", grads[0], exact.dq, plain.dq),
        ("dkv", grads[1], exact.dkv, plain.dkv),
        ("dsink", grads[2], exact.dsink, plain.dsink),
    ]:
        ours, theirs = ((x.detach().cpu().double() - b).norm() / b.norm() for x in (a, c))
        # A head's dsink is one number, a sum that may cancel.
        floor = 2e-2 if name == "dsink" else 4e-3 if dtype == torch.bfloat16 else 1e-3
        assert ours <= max(2 * theirs, floor), name
    assert lse[0, 2].isneginf().all() and not out[0, 2].any() and not grads[0][0, 2].any()
    seen = ~exact.lse.isneginf()
    torch.testing.assert_close(lse.cpu()[seen].double(), exact.lse[seen], rtol=1e-5, atol=1e-5)
    weights = ops.selected_weights(q, kv, indices, lse, sink, scale).cpu().double()
    size = heads // groups
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        want = weights_of_heads(
            q[:, :, own].cpu().double(), kv[:, :, group].cpu().double(),
            indices[:, :, group].cpu(), scale=scale, sink=sink[own].cpu(),
        )  # fmt: skip
        assert (weights[:, :, group] - want).norm() <= 1e-5 * want.norm()


def test_small_gradients_of_float16_survive() -> None:
    """Weights of a long list times a small gradient lie below float16's exponents."""
    g = torch.Generator("cuda").manual_seed(3)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=g, device="cuda").half()

    q, kv, dout = normal(4, 16, 128), normal(2048, 128), normal(4, 16, 64) * 1e-3
    lists = torch.arange(2048, device="cuda").int().expand(4, -1).contiguous()
    scale = 128**-0.5
    back = ops.attend_selected_backward

    def gradients(dtype: torch.dtype) -> Any:
        given = [t.to(dtype) for t in (q, kv, dout)]
        out, lse = ops.attend_selected(given[0], given[1], lists, None, scale, 64)
        return back(given[2], given[0], given[1], lists, None, out, lse, scale, 64, True)[:2]

    for a, b in zip(gradients(torch.half), gradients(torch.double), strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()


def test_nothing_to_do_is_done() -> None:
    """Without queries, slots or keys, in shapes of every kernel."""
    for heads, dim, values in ((64, 576, 512), (8, 64, 64)):
        for queries, keys, slots in ((0, 9, 4), (3, 9, 0), (3, 0, 4)):
            q = torch.ones(queries, heads, dim, device="cuda").bfloat16().requires_grad_()
            kv = torch.ones(keys, dim, device="cuda").bfloat16().requires_grad_()
            lists = torch.zeros(queries, slots, device="cuda").int()
            out, lse = ops.attend_selected(q, kv, lists, None, 1.0, values)
            assert not out.any() and lse.isneginf().all()
            dq, dkv = torch.autograd.grad(out.sum(), (q, kv))
            assert not dq.any() and not dkv.any()
            assert not ops.selected_weights(q, kv, lists, lse, None, 1.0).any()
    for heads, dim in ((32, 128), (5, 40)):
        for queries, keys, slots in ((0, 9, 4), (3, 9, 0), (3, 0, 4)):
            q = torch.ones(queries, heads, dim, device="cuda").bfloat16().requires_grad_()
            k = torch.ones(keys, dim, device="cuda").bfloat16().requires_grad_()
            w = torch.ones(queries, heads, device="cuda").requires_grad_()
            window = torch.zeros(queries, device="cuda").int()
            scores, lists = ops.select_keys(q, k, w, window, window + 9, slots, True)
            assert lists.shape == (queries, slots)
            if keys == 0:
                assert (lists == -1).all() and scores.isneginf().all()
                lists = torch.zeros_like(lists)
            scores = ops.score_selected(q, k, w, lists)
            for grad in torch.autograd.grad(scores.sum(), (q, k, w)):
                assert slots * keys * queries or not grad.any()


def test_a_hundred_repeats_have_the_same_bits() -> None:
    q, k, w, start, end = indexer(256, 3000, 32, 128)
    lists = ops.select_keys(q, k, w, start, end, 512, True)
    a, kv, indices, sink, _ = attending(64, 64, 576, 256)
    first = ops.attend_selected(a, kv, indices, sink, 0.05, 512)
    for _ in range(100):
        again = ops.select_keys(q, k, w, start, end, 512, True)
        assert torch.equal(again[0], lists[0]) and torch.equal(again[1], lists[1])
        more = ops.attend_selected(a, kv, indices, sink, 0.05, 512)
        assert torch.equal(more[0], first[0]) and torch.equal(more[1], first[1])


def test_a_graph_captures_a_layer() -> None:
    q, k, w, start, end = indexer(128, 900, 32, 128)
    a, kv, _, sink, dout = attending(128, 64, 576, 64)

    back, score_back = ops.attend_selected_backward, ops.score_selected_backward

    def layer() -> list[torch.Tensor]:
        found = []
        for dtype in (torch.bfloat16, torch.float16):  # kernels of both folders
            iq, ik, x, y, dz = (t.to(dtype) for t in (q, k, a, kv, dout))
            scores, indices = ops.select_keys(iq, ik, w, start, end, 64, True)
            out, lse = ops.attend_selected(x, y, indices, sink, 0.05, 512)
            target = ops.selected_weights(x, y, indices, lse, sink, 0.05)
            found += [scores, out, target, ops.score_selected(iq, ik, w, indices)]
            found += back(dz, x, y, indices, sink, out, lse, 0.05, 512, True)
            found += score_back(target, iq, ik, w, indices, True)
        return found

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    q.copy_(q.flip(0))
    a.copy_(a.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(captured, layer(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)  # dkv is added in any order


def test_kernels_use_the_current_stream() -> None:
    a, kv, indices, sink, _ = attending(64, 64, 576, 256)
    want = ops.attend_selected(a, kv, indices, sink, 0.05, 512)[0]
    torch.cuda.synchronize()
    late = torch.zeros_like(a)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        out = ops.attend_selected(late, kv, indices, sink, 0.05, 512)[0]
    stream.synchronize()
    assert torch.equal(out, want)


def test_rows_off_the_grid_of_sixteen_bytes_are_copied() -> None:
    a, kv, indices, sink, _ = attending(16, 64, 576, 64)
    want = ops.attend_selected(a, kv, indices, sink, 0.05, 512)[0]
    room = torch.zeros(901 * 577, device="cuda", dtype=torch.bfloat16)
    shifted = room[1 : 1 + 900 * 577].view(900, 577)[:, :576]
    shifted.copy_(kv)
    assert torch.equal(ops.attend_selected(a, shifted, indices, sink, 0.05, 512)[0], want)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_rank_has_the_bits_of_one_rank(ranks: int) -> None:
    """Every rank's queries over the keys of all, as after a gather."""
    tokens, slots = 504, 96
    g = torch.Generator("cuda").manual_seed(ranks)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=g, device="cuda").bfloat16()

    iq, ik, w = normal(tokens, 32, 128), normal(tokens, 128), normal(tokens, 32).float()
    q, kv, dout = normal(tokens, 64, 576), normal(tokens, 576), normal(tokens, 64, 512)
    end = torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")
    start = end // 200 * 100  # documents

    def layer(own: Any) -> list[torch.Tensor]:
        mine = [t[own] for t in (iq, w, start, end, q, dout)]
        scores, lists = ops.select_keys(mine[0], ik, *mine[1:4], slots, True)
        out, lse = ops.attend_selected(mine[4], kv, lists, None, 0.05, 512)
        back = ops.attend_selected_backward
        dq, dkv, _ = back(mine[5], mine[4], kv, lists, None, out, lse, 0.05, 512, True)
        return [scores, lists, out, lse, dq, dkv]

    whole = layer(slice(None))
    sums = torch.zeros_like(whole[5])
    for owners in (
        longspan.Ownership.head_tail(tokens, ranks),
        longspan.Ownership.contiguous(tokens, ranks),
    ):
        sums.zero_()
        for rank in range(ranks):
            own = owners.tokens_of(rank).cuda()
            *rows, dkv = layer(own)
            for a, b in zip(rows, whole, strict=False):
                assert torch.equal(a, b[own])
            sums += dkv
        torch.testing.assert_close(sums, whole[5], rtol=1e-4, atol=1e-4)


def test_answers_over_parts_of_the_lists_merge() -> None:
    q, kv, indices, _, _ = attending(40, 64, 576, 192)
    whole = ops.attend_selected(q, kv, indices, None, 0.05, 512)
    parts = [
        ops.attend_selected(q, kv, part.contiguous(), None, 0.05, 512)
        for part in indices.split([70, 122], -1)
    ]
    out, lse = longspan.testing.merge(*parts[0], *parts[1])
    blind = whole[1].isneginf()
    assert blind.any() and torch.equal(lse.isneginf(), blind)
    torch.testing.assert_close(lse[~blind], whole[1][~blind], rtol=1e-6, atol=1e-6)
    assert (out.float() - whole[0].float()).norm() < 4e-3 * whole[0].float().norm()


def test_large_heads_are_one_graph() -> None:
    """The kernels behind torch.compile, with its own code around them."""

    def layer(q: Any, kv: Any, iq: Any, ik: Any, w: Any, start: Any, end: Any) -> Any:
        scores, lists = ops.select_keys(iq, ik, w, start, end, 64, True)
        out, lse = ops.attend_selected(q * 1.5, kv, lists, None, 0.05, 512)
        target = ops.selected_weights(q * 1.5, kv, lists, lse, None, 0.05)
        return (out.float() ** 2).mean() + ops.index_loss(scores, target).mean()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (129, 300):
        iq, ik, w, _, _ = indexer(tokens, tokens, 32, 128, seed=tokens)
        g = torch.Generator("cuda").manual_seed(tokens)
        q = torch.randn(tokens, 64, 576, generator=g, device="cuda").bfloat16()
        kv = torch.randn(tokens, 576, generator=g, device="cuda").bfloat16()
        end = torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")
        both = []
        for run in (layer, compiled):
            leaves = [t.detach().clone().requires_grad_() for t in (q, kv, iq, ik, w)]
            loss = run(*leaves, torch.zeros_like(end), end)
            loss.backward()
            both.append([loss.detach(), *(t.grad for t in leaves)])
        for a, b in zip(*both, strict=True):
            assert (a.float() - b.float()).norm() <= 1e-2 * b.float().norm()


def test_offsets_past_two_to_the_31() -> None:
    if torch.cuda.mem_get_info()[1] < 60 << 30:
        pytest.skip("takes 40 GiB of the device")
    tokens, heads, dim, slots = 65536, 128, 576, 64
    g = torch.Generator("cuda").manual_seed(5)
    q = torch.randn(tokens, heads, dim, generator=g, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**32
    kv = torch.randn(tokens, dim, generator=g, device="cuda", dtype=torch.bfloat16)
    lists = torch.randint(0, tokens, (tokens, slots), generator=g, device="cuda")
    lists = lists.sort(-1).values.int()
    dout = torch.randn(tokens, heads, 512, generator=g, device="cuda", dtype=torch.bfloat16)
    out, lse = ops.attend_selected(q, kv, lists, None, 0.05, 512)
    back = ops.attend_selected_backward
    dq, dkv, _ = back(dout, q, kv, lists, None, out, lse, 0.05, 512, True)
    sums = torch.zeros_like(dkv)
    for first in range(0, tokens, 16384):  # each below 2**31
        some = slice(first, first + 16384)
        own = [t[some].clone() for t in (q, lists, dout)]
        part, part_lse = ops.attend_selected(own[0], kv, own[1], None, 0.05, 512)
        assert torch.equal(part, out[some]) and torch.equal(part_lse, lse[some])
        more = back(own[2], own[0], kv, own[1], None, part, part_lse, 0.05, 512, True)
        assert torch.equal(more[0], dq[some])
        sums += more[1]
    assert (dkv - sums).norm() < 1e-5 * sums.norm()
    del q, out, dout, dq, dkv, sums
    scores = torch.randn(40000, tokens, generator=g, device="cuda")
    assert scores.numel() > 2**31
    chosen = ops.top_keys(scores, slots, None, None)
    for some in (slice(0, 4), slice(32764, 32772), slice(39996, 40000)):
        rows = scores[some].cpu()
        start = torch.zeros(len(rows), dtype=torch.int32)
        want = greatest(rows, slots, start, start + tokens)
        assert torch.equal(chosen[some].cpu(), want)


@pytest.mark.parametrize("tokens", [16384, 65536])
def test_the_indexer_takes_little_more_than_its_answer(tokens: int) -> None:
    slots = 2048
    q, k, w, _, _ = indexer(tokens, tokens, 32, 128)
    end = torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")
    start = torch.zeros_like(end)
    ops.select_keys(q, k, w, start, end, slots, False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lists = ops.select_keys(q, k, w, start, end, slots, False)[1]
    grown = torch.cuda.max_memory_allocated() - before
    assert grown <= tokens * slots * 4 + (64 << 20)
    # A long answer lends the place of its last lists to scores; short ones do not.
    part = 8192
    for first in range(0, tokens, part):
        some = slice(first, first + part)
        given = (q[some], k, w[some], start[some], end[some])
        assert torch.equal(ops.select_keys(*given, slots, False)[1], lists[some])
    rows = [torch.stack([t, t.roll(5, 0)]) for t in (q, w, start, end)]
    keys = torch.stack([k, k])
    twice = ops.select_keys(rows[0], keys, *rows[1:], slots, False)[1]
    assert torch.equal(twice[0], lists) and torch.equal(twice[1], lists.roll(5, 0))


def test_every_kernel_says_why_it_does_not_run() -> None:
    q, kv, indices, _, _ = attending(4, 64, 576, 64)
    iq, ik, w, _, _ = indexer(4, 40, 32, 128)

    def which(*tensors: torch.Tensor, of: str = "attend_selected", **options: Any) -> str:
        return longspan.which_kernel(*tensors, of, **options)

    def indexing(*tensors: torch.Tensor, of: str = "select_keys") -> str:
        return longspan.which_kernel(*tensors, of, slots=64)

    if torch.cuda.get_device_capability() == (9, 0):
        assert which(q, kv, indices, value_dim=512) == "hopper"
        assert which(q, kv, indices, value_dim=512, of="attend_selected_backward") == "hopper"
        assert which(q, kv, indices, of="selected_weights") == "hopper"
        assert indexing(iq, ik, w) == "hopper"
    half = which(q.half(), kv.half(), indices, value_dim=512)
    assert half == "ampere, not hopper: elements are not bfloat16"
    assert which(q[..., :72], kv[..., :72], indices).startswith("ampere, not hopper: no kernel for")
    odd = which(q[..., :70], kv[..., :70], indices)
    assert odd.startswith("torch, not hopper: ") and "; not ampere: no kernel for 70" in odd
    assert "neither bfloat16 nor float16" in which(q.float(), kv.float(), indices)
    fewer = indexing(iq[:, :24], ik, w[:, :24])
    assert fewer.startswith("ampere, not hopper: no kernel for 24 heads")
    assert indexing(iq.half(), ik.half(), w, of="score_selected") == "ampere"
    assert indexing(iq, ik, w, of="score_selected_backward") == "ampere"
    assert indexing(iq.float(), ik.float(), w).startswith("torch, not hopper: ")
    torch.use_deterministic_algorithms(True)
    try:
        told = which(q, kv, indices, value_dim=512, of="attend_selected_backward")
        assert told.startswith("torch, not hopper: ") and "deterministic" in told
        assert "deterministic" in indexing(iq, ik, w, of="score_selected_backward")
    finally:
        torch.use_deterministic_algorithms(False)
