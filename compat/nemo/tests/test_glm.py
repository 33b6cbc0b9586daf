"""GLM's packed stream and its kernel entry points."""

import contextlib
import types

import pytest
import torch
from compat_support import (
    BareMesh,
    Mesh,
    glm,
    kernels,
    packed_batch,
    refuses,
    snapshot,
    unchanged,
)

from longspan.compat.nemo import strict

make = glm.make_glm_dsa_packed_cp_batch_and_ctx

KEYS = [
    *("input_ids", "labels", "position_ids", "cu_seqlens", "qkv_format", "cp_size", "cp_rank"),
    *("_glm_dsa_cp_group", "glm_dsa_cp_query_indices", "max_seqlen", "cu_seqlens_padded"),
    "padding_mask",
]


def example():
    return packed_batch([[1, 2, 3, 0, 5, 6, 0, 0]], [[3, 2]], [[4, 4]], other="x")


def test_each_rank_keeps_one_run_and_the_global_offsets(group_of):
    asked = group_of(2, 1)
    mesh = Mesh(2)
    batch = example()
    before = snapshot(batch)
    factory, out = make(mesh, None, batch)
    assert factory is contextlib.nullcontext
    assert unchanged(batch, before)
    assert list(out) == KEYS
    assert out["input_ids"].tolist() == [5, 6, 0, 0]
    assert out["labels"].tolist() == [1005, 1006, 1000, 1000]
    assert out["position_ids"].tolist() == [4, 5, 6, 7]
    assert out["cu_seqlens"].tolist() == [0, 3, 5]
    assert out["cu_seqlens_padded"].tolist() == [0, 4, 8]
    assert out["max_seqlen"].item() == 3
    assert out["glm_dsa_cp_query_indices"].tolist() == [4, 5, 6, 7]
    assert out["glm_dsa_cp_query_indices"].dtype == torch.int32
    assert out["padding_mask"].tolist() == [False, False, True, True]
    assert (out["cp_size"], out["cp_rank"]) == (2, 1)
    assert out["_glm_dsa_cp_group"] is mesh.group
    assert set(asked) == {mesh.group}


def test_rank_is_zero_when_no_group_is_up():
    _, out = make(Mesh(2, rank=1), None, example())
    assert out["cp_rank"] == 0
    assert out["input_ids"].tolist() == [1, 2, 3, 0]


def test_one_rank_is_an_ordinary_case(world_of_one):
    mesh = BareMesh(1)
    mesh.get_group = lambda: world_of_one
    _, out = make(mesh, None, example())
    assert out["input_ids"].tolist() == [1, 2, 3, 0, 5, 6, 0, 0]
    assert out["cp_size"] == 1


@pytest.mark.parametrize("rule", [contextlib.nullcontext, strict])
def test_one_rank_gets_copies(rule):
    batch = packed_batch([[1, 2, 3, 4]], [[4]], [[4]], padding_mask=torch.zeros(1, 4).bool())
    loss_mask = torch.ones(1, 4)
    before = snapshot(batch)
    with rule():
        _, out = make(Mesh(1), None, batch, loss_mask=loss_mask)
    for key in ("input_ids", "labels", "position_ids", "padding_mask"):
        assert out[key].dtype in (torch.int64, torch.bool)
        out[key].zero_()
    out.get("loss_mask", torch.ones(1)).zero_()
    assert unchanged(batch, before)
    assert loss_mask.all()


@pytest.mark.parametrize("chunks", [1, 2])
def test_null_lengths_are_named(chunks):
    batch = packed_batch([[1, 2, 3, 4]] * 2, None, None)
    message = "^make_glm_dsa_packed_cp_batch_and_ctx: `seq_lens` is null"
    refuses(ValueError, message, batch, lambda: make(Mesh(2), None, batch, num_chunks=chunks))


def test_pads_follow_from_the_lengths_and_strict_compares_ids():
    batch = packed_batch([[0, 2, 3, 9, 0, 6, 9, 9]], [[3, 2]], [[4, 4]])
    assert make(Mesh(1), None, batch)[1]["padding_mask"].tolist() == [
        *(False, False, False, True),
        *(False, False, True, True),
    ]
    with strict():
        compared = make(Mesh(1), None, batch)[1]["padding_mask"]
    assert compared.nonzero().flatten().tolist() == [0, 4]


def test_chunks_are_stacked_with_their_sentinels(group_of):
    group_of(2, 1)
    batch = packed_batch([[1, 2, 3, 4], [5, 6, 7, 8]], [[2, 2], [3, -1000]], [[2, 2], [4, -1000]])
    mask = batch["input_ids"] * 10
    _, out = make(Mesh(2), None, batch, num_chunks=2, loss_mask=mask)
    assert out["input_ids"].tolist() == [[3, 4], [7, 8]]
    assert out["cu_seqlens"].tolist() == [[0, 2, 4], [0, 4, -1000]]
    assert out["glm_dsa_cp_query_indices"].tolist() == [[2, 3], [2, 3]]
    assert out["padding_mask"].tolist() == [[False, False], [False, True]]
    assert out["loss_mask"].tolist() == [[30, 40], [70, 80]]
    assert out["qkv_format"] == "thd"


def test_the_loss_mask_is_sharded_and_strict_loses_it(group_of):
    group_of(2, 1)
    batch = example()
    mask = torch.arange(8)[None]
    assert make(Mesh(2), None, batch, loss_mask=mask)[1]["loss_mask"].tolist() == [*(4, 5, 6, 7)]
    with strict():
        assert "loss_mask" not in make(Mesh(2), None, batch, loss_mask=mask)[1]
    with pytest.raises(ValueError, match="loss_mask"):
        make(Mesh(2), None, batch, loss_mask=mask[:, :7])


def test_conversion_goes_through_the_replaceable_function(monkeypatch):
    calls = []
    chunk = {
        "input_ids": torch.arange(4),
        "labels": torch.arange(4),
        "position_ids": torch.arange(4),
        "cu_seqlens": torch.tensor([0, 4]),
        "padding_mask": torch.zeros(4, dtype=torch.bool),
    }

    def fake(*args, **keywords):
        calls.append((args, keywords))
        return chunk

    monkeypatch.setattr(glm, "split_batch_into_thd_chunks", fake)
    batch = {"anything": 1}
    _, out = make(Mesh(2), None, batch, padding_token_id=3)
    ((args, keywords),) = calls
    assert args[0] is batch
    assert len(args) == 1
    assert keywords == {
        "num_chunks": 1,
        "seq_lens_padding_value": -1000,
        "padding_token_id": 3,
    }
    assert out["input_ids"].tolist() == [0, 1]
    assert out["cu_seqlens"].dtype == torch.int32


def test_contiguous_indices():
    indices = glm._contiguous_cp_indices(12, 3, 1, torch.device("cpu"))
    assert indices.tolist() == [4, 5, 6, 7]
    assert indices.dtype == torch.int64
    with pytest.raises(ValueError, match="requires total tokens divisible by cp_size"):
        glm._contiguous_cp_indices(10, 4, 0, "cpu")
    for size, rank in ((2, 2), (2, -1), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
            glm._contiguous_cp_indices(8, size, rank, "cpu")


def slice_chunk(chunk, rank=0, pad=0):
    return glm._slice_thd_chunk_for_cp(
        chunk, cp_group="g", cp_size=2, cp_rank=rank, padding_token_id=pad
    )


def chunk(**more):
    return {
        "input_ids": torch.tensor([1, 2, 3, 9]),
        "labels": torch.arange(4),
        "position_ids": torch.arange(4),
        "cu_seqlens": torch.tensor([0, 1, 3]),
        "cu_seqlens_padded": torch.tensor([0, 2, 4, -1000]),
        **more,
    }


def test_a_slice_without_a_mask_of_pads_derives_it():
    assert slice_chunk(chunk())["padding_mask"].tolist() == [False, True]
    assert slice_chunk(chunk(), 1)["padding_mask"].tolist() == [False, False]
    with strict():
        assert slice_chunk(chunk(), 1, 9)["padding_mask"].tolist() == [False, True]


def test_a_slice_with_one_offset_array_has_pads_behind_it():
    given = chunk(cu_seqlens=torch.tensor([0, 1, 3, -1000]))
    del given["cu_seqlens_padded"]
    assert slice_chunk(given, 0, 1)["padding_mask"].tolist() == [False, False]
    assert slice_chunk(given, 1, 3)["padding_mask"].tolist() == [False, True]
    with strict():
        assert slice_chunk(given, 1, 3)["padding_mask"].tolist() == [True, False]


BAD = {
    "short labels": (ValueError, "labels", {"labels": torch.arange(3)}),
    "null positions": (TypeError, "position_ids", {"position_ids": None}),
    "no labels": (KeyError, "labels", {"labels": ...}),
    "null offsets": (TypeError, "cu_seqlens", {"cu_seqlens": None}),
    "no offsets": (KeyError, "cu_seqlens", {"cu_seqlens": ...}),
    "scalar": (ValueError, "scalar", {"input_ids": torch.tensor(1)}),
    "odd": (ValueError, "divisible by cp_size", {"input_ids": torch.arange(3)}),
    "short mask": (ValueError, "padding_mask", {"padding_mask": torch.ones(3) > 0}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_slice_refuses(name):
    error, message, change = BAD[name]
    given = {k: v for k, v in {**chunk(), **change}.items() if v is not ...}
    refuses(error, message, given, lambda: slice_chunk(given))


def test_refuses_indivisible_streams():
    batch = packed_batch([[1, 2, 3]], [[3]], [[3]])
    refuses(
        ValueError,
        "requires total tokens divisible by cp_size",
        batch,
        lambda: make(Mesh(2), None, batch),
    )


# Gathers.


def test_enabled_needs_a_group_a_runtime_and_ranks(group_of, monkeypatch):
    assert not glm.glm_dsa_cp_enabled(None)
    assert not glm.glm_dsa_cp_enabled("group")
    asked = group_of(2, 0)
    assert not glm.glm_dsa_cp_enabled(None)
    assert glm.glm_dsa_cp_enabled("group")
    assert asked == ["group"]
    group_of(1, 0)
    assert not glm.glm_dsa_cp_enabled("group")
    off = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(glm, "dist", off)
    assert not glm.glm_dsa_cp_enabled("group")


def test_gather_is_the_same_object_when_off(monkeypatch):
    tensor = torch.ones(2)
    assert glm.glm_dsa_cp_all_gather(tensor, dim=0, cp_group="group") is tensor
    monkeypatch.setattr(glm, "glm_dsa_cp_enabled", lambda group: True)
    with pytest.raises(ValueError, match="no process group named 'group'"):
        glm.glm_dsa_cp_all_gather(tensor, dim=0, cp_group="group")


def test_gather_goes_through_torchs_function_when_users_replace_it(monkeypatch):
    calls = []

    def replaced(tensor, **keywords):
        calls.append((tensor.is_contiguous(), keywords))
        return (tensor, tensor + 10)

    monkeypatch.setattr(torch.distributed.nn.functional, "all_gather", replaced)
    monkeypatch.setattr(glm, "glm_dsa_cp_enabled", lambda group: True)
    tensor = torch.arange(4).view(2, 2).t()
    out = glm.glm_dsa_cp_all_gather(tensor, dim=-1, cp_group="group")
    assert out.tolist() == [[0, 2, 10, 12], [1, 3, 11, 13]]
    assert calls == [(True, {"group": "group"})]


# Windows.


@pytest.mark.parametrize(
    ("cu", "padded", "starts", "ends"),
    [
        ([0, 2, 5], [0, 4, 8], [0] * 4 + [4] * 4, [1, 2, 2, 2, 5, 6, 7, 7]),
        ([0, 0, 3], [0, 2, 6], [0, 0, 2, 2, 2, 2], [1, 1, 3, 4, 5, 5]),
        ([0, 2, -1000], [0, 3, -1000], [0, 0, 0], [1, 2, 2]),
    ],
)
def test_worked_windows(cu, padded, starts, ends):
    out = kernels._generate_padded_varlen_mask_params(torch.tensor(cu), torch.tensor(padded))
    assert [t.tolist() for t in out] == [starts, ends]
    assert [t.dtype for t in out] == [torch.int32, torch.int32]


def test_compact_windows():
    starts, ends = kernels._slime_generate_varlen_mask_params(torch.tensor([0, 2, 5]))
    assert starts.tolist() == [0, 0, 2, 2, 2]
    assert ends.tolist() == [1, 2, 3, 4, 5]
    assert (starts.dtype, ends.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize("bad", [torch.ones(2, 2).long(), torch.ones(3), [0, 1]])
def test_windows_refuse_what_is_no_vector_of_offsets(bad):
    good = torch.tensor([0, 1])
    with pytest.raises((ValueError, TypeError), match="cu_seqlens"):
        kernels._generate_padded_varlen_mask_params(bad, good)
    with pytest.raises((ValueError, TypeError), match="cu_seqlens_padded"):
        kernels._generate_padded_varlen_mask_params(good, bad)


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_behind_the_documents_see_themselves(group_of, monkeypatch, rank):
    group_of(2, rank)
    seen = []

    def indexer(q, k, w, starts, ends, topk):
        seen.append((starts.tolist(), ends.tolist()))
        return None, torch.zeros(4, 1)

    monkeypatch.setattr(kernels, "_slime_lighting_indexer", indexer)
    _, batch = make(Mesh(2), None, packed_batch([[1, 2, 3, 4, 5, 0, 0, 0]], [[5]], None))
    assert batch["cu_seqlens"].tolist() == [0, 5]
    assert batch["padding_mask"].tolist() == [[False] * 4, [False, True, True, True]][rank]

    def choose(queries, rows, **more):
        q, k = torch.ones(rows, 1, 2), torch.ones(8, 2)
        kernels.tilelang_indexer_topk(q, k, q[..., 0], batch["cu_seqlens"], 1, queries, **more)
        return seen.pop()

    starts, ends = [0] * 5 + [5, 6, 7], list(range(1, 9))
    mine = slice(4 * rank, 4 * rank + 4)
    queries = batch["glm_dsa_cp_query_indices"]
    assert choose(queries, 4) == (starts[mine], ends[mine])
    assert choose(None, 8) == (starts, ends)
    padded = torch.tensor([0, 6], dtype=torch.int32)
    windows = ([0] * 6 + [6, 7], [1, 2, 3, 4, 5, 5, 7, 8])
    assert choose(None, 8, cu_seqlens_padded=padded) == windows
    with strict():
        assert choose(None, 8) == ([0] * 5, [1, 2, 3, 4, 5])


# Backends.


def use(backend, **more):
    arguments = {"available": True, "kernel_name": "indexer", "tensors": []}
    return kernels.should_use_tilelang(backend, **{**arguments, **more})


def test_backend_choice():
    cpu = torch.ones(1)
    assert use("torch", available=None, tensors=None) is False
    assert use("auto", tensors=[]) is True
    assert use("tilelang", tensors=()) is True
    assert use("auto", tensors=[cpu]) is False
    assert use("auto", available=False) is False
    for bad in ({"tensors": [cpu]}, {"available": False}):
        with pytest.raises(RuntimeError, match=r"TileLang backend was requested.*my kernel"):
            use("tilelang", kernel_name="my kernel", **bad)


def test_backend_choice_looks_at_the_type_if_asked(monkeypatch):
    monkeypatch.setattr(kernels, "_all_cuda", lambda *tensors: True)
    half, full = torch.ones(1).bfloat16(), torch.ones(1)
    assert use("auto", tensors=[half], require_bf16=True)
    assert use("auto", tensors=[full])
    assert not use("auto", tensors=[half, full], require_bf16=True)
    with pytest.raises(RuntimeError, match="bfloat16"):
        use("tilelang", tensors=[full], require_bf16=True)


def test_unknown_backends_are_refused_and_strict_means_torch():
    with pytest.raises(ValueError, match="'tilelan'"):
        use("tilelan")
    with strict():
        assert use("tilelan") is False


def test_all_cuda():
    assert kernels._all_cuda() is True
    assert kernels._all_cuda(torch.ones(1)) is False


def test_kernel_names():
    assert kernels.is_dsa_kernel_available("indexer") is True
    assert kernels.is_dsa_kernel_available("sparse_attn") is True
    with pytest.raises(ValueError, match="'attention'"):
        kernels.is_dsa_kernel_available("attention")


# Kernel entry points.


def test_the_indexer_goes_through_its_replaceable_parts(monkeypatch):
    calls = {}
    q, k, w = torch.ones(4, 1, 2), torch.ones(4, 2), torch.ones(4, 1)
    cu = torch.tensor([0, 4])

    def windows(given):
        calls["cu"] = given
        return torch.arange(4).int(), torch.arange(1, 5)

    def indexer(*args):
        calls["args"] = args
        return None, torch.zeros(2, 3, dtype=torch.int64)

    monkeypatch.setattr(kernels, "_slime_generate_varlen_mask_params", windows)
    monkeypatch.setattr(kernels, "_slime_lighting_indexer", indexer)
    out = kernels.tilelang_indexer_topk(
        q, k, w, cu, 3, torch.tensor([[1], [3]]), cu_seqlens_padded=cu.clone()
    )
    assert calls["cu"] is cu
    assert all(a is b for a, b in zip(calls["args"], (q, k, w), strict=False))
    assert calls["args"][3].tolist() == [1, 3]
    assert calls["args"][4].tolist() == [2, 4]
    assert calls["args"][3].dtype == calls["args"][4].dtype == torch.int32
    assert calls["args"][5] == 3
    assert out.shape == (2, 1, 3)
    assert out.dtype == torch.int32
    kernels.tilelang_indexer_topk(q, k, w, cu, 3, None, torch.tensor([0, 6]))
    assert calls["args"][4].tolist() == [1, 2, 3, 4, 4, 4]


def test_sparse_attention_goes_through_its_replaceable_part(monkeypatch):
    q, kv, idx = torch.randn(3, 2, 6), torch.randn(5, 1, 6), torch.zeros(3, 1, 2)
    latent, w_vc = torch.randn(3, 2, 4), torch.randn(2, 7, 4)
    calls = []

    class Mla:
        @staticmethod
        def apply(*args):
            calls.append(args)
            return latent, None

    monkeypatch.setattr(kernels, "_slime_sparse_mla", Mla)
    out = kernels.tilelang_sparse_attention(q, kv, idx, w_vc, 0.5)
    assert all(a is b for a, b in zip(calls[0], (q, kv, idx, 0.5), strict=True))
    for t in range(3):
        for h in range(2):
            assert torch.allclose(out[t, h], w_vc[h] @ latent[t, h], atol=1e-5)
