"""make_cp_batch_and_ctx: dispatch, normalisation, padding, buffers."""

import contextlib

import pytest
import torch
from compat_support import (
    DeviceMesh,
    Mesh,
    NamelessMesh,
    cp_utils,
    refuses,
    row_batch,
)

from longspan.compat.nemo import strict

make = cp_utils.make_cp_batch_and_ctx


@pytest.fixture
def seen(monkeypatch):
    """Replaces the two factories and keeps what they were given."""
    seen = {}

    def context(**keywords):
        seen.update(keywords)
        return "cp context"

    def train(*args):
        seen["train"] = args
        return "factory"

    monkeypatch.setattr(cp_utils, "create_context_parallel_ctx", context)
    monkeypatch.setattr(cp_utils, "get_train_context", train)
    return seen


# Dispatch.


@pytest.mark.parametrize(
    "mesh",
    [None, NamelessMesh(), DeviceMesh(tp=4), DeviceMesh(cp=1, tp=2), DeviceMesh(cp=0)],
    ids=["no mesh", "no names", "no cp axis", "one rank", "zero"],
)
def test_one_rank_returns_the_batch_untouched(mesh):
    mask = torch.ones(1, 3)
    batch = row_batch(attention_mask=mask, _cp_make_batch_fn=lambda: None)
    before = {k: v for k, v in batch.items() if k != "_cp_make_batch_fn"}
    factory, out = make(mesh, batch, loss_mask=torch.ones(1, 3))
    assert factory is contextlib.nullcontext
    assert out is batch
    assert list(batch) == list(before)
    assert all(batch[key] is before[key] for key in before)


def test_models_own_function_gets_the_batch_and_its_answer_is_returned():
    def own(cp_mesh, tp_mesh, batch, *, loss_mask, padding_token_id):
        return cp_mesh, tp_mesh, batch, loss_mask, padding_token_id

    mesh = DeviceMesh(cp=2, tp=2)
    batch = row_batch(_cp_make_batch_fn=own)
    answer = make(mesh, batch, loss_mask="mask", padding_token_id=7, use_te=True)
    assert answer == (mesh["cp"], mesh["tp"], batch, "mask", 7)
    assert answer[2] is batch
    assert "_cp_make_batch_fn" not in batch


def test_te_goes_through_the_replaceable_function(monkeypatch):
    calls = []

    def fake(*args, **keywords):
        calls.append((args, keywords))
        return "made"

    monkeypatch.setattr(cp_utils, "make_cp_batch_for_te", fake)
    mesh = DeviceMesh(cp=2)
    batch = row_batch()
    answer = make(
        mesh,
        batch,
        use_te=True,
        padding_token_id=5,
        num_chunks=3,
        seq_lens_padding_value=-7,
    )
    assert answer == (contextlib.nullcontext, "made")
    assert answer[0] is contextlib.nullcontext
    ((args, keywords),) = calls
    assert args[0] is mesh["cp"]
    assert args[1] is batch
    assert keywords == {
        "qkv_format": "thd",
        "padding_token_id": 5,
        "num_chunks": 3,
        "seq_lens_padding_value": -7,
    }


def test_te_gets_the_callers_batch_also_with_a_loss_mask(monkeypatch):
    batches = []

    def fake(cp_mesh, batch, **_):
        batches.append((batch, list(batch)))
        return "made"

    monkeypatch.setattr(cp_utils, "make_cp_batch_for_te", fake)
    batch = row_batch()
    keys = list(batch)
    for mask in (torch.ones(1, 3), torch.ones(7), "no tensor"):
        assert make(DeviceMesh(cp=2), batch, mask, use_te=True)[1] == "made"
    assert all(given is batch and seen == keys for given, seen in batches)


# Normalisation and padding.


def test_pads_every_buffer_and_writes_it_back(seen):
    batch = row_batch(
        rows=2,
        length=3,
        attention_mask=torch.ones(2, 3, dtype=torch.long),
        padding_mask=torch.zeros(2, 3, dtype=torch.bool),
    )
    ids = batch["input_ids"]
    loss_mask = torch.ones(2, 3)
    factory, out = make(DeviceMesh(cp=2), batch, loss_mask, padding_token_id=99)
    assert factory == "factory"
    assert out is batch
    assert list(batch) == [
        "input_ids",
        "labels",
        "padding_mask",
        "position_ids",
        "loss_mask",
    ]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [101, 102, 103, 0]]
    assert batch["labels"][:, 3].tolist() == [-100, -100]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]] * 2
    assert batch["padding_mask"].tolist() == [[False] * 3 + [True]] * 2
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0]] * 2
    assert ids.shape == (2, 3)
    names = ["input_ids", "labels", "position_ids", "loss_mask", "padding_mask"]
    assert all(
        buffer is batch[name] for buffer, name in zip(seen["cp_buffers"], names, strict=True)
    )
    assert seen["cp_seq_dims"] == [1, 1, 1, 1, 1]
    assert seen["cp_rotate_method"] == "allgather"
    assert {id(t) for t in seen["cp_no_restore_buffers"]} == {
        id(batch[name]) for name in names if name != "position_ids"
    }
    assert seen["train"] == (False, False, "cp context")


def test_a_multiple_keeps_the_original_objects(seen):
    batch = row_batch(length=8, position_ids=torch.arange(8)[None])
    before = dict(batch)
    loss_mask = torch.ones(1, 8)
    make(DeviceMesh(cp=2), batch, loss_mask)
    assert all(batch[key] is before[key] for key in before)
    assert batch["loss_mask"] is loss_mask
    assert seen["cp_buffers"][0] is before["input_ids"]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 12, 13, 56])
def test_length_becomes_the_next_multiple_of_twice_the_ranks(seen, ranks, length):
    batch = row_batch(length=length)
    make(DeviceMesh(cp=ranks), batch)
    padded = batch["input_ids"].shape[1]
    assert padded % (2 * ranks) == 0
    assert 0 <= padded - length < 2 * ranks
    assert batch["labels"].shape == batch["position_ids"].shape == (1, padded)


def test_floating_buffers_get_zeros_and_keep_their_gradient(seen):
    embeds = torch.randn(1, 3, 4, requires_grad=True)
    batch = {"inputs_embeds": embeds, "labels": torch.ones(1, 3)}
    make(DeviceMesh(cp=2), batch)
    assert batch["labels"].tolist() == [[1, 1, 1, 0]]
    assert batch["inputs_embeds"][0, 3].tolist() == [0] * 4
    batch["inputs_embeds"].sum().backward()
    assert torch.equal(embeds.grad, torch.ones_like(embeds))


def test_one_row_of_positions_is_expanded_and_planes_are_not(seen):
    batch = row_batch(rows=2, length=4, position_ids=torch.arange(4)[None] + 5)
    make(DeviceMesh(cp=2), batch)
    assert batch["position_ids"].tolist() == [[5, 6, 7, 8]] * 2
    assert batch["position_ids"].is_contiguous()

    planes = torch.arange(9).view(3, 1, 3)
    batch = row_batch(position_ids=planes)
    make(DeviceMesh(cp=2), batch)
    assert seen["cp_seq_dims"] == [1, 1, 2]
    assert batch["position_ids"].tolist() == [
        [[0, 1, 2, 0]],
        [[3, 4, 5, 0]],
        [[6, 7, 8, 0]],
    ]


def test_other_tensors_are_not_touched(seen):
    extra = torch.ones(1, 3)
    batch = row_batch(_packed_seq_ids=extra, note="x")
    make(DeviceMesh(cp=2), batch)
    assert batch["_packed_seq_ids"] is extra
    assert batch["note"] == "x"


# The loss mask.


def test_strict_loses_the_loss_mask_and_default_returns_it(seen):
    batch = row_batch()
    with strict():
        make(DeviceMesh(cp=2), batch, torch.ones(1, 3))
    assert "loss_mask" not in batch
    assert seen["cp_buffers"][3].tolist() == [[1, 1, 1, 0]]
    batch = row_batch()
    make(DeviceMesh(cp=2), batch, torch.ones(1, 3, dtype=torch.bool))
    assert batch["loss_mask"].tolist() == [[True, True, True, False]]


# The pads of the attention mask.


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 1, 0]]),
        torch.tensor([[True, True, False]]),
        torch.tensor([[2.0, 1.0, 0.0]]),
        torch.tensor([True, True, False]).diag()[None, None],
        torch.tensor([0.0, 0.0, -1.0]).diag()[None, None],
    ],
    ids=["numbers", "bool", "float", "square bool", "square additive"],
)
def test_pads_of_the_attention_mask_survive(seen, mask):
    batch = row_batch(attention_mask=mask)
    make(DeviceMesh(cp=2), batch)
    assert batch["padding_mask"].tolist() == [[False, False, True, True]]
    assert "attention_mask" not in batch
    batch = row_batch(attention_mask=mask)
    with strict():
        make(DeviceMesh(cp=2), batch)
    assert set(batch) == {"input_ids", "labels", "position_ids"}


def test_a_mask_without_pads_adds_nothing(seen):
    batch = row_batch(attention_mask=torch.ones(1, 3))
    make(DeviceMesh(cp=2), batch)
    assert set(batch) == {"input_ids", "labels", "position_ids"}


@pytest.mark.parametrize("mask", [None, {"full_attention": 1}, "causal"])
def test_masks_that_are_no_tensors_are_dropped(seen, mask):
    batch = row_batch(attention_mask=mask)
    make(DeviceMesh(cp=2), batch)
    assert set(batch) == {"input_ids", "labels", "position_ids"}


def test_a_given_padding_mask_wins_over_the_attention_mask(seen):
    given = torch.zeros(1, 4, dtype=torch.bool)
    batch = row_batch(length=4, padding_mask=given, attention_mask=torch.zeros(9, 9, 9))
    make(DeviceMesh(cp=2), batch)
    assert batch["padding_mask"] is given


# Refusals.

BAD = {
    "both primaries": (
        AssertionError,
        "exactly one of.*inputs_embeds and input_ids",
        {"inputs_embeds": torch.ones(1, 3, 2)},
    ),
    "no primary": (AssertionError, "exactly one of.*neither", {"input_ids": None}),
    "ids of rank 1": (ValueError, r"input_ids.*\[3\]", {"input_ids": torch.ones(3)}),
    "ids of rank 3": (ValueError, "rows, tokens", {"input_ids": torch.ones(1, 3, 1)}),
    "float ids": (ValueError, "ids are integers", {"input_ids": torch.ones(1, 3)}),
    "ids no tensor": (TypeError, "input_ids. is a list", {"input_ids": [[1, 2, 3]]}),
    "no rows": (ValueError, "empty", {"input_ids": torch.ones(0, 3).long()}),
    "no tokens": (ValueError, "empty", {"input_ids": torch.ones(1, 0).long()}),
    "short labels": (ValueError, r"labels.*\[1, 2\]", {"labels": torch.ones(1, 2)}),
    "flat labels": (ValueError, "labels", {"labels": torch.ones(3)}),
    "no labels": (TypeError, "labels", {"labels": None}),
    "short positions": (
        ValueError,
        r"position_ids.*\[1, 2\]",
        {"position_ids": torch.ones(1, 2)},
    ),
    "flat positions": (
        ValueError,
        r"position_ids.*\[2\]",
        {"position_ids": torch.arange(2)},
    ),
    "short padding": (
        ValueError,
        "padding_mask",
        {"padding_mask": torch.ones(1, 2).bool()},
    ),
    "square integers": (
        ValueError,
        "use bool",
        {"attention_mask": torch.ones(1, 1, 3, 3).long()},
    ),
    "square of ones": (
        ValueError,
        "additive masks are <= 0",
        {"attention_mask": torch.ones(1, 1, 3, 3).tril()},
    ),
    "square of complex": (
        ValueError,
        "use bool",
        {"attention_mask": torch.ones(1, 1, 3, 3, dtype=torch.complex64)},
    ),
    "long mask": (ValueError, "attention_mask", {"attention_mask": torch.ones(1, 5)}),
    "not square": (
        ValueError,
        "square",
        {"attention_mask": torch.ones(1, 1, 1, 3).bool()},
    ),
    "narrow labels": (
        ValueError,
        "cannot hold the pad value -100",
        {"labels": torch.ones(1, 3, dtype=torch.uint8)},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    error, message, change = BAD[name]
    batch = row_batch(_cp_make_batch_fn=None, attention_mask=torch.ones(1, 3))
    batch.update(change)
    refuses(error, message, batch, lambda: make(DeviceMesh(cp=2), batch))


def test_refuses_missing_labels_even_with_a_loss_mask():
    batch = row_batch()
    del batch["labels"]
    mask = torch.ones(1, 3)
    refuses(KeyError, "labels", batch, lambda: make(DeviceMesh(cp=2), batch, mask))


def test_refuses_a_loss_mask_of_another_length():
    batch = row_batch(attention_mask=torch.tensor([[1, 0, 0]]))
    mask = torch.ones(1, 2)
    refuses(ValueError, "loss_mask", batch, lambda: make(DeviceMesh(cp=2), batch, mask))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_strict_accepts_squares_of_ones(seen, dtype):
    batch = row_batch(attention_mask=torch.ones(1, 1, 3, 3, dtype=dtype))
    with strict():
        make(DeviceMesh(cp=2), batch)
    assert set(batch) == {"input_ids", "labels", "position_ids"}


def test_the_mask_is_read_once(seen, monkeypatch):
    reads = []
    tolist, truth = torch.Tensor.tolist, torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append("list") or tolist(t))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda t: reads.append("bool") or truth(t))
    make(DeviceMesh(cp=2), row_batch(attention_mask=torch.zeros(1, 1, 3, 3)))
    assert reads == ["list"]


def test_refuses_a_batch_that_is_no_map():
    with pytest.raises(TypeError, match="pass a dict"):
        make(None, [1, 2])


def test_an_error_of_the_models_own_function_leaves_the_batch():
    def own(cp_mesh, tp_mesh, batch, **_):
        batch.clear()
        raise RuntimeError("own")

    batch = row_batch(_cp_make_batch_fn=own)
    refuses(RuntimeError, "own", batch, lambda: make(DeviceMesh(cp=2), batch))


# The real context.


def test_context_construction_checks_its_arguments():
    create = cp_utils.create_context_parallel_ctx
    a, b = torch.ones(1, 4), torch.ones(1, 4)
    with pytest.raises(ValueError, match="2 buffers but 1"):
        create(Mesh(2), [a, b], [1], set())
    with pytest.raises(ValueError, match="not one of the buffers"):
        create(Mesh(2), [a], [1], {b})
    with pytest.raises(ValueError, match="axis 3"):
        create(Mesh(2), [a], [3], set())
    with pytest.raises(NotImplementedError, match="'ring'"):
        create(Mesh(2), [a], [1], {a}, "ring")
    with create(Mesh(1), [a], [1], {a}, "alltoall"):
        pass


def test_build_position_ids():
    batch = row_batch(rows=2)
    out = cp_utils._build_position_ids(batch, torch.device("cpu"))
    assert out is batch
    assert batch["position_ids"].tolist() == [[0, 1, 2]]
    kept = batch["position_ids"]
    assert cp_utils._build_position_ids(batch, "cpu")["position_ids"] is kept
    with pytest.raises(KeyError, match="input_ids"):
        cp_utils._build_position_ids({}, "cpu")
    with pytest.raises(ValueError, match=r"\[3\]"):
        cp_utils._build_position_ids({"input_ids": torch.ones(3)}, "cpu")
