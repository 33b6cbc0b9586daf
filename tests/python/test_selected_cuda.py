"""Selected keys by the kernels for CUDA: what they promise beyond the answers that
test_selected.py holds them to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle.selected_attention import attention, greatest, index_scores

import longspan  # noqa: F401  (registers the operators)

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
    torch.testing.assert_close(lse.cpu()[~blind].double(), exact.lse[~blind], rtol=1e-5, atol=1e-5)


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

    def layer() -> list[torch.Tensor]:
        indices = ops.select_keys(q, k, w, start, end, 64, False)[1]
        out, lse = ops.attend_selected(a, kv, indices, sink, 0.05, 512)
        back = ops.attend_selected_backward
        return [out, *back(dout, a, kv, indices, sink, out, lse, 0.05, 512, True)]

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
        torch.testing.assert_close(x, y)


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
