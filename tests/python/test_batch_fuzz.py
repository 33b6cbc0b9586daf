"""Random dictionaries and numbers: a documented error with a message, or a result
that comes back whole. Never a crash, never a changed batch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import longspan
from longspan import Mask, Ownership, Packing

settings.register_profile(
    "longspan",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("longspan")

DOCUMENTED = (ValueError, TypeError, KeyError, OverflowError)
LAYOUTS = [
    "head-tail",
    "contiguous-rows",
    "contiguous-stream",
    "head-tail-stream",
    "per-document-head-tail",
]
HUGE = st.sampled_from(
    [2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**70, -(2**63), -(2**70)]
)


outcomes: Counter[str] = Counter()


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or None after a documented error with a message."""
    try:
        result = call()
    except DOCUMENTED as error:
        assert str(error).strip(), f"{type(error).__name__} without a message"
        outcomes["refused"] += 1
        return None
    outcomes["answered"] += 1
    return result


@pytest.fixture(autouse=True)
def some_case_is_answered() -> Iterator[None]:
    """A test whose every case was refused has looked at no answer."""
    outcomes.clear()
    yield
    assert outcomes["answered"] or not outcomes["refused"], f"all {outcomes['refused']} refused"


# ---- Batches.

small = st.integers(0, 9)
dtypes = st.sampled_from(
    [
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ]
)


@st.composite
def any_tensor(draw: Any, rows: int, length: int) -> torch.Tensor:
    """Often of the right shape, of any type, strided or expanded or on meta."""
    shape = draw(
        st.one_of(
            st.just([rows, length]),
            st.just([rows, length, 3]),
            st.just([1, length]),
            st.just([3, rows, length]),
            st.just([rows, 1, length, length]),
            st.just([rows, 2]),
            st.lists(small, max_size=4),
        )
    )
    dtype = draw(dtypes)
    count = 1
    for size in shape:
        count *= size
    low = draw(st.sampled_from([-1000, -1, 0, 1]))
    high = draw(st.sampled_from([2, 5, 10]))
    numbers = [low + (i * 7 + draw(st.integers(0, 3))) % (high - low) for i in range(min(count, 8))]
    flat = torch.tensor(numbers or [0]).repeat(count // max(1, len(numbers)) + 1)[:count]
    tensor = flat.to(dtype).view(shape)
    how = draw(st.sampled_from(["plain", "plain", "plain", "strided", "expanded", "meta"]))
    if how == "strided":
        tensor = torch.stack([tensor, tensor], -1)[..., 1]
    elif how == "expanded" and tensor.dim():
        tensor = tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
    elif how == "meta":
        tensor = tensor.to("meta")
    return tensor


entries = st.sampled_from(
    [
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
        "extra",
    ]
)


@st.composite
def any_batch(draw: Any) -> dict[Any, Any]:
    """Half of the dictionaries start out right."""
    rows, length = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    batch: dict[Any, Any] = {}
    if draw(st.booleans()):
        ids = torch.arange(rows).view(-1, 1) * 1000 + torch.arange(length)
        batch["input_ids"] = ids
        if draw(st.booleans()):
            batch["labels"] = ids
    for key in draw(st.lists(entries, max_size=3)):
        batch[key] = draw(
            st.one_of(
                any_tensor(rows, length),
                any_tensor(rows, length),
                st.none(),
                st.integers(),
                st.text(max_size=2),
                st.lists(st.integers(0, 3), max_size=2),
            )
        )
    if draw(st.integers(0, 9)) == 0:
        batch[draw(st.integers(0, 3))] = draw(any_tensor(rows, length))
    return batch


def snapshot(batch: dict[Any, Any]) -> list[tuple[Any, ...]]:
    seen = []
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            copied = None if value.is_meta else value.clone()
            seen.append((key, value, value._version, value.shape, value.stride(), copied))
        else:
            seen.append((key, value, None, None, None, None))
    return seen


def assert_same(batch: dict[Any, Any], before: list[tuple[Any, ...]]) -> None:
    assert list(batch) == [entry[0] for entry in before]
    for key, value, version, shape, stride, copied in before:
        assert batch[key] is value
        if isinstance(value, torch.Tensor):
            assert (value._version, value.shape, value.stride()) == (version, shape, stride)
            if copied is not None:
                assert torch.equal(value, copied)


def check_round_trip(batch: dict[Any, Any], locals_: list[longspan.values.LocalBatch]) -> None:
    """Loaded tokens come back to their places; what is real came along."""
    layout = locals_[0].cut
    held = sorted(t for local in locals_ for t in local.cut.global_tokens().tolist())
    assert held == list(range(layout.ownership.tokens))
    pads = [local["padding_mask"] for local in locals_]
    for key in ("input_ids", "inputs_embeds", "labels", "loss_mask"):
        loaded = batch.get(key)
        if not isinstance(loaded, torch.Tensor) or loaded.is_meta:
            continue
        back = longspan.unshard([local[key] for local in locals_], layout)
        assert back.dtype == loaded.dtype
        assert back.shape == loaded.shape
        same = back == loaded
        if not pads[0].is_meta and batch.get("padding_mask") is None:
            pad = longspan.unshard(pads, layout, fill=True)
            same = same | pad.view(*pad.shape, *[1] * (same.dim() - 2))
        else:
            same = same | (back == 0)
        assert same.all(), key


@given(
    batch=any_batch(),
    layout=st.sampled_from(LAYOUTS),
    ranks=st.integers(1, 5),
    multiple=st.integers(1, 3),
    shift=st.booleans(),
    pass_through=st.lists(entries, max_size=2),
)
@settings(max_examples=250)
def test_shard_answers_or_refuses(
    batch: dict[Any, Any],
    layout: str,
    ranks: int,
    multiple: int,
    shift: bool,
    pass_through: list[str],
) -> None:
    before = snapshot(batch)
    shift = shift and "labels" in batch

    def everyone() -> list[longspan.values.LocalBatch]:
        return [
            longspan.shard(
                batch,
                rank=rank,
                ranks=ranks,
                layout=layout,
                multiple=multiple,
                shift_labels=shift,
                pass_through=pass_through,
            )
            for rank in range(ranks)
        ]

    locals_ = attempt(everyone)
    assert_same(batch, before)
    if locals_ is None or shift or pass_through:
        return
    check_round_trip(batch, locals_)
    assert_same(batch, before)


@st.composite
def right_batch(draw: Any) -> dict[str, Any]:
    """Documents of random lengths, told in one of the ways."""
    rows, length = draw(st.integers(0, 5)), draw(st.integers(0, 12))
    ids = torch.arange(rows).view(-1, 1) * 1000 + torch.arange(length)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids + 7}
    way = draw(st.sampled_from(["none", "seq_lens", "seq_lens_padded", "numbers", "pads"]))
    if way in ("seq_lens", "seq_lens_padded"):
        real, slots = [], []
        for _ in range(rows):
            left, row = length, []
            for slot in draw(st.lists(st.integers(0, length), max_size=4)):
                if slot <= left:
                    row.append((draw(st.integers(0, slot)), slot))
                    left -= slot
            real.append([n if way == "seq_lens_padded" else s for n, s in row])
            slots.append([s for _, s in row])
        for key, table in (("seq_lens", real), ("seq_lens_padded", slots)):
            if key == "seq_lens" or way == key:
                rows_ = [[*r, *[-1000] * (5 - len(r))] for r in table]
                batch[key] = torch.tensor(rows_, dtype=torch.long).reshape(rows, 5)
    elif way == "numbers":
        mask = torch.zeros(rows, length, dtype=torch.long)
        for row in range(rows):
            cuts = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=5)))
            for number, (a, b) in enumerate(itertools.pairwise(cuts), 1):
                mask[row, a:b] = number * (draw(st.integers(0, 4)) > 0)
        batch["attention_mask"] = mask
    elif way == "pads":
        mask = torch.ones(rows, length, dtype=torch.bool)
        for row in range(rows):
            a, b = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
            mask[row, a:b] = False
        batch["padding_mask"] = mask
    if draw(st.booleans()):
        batch["position_ids"] = ids + 3
    return batch


@given(
    batch=right_batch(),
    layout=st.sampled_from(LAYOUTS),
    ranks=st.integers(1, 7),
    multiple=st.integers(1, 4),
)
@settings(max_examples=200)
def test_right_batches_always_come_back(
    batch: dict[str, Any], layout: str, ranks: int, multiple: int
) -> None:
    before = snapshot(batch)
    locals_ = [
        longspan.shard(batch, rank=r, ranks=ranks, layout=layout, multiple=multiple)
        for r in range(ranks)
    ]
    assert_same(batch, before)
    check_round_trip(batch, locals_)
    # Pads are known from the packing alone, and every real token is held once.
    real = sum(int((~local["padding_mask"]).sum()) for local in locals_)
    assert real == sum(packing.real_tokens for packing in locals_[0].cut.packings)


@given(
    batch=right_batch(),
    cuts=st.lists(st.integers(0, 80), max_size=4),
    form=st.sampled_from(["rows", "stream"]),
    turn=st.booleans(),
)
def test_any_ownership_comes_back(
    batch: dict[str, Any], cuts: list[int], form: str, turn: bool
) -> None:
    tokens = longspan.values.pack(batch, form=form).tokens
    borders = [0, *sorted(min(c, tokens) for c in cuts), tokens]
    ranges = [[pair] for pair in itertools.pairwise(borders)]
    ownership = Ownership.of_ranges(ranges[::-1] if turn else ranges)
    locals_ = [
        longspan.shard(batch, rank=r, ranks=ownership.ranks, layout=ownership, form=form)
        for r in range(ownership.ranks)
    ]
    check_round_trip(batch, locals_)


@given(
    batch=right_batch(),
    form=st.sampled_from(["rows", "stream", "grid"]),
    slots=st.one_of(st.integers(-2, 9), HUGE),
    multiple=st.integers(-2, 9),
    key=st.sampled_from(["input_ids", "labels", "position_ids", "none"]),
)
def test_pack_and_pad_answer_or_refuse(
    batch: dict[str, Any], form: str, slots: int, multiple: int, key: str
) -> None:
    before = snapshot(batch)
    packed = attempt(lambda: longspan.values.pack(batch, form=form))
    if packed is not None:
        padded = attempt(lambda: longspan.values.pad(packed, slots=slots, multiple=multiple))
        if padded is not None and padded.tokens < 10_000:
            assert padded.tokens >= packed.tokens
            if form == "rows" or padded.packings[0].real_tokens:
                assert padded.tokens % multiple == 0
            tensor = attempt(lambda: padded[key])
            if tensor is not None:
                assert tensor.shape[0 if form == "stream" else 1] == padded.tokens
    assert_same(batch, before)


@given(
    batch=right_batch(),
    layout=st.sampled_from(LAYOUTS),
    ranks=st.integers(1, 4),
    shape=st.lists(st.integers(0, 9), max_size=4),
    shards=st.integers(0, 5),
    axis=st.one_of(st.none(), st.integers(-5, 5), HUGE),
    fill=st.one_of(st.integers(-3, 3), st.floats(), st.booleans(), st.text(max_size=1), HUGE),
    trim=st.booleans(),
    dtype=dtypes,
)
def test_unshard_answers_or_refuses(
    batch: dict[str, Any],
    layout: str,
    ranks: int,
    shape: list[int],
    shards: int,
    axis: int | None,
    fill: Any,
    trim: bool,
    dtype: torch.dtype,
) -> None:
    local = longspan.shard(batch, rank=0, ranks=ranks, layout=layout)
    tensor = torch.zeros(shape, dtype=dtype)
    attempt(lambda: longspan.unshard([tensor] * shards, local, axis=axis, fill=fill, trim=trim))
    attempt(lambda: longspan.unshard(tensor, local, axis=axis, fill=fill, trim=trim))


@given(
    rank=st.one_of(st.integers(-3, 9), HUGE, st.none(), st.text(max_size=1)),
    ranks=st.one_of(st.integers(-3, 9), st.none(), st.floats(0, 3)),
    multiple=st.one_of(st.integers(-3, 9), st.sampled_from([2**61, 2**62, 2**63, 2**70])),
    layout=st.one_of(st.sampled_from([*LAYOUTS, "rows", "stream"]), st.text(max_size=3)),
    chunks=st.one_of(st.integers(-2, 5), HUGE),
)
def test_options_answer_or_refuse(
    rank: Any, ranks: Any, multiple: int, layout: str, chunks: int
) -> None:
    assume(abs(multiple) < 100 or ranks not in (None, 1, True))
    batch = {"input_ids": torch.arange(12).view(4, 3)}
    options = {"rank": rank, "ranks": ranks, "multiple": multiple, "layout": layout}
    try:
        attempt(lambda: longspan.shard(batch, **options))
        attempt(lambda: longspan.values.shard_chunks(batch, chunks, **options))
    except (RuntimeError, MemoryError) as error:  # the machine's memory has an end
        assert abs(multiple) > 2**40
        assert str(error)


# ---- Values.

lengths = st.lists(st.one_of(st.integers(-2, 12), HUGE), max_size=5)
sizes = st.one_of(st.integers(-2, 40), HUGE)
token_range = st.one_of(
    st.tuples(st.integers(-2, 40), st.integers(-2, 40)), st.tuples(sizes, sizes), st.integers()
)


@given(
    real=lengths,
    padded=st.one_of(st.none(), lengths),
    tokens=st.one_of(st.none(), sizes),
    token=sizes,
    document=st.one_of(st.integers(-2, 6), HUGE),
    multiple=sizes,
)
@settings(max_examples=200)
def test_packings_answer_or_refuse(
    real: list[int],
    padded: list[int] | None,
    tokens: int | None,
    token: int,
    document: int,
    multiple: int,
) -> None:
    packing = attempt(lambda: Packing.of(real, padded, tokens))
    if packing is None:
        return
    assert packing.real_tokens == sum(real)
    assert packing.offsets[-1] == sum(real if padded is None else padded)
    place = attempt(lambda: packing.locate(token))
    if place is not None:
        assert packing.token_of(*place) == token
    attempt(lambda: packing.token_of(document, token))
    for ask in (packing.length, packing.padded_length, packing.real, packing.slot):
        attempt(lambda ask=ask: ask(document))
    attempt(lambda: packing.is_pad(token))
    for grow in (packing.with_slots_multiple_of, packing.with_tokens_multiple_of):
        wide = attempt(lambda grow=grow: grow(multiple))
        if wide is not None:
            assert wide.tokens % multiple == 0
            assert wide.lengths == packing.lengths
    cu = attempt(lambda: longspan.values.cumulative_lengths(packing))
    if cu is not None:
        assert cu[-1] == packing.real_tokens
    attempt(lambda: longspan.values.cumulative_padded_lengths(packing))
    assert repr(packing)
    packing.pads()


@given(
    kind=st.sampled_from(["contiguous", "head-tail", "per-document-head-tail", "ranges", ""]),
    documents=st.lists(st.integers(0, 30), max_size=4),
    tokens=sizes,
    ranks=st.one_of(st.integers(-1, 9), st.sampled_from([4096, 2**31 - 1, 2**31, 2**63])),
    rank=st.one_of(st.integers(-1, 9), HUGE),
    token=sizes,
)
@settings(max_examples=200)
def test_ownerships_answer_or_refuse(
    kind: str, documents: list[int], tokens: int, ranks: int, rank: int, token: int
) -> None:
    made = [
        attempt(lambda: Ownership.contiguous(tokens, ranks)),
        attempt(lambda: Ownership.head_tail(tokens, ranks)),
        attempt(lambda: Ownership.of(kind, Packing.of(documents), ranks)),
        attempt(lambda: Ownership.of_sizes(documents)),
        attempt(lambda: Ownership.of_sizes([tokens, 0, token])),
    ]
    for ownership in made:
        if ownership is None:
            continue
        owner = attempt(lambda o=ownership: o.owner_of(token))
        if owner is not None:
            local = ownership.local_of(token)
            assert ownership.global_of(owner, local) == token
        attempt(lambda o=ownership: o.local_tokens(rank))
        attempt(lambda o=ownership: o.global_of(rank, token))
        attempt(lambda o=ownership: o.ranges_of(rank))
        if ownership.tokens < 10_000:
            attempt(lambda o=ownership: o.tokens_of(rank))
        assert repr(ownership)


@given(ranges=st.lists(st.lists(token_range, max_size=3), max_size=4))
def test_lists_of_ranges_answer_or_refuse(ranges: list[list[Any]]) -> None:
    ownership = attempt(lambda: Ownership.of_ranges(ranges))
    if ownership is not None and ownership.tokens < 10_000:
        held = [t for r in range(ownership.ranks) for t in ownership.tokens_of(r).tolist()]
        assert sorted(held) == list(range(ownership.tokens))


@given(
    documents=st.lists(st.integers(0, 12), max_size=4),
    make=st.sampled_from(["causal", "full", "sliding", "banded", "compressed"]),
    number=st.one_of(st.integers(-1, 9), HUGE),
    hidden=st.lists(token_range, max_size=2),
    groups=st.lists(token_range, max_size=2),
    prefix=st.one_of(st.none(), st.lists(st.integers(-1, 9), max_size=4)),
    seeing=st.booleans(),
    query=st.one_of(st.integers(-1, 40), HUGE),
    key=st.one_of(st.integers(-1, 40), HUGE),
    queries=token_range,
    keys=token_range,
)
@settings(max_examples=200)
def test_masks_answer_or_refuse(
    documents: list[int],
    make: str,
    number: int,
    hidden: list[Any],
    groups: list[Any],
    prefix: list[int] | None,
    seeing: bool,
    query: int,
    key: int,
    queries: Any,
    keys: Any,
) -> None:
    packing = Packing.of(documents, [n + n % 3 for n in documents])
    arguments = [] if make in ("causal", "full") else [number]
    mask = attempt(lambda: getattr(Mask, make)(packing, *arguments))
    if mask is None:
        return
    steps: list[Callable[[Mask], Mask]] = [lambda m: m.with_hidden(hidden)]
    steps.append(lambda m: m.with_groups(groups))
    if prefix is not None:
        steps.append(lambda m: m.with_prefix(prefix))
    if seeing:
        steps.append(lambda m: m.with_seeing_pads())
    for step in steps:
        changed = attempt(lambda step=step, mask=mask: step(mask))
        mask = changed if changed is not None else mask
    attempt(lambda: mask.allows(query, key))
    attempt(lambda: mask.keys_of(query))
    attempt(lambda: mask.key_ranges_of(query))
    attempt(lambda: mask.reach(queries))
    attempt(lambda: mask.pairs(queries, keys))
    attempt(lambda: mask.coverage(queries, keys))
    windows = attempt(lambda: longspan.values.key_windows(mask))
    if windows is not None:
        for q in range(mask.queries):
            seen = [k for k in range(mask.keys) if mask.allows(q, k)]
            assert seen == list(range(int(windows[0][q]), int(windows[1][q])))
    assert repr(mask)
