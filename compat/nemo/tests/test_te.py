"""Per-document head-tail shares of a stream."""

import contextlib
import sys

import pytest
import torch
from compat_support import (
    DeviceMesh,
    Mesh,
    cp_utils,
    packed_batch,
    refuses,
)

from longspan.compat.nemo import _nemo, strict

make = cp_utils.make_cp_batch_for_te
shard = cp_utils._shard_thd_chunk_for_te

EXAMPLE = ([[1, 2, 3, 0, 5, 6, 0, 0]], [[3, 2]], [[4, 4]])


def example():
    batch = packed_batch(*EXAMPLE)
    batch["position_ids"] = torch.arange(8)[None]
    return batch


PARTITIONS = [
    (
        [0, 8, 24],
        24,
        [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23],
        [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19],
    ),
    ([0, 4, 4, 12], 12, [0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]),
]


@pytest.mark.parametrize("rule", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize(("cu", "total", "first", "second"), PARTITIONS)
def test_worked_partitions(cu, total, first, second, rule):
    offsets = torch.tensor(cu, dtype=torch.int32)
    for rank, tokens in enumerate((first, second)):
        part = _nemo.document_partition(offsets, total, 2, rank, rule)
        assert part.dtype == torch.int32
        assert part.tolist() == tokens


def test_a_stream_longer_than_its_offsets_loses_nothing_by_default():
    cu = torch.tensor([0, 8, 16], dtype=torch.int32)
    parts = [_nemo.document_partition(cu, 24, 2, rank, False) for rank in (0, 1)]
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    strict_parts = [_nemo.document_partition(cu, 24, 2, rank, True).tolist() for rank in (0, 1)]
    assert strict_parts[0] == [0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 18, 19]
    assert strict_parts[1] == [2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 16, 17]


def test_worked_example(group_of):
    asked = group_of(2, 0)
    mesh = Mesh(2)
    out = make(mesh, example())
    assert list(out) == [
        *("input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen"),
        *("qkv_format", "padding_mask", "cp_size", "cp_rank"),
    ]
    assert out["input_ids"].tolist() == [1, 0, 5, 0]
    assert out["position_ids"].tolist() == [0, 3, 4, 7]
    assert out["labels"].tolist() == [1001, 1000, 1005, 1000]
    assert out["cu_seqlens"].tolist() == [0, 4, 8]
    assert out["cu_seqlens"].dtype == torch.int32
    assert out["max_seqlen"].item() == 4
    assert out["max_seqlen"].dtype == torch.int32
    assert out["max_seqlen"].dim() == 0
    assert out["padding_mask"].tolist() == [False, True, False, True]
    assert (out["qkv_format"], out["cp_size"], out["cp_rank"]) == ("thd", 2, 0)
    assert asked == [mesh.group]


def test_works_without_transformer_engine(group_of):
    group_of(2, 1)
    assert "transformer_engine" not in sys.modules
    assert make(Mesh(2), example())["input_ids"].tolist() == [2, 3, 6, 0]
    assert "transformer_engine" not in sys.modules


def test_ids_become_int64_and_activations_stay_what_they_are(group_of):
    group_of(2, 0)
    batch = example()
    batch["input_ids"] = batch["input_ids"].to(torch.int32)
    assert make(Mesh(2), batch)["input_ids"].dtype == torch.int64
    batch["input_ids"] = torch.randn(1, 8, 3)
    out = make(Mesh(2), batch)
    assert torch.equal(out["input_ids"], batch["input_ids"][0, [0, 3, 4, 7]])
    assert out["padding_mask"].tolist() == [False, True, False, True]


def test_strict_compares_ids_as_they_came(group_of):
    group_of(2, 0)
    batch = packed_batch([[0, 1, 2, 3]], [[4]], [[4]])
    batch["input_ids"] = torch.tensor([[0.5, 0.0, 0.0, 0.0]])
    with strict():
        out = make(Mesh(2), batch)
    assert out["input_ids"].tolist() == [0, 0]
    assert out["padding_mask"].tolist() == [False, True]


@pytest.mark.parametrize("mesh", [None, Mesh(1), Mesh(0)])
def test_one_rank_gives_the_converted_map(mesh):
    out = make(mesh, example())
    assert list(out) == [
        *("input_ids", "position_ids", "cu_seqlens", "labels", "padding_mask"),
        *("cu_seqlens_padded", "max_seqlen"),
    ]


def test_only_thd():
    batch = example()
    refuses(
        ValueError,
        "Currently only 'thd' format is supported",
        batch,
        lambda: make(None, batch, qkv_format="bshd"),
    )


def test_the_group_must_be_up_when_there_are_ranks():
    batch = example()
    refuses((ValueError, RuntimeError), "group", batch, lambda: make(Mesh(2), batch))


# Pads.


def test_pads_follow_from_the_lengths_and_strict_compares_ids(group_of):
    group_of(2, 0)
    batch = packed_batch([[0, 2, 3, 9, 0, 6, 9, 9]], [[3, 2]], [[4, 4]])
    assert make(Mesh(2), batch)["padding_mask"].tolist() == [False, True, False, True]
    with strict():
        compared = make(Mesh(2), batch)["padding_mask"]
    assert compared.tolist() == [True, False, True, False]


def test_a_given_padding_mask_is_sharded(group_of):
    group_of(2, 0)
    given = torch.tensor([[True, False, False, False] * 2])
    out = make(Mesh(2), {**example(), "padding_mask": given})
    assert out["padding_mask"].tolist() == [True, False, True, False]


# Chunks.


def test_chunks_are_stacked(group_of):
    group_of(2, 1)
    batch = packed_batch(
        [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 0, 0]],
        [[4, 4], [6, -1000]],
        [[4, 4], [8, -1000]],
    )
    out = make(Mesh(2), batch, num_chunks=2)
    assert list(out) == [
        *("input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "qkv_format"),
        *("padding_mask", "cp_size", "cp_rank"),
    ]
    assert out["input_ids"].tolist() == [[2, 3, 6, 7], [13, 14, 15, 16]]
    assert out["cu_seqlens"].tolist() == [[0, 4, 8], [0, 8, -1000]]
    assert out["max_seqlen"].tolist() == [4, 8]
    assert out["padding_mask"].tolist() == [[False] * 4] * 2
    assert (out["qkv_format"], out["cp_size"], out["cp_rank"]) == ("thd", 2, 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_ranks_together_hold_every_token_once(group_of, ranks):
    slots = [2 * ranks, 0, 6 * ranks, 4 * ranks]
    total = sum(slots)
    ids = list(range(1, total + 1))
    held = []
    for rank in range(ranks):
        group_of(ranks, rank)
        batch = packed_batch([ids], [slots], [slots])
        held += make(Mesh(ranks), batch)["input_ids"].tolist()
    assert sorted(held) == ids


# The loss mask through the dispatcher.


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_dispatcher_returns_the_loss_mask(group_of, ranks, chunks):
    group_of(2, 0)
    rows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    batch = packed_batch(rows, [[4], [4]], [[4], [4]])
    mask = batch["input_ids"] * 10
    keys = set(batch)
    _, out = cp_utils.make_cp_batch_and_ctx(
        DeviceMesh(cp=ranks), batch, mask, use_te=True, num_chunks=chunks
    )
    assert torch.equal(out["loss_mask"], out["input_ids"] * 10)
    assert list(out)[-1] == "loss_mask"
    assert set(batch) == keys
    with strict():
        _, out = cp_utils.make_cp_batch_and_ctx(
            DeviceMesh(cp=ranks), batch, mask, use_te=True, num_chunks=chunks
        )
    assert "loss_mask" not in out


def test_the_loss_mask_reaches_through_a_wrapper_and_only_its_own_batch(group_of, monkeypatch):
    group_of(2, 0)
    batch = packed_batch([[1, 2, 3, 4]], [[4]], [[4]])
    mask = batch["input_ids"] * 10

    def on_a_copy(mesh, given, **keywords):
        return make(mesh, dict(given), **keywords)

    def on_another(mesh, given, **keywords):
        return make(mesh, packed_batch([[1, 2, 3, 4]] * 2, [[4]] * 2, [[4]] * 2), **keywords)

    def masks(function):
        monkeypatch.setattr(cp_utils, "make_cp_batch_for_te", function)
        made = cp_utils.make_cp_batch_and_ctx(DeviceMesh(cp=2), batch, mask, use_te=True)[1]
        return made.get("loss_mask")

    assert masks(on_a_copy).tolist() == [10, 40]
    assert masks(on_another) is None
    assert "loss_mask" not in make(Mesh(2), batch)


def test_the_dispatcher_refuses_a_loss_mask_of_another_shape(group_of):
    group_of(2, 0)
    batch = packed_batch([[1, 2, 3, 4]], [[4]], [[4]])
    for mask, error in ((torch.ones(1, 3), ValueError), ("mask", TypeError)):
        refuses(
            error,
            "make_cp_batch_and_ctx: `loss_mask`",
            batch,
            lambda m=mask: cp_utils.make_cp_batch_and_ctx(DeviceMesh(cp=2), batch, m, use_te=True),
        )
    assert "loss_mask" not in make(Mesh(2), batch)


# One chunk.


def chunk(**more):
    return {
        "input_ids": torch.tensor([1, 2, 3, 0, 5, 6, 0, 0]),
        "labels": torch.arange(8),
        "position_ids": torch.arange(8),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([0, 4, 8, -1000], dtype=torch.int32),
        **more,
    }


def test_one_chunk_edits_its_map_and_publishes_the_padded_offsets(group_of):
    group_of(2, 1)
    batch = chunk(padding_mask=torch.arange(8) == 2, other=1)
    out = shard(batch, Mesh(2), "thd", -1000, 0)
    assert out["cu_seqlens"].tolist() == [0, 4, 8, -1000]
    assert out["max_seqlen"].item() == 4
    assert out["input_ids"].tolist() == [2, 3, 6, 0]
    assert out["padding_mask"].tolist() == [False, True, False, False]
    assert "other" not in out
    for key in ("input_ids", "labels", "position_ids", "padding_mask"):
        assert batch[key].shape == (4,)
    assert batch["cu_seqlens"].tolist() == [0, 3, 5]


def test_one_chunk_without_a_mask_derives_it(group_of):
    group_of(2, 0)
    batch = chunk()
    out = shard(batch, Mesh(2), "thd", -1000, padding_token_id=1)
    assert out["padding_mask"].tolist() == [False, True, False, True]
    assert "padding_mask" not in batch
    batch = chunk()
    with strict():
        out = shard(batch, Mesh(2), "thd", -1000, padding_token_id=1)
    assert out["padding_mask"].tolist() == [True, False, False, False]


def test_one_chunk_with_only_offsets_has_pads_behind_them(group_of):
    group_of(2, 0)
    for cu, pads in (([0, 4, 8], []), ([0, 4, -1000], [2, 3]), ([0, 0], [0, 1, 2, 3])):
        batch = chunk(cu_seqlens=torch.tensor(cu, dtype=torch.int32))
        del batch["cu_seqlens_padded"]
        out = shard(batch, Mesh(2), "thd", -1000, padding_token_id=5)
        assert out["padding_mask"].nonzero().flatten().tolist() == pads
    batch = chunk(cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32))
    del batch["cu_seqlens_padded"]
    with strict():
        out = shard(batch, Mesh(2), "thd", -1000, padding_token_id=5)
    assert out["padding_mask"].tolist() == [False, False, True, False]


@pytest.mark.parametrize("rule", [contextlib.nullcontext, strict])
def test_a_sentinel_of_0_is_not_where_the_first_document_begins(group_of, rule):
    group_of(2, 0)
    batch = chunk(cu_seqlens=torch.tensor([0, 4, 8, 0, 0], dtype=torch.int32))
    del batch["cu_seqlens_padded"]
    with rule():
        out = shard(batch, Mesh(2), "thd", 0, padding_token_id=5)
    assert out["position_ids"].tolist() == [0, 3, 4, 7]
    assert out["max_seqlen"].item() == 4
    assert out["cu_seqlens"].tolist() == [0, 4, 8, 0, 0]


BAD = {
    "no offsets": (KeyError, "cu_seqlens", {"cu_seqlens": ...}),
    "null offsets": (
        ValueError,
        "BSHD format is not supported",
        {"cu_seqlens": None},
    ),
    "float offsets": (ValueError, "integers", {"cu_seqlens": torch.zeros(3)}),
    "one offset": (
        ValueError,
        "^_shard_thd_chunk_for_te: `cu_seqlens` is .0.: no document",
        {"cu_seqlens_padded": torch.zeros(1, dtype=torch.int32)},
    ),
    "odd offsets": (
        ValueError,
        "multiple",
        {"cu_seqlens_padded": torch.tensor([0, 3, 8], dtype=torch.int32)},
    ),
    "falling lengths": (
        ValueError,
        "`cu_seqlens` must start with 0",
        {"cu_seqlens": torch.tensor([0, 4, 3])},
    ),
    "long lengths": (
        ValueError,
        "`cu_seqlens` ends at 9 but the stream has 8",
        {"cu_seqlens": torch.tensor([0, 4, 9])},
    ),
    "other documents": (
        ValueError,
        "4 offsets but `cu_seqlens_padded` has 3",
        {"cu_seqlens": torch.tensor([0, 1, 2, 3])},
    ),
    "wide offsets": (
        ValueError,
        "int32",
        {"cu_seqlens_padded": torch.tensor([0, 4, 2**32 + 8])},
    ),
    "null positions": (ValueError, "position_ids. is null", {"position_ids": None}),
    "short labels": (ValueError, "labels.*8 tokens", {"labels": torch.arange(4)}),
    "no labels": (KeyError, "labels", {"labels": ...}),
    "scalar ids": (ValueError, "scalar", {"input_ids": torch.tensor(1)}),
    "odd stream": (ValueError, "do not split", {"input_ids": torch.arange(6)}),
}


@pytest.mark.parametrize("name", BAD)
def test_one_chunk_refuses(group_of, name):
    group_of(2, 0)
    error, message, change = BAD[name]
    batch = {k: v for k, v in {**chunk(), **change}.items() if v is not ...}
    refuses(error, message, batch, lambda: shard(batch, Mesh(2), "thd", -1000, 0))


def test_refuses_streams_without_lengths(group_of):
    group_of(2, 0)
    batch = packed_batch([[1, 2, 3, 4]], None, None)
    refuses(ValueError, "BSHD format is not supported", batch, lambda: make(Mesh(2), batch))


def test_refuses_null_positions_over_ranks(group_of):
    group_of(2, 0)
    batch = {**example(), "position_ids": None}
    refuses(ValueError, "position_ids", batch, lambda: make(Mesh(2), batch))


@pytest.mark.parametrize("chunks", [1, 2])
def test_refuses_streams_without_documents(group_of, chunks):
    group_of(2, 0)
    batch = packed_batch([[1, 2, 3, 4]] * chunks, [[-1000]] * chunks, [[-1000]] * chunks)
    message = "^make_cp_batch_for_te: .*no document to share over 2 ranks; give at least one"
    refuses(ValueError, message, batch, lambda: make(Mesh(2), batch, num_chunks=chunks))


def test_a_row_of_pads_alone_is_a_document_without_tokens(group_of):
    group_of(2, 0)
    out = make(Mesh(2), packed_batch([[1, 2, 3, 4]], [[0]], [[4]]))
    assert out["padding_mask"].tolist() == [True, True]
