"""Values and shares travel between processes: a loader's worker may shard."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import longspan
from longspan import Mask, Ownership, Packing
from longspan.values import TokenRange

LAYOUTS = [layout.name for layout in longspan.values.named_layouts()]
PACKING = Packing.of([5, 0, 3], [6, 2, 4], 16)
VALUES = {
    "range": TokenRange(2, 5),
    "packing": PACKING,
    "empty packing": Packing.of([]),
    "contiguous": Ownership.contiguous(12, 3),
    "head-tail": Ownership.head_tail(12, 3),
    "per document": Ownership.per_document_head_tail(Packing.of([7, 3], [8, 4]), 2),
    "uneven": Ownership.of_sizes([3, 0, 4]),
    "scattered": Ownership.of_ranges([[(4, 6), (0, 1)], [(1, 4)]]),
}
MASKS = {
    "causal": Mask.causal(PACKING),
    "full": Mask.full(PACKING),
    "sliding": Mask.sliding(PACKING, 3),
    "grouped within the window": (
        Mask.sliding(PACKING, 2).with_groups([(0, 5)]).with_group_reach("within_window")
    ),
    "hidden and grouped": Mask.causal(PACKING).with_hidden([(1, 2)]).with_groups([(2, 5)]),
    "seeing pads": Mask.causal(PACKING).with_seeing_pads(),
    "compressed": Mask.compressed(PACKING, 2),
}
ROWS = {
    "input_ids": torch.arange(16).view(2, 8),
    "seq_lens": torch.tensor([[3, 2], [8, -1000]]),
    "seq_lens_padded": torch.tensor([[4, 4], [8, -1000]]),
    "note": "kept",
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_equal(name: str) -> None:
    value = VALUES[name]
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == value


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_comes_back_with_every_rule(name: str) -> None:
    mask = MASKS[name]
    again = pickle.loads(pickle.dumps(mask))
    assert repr(again) == repr(mask)
    for query in range(mask.queries):
        assert again.key_ranges_of(query) == mask.key_ranges_of(query)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_share_comes_back_with_its_layout(layout: str) -> None:
    shares = [longspan.shard(ROWS, rank=r, ranks=2, layout=layout) for r in range(2)]
    for share in (pickle.loads(pickle.dumps(shares[0])), copy.deepcopy(shares[0])):
        assert list(share) == list(shares[0])
        assert repr(share.cut) == repr(shares[0].cut)
        back = longspan.unshard([share["input_ids"], shares[1]["input_ids"]], share)
        assert torch.equal(back, ROWS["input_ids"])


def test_copies_and_unions_keep_the_layout() -> None:
    share = longspan.shard(ROWS, rank=0, ranks=2)
    for again in (share.copy(), share | {"more": 1}, copy.copy(share)):
        assert isinstance(again, longspan.values.LocalBatch)
        assert again.cut is share.cut
    assert (share | {"more": 1})["more"] == 1
    assert "Cut(rows, head-tail, rank 0 of 2" in repr(share)


def _collate(samples: list[torch.Tensor]) -> Any:
    return longspan.shard({"input_ids": torch.stack(samples)}, rank=1, ranks=2)


def test_a_loaders_worker_may_shard() -> None:
    loader = DataLoader([torch.arange(8)] * 2, batch_size=2, num_workers=1, collate_fn=_collate)
    (share,) = list(loader)
    assert isinstance(share, longspan.values.LocalBatch)
    assert share["input_ids"].tolist() == [[2, 3, 4, 5]] * 2
    assert share.cut.rank == 1


REFUSED = {
    "layout that is no name": (lambda: longspan.shard(ROWS, layout=[]), TypeError, "layout"),
    "group without rank": (lambda: longspan.shard(ROWS, 2), TypeError, r"rank\(\) and size\(\)"),
    "form of a named layout": (
        lambda: longspan.shard(ROWS, layout="head-tail", form="rows"),
        ValueError,
        "`form` goes with an Ownership",
    ),
    "unknown form": (
        lambda: longspan.shard(ROWS, layout=longspan.Ownership.contiguous(6, 1), form="grid"),
        ValueError,
        "shard: `form` is 'grid'; expected one of rows, stream",
    ),
    "multiple beside an ownership": (
        lambda: longspan.shard(ROWS, layout=longspan.Ownership.contiguous(6, 1), multiple=4),
        ValueError,
        "says how many tokens a rank holds; leave `multiple` out",
    ),
    "plan of a name": (
        lambda: longspan.plan("head-tail"),
        TypeError,
        "`ownership` is a str; expected an Ownership",
    ),
    "picture of a name": (
        lambda: longspan.draw("ring"),
        TypeError,
        "`ownership` is a str; expected an Ownership",
    ),
    "rank that is no int": (
        lambda: longspan.shard(ROWS, rank=0.0, ranks=2),
        TypeError,
        "`rank` is a float; expected a whole number",
    ),
    "ahead as a list": (
        lambda: longspan.shard(ROWS, ahead=["input_ids"]),
        TypeError,
        "`ahead` is a list; expected a mapping",
    ),
    "ahead without steps": (
        lambda: longspan.shard(ROWS, ahead={"next": "input_ids"}),
        TypeError,
        r"expected \(key, steps\)",
    ),
    "ahead over a tensor": (
        lambda: longspan.shard(ROWS, ahead={"input_ids": ("input_ids", 1)}),
        ValueError,
        "ahead would replace 'input_ids'",
    ),
    "ahead over what shard adds": (
        lambda: longspan.shard(ROWS, ahead={"cu_seqlens": ("input_ids", 1)}),
        ValueError,
        "ahead would replace 'cu_seqlens'",
    ),
    "pass_through as a string": (
        lambda: longspan.shard(ROWS, pass_through="note"),
        TypeError,
        r"write \['note'\]",
    ),
    "pad of a dictionary": (lambda: longspan.values.pad({}), TypeError, "what pack returned"),
    "pad with layout and slots": (
        lambda: longspan.values.pad(
            longspan.values.pack(ROWS), layout="contiguous-stream", ranks=2, slots=3
        ),
        ValueError,
        "leave `slots` out",
    ),
    "unshard of nothing": (
        lambda: longspan.unshard(None, longspan.shard(ROWS)),
        TypeError,
        "expected a tensor, or a list",
    ),
    "batch that is a list": (lambda: longspan.shard([1]), TypeError, "as a mapping"),
    "additive mask the other way round": (
        lambda: longspan.shard({**ROWS_ALONE, "attention_mask": torch.ones(2, 1, 8, 8)}),
        ValueError,
        r"or not additive \(0 = attend\)",
    ),
}
ROWS_ALONE = {"input_ids": ROWS["input_ids"]}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_gets_a_sentence(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
