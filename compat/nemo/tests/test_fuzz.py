"""Whatever comes: a result, or one clear refusal and an untouched batch."""

import pytest
import torch
from compat_support import (
    DeviceMesh,
    Mesh,
    cp_utils,
    dsv4,
    gemma4,
    glm,
    snapshot,
    thd_utils,
    unchanged,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.compat.nemo import strict

REFUSALS = (ValueError, KeyError, AssertionError, TypeError, NotImplementedError)

DTYPES = [
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.bfloat16,
    torch.complex64,
]


@st.composite
def tensors(draw):
    """Any small tensor: rank 0 to 4, strided and zero-stride ones included."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.randint(-1, 4, shape).to(draw(st.sampled_from(DTYPES)))
    form = draw(st.sampled_from(["plain", "transposed", "expanded", "sliced"]))
    if form == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1)
    if form == "expanded" and tensor.dim() >= 1 and tensor.shape[0] > 0:
        return tensor[:1].expand(2, *tensor.shape[1:])
    if form == "sliced" and tensor.dim() >= 1:
        return tensor[..., ::2]
    return tensor


@st.composite
def likely(draw):
    """A tensor of a shape that could be right."""
    shape = draw(st.sampled_from([(2, 4), (1, 4), (2, 4, 3), (2, 1, 4, 4), (3, 2, 4)]))
    dtype = draw(st.sampled_from(DTYPES[:5]))
    return torch.randint(0, 3, shape).to(dtype)


anything = st.one_of(tensors(), likely(), st.none(), st.just("text"), st.just(7), st.just({}))

KEYS = [
    "input_ids",
    "inputs_embeds",
    "labels",
    "position_ids",
    "attention_mask",
    "padding_mask",
    "loss_mask",
    "seq_lens",
    "seq_lens_padded",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "_packed_seq_ids",
    "mm_token_type_ids",
    "per_layer_inputs",
    "_cp_metadata_seq_dims",
    "_cp_metadata_pad_values",
    "qkv_format",
]


@st.composite
def batches(draw):
    """A right batch in which up to three entries are anything, or gone."""
    batch = {
        "input_ids": torch.randint(0, 5, (2, 4)),
        "labels": torch.randint(0, 5, (2, 4)),
        "position_ids": torch.arange(4).repeat(2, 1),
        "seq_lens": torch.tensor([[2, 1], [3, -1000]]),
        "seq_lens_padded": torch.tensor([[2, 2], [4, -1000]]),
    }
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=3)):
        if draw(st.integers(0, 3)) == 0:
            batch.pop(key, None)
        else:
            batch[key] = draw(anything)
    return batch


@st.composite
def length_tables(draw):
    """Lengths of any size and sign, and slots that may disagree."""
    numbers = st.one_of(
        st.integers(-3, 6), st.just(-1000), st.sampled_from([2**31, 2**62, -(2**62)])
    )
    rows = draw(st.integers(1, 3))
    width = draw(st.integers(0, 3))
    table = [[draw(numbers) for _ in range(width)] for _ in range(rows)]
    return torch.tensor(table, dtype=torch.int64).view(rows, width)


def refuses_or_answers(batch, call):
    before = snapshot(batch)
    try:
        call()
    except REFUSALS as error:
        assert str(error)
        assert unchanged(batch, before)


CALLS = {
    "default": lambda b, m: cp_utils.make_cp_batch_and_ctx(DeviceMesh(cp=2), b, m),
    "te": lambda b, m: cp_utils.make_cp_batch_and_ctx(DeviceMesh(cp=2), b, m, use_te=True),
    "te in chunks": lambda b, m: cp_utils.make_cp_batch_for_te(Mesh(2), b, num_chunks=2),
    "te chunk": lambda b, m: cp_utils._shard_thd_chunk_for_te(b, Mesh(2), "thd", -1000, 0),
    "thd": lambda b, m: thd_utils.process_input_for_thd(b),
    "thd in chunks": lambda b, m: thd_utils.split_batch_into_thd_chunks(b, 2),
    "glm": lambda b, m: glm.make_glm_dsa_packed_cp_batch_and_ctx(Mesh(2), None, b, loss_mask=m),
    "glm in chunks": lambda b, m: glm.make_glm_dsa_packed_cp_batch_and_ctx(
        Mesh(2), None, b, loss_mask=m, num_chunks=2
    ),
    "glm chunk": lambda b, m: glm._slice_thd_chunk_for_cp(
        b, cp_group=None, cp_size=2, cp_rank=1, padding_token_id=0
    ),
    "dsv4": lambda b, m: dsv4.make_dsv4_contiguous_shard_cp_batch_and_ctx(
        Mesh(2, 1), None, b, loss_mask=m
    ),
    "gemma4": lambda b, m: gemma4.make_contiguous_shard_cp_batch_and_ctx(
        Mesh(2, 1), None, b, loss_mask=m
    ),
    "positions": lambda b, m: cp_utils._build_position_ids(b, "cpu"),
}

fuzz = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("name", CALLS)
@fuzz
@given(batch=batches(), loss_mask=st.one_of(st.none(), anything), follow=st.booleans())
def test_any_batch(group_of, name, batch, loss_mask, follow):
    group_of(2, 1)
    if follow:
        with strict():
            refuses_or_answers(batch, lambda: CALLS[name](batch, loss_mask))
    else:
        refuses_or_answers(batch, lambda: CALLS[name](batch, loss_mask))


@fuzz
@given(real=length_tables(), slots=st.one_of(st.none(), length_tables()))
def test_any_lengths(real, slots):
    batch = {
        "input_ids": torch.ones(2, 4, dtype=torch.int64),
        "labels": torch.ones(2, 4, dtype=torch.int64),
        "position_ids": None,
        "seq_lens": real,
        "seq_lens_padded": slots,
    }
    refuses_or_answers(batch, lambda: thd_utils.process_input_for_thd(batch))
    with strict():
        refuses_or_answers(batch, lambda: thd_utils.process_input_for_thd(batch))


@fuzz
@given(
    tensor=anything,
    axis=st.one_of(st.integers(-6, 6), st.none()),
    count=st.one_of(st.integers(-2, 4), st.none()),
    value=st.sampled_from([0, -100, True, 0.5, 10**6]),
)
def test_any_padding(tensor, axis, count, value):
    batch = {"tensor": tensor}
    refuses_or_answers(batch, lambda: gemma4._pad_tensor_seq_dim_(tensor, axis, count, value))
    refuses_or_answers(batch, lambda: gemma4._pad_position_ids_seq_dim_(tensor, axis, count))
    refuses_or_answers(batch, lambda: cp_utils.make_target_cp_ctx(Mesh(2), tensor, tensor))
    refuses_or_answers(batch, lambda: cp_utils.gather_cp_seq(Mesh(1), [tensor], axis, count))


@fuzz
@given(
    positions=anything,
    pads=anything,
    keys=st.one_of(st.integers(-1, 5), st.none()),
    window=st.one_of(st.integers(-1, 5), st.just(1.5), st.none()),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, None]),
)
def test_any_dense_mask(positions, pads, keys, window, dtype):
    batch = {"positions": positions, "pads": pads}
    refuses_or_answers(
        batch,
        lambda: dsv4.build_dsv4_cp_causal_padding_mask(
            position_ids=positions,
            key_len=keys,
            dtype=dtype,
            device="cpu",
            cp_group=None,
            padding_mask=pads,
            sliding_window=window,
        ),
    )
