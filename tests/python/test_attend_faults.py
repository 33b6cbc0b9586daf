"""What attend refuses, and how it ends when peers differ, fail or die."""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import outputs_of, start_ranks

import longspan
from longspan import (
    AttentionLayout,
    Group,
    Mask,
    Ownership,
    Packing,
    Strategy,
    run_ranks,
)

STRATEGIES = ("ring", "gathered", "needed", "head_parallel")
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


# ---- Refusals: the whole sentence, before anything is sent.


@dataclasses.dataclass(frozen=True)
class Refusal:
    name: str
    changed: dict[str, Any]
    message: str
    error: type[Exception] = ValueError


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


OWNERS = Ownership.head_tail(16, 2)
LAYOUT = AttentionLayout(OWNERS).tensor
STREAM = Packing.single(16)
Q, K, V = "float32 [2, 4, 8, 6]", "float32 [2, 2, 8, 6]", "float32 [2, 2, 8, 3]"
SINK = "; expected one floating logit for each of the 4 heads on cpu"
MADE = "; expected the tensor of an AttentionLayout, int64 [n] on the CPU"
NAMES = "ring, gathered, needed, head_parallel, head_parallel_ring"


def with_heads(query: int, key: int) -> dict[str, Any]:
    return {"q": zeros(2, query, 8, 6), "k": zeros(2, key, 8, 6), "v": zeros(2, key, 8, 3)}


def without_attention(**options: Any) -> dict[str, Any]:
    return {"attention": None, **options}


def holding(tensor: torch.Tensor) -> dict[str, Any]:
    return {"attention": AttentionLayout.of_tensor(tensor)}


REFUSED = [
    # Shapes.
    Refusal("no_axes", {"q": torch.tensor(1.0)},
            "attend: `q` has no axes; expected [B, H, L, D] or [L, H, D]"),
    Refusal("two_axes", {"q": zeros(4, 8)},
            "attend: `q` is float32 [4, 8]; expected [B, H, L, D] or [L, H, D]"),
    Refusal("five_axes", {"q": zeros(1, 2, 4, 8, 6)},
            "attend: `q` is float32 [1, 2, 4, 8, 6]; expected [B, H, L, D] or [L, H, D]"),
    Refusal("packed_keys_of_rows", {"k": zeros(8, 2, 6)},
            f"attend: `k` is float32 [8, 2, 6] but `q` {Q}; they have the same axes"),
    Refusal("packed_values_of_rows", {"v": zeros(8, 2, 6)},
            f"attend: `v` is float32 [8, 2, 6] but `q` {Q}; they have the same axes"),
    Refusal("other_rows", {"k": zeros(3, 2, 8, 6)},
            f"attend: `k` is float32 [3, 2, 8, 6] but `q` {Q}; the rows differ"),
    Refusal("more_keys_than_queries", {"k": zeros(2, 2, 9, 6)},
            f"attend: `k` is float32 [2, 2, 9, 6] but `q` {Q}; "
            "each rank brings the keys of its own tokens"),
    Refusal("fewer_values_than_queries", {"v": zeros(2, 2, 7, 3)},
            f"attend: `v` is float32 [2, 2, 7, 3] but `q` {Q}; "
            "each rank brings the keys of its own tokens"),
    Refusal("other_channels", {"k": zeros(2, 2, 8, 5)},
            f"attend: `k` is float32 [2, 2, 8, 5] but `q` {Q}; the channels differ"),
    Refusal("600_channels", {"q": zeros(2, 4, 8, 600), "k": zeros(2, 2, 8, 600)},
            "attend: float32 [2, 4, 8, 600] has 600 channels; expected 1 to 576"),
    Refusal("600_value_channels", {"v": zeros(2, 2, 8, 600)},
            "attend: float32 [2, 2, 8, 600] has 600 channels; expected 1 to 576"),
    Refusal("no_channels", {"q": zeros(2, 4, 8, 0), "k": zeros(2, 2, 8, 0)},
            "attend: float32 [2, 4, 8, 0] has 0 channels; expected 1 to 576"),
    # Heads.
    Refusal("different_key_and_value_heads", {"v": zeros(2, 1, 8, 3)},
            f"attend: `k` is {K} but `v` float32 [2, 1, 8, 3]; they have the same heads"),
    Refusal("heads_that_do_not_divide", with_heads(4, 3),
            f"attend: `q` is {Q} but `k` float32 [2, 3, 8, 6]; "
            "the heads of q must be a multiple of those of k"),
    Refusal("more_key_heads_than_heads", with_heads(4, 8),
            f"attend: `q` is {Q} but `k` float32 [2, 8, 8, 6]; "
            "the heads of q must be a multiple of those of k"),
    Refusal("no_key_heads", with_heads(4, 0),
            f"attend: `q` is {Q} but `k` float32 [2, 0, 8, 6]; "
            "the heads of q must be a multiple of those of k"),
    # Types and devices.
    Refusal("integers", {"q": zeros(2, 4, 8, 6, dtype=torch.long)},
            "attend: `q` is int64 [2, 4, 8, 6]; expected float32, bfloat16, float16 or float64"),
    Refusal("complex_numbers", {"q": zeros(2, 4, 8, 6, dtype=torch.complex64)},
            "attend: `q` is complex64 [2, 4, 8, 6]; "
            "expected float32, bfloat16, float16 or float64"),
    Refusal("keys_of_another_type", {"k": zeros(2, 2, 8, 6, dtype=torch.bfloat16)},
            f"attend: `k` is bfloat16 [2, 2, 8, 6] on cpu but `q` {Q} on cpu"),
    Refusal("values_on_another_device", {"v": zeros(2, 2, 8, 3, device="meta")},
            f"attend: `v` is {V} on meta but `q` {Q} on cpu"),
    Refusal("queries_on_another_device", {"q": zeros(2, 4, 8, 6, device="meta")},
            f"attend: `k` is {K} on cpu but `q` {Q} on meta"),
    # Numbers.
    Refusal("scale_that_is_no_number", {"scale": math.nan}, "attend: scale is nan"),
    Refusal("infinite_scale", {"scale": -math.inf}, "attend: scale is -inf"),
    Refusal("negative_softcap", {"softcap": -1.5},
            "attend: softcap is -1.5; expected a positive number, or 0 for none"),
    Refusal("infinite_softcap", {"softcap": math.inf},
            "attend: softcap is inf; expected a positive number, or 0 for none"),
    Refusal("dropout", {"dropout_p": 0.1},
            "attend: dropout_p is 0.1; attention over ranks has no dropout, since its random "
            "numbers would depend on the ranks; set it to 0", NotImplementedError),
    # Sinks.
    Refusal("too_few_sinks", {"sink": zeros(3)}, f"attend: `sink` is float32 [3] on cpu{SINK}"),
    Refusal("sinks_with_an_axis_too_many", {"sink": zeros(4, 1)},
            f"attend: `sink` is float32 [4, 1] on cpu{SINK}"),
    Refusal("integer_sinks", {"sink": zeros(4, dtype=torch.long)},
            f"attend: `sink` is int64 [4] on cpu{SINK}"),
    Refusal("sinks_on_another_device", {"sink": zeros(4, device="meta")},
            f"attend: `sink` is float32 [4] on meta{SINK}"),
    # Strategies.
    Refusal("unknown_strategy", {"strategy": "spiral"},
            f"Strategy: 'spiral' is not one of {NAMES}"),
    Refusal("strategy_of_a_paper", {"strategy": "ulysses"},
            f"Strategy: 'ulysses' is not one of {NAMES}; did you mean head_parallel?"),
    Refusal("no_strategy", {"strategy": ""}, f"Strategy: '' is not one of {NAMES}"),
    Refusal("teams_that_do_not_divide", {"strategy": "head_parallel_ring", "head_ranks": 3},
            "Strategy: 2 ranks do not form teams of 3; head_ranks must divide the ranks"),
    Refusal("negative_teams", {"strategy": "head_parallel_ring", "head_ranks": -1},
            "Strategy: head_ranks is -1"),
    Refusal("teams_in_a_plain_ring", {"head_ranks": 2},
            "Strategy: 'ring' has teams of 1 but head_ranks is 2; "
            "head_parallel_ring takes any divisor of the ranks"),
    # Layouts.
    Refusal("layout_of_more_ranks", {"attention": AttentionLayout(Ownership.head_tail(16, 4))},
            "attend: the ownership is over 4 ranks but the group has 2"),
    Refusal("layout_of_one_rank", {"attention": AttentionLayout(Ownership.contiguous(8, 1))},
            "attend: the ownership is over 1 ranks but the group has 2"),
    Refusal("layout_of_a_longer_stream",
            {"attention": AttentionLayout(Ownership.head_tail(24, 2))},
            f"attend: `q` is {Q} but rank RANK holds 12 tokens"),
    Refusal("no_tokens_where_there_should_be",
            {"q": zeros(2, 4, 0, 6), "k": zeros(2, 2, 0, 6), "v": zeros(2, 2, 0, 3)},
            "attend: `q` is float32 [2, 4, 0, 6] but rank RANK holds 8 tokens"),
    Refusal("one_token_too_many",
            {"q": zeros(2, 4, 9, 6), "k": zeros(2, 2, 9, 6), "v": zeros(2, 2, 9, 3)},
            "attend: `q` is float32 [2, 4, 9, 6] but rank RANK holds 8 tokens"),
    Refusal("layout_of_garbage", holding(torch.arange(12)),
            "AttentionLayout: this is no layout of attention (12 numbers); "
            "make one with AttentionLayout"),
    Refusal("empty_layout", holding(zeros(0, dtype=torch.long)),
            "AttentionLayout: this is no layout of attention (0 numbers); "
            "make one with AttentionLayout"),
    Refusal("layout_cut_short", holding(LAYOUT[:-1]),
            f"AttentionLayout: the code ends after {LAYOUT.numel() - 1} numbers; "
            "pass the tensor of an AttentionLayout, whole"),
    Refusal("layout_twice", holding(torch.cat([LAYOUT, LAYOUT])),
            "AttentionLayout: numbers are left over in the code"),
    Refusal("narrow_layout", holding(LAYOUT.int()),
            f"attend: `layout` is int32 [{LAYOUT.numel()}] on cpu{MADE}"),
    Refusal("floating_layout", holding(LAYOUT.double()),
            f"attend: `layout` is float64 [{LAYOUT.numel()}] on cpu{MADE}"),
    Refusal("layout_with_two_axes", holding(LAYOUT.unsqueeze(0)),
            f"attend: `layout` is int64 [1, {LAYOUT.numel()}] on cpu{MADE}"),
    Refusal("layout_that_is_a_number", holding(torch.tensor(3)),
            f"attend: `layout` is int64 [] on cpu{MADE}"),
    # Masks and owners.
    Refusal("attention_and_mask", {"mask": Mask.causal(STREAM)},
            "attend: `attention` already holds mask and owners; leave them out"),
    Refusal("attention_and_layout", {"layout": OWNERS},
            "attend: `attention` already holds mask and owners; leave them out"),
    Refusal("neither_attention_nor_layout", without_attention(),
            "attend: 2 ranks need a layout; give `layout` or `attention`"),
    Refusal("mask_of_another_length",
            without_attention(layout=OWNERS, mask=Mask.causal(Packing.single(17))),
            "AttentionLayout: Mask(causal, 17 tokens, 1 document) over Ownership(head-tail, 16 "
            "tokens, 2 ranks); mask and ownership must have the same tokens"),
    Refusal("mask_of_compressed_keys",
            without_attention(layout=OWNERS, mask=Mask.compressed(STREAM, 2)),
            "AttentionLayout: the keys of Mask(compressed 2:1, 16 tokens, 1 document) are not "
            "tokens; attend to them as a second block of keys"),
    Refusal("three_masks_for_two_rows",
            without_attention(layout=OWNERS, mask=[Mask.causal(STREAM)] * 3),
            "Plan: 3 masks for 2 rows; give one for all rows, or one for each"),
    Refusal("no_mask_at_all", without_attention(layout=OWNERS, mask=[]),
            "AttentionLayout: no mask; give one, or one a row"),
    Refusal("mask_as_a_tensor", without_attention(layout=OWNERS, mask=torch.ones(16, 16)),
            "AttentionLayout: `mask` is a float32 tensor; expected a Mask, or one a row",
            TypeError),
    Refusal("mask_as_a_number", without_attention(layout=OWNERS, mask=3),
            "AttentionLayout: `mask` is an int; expected a Mask, or one a row", TypeError),
    Refusal("mask_by_name", without_attention(layout="head-tail", mask="causal"),
            "attend: `mask` holds a str; expected a Mask, or one a row", TypeError),
    Refusal("layout_by_name_without_a_mask", without_attention(layout="head-tail"),
            "attend: layout 'head-tail' needs a mask, whose packing it cuts; give it, an "
            "Ownership, or `attention`"),
    Refusal("layout_of_a_stream_for_rows",
            without_attention(layout="head-tail-stream", mask=[Mask.causal(STREAM)] * 2),
            "attend: layout 'head-tail-stream' needs one mask, not 2, whose packing it cuts; give "
            "it, an Ownership, or `attention`"),
    Refusal("unknown_layout", without_attention(layout="zigzag", mask=Mask.causal(STREAM)),
            "attend: layout 'zigzag' is not one of head-tail, contiguous-rows, contiguous-stream, "
            "head-tail-stream, per-document-head-tail; did you mean head-tail?"),
    Refusal("layout_as_a_tensor", without_attention(layout=LAYOUT),
            "attend: `layout` is an int64 tensor; expected the name of a layout, or an Ownership",
            TypeError),
    Refusal("attention_as_a_tensor", {"attention": LAYOUT},
            "attend: `attention` is an int64 tensor; expected an AttentionLayout", TypeError),
    Refusal("strategy_as_a_number", {"strategy": 3},
            f"Strategy: expected one of {NAMES}, or a Strategy; got int", TypeError),
    Refusal("group_by_size", {"group": 2},
            "Group: expected a process group, a DeviceMesh or a name, got int", TypeError),
]  # fmt: skip


def call(group: Group, changed: dict[str, Any]) -> Any:
    arguments: dict[str, Any] = {
        "q": zeros(2, 4, 8, 6),
        "k": zeros(2, 2, 8, 6),
        "v": zeros(2, 2, 8, 3),
        "attention": AttentionLayout.of_tensor(LAYOUT),
        "group": group,
    } | changed
    if "head_ranks" in arguments:
        arguments["strategy"] = Strategy(
            arguments.get("strategy", "ring"), arguments.pop("head_ranks")
        )
    return longspan.attend(**arguments)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda r: r.name)
def test_refuses_before_anything_is_sent(refusal: Refusal) -> None:
    def body(group: Group) -> None:
        with pytest.raises(refusal.error) as raised:
            call(group, refusal.changed)
        assert str(raised.value) == refusal.message.replace("RANK", str(group.rank()))
        assert group.sent_bytes == 0

    run_ranks(2, body, timeout=5)


def test_refuses_a_layout_without_values() -> None:
    with pytest.raises(ValueError, match="`layout` is on meta, which holds no values"):
        call(Group(), holding(AttentionLayout(Ownership.contiguous(8, 1)).tensor.to("meta")))


def test_refuses_teams_larger_than_an_int() -> None:
    layout = AttentionLayout(Ownership.contiguous(8, 1))
    with pytest.raises(ValueError, match="head_ranks"):
        call(
            Group(),
            {"attention": layout, "strategy": "head_parallel_ring", "head_ranks": 2**32 + 1},
        )


def test_refuses_garbage_in_every_place_of_a_layout() -> None:
    """Any number of a layout may be broken: an answer or a sentence, no crash."""
    packing = Packing.of([3, 5], [4, 6])
    mask = Mask.sliding(packing, 3).with_groups([(1, 3)]).with_hidden([(5, 6)])
    for owners in (
        Ownership.contiguous(10, 1),
        Ownership.of_ranges([[(4, 10), (0, 4)]]),
        Ownership.per_document_head_tail(packing, 1),
    ):
        layout = AttentionLayout(owners, mask).tensor
        x = zeros(10, 1, 2)
        refused = 0
        for place in range(layout.numel()):
            for number in (-(2**63), -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63 - 1):
                broken = layout.clone()
                broken[place] = number
                try:
                    longspan.attend(x, x, x, **holding(broken))
                except ValueError:
                    refused += 1
        assert refused > 5 * layout.numel()


# ---- Nothing to do is no mistake.


@each_strategy
def test_no_rows_and_no_tokens_are_ordinary(strategy: str) -> None:
    def body(group: Group) -> None:
        for owners, tokens, rows in ((OWNERS, 8, 0), (Ownership.contiguous(0, 2), 0, 2)):
            q, k, v = (zeros(rows, h, tokens, 4).requires_grad_() for h in (4, 2, 2))
            out = longspan.attend(q, k, v, layout=owners, group=group, strategy=strategy)
            assert isinstance(out, torch.Tensor)
            assert out.shape == q.shape
            out.sum().backward()
            assert q.grad is not None and q.grad.shape == q.shape
            assert k.grad is not None and k.grad.shape == k.shape
        assert group.sent_bytes == 0

    run_ranks(2, body, timeout=5)


# ---- Ranks that do not agree, fail, or are late.

FULL = Mask.full(Packing.single(24))
CONTIGUOUS = Ownership.contiguous(24, 3)
HEAD_TAIL = Ownership.head_tail(24, 3)


def both_passes(group: Group, **options: Any) -> tuple[str, str]:
    """The pass in which attention ended, and with what words."""
    dtype = options.pop("dtype", torch.float32)
    q, k, v = (torch.randn(1, 3, 8, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    options = {"mask": FULL, "layout": CONTIGUOUS, "strategy": "ring"} | options
    passed = "forward"
    try:
        out = longspan.attend(q, k, v, group=group, **options)
        passed = "backward"
        out.sum().backward()
    except (RuntimeError, ValueError) as error:
        return passed, str(error)
    return "end", ""


DISAGREEMENTS: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "gathered"},
    "heads_instead_of_keys": {"strategy": "head_parallel"},
    "mask_and_ownership": {"mask": Mask.causal(Packing.single(24)), "layout": HEAD_TAIL},
    "mask": {"mask": Mask.causal(Packing.single(24))},
    "dtype": {"dtype": torch.bfloat16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_with_different_plans_all_end_in_time(name: str) -> None:
    def body(group: Group) -> tuple[str, str]:
        return both_passes(group, **(DISAGREEMENTS[name] if group.rank() == 1 else {}))

    start = time.monotonic()
    ends = run_ranks(3, body, timeout=60)
    assert time.monotonic() - start < 8
    for where, words in ends:
        assert where == "forward"
        assert words.startswith("attend: the ranks of the group do different things in call 1: "), (
            words
        )


@pytest.mark.parametrize("strategy", ["ring", "gathered", "needed"])
def test_ranks_with_different_owners_of_equal_sizes_end_in_time(strategy: str) -> None:
    def body(group: Group) -> tuple[str, str]:
        owners = HEAD_TAIL if group.rank() == 1 else CONTIGUOUS
        return both_passes(group, layout=owners, strategy=strategy)

    ends = run_ranks(3, body, timeout=60)
    assert all(where == "forward" and "head-tail" in words for where, words in ends), ends


@each_strategy
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_rank_that_raises_ends_the_others_at_once(stage: str, strategy: str) -> None:
    ended: list[int] = []

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("mine")

    def body(group: Group) -> None:
        try:
            q, k, v = (torch.randn(1, 3, 8, 4, requires_grad=True) for _ in range(3))
            options: dict[str, Any] = {"layout": CONTIGUOUS, "group": group}
            first = longspan.attend(q, k, v, mask=FULL, strategy=strategy, **options)
            assert isinstance(first, torch.Tensor)
            if group.rank() == 1:
                if stage == "forward":
                    raise KeyError("mine")
                first.register_hook(fail)
            second = longspan.attend(first, k, v, mask=FULL, strategy=strategy, **options)
            assert isinstance(second, torch.Tensor)
            second.sum().backward()
        finally:
            ended.append(group.rank())

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, body, timeout=30)
    assert time.monotonic() - start < 10
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.slow
@each_strategy
def test_a_rank_that_skips_backward_is_named(strategy: str) -> None:
    def body(group: Group) -> str:
        q, k, v = (torch.randn(1, 3, 8, 4, requires_grad=True) for _ in range(3))
        options: dict[str, Any] = {"layout": CONTIGUOUS, "group": group, "strategy": strategy}
        with pytest.raises(ValueError) as raised, torch.set_grad_enabled(group.rank() != 1):
            longspan.attend(q, k, v, mask=FULL, **options)
        return str(raised.value)

    for words in run_ranks(3, body, timeout=60):
        assert "rank 1: attend, without gradients" in words


@pytest.mark.slow
@each_strategy
def test_a_slow_rank_is_waited_for(strategy: str) -> None:
    def body(group: Group) -> tuple[str, str]:
        if group.rank() == 1:
            time.sleep(1)
        return both_passes(group, strategy=strategy)

    assert run_ranks(3, body, timeout=10) == [("end", "")] * 3


def test_a_group_that_ended_is_named() -> None:
    kept: list[Any] = []

    def body(group: Group) -> None:
        q, k, v = (torch.randn(1, 3, 8, 4, requires_grad=True) for _ in range(3))
        out = longspan.attend(q, k, v, mask=FULL, layout=CONTIGUOUS, group=group)
        if group.rank() == 0:
            kept.extend([group, out])

    run_ranks(3, body)
    group, out = kept
    message = (
        f"Group: no process group named '{group.name}' is alive; keep it, and destroy it "
        "only after the last use of the group"
    )
    x = zeros(1, 3, 8, 4)
    with pytest.raises(ValueError) as forward:
        longspan.attend(x, x, x, mask=FULL, layout=CONTIGUOUS, group=group)
    assert str(forward.value) == message
    with pytest.raises(RuntimeError) as backward:
        out.sum().backward()
    assert str(backward.value) == message


def test_two_groups_at_once_keep_apart() -> None:
    def attention(group: Group, seed: int) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        whole = torch.randn(3, 1, 3, 24, 4, generator=random)
        owners = Ownership.head_tail(24, group.size())
        mine = whole.index_select(3, owners.tokens_of(group.rank()))
        results = []
        for strategy in STRATEGIES * 3:
            q, k, v = (t.clone().requires_grad_() for t in mine)
            out = longspan.attend(q, k, v, layout=owners, group=group, strategy=strategy)
            assert isinstance(out, torch.Tensor)
            results += [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]
        return results

    runs = [(2, 5), (3, 6), (2, 7)]
    together: dict[int, Any] = {}

    def run(ranks: int, seed: int) -> None:
        together[seed] = run_ranks(ranks, lambda group: attention(group, seed))

    threads = [threading.Thread(target=run, args=each) for each in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ranks, seed in runs:
        alone = run_ranks(ranks, lambda group, seed=seed: attention(group, seed))
        for a, b in zip(together[seed], alone, strict=True):
            assert all(map(torch.equal, a, b))


# ---- Real processes, and one that dies.


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, stops_in", [("ring", "forward"), ("ring", "backward"), ("head_parallel", "backward")]
)
def test_a_killed_peer_is_named_by_the_survivors(strategy: str, stops_in: str) -> None:
    ranks = 3
    processes = start_ranks("attend_dying_ranks.py", ranks, strategy, stops_in)
    victim = processes[-1]
    try:
        assert victim.stdout is not None
        for line in victim.stdout:
            if line == f"waiting in {stops_in}\n":
                break
        time.sleep(0.5)  # the others are in the hop by now
        victim.send_signal(signal.SIGKILL)
    finally:
        outputs = outputs_of(processes, timeout=60)
    assert victim.returncode == -signal.SIGKILL
    named = {"ring": "ring attention", "head_parallel": "head_parallel attention"}[strategy]
    for rank, output in enumerate(outputs[:-1]):
        assert "finished" not in output
        found = re.search(r"lost after ([\d.]+) s: (.*)", output)
        assert found, f"rank {rank}:\n{output}"
        assert float(found[1]) < 20
        assert re.match(
            rf"{named} {stops_in}, [^:]*: rank {rank} (waited [\d.]+ s for|could not reach) "
            rf"rank \d: .*; look at the log of rank \d, or raise the group's timeout",
            found[2],
        ), found[2]
        if strategy == "ring":
            assert re.search(r"hop \d of 2: ", found[2]), found[2]


# ---- NaN and infinity go where they are seen, and nowhere else.

DOCUMENTS = Packing.of([13, 1, 7], [14, 2, 8])  # pads at 13, 15 and 23
HEADS, KEY_HEADS = 4, 2
SEEN: dict[str, Callable[[], Mask]] = {
    "causal": lambda: Mask.causal(DOCUMENTS),
    "window": lambda: Mask.sliding(DOCUMENTS, 3),
    "groups": lambda: Mask.sliding(DOCUMENTS, 2).with_groups([(4, 9)]),
    "hidden": lambda: Mask.causal(DOCUMENTS).with_hidden([(2, 5), (17, 18)]),
}


def visible(mask: Mask) -> torch.Tensor:
    seen = torch.zeros(mask.queries, mask.keys, dtype=torch.bool)
    for query in range(mask.queries):
        for keys in mask.key_ranges_of(query):
            seen[query, keys.begin : keys.end] = True
    return seen


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which (head, token) pairs of each result may change, from one poisoned
    token of one tensor."""

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    @staticmethod
    def of(where: str, token: int, seen: torch.Tensor) -> Reach:
        """The last head of q and dout, or the last key head of k and v."""
        tokens = len(seen)
        group = HEADS // KEY_HEADS
        poisoned = torch.zeros(HEADS, tokens, dtype=torch.bool)  # queries
        if where in ("q", "dout"):
            poisoned[-1, token] = seen[token].any()
        else:
            poisoned[-group:] = seen[:, token]
        keys = (poisoned.float() @ seen.float() > 0).unflatten(0, (KEY_HEADS, group)).any(1)
        nothing = torch.zeros_like
        return Reach(
            out=nothing(poisoned) if where == "dout" else poisoned,
            dq=poisoned,
            dk=keys,
            # Weights do not depend on values.
            dv=nothing(keys) if where == "v" else keys,
        )


def shares_of(group: Group, owners: Ownership, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.index_select(2, owners.tokens_of(group.rank())) for t in whole]


def passes(
    group: Group, owners: Ownership, mask: Mask, strategy: str, whole: list[torch.Tensor]
) -> list[torch.Tensor]:
    q, k, v, dout = shares_of(group, owners, whole)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = longspan.attend(*leaves, mask=mask, layout=owners, group=group, strategy=strategy)
    assert isinstance(out, torch.Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, ranks",
    [(torch.float32, 1), (torch.float32, 2), (torch.float32, 3), (torch.bfloat16, 2)],
    ids=str,
)
@each_strategy
def test_nan_and_infinity_reach_those_who_see_them_and_no_others(
    strategy: str, dtype: torch.dtype, ranks: int
) -> None:
    owners = Ownership.head_tail(24, ranks)
    random = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(1, heads, 24, 5, generator=random).to(dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]
    names = ("q", "k", "v", "dout")
    cases = [
        (name, where, token, value)
        for name in SEEN
        for where in names
        for token in (4, 13, 14, 17)
        for value in (math.nan, math.inf, -math.inf)[: 3 if where == "k" else 2]
    ]
    masks = {name: make() for name, make in SEEN.items()}

    def body(group: Group) -> list[list[torch.Tensor]]:
        clean = [passes(group, owners, mask, strategy, whole) for mask in masks.values()]
        results = [*clean]
        for name, where, token, value in cases:
            poisoned = [t.clone() for t in whole]
            poisoned[names.index(where)][0, -1, token, 2] = value
            results.append(passes(group, owners, masks[name], strategy, poisoned))
        return results

    order = torch.cat([owners.tokens_of(rank) for rank in range(ranks)]).argsort()
    parts = run_ranks(ranks, body)
    joined = [
        [torch.cat(tensors, 2).index_select(2, order)[0] for tensors in zip(*each, strict=True)]
        for each in zip(*parts, strict=True)
    ]
    clean = dict(zip(masks, joined, strict=False))
    seen = {name: visible(mask) for name, mask in masks.items()}
    wrong = []
    for (name, where, token, value), results in zip(cases, joined[len(masks) :], strict=True):
        reach = Reach.of(where, token, seen[name])
        for field, got, expected in zip(
            dataclasses.fields(Reach), results, clean[name], strict=True
        ):
            allowed = getattr(reach, field.name)
            # NaN equals itself here. Blocks with an infinity are summed pair by pair,
            # so their other rows may round differently, and no more than that.
            near = (got - expected).abs() <= 64 * torch.finfo(dtype).eps * (1 + expected.abs())
            same = near | (got == expected) | (got.isnan() & expected.isnan())
            changed = (~same).any(-1)
            bad = (~got.isfinite()).any(-1)
            what = f"{name}: {value} in {where} at token {token}: {field.name}"
            for head, at in (changed & ~allowed).nonzero().tolist():
                wrong.append(f"{what} of head {head}, token {at} changed")
            if math.isnan(value):
                for head, at in (allowed & ~bad).nonzero().tolist():
                    wrong.append(f"{what} of head {head}, token {at} is finite")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])
