"""Packing, Ownership, Mask and TokenRange from Python: the same values as in C++,
with Python's manners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan
from longspan import Mask, Ownership, Packing
from longspan.values import TokenRange, TokenTable

MOST = 2**63 - 1


class TestTokenRange:
    def test_is_a_pair_with_a_length(self) -> None:
        tokens = TokenRange(3, 7)
        assert (tokens.begin, tokens.end, len(tokens)) == (3, 7, 4)
        assert 3 in tokens
        assert 7 not in tokens
        begin, end = tokens
        assert (begin, end) == (3, 7)
        assert tokens == TokenRange((3, 7))
        assert hash(tokens) == hash(TokenRange(3, 7))
        assert tokens != TokenRange(3, 8)
        assert repr(tokens) == "[3, 7)"

    def test_refuses_to_end_before_it_begins(self) -> None:
        with pytest.raises(ValueError, match=r"\[3, 2\) ends before it begins"):
            TokenRange(3, 2)
        with pytest.raises(TypeError):
            TokenRange("a", "b")  # type: ignore[call-overload]


class TestPacking:
    def test_tells_where_tokens_lie(self) -> None:
        packing = Packing.of([3, 0, 2], [4, 1, 2], 9)
        assert packing.documents == 3
        assert packing.tokens == 9
        assert packing.real_tokens == 5
        assert packing.lengths == [3, 0, 2]
        assert packing.offsets == [0, 4, 5, 7]
        assert packing.tail == TokenRange(7, 9)
        assert [packing.locate(t) for t in (0, 3, 4, 6, 8)] == [
            (0, 0),
            (0, 3),
            (1, 0),
            (2, 1),
            (-1, 1),
        ]
        assert packing.token_of(2, 1) == 6
        assert [packing.is_pad(t) for t in range(9)] == [
            False, False, False, True, True, False, False, True, True,
        ]  # fmt: skip
        assert packing.pads() == [TokenRange(3, 5), TokenRange(7, 9)]
        assert packing.real(0) == TokenRange(0, 3)
        assert packing.slot(0) == TokenRange(0, 4)
        assert (packing.length(2), packing.padded_length(0)) == (2, 4)

    def test_pads_to_multiples(self) -> None:
        packing = Packing.of([3, 5])
        assert packing.with_slots_multiple_of(4).offsets == [0, 4, 12]
        assert packing.with_tokens_multiple_of(5).tokens == 10
        assert Packing.rows(2, 3) == Packing.of([3, 3])
        assert Packing.single(6) == Packing.of([6])
        assert Packing.single(6) != Packing.of([3, 3])

    def test_prints_itself(self) -> None:
        assert repr(Packing.of([3, 2], [4, 2])) == "Packing(6 tokens, 2 documents: 3/4 2)"

    @pytest.mark.parametrize(
        ("call", "message", "error"),
        [
            (lambda: Packing.of([-1]), "is -1; lengths are not negative", ValueError),
            (lambda: Packing.of([3], [2]), "document 0 has 3 tokens but a slot of 2", ValueError),
            (lambda: Packing.of([3], [3, 3]), "1 lengths but 2 padded lengths", ValueError),
            (lambda: Packing.of([3], [3], 2), "hold 3 tokens but the stream has 2", ValueError),
            (lambda: Packing.of([MOST, 1]), "more than 64 bits hold", ValueError),
            (
                lambda: Packing.of([2**63]),
                "`lengths` holds 9223372036854775808; expected",
                TypeError,
            ),
            (lambda: Packing.of([1.5]), "`lengths` holds a float; expected", TypeError),
            (lambda: Packing.of("ab"), "Packing.of: `lengths` is a str; expected", TypeError),
            (lambda: Packing.single(-1), "a stream of -1 tokens", ValueError),
            (lambda: Packing.rows(-1, 2), "neither may be negative", ValueError),
            (lambda: Packing.of([3]).locate(3), "token 3 of 3", ValueError),
            (lambda: Packing.of([3]).locate(-1), "token -1 of 3", ValueError),
            (lambda: Packing.of([3]).length(1), "document 1 of 1", ValueError),
            (lambda: Packing.of([3]).slot(-1), "document -1 of 1", ValueError),
            (lambda: Packing.of([3]).with_slots_multiple_of(0), "multiple is 0", ValueError),
            (lambda: Packing.of([3]).with_tokens_multiple_of(-2), "multiple is -2", ValueError),
            (lambda: Packing.single(MOST).with_tokens_multiple_of(4), "in 64 bits", ValueError),
        ],
    )
    def test_refuses(self, call: Any, message: str, error: type[Exception]) -> None:
        with pytest.raises(error, match=message):
            call()


class TestOwnership:
    def test_answers_both_ways(self) -> None:
        owners = [
            Ownership.contiguous(12, 3),
            Ownership.head_tail(12, 3),
            Ownership.per_document_head_tail(Packing.of([12]), 3),
            Ownership.of_sizes([5, 0, 7]),
            Ownership.of_ranges([[(4, 8)], [TokenRange(0, 4)], [(8, 12)]]),
        ]
        for ownership in owners:
            seen = []
            for rank in range(ownership.ranks):
                held = ownership.tokens_of(rank).tolist()
                assert len(held) == ownership.local_tokens(rank)
                ranges = [t for r in ownership.ranges_of(rank) for t in range(r.begin, r.end)]
                assert held == ranges
                for local, token in enumerate(held):
                    assert ownership.owner_of(token) == rank
                    assert ownership.local_of(token) == local
                    assert ownership.global_of(rank, local) == token
                seen += held
            assert sorted(seen) == list(range(12))

    def test_knows_its_kind_and_compares(self) -> None:
        assert Ownership.head_tail(8, 2).kind == "head-tail"
        assert Ownership.of("contiguous", Packing.single(8), 2) == Ownership.contiguous(8, 2)
        assert Ownership.head_tail(8, 2) != Ownership.contiguous(8, 2)
        assert Ownership.head_tail(8, 2).tokens_of(0).tolist() == [0, 1, 6, 7]

    @pytest.mark.parametrize(
        ("call", "message", "error"),
        [
            (
                lambda: Ownership.contiguous(7, 2),
                "7 tokens do not split over 2 ranks .*pad to 8",
                ValueError,
            ),
            (
                lambda: Ownership.head_tail(4098, 4),
                "4098 tokens do not split .*pad to 4104",
                ValueError,
            ),
            (
                lambda: Ownership.per_document_head_tail(Packing.of([3]), 2),
                "slot of 3 .*pad it to 4",
                ValueError,
            ),
            (lambda: Ownership.contiguous(8, 0), "0 ranks; expected at least 1", ValueError),
            (lambda: Ownership.contiguous(-8, 2), "-8 tokens", ValueError),
            (
                lambda: Ownership.contiguous(8, 2**40),
                "`ranks` is 1099511627776; expected a whole number of 32",
                TypeError,
            ),
            (lambda: Ownership.of_sizes([-1, 2]), ".", ValueError),
            (lambda: Ownership.of_sizes([MOST, 1]), ".", ValueError),
            (lambda: Ownership.of_sizes([]), ".", ValueError),
            (lambda: Ownership.of_ranges([]), ".", ValueError),
            (lambda: Ownership.of_ranges([[(0, 2)], [(1, 3)]]), ".", ValueError),
            (lambda: Ownership.of_ranges([[(0, 2)], [(3, 4)]]), ".", ValueError),
            (lambda: Ownership.of_ranges([[(2, 0)]]), ".", (ValueError, TypeError)),
            (lambda: Ownership.of_ranges([[(-1, 2)]]), ".", ValueError),
            (
                lambda: Ownership.of("ring", Packing.single(4), 2),
                "'ring' is not one of",
                ValueError,
            ),
            (lambda: Ownership.of("ranges", Packing.single(4), 2), ".", ValueError),
            (lambda: Ownership.contiguous(8, 2).local_tokens(2), "rank 2 of 2", ValueError),
            (lambda: Ownership.contiguous(8, 2).tokens_of(-1), "rank -1 of 2", ValueError),
            (lambda: Ownership.contiguous(8, 2).owner_of(8), "token 8 of 8", ValueError),
            (lambda: Ownership.contiguous(8, 2).global_of(0, 4), ".", ValueError),
        ],
    )
    def test_refuses(self, call: Any, message: str, error: Any) -> None:
        with pytest.raises(error, match=message):
            call()

    def test_is_cheap_for_huge_streams(self) -> None:
        tokens = 2**50
        ownership = Ownership.head_tail(tokens, 4096)
        last = ownership.global_of(4095, ownership.local_tokens(4095) - 1)
        assert ownership.owner_of(last) == 4095


class TestMask:
    @pytest.mark.parametrize("seeing", [False, True])
    def test_windows_say_what_allows_says(self, seeing: bool) -> None:
        packing = Packing.of([4, 0, 3], [6, 1, 3], 12)
        masks = [
            Mask.causal(packing),
            Mask.full(packing),
            Mask.sliding(packing, 2),
            Mask.banded(packing, before=1, after=None),
            Mask.causal(packing).with_hidden([(0, 2)]),
            Mask.causal(packing).with_groups([TokenRange(1, 3)]),
            Mask.sliding(packing, 2).with_groups([(0, 4)]).with_group_reach("within_window"),
            Mask.causal(packing).with_prefix([2, 0, 3]),
            Mask.compressed(packing, 2),
        ]
        for mask in masks:
            if seeing:
                mask = mask.with_seeing_pads()
            begin, end = longspan.values.key_windows(mask)
            assert begin.dtype == end.dtype == torch.int32
            for query in range(mask.queries):
                keys = [k for k in range(mask.keys) if mask.allows(query, k)]
                assert keys == list(range(begin[query], end[query])), (mask, query)
                assert mask.keys_of(query) == TokenRange(int(begin[query]), int(end[query]))

    def test_windows_of_a_share_are_those_of_its_tokens(self) -> None:
        packing = Packing.of([5, 9], [8, 16])
        mask = Mask.causal(packing)
        begin, end = longspan.values.key_windows(mask)
        for ownership in (
            Ownership.head_tail(24, 2),
            Ownership.per_document_head_tail(packing, 2),
            Ownership.of_sizes([1, 0, 23]),
        ):
            for rank in range(ownership.ranks):
                share = ownership.tokens_of(rank)
                local_begin, local_end = longspan.values.key_windows(mask, ownership, rank)
                assert torch.equal(local_begin, begin[share])
                assert torch.equal(local_end, end[share])

    def test_windows_of_huge_streams_are_64_bit(self) -> None:
        mask = Mask.causal(Packing.of([2**31, 4]))
        begin, end = longspan.values.key_windows(mask, Ownership.of_sizes([2**31, 4]), 1)
        assert begin.dtype == torch.int64
        assert begin.tolist() == [2**31] * 4
        assert end.tolist() == [2**31 + i for i in range(1, 5)]

    @pytest.mark.parametrize(
        ("call", "message", "error"),
        [
            (lambda m: Mask.sliding(m.packing, 0), "window of 0 keys", ValueError),
            (lambda m: Mask.banded(m.packing, before=-1), "neither may be negative", ValueError),
            (lambda m: Mask.compressed(m.packing, 0), "stand for 0 tokens", ValueError),
            (lambda m: m.with_hidden([(0, 99)]), ".", ValueError),
            (lambda m: m.with_hidden([(3, 1)]), ".", (ValueError, TypeError)),
            (lambda m: m.with_groups([(0, 2), (1, 3)]), ".", ValueError),
            (lambda m: m.with_groups([(0, 0)]), ".", ValueError),
            (lambda m: m.with_group_reach("far"), "expected 'whole_group' or 'within", ValueError),
            (lambda m: m.with_prefix([1]), ".", ValueError),
            (lambda m: m.with_prefix([9, 0]), ".", ValueError),
            (lambda m: m.allows(-1, 0), ".", ValueError),
            (lambda m: m.allows(0, 7), ".", ValueError),
            (lambda m: m.keys_of(7), ".", ValueError),
            (lambda m: m.pairs((0, 9), (0, 1)), ".", ValueError),
            (lambda m: m.coverage((0, 1), (-1, 1)), ".", ValueError),
            (lambda m: m.reach((5, 9)), ".", ValueError),
            (
                lambda m: longspan.values.key_windows(m, Ownership.contiguous(8, 2), 1),
                "of 7",
                ValueError,
            ),
            (
                lambda m: longspan.values.key_windows(m, rank=1),
                "an ownership and a rank, or neither",
                ValueError,
            ),
            (
                lambda m: longspan.values.key_windows(m, Ownership.contiguous(7, 1)),
                "or neither",
                ValueError,
            ),
            (
                lambda m: longspan.values.key_windows(m.with_hidden([(1, 2)])),
                "key_windows",
                ValueError,
            ),
            (lambda m: longspan.values.work_of(m, Ownership.contiguous(8, 2), 0), ".", ValueError),
            (lambda m: longspan.values.tiles(m, Ownership.contiguous(7, 1), 0, 1), ".", ValueError),
        ],
    )
    def test_refuses(self, call: Any, message: str, error: Any) -> None:
        with pytest.raises(error, match=message) as refused:
            call(Mask.causal(Packing.of([3, 4])))
        assert str(refused.value).strip()


class TestTokenTable:
    def test_extends_without_changing(self) -> None:
        table = TokenTable()
        wider = table.with_tensor("speaker", axis=2, fill=-1)
        assert [row.key for row in wider.rows] == [*(row.key for row in table.rows), "speaker"]
        assert (wider.rows[-1].axis, wider.rows[-1].fill) == (2, -1)
        fills = {row.key: row.fill for row in table.rows}
        assert fills["labels"] == -100
        assert fills["padding_mask"] is True
        assert fills["position_ids"] == "counting"
        assert isinstance(table.with_tensor("x", fill=0.5).rows[-1].fill, float)

    @pytest.mark.parametrize(
        ("call", "message", "error"),
        [
            (lambda t: t.with_tensor("", axis=1), "a row without a key", ValueError),
            (lambda t: t.with_tensor("x", axis=0), "expected at least 1", ValueError),
            (lambda t: t.with_tensor("x", fill="count"), "a number or 'counting'", ValueError),
            (
                lambda t: t.with_tensor("x", fill=None),
                "TokenTable: `fill` is NoneType; expected a number",
                ValueError,
            ),
            (lambda t: t.with_tensor("x", fill=2**64), "does not fit 64 bits", ValueError),
            (lambda t: t.with_tensor(3), "`key` is an int; expected a str", TypeError),
        ],
    )
    def test_refuses(self, call: Any, message: str, error: type[Exception]) -> None:
        with pytest.raises(error, match=message):
            call(TokenTable())


def test_a_layout_explains_itself() -> None:
    local = longspan.shard({"input_ids": torch.zeros(2, 6).long()}, rank=1, ranks=3)
    assert repr(local.cut) == ("Cut(rows, head-tail, rank 1 of 3, 2 of 6 tokens in each of 2 rows)")
    assert (local.cut.rows, local.cut.length, local.cut.axis) == (2, 6, 1)
    stream = longspan.shard(
        {"input_ids": torch.zeros(2, 6).long()}, rank=1, ranks=3, layout="contiguous-stream"
    )
    assert repr(stream.cut) == "Cut(stream, contiguous, rank 1 of 3, 4 of 12 tokens)"
    assert stream.cut.axis == 0


def test_everything_public_has_a_name() -> None:
    for name in longspan.__all__:
        assert hasattr(longspan, name), name
