"""Gemma4 attention: names and small functions."""

import dataclasses
import inspect
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from compat_support import NEMO

from longspan.compat.nemo import strict

cpa = pytest.importorskip(NEMO + "models.gemma4_moe.cp_attention")

SIGNATURES = {
    "gemma4_vision_group_ids": "(mm_token_type_ids)",
    "_base_gemma4_cp_mask": "(attention_module, ctx, q_idx, kv_idx, kv_global_start=0)",
    "_metadata_like": "(metadata)",
    "_detach_metadata": "(metadata)",
    "_zero_if_none": "(grad, like)",
    "_merge_flex_chunk": "(out_acc, lse_acc, out_step, lse_step)",
    "_run_gemma4_flex_chunk": "(attention_module, ctx, *, key_chunk, value_chunk, "
    "metadata_chunk, kv_global_start)",
    "_run_gemma4_cp_ring_attention": "(attention_module, ctx)",
    "_run_gemma4_cp_ring_attention_forward": "(attention_module, ctx)",
    "_gemma4_cp_manual_attention": "(attention_module, query, key, value, *, cp_mesh, attn_mask, "
    "dropout_p, is_causal, scale, enable_gqa, kwargs)",
    "_build_packed_ring_segments": "(q_ids, k_ids)",
    "attach_gemma4_cp_ring_attention": "(attention_module, *, use_ffpa=False)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_references(name):
    signature = inspect.signature(getattr(cpa, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    empty = inspect.Signature.empty
    assert str(signature.replace(parameters=bare, return_annotation=empty)) == SIGNATURES[name]


def test_context_is_frozen_and_its_fields_are_in_order():
    names = [field.name for field in dataclasses.fields(cpa.CPRingAttentionContext)]
    assert names == [
        *("module", "query", "key", "value", "cp_mesh", "cp_group", "cp_size", "cp_rank"),
        *("seq_local", "seq_full", "seq_global_start", "attn_mask", "dropout_p", "is_causal"),
        *("scale", "enable_gqa", "kwargs", "metadata", "metadata_seq_dims"),
    ]
    ctx = cpa.CPRingAttentionContext(*range(len(names)))
    assert cpa.replace is dataclasses.replace
    assert cpa.replace(ctx, scale=0.5).scale == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        ctx.scale = 1.0


GROUPS = [
    ([0, 0, 0], [-1, -1, -1]),
    ([0, 1, 1, 0, 2, 2], [-1, 0, 0, -1, 1, 1]),
    ([1, 2, 0, 3, 1], [0, 0, -1, -1, 1]),
    ([2], [0]),
    ([], []),
]


@pytest.mark.parametrize(("types", "groups"), GROUPS)
def test_runs_of_vision_tokens_are_numbered(types, groups):
    given = torch.tensor([types, types[::-1]], dtype=torch.int64)
    before = given.clone()
    made = cpa.gemma4_vision_group_ids(given)
    assert made[0].tolist() == groups
    assert made.shape == given.shape
    assert torch.equal(given, before)


def test_rows_are_numbered_alone():
    assert cpa.gemma4_vision_group_ids(torch.tensor([[0, 1], [1, 1]])).tolist() == [[-1, 0], [0, 0]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 99])
def test_base_mask_pair_by_pair(causal, window):
    module = SimpleNamespace(sliding_window=window)
    ctx = SimpleNamespace(seq_global_start=4, is_causal=causal)
    q, k = torch.arange(4)[:, None], torch.arange(4)[None]
    for start in (0, 4, 8):
        allowed = cpa._base_gemma4_cp_mask(module, ctx, q, k, start)
        assert allowed.shape == (4, 4)
        assert allowed.dtype == torch.bool
        for i, j in itertools.product(range(4), range(4)):
            away = 4 + i - (start + j)
            assert allowed[i, j] == ((away >= 0 or not causal) and away < (window or 100))
    assert torch.equal(cpa._base_gemma4_cp_mask(module, ctx, q, k),
                       cpa._base_gemma4_cp_mask(module, ctx, q, k, kv_global_start=0))  # fmt: skip


def test_metadata_helpers():
    tensor = torch.randn(3, 2).t().requires_grad_()
    like = cpa._metadata_like({"a": tensor, "b": None})
    assert like["a"].shape == (2, 3)
    assert like["a"].data_ptr() != tensor.data_ptr()
    assert like["b"] is None
    detached = cpa._detach_metadata({"a": tensor, "b": None})
    assert torch.equal(detached["a"], tensor)
    assert detached["a"].is_contiguous() and not detached["a"].requires_grad
    assert detached["b"] is None
    assert cpa._zero_if_none(tensor, torch.ones(1)) is tensor
    assert cpa._zero_if_none(None, tensor).tolist() == [[0, 0, 0]] * 2


def part(*columns):
    out = torch.tensor([[[[c[0]] for c in columns]]], dtype=torch.float64)
    return out, torch.tensor([[[c[1] for c in columns]]], dtype=torch.float64)


def test_merge_returns_the_first_chunk_itself():
    out, lse = part((1.0, 0.0))
    assert cpa._merge_flex_chunk(None, None, out, lse) == (out, lse)


def test_merge_weighs_by_log_sum_exp_and_minus_infinity_saw_nothing():
    nothing = -math.inf
    left = part((1.0, math.log(3)), (2.0, 0.5), (0.0, nothing), (0.0, nothing))
    right = part((5.0, 0.0), (0.0, nothing), (7.0, 0.25), (0.0, nothing))
    inputs = [t.requires_grad_() for t in (*left, *right)]
    out, lse = cpa._merge_flex_chunk(*inputs)
    torch.testing.assert_close(out.flatten(), out.new_tensor([2.0, 2.0, 7.0, 0.0]))
    torch.testing.assert_close(lse.flatten(), lse.new_tensor([math.log(4), 0.5, 0.25, nothing]))
    (out.sum() + lse[..., :3].sum()).backward()
    assert all(torch.isfinite(t.grad).all() for t in inputs)
    # In the other order too.
    again, _ = cpa._merge_flex_chunk(*right, *left)
    torch.testing.assert_close(again, out)


def context(seq=4, width=8, heads=(2, 2), metadata=None, rank=0, **more):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, seq, width, generator=random) for h in (heads[0], *heads[1:] * 2))
    made = cpa.CPRingAttentionContext(
        module=None, query=q, key=k, value=v, cp_mesh=None, cp_group=object(), cp_size=1,
        cp_rank=rank, seq_local=seq, seq_full=seq, seq_global_start=rank * seq, attn_mask=None,
        dropout_p=0.0, is_causal=True, scale=None, enable_gqa=heads[0] != heads[1], kwargs={},
        metadata=metadata or {}, metadata_seq_dims={},
    )  # fmt: skip
    return cpa.replace(made, **more)


def chunk(ctx, module=None, start=0, metadata=None):
    return cpa._run_gemma4_flex_chunk(
        SimpleNamespace(sliding_window=None) if module is None else module,
        ctx,
        key_chunk=ctx.key,
        value_chunk=ctx.value,
        metadata_chunk=ctx.metadata if metadata is None else metadata,
        kv_global_start=start,
    )


def test_one_chunk_is_plain_causal_attention():
    for heads in ((2, 2), (4, 2), (3, 1)):
        ctx = context(heads=heads)
        out, lse, empty, padded = chunk(ctx)
        plain = torch.nn.functional.scaled_dot_product_attention(
            ctx.query, ctx.key, ctx.value, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out, plain)
        assert lse.shape == (1, heads[0], 4)
        assert lse.dtype == torch.float32
        assert empty is None
        assert padded == 8


def test_head_dim_is_reported_as_the_next_power_of_two_and_scale_is_of_the_real_one():
    for width, padded in ((1, 1), (3, 4), (4, 4), (5, 8), (300, 512)):
        ctx = context(width=width)
        out, _, _, told = chunk(ctx)
        assert told == padded
        assert out.shape[-1] == width
        torch.testing.assert_close(chunk(cpa.replace(ctx, scale=width**-0.5))[0], out)


def test_keys_after_all_queries_give_nothing_and_no_nan():
    ctx = context()
    query = ctx.query.clone().requires_grad_()
    out, lse, empty, _ = chunk(cpa.replace(ctx, query=query), start=4)
    assert (out == 0).all() and torch.isneginf(lse).all()
    assert empty is None
    (out.sum() + lse.exp().sum()).backward()
    assert (query.grad == 0).all()


def test_rows_of_no_document_and_pads_are_zero_and_see_the_first_key():
    documents, pads = torch.tensor([[1, 0, 1, 2]]), torch.tensor([[False, False, True, False]])
    ctx = context(metadata={"_packed_seq_ids": documents, "padding_mask": pads})
    out, lse, empty, _ = chunk(ctx)
    assert empty.tolist() == [[False, True, True, False]]
    assert (out[:, :, 1:3] == 0).all()
    first = (ctx.query @ ctx.key[:, :, :1].transpose(-1, -2)).squeeze(-1) * 8**-0.5
    torch.testing.assert_close(lse[:, :, 1:3], first[:, :, 1:3])
    torch.testing.assert_close(out[:, :, 3], ctx.value[:, :, 3])


def test_a_row_of_no_document_sees_nothing_when_the_first_key_is_a_pad():
    documents, pads = torch.tensor([[1, 0, 1, 1]]), torch.tensor([[True, False, False, False]])
    ctx = context(metadata={"_packed_seq_ids": documents, "padding_mask": pads})
    query = ctx.query.clone().requires_grad_()
    out, lse, _, _ = chunk(cpa.replace(ctx, query=query))
    assert torch.isneginf(lse[:, :, 1]).all() and torch.isfinite(lse[:, :, 0]).all()
    out, lse = cpa._merge_flex_chunk(out, lse, out, lse)
    out.sum().backward()
    assert torch.isfinite(query.grad).all()


def test_the_output_has_the_queries_dtype_and_the_sums_are_wider():
    ctx = context(heads=(2, 2))
    half = {name: getattr(ctx, name).bfloat16() for name in ("query", "key", "value")}
    out, lse, _, _ = chunk(cpa.replace(ctx, **half))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    wide = chunk(ctx)[:2]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(*pair) for pair in zip(chunk(ctx)[:2], wide, strict=True))


SEGMENTS = [
    # q ids, k ids, q index, k index, cu_q, cu_k, dense local, dense cross, pad rows
    ([[1, 1, 2, 2]], [[1, 1, 2, 2]], [0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 4], [0, 2, 4], 0, 0, None),
    ([[1, 1, 2, 2]], [[2, 2, 3, 3]], [2, 3], [0, 1], [0, 2], [0, 2], 0, 0, None),
    ([[1, 2]], [[1, 1]], [0], [0, 1], [0, 1], [0, 2], 0, 0, None),
    ([[1] * 3], [[1] * 3], [0, 1, 2], [0, 1, 2], [0, 3], [0, 3], 1, 1, None),
    ([[1, 1, 0]], [[1, 1, 0]], [0, 1], [0, 1], [0, 2], [0, 2], 1, 0, [[0, 0, 1]]),
    ([[1, 1, 0]], [[1, 1, 1]], [0, 1], [0, 1, 2], [0, 2], [0, 3], 1, 1, [[0, 0, 1]]),
    ([[1, 1, 1]], [[2, 1, 1]], [0, 1, 2], [1, 2], [0, 3], [0, 2], 1, 0, None),
    ([[0, 1, 1]], [[1, 1, 1]], [1, 2], [0, 1, 2], [0, 2], [0, 3], 0, 0, [[1, 0, 0]]),
    ([[2, 1, 2]], [[1, 2, 0]], [0, 2, 1], [1, 0], [0, 2, 3], [0, 1, 2], 0, 0, None),
    # Rows follow one another; one row that shares nothing keeps the tensors from being used whole.
    ([[1, 1], [2, 2]], [[1, 1], [2, 2]], [0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 4], [0, 2, 4], 1, 1,
     None),
    ([[1, 1], [2, 2]], [[1, 1], [3, 3]], [0, 1], [0, 1], [0, 2], [0, 2], 1, 0, None),
    ([[1, 1], [0, 0]], [[1, 1], [1, 1]], [0, 1], [0, 1], [0, 2], [0, 2], 0, 0, [[0, 0], [1, 1]]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("q", "k", "q_index", "k_index", "cu_q", "cu_k", "local", "cross", "pads"), SEGMENTS
)
def test_segments_pair_documents(q, k, q_index, k_index, cu_q, cu_k, local, cross, pads):
    made = cpa._build_packed_ring_segments(torch.tensor(q), torch.tensor(k))
    assert list(made) == [
        *("q_index", "k_index", "cu_q", "cu_k", "max_q", "max_k"),
        *("dense_local", "dense_cross", "pad_rows"),
    ]
    assert made["q_index"].tolist() == q_index
    assert made["k_index"].tolist() == k_index
    assert (made["cu_q"].tolist(), made["cu_k"].tolist()) == (cu_q, cu_k)
    assert made["cu_q"].dtype == made["cu_k"].dtype == torch.int32
    assert made["max_q"] == max(b - a for a, b in itertools.pairwise(cu_q))
    assert made["max_k"] == max(b - a for a, b in itertools.pairwise(cu_k))
    assert made["dense_local"] is bool(local)
    assert made["dense_cross"] is bool(cross)
    with strict():  # whether rows of keys are one document, whichever
        made = cpa._build_packed_ring_segments(torch.tensor(q), torch.tensor(k))
    full = all(len(set(row)) == 1 and row[0] > 0 for row in k)
    assert made["dense_cross"] is (bool(local) and full)
    if pads is None:
        assert made["pad_rows"] is None
    else:
        assert made["pad_rows"].int().tolist() == pads


@pytest.mark.parametrize(("q", "k"), [([[1, 1]], [[2, 2]]), ([[0, 0]], [[0, 0]]), ([[]], [[]])])
def test_shards_that_share_nothing_have_no_segments(q, k):
    assert cpa._build_packed_ring_segments(torch.tensor(q), torch.tensor(k)) is None
