"""GLM's two kernels: values and derivatives against slow answers, the seams, refusals."""

import math

import pytest
import torch
from compat_support import kernels
from oracle import listed_keys as slow
from oracle.selected_attention import forward as attend_listed
from oracle.selected_attention import greatest, index_scores

import longspan
from longspan.compat.nemo import _nemo, strict

NEVER = float("-inf")


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def indexer_inputs(queries=8, keys=8, heads=3, channels=4, dtype=torch.float64):
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        random(queries, heads, channels).to(dtype),
        random(keys, channels, seed=1).to(dtype),
        random(queries, heads, seed=2).to(sums),
    )


def expected_keys(q, k, w, windows, slots):
    scores = index_scores(q.double(), k.double(), w.double())
    start, end = torch.tensor(windows).unbind(-1)
    return greatest(scores, slots, start, end).tolist()


# The indexer.


@pytest.mark.parametrize("slots", [1, 3, 8, 12])
@pytest.mark.parametrize(
    ("cu", "padded"),
    [
        ([0, 8], None),
        ([0, 2, 5], None),
        ([0, 2, 5], [0, 4, 8]),
        ([0, 0, 3], [0, 2, 8]),
        ([0, 3, 8], [0, 3, 8]),
        ([0, 2, -1000], [0, 3, -1000]),
    ],
)
def test_each_query_gets_its_best_keys(cu, padded, slots):
    q, k, w = indexer_inputs()
    offsets = torch.tensor(cu, dtype=torch.int32)
    slot_offsets = None if padded is None else torch.tensor(padded, dtype=torch.int32)
    out = kernels.tilelang_indexer_topk(q, k, w, offsets, slots, cu_seqlens_padded=slot_offsets)
    assert out.shape == (8, 1, slots)
    assert out.dtype == torch.int32
    assert out.is_contiguous()
    windows = slow.windows(cu, padded, 8)
    assert out[:, 0].tolist() == expected_keys(q, k, w, windows, slots)


def test_ranks_choose_what_one_rank_chooses():
    q, k, w = indexer_inputs(dtype=torch.bfloat16)
    cu, padded = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 7])
    whole = kernels.tilelang_indexer_topk(q, k, w, cu, 3, cu_seqlens_padded=padded)
    for mine in (torch.arange(4), torch.arange(4, 8), torch.tensor([[6], [1], [3]])):
        rows = mine.reshape(-1)
        part = kernels.tilelang_indexer_topk(q[rows], k, w[rows], cu, 3, mine.int(), padded)
        assert torch.equal(part, whole[rows])


def test_no_gradient_reaches_the_indexer():
    q, k, w = (t.requires_grad_() for t in indexer_inputs())
    assert not kernels.tilelang_indexer_topk(q, k, w, torch.tensor([0, 8]), 3).requires_grad


def test_the_seam_has_scores_with_gradients():
    q, k, w = (t.requires_grad_() for t in indexer_inputs())
    starts, ends = torch.tensor([0, 0, 2, 3, 8, 0, 5, 1]), torch.tensor([1, 4, 8, 3, 9, 8, 7, 2])
    scores, indices = kernels._slime_lighting_indexer(q, k, w, starts.int(), ends.int(), 4)
    windows = list(zip(starts.tolist(), ends.clamp(max=8).tolist(), strict=True))
    assert indices.tolist() == expected_keys(q, k, w, windows, 4)
    assert scores.shape == indices.shape == (8, 4)
    dense = index_scores(q, k, w)
    listed = dense.gather(1, indices.long().clamp(min=0)).masked_fill(indices < 0, NEVER)
    assert torch.allclose(scores, listed)
    assert (scores[3] == NEVER).all()  # no keys in its window
    g = random(8, 4, seed=3).masked_fill(indices < 0, 0)
    for got, want in zip(
        torch.autograd.grad(scores, (q, k, w), g),
        torch.autograd.grad(listed, (q, k, w), g),
        strict=True,
    ):
        assert torch.allclose(got, want)


def test_ties_go_to_the_lower_key_and_zeros_are_ordinary():
    q, k, w = torch.zeros(2, 1, 2), torch.ones(5, 2), torch.ones(2, 1)
    _, indices = kernels._slime_lighting_indexer(
        q, k, w, torch.tensor([1, 0]).int(), torch.tensor([5, 1]).int(), 3
    )
    assert indices.tolist() == [[1, 2, 3], [0, -1, -1]]


@pytest.mark.parametrize("weights", ["[Tq]", "[Tq, 1]", "[Tq, 1, 1]", "bfloat16"])
def test_a_single_head_may_lose_its_axis(weights):
    q, k, w = indexer_inputs(heads=1, dtype=torch.bfloat16)
    cu = torch.tensor([0, 8])
    expected = kernels.tilelang_indexer_topk(q, k, w.bfloat16().float(), cu, 3)
    given = w.bfloat16()
    if weights != "bfloat16":
        given = given.float().reshape([8, 1, 1][: weights.count(",") + 1])
    assert torch.equal(kernels.tilelang_indexer_topk(q, k, given, cu, 3), expected)


def test_strict_orders_by_score_and_needs_as_many_keys():
    q, k, w = indexer_inputs()
    starts, ends = torch.zeros(8).int(), torch.arange(1, 9).int()
    scores, indices = kernels._slime_lighting_indexer(q, k, w, starts, ends, 5)
    with strict():
        sorted_scores, sorted_indices = kernels._slime_lighting_indexer(q, k, w, starts, ends, 5)
        assert torch.equal(sorted_scores, scores.sort(-1, descending=True)[0])
        assert torch.equal(sorted_indices.sort(-1)[0], indices.sort(-1)[0])
        topk = kernels.tilelang_indexer_topk(q, k, w, torch.tensor([0, 8]), 5)
        assert torch.equal(topk[:, 0], sorted_indices)
        with pytest.raises(RuntimeError, match="9 keys of 8"):
            kernels.tilelang_indexer_topk(q, k, w, torch.tensor([0, 8]), 9)


def test_windows_are_those_that_the_library_makes_on_the_device() -> None:
    random_ints = torch.Generator().manual_seed(7)
    for _ in range(50):
        slots = torch.randint(0, 6, (4,), generator=random_ints)
        lengths = (torch.rand(4, generator=random_ints) * (slots + 1)).long()
        cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        padded = torch.nn.functional.pad(slots.cumsum(0), (1, 0))
        tokens = int(padded[-1])
        for host, made in (
            (_nemo.padded_windows(cu, padded), (cu, padded)),
            (_nemo.compact_windows(padded), (padded, None)),
        ):
            got = longspan.dsa.document_windows(*made, tokens=tokens)
            assert [t.tolist() for t in got] == [t.tolist() for t in host]


def test_offsets_on_a_device_make_the_same_windows(monkeypatch):
    """The path for devices, on the host: no read, no equality test."""
    q, k, w = indexer_inputs()
    cu, padded = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7])
    cases = [(cu, None), (cu, cu), (cu, cu.clone()), (cu, padded), (padded, padded.clone())]
    rows = torch.tensor([0, 3, 6])
    expected = [kernels.tilelang_indexer_topk(q, k, w, a, 3, None, b) for a, b in cases]
    monkeypatch.setattr(kernels, "_on_device", lambda offsets: True)
    monkeypatch.setattr(torch, "equal", None)
    for (a, b), want in zip(cases, expected, strict=True):
        got = kernels.tilelang_indexer_topk(q, k, w, a, 3, None, b)
        assert got.tolist() == want.tolist()
        some = kernels.tilelang_indexer_topk(q[rows], k, w[rows], a, 3, rows, b)
        assert some.tolist() == want[rows].tolist()


def test_a_replaced_window_function_is_asked_on_a_device_too(monkeypatch):
    q, k, w = indexer_inputs()
    asked = []

    def windows(cu):
        asked.append(cu)
        return torch.zeros(8).int(), torch.ones(8).long()

    monkeypatch.setattr(kernels, "_on_device", lambda offsets: True)
    monkeypatch.setattr(kernels, "_slime_generate_varlen_mask_params", windows)
    cu = torch.tensor([0, 8])
    assert (kernels.tilelang_indexer_topk(q, k, w, cu, 1) == 0).all()
    assert asked[0] is cu


# Sparse MLA.


def mla_inputs(dtype=torch.float64, latent=5, rope=3):
    q = random(6, 2, latent + rope).to(dtype)
    kv = random(7, 1, latent + rope, seed=1).to(dtype)
    lists = torch.tensor(
        [
            [0, 3, 6, -1],
            [-1, -1, -1, -1],
            [5, 5, 2, 1],
            [7, -9, 2**31 - 1, 4],
            [1, -1, 0, 2],
            [6, 5, 4, 3],
        ],
        dtype=torch.int32,
    )
    return q, kv, lists.unsqueeze(1), random(2, 4, latent, seed=2).to(dtype)


def test_latent_attention_is_projected_to_values():
    q, kv, lists, w_vc = mla_inputs()
    inputs = [t.requires_grad_() for t in (q, kv, w_vc)]
    out = kernels.tilelang_sparse_attention(q, kv, lists, w_vc, 0.3)
    latent, _ = attend_listed(q, kv[:, 0], lists[:, 0], scale=0.3, value_dim=5)
    expected = torch.einsum("thc,hdc->thd", latent, w_vc)
    assert out.shape == (6, 2, 4)
    assert torch.allclose(out, expected)
    assert (out[1] == 0).all()
    g = random(6, 2, 4, seed=3)
    for got, want in zip(
        torch.autograd.grad(out, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-12)
        assert torch.isfinite(got).all()


def test_a_layer_is_dense_attention_without_absorption():
    """Keys and values written out for each head, as the dense form has them."""
    tokens, heads, dn, dv, latent, rope = 6, 2, 3, 4, 5, 2
    q_nope, q_pe = random(tokens, heads, dn), random(tokens, heads, rope, seed=1)
    c, k_pe = random(tokens, latent, seed=2), random(tokens, rope, seed=3)
    w = random(heads, dn + dv, latent, seed=4)
    inputs = [t.requires_grad_() for t in (q_nope, q_pe, c, k_pe, w)]
    w_kc, w_vc = w[:, :dn], w[:, dn:]
    iq, ik, iw = indexer_inputs(tokens, tokens)
    lists = kernels.tilelang_indexer_topk(iq, ik, iw, torch.tensor([0, 2, 6]), 3)
    absorbed = torch.cat([torch.einsum("thd,hdc->thc", q_nope, w_kc), q_pe], -1)
    kv = torch.cat([c, k_pe], -1).unsqueeze(1)
    out = kernels.tilelang_sparse_attention(absorbed, kv, lists, w_vc, 0.4)

    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for t in range(tokens):
        seen[t, [i for i in lists[t, 0].tolist() if i >= 0]] = True
    assert seen[2:, :2].sum() == 0  # other documents
    keys = torch.cat(
        [torch.einsum("sc,hdc->shd", c, w_kc), k_pe[:, None].expand(-1, heads, -1)], -1
    )
    values = torch.einsum("sc,hdc->shd", c, w_vc)
    scores = torch.einsum("thd,shd->hts", torch.cat([q_nope, q_pe], -1), keys) * 0.4
    weights = scores.masked_fill(~seen, NEVER).softmax(-1)
    dense = torch.einsum("hts,shd->thd", weights, values)
    assert torch.allclose(out, dense)
    g = random(tokens, heads, dv, seed=5)
    for got, want in zip(
        torch.autograd.grad(out, inputs, g), torch.autograd.grad(dense, inputs, g), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_seam_returns_a_natural_logarithm(dtype):
    q, kv, lists, _ = mla_inputs(dtype)
    out, lse = kernels._slime_sparse_mla.apply(q, kv, lists, 0.3, 5)
    expected, sums = attend_listed(
        q.double(), kv[:, 0].double(), lists[:, 0], scale=0.3, value_dim=5
    )
    near = {"atol": 1e-12} if dtype == torch.float64 else {"atol": 2e-2, "rtol": 2e-2}
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, **near)
    assert torch.allclose(lse.double(), sums, **near)
    assert (out[1] == 0).all()
    assert (lse[1] == NEVER).all()
    with strict():
        base_two = kernels._slime_sparse_mla.apply(q, kv, lists, 0.3, 5)[1]
    assert torch.allclose(base_two, lse * math.log2(math.e))


def test_the_seam_knows_the_references_shape_and_leaves_others_whole():
    q, kv, lists, _ = mla_inputs(torch.float32, 512, 64)
    assert kernels._slime_sparse_mla.apply(q, kv, lists, 0.1)[0].shape == (6, 2, 512)
    q, kv, lists, _ = mla_inputs()
    whole, _ = kernels._slime_sparse_mla.apply(q, kv, lists, 0.1)
    assert whole.shape == (6, 2, 8)
    part, _ = kernels._slime_sparse_mla.apply(q, kv, lists, 0.1, 5)
    assert torch.equal(whole[..., :5], part)


def test_a_wrapper_around_the_seam_needs_no_value_dim(monkeypatch):
    q, kv, lists, w_vc = mla_inputs()
    expected = kernels.tilelang_sparse_attention(q, kv, lists, w_vc, 0.3)
    calls = []
    ours = kernels._slime_sparse_mla.apply

    def spy(*args):
        calls.append(args)
        return ours(*args)

    monkeypatch.setattr(kernels._slime_sparse_mla, "apply", spy)
    out = kernels.tilelang_sparse_attention(q, kv, lists, w_vc, 0.3)
    assert torch.allclose(out, expected)
    assert [a is b for a, b in zip(calls[0], (q, kv, lists), strict=False)] == [True] * 3
    assert calls[0][3:] == (0.3,)


def test_kernels_run_where_the_backend_is_asked_directly():
    """A direct call needs no device; only the choice of a backend does."""
    q, kv, lists, w_vc = mla_inputs(torch.bfloat16)
    assert kernels.tilelang_sparse_attention(q, kv, lists, w_vc, 0.3).dtype == torch.bfloat16
    available = kernels.is_dsa_kernel_available("sparse_attn")
    arguments = {"available": available, "kernel_name": "sparse_attn", "tensors": [q]}
    assert kernels.should_use_tilelang("auto", **arguments) is False
    with pytest.raises(RuntimeError, match="TileLang backend was requested"):
        kernels.should_use_tilelang("tilelang", **arguments)


REFUSED = {
    "channels": (
        "tilelang_indexer_topk: `index_k` is float64 [8, 3]",
        lambda q, k, w: kernels.tilelang_indexer_topk(q, k[:, :3], w, torch.tensor([0, 8]), 2),
    ),
    "weights": (
        "tilelang_indexer_topk: `head_weights` is float64 [8, 2]",
        lambda q, k, w: kernels.tilelang_indexer_topk(q, k, w[:, :2], torch.tensor([0, 8]), 2),
    ),
    "negative k": (
        "tilelang_indexer_topk: -1 slots",
        lambda q, k, w: kernels.tilelang_indexer_topk(q, k, w, torch.tensor([0, 8]), -1),
    ),
    "windows": (
        "_slime_lighting_indexer: `ends` is int64 [7]",
        lambda q, k, w: kernels._slime_lighting_indexer(
            q, k, w, torch.zeros(8).int(), torch.zeros(7).long(), 2
        ),
    ),
    "no tensor": (
        "tilelang_indexer_topk: `index_k` is a list",
        lambda q, k, w: kernels.tilelang_indexer_topk(q, [1], w, torch.tensor([0, 8]), 2),
    ),
    "float lists": (
        "tilelang_sparse_attention: `topk_indices` is float32",
        lambda *_: kernels.tilelang_sparse_attention(
            *mla_inputs()[:2], mla_inputs()[2].float(), mla_inputs()[3], 0.1
        ),
    ),
    "kv": (
        "tilelang_sparse_attention: `kv_latent` is float64 [7, 1, 7]",
        lambda *_: kernels.tilelang_sparse_attention(
            mla_inputs()[0], mla_inputs()[1][..., :7], *mla_inputs()[2:], 0.1
        ),
    ),
    "w_vc": (
        "tilelang_sparse_attention: `w_vc` is [4, 5]; expected [heads, dv, C]",
        lambda *_: kernels.tilelang_sparse_attention(*mla_inputs()[:3], mla_inputs()[3][0], 0.1),
    ),
    "heads": (
        "tilelang_sparse_attention: `w_vc` is [1, 4, 5] but attention gave [6, 2, 5]",
        lambda *_: kernels.tilelang_sparse_attention(*mla_inputs()[:3], mla_inputs()[3][:1], 0.1),
    ),
    "seam": (
        "_sparse_mla: `indices` is int32 [5, 1, 4]",
        lambda *_: kernels._slime_sparse_mla.apply(*mla_inputs()[:2], mla_inputs()[2][:5], 0.1),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    message, call = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call(*indexer_inputs())
    assert message in str(caught.value)


@pytest.mark.cuda
def test_a_layer_on_a_device_reads_nothing_back():
    q, k, w = (t.cuda() for t in indexer_inputs(dtype=torch.bfloat16))
    cu, padded = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7])
    expected = kernels.tilelang_indexer_topk(
        q.cpu(), k.cpu(), w.cpu(), cu, 3, cu_seqlens_padded=padded
    )
    cu, padded, rows = cu.cuda(), padded.cuda(), torch.arange(8).cuda()
    mla_q, kv, lists, w_vc = (t.cuda() for t in mla_inputs(torch.bfloat16))
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = kernels.tilelang_indexer_topk(q, k, w, cu, 3, rows, padded)
            out = kernels.tilelang_sparse_attention(mla_q, kv, lists, w_vc, 0.3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu(), expected)
    assert torch.isfinite(out).all()
