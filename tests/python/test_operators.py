"""rotate_channels, attend_dense, index_scores: values against slow answers, derivatives,
tracing, refusals; tracing of sinkhorn_normalize, whose values are compared where it is used."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from oracle import listed_keys as slow
from oracle.dense_attention import dense_attention
from oracle.selected_attention import index_scores

import longspan

ops = torch.ops.longspan
NEVER = float("-inf")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- rotate_channels


@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
@pytest.mark.parametrize(("first", "begin"), [(0, 0), (3, 3), (-6, 4)])
def test_channels_turn_pair_by_pair(pairs: str, first: int, begin: int) -> None:
    x, angles = random(4, 10), 3 * random(4, 3, seed=1)
    got = longspan.dsa.rotate_channels(x, angles.cos(), angles.sin(), first=first, pairs=pairs)
    assert torch.allclose(got, slow.rotate(x, angles, begin, pairs), atol=1e-14)
    back = longspan.dsa.rotate_channels(
        got, angles.cos(), angles.sin(), first=first, pairs=pairs, inverse=True
    )
    assert torch.allclose(back, x, atol=1e-14)
    assert torch.equal(got[:, :begin], x[:, :begin])
    assert torch.equal(got[:, begin + 6 :], x[:, begin + 6 :])


def test_tables_broadcast_over_heads_and_rows() -> None:
    x, angles = random(2, 5, 3, 4), random(5, 2, seed=1)
    got = longspan.dsa.rotate_channels(x, angles.cos()[:, None], angles.sin()[:, None])
    for row in range(2):
        for head in range(3):
            expected = slow.rotate(x[row, :, head], angles, 0, "interleaved")
            assert torch.allclose(got[row, :, head], expected, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_rotation_rounds_once(dtype: torch.dtype) -> None:
    x = random(6, 8, dtype=torch.float32).to(dtype)
    angles = 1000 * random(6, 4, seed=1, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    got = longspan.dsa.rotate_channels(x, cos, sin)
    a, b = x[:, 0::2].float(), x[:, 1::2].float()
    expected = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(1)
    assert got.dtype == dtype
    assert torch.equal(got, expected.to(dtype))


@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
@pytest.mark.parametrize("inverse", [False, True])
def test_the_adjoint_of_a_rotation_is_its_inverse(pairs: str, inverse: bool) -> None:
    x, y, angles = random(3, 7), random(3, 7, seed=2), random(3, 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    options: dict[str, Any] = {"first": 2, "pairs": pairs}
    x.requires_grad_()
    out = longspan.dsa.rotate_channels(x, cos, sin, inverse=inverse, **options)
    (grad,) = torch.autograd.grad(out, x, y)
    assert torch.equal(
        grad, longspan.dsa.rotate_channels(y, cos, sin, inverse=not inverse, **options)
    )

    def squared(t: torch.Tensor) -> torch.Tensor:
        return longspan.dsa.rotate_channels(t, cos, sin, inverse=inverse, **options) ** 2

    assert torch.autograd.gradcheck(squared, (x,))
    assert torch.autograd.gradgradcheck(squared, (x,))


def test_rotations_read_strides_and_leave_their_argument_alone() -> None:
    base = random(8, 5)
    x, angles = base.t(), random(5, 2, seed=1)
    before = base.clone()
    got = longspan.dsa.rotate_channels(x, angles.cos(), angles.sin(), first=-4)
    expected = longspan.dsa.rotate_channels(x.contiguous(), angles.cos(), angles.sin(), first=4)
    assert torch.equal(got, expected)
    assert got.is_contiguous()
    assert torch.equal(base, before)
    none = longspan.dsa.rotate_channels(x, angles[:, :0], angles[:, :0])
    assert torch.equal(none, x)
    assert none.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            "`pairs` is 'both'; expected one of",
            lambda x, c: longspan.dsa.rotate_channels(x, c, c, pairs="both"),
        ),
        (
            ValueError,
            "2 pairs from channel 3 on do not fit the 6 channels",
            lambda x, c: longspan.dsa.rotate_channels(x, c, c, first=3),
        ),
        (
            ValueError,
            "from channel -7 on",
            lambda x, c: longspan.dsa.rotate_channels(x, c, c, first=-7),
        ),
        (ValueError, "the pairs differ", lambda x, c: longspan.dsa.rotate_channels(x, c, c[:, :1])),
        (
            ValueError,
            "axis -2 does not broadcast",
            lambda x, c: longspan.dsa.rotate_channels(x, c[:2], c),
        ),
        (ValueError, "`sin` is int64", lambda x, c: longspan.dsa.rotate_channels(x, c, c.long())),
        (ValueError, "`x` is int64", lambda x, c: longspan.dsa.rotate_channels(x.long(), c, c)),
        (
            ValueError,
            "carry no gradient",
            lambda x, c: longspan.dsa.rotate_channels(x, c.clone().requires_grad_(), c),
        ),
    ],
)
def test_rotations_refuse(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(random(3, 6), random(3, 2))


# ---- attend_dense


def dense_inputs(heads: int = 4, groups: int = 2) -> list[torch.Tensor]:
    return [
        random(2, heads, 5, 6),
        random(2, groups, 7, 6, seed=1),
        random(2, groups, 7, 3, seed=2),
        random(2, heads, 5, 3, seed=3),
    ]


def visible_keys() -> torch.Tensor:
    seen = random(2, 1, 5, 7, seed=4) > 0
    seen[1, :, 2] = False
    seen[0, :, 0] = True
    return seen


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("form", ["bool", "-inf", "lowest", "bfloat16"])
def test_dense_attention_is_the_oracles(with_sink: bool, form: str) -> None:
    q, k, v, dout = dense_inputs()
    seen = visible_keys()
    mask = seen
    if form != "bool":
        dtype = torch.bfloat16 if form == "bfloat16" else torch.float64
        least = NEVER if form == "-inf" else torch.finfo(dtype).min
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, least)
    sink = random(4, seed=5) if with_sink else None
    expected = dense_attention(q, k, v, dout, seen, scale=0.3, sink=sink)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    logits = None if sink is None else sink.clone().requires_grad_()
    out, lse = longspan.testing.attend_dense(
        *inputs, mask=mask, sink=logits, scale=0.3, return_lse=True
    )
    out.backward(dout)
    close = {"atol": 1e-12, "rtol": 1e-12}
    assert torch.allclose(out, expected.out, **close)
    assert torch.allclose(lse, expected.lse, **close)
    for got, want in zip(inputs, (expected.dq, expected.dk, expected.dv), strict=True):
        assert torch.allclose(got.grad, want, **close)
    if logits is not None:
        assert torch.allclose(logits.grad, expected.dsink, **close)
    assert not lse.requires_grad
    assert (out[1, :, 2] == 0).all()
    assert (lse[1, :, 2] == NEVER).all()
    assert (inputs[0].grad[1, :, 2] == 0).all()


def test_added_numbers_are_part_of_the_scores() -> None:
    q, k, v, _ = dense_inputs()
    bias = random(4, 5, 7, seed=6).requires_grad_()

    def attend(added: torch.Tensor) -> torch.Tensor:
        out = longspan.testing.attend_dense(q, k, v, mask=added)
        assert isinstance(out, torch.Tensor)
        return out

    shared = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, enable_gqa=True
    )
    assert torch.allclose(attend(bias), shared)
    assert torch.autograd.gradcheck(attend, (bias,))


def test_no_keys_and_huge_sinks_give_zero() -> None:
    q, k, v, _ = dense_inputs()
    for count, logit in ((0, 0.0), (7, float("inf")), (7, 1e300)):
        sink = torch.full((4,), logit, dtype=torch.float64, requires_grad=True)
        query = q.clone().requires_grad_()
        out = longspan.testing.attend_dense(query, k[:, :, :count], v[:, :, :count], sink=sink)
        assert (out == 0).all()
        out.sum().backward()
        assert (query.grad == 0).all()
        assert (sink.grad == 0).all()
    never = torch.full((4,), NEVER, dtype=torch.float64)
    assert torch.allclose(
        longspan.testing.attend_dense(q, k, v, sink=never), longspan.testing.attend_dense(q, k, v)
    )


def test_bfloat16_is_summed_in_float32() -> None:
    q, k, v, _ = (t.bfloat16() for t in dense_inputs())
    out, lse = longspan.testing.attend_dense(q, k, v, return_lse=True)
    wide = longspan.testing.attend_dense(q.float(), k.float(), v.float())
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, wide.bfloat16())


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("`q` is float64 [4, 5, 6]", lambda a: {**a, "q": a["q"][0]}),
        ("`v` is float64 [2, 2, 6, 3]", lambda a: {**a, "v": a["v"][:, :, :6]}),
        ("the heads of k divide", lambda a: {**a, "q": a["q"][:, :3]}),
        ("`mask` is int64", lambda a: {**a, "mask": torch.ones(5, 7).long()}),
        ("broadcast to [B, H, T, Tk]", lambda a: {**a, "mask": torch.ones(5, 6)}),
        ("of the 4 heads", lambda a: {**a, "sink": torch.zeros(3)}),
        ("scale is nan", lambda a: {**a, "scale": math.nan}),
    ],
)
def test_dense_attention_refuses(message: str, change: Any) -> None:
    q, k, v, _ = dense_inputs()
    arguments = change({"q": q, "k": k, "v": v})
    with pytest.raises(ValueError, match=re.escape(message)):
        longspan.testing.attend_dense(**arguments)


# ---- index_scores


def index_inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        random(2, 5, 3, 4).to(dtype),
        random(2, 6, 4, seed=1).to(dtype),
        random(2, 5, 3, seed=2).to(sums),
    ]


def index_windows() -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.tensor([[0, 1, 2, 6, -3]] * 2)
    end = torch.tensor([[6, 2, 2, 9, 4]] * 2)
    return start, end


@pytest.mark.parametrize("windowed", [False, True])
def test_every_key_has_a_score(windowed: bool) -> None:
    q, k, w = (t.requires_grad_() for t in index_inputs())
    start, end = index_windows() if windowed else (None, None)
    scores = longspan.dsa.index_scores(q, k, w, start=start, end=end)
    dense = torch.stack([index_scores(q[b], k[b], w[b]) for b in range(2)])
    if start is not None and end is not None:
        key = torch.arange(6)
        hidden = (key < start[..., None]) | (key >= end[..., None])
        dense = dense.masked_fill(hidden, NEVER)
    assert torch.allclose(scores, dense, atol=1e-14)
    g = random(2, 5, 6, seed=3)
    for got, want in zip(
        torch.autograd.grad(scores, (q, k, w), g),
        torch.autograd.grad(dense, (q, k, w), g),
        strict=True,
    ):
        assert torch.allclose(got, want, atol=1e-13)
    one = longspan.dsa.index_scores(
        q[0],
        k[0],
        w[0],
        start=None if start is None else start[0],
        end=None if end is None else end[0],
    )
    assert torch.equal(one, scores[0])


def test_scores_are_those_of_listed_keys() -> None:
    q, k, w = index_inputs(torch.bfloat16)
    scores = longspan.dsa.index_scores(q, k, w)
    assert scores.dtype == torch.float32
    lists = torch.arange(6).expand(2, 5, 6)
    assert torch.allclose(scores, ops.score_selected(q, k, w, lists), atol=1e-5)
    assert longspan.dsa.index_scores(q, k[:, :0], w).shape == (2, 5, 0)
    assert longspan.dsa.index_scores(q[:, :0], k, w[:, :0]).shape == (2, 0, 6)


def test_index_scores_refuse() -> None:
    q, k, w = index_inputs()
    start, end = index_windows()
    with pytest.raises(ValueError, match=r"index_scores: `weights` is float64 \[2, 5, 2\]"):
        longspan.dsa.index_scores(q, k, w[..., :2])
    with pytest.raises(ValueError, match="give both or none"):
        longspan.dsa.index_scores(q, k, w, start=start)
    with pytest.raises(ValueError, match=r"`end` is int64 \[2, 4\]"):
        longspan.dsa.index_scores(q, k, w, start=start, end=end[:, :4])
    q.requires_grad_()
    (grad,) = torch.autograd.grad(longspan.dsa.index_scores(q, k, w).sum(), q, create_graph=False)
    assert grad.shape == q.shape
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(longspan.dsa.index_scores(q, k, w).sum(), q, create_graph=True)


# ---- Tracing


def cases(requires_grad: bool) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def wants(t: torch.Tensor) -> torch.Tensor:
        return t.float().requires_grad_(requires_grad)

    q, k, v, _ = dense_inputs()
    iq, ik, iw = index_inputs()
    start, end = index_windows()
    angles = random(5, 2, dtype=torch.float32)
    mask = torch.zeros(2, 1, 5, 7).masked_fill(~visible_keys(), NEVER)
    return {
        "rotate": (
            ops.rotate_channels,
            (wants(random(2, 5, 6)), angles.cos(), angles.sin(), -4, True, False),
        ),
        "halves": (
            ops.rotate_channels,
            (wants(random(2, 5, 6)), angles.cos(), angles.sin(), 0, False, True),
        ),
        "dense": (
            ops.attend_dense,
            (wants(q), wants(k), wants(v), mask, wants(random(4)), 0.5),
        ),
        "scores": (ops.index_scores, (wants(iq), wants(ik), wants(iw), start, end)),
        "all scores": (ops.index_scores, (wants(iq), wants(ik), wants(iw), None, None)),
        "sinkhorn": (ops.sinkhorn_normalize, (wants(random(3, 4, 4)), 5, 1e-6)),
        "sinkhorn of strides": (ops.sinkhorn_normalize, (wants(random(4, 3, 4).mT), 2, 1e-6)),
        "sinkhorn by torch": (ops.sinkhorn_normalize, (wants(random(1, 70, 70)), 2, 1e-6)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", cases(False))
def test_is_registered_correctly(name: str, requires_grad: bool) -> None:
    op, arguments = cases(requires_grad)[name]
    torch.library.opcheck(op, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotate", "dense", "scores", "sinkhorn"])
def test_compiles_whole(name: str) -> None:
    op, arguments = cases(True)[name]

    def loss(*given: Any) -> torch.Tensor:
        out = op(*given)
        out = out[0] if isinstance(out, tuple) else out
        return out.clamp(min=-10).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    wanted = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
    for got, want in zip(
        torch.autograd.grad(compiled(*arguments), wanted),
        torch.autograd.grad(loss(*arguments), wanted),
        strict=True,
    ):
        assert torch.allclose(got, want, atol=1e-5)
