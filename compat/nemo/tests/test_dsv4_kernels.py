"""DeepSeek V4's index lists, attention over them, and the indexer's scores."""

import pytest
import torch
from compat_support import dsv4, dsv4_kernels
from oracle import listed_keys as slow
from oracle.selected_attention import forward as attend_listed
from oracle.selected_attention import index_scores

import longspan
from longspan.compat.nemo import strict

build = dsv4_kernels.build_dsv4_sparse_topk_indices
attention = dsv4_kernels.dsv4_sparse_attention

NEVER = float("-inf")
PLAIN = ("torch", "sparse_torch", "auto")


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def on_device(monkeypatch):
    """Let the choice of a backend believe that tensors are on a device."""
    from compat_support import kernels

    monkeypatch.setattr(kernels, "_all_cuda", lambda *tensors: True)


# Lists.


def lists(**more):
    arguments = {
        "batch_size": 1,
        "seq_len": 4,
        "key_len": 10,
        "window_size": 3,
        "device": "cpu",
        "compress_ratio": 4,
        "n_pooled": 2,
        "vanilla_key_len": 8,
        "q_positions": torch.arange(4, 8),
    }
    return build(**{**arguments, **more})


EXAMPLE = [[2, 3, 4, 8, -1], [3, 4, 5, 8, -1], [4, 5, 6, 8, -1], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("positions", [torch.arange(4, 8), torch.arange(4, 8)[None].int()])
def test_the_worked_example(positions):
    out = lists(q_positions=positions)
    assert out.dtype == torch.int64
    assert out.tolist() == [EXAMPLE]
    two = lists(q_positions=positions, batch_size=2)
    assert two.is_contiguous()
    assert two.tolist() == [EXAMPLE] * 2


def test_defaults_are_one_rank_without_pools():
    out = build(batch_size=2, seq_len=4, key_len=4, window_size=3, device="cpu")
    assert out.tolist() == [[[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, 2, 3]]] * 2
    wide = build(batch_size=1, seq_len=2, key_len=2, window_size=128, device="cpu")
    assert wide.tolist() == [[[0, -1], [0, 1]]]


def test_chosen_pools_lie_behind_the_keys():
    chosen = torch.tensor([[0, -1], [-1, -1], [0, 1], [1, 7]])
    for topk in (chosen[None], chosen[None].int()):
        out = lists(compressed_topk=topk)
        assert out[0, :, 3:].tolist() == [[8, -1], [-1, -1], [8, 9], [9, -1]]
    both = lists(batch_size=2, compressed_topk=torch.stack([chosen, chosen.flip(0)]))
    assert both[1, :, 3:].tolist() == [[9, -1], [8, 9], [-1, -1], [8, -1]]
    assert lists(compressed_topk=chosen[None], n_pooled=0).shape == (1, 4, 3)


def test_keys_that_are_not_there_are_nobodys():
    assert lists(key_len=9)[0, :, 3:].tolist() == [[8, -1]] * 4
    assert lists(key_len=6, n_pooled=0).tolist() == [
        [[2, 3, 4], [3, 4, 5], [4, 5, -1], [5, -1, -1]]
    ]
    # Positions count over all ranks, the default only over this one's tokens.
    out = lists(key_len=8, n_pooled=0, vanilla_key_len=None)
    assert out.tolist() == [[row[:3] for row in EXAMPLE]]
    # A window never reaches into the pools.
    late = lists(q_positions=torch.tensor([7, 8, 9, 12]))
    assert late[0, :, :3].tolist() == [[5, 6, 7], [6, 7, -1], [7, -1, -1], [-1, -1, -1]]


def test_every_list_is_the_oracles():
    positions = torch.tensor([[0, 3, 9, 4], [11, 2, 7, 8]])
    for window in (0, 1, 5, 20):
        for ratio in (1, 3, 4):
            out = lists(
                batch_size=2,
                q_positions=positions,
                window_size=window,
                compress_ratio=ratio,
                vanilla_key_len=12,
                n_pooled=3,
                key_len=15,
            )
            for row in range(2):
                for t in range(4):
                    position = int(positions[row, t])
                    expected = slow.window_list(position, 12, window, 3, ratio)
                    assert out[row, t].tolist() == expected


def causal_mask(pads, dtype=torch.float32, window=3):
    """The dense mask of the batch path, with room for the pools."""
    mask = dsv4.build_dsv4_cp_causal_padding_mask(
        position_ids=torch.arange(4, 8)[None],
        key_len=8,
        dtype=dtype,
        device="cpu",
        cp_group=None,
        padding_mask=torch.tensor([pads]),
        sliding_window=window,
    )
    return torch.cat([mask, mask.new_zeros(1, 1, 4, 2)], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_takes_keys_away(dtype):
    pads = [False] * 4 + [True] + [False] * 3
    expected = [[-1 if key == 4 else key for key in row] for row in EXAMPLE]
    mask = causal_mask(pads, dtype)
    assert lists(attention_mask=mask).tolist() == [expected]
    assert lists(attention_mask=mask, batch_size=2).tolist() == [expected] * 2
    assert lists(attention_mask=mask == 0).tolist() == [expected]
    with strict():
        assert lists(attention_mask=mask).tolist() == [expected]
        assert lists(attention_mask=mask == 0).tolist() == [EXAMPLE]


REFUSED_LISTS = {
    "rank 3": ("rank 4", {"attention_mask": torch.zeros(1, 4, 10)}),
    "narrow mask": ("expected [1, 1, 4, 10]", {"attention_mask": torch.zeros(1, 1, 4, 9)}),
    "heads": ("expected [1, 1, 4, 10]", {"attention_mask": torch.zeros(1, 2, 4, 10)}),
    "ratio": ("compress_ratio is 0", {"compress_ratio": 0}),
    "window": ("window_size is -1", {"window_size": -1}),
    "positions": ("`q_positions` is torch.int64 [3]", {"q_positions": torch.arange(3)}),
    "position rank": (
        "expected integers [4] or [1, 4]",
        {"q_positions": torch.zeros(1, 1, 4).long()},
    ),
    "position rows": ("1 rows (or one) of 4", {"q_positions": torch.zeros(2, 4).long()}),
    "float positions": ("expected integers", {"q_positions": torch.zeros(4)}),
    "topk rank": ("`compressed_topk` is [4, 2]", {"compressed_topk": torch.zeros(4, 2).long()}),
    "topk rows": ("(or one) of 4", {"compressed_topk": torch.zeros(1, 3, 2).long()}),
}


@pytest.mark.parametrize("name", REFUSED_LISTS)
def test_lists_refuse(name):
    message, change = REFUSED_LISTS[name]
    with pytest.raises(ValueError) as caught:
        lists(**change)
    assert message in str(caught.value)
    assert str(caught.value).startswith("build_dsv4_sparse_topk_indices: ")


# Attention.


def attention_inputs(dtype=torch.float64):
    q = random(2, 4, 3, 6).to(dtype)
    kv = random(2, 5, 6, seed=1).to(dtype)
    sinks = random(3, seed=2).to(dtype)
    idxs = torch.tensor(
        [
            [[0, 1, -1], [4, 4, 2], [-1, -1, -1], [3, 9, -7]],
            [[2, 3, 4], [5, 6, 7], [0, -1, 1], [4, 0, 2]],
        ]
    )
    return q, kv, sinks, idxs


def expected_attention(q, kv, sinks, idxs, scale):
    rows = [
        attend_listed(q[b], kv[b], idxs[b], scale=scale, value_dim=6, sink=sinks)[0]
        for b in range(2)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_attention_over_lists_with_a_sink(backend, index_type):
    *tensors, idxs = attention_inputs()
    q, kv, sinks = inputs = [t.requires_grad_() for t in tensors]
    out = attention(q, kv, sinks, idxs.to(index_type), 0.4, backend=backend)
    expected = expected_attention(q, kv, sinks, idxs, 0.4)
    assert torch.allclose(out, expected)
    g = random(2, 4, 3, 6, seed=3)
    got = torch.autograd.grad(out, inputs, g)
    for each, want in zip(got, torch.autograd.grad(expected, inputs, g), strict=True):
        assert torch.allclose(each, want, atol=1e-12)
    # Nobody's keys: nothing comes, nothing goes, and the sink stays a number.
    assert (out[0, 2] == 0).all()
    assert (out[1, 1] == 0).all()
    assert (got[0][0, 2] == 0).all()
    assert torch.isfinite(got[2]).all()


def test_all_rows_without_keys_leave_the_sink_alone():
    q, kv, sinks, idxs = attention_inputs()
    sinks.requires_grad_()
    out = attention(q, kv, sinks, torch.full_like(idxs, -1), 1.0, backend="torch")
    assert (out == 0).all()
    out.sum().backward()
    assert sinks.grad.tolist() == [0, 0, 0]


def test_lists_and_attention_are_dense_attention_with_a_mask():
    """One layer: window, pools that ended and a sink, against every score."""
    tokens, pools = 8, 2
    q, kv, sinks = random(1, tokens, 3, 6), random(1, tokens + pools, 6, seed=1), random(3, seed=2)
    inputs = [t.requires_grad_() for t in (q, kv, sinks)]
    idxs = build(
        batch_size=1,
        seq_len=tokens,
        key_len=tokens + pools,
        window_size=3,
        device="cpu",
        compress_ratio=4,
        n_pooled=pools,
    )
    out = attention(*inputs, idxs, 0.4, backend="sparse_torch")
    position, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    seen = (key <= position) & (position - key < 3)
    seen = torch.cat([seen, torch.arange(pools) < (position + 1) // 4], -1)
    keys = kv.unsqueeze(1)
    dense = longspan.testing.attend_dense(
        q.transpose(1, 2), keys, keys, mask=seen, sink=sinks, scale=0.4
    ).transpose(1, 2)
    assert torch.allclose(out, dense)
    g = random(1, tokens, 3, 6, seed=3)
    for got, want in zip(
        torch.autograd.grad(out, inputs, g), torch.autograd.grad(dense, inputs, g), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-12)


def test_bfloat16_comes_back_as_it_came():
    q, kv, sinks, idxs = attention_inputs(torch.bfloat16)
    out = attention(q, kv, sinks, idxs, 0.4, backend="torch")
    wide = expected_attention(q.double(), kv.double(), sinks.double(), idxs, 0.4)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), wide, atol=2e-2)


REFUSED_ATTENTION = {
    "q": ("`q` is [4, 3, 6]; expected [rows", lambda q, kv, s, i: (q[0], kv, s, i)),
    "kv": ("`kv` is [2, 5, 1, 6]", lambda q, kv, s, i: (q, kv.unsqueeze(2), s, i)),
    "sinks": ("`sinks` is [1, 3]; expected [heads]", lambda q, kv, s, i: (q, kv, s[None], i)),
    "few sinks": ("`sinks` is float64 [2]", lambda q, kv, s, i: (q, kv, s[:2], i)),
    "lists": ("`topk_idxs` is [2, 4, 1, 3]", lambda q, kv, s, i: (q, kv, s, i.unsqueeze(2))),
    "float lists": ("`topk_idxs` is float32", lambda q, kv, s, i: (q, kv, s, i.float())),
    "channels": ("the channels differ", lambda q, kv, s, i: (q, kv[..., :5], s, i)),
}


@pytest.mark.parametrize("name", REFUSED_ATTENTION)
def test_attention_refuses(name):
    message, change = REFUSED_ATTENTION[name]
    with pytest.raises(ValueError) as caught:
        attention(*change(*attention_inputs()), 0.4, backend="torch")
    assert message in str(caught.value)
    assert str(caught.value).startswith("dsv4_sparse_attention: ")


def test_mixed_types_meet_in_the_wider_one():
    q, kv, sinks, idxs = attention_inputs(torch.bfloat16)
    out = attention(q, kv.float(), sinks, idxs, 0.4, backend="torch")
    same = attention(q.float(), kv.float(), sinks, idxs, 0.4, backend="torch")
    assert out.dtype == torch.bfloat16 and torch.equal(out, same.bfloat16())
    q, k, w = indexer_inputs(torch.bfloat16)
    assert torch.equal(scores_of((q, k.float(), w), "torch"), scores_of((q, k, w), "torch"))


# The indexer.


def indexer_inputs(dtype=torch.float64):
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        random(2, 6, 3, 4).to(dtype),
        random(2, 5, 4, seed=1).to(dtype),
        random(2, 6, 3, seed=2).to(sums),
    )


def scores_of(inputs, backend, **more):
    arguments = {"compress_ratio": 4, "softmax_scale": 0.5, "backend": backend}
    return dsv4_kernels.dsv4_indexer_scores(*inputs, **{**arguments, **more})


def expected_scores(inputs):
    q, k, w = inputs
    return torch.stack([index_scores(q[b], k[b], w[b]) * 0.5 for b in range(2)])


@pytest.mark.parametrize("backend", PLAIN)
def test_plain_scores_are_not_masked(backend):
    inputs = [t.requires_grad_() for t in indexer_inputs()]
    scores, expected = scores_of(inputs, backend), expected_scores(inputs)
    assert torch.allclose(scores, expected)
    g = random(2, 6, 5, seed=3)
    for got, want in zip(
        torch.autograd.grad(scores, inputs, g),
        torch.autograd.grad(expected, inputs, g),
        strict=True,
    ):
        assert torch.allclose(got, want)
    low = scores_of(indexer_inputs(torch.bfloat16), backend)
    assert low.dtype == torch.float32


@pytest.mark.parametrize("backend", ["tilelang", "auto"])
@pytest.mark.parametrize("first", [0, 7])
def test_the_kernels_scores_are_masked(on_device, backend, first):
    inputs = indexer_inputs(torch.bfloat16)
    scores = scores_of(inputs, backend, query_start=first, query_total_len=first + 6).double()
    expected = expected_scores([x.double() for x in inputs])
    for t in range(6):
        ended = (first + t + 1) // 4
        assert (scores[:, t, ended:] == NEVER).all()
        assert torch.allclose(scores[:, t, :ended], expected[:, t, :ended], atol=1e-5)


def test_the_kernel_wants_bfloat16(on_device):
    inputs = indexer_inputs(torch.float32)
    with pytest.raises(RuntimeError, match="TileLang backend was requested for indexer"):
        scores_of(inputs, "tilelang")
    assert torch.equal(scores_of(inputs, "auto"), scores_of(inputs, "torch"))
    q, kv, sinks, idxs = attention_inputs(torch.float32)
    with pytest.raises(RuntimeError, match="requested for sparse attention"):
        attention(q, kv, sinks, idxs, 0.4, backend="tilelang")


def test_a_layer_chooses_pools_by_masked_scores(on_device):
    """What a layer does with either backend: the same pools."""
    q, k, w = indexer_inputs(torch.bfloat16)
    plain = scores_of((q, k, w), "torch")
    end = (torch.arange(6) + 1) // 4
    masked = plain.masked_fill(torch.arange(5) >= end[:, None], NEVER)
    assert torch.equal(masked, scores_of((q, k, w), "tilelang"))


def topk_scores(inputs, idxs, backend="torch", **more):
    arguments = {"compress_ratio": 4, "softmax_scale": 0.5, "backend": backend}
    return dsv4_kernels.dsv4_indexer_topk_scores(*inputs, idxs, **{**arguments, **more})


@pytest.mark.parametrize("backend", PLAIN)
def test_listed_scores_have_gradients(backend):
    inputs = [t.requires_grad_() for t in indexer_inputs()]
    idxs = torch.tensor([0, 4, -1, 2, 5, 2**31 - 1]).expand(2, 6, 6)
    scores = topk_scores(inputs, idxs, backend)
    inside = (idxs >= 0) & (idxs < 5)
    expected = expected_scores(inputs).gather(2, idxs.where(inside, 0)).masked_fill(~inside, NEVER)
    assert torch.allclose(scores, expected)
    g = random(2, 6, 6, seed=3).masked_fill(~inside, 0)
    for got, want in zip(
        torch.autograd.grad(scores, inputs, g),
        torch.autograd.grad(expected, inputs, g),
        strict=True,
    ):
        assert torch.allclose(got, want)


REFUSED_SCORES = {
    "q": ("`q` is [6, 3, 4]", lambda q, k, w: scores_of((q[0], k, w), "torch")),
    "keys": ("`pooled_kv` is [2, 1, 5, 4]", lambda q, k, w: scores_of((q, k[:, None], w), "torch")),
    "channels": (
        "`pooled_kv` is float64 [2, 5, 3]",
        lambda q, k, w: scores_of((q, k[..., :3], w), "torch"),
    ),
    "weights": (
        "`weights` is [2, 6, 3, 1]",
        lambda q, k, w: scores_of((q, k, w[..., None]), "torch"),
    ),
    "total": (
        "6 queries from 3 on do not fit query_total_len 8",
        lambda q, k, w: scores_of((q, k, w), "torch", query_start=3, query_total_len=8),
    ),
    "start": ("query_start is -1", lambda q, k, w: scores_of((q, k, w), "torch", query_start=-1)),
    "lists": (
        "`topk_indices` is [6, 2]",
        lambda q, k, w: topk_scores((q, k, w), torch.zeros(6, 2).long()),
    ),
    "list type": (
        "`topk_indices` is float32",
        lambda q, k, w: topk_scores((q, k, w), torch.zeros(2, 6, 2)),
    ),
}


@pytest.mark.parametrize("name", REFUSED_SCORES)
def test_scores_refuse(name):
    message, call = REFUSED_SCORES[name]
    with pytest.raises(ValueError) as caught:
        call(*indexer_inputs())
    assert message in str(caught.value)
    assert str(caught.value).startswith("dsv4_indexer_")


def test_the_kernel_needs_a_ratio(on_device):
    with pytest.raises(ValueError, match="dsv4_indexer_scores: compress_ratio is 0"):
        scores_of(indexer_inputs(torch.bfloat16), "tilelang", compress_ratio=0)


# Backends.


# The normalisation of hyper-connections.

sinkhorn = dsv4_kernels.dsv4_sinkhorn_normalize
# 70 x 70 is beyond the kernel for small matrices.
MATRICES = [(4, 4), (2, 5, 4, 4), (3, 1, 2), (2, 3, 1), (2, 70, 70), (0, 4, 4), (2, 0, 3)]


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("repeat", [1, 2, 20])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_sinkhorn_is_the_plain_form(shape, repeat, eps):
    x, g = 3 * random(*shape), random(*shape, seed=1)
    x.requires_grad_()
    out = sinkhorn(x, backend="auto", repeat=repeat, eps=eps)
    expected = dsv4_kernels.sinkhorn_normalize_torch(x, repeat, eps)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    (got,), (want,) = torch.autograd.grad(out, x, g), torch.autograd.grad(expected, x, g)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_sinkhorn_is_nearly_doubly_stochastic_whatever_the_strides():
    x = random(5, 4, 6, 4).permute(2, 0, 3, 1)[:, ::2].requires_grad_()
    out = sinkhorn(x, backend="torch", repeat=40, eps=1e-9)
    ones = torch.ones(6, 3, 4, dtype=x.dtype)
    torch.testing.assert_close(out.sum(-1), ones, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.sum(-2), ones, rtol=1e-6, atol=1e-6)
    g = random(4, 6, 3, 4, seed=1).permute(1, 2, 3, 0)
    plain = dsv4_kernels.sinkhorn_normalize_torch(x, 40, 1e-9)
    torch.testing.assert_close(torch.autograd.grad(out, x, g), torch.autograd.grad(plain, x, g))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 70, 70)])
def test_sinkhorn_sums_in_float32_and_rounds_once(dtype, shape):
    x = (2 * random(*shape)).to(dtype).requires_grad_()
    g = random(*shape, seed=1).to(dtype)
    out = sinkhorn(x, backend="auto", repeat=20, eps=1e-6)
    assert out.dtype == dtype
    wide = x.detach().double().requires_grad_()
    exact = dsv4_kernels.sinkhorn_normalize_torch(wide, 20, 1e-6)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=unit + 1e-5, atol=1e-7)
    (got,), (want,) = torch.autograd.grad(out, x, g), torch.autograd.grad(exact, wide, g.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=unit + 1e-4, atol=unit * 1e-2 + 1e-6)


def test_sinkhorn_refuses():
    def call(x=None, repeat=2, eps=1e-6):
        return sinkhorn(
            torch.ones(2, 2) if x is None else x, backend="torch", repeat=repeat, eps=eps
        )

    who = "^dsv4_sinkhorn_normalize: "
    for bad in (torch.ones(2), torch.ones(2, 2).long()):
        with pytest.raises(ValueError, match=who + "`x` is .*expected floating"):
            call(bad)
    with pytest.raises(TypeError, match=who + "`x` is a list; expected a tensor"):
        call([[1.0]])
    for repeat in (0, -1, 2**40):
        with pytest.raises(ValueError, match=who + f"`repeat` is {repeat}; expected 1 to 10000"):
            call(repeat=repeat)
    with pytest.raises(TypeError, match=who + "`repeat` is 1.5; expected an integer"):
        call(repeat=1.5)
    with pytest.raises(ValueError, match=who + "`eps` is -1"):
        call(eps=-1.0)
    with strict():  # as the reference counts
        assert torch.equal(call(repeat=0), call(repeat=1))
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="sinkhorn_normalize: there is no second derivative"):
        torch.autograd.grad(call(x).sum(), x, create_graph=True)


# The plain forms.


def test_plain_attention_is_the_operators():
    inputs = attention_inputs()
    once = (*inputs[:3], inputs[3].clone())
    once[3][0, 1] = torch.tensor([4, -1, 2])  # a key that is listed twice counts twice
    plain = dsv4_kernels.sparse_attention_torch, dsv4_kernels.dense_attention_topk_torch
    for form, given in ((plain[0], inputs), (plain[0], once), (plain[1], once)):
        q, kv, sinks = (t.clone().requires_grad_() for t in given[:3])
        out = form(q, kv, sinks, given[3], 0.4)
        got = torch.autograd.grad(out, (q, kv, sinks), torch.ones_like(out))
        expected = attention(q, kv, sinks, given[3], 0.4, backend="torch")
        want = torch.autograd.grad(expected, (q, kv, sinks), torch.ones_like(out))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(got, want)
        assert (out[0, 2] == 0).all()


def test_plain_scores_are_the_operators():
    inputs = indexer_inputs()
    scores = dsv4_kernels.indexer_scores_torch(*inputs, 0.5)
    torch.testing.assert_close(scores, scores_of(inputs, "torch"))
    by_name = dsv4_kernels.indexer_scores_torch(*inputs, softmax_scale=0.5, compress_ratio=4)
    assert torch.equal(by_name, scores)
    idxs = torch.tensor([0, 4, -1, 2, 5, 2**31 - 1]).expand(2, 6, 6)
    listed = dsv4_kernels.extract_indexer_topk_scores_torch(scores, idxs)
    torch.testing.assert_close(listed, topk_scores(inputs, idxs))


CALLS = {
    "attention": lambda backend: attention(*attention_inputs(), 0.4, backend=backend),
    "scores": lambda backend: scores_of(indexer_inputs(), backend),
    "listed": lambda backend: topk_scores(indexer_inputs(), torch.zeros(2, 6, 1).long(), backend),
    "sinkhorn": lambda backend: sinkhorn(random(2, 4, 4), backend=backend, repeat=3, eps=1e-6),
}


@pytest.mark.parametrize("name", CALLS)
def test_backends(name):
    call = CALLS[name]
    with pytest.raises(RuntimeError, match="TileLang backend was requested"):
        call("tilelang")
    with pytest.raises(ValueError, match="no backend 'sparse'"):
        call("sparse")
    with strict():
        assert torch.equal(call("sparse"), call("torch"))


def test_kernel_names():
    assert dsv4_kernels.is_dsv4_kernel_available("sparse_attn") is True
    assert dsv4_kernels.is_dsv4_kernel_available("indexer") is True
    assert dsv4_kernels.is_dsv4_kernel_available("sinkhorn") is True
    with pytest.raises(ValueError, match="is_dsv4_kernel_available: no kernel 'mla'"):
        dsv4_kernels.is_dsv4_kernel_available("mla")


@pytest.mark.cuda
def test_on_a_device_the_answers_are_the_same_and_nothing_is_read():
    q, kv, sinks, idxs = attention_inputs(torch.bfloat16)
    inputs = indexer_inputs(torch.bfloat16)
    expected = attention(q, kv, sinks, idxs, 0.4, backend="torch")
    listed = topk_scores(inputs, idxs.new_zeros(2, 6, 1))
    q, kv, sinks, idxs = (t.cuda() for t in (q, kv, sinks, idxs))
    there = tuple(t.cuda() for t in inputs)
    x = random(64, 4, 4).float()
    normal = sinkhorn(x, backend="torch", repeat=20, eps=1e-6)
    x = x.cuda().requires_grad_()
    none = idxs.new_zeros(2, 6, 1)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = attention(q, kv, sinks, idxs, 0.4, backend="tilelang")
            scores = scores_of(there, "tilelang")
            got = topk_scores(there, none, "auto")
            on_device = sinkhorn(x, backend="tilelang", repeat=20, eps=1e-6)
            (dx,) = torch.autograd.grad(on_device, x, x.detach())
            made = lists(device="cuda", q_positions=None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(out.cpu().float(), expected.float(), atol=2e-2)
    assert torch.allclose(got.cpu(), listed, atol=1e-4)
    assert torch.allclose(on_device.cpu(), normal, atol=1e-6)
    plain = dsv4_kernels.sinkhorn_normalize_torch(x, 20, 1e-6)
    assert torch.allclose(dx, torch.autograd.grad(plain, x, x.detach())[0], atol=1e-5)
    assert (scores[:, 0] == NEVER).all()
    assert torch.equal(made.cpu(), lists(q_positions=None))
