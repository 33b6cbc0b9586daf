"""The C++ functions under the drop-in give the slow obvious answer."""

import batch_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import _C
from longspan.compat.nemo import _nemo

lengths = st.integers(0, 6)
quick = settings(max_examples=150, deadline=None)


def answer(function, *arguments):
    """The result, or that it was refused."""
    try:
        return function(*arguments)
    except ValueError:
        return "refused"


def agree(left, right):
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(agree, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left is right or left == right


@st.composite
def tables(draw):
    """Ragged tables of real and padded lengths, mostly consistent ones."""
    rows = draw(st.integers(1, 4))
    real, slots = [], []
    for _ in range(rows):
        documents = draw(st.integers(0, 3))
        real.append([draw(st.integers(0, 4)) for _ in range(documents)])
        extra = draw(st.sampled_from([0, 0, 1, 2]))
        slots.append([n + draw(st.integers(0, extra)) for n in real[-1]])
    need = max(sum(row) for row in slots)
    length = max(1, need + draw(st.integers(-1, 2)))
    width = max(1, *(len(row) for row in real))

    def filled(table):
        return torch.tensor([row + [-1000] * (width - len(row)) for row in table])

    padded = draw(st.booleans())
    return filled(real), filled(slots) if padded else None, rows, length


@quick
@given(tables(), st.booleans())
def test_thd_lengths(case, strict):
    real, slots, rows, length = case
    arguments = (real, slots, -1000, rows, length, strict)
    assert agree(answer(_nemo.thd_lengths, *arguments), answer(oracle.thd_lengths, *arguments))


@quick
@given(
    st.integers(1, 7),
    st.lists(lengths, min_size=1, max_size=5),
    st.integers(0, 2),
    st.booleans(),
)
def test_document_partition(ranks, chunks, tail, strict):
    offsets = [0]
    for chunk in chunks:
        offsets.append(offsets[-1] + 2 * ranks * chunk)
    total = offsets[-1] + 2 * ranks * tail
    cu = torch.tensor(offsets, dtype=torch.int32)
    for rank in range(ranks):
        arguments = (cu, total, ranks, rank, strict)
        assert agree(
            answer(_nemo.document_partition, *arguments),
            answer(oracle.document_partition, *arguments),
        )


@pytest.mark.parametrize("kind", ["contiguous", "head_tail"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunk", [0, 1, 2, 5])
def test_ownership_and_shares(kind, ranks, chunk):
    tokens = 2 * ranks * chunk
    ownership = getattr(_C.Ownership, kind)(tokens, ranks)
    tensor = torch.arange(3 * tokens * 2).view(3, tokens, 2)
    for rank in range(ranks):
        expected = getattr(oracle, kind)(tokens, ranks, rank)
        assert ownership.tokens_of(rank).tolist() == expected
        assert ownership.local_tokens(rank) == len(expected)
        share = _nemo.take_share(tensor, ownership, rank, 1)
        assert share.is_contiguous()
        assert torch.equal(share, tensor[:, expected])


@quick
@given(
    st.lists(
        st.tuples(lengths, st.integers(0, 3)).map(lambda p: (p[0], p[0] + p[1])),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2),
)
def test_windows(documents, sentinels):
    tail = [-1000] * sentinels
    cu, padded = [0], [0]
    for real, slot in documents:
        cu.append(cu[-1] + real)
        padded.append(padded[-1] + slot)
    arguments = (
        torch.tensor(cu + tail, dtype=torch.int32),
        torch.tensor(padded + tail, dtype=torch.int32),
    )
    assert agree(_nemo.padded_windows(*arguments), oracle.padded_windows(*arguments))
    compact = torch.tensor(cu, dtype=torch.int32)
    assert agree(_nemo.compact_windows(compact), oracle.compact_windows(compact))


@quick
@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bfloat16]),
    st.integers(0, 1),
)
def test_padding(rows, length, count, dtype, axis):
    tensor = torch.arange(rows * length).view(rows, length).to(dtype)
    got = _nemo.pad_tokens(tensor, axis, count, -100)
    expected = oracle.pad_tokens(tensor, axis, count, -100)
    assert agree(got, expected)
    assert (got is tensor) == (count == 0)
    if tensor.shape[axis] > 0:
        got = _nemo.continue_positions(tensor, axis, count)
        assert agree(got, oracle.continue_positions(tensor, axis, count))
        assert (got is tensor) == (count == 0)


def test_padding_of_bools_and_planes():
    mask = torch.tensor([[False, True]])
    assert _nemo.pad_tokens(mask, 1, 2, True).tolist() == [[False, True, True, True]]
    planes = torch.arange(12).view(3, 2, 2)
    assert agree(_nemo.continue_positions(planes, 2, 3), oracle.continue_positions(planes, 2, 3))


@quick
@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_pads_of_masks(rows, length, data):
    kind = data.draw(st.sampled_from(["bool", "long", "float"]))
    square = data.draw(st.booleans())
    shape = (rows, 2, length, length) if square else (rows, length)
    seed = data.draw(st.integers(0, 1000))
    mask = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed))
    mask = getattr(mask, kind)()
    assert agree(_nemo.pads_of_mask(mask, True), oracle.pads_of_attention_mask(mask, True))


@quick
@given(
    st.integers(1, 2),
    st.integers(0, 4),
    st.integers(0, 6),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    st.sampled_from([None, 0, 1, 3]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_dense_mask(rows, length, keys, dtype, window, padded, seed):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 8, (rows, length), generator=generator)
    pads = torch.randint(0, 2, (rows, keys), generator=generator).bool()
    arguments = (positions, keys, dtype, pads if padded else None, window)
    assert agree(_nemo.dense_causal_mask(*arguments), oracle.dense_causal_mask(*arguments))


@quick
@given(st.lists(st.integers(1, 12), max_size=5))
def test_share_multiple(ratios):
    assert _C.share_multiple(ratios) == oracle.share_multiple(ratios)
