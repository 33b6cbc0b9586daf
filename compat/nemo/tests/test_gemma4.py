"""Gemma4: contiguous rows with side tensors."""

import contextlib
import math

import pytest
import torch
from compat_support import BareMesh, DeviceMesh, Mesh, cp_utils, gemma4, refuses
from compat_support import row_batch as rows_of

from longspan.compat.nemo import strict

make = gemma4.make_contiguous_shard_cp_batch_and_ctx


def example(**more):
    return {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "labels": torch.tensor([[1, 2, 3]]),
        "_packed_seq_ids": torch.tensor([[1, 1, 2]]),
        **more,
    }


def test_worked_example(group_of):
    asked = group_of(2, 1)
    mesh = Mesh(2)
    batch = example()
    factory, out = make(mesh, None, batch, padding_token_id=99)
    assert factory is contextlib.nullcontext
    assert out is batch
    assert batch["input_ids"].tolist() == [[3, 99]]
    assert batch["labels"].tolist() == [[3, -100]]
    assert batch["_packed_seq_ids"].tolist() == [[2, 0]]
    assert batch["position_ids"].tolist() == [[2, 3]]
    assert list(batch) == ["input_ids", "labels", "_packed_seq_ids", "position_ids"]
    assert asked == [mesh.group]


def test_rank_comes_from_the_mesh_or_is_zero_without_a_runtime():
    for mesh, ids in ((Mesh(2, rank=1), [[3, 0]]), (BareMesh(2), [[1, 2]])):
        batch = example()
        make(mesh, None, batch)
        assert batch["input_ids"].tolist() == ids


def test_every_known_tensor_is_padded_and_cut():
    batch = rows_of(
        rows=2,
        mm_token_type_ids=torch.ones(2, 3).long(),
        per_layer_inputs=torch.ones(2, 3, 4, 5),
        padding_mask=torch.zeros(2, 3).bool(),
        position_ids=torch.arange(3)[None],
        untouched=torch.ones(2, 3),
    )
    make(Mesh(2, 1), None, batch, loss_mask=torch.ones(2, 3))
    assert batch["mm_token_type_ids"].tolist() == [[1, 0]] * 2
    assert batch["per_layer_inputs"].shape == (2, 2, 4, 5)
    assert batch["per_layer_inputs"][:, 1].abs().sum() == 0
    assert batch["padding_mask"].tolist() == [[False, True]] * 2
    assert batch["position_ids"].tolist() == [[2, 3]] * 2
    assert batch["loss_mask"].tolist() == [[1, 0]] * 2
    assert batch["_packed_seq_ids"].tolist() == [[1, 0]] * 2
    assert batch["untouched"].shape == (2, 3)
    assert all(t.is_contiguous() for t in batch.values())


def test_declared_tensors_are_cut_on_their_axis_with_their_fill():
    batch = example(
        groups=torch.tensor([[0, 1, -1]]),
        heads=torch.ones(1, 2, 3),
        absent_fill=torch.ones(1, 3),
        _cp_metadata_seq_dims={
            "groups": 1,
            "heads": -1,
            "absent_fill": 1,
            "input_ids": 0,
            "missing": 1,
        },
        _cp_metadata_pad_values={"groups": -1, "heads": 7.0},
    )
    make(Mesh(2, 1), None, batch)
    assert batch["groups"].tolist() == [[-1, -1]]
    assert batch["heads"].tolist() == [[[1, 7]] * 2]
    assert batch["absent_fill"].tolist() == [[1, 0]]
    assert not {"_cp_metadata_seq_dims", "_cp_metadata_pad_values"} & set(batch)


def test_the_attention_mask_becomes_pads_and_documents():
    batch = rows_of(attention_mask=torch.tensor([[1, 1, 0]]))
    make(Mesh(1), None, batch)
    assert batch["padding_mask"].tolist() == [[False, False, True, True]]
    assert batch["_packed_seq_ids"].tolist() == [[1, 1, 0, 0]]
    assert list(batch) == [
        *("input_ids", "labels", "padding_mask", "position_ids", "_packed_seq_ids")
    ]


def test_a_block_causal_mask_only_gives_its_diagonal():
    mask = torch.ones(1, 1, 3, 3).tril().bool()
    mask[0, 0, 2, :2] = False
    batch = example(attention_mask=mask)
    make(Mesh(1), None, batch)
    assert batch["padding_mask"].tolist() == [[False, False, False, True]]


def test_additive_masks_above_zero_are_refused_and_strict_reads_them_as_pads():
    batch = example(attention_mask=torch.eye(3)[None, None])
    refuses(ValueError, "additive masks are <= 0", batch, lambda: make(Mesh(1), None, batch))
    refuses(
        ValueError,
        "^_prepare_manual_cp_batch: `attention_mask`",
        batch,
        lambda: gemma4._prepare_manual_cp_batch(Mesh(1), None, batch, None),
    )
    with strict():
        make(Mesh(1), None, batch)
    assert batch["padding_mask"].tolist() == [[True] * 4]


def test_prepare_returns_its_six_answers():
    batch = rows_of(rows=2, attention_mask=torch.ones(2, 3))
    mask = torch.ones(2, 3)
    key, length, labels, positions, axis, left = gemma4._prepare_manual_cp_batch(
        Mesh(2), None, batch, mask
    )
    assert (key, length, axis) == ("input_ids", 3, 1)
    assert labels is batch["labels"]
    assert positions is batch["position_ids"]
    assert left is mask
    assert list(batch) == ["input_ids", "labels", "padding_mask", "position_ids"]


def test_prepare_lets_the_loss_mask_stand_in_for_labels():
    batch = {"inputs_embeds": torch.ones(1, 3, 2)}
    mask = torch.ones(1, 3)
    key, _, labels, _, _, left = gemma4._prepare_manual_cp_batch(Mesh(2), None, batch, mask)
    assert key == "inputs_embeds"
    assert labels is mask
    assert left is None


def test_documents_are_made_up_once():
    batch = {"input_ids": torch.ones(2, 3)}
    assert gemma4._synthesize_single_document_seq_ids(batch, "input_ids", 3) is None
    made = batch["_packed_seq_ids"]
    assert made.tolist() == [[1, 1, 1]] * 2
    assert made.dtype == torch.int64
    gemma4._synthesize_single_document_seq_ids(batch, "input_ids", 3)
    assert batch["_packed_seq_ids"] is made


def test_padding_goes_through_the_replaceable_helpers(monkeypatch):
    calls = []
    tensor, positions = gemma4._pad_tensor_seq_dim_, gemma4._pad_position_ids_seq_dim_

    def pad(given, axis, count, value=0):
        calls.append((axis, count, value))
        return tensor(given, axis, count, value)

    def count_on(given, axis, count):
        calls.append("positions")
        return positions(given, axis, count)

    monkeypatch.setattr(gemma4, "_pad_tensor_seq_dim_", pad)
    monkeypatch.setattr(gemma4, "_pad_position_ids_seq_dim_", count_on)
    make(Mesh(2), None, example(), padding_token_id=5)
    assert (1, 1, 5) in calls
    assert (1, 1, -100) in calls
    assert "positions" in calls


def test_a_length_that_does_not_split_is_refused(monkeypatch):
    monkeypatch.setattr(gemma4, "_pad_tensor_seq_dim_", lambda t, *_: t)
    batch = example()
    refuses(ValueError, "divisible by cp_size", batch, lambda: make(Mesh(2), None, batch))


def test_is_reached_from_the_dispatcher():
    batch = example(_cp_make_batch_fn=make)
    mesh = DeviceMesh(cp=2)
    factory, out = cp_utils.make_cp_batch_and_ctx(mesh, batch, padding_token_id=9)
    assert factory is contextlib.nullcontext
    assert out is batch
    assert batch["input_ids"].tolist() == [[1, 2]]


def test_pad_helper_has_a_default_value():
    tensor = torch.tensor([[1, 2]])
    assert gemma4._pad_tensor_seq_dim_(tensor, 1, 1).tolist() == [[1, 2, 0]]
    assert gemma4._pad_tensor_seq_dim_(tensor, 1, 0) is tensor
    assert gemma4._pad_position_ids_seq_dim_(tensor, 1, 0) is tensor


BAD = {
    "both": (AssertionError, "exactly one of", {"inputs_embeds": torch.ones(1, 3, 1)}),
    "neither": (AssertionError, "exactly one of", {"input_ids": None}),
    "no labels": (KeyError, "labels", {"labels": None}),
    "short labels": (ValueError, "labels", {"labels": torch.ones(1, 2).long()}),
    "mask": (ValueError, "attention_mask", {"attention_mask": torch.ones(1, 2)}),
    "short documents": (
        ValueError,
        "_packed_seq_ids",
        {"_packed_seq_ids": torch.ones(1, 2).long()},
    ),
    "other rows": (
        ValueError,
        "mm_token_type_ids",
        {"mm_token_type_ids": torch.ones(2, 3).long()},
    ),
    "short extra": (
        ValueError,
        "extra",
        {"extra": torch.ones(1, 2), "_cp_metadata_seq_dims": {"extra": 1}},
    ),
    "axis of extra": (
        ValueError,
        "axis 4",
        {"extra": torch.ones(1, 3), "_cp_metadata_seq_dims": {"extra": 4}},
    ),
    "extra no tensor": (
        TypeError,
        "extra",
        {"extra": 3, "_cp_metadata_seq_dims": {"extra": 1}},
    ),
    "axes no map": (TypeError, "map", {"_cp_metadata_seq_dims": [1]}),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    error, message, change = BAD[name]
    batch = example(attention_mask=None)
    batch.update(change)
    refuses(error, message, batch, lambda: make(Mesh(2), None, batch))


def test_refuses_ranks_outside_the_mesh():
    batch = example()
    refuses(ValueError, "rank", batch, lambda: make(Mesh(2, 5), None, batch))
    refuses(ValueError, "0 ranks", batch, lambda: make(Mesh(0), None, batch))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2, 3), (2, 3, 3), (2, 2, 2, 3)])
def test_positions_are_cut_on_their_last_axis(shape):
    planes = torch.arange(math.prod(shape)).view(shape)
    batch = rows_of(rows=2, length=3, position_ids=planes)
    make(Mesh(2, 1), None, batch)
    assert torch.equal(batch["position_ids"][..., :1], planes[..., 2:])
    assert torch.equal(batch["position_ids"][..., 1:], planes[..., 2:] + 1)
