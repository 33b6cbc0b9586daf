"""DeepSeek V4: contiguous rows, the dense mask, gathers."""

import contextlib
import math
import types
from decimal import Decimal
from fractions import Fraction

import batch_oracle as oracle
import pytest
import torch
from compat_support import BareMesh, Mesh, dsv4, refuses, row_batch

from longspan.compat.nemo import strict

make = dsv4.make_dsv4_contiguous_shard_cp_batch_and_ctx


def test_each_rank_keeps_one_run_of_each_row(group_of):
    asked = group_of(2, 1)
    mesh = Mesh(2)
    batch = row_batch(rows=2, length=5, extra="x")
    factory, out = make(mesh, None, batch, padding_token_id=9)
    assert factory is contextlib.nullcontext
    assert out is batch
    assert list(batch) == [*("input_ids", "labels", "extra", "position_ids", "_dsv4_cp_group")]
    assert batch["input_ids"].tolist() == [[5, 9, 9, 9], [105, 9, 9, 9]]
    assert batch["labels"].tolist() == [[1005] + [-100] * 3, [1105] + [-100] * 3]
    assert batch["position_ids"].tolist() == [[4, 5, 6, 7]] * 2
    assert batch["_dsv4_cp_group"] is mesh.group
    assert set(asked) == {mesh.group}
    assert all(t.is_contiguous() for t in batch.values() if torch.is_tensor(t))


def test_rank_comes_from_the_mesh_or_is_zero_without_a_runtime():
    for mesh, first in ((Mesh(2, rank=1), 3), (BareMesh(2), 1)):
        batch = row_batch(length=4)
        make(mesh, None, batch)
        assert batch["input_ids"][0, 0] == first


def test_one_rank_of_a_real_group(world_of_one):
    mesh = BareMesh(1)
    mesh.get_group = lambda: world_of_one
    batch = row_batch(length=4)
    make(mesh, None, batch)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch["_dsv4_cp_group"] is world_of_one


@pytest.mark.parametrize(
    ("multiple", "length"), [(None, 4), (0, 4), (1, 4), (2, 4), (3, 6), (8, 16)]
)
def test_pad_multiple(multiple, length):
    batch = row_batch(length=3)
    make(Mesh(2), None, batch, pad_multiple=multiple)
    assert batch["input_ids"].shape[1] * 2 == length


def test_the_attention_mask_becomes_a_mask_of_pads():
    batch = row_batch(attention_mask=torch.tensor([[1, 5, 0]]))
    make(Mesh(1), None, batch)
    assert "attention_mask" not in batch
    assert batch["padding_mask"].tolist() == [[False, False, True, True]]
    kept = torch.tensor([[True, False, False]])
    batch = row_batch(attention_mask=torch.ones(1, 3), padding_mask=kept)
    make(Mesh(1), None, batch)
    assert batch["padding_mask"].tolist() == [[True, False, False, True]]


def test_no_mask_of_pads_is_made_up():
    batch = row_batch()
    make(Mesh(1), None, batch)
    assert "padding_mask" not in batch


def test_square_integer_masks_are_refused_and_strict_reads_them_as_additive():
    mask = torch.eye(3).long()[None, None]
    batch = row_batch(attention_mask=mask)
    refuses(ValueError, "use bool", batch, lambda: make(Mesh(1), None, batch))
    with strict():
        make(Mesh(1), None, batch)
    assert batch["padding_mask"].tolist() == [[True] * 4]


def test_additive_masks_above_zero_are_refused_and_strict_reads_them_as_pads():
    for mask in (torch.eye(3)[None, None], torch.ones(1, 2, 3, 3)):
        batch = row_batch(attention_mask=mask)
        refuses(ValueError, "additive masks are <= 0", batch, lambda b=batch: make(Mesh(1), 0, b))
        with strict():
            make(Mesh(1), None, batch)
        assert batch["padding_mask"].tolist() == [[True] * 4]
    batch = row_batch(attention_mask=torch.full((1, 1, 3, 3), -1.0).triu(1))
    make(Mesh(1), None, batch)
    assert batch["padding_mask"].tolist() == [[False, False, False, True]]


def test_one_row_of_positions_stays_one_row_and_planes_count_on():
    batch = row_batch(rows=2, length=3, position_ids=torch.tensor([[7, 8, 9]]))
    make(Mesh(2, 1), None, batch)
    assert batch["position_ids"].tolist() == [[9, 10]]
    planes = torch.stack([torch.arange(3), torch.full((3,), 5)])[:, None]
    batch = row_batch(position_ids=planes)
    make(Mesh(2, 1), None, batch)
    assert batch["position_ids"].tolist() == [[[2, 3]], [[5, 6]]]


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3), (3, 2, 3), (2, 3, 3), (2, 2, 2, 3)])
def test_positions_are_cut_on_their_last_axis(shape):
    planes = torch.arange(math.prod(shape)).view(shape)
    batch = row_batch(rows=2, length=3, position_ids=planes)
    make(Mesh(2, 1), None, batch)
    assert torch.equal(batch["position_ids"][..., :1], planes[..., 2:])
    assert torch.equal(batch["position_ids"][..., 1:], planes[..., 2:] + 1)


def test_a_loss_mask_stands_in_for_labels_or_is_sharded():
    mask = torch.ones(1, 3)
    batch = row_batch()
    make(Mesh(2, 1), None, batch, loss_mask=mask)
    assert batch["loss_mask"].tolist() == [[1, 0]]
    batch = row_batch()
    del batch["labels"]
    make(Mesh(2, 1), None, batch, loss_mask=mask)
    assert batch["labels"].tolist() == [[1, -100]]
    assert "loss_mask" not in batch
    batch = row_batch()
    del batch["labels"]
    refuses(KeyError, "labels", batch, lambda: make(Mesh(2), None, batch))


def test_embeddings_keep_their_gradient():
    embeds = torch.randn(1, 3, 2, requires_grad=True)
    batch = {"inputs_embeds": embeds, "labels": torch.ones(1, 3).long()}
    make(Mesh(2, 1), None, batch)
    batch["inputs_embeds"].sum().backward()
    assert embeds.grad[0, :, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("change", [{"cu_seqlens": None}, {"qkv_format": "thd"}])
def test_packed_sequences_are_refused(change):
    batch = row_batch(**change)
    refuses(
        NotImplementedError,
        "packed sequences",
        batch,
        lambda: make(Mesh(2), None, batch),
    )
    make(Mesh(2), None, row_batch(seq_lens=torch.tensor([[3]])))


BAD = {
    "both": (AssertionError, "exactly one of", {"inputs_embeds": torch.ones(1, 3, 1)}),
    "neither": (AssertionError, "exactly one of", {"input_ids": None}),
    "short labels": (ValueError, "labels", {"labels": torch.ones(1, 2)}),
    "mask": (ValueError, "padding_mask", {"attention_mask": torch.ones(1, 2)}),
    "mask of rank 3": (ValueError, "mask", {"attention_mask": torch.ones(1, 3, 3)}),
    "mask no tensor": (TypeError, "attention_mask", {"attention_mask": "causal"}),
    "positions": (ValueError, "position_ids", {"position_ids": torch.ones(2, 3)}),
    "empty": (ValueError, "empty", {"input_ids": torch.ones(0, 3).long()}),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    error, message, change = BAD[name]
    batch = row_batch()
    batch.update(change)
    refuses(error, message, batch, lambda: make(Mesh(2), None, batch))


def test_refuses_arguments():
    batch = row_batch()
    for keywords, name in (
        ({"pad_multiple": 2.5}, "pad_multiple"),
        ({"padding_token_id": None}, "padding_token_id"),
    ):
        refuses(TypeError, name, batch, lambda k=keywords: make(Mesh(2), 0, batch, **k))
    refuses(ValueError, "0 ranks", batch, lambda: make(Mesh(0), None, batch))
    refuses(ValueError, "rank", batch, lambda: make(Mesh(2, 2), None, batch))


# Multiples.


@pytest.mark.parametrize(
    ("ratios", "multiple"),
    [
        *((None, 1), ([], 1), ([0, 0], 1), ([2], 2), ([4], 8), ([128], 128)),
        *(([0, 4, 128], 128), ([2, 3], 6), ([6, 4], 24)),
    ],
)
def test_worked_multiples(ratios, multiple):
    config = types.SimpleNamespace(compress_ratios=ratios)
    model = types.SimpleNamespace(config=config)
    assert dsv4.dsv4_cp_local_seq_multiple(config) == multiple
    assert dsv4.dsv4_cp_local_seq_multiple(model) == multiple
    assert dsv4.dsv4_cp_local_seq_multiple(object()) == 1


@pytest.mark.parametrize("rule", [contextlib.nullcontext, strict])
def test_ratios_are_integers_of_any_type_of_numbers(rule):
    def multiple(*ratios):
        with rule():
            return dsv4.dsv4_cp_local_seq_multiple(types.SimpleNamespace(compress_ratios=ratios))

    for four in (4, 4.0, torch.tensor(4), torch.tensor([4.0]), Decimal(4), Fraction(8, 2)):
        assert multiple(four) == 8
        assert multiple(four, 6) == 24
    assert multiple(4.0, 128.0) == 128
    for nothing in (0, -4, 0.0, -4.0, False, True, torch.tensor(0)):
        assert multiple(nothing) == 1
        assert multiple(nothing, 6) == 6
    for bad in ("4", 4.5, None, [4], math.nan, math.inf, 4j, torch.ones(2), 2**70):
        with pytest.raises(ValueError, match="dsv4_cp_local_seq_multiple: `compress_ratios` holds"):
            multiple(6, bad)
    table = types.SimpleNamespace(compress_ratios=torch.tensor([0, 4, 128]))
    assert dsv4.dsv4_cp_local_seq_multiple(table) == 128


def test_ratios_are_a_list():
    multiple = dsv4.dsv4_cp_local_seq_multiple
    for bad in (4, "44"):
        with pytest.raises(TypeError, match="dsv4_cp_local_seq_multiple: `compress_ratios`"):
            multiple(types.SimpleNamespace(compress_ratios=bad))


def test_lcm():
    assert dsv4._lcm(4, 6) == 12
    assert dsv4._lcm(-4, 6) == 12
    assert dsv4._lcm(0, 6) == 6
    assert dsv4._lcm(5, 0) == 5
    assert dsv4._lcm(0, 0) == 0


# Padding helpers.


def test_pad_helpers_are_no_ops_or_append():
    tensor = torch.tensor([[1, 2]], dtype=torch.int32)
    for count in (0, -3):
        assert dsv4._pad_tensor_seq_dim_(tensor, 1, count, 5) is tensor
        assert dsv4._pad_position_ids_seq_dim_(tensor, 1, count) is tensor
    padded = dsv4._pad_tensor_seq_dim_(tensor, 1, 2, 5)
    assert padded.tolist() == [[1, 2, 5, 5]]
    assert padded.dtype == torch.int32
    more = dsv4._pad_position_ids_seq_dim_(tensor, -1, 2)
    assert more.tolist() == [[1, 2, 3, 4]]
    assert more.dtype == torch.int32
    with pytest.raises(ValueError, match="axis 2"):
        dsv4._pad_tensor_seq_dim_(tensor, 2, 1, 0)
    with pytest.raises(ValueError, match="nothing to count on"):
        dsv4._pad_position_ids_seq_dim_(tensor[:, :0], 1, 1)
    with pytest.raises(TypeError, match="list"):
        dsv4._pad_tensor_seq_dim_([1], 0, 1, 0)


# Gathers and ranks.


def test_group_questions(group_of):
    for group in (None, "group"):
        assert not dsv4.dsv4_cp_enabled(group)
        assert dsv4.dsv4_cp_rank(group) == 0
        assert dsv4.dsv4_cp_size(group) == 1
    asked = group_of(3, 2)
    assert dsv4.dsv4_cp_enabled("group")
    assert dsv4.dsv4_cp_rank("group") == 2
    assert dsv4.dsv4_cp_size("group") == 3
    assert set(asked) == {"group"}
    group_of(1, 0)
    assert not dsv4.dsv4_cp_enabled("group")


def test_dist_is_replaceable(monkeypatch):
    fake = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda *, group: 1,
        get_world_size=lambda *, group: 2,
    )
    monkeypatch.setattr(dsv4, "dist", fake)
    assert dsv4.dsv4_cp_rank("group") == 1
    batch = row_batch(length=4)
    make(Mesh(2), None, batch)
    assert batch["input_ids"].tolist() == [[3, 4]]


def test_gathers_are_the_same_object_when_off(group_of):
    tensor = torch.ones(2)
    assert dsv4.dsv4_cp_all_gather(tensor, dim=0, cp_group=None) is tensor
    gather = dsv4.dsv4_cp_all_gather_metadata
    assert gather(tensor, dim=0, cp_group=None) is tensor
    group_of(2, 0)
    assert gather(None, dim=0, cp_group="group") is None
    for function in (gather, dsv4.dsv4_cp_all_gather):
        with pytest.raises(ValueError, match="no process group named 'group'"):
            function(tensor, dim=0, cp_group="group")


def test_gathers_go_through_what_users_put_in_place_of_torchs(group_of, monkeypatch):
    group_of(2, 0)

    def activations(tensor, *, group):
        return [tensor, tensor * 2]

    def metadata(parts, tensor, *, group):
        for rank, part in enumerate(parts):
            part.copy_(tensor if rank == 0 else ~tensor)

    monkeypatch.setattr(torch.distributed.nn.functional, "all_gather", activations)
    monkeypatch.setattr(torch.distributed, "all_gather", metadata)
    out = dsv4.dsv4_cp_all_gather(torch.ones(1, 2), dim=1, cp_group="group")
    assert out.tolist() == [[1, 1, 2, 2]]
    pads = torch.tensor([[True, False]])
    out = dsv4.dsv4_cp_all_gather_metadata(pads, dim=1, cp_group="group")
    assert out.tolist() == [[True, False, False, True]]
    assert build(padding_mask=pads)[0, 0, 1].eq(0).tolist() == [False, True, False, False]


# The dense mask.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_dense_mask_is_the_definition(dtype, window, padded):
    positions = torch.tensor([[2, 3, 4], [0, 1, 9]])
    pads = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool() if padded else None
    mask = dsv4.build_dsv4_cp_causal_padding_mask(
        position_ids=positions,
        key_len=5,
        dtype=dtype,
        device="cpu",
        cp_group=None,
        padding_mask=pads,
        sliding_window=window,
    )
    expected = oracle.dense_causal_mask(positions, 5, dtype, pads, window)
    assert mask.shape == (2, 1, 3, 5)
    assert mask.dtype == dtype
    assert torch.equal(mask, expected)


def build(**change):
    arguments = {
        "position_ids": torch.arange(2)[None],
        "key_len": 4,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "cp_group": "group",
    }
    return dsv4.build_dsv4_cp_causal_padding_mask(**{**arguments, **change})


def test_dense_mask_gives_flat_positions_a_row():
    assert build(position_ids=torch.arange(2)).shape == (1, 1, 2, 4)


def test_dense_mask_needs_ranks_only_for_the_pads(group_of):
    group_of(2, 0)
    assert build().shape == (1, 1, 2, 4)
    with pytest.raises(ValueError, match="no process group named 'group'"):
        build(padding_mask=torch.zeros(1, 2).bool())


def test_dense_mask_refuses():
    with pytest.raises(ValueError, match="padding_mask"):
        build(padding_mask=torch.zeros(1, 3).bool())
    with pytest.raises(ValueError, match="padding_mask"):
        build(padding_mask=torch.zeros(2, 4).bool())
    with pytest.raises(ValueError, match="position_ids"):
        build(position_ids=torch.ones(3, 1, 2))
    with pytest.raises(ValueError, match="floating"):
        build(dtype=torch.int64)
    with pytest.raises(ValueError, match="key_len"):
        build(key_len=-1)
    with pytest.raises(TypeError, match="sliding_window"):
        build(sliding_window=1.5)
