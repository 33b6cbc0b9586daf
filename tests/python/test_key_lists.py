"""document_windows and window_lists: which keys a query has, without a read to the host."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from oracle import listed_keys as slow

import longspan

ops = torch.ops.longspan

# ---- document_windows


@pytest.mark.parametrize(
    ("cu", "padded", "tokens"),
    [
        ([0, 2, 5], [0, 4, 8], 8),
        ([0, 0, 3], [0, 2, 6], 6),
        ([0, 2, 5], None, 5),
        ([0, 2, 2, 5], None, 9),
        ([0, 2, 5], [0, 4, 8], 11),
        ([0, 2, -1000], [0, 3, -1000], 5),
        ([0, 2, -1000], [0, 3], 5),
        ([0, 2, 5], [0, 2, 5], 5),
        ([0, 3, 3, 4], [0, 4, 4, 6], 7),
        ([0], None, 3),
        ([0, 4], None, 2),
        ([0, 4], None, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_windows_of_documents(
    cu: list[int], padded: list[int] | None, tokens: int, dtype: torch.dtype
) -> None:
    offsets = torch.tensor(cu, dtype=dtype)
    slots = None if padded is None else torch.tensor(padded, dtype=dtype)
    start, end = longspan.dsa.document_windows(offsets, slots, tokens=tokens)
    assert start.dtype == end.dtype == torch.int32
    got = list(zip(start.tolist(), end.tolist(), strict=True))
    assert got == slow.windows(cu, padded, tokens)


@pytest.mark.parametrize(
    ("message", "cu", "padded", "tokens"),
    [
        ("`cu` is float32", torch.ones(2), None, 1),
        ("`cu_padded` is int64 [1, 2]", torch.tensor([0]), torch.ones(1, 2).long(), 1),
        ("`cu` is int64 [0]", torch.zeros(0).long(), None, 1),
        ("do not fit 32-bit windows", torch.tensor([0]), None, 2**31),
        ("-1 tokens", torch.tensor([0]), None, -1),
    ],
)
def test_windows_refuse(message: str, cu: Any, padded: Any, tokens: int) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        longspan.dsa.document_windows(cu, padded, tokens=tokens)


# ---- window_lists


def test_lists_of_a_window_and_pools() -> None:
    got = longspan.dsa.window_lists(torch.arange(4, 8)[None], keys=8, window=3, pools=2, ratio=4)
    assert got.tolist() == [[[2, 3, 4, 8, -1], [3, 4, 5, 8, -1], [4, 5, 6, 8, -1], [5, 6, 7, 8, 9]]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("keys", [0, 1, 5, 9])
@pytest.mark.parametrize("window", [0, 1, 4, 20])
def test_lists_are_the_oracles(keys: int, window: int, dtype: torch.dtype) -> None:
    queries = torch.tensor([[0, 1, 5, 8, 12], [3, -1, 2, 0, 7]], dtype=dtype)
    for pools, ratio in ((0, 0), (3, 1), (2, 4)):
        got = longspan.dsa.window_lists(queries, keys=keys, window=window, pools=pools, ratio=ratio)
        assert got.dtype == dtype
        for row in range(2):
            for t, query in enumerate(queries[row].tolist()):
                expected = slow.window_list(query, keys, window, pools, ratio)
                assert got[row, t].tolist() == expected
    chosen = torch.tensor([[0, 1, -1], [-5, 2, 1], [9, 0, 0], [2, 1, 0], [1, 2**31 - 1, 0]])
    got = longspan.dsa.window_lists(
        queries[:1], keys=keys, window=window, pools=2, chosen=chosen[None]
    )
    for t, query in enumerate(queries[0].tolist()):
        assert got[0, t].tolist() == slow.window_list(query, keys, window, 2, 0, chosen[t].tolist())


def test_a_mask_takes_keys_from_lists() -> None:
    lists = torch.tensor([[[0, 1, 2], [2, -1, 9]], [[0, 0, 1], [1, 2, 0]]])
    seen = torch.tensor([[[True, False, True], [True, True, False]]])
    expected = [[[0, -1, 2], [-1, -1, -1]], [[0, 0, -1], [1, -1, 0]]]
    assert ops.hide_listed(lists, seen).tolist() == expected
    for dtype in (torch.float32, torch.bfloat16):
        added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        assert ops.hide_listed(lists, added).tolist() == expected
    assert (ops.hide_listed(lists, seen[..., :0]) == -1).all()


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("`queries` is float32", lambda p: longspan.dsa.window_lists(p.float(), keys=1, window=1)),
        ("expected 0 or more", lambda p: longspan.dsa.window_lists(p, keys=1, window=-1)),
        ("pools of 0 tokens", lambda p: longspan.dsa.window_lists(p, keys=1, window=1, pools=1)),
        (
            "`chosen` is int64 [1, 3, 1]",
            lambda p: longspan.dsa.window_lists(
                p, keys=1, window=1, pools=1, chosen=torch.zeros(1, 3, 1).long()
            ),
        ),
        (
            "`mask` is float32 [1, 3, 4]",
            lambda p: longspan.dsa.window_lists(p, keys=1, window=1, mask=torch.zeros(1, 3, 4)),
        ),
    ],
)
def test_lists_refuse(message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(torch.zeros(1, 2).long())


@pytest.mark.slow
def test_lists_and_windows_compile_whole() -> None:
    def both(queries: torch.Tensor, cu: torch.Tensor, mask: torch.Tensor) -> Any:
        tokens = queries.shape[1]
        lists = longspan.dsa.window_lists(
            queries, keys=tokens, window=3, pools=2, ratio=4, mask=mask
        )
        return lists, *longspan.dsa.document_windows(cu, cu, tokens=tokens)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (8, 11):
        given = (
            torch.arange(tokens)[None],
            torch.tensor([0, 3, 8]),
            torch.zeros(1, tokens, tokens + 2),
        )
        for got, want in zip(compiled(*given), both(*given), strict=True):
            assert torch.equal(got, want)
