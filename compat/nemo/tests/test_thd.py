"""Rows become a stream, by default and in strict."""

import contextlib

import pytest
import torch
from compat_support import packed_batch, refuses, snapshot, thd_utils, unchanged

from longspan.compat.nemo import strict

process = thd_utils.process_input_for_thd
split = thd_utils.split_batch_into_thd_chunks

NONE = -1000

# rows x length, seq_lens, seq_lens_padded, cu, cu_padded, longest.
WORKED = [
    (1, 8, [[5]], [[8]], [0, 8], None, 8),
    (1, 8, [[5]], None, [0, 5], None, 5),
    (1, 8, [[3, 2]], [[4, 4]], [0, 3, 5], [0, 4, 8], 3),
    (1, 8, [[3, 2]], [[3, 2]], [0, 3, 8], None, 5),
    (1, 8, [[3, 5]], [[3, 6]], [0, 3, 8], [0, 3, 9], 5),
    (2, 6, [[6], [3]], [[6], [6]], [0, 6, 12], None, 6),
    (2, 6, [[3], [6]], [[6], [6]], [0, 3, 9], [0, 6, 12], 6),
    (1, 8, [[NONE]], [[NONE]], [0], None, None),
    (1, 8, [[3, 2]], [[8, NONE]], [0, 3, 5], [0, 8], 3),
]
OVERFULL = 4  # the one row whose slots exceed it
PADS = [
    [5, 6, 7],
    [5, 6, 7],
    [3, 6, 7],
    [5, 6, 7],
    None,
    [9, 10, 11],
    [3, 4, 5],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [5, 6, 7],
]


def worked_batch(case):
    rows, length, lens, padded, *_ = case
    ids = [[100 * r + s + 1 for s in range(length)] for r in range(rows)]
    return packed_batch(ids, lens, padded)


def check_lengths(out, cu, cu_padded, longest):
    assert out["cu_seqlens"].tolist() == cu
    assert out["cu_seqlens"].dtype == torch.int32
    if cu_padded is None:
        assert "cu_seqlens_padded" not in out
    else:
        assert out["cu_seqlens_padded"].tolist() == cu_padded
        assert out["cu_seqlens_padded"].dtype == torch.int32
    if longest is None:
        assert "max_seqlen" not in out
    else:
        assert out["max_seqlen"].item() == longest
        assert out["max_seqlen"].dtype == torch.int32
        assert out["max_seqlen"].dim() == 0


@pytest.mark.parametrize("case", WORKED)
def test_worked_lengths_in_strict(case):
    with strict():
        check_lengths(process(worked_batch(case)), *case[4:])


@pytest.mark.parametrize("index", [i for i in range(len(WORKED)) if i != OVERFULL])
def test_worked_lengths_and_their_pads_by_default(index):
    case = WORKED[index]
    out = process(worked_batch(case))
    check_lengths(out, *case[4:])
    assert out["padding_mask"].nonzero().flatten().tolist() == PADS[index]


def test_slots_beyond_the_row_are_refused():
    batch = worked_batch(WORKED[OVERFULL])
    refuses(ValueError, "seq_lens_padded.*3 \\+ 6", batch, lambda: process(batch))


def test_flattens_and_keeps_order_dtypes_and_non_tensors():
    batch = packed_batch(
        [[1, 2, 3], [4, 5, 6]],
        [[3], [3]],
        [[3], [3]],
        qkv_format="thd",
        dropped=torch.ones(2),
        kept=[1],
    )
    batch["labels"] = batch["labels"].to(torch.int32)
    before = snapshot(batch)
    out = process(batch)
    assert list(out) == [
        "input_ids",
        "position_ids",
        "cu_seqlens",
        "labels",
        "padding_mask",
        "max_seqlen",
        "qkv_format",
        "kept",
    ]
    assert out["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert out["labels"].dtype == torch.int32
    assert out["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert out["kept"] is batch["kept"]
    assert unchanged(batch, before)


def test_padded_offsets_come_before_the_longest_length():
    out = process(packed_batch([[1] * 8], [[3, 2]], [[4, 4]]))
    assert list(out)[5:] == ["cu_seqlens_padded", "max_seqlen"]


def test_nulls_stay_null():
    batch = packed_batch([[1, 2]], None, None)
    batch["position_ids"] = None
    out = process(batch)
    assert out["position_ids"] is None
    assert out["cu_seqlens"] is None
    assert "max_seqlen" not in out
    assert out["seq_lens"] is None  # a null is no tensor, so it is kept


@pytest.mark.parametrize("key", packed_batch([[1]], [[1]], [[1]]))
def test_required_keys(key):
    batch = packed_batch([[1, 2]], [[2]], [[2]])
    del batch[key]
    refuses(KeyError, key, batch, lambda: process(batch))


def test_activations_keep_their_width_and_a_width_of_one_is_dropped():
    batch = packed_batch([[1, 2]], [[2]], [[2]])
    batch["input_ids"] = torch.randn(1, 2, 4)
    assert process(batch)["input_ids"].shape == (2, 4)
    batch["input_ids"] = torch.randn(1, 2, 1)
    assert process(batch)["input_ids"].shape == (2,)


# Pads.


def test_a_token_with_the_pad_id_is_not_a_pad():
    batch = packed_batch([[0, 7, 0, 0, 5, 0, 0, 0]], [[3, 2]], [[4, 4]])
    assert process(batch)["padding_mask"].tolist() == [
        *(False, False, False, True),
        *(False, False, True, True),
    ]
    with strict():
        compared = process(batch, padding_token_id=5)["padding_mask"]
    assert compared.nonzero().flatten().tolist() == [4]


def test_an_absorbed_pad_is_still_a_pad():
    out = process(packed_batch([[1, 2, 3, 4]], [[3]], [[4]]))
    assert out["cu_seqlens"].tolist() == [0, 4]
    assert out["padding_mask"].tolist() == [False, False, False, True]


def test_a_given_padding_mask_is_kept():
    given = torch.tensor([[True, False], [False, True]])
    batch = packed_batch([[1, 0], [0, 1]], [[1], [1]], None, padding_mask=given)
    assert process(batch)["padding_mask"].tolist() == [True, False, False, True]
    with strict():
        compared = process(batch)["padding_mask"]
    assert compared.tolist() == [False, True, True, False]


def test_without_lengths_trailing_ids_are_pads():
    batch = packed_batch([[1, 2, 9, 9], [1, 2, 3, 4], [9, 9, 9, 9]], None, None)
    mask = process(batch, padding_token_id=9)["padding_mask"].view(3, 4)
    assert mask.tolist() == [[False, False, True, True], [False] * 4, [True] * 4]


def test_without_lengths_an_inner_pad_id_is_refused_with_the_way_out():
    batch = packed_batch([[1, 0, 2, 0]], None, None)
    refuses(ValueError, "pass `seq_lens` or `padding_mask`", batch, lambda: process(batch))
    with strict():
        compared = process(batch)["padding_mask"]
    assert compared.tolist() == [False, True, False, True]


def test_activations_have_one_mask_entry_for_each_token():
    batch = packed_batch([[1, 2, 3]], [[2]], [[3]])
    batch["input_ids"] = torch.zeros(1, 3, 4)
    assert process(batch)["padding_mask"].tolist() == [False, False, True]
    batch["seq_lens"] = batch["seq_lens_padded"] = None
    assert process(batch)["padding_mask"].tolist() == [False] * 3
    with strict():
        assert process(batch)["padding_mask"].shape == (3, 4)


# Rows that their slots do not fill.


def test_a_tail_inside_the_batch_belongs_to_the_slot_before_it():
    batch = packed_batch([[1, 2, 3, 0], [5, 6, 0, 0]], [[3], [2]], [[3], [2]])
    out = process(batch)
    assert out["cu_seqlens"].tolist() == [0, 3, 5]
    assert out["cu_seqlens_padded"].tolist() == [0, 4, 6]
    pads = out["padding_mask"].nonzero().flatten().tolist()
    assert pads == [3, 6, 7]
    with strict():
        check_lengths(process(batch), [0, 3, 8], None, 5)


@pytest.mark.parametrize("rule", [contextlib.nullcontext, strict])
def test_nothing_behind_the_last_document_is_given_to_it(rule):
    """Without slots there is nothing to absorb a tail into."""
    with rule():
        out = process(packed_batch([[1] * 4] * 2, [[2], [NONE]], None))
    assert out["cu_seqlens"].tolist() == [0, 2]
    assert "cu_seqlens_padded" not in out
    assert out["max_seqlen"].item() == 2
    with rule():
        out = process(packed_batch([[1] * 4] * 2, [[NONE], [NONE]], None))
    assert out["cu_seqlens"].tolist() == [0]
    assert "max_seqlen" not in out


def test_rows_before_the_first_document_are_the_slot_of_an_empty_one():
    out = process(packed_batch([[1] * 4] * 3, [[NONE], [NONE], [2]], None))
    assert out["cu_seqlens"].tolist() == [0, 0, 2]
    assert out["cu_seqlens_padded"].tolist() == [0, 8, 10]
    assert out["padding_mask"].tolist() == [True] * 8 + [False] * 2 + [True] * 2


def test_positions_of_one_row_serve_all_rows():
    batch = packed_batch([[1, 2], [3, 4]], [[2], [2]], [[2], [2]])
    batch["position_ids"] = torch.arange(2)[None]
    assert process(batch)["position_ids"].tolist() == [0, 1, 0, 1]
    assert split(batch, 2)["position_ids"].tolist() == [[0, 1], [0, 1]]


def test_sentinel_is_the_callers():
    batch = packed_batch([[1, 2, 3, 4]], [[3, -1, -1]], [[4, -1, -1]])
    assert process(batch, seq_lens_padding_value=-1)["cu_seqlens"].tolist() == [0, 4]


# Chunks.


def test_one_chunk_is_the_plain_conversion():
    batch = packed_batch([[1, 2, 3]], [[3]], [[3]])
    for count in (1, 0, -2):
        plain, chunk = process(batch), split(batch, count)
        assert list(chunk) == list(plain)
        assert torch.equal(chunk["input_ids"], plain["input_ids"])


def test_chunks_are_stacked_and_ragged_offsets_filled():
    batch = packed_batch(
        [[1, 2, 3, 0], [4, 5, 0, 0]],
        [[1, 2], [2, NONE]],
        [[1, 3], [4, NONE]],
        name="x",
    )
    out = split(batch, 2)
    assert list(out) == [
        *("input_ids", "labels", "position_ids", "cu_seqlens"),
        *("padding_mask", "max_seqlen", "name"),
    ]
    assert out["input_ids"].tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert out["cu_seqlens"].tolist() == [[0, 1, 4], [0, 4, NONE]]
    assert out["max_seqlen"].tolist() == [3, 4]
    assert out["padding_mask"].tolist() == [
        [False, False, False, True],
        [False, False, True, True],
    ]


def test_one_padded_chunk_brings_padded_offsets_for_all():
    batch = packed_batch([[1] * 4, [1] * 4], [[1, 2], [4, NONE]], [[2, 2], [4, NONE]])
    out = split(batch, 2)
    assert out["cu_seqlens"].tolist() == [[0, 1, 3], [0, 4, NONE]]
    assert out["cu_seqlens_padded"].tolist() == [[0, 2, 4], [0, 4, NONE]]


def test_longest_lengths_are_there_only_if_every_chunk_has_one():
    batch = packed_batch([[1, 2], [3, 4]], [[2], [NONE]], [[2], [NONE]])
    out = split(batch, 2)
    assert "max_seqlen" not in out
    assert out["cu_seqlens"].tolist() == [[0, 2], [0, NONE]]


def test_rows_that_do_not_split_are_refused_and_strict_drops_them():
    batch = packed_batch([[1], [2], [3]], [[1]] * 3, [[1]] * 3)
    refuses(ValueError, "3 rows.*2 equal chunks", batch, lambda: split(batch, 2))
    with strict():
        assert split(batch, 2)["input_ids"].tolist() == [[1], [2]]
        refuses(ValueError, "4 equal chunks", batch, lambda: split(batch, 4))


def test_chunks_need_positions():
    batch = packed_batch([[1], [2]], [[1], [1]], [[1], [1]])
    batch["position_ids"] = None
    refuses(ValueError, "position_ids", batch, lambda: split(batch, 2))


def test_null_lengths_stay_null_in_chunks():
    out = split(packed_batch([[1], [2]], None, None), 2)
    assert out["cu_seqlens"] is None
    assert "max_seqlen" not in out


# Refusals.

BAD = {
    "ids of rank 1": (ValueError, "rows, tokens", {"input_ids": torch.ones(4)}),
    "ids of rank 4": (ValueError, "input_ids", {"input_ids": torch.ones(1, 4, 1, 1)}),
    "no tokens": (ValueError, "empty", {"input_ids": torch.ones(1, 0)}),
    "no rows": (ValueError, "empty", {"input_ids": torch.ones(0, 4)}),
    "ids no tensor": (TypeError, "input_ids", {"input_ids": None}),
    "labels null": (TypeError, "labels", {"labels": None}),
    "short labels": (ValueError, r"labels.*\[1, 3\]", {"labels": torch.ones(1, 3)}),
    "planes": (ValueError, "position_ids", {"position_ids": torch.ones(3, 1, 4)}),
    "float lengths": (ValueError, "integers", {"seq_lens": torch.tensor([[4.0]])}),
    "bool lengths": (ValueError, "integers", {"seq_lens": torch.tensor([[True]])}),
    "negative": (ValueError, "negative", {"seq_lens": torch.tensor([[-3]])}),
    "too long": (ValueError, "exceed|takes|slot", {"seq_lens": torch.tensor([[5]])}),
    "real over slot": (
        ValueError,
        "slot of 1",
        {
            "seq_lens": torch.tensor([[1, 2]]),
            "seq_lens_padded": torch.tensor([[3, 1]]),
        },
    ),
    "other rows": (ValueError, "seq_lens", {"seq_lens": torch.ones(3, 1).long()}),
    "short mask": (ValueError, "padding_mask", {"padding_mask": torch.ones(1, 3) > 0}),
    "float mask": (ValueError, "padding_mask", {"padding_mask": torch.ones(1, 4)}),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    error, message, change = BAD[name]
    batch = packed_batch([[1, 2, 3, 4]], [[3]], [[4]])
    batch.update(change)
    refuses(error, message, batch, lambda: process(batch))


def test_refuses_streams_that_int32_cannot_count():
    ids = torch.zeros(1, dtype=torch.int64).expand(2**16, 2**16)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": None,
        "seq_lens": torch.zeros(2**16, 1, dtype=torch.int64),
        "seq_lens_padded": None,
    }
    with pytest.raises(ValueError, match="int32"):
        process(batch)


def test_strict_refuses_offsets_that_int32_cannot_hold():
    batch = packed_batch([[1, 2, 3, 4]], [[2**31, 1]], None)
    with strict(), pytest.raises(ValueError, match=r"32 bits|int32"):
        process(batch)


def test_refuses_arguments_that_are_no_integers():
    batch = packed_batch([[1, 2]], [[2]], [[2]])
    with pytest.raises(TypeError, match="padding_token_id"):
        process(batch, padding_token_id=None)
    with pytest.raises(TypeError, match="num_chunks"):
        split(batch, "2")
    with pytest.raises(ValueError, match="int32"):
        process(batch, seq_lens_padding_value=-(2**40))
    with pytest.raises(TypeError, match="pass a dict"):
        process([batch])


def test_strided_and_zero_stride_tensors_are_ordinary():
    ids = torch.arange(16).view(4, 4).t()[:2]
    batch = packed_batch([[0] * 4] * 2, [[4], [4]], [[4], [4]])
    batch["input_ids"] = ids
    batch["labels"] = torch.tensor([[7]]).expand(2, 4)
    out = process(batch)
    assert out["input_ids"].tolist() == [0, 4, 8, 12, 1, 5, 9, 13]
    assert out["labels"].tolist() == [7] * 8
