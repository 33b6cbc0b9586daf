"""The slow obvious answer, in plain loops.

Nothing here is shared with the library. Token by token, so that a reader can
check it against the rules in docs/reference-map.md.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def pad_tokens(tensor: Tensor, axis: int, count: int, value: object) -> Tensor:
    if count <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = count
    return torch.cat([tensor, torch.full(shape, value).to(tensor.dtype)], dim=axis)


def continue_positions(positions: Tensor, axis: int, count: int) -> Tensor:
    if count <= 0:
        return positions
    last = positions.select(axis, positions.shape[axis] - 1).unsqueeze(axis)
    added = [(last + step).to(positions.dtype) for step in range(1, count + 1)]
    return torch.cat([positions, *added], dim=axis)


def contiguous(tokens: int, ranks: int, rank: int) -> list[int]:
    length = tokens // ranks
    return list(range(rank * length, (rank + 1) * length))


def head_tail(tokens: int, ranks: int, rank: int) -> list[int]:
    chunk = tokens // (2 * ranks)
    other = 2 * ranks - 1 - rank
    return [
        *range(rank * chunk, (rank + 1) * chunk),
        *range(other * chunk, (other + 1) * chunk),
    ]


def document_partition(cu: Tensor, total: int, ranks: int, rank: int, strict: bool) -> Tensor:
    """Unless strict, what lies behind the last offset is a unit too."""
    if cu.dtype != torch.int32 or cu.dim() != 1 or cu.numel() < 2:
        raise ValueError("offsets must be an int32 vector of two or more entries")
    if not 0 <= rank < ranks:
        raise ValueError("the rank must be one of the group")
    if total <= 0 or total % (2 * ranks):
        raise ValueError("the stream must split into twice the ranks")
    offsets = cu.tolist()
    if any(offset % (2 * ranks) for offset in offsets):
        raise ValueError("every offset must be a multiple of twice the ranks")
    if not strict:
        if offsets[-1] > total:
            raise ValueError("the offsets end behind the stream")
        tokens: list[int] = []
        for begin, end in zip(offsets, [*offsets[1:], total], strict=True):
            tokens += [begin + t for t in head_tail(end - begin, ranks, rank)]
        return torch.tensor(tokens, dtype=torch.int32)
    starts = [offset // ranks for offset in offsets]
    tokens = []
    for local in range(total // ranks):
        holding = [d for d in range(len(starts) - 1) if starts[d] <= local < starts[d + 1]]
        document = holding[0] if holding else len(starts) - 2
        begin, length = starts[document], starts[document + 1] - starts[document]
        within, half = local - begin, length // 2
        off = rank if within < half else 2 * (ranks - 1) - rank
        tokens.append(within + begin * ranks + half * off)
    return torch.tensor(tokens, dtype=torch.int32)


def _running(lengths: list[int]) -> list[int]:
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def thd_lengths(
    seq_lens: Tensor,
    seq_lens_padded: Tensor | None,
    sentinel: int,
    rows: int,
    row_length: int,
    strict: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Offsets and the longest length; unless strict with checked rows and a mask of pads."""
    real = [[n for n in row if n != sentinel] for row in seq_lens.tolist()]
    slots = None
    if seq_lens_padded is not None:
        slots = [[n for n in row if n != sentinel] for row in seq_lens_padded.tolist()]
    mask = None
    given = slots is not None
    if not strict:
        slots, mask = _checked_rows(real, slots, rows, row_length)
    lengths = [n for row in real for n in row]
    cu = _running(lengths)
    cu_padded = None if slots is None else _running([n for row in slots for n in row])
    total = rows * row_length
    if (
        given
        and cu_padded is not None
        and len(cu) == len(cu_padded) > 1
        and cu[:-1] == cu_padded[:-1]
        and cu[-1] < total
    ):
        cu[-1] = total
        cu_padded = cu
    if cu_padded == cu:
        cu_padded = None
    longest = None
    if len(cu) > 1:
        longest = max(b - a for a, b in itertools.pairwise(cu))
    return (
        torch.tensor(cu, dtype=torch.int32),
        None if cu_padded is None else torch.tensor(cu_padded, dtype=torch.int32),
        None if longest is None else torch.tensor(longest, dtype=torch.int32),
        None if mask is None else torch.tensor(mask),
    )


def _checked_rows(
    real: list[list[int]],
    slots: list[list[int]] | None,
    rows: int,
    row_length: int,
) -> tuple[list[list[int]] | None, list[bool]]:
    """Slots whose rows are full (but the last documents'), and the pads they leave."""
    given, moved = slots is not None, False
    last = max((row for row, sizes in enumerate(slots or real) if sizes), default=-1)
    filled: list[list[int]] = []
    mask: list[bool] = []
    for row, lengths in enumerate(real):
        sizes = list(slots[row]) if slots is not None else list(lengths)
        if min([0, *lengths, *sizes]) < 0:
            raise ValueError("a length is negative")
        if sum(sizes) > row_length or sum(lengths) > sum(sizes):
            raise ValueError("the documents exceed the row")
        if len(sizes) == len(lengths):
            if any(n > slot for n, slot in zip(lengths, sizes, strict=True)):
                raise ValueError("a document exceeds its slot")
            pads = [
                position >= n
                for n, slot in zip(lengths, sizes, strict=True)
                for position in range(slot)
            ]
        elif len(sizes) == 1:  # one slot for all: they lie in it end to end
            pads = [position >= sum(lengths) for position in range(sizes[0])]
        else:
            raise ValueError("there must be one slot for each document")
        tail = row_length - len(pads)
        mask += pads + [True] * tail
        if tail and row < last:  # later rows must start where they lie
            moved = True
            if sizes:
                sizes[-1] += tail
            elif any(filled):
                before = [slots for slots in filled if slots][-1]
                before[-1] += tail
            else:
                lengths.append(0)
                sizes.append(tail)
        filled.append(sizes)
    return (filled if given or moved else None), mask


def padded_windows(cu: Tensor, cu_padded: Tensor) -> tuple[Tensor, Tensor]:
    real = [n for n in cu.tolist() if n >= 0]
    slots = [n for n in cu_padded.tolist() if n >= 0]
    starts, ends = [], []
    for query in range(slots[-1]):
        behind = [d for d, offset in enumerate(slots) if offset <= query]
        document = min(max(behind), len(slots) - 2)
        start = slots[document]
        length = real[document + 1] - real[document]
        starts.append(start)
        ends.append(max(min(query + 1, start + length), start + 1))
    return (
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(ends, dtype=torch.int32),
    )


def compact_windows(cu: Tensor) -> tuple[Tensor, Tensor]:
    offsets = cu.tolist()
    starts = [begin for begin, end in itertools.pairwise(offsets) for _ in range(begin, end)]
    return (
        torch.tensor(starts, dtype=torch.int32),
        torch.arange(1, offsets[-1] + 1),
    )


def pads_of_attention_mask(mask: Tensor, strict: bool) -> Tensor:
    if mask.dim() != 4:
        return ~mask.bool()
    rows, _, length, _ = mask.shape
    pads = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        for token in range(length):
            entry = mask[row, 0, token, token]
            pads[row, token] = not entry if mask.dtype == torch.bool else entry != 0
    return pads


def dense_causal_mask(
    position_ids: Tensor,
    key_len: int,
    dtype: torch.dtype,
    pad_full: Tensor | None,
    window: int | None,
) -> Tensor:
    rows, length = position_ids.shape
    out = torch.full((rows, 1, length, key_len), torch.finfo(dtype).min, dtype=dtype)
    for row in range(rows):
        for query in range(length):
            position = int(position_ids[row, query])
            for key in range(key_len):
                seen = key <= position
                seen = seen and (window is None or position - key < window)
                seen = seen and not (pad_full is not None and pad_full[row, key])
                if seen:
                    out[row, 0, query, key] = 0
    return out


def share_multiple(ratios: list[int]) -> int:
    multiple = 1
    for ratio in ratios:
        if ratio > 0:
            multiple = math.lcm(multiple, 2 * ratio if ratio == 4 else ratio)
    return multiple
