"""Calls of the public surface with arguments that fit, and what to put in their place.

A target is a function with arguments that work; a call of the fuzzer takes a target and
replaces some of them by odd values. `complaint` judges how the call ended."""

from __future__ import annotations

import inspect
import random
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import longspan
from longspan import Group, Mask, Ownership, Packing, Strategy, comm, dsa, testing, values

Make = Callable[[random.Random], Any]


class Target(NamedTuple):
    name: str
    function: Callable[..., Any]
    arguments: dict[str, Make]
    #: Arguments that are given in order, without their names.
    in_order: int = 0


class Opaque:
    """Nothing that anybody takes."""


def _uninitialised(kind: type) -> Any:
    return kind.__new__(kind)


def _raising(*_: Any, **__: Any) -> Any:
    raise ValueError("fuzz: the caller's own function raised")


#: What may come instead of an argument.
ODD: list[Callable[[], Any]] = [
    lambda: None,
    lambda: 0,
    lambda: 1,
    lambda: -1,
    lambda: 3,
    lambda: 7,
    lambda: 2.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: -1e300,
    lambda: True,
    lambda: 1j,
    lambda: "",
    lambda: "x",
    lambda: "ring",
    lambda: "rows",
    lambda: "head-tail",
    lambda: "a\x00b",
    lambda: "\ud800",
    lambda: b"x",
    lambda: [],
    lambda: (),
    lambda: [1, 2],
    lambda: (0, 4),
    lambda: [[1, 2], 3],
    lambda: [None],
    lambda: ["x", 2],
    lambda: [2**70],
    lambda: {},
    lambda: {"input_ids": 3},
    lambda: {1: torch.zeros(2, 8)},
    lambda: {"x"},
    lambda: range(3),
    lambda: iter([1, 2]),
    lambda: Opaque(),
    lambda: Opaque,
    lambda: print,
    lambda: _raising,
    lambda: Ellipsis,
    lambda: slice(1, 2),
    lambda: 2**31 - 1,
    lambda: 2**31,
    lambda: 2**33,
    lambda: 2**40,
    lambda: 2**62,
    lambda: 2**63 - 1,
    lambda: -(2**63),
    lambda: 2**70,
    lambda: -(2**70),
    lambda: torch.float32,
    lambda: torch.device("cpu"),
    lambda: torch.Size([2, 3]),
    lambda: torch.nn.Linear(2, 2),
    lambda: torch.tensor(3),
    lambda: torch.tensor(2.5),
    lambda: torch.tensor([]),
    lambda: torch.zeros(0, 3),
    lambda: torch.zeros(1, 2, 8, 4, 1, 1),
    lambda: torch.randn(8, 2, 4),
    lambda: torch.randn(1, 2, 8, 4),
    lambda: torch.randn(2, 8),
    lambda: torch.randn(8, 4).double(),
    lambda: torch.randn(8, 4).to(torch.bfloat16),
    lambda: torch.randn(8, 4, dtype=torch.complex64),
    lambda: torch.arange(16).view(2, 8),
    lambda: torch.ones(2, 8, dtype=torch.bool),
    lambda: torch.ones(8, 3, dtype=torch.int32),
    lambda: torch.full((8, 3), 2**62),
    lambda: torch.full((3,), -(2**63)),
    lambda: torch.randn(8, 4).to_sparse(),
    lambda: torch.randn(8, 4).to_sparse_csr(),
    lambda: torch.randn(8, 4).to_mkldnn(),
    lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    lambda: torch.randn(8, 2, 4, device="meta"),
    lambda: torch.quantize_per_tensor(torch.randn(8, 4), 0.1, 0, torch.qint8),
    lambda: torch.empty(2**40, 2, 0, 4),
    lambda: torch.randn(1).expand(8, 2, 4),
    lambda: torch.randn(4, 2, 8).transpose(0, 2),
    lambda: torch.randn(1, 2, 8, 4, requires_grad=True),
    lambda: [torch.zeros(2, 4), torch.zeros(2, 4)],
    lambda: Packing.of([5, 3]),
    lambda: Packing.single(0),
    lambda: Packing.single(2**63 - 1),
    lambda: Mask.causal(Packing.of([5, 3])),
    lambda: Mask.compressed(Packing.of([5, 3]), 2),
    lambda: Mask.causal(Packing.single(3_000_000_000)),
    lambda: [Mask.causal(Packing.of([8]))] * 3,
    lambda: Ownership.contiguous(8, 2),
    lambda: Ownership.contiguous(0, 2**31 - 1),
    lambda: Ownership.contiguous(2**62, 1),
    lambda: Ownership.head_tail(2**63 - 8, 2),
    lambda: longspan.plan(Ownership.contiguous(8, 2)),
    lambda: longspan.draw(Ownership.contiguous(8, 2)),
    lambda: longspan.AttentionLayout(Ownership.contiguous(8, 1)),
    lambda: longspan.AttentionLayout.of_tensor(torch.arange(9)),
    lambda: longspan.AttentionLayout.of_tensor(3),  # type: ignore[arg-type]
    lambda: Strategy("head_parallel_ring", 3),
    lambda: Group(),
    lambda: values.TokenTable(),
    lambda: values.TokenRange(2, 5),
    lambda: longspan.shard({"input_ids": torch.arange(16).view(2, 8)}),
    lambda: longspan.shard({"input_ids": torch.arange(16).view(2, 8)}).cut,
    lambda: values.pack({"input_ids": torch.arange(16).view(2, 8)}),
    lambda: _uninitialised(Packing),
    lambda: _uninitialised(Mask),
    lambda: _uninitialised(Ownership),
    lambda: _uninitialised(longspan.Plan),
    lambda: _uninitialised(values.Cut),
    lambda: _uninitialised(values.TokenTable),
    lambda: _uninitialised(values.TokenRange),
    lambda: _uninitialised(Strategy),
]
try:
    import numpy
except ImportError:
    pass
else:
    ODD += [
        lambda: numpy.zeros((8, 2, 4), dtype=numpy.float32),
        lambda: numpy.arange(3),
        lambda: numpy.int64(4),
        lambda: numpy.float32(2.5),
        lambda: numpy.bool_(True),
    ]


def odd_value(rng: random.Random) -> Any:
    return rng.choice(ODD)()


def one_of(*makes: Callable[[], Any]) -> Make:
    return lambda rng: rng.choice(makes)()


def always(value: Any) -> Make:
    return lambda _: value


# ---- Arguments that fit.

_PACKING = Packing.of([5, 0, 3], [6, 2, 8], 16)
_packings = one_of(lambda: _PACKING, lambda: Packing.of([8]), lambda: Packing.of([]))
_owners = one_of(
    lambda: Ownership.contiguous(8, 2),
    lambda: Ownership.head_tail(8, 2),
    lambda: Ownership.of_sizes([3, 0, 5]),
)
_masks = one_of(
    lambda: Mask.causal(Packing.of([8])),
    lambda: Mask.sliding(Packing.of([5, 3]), 2),
    lambda: Mask.full(Packing.of([5, 3])),
    lambda: Mask.compressed(Packing.of([8]), 2),
)
_token_masks = one_of(
    lambda: Mask.causal(Packing.of([8])), lambda: Mask.sliding(Packing.of([5, 3]), 2)
)
_batch = one_of(
    lambda: {"input_ids": torch.arange(16).view(2, 8)},
    lambda: {
        "input_ids": torch.arange(16).view(2, 8),
        "labels": torch.arange(16).view(2, 8),
        "seq_lens": torch.tensor([[3, 2], [8, -1000]]),
        "note": "kept",
    },
)


def _tensor(*sizes: int, **options: Any) -> Make:
    return lambda _: torch.randn(*sizes, **options)


def _whole(*numbers: int) -> Make:
    return lambda rng: rng.choice(numbers)


_flag = one_of(lambda: True, lambda: False)
_solo: Make = lambda _: Group()  # noqa: E731
_strategies = one_of(*[lambda name=name: name for name in Strategy.names()])
_fetch = one_of(lambda: "gathered", lambda: "needed")
_lists: Make = lambda _: torch.randint(-1, 8, (8, 3), dtype=torch.int32)  # noqa: E731
_table: Make = lambda _: comm.needed_table(  # noqa: E731
    Mask.causal(Packing.of([8])), Ownership.contiguous(8, 1)
)


def _layout() -> longspan.AttentionLayout:
    return longspan.AttentionLayout(Ownership.contiguous(8, 1), Mask.causal(Packing.of([5, 3])))


_attention: Make = lambda _: _layout()  # noqa: E731


def _parity_run(model: Any, local: Any, group: Any) -> Any:
    logits = model(local["input_ids"].unsqueeze(-1).float())
    return logits.sum(), logits


def _model(_: random.Random) -> torch.nn.Module:
    model = torch.nn.Linear(1, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


_SHARD: dict[str, Make] = {
    "rank": _whole(0, 1),
    "ranks": _whole(2),
    "layout": one_of(*[lambda name=x.name: name for x in values.named_layouts()]),
    "multiple": _whole(1, 2),
    "table": lambda _: values.TokenTable(),
    "sentinel": _whole(-1000),
    "pass_through": lambda _: ["note"],
    "shift_labels": always(False),
    "ahead": lambda _: {"next": ("input_ids", 1)},
    "check_agreement": _flag,
}
_OWN: dict[str, Make] = {"group": _solo}
_INDEXER: dict[str, Make] = {
    "q": _tensor(8, 2, 4),
    "k": _tensor(8, 4),
    "weights": _tensor(8, 2),
}
_SELECTED: dict[str, Make] = {"q": _tensor(8, 2, 4), "kv": _tensor(8, 4), "indices": _lists}
_WINDOWS: dict[str, Make] = {
    "start": lambda _: torch.zeros(8, dtype=torch.int32),
    "end": lambda _: torch.full((8,), 8, dtype=torch.int32),
}
_AXIS: dict[str, Make] = {"x": _tensor(8, 4), "axis": _whole(0, 1), "sizes": lambda _: [8]}
_TRADE: dict[str, Make] = {
    "x": _tensor(8, 4),
    "token_axis": always(0),
    "head_axis": always(1),
    "token_sizes": lambda _: [8],
    "head_sizes": lambda _: [4],
}


#: What passes for a trainer of transformers, which takes seconds to import.
_Trainer = type("Trainer", (), {"__module__": "transformers.trainer"})


def _local(rng: random.Random) -> Any:
    return longspan.shard({"input_ids": torch.arange(16).view(2, 8)}, rank=0, ranks=1)


TARGETS: list[Target] = [
    # The top.
    Target(
        "attend",
        longspan.attend,
        {
            "q": _tensor(1, 2, 8, 4),
            "k": _tensor(1, 2, 8, 4),
            "v": _tensor(1, 2, 8, 4),
            "mask": _token_masks,
            "layout": one_of(lambda: None, lambda: Ownership.contiguous(8, 1)),
            "group": _solo,
            "strategy": _strategies,
            "scale": one_of(lambda: None, lambda: 0.5),
            "softcap": one_of(lambda: None, lambda: 5.0),
            "sink": one_of(lambda: None, lambda: torch.randn(2)),
            "dropout_p": always(0.0),
            "return_lse": _flag,
        },
    ),
    Target(
        "attend",
        longspan.attend,
        {
            "q": _tensor(8, 2, 4),
            "k": _tensor(8, 2, 4),
            "v": _tensor(8, 2, 4),
            "attention": lambda _: longspan.AttentionLayout(Ownership.contiguous(8, 1)),
        },
    ),
    Target("AttentionLayout", longspan.AttentionLayout, {"owners": _owners, "mask": _token_masks}),
    Target(
        "AttentionLayout",
        lambda tensor: repr(longspan.AttentionLayout.of_tensor(tensor)),
        {"tensor": lambda _: longspan.AttentionLayout(Ownership.contiguous(8, 1)).tensor},
    ),
    Target(
        "check_parity",
        longspan.check_parity,
        {
            "model": _model,
            "batch": _batch,
            "group": _solo,
            "run": always(_parity_run),
            "tolerance": one_of(lambda: None, lambda: 0.1),
        },
    ),
    Target(
        "leak_probe",
        longspan.leak_probe,
        {
            "model": _model,
            "batch": _batch,
            "group": _solo,
            "run": always(_parity_run),
            "documents": one_of(lambda: None, lambda: 1),
        },
    ),
    Target(
        "clip_grad_norm",
        longspan.clip_grad_norm,
        {
            "model": one_of(lambda: _model(random.Random()), lambda: [torch.zeros(2)]),
            "max_norm": always(1.0),
            "group": _solo,
            "norm_type": one_of(lambda: 2.0, lambda: float("inf")),
            "error_if_nonfinite": _flag,
            "foreach": one_of(lambda: None, lambda: False),
        },
    ),
    Target("draw", longspan.draw, {"ownership": _owners, "mask": _masks, "against": _owners}),
    Target("draw", longspan.draw, {"ownership": _owners, "packing": _packings}),
    Target("explain", longspan.explain, {"model": _model, "batch": _batch, "group": _solo}),
    Target(
        "explain",
        longspan.explain,
        {
            "model": _model,
            "batch": one_of(lambda: 64, lambda: [40, 24]),
            "ranks": _whole(1, 4),
            "rank": _whole(0, 1),
            "device": one_of(lambda: "h200", lambda: None),
            "optimizer": one_of(lambda: "adamw", lambda: "sgd"),
            "shards": _whole(1, 2),
        },
    ),
    Target(
        "parallelize",
        longspan.parallelize,
        {
            "model": _model,
            "group": _solo,
            "proof": lambda rng: rng.choice(["auto", False]),
            "check_steps": _flag,
        },
    ),
    Target("report", longspan.report, {"group": _solo}),
    Target("prove", longspan.proof.prove, {"model": _model, "twin": lambda _: None}),
    Target("restore", longspan.restore, {"model": _model}),
    Target("paused", lambda model: longspan.paused(model).__enter__(), {"model": _model}),
    Target(
        "mtp_losses",
        longspan.mtp_losses,
        {"model": _model, "mtp": always(torch.nn.Linear(1, 1)), "local": _local},
    ),
    Target(
        "expert_counts",
        longspan.expert_counts,
        {"outputs": always(types.SimpleNamespace()), "local": _local},
    ),
    Target(
        "plan",
        longspan.plan,
        {
            "ownership": _owners,
            "mask": _token_masks,
            "strategy": _strategies,
            "rank": _whole(0, 1),
            "key_heads": _whole(1, 2),
            "rows": _whole(1, 2),
        },
    ),
    Target(
        "trainer",
        longspan.hf.trainer,
        {"trainer_class": always(_Trainer), "group": _solo, "strategy": always("ring")},
    ),
    Target("prefill", longspan.hf.prefill, {"model": _model, "batch": _batch, "group": _solo}),
    Target(
        "total_loss",
        longspan.total_loss,
        {"loss": lambda _: torch.tensor(3.0), "group": _solo},
    ),
    Target(
        "reduce_loss",
        longspan.reduce_loss,
        {"sum": lambda _: torch.tensor(3.0), "count": _whole(3), "group": _solo},
    ),
    Target(
        "linear_cross_entropy",
        longspan.linear_cross_entropy,
        {
            "hidden": _tensor(8, 4),
            "weight": _tensor(9, 4),
            "labels": lambda _: torch.arange(8),
            "bias": one_of(lambda: None, lambda: torch.randn(9)),
            "softcap": one_of(lambda: None, lambda: 2.0),
            "scale": always(0.5),
            "ignore_index": _whole(-100, 3),
            "reduction": one_of(lambda: "sum", lambda: "mean", lambda: "none"),
            "label_smoothing": always(0.1),
            "z_loss": always(0.1),
            "tile": one_of(lambda: None, lambda: 3),
        },
    ),
    Target(
        "run_ranks",
        longspan.run_ranks,
        {"ranks": _whole(1), "body": always(repr), "timeout": always(5.0)},
    ),
    Target("seed_ranks", longspan.seed_ranks, {"seed": _whole(1, 2), "group": _solo}),
    Target("shard", longspan.shard, {"batch": _batch, **_SHARD}, 1),
    Target("shard", longspan.shard, {"batch": _batch, "group": _solo, "model": always(None)}, 1),
    Target(
        "shard",
        longspan.shard,
        {
            "batch": _batch,
            "rank": _whole(0),
            "ranks": _whole(2),
            "layout": lambda _: Ownership.contiguous(8, 2),
            "form": one_of(lambda: "rows", lambda: None),
        },
        1,
    ),
    Target("sum_gradients", longspan.sum_gradients, {"model": _model, "group": _solo}),
    Target(
        "unshard",
        longspan.unshard,
        {
            "tensors": lambda _: torch.zeros(2, 8),
            "local": _local,
            "trim": _flag,
            "fill": _whole(0, 3),
            "axis": one_of(lambda: None, lambda: 1),
        },
    ),
    Target(
        "which_kernel",
        longspan.which_kernel,
        {
            "q": _tensor(1, 2, 8, 4),
            "k": _tensor(1, 2, 8, 4),
            "third": _tensor(1, 2, 8, 4),
            "operation": always("attend"),
            "mask": _token_masks,
            "softcap": always(1.0),
        },
        3,
    ),
    Target(
        "which_kernel",
        longspan.which_kernel,
        {
            "q": _tensor(8, 2, 4),
            "k": _tensor(8, 4),
            "third": _tensor(8, 2),
            "operation": one_of(lambda: "select_keys", lambda: "score_selected"),
            "slots": _whole(2),
        },
        3,
    ),
    # Values.
    Target("Packing.of", Packing.of,
           {"lengths": lambda _: [3, 2], "padded_lengths": always([4, 2])}),
    Target("Packing.single", Packing.single, {"tokens": _whole(0, 8)}),
    Target("Packing.rows", Packing.rows, {"rows": _whole(2), "length": _whole(0, 3)}),
    *[
        Target("Packing", getattr(Packing, method), {"self": _packings, "at": _whole(0, 1, 3)}, 2)
        for method in (
            "locate", "slot", "real", "length", "padded_length", "is_pad",
            "with_slots_multiple_of", "with_tokens_multiple_of",
        )
    ],
    Target("Packing", Packing.token_of, {"self": _packings, "d": _whole(0), "p": _whole(0)}, 3),
    Target("Ownership.contiguous", Ownership.contiguous, {"tokens": _whole(8), "ranks": _whole(2)}),
    Target("Ownership.head_tail", Ownership.head_tail, {"tokens": _whole(8), "ranks": _whole(2)}),
    Target("Ownership.per_document_head_tail", Ownership.per_document_head_tail,
           {"packing": lambda _: Packing.of([8, 4]), "ranks": _whole(2)}),
    Target("Ownership.of_sizes", Ownership.of_sizes, {"sizes": lambda _: [3, 0, 2]}),
    Target("Ownership.of_ranges", Ownership.of_ranges,
           {"ranges": lambda _: [[(0, 2)], [(2, 5)]]}),
    Target("Ownership.of", Ownership.of,
           {"kind": always("head-tail"), "packing": lambda _: Packing.of([8]), "ranks": _whole(2)}),
    *[
        Target("Ownership", getattr(Ownership, method), {"self": _owners, "at": _whole(0, 1)}, 2)
        for method in ("local_tokens", "owner_of", "local_of", "ranges_of", "tokens_of")
    ],
    Target("Ownership", Ownership.global_of,
           {"self": _owners, "rank": _whole(0), "local": _whole(0, 1)}, 3),
    Target("Mask.causal", Mask.causal, {"packing": _packings}),
    Target("Mask.full", Mask.full, {"packing": _packings}),
    Target("Mask.sliding", Mask.sliding, {"packing": _packings, "window": _whole(1, 3)}),
    Target("Mask.banded", Mask.banded,
           {"packing": _packings, "before": _whole(1, 3), "after": _whole(0, 3)}),
    Target("Mask.compressed", Mask.compressed, {"packing": _packings, "ratio": _whole(1, 2)}),
    *[
        Target("Mask", getattr(Mask, method), {"self": _masks, "at": lambda _: [(0, 2)]}, 2)
        for method in ("with_hidden", "with_groups")
    ],
    Target("Mask", Mask.with_prefix, {"self": _masks, "prefix": lambda _: [2]}, 2),
    Target("Mask", Mask.with_group_reach,
           {"self": _masks, "reach": always("within_window")}, 2),
    *[
        Target("Mask", getattr(Mask, method), {"self": _masks, "query": _whole(0, 3)}, 2)
        for method in ("keys_of", "key_ranges_of")
    ],
    *[
        Target("Mask", getattr(Mask, method),
               {"self": _masks, "a": lambda _: (0, 2), "b": lambda _: (0, 4)}, 3)
        for method in ("pairs", "coverage")
    ],
    Target("Mask", Mask.allows, {"self": _masks, "query": _whole(0, 3), "key": _whole(0, 3)}, 3),
    Target("Mask", Mask.reach, {"self": _masks, "queries": lambda _: (0, 2)}, 2),
    Target(
        "Plan.sent_bytes",
        longspan.Plan.sent_bytes,
        {
            "self": lambda _: longspan.plan(Ownership.contiguous(8, 2), strategy="head_parallel"),
            "pass": one_of(lambda: "forward", lambda: "backward"),
            "heads": _whole(4),
            "key_heads": _whole(2),
            "head_dim": _whole(8),
        },
        2,
    ),
    Target("Strategy", Strategy, {"name": _strategies, "head_ranks": always(None)}),
    Target("Strategy", Strategy.of, {"strategy": _strategies}),
    Target("Group", Group, {"name": always("")}),
    Target("Group", Group.of, {"group": _solo}),
    Target("TokenRange", values.TokenRange, {"begin": _whole(0), "end": _whole(3)}),
    Target("TokenTable", values.TokenTable.with_tensor,
           {"self": lambda _: values.TokenTable(), "key": always("x"), "axis": _whole(1),
            "fill": _whole(0)}, 2),
    Target("Picture", values.Picture.to_text,
           {"self": lambda _: longspan.draw(Ownership.contiguous(8, 2)), "width": _whole(80),
            "ascii": _flag, "color": _flag}, 1),
    *[
        Target(name, getattr(values, name), {"packing": _packings})
        for name in (
            "cumulative_lengths", "cumulative_padded_lengths", "document_ids", "padding_mask",
            "position_ids",
        )
    ],
    Target("draw_plan", values.draw_plan,
           {"ownership": _owners, "mask": _token_masks, "strategy": _strategies,
            "heads": _whole(4), "key_heads": _whole(2), "head_dim": _whole(8),
            "value_dim": _whole(8), "bytes_per_element": _whole(2)}),
    Target("key_windows", values.key_windows,
           {"mask": _masks, "ownership": _owners, "rank": _whole(0, 1)}),
    Target("pack", values.pack, {"batch": _batch, "form": one_of(lambda: "rows", lambda: "stream"),
                                 "table": _SHARD["table"], "sentinel": _SHARD["sentinel"],
                                 "pass_through": _SHARD["pass_through"]}),
    Target("pad", values.pad,
           {"packed": lambda _: values.pack({"input_ids": torch.arange(16).view(2, 8)}),
            "layout": one_of(lambda: None, lambda: "contiguous-stream"), "multiple": _whole(1, 4)}),
    Target("shard_chunks", values.shard_chunks,
           {"batch": _batch, "num_chunks": _whole(1, 2), **_SHARD}, 2),
    Target("tiles", values.tiles,
           {"mask": _token_masks, "ownership": _owners, "rank": _whole(0), "owner": _whole(1)}),
    Target("work_of", values.work_of,
           {"mask": _token_masks, "ownership": _owners, "rank": _whole(0)}),
    Target("work_per_rank", values.work_per_rank, {"mask": _token_masks, "ownership": _owners}),
    # Selected keys.
    Target("select_keys", dsa.select_keys,
           {**_INDEXER, "slots": _whole(1, 3), **_OWN, "balanced": _flag, "scores": _flag}),
    Target("select_keys", dsa.select_keys, {**_INDEXER, "slots": _whole(3), **_WINDOWS}),
    Target("attend_selected", dsa.attend_selected,
           {**_SELECTED, "scale": always(0.5), "value_dim": one_of(lambda: None, lambda: 2),
            "sink": one_of(lambda: None, lambda: torch.randn(2)), "fetch": _fetch, **_OWN}),
    Target("select_and_attend", dsa.select_and_attend,
           {"q": _tensor(8, 2, 4), "kv": _tensor(8, 4), "index_q": _tensor(8, 2, 4),
            "index_k": _tensor(8, 4), "weights": _tensor(8, 2), "slots": _whole(3),
            "scale": always(0.5), "fetch": _fetch, "balanced": _flag, "scores": _flag,
            "target": _flag, **_OWN}),
    Target("score_selected", dsa.score_selected, {**_INDEXER, "indices": _lists, "fetch": _fetch}),
    Target("selected_weights", dsa.selected_weights,
           {**_SELECTED, "lse": _tensor(8, 2), "scale": always(0.5), "fetch": _fetch}),
    Target("top_keys", dsa.top_keys, {"scores": _tensor(8, 8), "slots": _whole(3), **_WINDOWS}),
    Target("index_loss", dsa.index_loss, {"scores": _tensor(8, 3), "target": _tensor(8, 3)}),
    Target("compare_selections", dsa.compare_selections, {"a": _lists, "b": _lists, **_INDEXER}),
    Target("rotate_channels", dsa.rotate_channels,
           {"x": _tensor(8, 2, 4), "cos": _tensor(8, 1, 2), "sin": _tensor(8, 1, 2),
            "first": _whole(0, -4), "pairs": one_of(lambda: "interleaved", lambda: "halves"),
            "inverse": _flag}),
    Target("document_windows", dsa.document_windows,
           {"cu_seqlens": lambda _: torch.tensor([0, 5, 8]),
            "cu_seqlens_padded": one_of(lambda: None, lambda: torch.tensor([0, 6, 8])),
            "tokens": _whole(8)}),
    Target("window_lists", dsa.window_lists,
           {"queries": lambda _: torch.arange(8).view(1, 8), "keys": _whole(8),
            "window": _whole(3), "pools": _whole(0, 2), "ratio": _whole(4),
            "chosen": one_of(lambda: None, lambda: torch.zeros(1, 8, 2, dtype=torch.int32))}),
    Target("index_scores", dsa.index_scores, {**_INDEXER, **_WINDOWS}),
    # One rank's collectives.
    Target("all_gather_tokens", comm.all_gather_tokens, {**_AXIS, **_OWN}),
    Target("reduce_scatter_tokens", comm.reduce_scatter_tokens, {**_AXIS, **_OWN}),
    Target("all_to_all_heads", comm.all_to_all_heads, {**_TRADE, **_OWN}),
    Target("all_to_all_tokens", comm.all_to_all_tokens, {**_TRADE, **_OWN}),
    Target("rotate", comm.rotate, {"x": _tensor(8, 4), "hops": _whole(0, 1), **_OWN}),
    Target("roll", comm.roll, {**_AXIS, "shift": _whole(0, 3), **_OWN}),
    Target("exchange_needed", comm.exchange_needed,
           {"x": _tensor(8, 4), "sends": _table, "axis": always(0), **_OWN}),
    Target("return_needed", comm.return_needed,
           {"x": _tensor(8, 4), "sends": _table, "axis": always(0), "tokens": _whole(8), **_OWN}),
    Target("needed_table", comm.needed_table, {"mask": _token_masks, "ownership": _owners}),
    Target("received_ranges", comm.received_ranges,
           {"table": _table, "ownership": lambda _: Ownership.contiguous(8, 1),
            "rank": _whole(0)}),
    Target("HaloPlan", comm.HaloPlan,
           {"attention": _attention, "count": _whole(0, 3), "group": _solo,
            "rows": one_of(lambda: None, lambda: 2)}),
    Target("tokens_before", comm.tokens_before,
           {"x": _tensor(8, 4), "halo": lambda _: comm.HaloPlan(_layout(), 2), "group": _solo}),
    Target("StatePlan", comm.StatePlan,
           {"attention": _attention, "group": _solo, "rows": one_of(lambda: None, lambda: 2),
            "way": one_of(lambda: "auto", lambda: "direct", lambda: "scan"),
            "bytes_per_transition": _whole(0, 4), "bytes_per_state": _whole(0, 10**6),
            "matrix_rows": _whole(1, 4)}),
    Target("carry_states", comm.carry_states,
           {"transition": _tensor(0, 2), "state": _tensor(0, 2, 4, 4),
            "plan": lambda _: comm.StatePlan(_layout()), "group": _solo}),
    Target("PoolPlan", dsa.PoolPlan,
           {"attention": _attention, "ratio": _whole(1, 4), "overlap": _flag, "group": _solo,
            "rows": one_of(lambda: None, lambda: 2)}),
    Target("pool_tokens", dsa.pool_tokens,
           {"values": _tensor(8, 4), "gates": _tensor(8, 4), "bias": _tensor(2, 4),
            "pools": lambda _: dsa.PoolPlan(_layout(), 2, overlap=True), "group": _solo}),
    Target("gather_pools", dsa.gather_pools,
           {"x": _tensor(3, 4), "pools": lambda _: dsa.PoolPlan(_layout(), 2), "group": _solo}),
    Target("runs_of", values.runs_of,
           {"packing": lambda _: Packing.of([5, 3]), "ownership": _owners, "rank": _whole(0)}),
    Target("agree", comm.agree, {"group": _solo, "fields": lambda _: {"a": 3}}),
    Target("rank_seed", comm.rank_seed, {"seed": _whole(3), "group": _solo}),
    # Plain answers.
    Target("attend_dense", testing.attend_dense,
           {"q": _tensor(1, 2, 8, 4), "k": _tensor(1, 2, 8, 4), "v": _tensor(1, 2, 8, 4),
            "mask": one_of(lambda: None, lambda: torch.ones(8, 8, dtype=torch.bool)),
            "sink": one_of(lambda: None, lambda: torch.randn(2)), "return_lse": _flag}),
    Target("merge", testing.merge,
           {"out": _tensor(1, 8, 2, 4), "lse": _tensor(1, 8, 2), "other_out": _tensor(1, 8, 2, 4),
            "other_lse": _tensor(1, 8, 2)}),
]  # fmt: skip


# ---- Calls, and how they end.


def random_call(rng: random.Random) -> tuple[Target, dict[str, Any], str]:
    """A target, its arguments, and the same in words."""
    target = rng.choice(TARGETS)
    arguments = {name: make(rng) for name, make in target.arguments.items()}
    names = list(arguments)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        name = rng.choice(names)
        odd = odd_value(rng)
        # What a caller's own function or model raises is the caller's.
        if name == "model" and isinstance(odd, torch.nn.Module):
            continue
        arguments[name] = _raising if name in ("body", "run") and callable(odd) else odd
    return target, arguments, described(target, arguments)


def described(target: Target, arguments: dict[str, Any]) -> str:
    words = ", ".join(f"{name}={_shown(value)}" for name, value in arguments.items())
    return f"{target.name}({words})"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.layout} {value.device}"
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def perform(target: Target, arguments: dict[str, Any]) -> None:
    """The call, and a look at its result."""
    given = list(arguments.items())
    in_order = [value for _, value in given[: target.in_order]]
    result = target.function(*in_order, **dict(given[target.in_order :]))
    if not isinstance(result, torch.Tensor):
        repr(result)


def _speakers() -> frozenset[str]:
    """Whose words a refusal may be: names of the surface, and of what is behind it."""
    names = {"longspan", "fuzz", "Cut", "RowBatch", "TokenTensor", "KernelLevel", "HeadShare"}
    for module in (longspan, comm, dsa, longspan.hf, longspan.proof, testing, values):
        names |= set(module.__all__)
    for kind in (Packing, Mask, Ownership, Group, Strategy, longspan.Plan, values.Picture):
        names |= {name for name, _ in inspect.getmembers(kind) if not name.startswith("__")}
    # What messages call the parts of a call.
    names |= {"to_svg", "hide_listed", "even_pieces", "round_up", "padding_for", "common_multiple"}
    names |= {f"draw_{what}" for what in ("ownership", "mask", "steps", "work", "comparison")}
    return frozenset(names)


SPEAKERS = _speakers()
REFUSALS = (ValueError, TypeError, NotImplementedError, IndexError)


def complaint(error: BaseException) -> str | None:
    """What is wrong with an error as the answer to a call; None where it is ours."""
    text = str(error)
    kind = type(error).__name__
    if not isinstance(error, REFUSALS):
        return f"{kind}: {text}"
    first = re.match(r"[A-Za-z_]\w*", text)
    marked = re.match(r"[A-Za-z_][\w.:]*(?:\(\))?(?::| )", text)
    if first is None or marked is None or first[0] not in SPEAKERS:
        return f"{kind}: {text}"
    return None
