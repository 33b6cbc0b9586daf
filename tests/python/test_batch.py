"""pack, pad, shard and unshard, against an answer worked out token by token.

Token values say where they were loaded: row * 1000 + column, so that token id 0
is content, and a wrong element names its source.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import longspan
from longspan import _C

RANKS = (1, 2, 3, 4, 7)
SENTINEL = -1000


# ---- Cases: documents as they lie in rows, and how the batch tells them.


@dataclass(frozen=True)
class Document:
    begin: int  # column of the first real token
    length: int
    slot: int  # columns from `begin` that belong to it, pads included


@dataclass(frozen=True)
class Case:
    name: str
    length: int
    rows: tuple[tuple[Document, ...], ...]
    told_by: str  # which entries of the batch carry the documents
    positions: str = "none"  # or "rows", "shared" [1, S], "planes" [3, B, S]

    @property
    def has_slots(self) -> bool:
        return self.told_by in ("nothing", "seq_lens", "seq_lens_padded")


def right_padded(*lengths: int) -> tuple[tuple[Document, ...], ...]:
    return tuple((Document(0, n, n),) if n else () for n in lengths)


def left_padded(length: int, *lengths: int) -> tuple[tuple[Document, ...], ...]:
    return tuple((Document(length - n, n, n),) if n else () for n in lengths)


def whole(rows: int, length: int) -> tuple[tuple[Document, ...], ...]:
    return tuple((Document(0, length, length),) for _ in range(rows))


CASES = [
    # Usual.
    Case("plain_rows", 8, whole(2, 8), "nothing"),
    Case("right_padded_mask", 8, right_padded(8, 5, 3), "attention_mask"),
    Case(
        "packed_rows",
        12,
        (
            (Document(0, 3, 4), Document(4, 6, 8)),
            (Document(0, 5, 6), Document(6, 1, 2), Document(8, 4, 4)),
        ),
        "seq_lens_padded",
    ),
    Case("positions_of_rows", 8, right_padded(8, 6), "attention_mask", positions="rows"),
    Case("planes_of_positions", 6, whole(2, 6), "nothing", positions="planes"),
    # Ragged.
    Case("odd_rows", 13, whole(3, 13), "nothing"),
    Case("left_padded_mask", 9, left_padded(9, 9, 4, 1), "attention_mask"),
    Case(
        "numbered_documents",
        10,
        (
            (Document(0, 3, 3), Document(3, 4, 4), Document(7, 2, 2)),
            (Document(1, 2, 2), Document(5, 5, 5)),
        ),
        "attention_mask",
    ),
    Case(
        "lengths_without_slots",
        11,
        ((Document(0, 3, 3), Document(3, 2, 8)), (Document(0, 11, 11),)),
        "seq_lens",
    ),
    Case("shared_positions", 7, whole(3, 7), "nothing", positions="shared"),
    Case("planes_of_padded", 5, right_padded(5, 3), "padding_mask", positions="planes"),
    Case("bool_square", 6, left_padded(6, 6, 2), "bool_square"),
    Case("float_square", 6, right_padded(4, 6), "float_square"),
    # Corner.
    Case("one_token", 1, whole(1, 1), "nothing"),
    Case("one_token_in_each_row", 1, whole(5, 1), "nothing"),
    Case("no_rows", 4, (), "nothing"),
    Case("rows_without_tokens", 0, whole(3, 0), "nothing"),
    Case("nothing_at_all", 0, (), "nothing"),
    Case("rows_of_pads", 4, right_padded(0, 4, 0), "attention_mask"),
    Case("all_pads", 4, right_padded(0, 0), "padding_mask"),
    Case("only_sentinels", 5, ((Document(0, 0, 5),), (Document(0, 2, 5),)), "seq_lens_padded"),
    Case(
        "empty_documents",
        6,
        (
            (Document(0, 0, 0), Document(0, 2, 3), Document(3, 0, 1), Document(4, 0, 2)),
            (Document(0, 0, 2), Document(2, 4, 4)),
        ),
        "seq_lens_padded",
        positions="rows",
    ),
    Case("many_short_rows", 3, right_padded(3, 1, 2, 3, 3, 1, 2, 0, 1), "attention_mask"),
]


def source_ids(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows).view(-1, 1) * 1000 + torch.arange(length)


def square_mask(case: Case) -> torch.Tensor:
    real = torch.zeros(len(case.rows), case.length, dtype=torch.bool)
    for r, documents in enumerate(case.rows):
        for d in documents:
            real[r, d.begin : d.begin + d.length] = True
    causal = torch.ones(case.length, case.length, dtype=torch.bool).tril()
    return (causal & real[:, None, :]).unsqueeze(1)


def lengths_table(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0) + 1
    return torch.tensor([[*row, *[SENTINEL] * (width - len(row))] for row in rows])


def batch_of(case: Case) -> dict[str, Any]:
    rows, length = len(case.rows), case.length
    ids = source_ids(rows, length)
    batch: dict[str, Any] = {"labels": ids + 500_000, "input_ids": ids}
    numbers = torch.zeros(rows, length, dtype=torch.long)
    for r, documents in enumerate(case.rows):
        for number, d in enumerate(documents, 1):
            numbers[r, d.begin : d.begin + d.length] = number
    if case.told_by == "attention_mask":
        batch["attention_mask"] = numbers
    elif case.told_by == "padding_mask":
        batch["padding_mask"] = numbers == 0
    elif case.told_by == "bool_square":
        batch["attention_mask"] = square_mask(case)
    elif case.told_by == "float_square":
        shown = square_mask(case)
        batch["attention_mask"] = torch.zeros(shown.shape).masked_fill(~shown, float("-inf"))
    elif case.told_by != "nothing":
        listed = [
            [d for d in row if case.name != "only_sentinels" or d.length] for row in case.rows
        ]
        batch["seq_lens"] = lengths_table([[d.length for d in row] for row in listed])
        if case.told_by == "seq_lens_padded":
            batch["seq_lens_padded"] = lengths_table([[d.slot for d in row] for row in listed])
    if case.positions == "rows":
        batch["position_ids"] = ids + 7
    elif case.positions == "shared":
        batch["position_ids"] = torch.arange(length).unsqueeze(0) + 7
    elif case.positions == "planes":
        batch["position_ids"] = torch.stack([ids + 7, ids + 8, ids + 9])
    return batch


# ---- The answer, token by token.


@dataclass(frozen=True)
class Token:
    source: tuple[int, int] | None  # row and column as loaded
    real: bool
    position: int
    number: int  # of its document among those with tokens, 0 for pads
    first: int  # where its document begins, in the row or stream


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def slot_tokens(
    row: int, document: Document, slot: int, number: int, first: int, begin: int, length: int
) -> list[Token]:
    tokens = []
    for position in range(slot):
        column = document.begin + position
        loaded = column < length and position < document.slot
        real = position < document.length
        tokens.append(
            Token(
                (row, column) if loaded else None,
                real,
                position,
                number if real else 0,
                first + begin,
            )
        )
    return tokens


def rows_of(case: Case, multiple: int) -> list[list[Token]]:
    """Every row as a list of tokens, padded at its end."""
    padded = up(case.length, multiple)
    answer = []
    for r, documents in enumerate(case.rows):
        tokens: list[Token] = []
        number = 0
        begin = 0
        position = 0
        current = None
        for column in range(padded):
            starting = [d for d in documents if d.begin == column and (d.length or case.has_slots)]
            if starting:
                current = starting[-1]
                number += sum(d.length > 0 for d in starting)
                begin, position = column, 0
            real = current is not None and column < current.begin + current.length
            source = (r, column) if column < case.length else None
            tokens.append(Token(source, real, position, number if real else 0, begin))
            position += 1
        answer.append(tokens)
    return answer


def stream_of(case: Case, slots: int, total: int) -> list[Token]:
    stream: list[Token] = []
    number = 0
    for r, documents in enumerate(case.rows):
        if case.has_slots and not documents:
            documents = (Document(0, 0, case.length),)
        for i, d in enumerate(documents):
            loaded = d.slot
            if case.has_slots and i + 1 == len(documents):
                loaded = case.length - d.begin  # the rest of the row is its own
            d = Document(d.begin, d.length, loaded)
            number += d.length > 0
            stream += slot_tokens(r, d, up(loaded, slots), number, len(stream), 0, case.length)
    tail = up(len(stream), total) - len(stream)
    end = len(stream)
    stream += [Token(None, False, i, 0, end) for i in range(tail)]
    return stream


def chunks_of(tokens: list[int], parts: int) -> list[list[int]]:
    size = len(tokens) // parts
    return [tokens[i * size : (i + 1) * size] for i in range(parts)]


def share_of(kind: str, slots: Sequence[int], ranks: int, rank: int) -> list[int]:
    """What a rank holds of tokens 0, 1, ...; slots are sizes of documents."""
    everything = list(range(sum(slots)))
    if kind == "contiguous":
        return chunks_of(everything, ranks)[rank]
    if kind == "head-tail":
        parts = chunks_of(everything, 2 * ranks)
        return parts[rank] + parts[2 * ranks - 1 - rank]
    held, begin = [], 0
    for slot in slots:
        parts = chunks_of(everything[begin : begin + slot], 2 * ranks)
        held += parts[rank] + parts[2 * ranks - 1 - rank]
        begin += slot
    return held


def facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What an edit in place would change, beside the values."""
    memory = () if tensor.is_sparse else (tensor.stride(), tensor.data_ptr())
    return (tensor._version, tensor.shape, tensor.requires_grad, *memory)


@contextlib.contextmanager
def unchanged(batch: dict[str, Any]) -> Iterator[None]:
    """The caller's dictionary and tensors are the same before and after."""
    entries = dict(batch)
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    copies = {k: v.detach().clone() for k, v in tensors.items()}
    facts = {k: facts_of(v) for k, v in tensors.items()}
    try:
        yield
    finally:
        assert list(batch) == list(entries)
        for key, value in entries.items():
            assert batch[key] is value, key
        for key, tensor in tensors.items():
            assert facts_of(tensor) == facts[key], key
            if not tensor.is_meta:
                torch.testing.assert_close(
                    tensor.detach(), copies[key], rtol=0, atol=0, equal_nan=True
                )


def share_all(
    batch: dict[str, Any], ranks: int, **options: Any
) -> list[longspan.values.LocalBatch]:
    with unchanged(batch):
        return [longspan.shard(batch, rank=r, ranks=ranks, **options) for r in range(ranks)]


def value_of(token: Token, pad: int, more: int = 0) -> int:
    return pad if token.source is None else token.source[0] * 1000 + token.source[1] + more


def counted(tokens: Sequence[Token], more: int) -> list[int]:
    """Loaded positions, counted on where padding added tokens."""
    values: list[int] = []
    for token in tokens:
        last = values[-1] + 1 if values else 0
        values.append(value_of(token, last, more))
    return values


def check_tensors(local: longspan.values.LocalBatch, tokens: list[list[Token]], case: Case) -> None:
    """Every tensor of a share, against the tokens it must hold (one list for
    each row, or one for the stream)."""
    rows = local.cut.form == "rows"

    def expect(key: str, values: list[list[Any]], dtype: torch.dtype) -> None:
        expected = torch.tensor(values, dtype=dtype)
        width = local.cut.local_tokens
        shape = (len(tokens), width) if rows else (width,)
        torch.testing.assert_close(
            local[key], expected.reshape(shape), rtol=0, atol=0, msg=lambda m: f"{key}: {m}"
        )

    expect("input_ids", [[value_of(t, 0) for t in row] for row in tokens], torch.long)
    expect("labels", [[value_of(t, -100, 500_000) for t in row] for row in tokens], torch.long)
    expect("padding_mask", [[not t.real for t in row] for row in tokens], torch.bool)
    if case.positions == "none":
        expect("position_ids", [[t.position for t in row] for row in tokens], torch.long)


LAYOUTS = [
    ("head-tail", "head-tail", "rows"),
    ("contiguous-rows", "contiguous", "rows"),
    ("contiguous-stream", "contiguous", "stream"),
    ("head-tail-stream", "head-tail", "stream"),
    ("per-document-head-tail", "per-document-head-tail", "stream"),
]


def laid_out(case: Case, kind: str, form: str, ranks: int, multiple: int) -> list[list[Token]]:
    parts = ranks if kind == "contiguous" else 2 * ranks
    common = abs(parts * multiple * ranks) // math.gcd(parts, multiple * ranks)
    if form == "rows":
        return rows_of(case, common)
    if kind == "per-document-head-tail":
        return [stream_of(case, common, 1)]
    return [stream_of(case, 1, common)]


def slots_in(stream: list[Token], packing: longspan.Packing) -> list[int]:
    slots = [packing.padded_length(d) for d in range(packing.documents)]
    assert sum(slots) + len(packing.tail) == len(stream)
    return [*slots, len(packing.tail)]


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("layout", "kind", "form"), LAYOUTS, ids=[row[0] for row in LAYOUTS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestEveryLayout:
    def test_shares_hold_every_token_once_and_come_back(
        self, case: Case, layout: str, kind: str, form: str, ranks: int, multiple: int
    ) -> None:
        batch = batch_of(case)
        locals_ = share_all(batch, ranks, layout=layout, multiple=multiple)
        whole_rows = laid_out(case, kind, form, ranks, multiple)
        packings = locals_[0].cut.packings
        loaded = [t.source for row in whole_rows for t in row if t.source is not None]
        real = [t.source for row in whole_rows for t in row if t.real]
        expected_real = sum(d.length for row in case.rows for d in row)
        assert len(set(loaded)) == len(loaded)
        assert len(real) == expected_real  # the answer itself holds every token

        held: list[int] = []
        for rank, local in enumerate(locals_):
            assert local.cut.rank == rank
            assert local.cut.ranks == ranks
            assert local.cut.form == form
            tokens = len(whole_rows[0]) if whole_rows else up(case.length, 1)
            if form == "rows":
                tokens = local.cut.ownership.tokens
                slots = [tokens]
            else:
                slots = slots_in(whole_rows[0], packings[0])
            share = share_of(kind, slots, ranks, rank)
            assert local.cut.local_tokens == len(share)
            assert local.cut.local_tokens % multiple == 0
            assert local.cut.global_tokens().tolist() == share
            held += share
            check_tensors(local, [[row[i] for i in share] for row in whole_rows], case)
        assert sorted(held) == list(range(locals_[0].cut.ownership.tokens))

        # Back again: each loaded token with a slot stands where it was.
        ids = batch["input_ids"]
        expected = torch.full_like(ids, -1)
        for row, column in loaded:
            expected[row, column] = ids[row, column]
        shards = [local["input_ids"] for local in locals_]
        back = longspan.unshard(shards, locals_[-1], fill=-1)
        torch.testing.assert_close(back, expected, rtol=0, atol=0)
        for row, column in real:
            assert back[row, column] == row * 1000 + column
        # All shares in one tensor, by layout instead of by dictionary.
        joined = torch.cat(shards, locals_[0].cut.axis)
        again = longspan.unshard(joined, locals_[0].cut, fill=-1)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)
        # Untrimmed: the padded rows or stream.
        padded = longspan.unshard(shards, locals_[0], trim=False)
        values = [[value_of(t, 0) for t in row] for row in whole_rows]
        tokens = locals_[0].cut.ownership.tokens
        shape = (len(case.rows), tokens) if form == "rows" else (tokens,)
        torch.testing.assert_close(
            padded, torch.tensor(values, dtype=torch.long).reshape(shape), rtol=0, atol=0
        )

    def test_derived_values_agree(
        self, case: Case, layout: str, kind: str, form: str, ranks: int, multiple: int
    ) -> None:
        batch = batch_of(case)
        whole_rows = laid_out(case, kind, form, ranks, multiple)
        local = longspan.shard(batch, rank=ranks - 1, ranks=ranks, layout=layout, multiple=multiple)
        packings = local.cut.packings
        ownership = local.cut.ownership
        share = local.cut.global_tokens()
        assert len(packings) == len(whole_rows)
        for packing, tokens in zip(packings, whole_rows, strict=True):
            numbers = longspan.values.document_ids(packing)
            assert numbers.tolist() == [t.number for t in tokens]
            assert longspan.values.padding_mask(packing).tolist() == [not t.real for t in tokens]
            assert longspan.values.position_ids(packing).tolist() == [t.position for t in tokens]
            begin, end = longspan.values.key_windows(
                longspan.Mask.causal(packing), ownership, ranks - 1
            )
            windows = [(t.first, i + 1) if t.real else (0, 0) for i, t in enumerate(tokens)]
            assert begin.tolist() == [windows[i][0] for i in share]
            assert end.tolist() == [windows[i][1] for i in share]
        if form == "stream":
            lengths = [0] * packings[0].documents
            for t in whole_rows[0]:
                if t.real:
                    lengths[packings[0].locate(t.first)[0]] += 1
            sums = torch.tensor([0, *lengths]).cumsum(0).tolist()
            assert local["cu_seqlens"].tolist() == sums
            assert local["cu_seqlens"].dtype == torch.int32
            assert local["cu_seqlens_padded"].tolist() == packings[0].offsets
            assert local["cu_seqlens_padded"].dtype == torch.int32
            assert local["max_seqlen"] == max(lengths, default=0)
        else:
            assert "cu_seqlens" not in local


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", [row[0] for row in LAYOUTS])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.positions != "none"], ids=lambda case: case.name
)
def test_given_positions_count_on_into_the_pads(case: Case, layout: str, ranks: int) -> None:
    kind, form = next((k, f) for name, k, f in LAYOUTS if name == layout)
    whole_rows = laid_out(case, kind, form, ranks, 1)
    for local in share_all(batch_of(case), ranks, layout=layout):
        share = local.cut.global_tokens()
        planes = 3 if case.positions == "planes" else 1
        for plane in range(planes):
            expected = []
            for row in whole_rows:
                values = counted(row, 7 + plane)
                if case.positions == "shared":
                    values = [v % 1000 for v in values]
                expected.append([values[i] for i in share])
            got = local["position_ids"][plane] if planes == 3 else local["position_ids"]
            assert got.tolist() == (expected if form == "rows" else expected[0])


@pytest.mark.parametrize("layout", [row[0] for row in LAYOUTS])
@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.positions == "none"], ids=lambda case: case.name
)
class TestGradients:
    """<A x, y> = <x, A' y>, on whole numbers, so that both sides are exact."""

    @staticmethod
    def numbers(*shape: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-9, 10, shape, generator=generator).double()

    def test_of_shard_are_exact(self, case: Case, layout: str, ranks: int) -> None:
        batch = batch_of(case)
        del batch["input_ids"]
        x = self.numbers(len(case.rows), case.length, 3, seed=1).requires_grad_()
        batch["inputs_embeds"] = x
        locals_ = share_all(batch, ranks, layout=layout)
        shares = [local["inputs_embeds"] for local in locals_]
        ys = [self.numbers(*share.shape, seed=r) for r, share in enumerate(shares)]
        (grad,) = torch.autograd.grad(shares, [x], ys)
        forward = sum((a * y).sum() for a, y in zip(shares, ys, strict=True))
        assert forward == (x * grad).sum()
        assert torch.equal(grad, longspan.unshard(ys, locals_[0]))

    def test_of_unshard_are_exact(self, case: Case, layout: str, ranks: int) -> None:
        locals_ = share_all(batch_of(case), ranks, layout=layout)
        zs = [
            self.numbers(*local["input_ids"].shape, 2, seed=r).requires_grad_()
            for r, local in enumerate(locals_)
        ]
        for trim in (True, False):
            whole_tensor = longspan.unshard(zs, locals_[0], trim=trim)
            y = self.numbers(*whole_tensor.shape, seed=9)
            grads = torch.autograd.grad(whole_tensor, zs, y)
            forward = (whole_tensor * y).sum()
            assert forward == sum((z * g).sum() for z, g in zip(zs, grads, strict=True))


# ---- Uneven shares.


@dataclass(frozen=True)
class Uneven:
    name: str
    ranges: tuple[tuple[tuple[int, int], ...], ...]


UNEVEN = [
    Uneven("sizes", (((0, 3),), ((3, 4),), ((4, 12),))),
    Uneven("rank_without_tokens", (((0, 5),), (), ((5, 12),), ())),
    Uneven("all_on_the_last_rank", ((), ((0, 12),))),
    Uneven("interleaved", (((9, 12), (0, 2)), ((4, 5),), ((5, 9), (2, 4)))),
]


@pytest.mark.parametrize("form", ["rows", "stream"])
@pytest.mark.parametrize("uneven", UNEVEN, ids=lambda u: u.name)
class TestUnevenShares:
    def test_hold_every_token_once_and_come_back(self, uneven: Uneven, form: str) -> None:
        rows, length = (2, 12) if form == "rows" else (3, 4)
        batch = {"input_ids": source_ids(rows, length), "position_ids": source_ids(rows, length)}
        ownership = longspan.Ownership.of_ranges(uneven.ranges)
        ranks = len(uneven.ranges)
        locals_ = share_all(batch, ranks, layout=ownership, form=form)
        flat = batch["input_ids"] if form == "rows" else batch["input_ids"].flatten()
        for local, ranges in zip(locals_, uneven.ranges, strict=True):
            share = [t for begin, end in ranges for t in range(begin, end)]
            assert torch.equal(local["input_ids"], flat[..., share])
            assert torch.equal(local["position_ids"], flat[..., share])
            assert local.cut.global_tokens().tolist() == share
        back = longspan.unshard([local["input_ids"] for local in locals_], locals_[0])
        assert torch.equal(back, batch["input_ids"])

    def test_may_reach_into_pads(self, uneven: Uneven, form: str) -> None:
        rows, length = (2, 10) if form == "rows" else (2, 5)
        batch = {"input_ids": source_ids(rows, length)}
        ownership = longspan.Ownership.of_ranges(uneven.ranges)
        locals_ = share_all(batch, len(uneven.ranges), layout=ownership, form=form)
        shards = [local["input_ids"] for local in locals_]
        assert torch.equal(longspan.unshard(shards, locals_[0]), batch["input_ids"])
        pads = longspan.unshard(
            [local["padding_mask"] for local in locals_], locals_[0], trim=False
        )
        assert pads.sum() == (4 if form == "rows" else 2)
        assert pads[..., -2:].all()


def test_uneven_sizes_are_ranges() -> None:
    sizes = longspan.Ownership.of_sizes([3, 0, 9])
    batch = {"input_ids": source_ids(1, 12)}
    locals_ = share_all(batch, 3, layout=sizes, form="rows")
    assert [local["input_ids"].shape[1] for local in locals_] == [3, 0, 9]
    assert locals_[1]["padding_mask"].shape == (1, 0)


def test_uneven_gradients_are_exact() -> None:
    x = torch.arange(24.0, dtype=torch.double).view(1, 12, 2).requires_grad_()
    ownership = longspan.Ownership.of_ranges(UNEVEN[3].ranges)
    locals_ = share_all({"inputs_embeds": x}, 3, layout=ownership, form="rows")
    shares = [local["inputs_embeds"] for local in locals_]
    (grad,) = torch.autograd.grad(shares, [x], [s.detach() * 2 for s in shares])
    assert torch.equal(grad, 2 * x)


# ---- What a batch may carry.


def test_token_id_zero_is_content() -> None:
    """Pads are known from lengths alone."""
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "seq_lens": torch.tensor([[5]])}
    local = longspan.shard(batch, layout="contiguous-stream")
    assert local["padding_mask"].tolist() == [False] * 5 + [True] * 3


def test_a_given_padding_mask_is_kept() -> None:
    given = torch.tensor([[False, True, False, False]])
    batch = {
        "input_ids": source_ids(1, 4),
        "padding_mask": given,
        "seq_lens": torch.tensor([[4]]),
    }
    assert torch.equal(longspan.shard(batch, layout="contiguous-rows")["padding_mask"], given)


def test_tensors_of_the_result_are_new() -> None:
    batch = {
        "input_ids": source_ids(2, 4),
        "labels": source_ids(2, 4),
        "position_ids": source_ids(1, 4).expand(2, 4),
        "loss_mask": torch.ones(2, 4),
    }
    for layout, _, _ in LAYOUTS:
        local = longspan.shard(batch, layout=layout)
        before = copy.deepcopy(batch)
        for key in ("input_ids", "labels", "position_ids", "loss_mask", "padding_mask"):
            assert local[key].is_contiguous(), (layout, key)
            local[key].zero_()
        for key, value in before.items():
            assert torch.equal(batch[key], value), (layout, key)


def test_order_of_keys_is_the_callers() -> None:
    batch = {
        "tag": "x",
        "labels": source_ids(1, 4),
        "attention_mask": torch.ones(1, 4),
        "pixel_values": torch.ones(2, 7),
        "input_ids": source_ids(1, 4),
        "missing": None,
    }
    local = longspan.shard(batch, rank=0, ranks=2)
    assert list(local) == [
        "tag",
        "labels",
        "pixel_values",
        "input_ids",
        "position_ids",
        "padding_mask",
    ]


def test_payload_passes_and_none_is_dropped() -> None:
    pixels = torch.ones(3, 5)
    nested = {"a": [1, 2]}
    batch = {
        "input_ids": source_ids(2, 4),
        "labels": None,
        "qkv_format": "thd",
        "pixel_values": pixels,
        "nested": nested,
        "count": 3,
        "flag": False,
    }
    with unchanged(batch):
        local = longspan.shard(batch, rank=1, ranks=2)
    assert local["pixel_values"] is pixels or torch.equal(local["pixel_values"], pixels)
    assert local["nested"] is nested
    assert local["qkv_format"] == "thd"
    assert local["count"] == 3
    assert local["flag"] is False
    assert "labels" not in local


@pytest.mark.parametrize("layout", [row[0] for row in LAYOUTS])
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_declared_extras_are_cut_along_their_axis(layout: str, ranks: int) -> None:
    rows, length = 2, 7
    ids = source_ids(rows, length)
    scores = torch.stack([ids, ids + 100_000, ids + 200_000])  # [heads, B, S]
    weights = ids.double().unsqueeze(-1).expand(rows, length, 4)
    table = (
        longspan.values.TokenTable()
        .with_tensor("scores", axis=2, fill=-5)
        .with_tensor("weights", fill=0.25)
        .with_tensor("steps", fill="counting")
    )
    batch = {"input_ids": ids, "scores": scores, "weights": weights, "steps": ids}
    for local in share_all(batch, ranks, layout=layout, table=table):
        loaded = local["input_ids"]
        pads = local["padding_mask"]
        for plane in range(3):
            expected = torch.where(pads, -5, loaded + plane * 100_000)
            assert torch.equal(local["scores"][plane], expected)
        expected = torch.where(pads, 0.25, loaded.double())
        assert torch.equal(local["weights"], expected.unsqueeze(-1).expand(*loaded.shape, 4))
        assert torch.equal(local["steps"][~pads], loaded[~pads])


def test_loss_mask_travels_with_the_tokens() -> None:
    """A loss mask is cut and padded like any other tensor."""
    batch = {"input_ids": source_ids(1, 5), "loss_mask": torch.tensor([[1.0, 2, 3, 4, 5]])}
    locals_ = share_all(batch, 2)
    assert locals_[0]["loss_mask"].tolist() == [[1, 2, 0, 0]]
    assert locals_[1]["loss_mask"].tolist() == [[3, 4, 5, 0]]


def test_unknown_per_token_tensors_pass_whole_only_when_named() -> None:
    """Nothing of the sequence's length stays behind whole."""
    batch = {"input_ids": source_ids(2, 4), "speaker": source_ids(2, 4)}
    with unchanged(batch), pytest.raises(ValueError, match=r"`speaker` is int64 .*pass_through"):
        longspan.shard(batch)
    local = longspan.shard(batch, rank=0, ranks=2, pass_through=["speaker"])
    assert torch.equal(local["speaker"], batch["speaker"])


def test_labels_shift_before_the_cut() -> None:
    """The last token of a shard gets the first label of the next."""
    ids = source_ids(2, 8)
    batch = {"input_ids": ids, "labels": ids.clone()}
    for layout, _, _ in LAYOUTS:
        for ranks in (1, 2, 4):
            locals_ = share_all(batch, ranks, layout=layout, shift_labels=True)
            labels = longspan.unshard([local["labels"] for local in locals_], locals_[0])
            expected = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
            assert torch.equal(labels, expected), (layout, ranks)


def test_tokens_ahead_cross_shard_borders() -> None:
    ids = source_ids(2, 8)
    batch = {"input_ids": ids}
    ahead = {"ids_1": ("input_ids", 1), "ids_3": ("input_ids", 3), "all_gone": ("input_ids", 99)}
    for layout, _, _ in LAYOUTS:
        locals_ = share_all(batch, 2, layout=layout, ahead=ahead)
        for name, (_, steps) in ahead.items():
            got = longspan.unshard([local[name] for local in locals_], locals_[0])
            expected = torch.zeros_like(ids)
            kept = max(0, 8 - steps)
            expected[:, :kept] = ids[:, 8 - kept :]
            assert torch.equal(got, expected), (layout, name)


def test_chunks_are_sharded_one_by_one() -> None:
    case = next(c for c in CASES if c.name == "packed_rows")
    batch = batch_of(case)
    batch["tag"] = "kept"
    with unchanged(batch):
        chunks = longspan.values.shard_chunks(
            batch, 2, rank=1, ranks=2, layout="per-document-head-tail"
        )
    assert len(chunks) == 2
    for i, chunk in enumerate(chunks):
        alone = {
            key: value[i : i + 1] if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
        }
        expected = longspan.shard(alone, rank=1, ranks=2, layout="per-document-head-tail")
        assert list(chunk) == list(expected)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(chunk[key], value), key
            else:
                assert chunk[key] == value, key


def test_chunks_cut_planes_and_expanded_positions_by_row() -> None:
    ids = source_ids(4, 4)
    planes = torch.stack([ids, ids + 1, ids + 2])
    for positions in (planes, torch.arange(4).unsqueeze(0)):
        chunks = longspan.values.shard_chunks({"input_ids": ids, "position_ids": positions}, 2)
        for i, chunk in enumerate(chunks):
            rows = slice(2 * i, 2 * i + 2)
            expected = positions[:, rows] if positions.dim() == 3 else positions.expand(2, 4)
            assert torch.equal(chunk["position_ids"], expected)


class FakeGroup:
    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def test_a_group_gives_rank_and_size() -> None:
    batch = {"input_ids": source_ids(1, 8)}
    local = longspan.shard(batch, FakeGroup())
    assert torch.equal(local["input_ids"], longspan.shard(batch, rank=1, ranks=2)["input_ids"])
    chunks = longspan.values.shard_chunks(batch, 1, FakeGroup())
    assert torch.equal(chunks[0]["input_ids"], local["input_ids"])


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: ids.t().contiguous().t(),
        lambda ids: torch.stack([ids, ids], -1)[..., 0],
        lambda ids: ids.flip(0).flip(0),
        lambda ids: ids.to(torch.int32),
        lambda ids: ids.to(torch.int16),
    ],
    ids=["transposed", "strided", "flipped", "int32", "int16"],
)
def test_any_strides_and_integers_will_do(make: Any) -> None:
    ids = source_ids(3, 7)
    for layout, _, _ in LAYOUTS:
        locals_ = share_all({"input_ids": make(ids)}, 3, layout=layout)
        back = longspan.unshard([local["input_ids"] for local in locals_], locals_[0])
        assert back.dtype == make(ids).dtype
        assert torch.equal(back.long(), ids)


def test_zero_stride_tensors_are_read_as_they_look() -> None:
    ids = torch.arange(6).unsqueeze(0).expand(4, 6)
    mask = torch.ones(1, 1, dtype=torch.long).expand(4, 6)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(3).expand(4, 6)}
    locals_ = share_all(batch, 2, layout="contiguous-stream")
    assert torch.equal(longspan.unshard([local["input_ids"] for local in locals_], locals_[0]), ids)


def test_meta_tensors_give_meta_shares() -> None:
    ids = torch.empty(2, 6, dtype=torch.long, device="meta")
    for layout, _, form in LAYOUTS:
        batch = {
            "input_ids": ids,
            "position_ids": ids,
            "seq_lens": torch.tensor([[3, 2], [6, -1000]]),
        }
        local = longspan.shard(batch, rank=0, ranks=2, layout=layout)
        for key in ("input_ids", "position_ids", "padding_mask"):
            assert local[key].is_meta
            assert local[key].shape[-1] == local.cut.local_tokens
        assert local["input_ids"].dim() == (2 if form == "rows" else 1)


def test_lengths_of_any_integer_type() -> None:
    for dtype in (torch.int32, torch.int64, torch.int16):
        batch = {
            "input_ids": source_ids(1, 8),
            "seq_lens": torch.tensor([[3, 2, -1000]], dtype=dtype),
            "seq_lens_padded": torch.tensor([[4, -1000, 4]], dtype=dtype),
        }
        local = longspan.shard(batch, layout="contiguous-stream")
        assert local["cu_seqlens"].tolist() == [0, 3, 5]
        assert local["cu_seqlens_padded"].tolist() == [0, 4, 8]


def test_another_sentinel() -> None:
    batch = {"input_ids": source_ids(1, 8), "seq_lens": torch.tensor([[3, -1, 5]])}
    local = longspan.shard(batch, layout="contiguous-stream", sentinel=-1)
    assert local["cu_seqlens"].tolist() == [0, 3, 8]


def test_bfloat16_embeddings_and_double_masks() -> None:
    batch = {
        "inputs_embeds": torch.randn(2, 5, 3, dtype=torch.bfloat16),
        "attention_mask": torch.tensor([[1.0, 1, 1, 0, 0], [2, 2, 3, 3, 3]], dtype=torch.double),
    }
    locals_ = share_all(batch, 2, layout="per-document-head-tail")
    assert locals_[0]["cu_seqlens"].tolist() == [0, 3, 5, 8]
    back = longspan.unshard([local["inputs_embeds"] for local in locals_], locals_[0])
    assert torch.equal(back[1], batch["inputs_embeds"][1])
    assert torch.equal(back[0, :3], batch["inputs_embeds"][0, :3])
    assert not back[0, 3:].any()


# ---- Pack and pad on their own.


def test_pack_copies_nothing_and_pad_adds_up() -> None:
    case = next(c for c in CASES if c.name == "packed_rows")
    batch = batch_of(case)
    with unchanged(batch):
        packed = longspan.values.pack(batch)
        wide = longspan.values.pad(longspan.values.pad(packed, slots=8), multiple=7)
    assert packed.tokens == 24
    assert packed["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
    assert [wide.packings[0].padded_length(d) for d in range(5)] == [8, 8, 8, 8, 8]
    assert wide.tokens == 42
    values = wide.tensor("input_ids")
    for d, document in enumerate(case.rows[0]):
        begin = wide.packings[0].offsets[d]
        expected = torch.arange(document.begin, document.begin + document.length)
        assert torch.equal(values[begin : begin + document.length], expected)
    # Padding to what is there already changes nothing.
    again = longspan.values.pad(wide, multiple=7)
    assert again.packings == wide.packings
    assert torch.equal(again.tensor("labels"), wide.tensor("labels"))
    # Rounding slots up rounds the tail too, so that it can be cut like them.
    assert longspan.values.pad(wide, slots=8).tokens == 48


def test_rows_lengthen_step_by_step_too() -> None:
    rows = longspan.values.pack({"input_ids": source_ids(2, 5)}, form="rows")
    wide = longspan.values.pad(longspan.values.pad(rows, multiple=4), multiple=3)
    assert (rows.tokens, wide.tokens) == (5, 9)
    assert wide["input_ids"].tolist() == [
        [*range(5), 0, 0, 0, 0],
        [*range(1000, 1005), 0, 0, 0, 0],
    ]
    assert [p.lengths for p in wide.packings] == [[5], [5]]


def test_padding_for_a_layout_is_what_it_needs() -> None:
    packed = longspan.values.pack({"input_ids": source_ids(3, 5)})
    streams = [(layout, kind) for layout, kind, form in LAYOUTS if form == "stream"]
    assert streams
    for layout, kind in streams:
        for ranks in RANKS:
            padded = longspan.values.pad(packed, layout=layout, ranks=ranks, multiple=2)
            ownership = longspan.Ownership.of(kind, padded.packings[0], ranks)
            assert all(ownership.local_tokens(r) % 2 == 0 for r in range(ranks))


# ---- Refusals. Every one leaves the batch as it was.


@dataclass(frozen=True)
class Refusal:
    name: str
    batch: Any
    message: str
    error: type[Exception] = ValueError
    options: Any = None


def ids(rows: int = 2, length: int = 8) -> torch.Tensor:
    return source_ids(rows, length)


def with_ids(**entries: Any) -> dict[str, Any]:
    return {"input_ids": ids(), **entries}


REFUSED = [
    # The tokens themselves.
    Refusal("not_a_mapping", [1, 2], r"mapping, got a list", TypeError),
    Refusal("empty_batch", {}, "exactly one of .*neither is there"),
    Refusal("no_tokens", {"labels": ids()}, "exactly one of .*neither is there"),
    Refusal(
        "both_inputs",
        with_ids(inputs_embeds=torch.zeros(2, 8, 3)),
        "exactly one of .*both are there",
    ),
    Refusal(
        "ids_of_one_axis", {"input_ids": torch.arange(4)}, r"`input_ids` is int64 \[4\]; expected"
    ),
    Refusal("ids_of_three_axes", {"input_ids": torch.zeros(1, 2, 3).long()}, r"int64 \[1, 2, 3\]"),
    Refusal("float_ids", {"input_ids": torch.zeros(2, 8)}, r"`input_ids` is float32 \[2, 8\]"),
    Refusal("bool_ids", {"input_ids": torch.zeros(2, 8).bool()}, r"`input_ids` is bool"),
    Refusal("scalar_ids", {"input_ids": torch.tensor(3)}, r"`input_ids` is int64 \[\]"),
    Refusal("integer_embeds", {"inputs_embeds": torch.zeros(2, 8, 3).long()}, "floating point"),
    Refusal("flat_embeds", {"inputs_embeds": torch.zeros(2, 8)}, r"\[rows, tokens, channels\]"),
    Refusal(
        "listed_ids",
        {"input_ids": [[1, 2]]},
        "`input_ids` is a list; give it as a tensor",
        TypeError,
    ),
    Refusal(
        "sparse_ids",
        {"input_ids": ids().to_sparse()},
        "shard: `input_ids` is a sparse int64 tensor; expected a dense tensor",
        TypeError,
    ),
    Refusal("packed_already", with_ids(cu_seqlens=torch.tensor([0, 16])), "packed already"),
    # Lengths.
    Refusal(
        "documents_longer_than_the_row",
        with_ids(seq_lens=torch.tensor([[5, 4], [8, -1000]])),
        r"documents of row 0 take 5 \+ 4 tokens or more but the row has 8",
    ),
    Refusal(
        "slots_longer_than_the_row",
        with_ids(seq_lens=torch.tensor([[3], [3]]), seq_lens_padded=torch.tensor([[8], [9]])),
        r"row 1 take 0 \+ 9 tokens .* shorten the lengths or widen the row",
    ),
    Refusal(
        "lengths_beyond_64_bits_together",
        with_ids(seq_lens=torch.tensor([[1, 2**63 - 1], [8, -1000]])),
        r"row 0 take 1 \+ 9223372036854775807 tokens",
    ),
    Refusal(
        "negative_length",
        with_ids(seq_lens=torch.tensor([[5, -1], [8, -1000]])),
        "`seq_lens` of row 0 holds -1; .*the sentinel is -1000",
    ),
    Refusal(
        "other_sentinel",
        with_ids(seq_lens=torch.tensor([[5, -1000], [8, -1000]])),
        "holds -1000; .*the sentinel is -1",
        options={"sentinel": -1},
    ),
    Refusal(
        "document_longer_than_its_slot",
        with_ids(seq_lens=torch.tensor([[5], [8]]), seq_lens_padded=torch.tensor([[4], [8]])),
        "document 0 of row 0 has 5 tokens but a slot of 4",
    ),
    Refusal(
        "other_number_of_slots",
        with_ids(
            seq_lens=torch.tensor([[3, 2], [8, -1000]]), seq_lens_padded=torch.tensor([[8], [8]])
        ),
        "row 0 has 2 entries in `seq_lens` but 1 in `seq_lens_padded`",
    ),
    Refusal(
        "lengths_of_other_rows", with_ids(seq_lens=torch.tensor([[8]])), r"expected integers \[2, "
    ),
    Refusal(
        "lengths_of_one_axis", with_ids(seq_lens=torch.tensor([8, 8])), r"`seq_lens` is int64 \[2\]"
    ),
    Refusal(
        "float_lengths", with_ids(seq_lens=torch.tensor([[8.0], [8.0]])), "`seq_lens` is float32"
    ),
    Refusal("listed_lengths", with_ids(seq_lens=[[8], [8]]), "`seq_lens` is a list", TypeError),
    Refusal(
        "slots_without_lengths",
        with_ids(seq_lens_padded=torch.tensor([[8], [8]])),
        "`seq_lens_padded` without `seq_lens`; give both",
    ),
    Refusal(
        "lengths_without_values",
        with_ids(seq_lens=torch.zeros(2, 1, dtype=torch.long, device="meta")),
        "`seq_lens` is on the meta device",
    ),
    # Masks.
    Refusal(
        "hole_in_a_mask",
        with_ids(attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]] * 2)),
        "row 0 of the mask has pads inside a document, before column 3",
    ),
    Refusal(
        "hole_in_a_padding_mask",
        with_ids(padding_mask=torch.tensor([[False] * 8, [False, True] * 4])),
        "row 1 of the mask has pads inside a document, before column 2",
    ),
    Refusal(
        "mask_of_other_length", with_ids(attention_mask=torch.ones(2, 7)), r"expected \[2, 8\] or"
    ),
    Refusal(
        "mask_of_three_axes", with_ids(attention_mask=torch.ones(2, 8, 8)), r"expected \[2, 8\] or"
    ),
    Refusal(
        "mask_of_other_rows", with_ids(attention_mask=torch.ones(1, 8)), r"expected \[2, 8\] or"
    ),
    Refusal(
        "square_of_other_length",
        with_ids(attention_mask=torch.ones(2, 1, 8, 7).bool()),
        r"\[2, 1, 8, 8\]",
    ),
    Refusal(
        "square_without_heads",
        with_ids(attention_mask=torch.ones(2, 0, 8, 8).bool()),
        "expected a square",
    ),
    Refusal(
        "square_of_integers",
        with_ids(attention_mask=torch.ones(2, 1, 8, 8).long()),
        "integers could mean",
    ),
    Refusal(
        "square_that_is_not_causal",
        with_ids(attention_mask=torch.ones(2, 1, 8, 8).bool()),
        "more than causal attention with padding",
    ),
    Refusal(
        "square_of_documents",
        with_ids(
            attention_mask=torch.block_diag(torch.ones(4, 4), torch.ones(4, 4))
            .tril()
            .bool()
            .expand(2, 1, 8, 8)
        ),
        "give the documents as seq_lens",
    ),
    Refusal(
        "heads_that_differ",
        with_ids(
            attention_mask=torch.stack([torch.ones(8, 8).tril(), torch.eye(8)])
            .bool()
            .expand(2, 2, 8, 8)
        ),
        "more than causal attention",
    ),
    Refusal(
        "mask_of_fractions", with_ids(attention_mask=torch.full((2, 8), 0.5)), "fractions or infin"
    ),
    Refusal(
        "additive_mask_of_two_axes",
        with_ids(attention_mask=torch.full((2, 8), float("-inf"))),
        "fractions or infin",
    ),
    Refusal("complex_mask", with_ids(attention_mask=torch.ones(2, 8) * 1j), "numbers of documents"),
    Refusal(
        "mask_without_values",
        with_ids(attention_mask=torch.ones(2, 8, device="meta")),
        "`attention_mask` is on the meta device",
    ),
    Refusal(
        "square_without_values",
        with_ids(attention_mask=torch.ones(2, 1, 8, 8, device="meta")),
        "`attention_mask` is on the meta device",
    ),
    Refusal(
        "padding_mask_without_values",
        with_ids(padding_mask=torch.ones(2, 8, device="meta").bool()),
        "`padding_mask` is on the meta device",
    ),
    Refusal(
        "integer_padding_mask",
        with_ids(padding_mask=ids()),
        r"`padding_mask` is int64 .*expected bool",
    ),
    Refusal(
        "mask_as_a_dictionary", with_ids(attention_mask={"full": 1}), "is a dict; give", TypeError
    ),
    # Per-token tensors.
    Refusal(
        "labels_of_other_length",
        with_ids(labels=ids(2, 7)),
        r"`labels` is int64 \[2, 7\]; expected 2 rows",
    ),
    Refusal(
        "labels_of_other_rows",
        with_ids(labels=ids(1, 8)),
        r"`labels` is int64 \[1, 8\]; expected 2 rows",
    ),
    Refusal(
        "flat_labels",
        with_ids(labels=torch.arange(16)),
        r"`labels` is int64 \[16\]; expected 2 rows",
    ),
    Refusal(
        "scalar_labels",
        with_ids(labels=torch.tensor(1)),
        r"`labels` is int64 \[\]; expected 2 rows",
    ),
    Refusal(
        "labels_that_cannot_say_ignore",
        with_ids(labels=ids().to(torch.uint8)),
        "`labels` is uint8 .*cannot hold its pad value -100",
    ),
    Refusal(
        "flat_positions", with_ids(position_ids=torch.arange(8)), r"`position_ids` is int64 \[8\]"
    ),
    Refusal(
        "planes_of_other_rows",
        with_ids(position_ids=torch.zeros(3, 1, 8).long()),
        "expected 2 rows of 8 tokens",
    ),
    Refusal(
        "extra_on_another_axis",
        with_ids(scores=torch.zeros(2, 8, 3)),
        r"`scores` is float32 \[2, 8, 3\]; expected 2 rows of 8 tokens at axes 1 and 2",
        options={"table": longspan.values.TokenTable().with_tensor("scores", axis=2)},
    ),
    Refusal(
        "unknown_per_token", with_ids(speaker=torch.zeros(2, 8, 3)), "the table does not know it"
    ),
    Refusal(
        "ids_passed_through",
        with_ids(),
        "`input_ids` says how many tokens there are",
        options={"pass_through": ["input_ids"]},
    ),
    Refusal(
        "key_that_is_no_name",
        {"input_ids": ids(), 3: ids()},
        "shard: `batch` has the key 3; expected names",
        TypeError,
    ),
    # Ranks, layouts and multiples.
    Refusal(
        "rank_too_high",
        with_ids(),
        "shard: `rank` is 2; expected 0 to 1",
        options={"rank": 2, "ranks": 2},
    ),
    Refusal(
        "negative_rank",
        with_ids(),
        "shard: `rank` is -1; expected 0 to 1",
        options={"rank": -1, "ranks": 2},
    ),
    Refusal("no_ranks", with_ids(), "`ranks` is 0; expected 1 to", options={"rank": 0, "ranks": 0}),
    Refusal(
        "negative_ranks",
        with_ids(),
        "`ranks` is -2; expected 1 to",
        options={"rank": 0, "ranks": -2},
    ),
    Refusal("rank_alone", with_ids(), "rank and ranks go together", options={"rank": 0}),
    Refusal(
        "group_and_rank",
        with_ids(),
        "a group, or rank and ranks, not both",
        options={"group": FakeGroup(), "rank": 0, "ranks": 2},
    ),
    Refusal(
        "unknown_layout",
        with_ids(),
        "layout 'zigzag' is not one of head-tail,",
        options={"layout": "zigzag"},
    ),
    Refusal(
        "no_multiple",
        with_ids(),
        "multiple of 0 tokens; expected at least 1",
        options={"multiple": 0},
    ),
    Refusal("negative_multiple", with_ids(), "multiple of -4 tokens", options={"multiple": -4}),
    Refusal(
        "multiple_beyond_64_bits",
        with_ids(),
        "more than 64 bits count",
        options={"multiple": 2**62, "rank": 0, "ranks": 4},
    ),
    Refusal(
        "per_document_multiple_beyond_64_bits",
        with_ids(),
        "more than 64 bits",
        options={"multiple": 2**61, "rank": 0, "ranks": 2, "layout": "per-document-head-tail"},
    ),
    Refusal(
        "ownership_of_other_ranks",
        with_ids(),
        "the ownership has 2 ranks, the group 3",
        options={"layout": longspan.Ownership.of_sizes([4, 4]), "rank": 0, "ranks": 3},
    ),
    Refusal(
        "ownership_of_fewer_tokens",
        with_ids(),
        "the ownership has 7 tokens but the batch 8; make it from the padded batch",
        options={"layout": longspan.Ownership.of_sizes([7]), "form": "rows"},
    ),
    Refusal(
        "shift_without_labels",
        with_ids(),
        "the batch has no 'labels'",
        options={"shift_labels": True},
    ),
    Refusal(
        "ahead_of_nothing",
        with_ids(),
        "the batch has no 'lables'",
        options={"ahead": {"next": ("lables", 1)}},
    ),
    Refusal(
        "steps_backwards",
        with_ids(),
        "-1 steps; expected at least 0",
        options={"ahead": {"next": ("input_ids", -1)}},
    ),
    Refusal(
        "name_with_another_axis",
        with_ids(position_ids=torch.zeros(3, 2, 8).long()),
        "the table has another axis for 'labels'; choose another name",
        options={"ahead": {"labels": ("position_ids", 1)}},
    ),
]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda r: r.name)
@pytest.mark.parametrize("layout", ["head-tail", "per-document-head-tail"])
def test_refuses(refusal: Refusal, layout: str) -> None:
    options = {"layout": layout, **(refusal.options or {})}
    batch = refusal.batch
    guard = unchanged(batch) if isinstance(batch, dict) else contextlib.nullcontext()
    with guard, pytest.raises(refusal.error, match=refusal.message):
        longspan.shard(batch, **options)


def test_refuses_chunks_that_do_not_divide() -> None:
    """Rows are never dropped."""
    batch = {"input_ids": ids(3, 4)}
    with (
        unchanged(batch),
        pytest.raises(ValueError, match="3 rows do not split into 2 equal chunks"),
    ):
        longspan.values.shard_chunks(batch, 2)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"{count} chunks; expected at least 1"):
            longspan.values.shard_chunks(batch, count)


def test_refuses_to_name_a_pack_form_or_padding_it_does_not_have() -> None:
    batch = {"input_ids": ids()}
    rows, stream = longspan.values.pack(batch, form="rows"), longspan.values.pack(batch)
    with pytest.raises(ValueError, match="pack: `form` is 'grid'; expected one of rows, stream"):
        longspan.values.pack(batch, form="grid")
    with pytest.raises(ValueError, match="documents inside rows do not move"):
        longspan.values.pad(rows, slots=4)
    with pytest.raises(ValueError, match="layout 'head-tail' cuts rows, but the batch is stream"):
        longspan.values.pad(stream, layout="head-tail", ranks=2)
    with pytest.raises(ValueError, match="`ranks` goes with `layout`"):
        longspan.values.pad(stream, ranks=2)
    with pytest.raises(ValueError, match="multiple is 0"):
        longspan.values.pad(stream, multiple=0)
    with pytest.raises(ValueError, match="multiple is -3"):
        longspan.values.pad(stream, slots=-3)
    with pytest.raises(ValueError, match="no per-token tensor 'label'"):
        stream["label"]


class TestUnshardRefuses:
    local = longspan.shard({"input_ids": ids()}, rank=0, ranks=2)

    @pytest.mark.parametrize(
        ("tensors", "options", "message", "error"),
        [
            ([], {}, "no tensors; give one for each rank", ValueError),
            (torch.zeros(2, 4), {}, "give the tensors of all ranks", ValueError),
            ([torch.zeros(2, 4)] * 3, {}, "3 tensors for 2 ranks", ValueError),
            (
                [torch.zeros(2, 4), torch.zeros(2, 5)],
                {},
                "rank 1 gave float32 .*its 4 tokens",
                ValueError,
            ),
            (
                [torch.zeros(2, 4), torch.zeros(2, 4).long()],
                {},
                "only their tokens may differ",
                ValueError,
            ),
            (
                [torch.zeros(2, 4), torch.zeros(3, 4)],
                {},
                "only their tokens may differ",
                ValueError,
            ),
            (
                [torch.zeros(2, 4), torch.zeros(2, 4, 1)],
                {},
                "only their tokens may differ",
                ValueError,
            ),
            (
                [torch.zeros(2, 4), torch.zeros(2, 4, device="meta")],
                {},
                "on meta but rank 0",
                ValueError,
            ),
            (torch.zeros(8), {}, r"axis 1 of float32 \[8\]", ValueError),
            (torch.zeros(2, 8), {"axis": 2}, r"axis 2 of float32 \[2, 8\]", ValueError),
            (torch.tensor(1.0), {}, r"axis 1 of float32 \[\]", ValueError),
            (
                torch.zeros(2, 8),
                {"fill": "x"},
                "unshard: `fill` is str; expected a number",
                ValueError,
            ),
            (torch.zeros(2, 8), {"fill": 2**70}, "unshard: .* does not fit 64 bits", ValueError),
            (
                [torch.zeros(2, 4), "x"],
                {},
                "`tensors` holds a str; expected a tensor, or a list",
                TypeError,
            ),
        ],
    )
    def test_what_does_not_fit(
        self, tensors: Any, options: dict[str, Any], message: str, error: type[Exception]
    ) -> None:
        with pytest.raises(error, match=message):
            longspan.unshard(tensors, self.local, **options)

    def test_anything_but_a_layout(self) -> None:
        with pytest.raises(TypeError, match="expected the dictionary that shard returned"):
            longspan.unshard(torch.zeros(2, 8), {"layout": 1})  # type: ignore[arg-type]

    def test_a_fill_that_the_type_does_not_hold(self) -> None:
        batch = {"input_ids": ids(1, 4), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
        local = longspan.shard(batch, layout="contiguous-stream")
        with pytest.raises(ValueError, match="fill 300 does not fit int8"):
            longspan.unshard(local["input_ids"].to(torch.int8), local, fill=300)
        assert longspan.unshard(local["input_ids"], local, fill=300).tolist() == [[0, 1, 300, 300]]


def test_unshard_takes_any_axis_and_trailing_axes() -> None:
    batch = {"input_ids": ids(2, 5)}
    locals_ = share_all(batch, 3)
    logits = [local["input_ids"].unsqueeze(-1).expand(-1, -1, 4) for local in locals_]
    back = longspan.unshard(logits, locals_[0])
    assert torch.equal(back, batch["input_ids"].unsqueeze(-1).expand(2, 5, 4))
    sideways = [x.transpose(0, 1) for x in (local["input_ids"] for local in locals_)]
    assert torch.equal(longspan.unshard(sideways, locals_[0], axis=0).t(), batch["input_ids"])
    assert torch.equal(
        longspan.unshard([x["input_ids"] for x in locals_], locals_[0], axis=-1), batch["input_ids"]
    )


def test_huge_packings_refuse_32_bit_offsets_without_allocating() -> None:
    for lengths in ([2**31], [2**31 - 1, 1], [2**40] * 3):
        packing = longspan.Packing.of(lengths)
        for make in (longspan.values.cumulative_lengths, longspan.values.cumulative_padded_lengths):
            with pytest.raises(
                ValueError, match=f"{sum(lengths)} tokens do not fit the 32-bit offsets"
            ):
                make(packing)
    assert longspan.values.cumulative_lengths(longspan.Packing.of([2**31 - 1])).tolist() == [
        0,
        2**31 - 1,
    ]
    padded = longspan.Packing.of([1], [2**31])
    assert longspan.values.cumulative_lengths(padded).tolist() == [0, 1]
    with pytest.raises(ValueError, match="32-bit"):
        longspan.values.cumulative_padded_lengths(padded)


def test_huge_streams_refuse_32_bit_offsets_before_any_loss() -> None:
    ids = torch.empty(1, 2**31, dtype=torch.long, device="meta")
    options = {"rank": 3, "ranks": 2**18}
    with pytest.raises(ValueError, match="2147483648 tokens do not fit the 32-bit offsets"):
        longspan.shard({"input_ids": ids}, layout="contiguous-stream", **options)
    local = longspan.shard({"input_ids": ids}, layout="contiguous-rows", **options)
    assert local["input_ids"].shape == (1, 2**13)


def test_c_level_reading_refuses_what_comes_twice() -> None:
    table = longspan.values.TokenTable()
    with pytest.raises(ValueError, match="'input_ids' comes twice"):
        _C.read_rows([("input_ids", ids()), ("input_ids", ids())], table, SENTINEL, [])
