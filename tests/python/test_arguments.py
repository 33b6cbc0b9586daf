"""Arguments that cannot be: which one, what came, what is expected."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import longspan
from longspan import _C, Group, Mask, Ownership, Packing, Strategy, comm, dsa, values

Q = torch.randn(1, 2, 8, 4)
IDS = {"input_ids": torch.arange(16).view(2, 8)}
OWNERS = Ownership.contiguous(8, 2)
MASK = Mask.causal(Packing.single(8))

REFUSED: dict[str, Callable[[], Any]] = {
    # Things that are no tensors, or not such.
    "attend: `q` is None; expected a dense tensor": lambda: longspan.attend(None, Q, Q),
    "attend: `k` is a list; expected a dense tensor": lambda: longspan.attend(Q, [1], Q),
    "attend: `v` is a sparse float32 tensor; expected a dense tensor": lambda: longspan.attend(
        Q, Q, Q.to_sparse()
    ),
    "attend: `sink` is an int; expected a dense tensor, or None": lambda: longspan.attend(
        Q, Q, Q, sink=3
    ),
    "attend: `scale` is a str; expected a number": lambda: longspan.attend(Q, Q, Q, scale="x"),
    "reduce_loss: `sum` is a float; expected a dense tensor": lambda: longspan.reduce_loss(2.5, 1),
    "reduce_loss: `count` is 1180591620717411303424; expected a number of 64 bits": lambda: (
        longspan.reduce_loss(torch.tensor(1.0), 2**70)
    ),
    "reduce_loss: `count` is -5; expected the number of this rank's tokens, 0 or more": lambda: (
        longspan.reduce_loss(torch.tensor(1.0), -5)
    ),
    "reduce_loss: `count` is nan; expected the number of this rank's tokens, 0 or more": lambda: (
        longspan.reduce_loss(torch.tensor(1.0), float("nan"))
    ),
    "reduce_loss: `count` is a bool tensor; expected the number of this rank's tokens": lambda: (
        longspan.reduce_loss(torch.tensor(1.0), torch.tensor(True))
    ),
    "reduce_loss: `count` is -2; expected the number of this rank's tokens, 0 or more": lambda: (
        longspan.reduce_loss(torch.tensor(1.0), torch.tensor(-2))
    ),
    "reduce_loss: `count` is inf; expected the number of this rank's tokens, 0 or more": lambda: (
        longspan.reduce_loss(torch.tensor(1.0), torch.tensor([float("inf")]))
    ),
    "reduce_loss: `count` is a complex64 tensor; expected the number of this rank's tokens": (
        lambda: longspan.reduce_loss(torch.tensor(1.0), torch.tensor(2j))
    ),
    "which_kernel: `third` is None; expected a dense tensor": lambda: longspan.which_kernel(
        Q, Q, None
    ),
    "all_gather_tokens: `sizes` is an int; expected a list of whole numbers": lambda: (
        comm.all_gather_tokens(Q, axis=0, sizes=3, group=Group())
    ),
    "rotate: `axis` is 7; expected -4 to 3": lambda: comm.rotate(Q, axis=7, group=Group()),
    "top_keys: `slots` is a float; expected a whole number": lambda: dsa.top_keys(
        Q, slots=2.0
    ),
    "select_keys: `balanced` is an int; expected True or False": lambda: dsa.select_keys(
        Q[0].transpose(0, 1), Q[0, 0], Q[0, :, :, 0].T, slots=2, balanced=1
    ),
    "rotate_channels: 2 pairs from channel 9223372036854775807 on do not fit the 4 channels of "
    "`x`": lambda: dsa.rotate_channels(Q, Q[..., :2], Q[..., :2], first=2**63 - 1),
    "AttentionLayout: `tensor` is a float32 tensor; expected the int64 tensor of one": lambda: (
        longspan.AttentionLayout.of_tensor(torch.zeros(9)).masks
    ),
    # Batches.
    "shard: `table` is an int; expected a TokenTable": lambda: longspan.shard(IDS, table=3),
    "shard: `sentinel` is a str; expected a whole number": lambda: longspan.shard(
        IDS, sentinel="x"
    ),
    "shard: `rank` is 2; expected 0 to 1": lambda: longspan.shard(IDS, rank=2, ranks=2),
    "pack: `table` is an int; expected a TokenTable": lambda: values.pack(IDS, table=3),
    "pack: exactly one of `input_ids` and `inputs_embeds` belongs in a batch, neither is there; "
    "no tensor came": lambda: values.pack({}),
    "shard: exactly one of `input_ids` and `inputs_embeds` belongs in a batch, neither is there; "
    "tensors that came: `input_id`, `labels`; did you mean `input_ids` by `input_id`?": lambda: (
        longspan.shard({"input_id": IDS["input_ids"], "labels": IDS["input_ids"]})
    ),
    "parallelize: 'ulysses' is not one of ring, gathered, needed, head_parallel, "
    "head_parallel_ring; did you mean head_parallel?": lambda: longspan.parallelize(
        torch.nn.Linear(1, 1), strategy="ulysses"
    ),
    "parallelize: layout 'zigzag' is not one of head-tail, contiguous-rows, contiguous-stream, "
    "head-tail-stream, per-document-head-tail; did you mean head-tail?": lambda: (
        longspan.parallelize(torch.nn.Linear(1, 1), layout="zigzag")
    ),
    "parallelize: `check_steps` is an int; expected True or False": lambda: longspan.parallelize(
        torch.nn.Linear(1, 1), check_steps=1
    ),
    "shard: layout 'zigzag' is not one of head-tail, contiguous-rows, contiguous-stream, "
    "head-tail-stream, per-document-head-tail; did you mean head-tail?": lambda: longspan.shard(
        IDS, layout="zigzag"
    ),
    "Plan: cannot be called; functions return such values": lambda: longspan.Plan(),
    "pack: `input_ids` is a list; give it as a tensor, or name it in pass_through to leave it as "
    "it is": lambda: values.pack({"input_ids": [1]}),
    "shard_chunks: layout 'x' is not one of head-tail, contiguous-rows, contiguous-stream, "
    "head-tail-stream, per-document-head-tail": lambda: values.shard_chunks(IDS, 1, layout="x"),
    "shard_chunks: `num_chunks` is None; expected a whole number": lambda: values.shard_chunks(
        IDS, None
    ),
    "shard_chunks: 0 chunks; expected at least 1": lambda: values.shard_chunks(IDS, 0),
    "unshard: `tensors` is None; expected a tensor, or a list with the tensor of every rank. A "
    "loss in tiles leaves no logits behind: for those call the model with output_logits=True": (
        lambda: longspan.unshard(None, longspan.shard(IDS))
    ),
    # Models.
    "explain: `model` is an int; expected a torch.nn.Module": lambda: longspan.explain(3, IDS),
    "explain: `device` is 'h300'; expected one of a100, h100, h200, b200, cpu": lambda: (
        longspan.explain(torch.nn.Linear(1, 1), IDS, device="h300")
    ),
    "explain: `rank` goes with `ranks`; give both": lambda: longspan.explain(
        torch.nn.Linear(1, 1), IDS, rank=1
    ),
    "explain: `rank` is 2; expected 0 to 1": lambda: longspan.explain(
        torch.nn.Linear(1, 1), IDS, rank=2, ranks=2
    ),
    "explain: give a group, or rank and ranks, not both": lambda: longspan.explain(
        torch.nn.Linear(1, 1), IDS, Group(), ranks=2
    ),
    "restore: `model` is an int; expected a torch.nn.Module": lambda: longspan.restore(3),
    "clip_grad_norm: `max_norm` is a str; expected a number": lambda: longspan.clip_grad_norm(
        torch.nn.Linear(1, 1), "x"
    ),
    "clip_grad_norm: `model` is an int; expected a module, a tensor, or an iterable of tensors": (
        lambda: longspan.clip_grad_norm(3, 1.0)
    ),
    "leak_probe: `input_ids` is None; expected a dense tensor": lambda: longspan.leak_probe(
        torch.nn.Linear(1, 1), {}
    ),
    # What C++ takes.
    "Mask.causal: `packing` is an int; expected a Packing": lambda: Mask.causal(3),
    "Mask.causal: `packing` is missing; expected a Packing": lambda: Mask.causal(),
    "Mask.sliding: `window` is 1180591620717411303424; expected a whole number of 64 bits": (
        lambda: Mask.sliding(Packing.single(3), 2**70)
    ),
    "Packing.of: `lengths` holds a str; expected a list, each entry a whole number of 64 bits": (
        lambda: Packing.of([1, "a"])
    ),
    "Packing.of: there is no argument `x`; expected lengths, padded_lengths, tokens": (
        lambda: Packing.of([1], x=3)
    ),
    "Ownership.contiguous: `ranks` is 1099511627776; expected a whole number of 32 bits": (
        lambda: Ownership.contiguous(8, 2**40)
    ),
    "Mask.pairs: `keys` is a PackedBatch; expected a TokenRange": lambda: MASK.pairs(
        (0, 2), values.pack(IDS)
    ),
    "Mask.with_hidden: `tokens` holds an int; expected a list, each entry a TokenRange": (
        lambda: MASK.with_hidden([3])
    ),
    "TokenRange: called with (a str); expected (begin: int, end: int) or (bounds: tuple[int, "
    "int])": (
        lambda: values.TokenRange("a")
    ),
    "work_of: `rank` is a str; expected a whole number of 64 bits": lambda: values.work_of(
        MASK, OWNERS, "x"
    ),
    "Strategy: `name` is an int; expected one of ring, gathered, needed, head_parallel, "
    "head_parallel_ring": lambda: Strategy(3),
    "Group: `name` is an int; expected the name of a process group": lambda: Group(3),
    "received_ranges: `table` is no dense tensor; expected that of needed_table": lambda: (
        comm.received_ranges(torch.zeros(1, 4).to_sparse(), OWNERS, 0)
    ),
    "TokenTable: fill is a number or 'counting'": lambda: values.TokenTable().with_tensor(
        "x", fill="\ud800"
    ),
    # Sizes that are counted first.
    "Packing: 8589934592 documents; a stream has at most 16777216": lambda: Packing.rows(2**33, 0),
    "Plan: 1099511627776 rows; plans go up to 16777216": lambda: longspan.plan(OWNERS, rows=2**40),
    "TokenRange: [-9223372036854775808, 9223372036854775807) holds more tokens than 64 bits "
    "count": lambda: values.TokenRange(-(2**63), 2**63 - 1),
    "Ownership.tokens_of: an array of 1099511627776 tokens; at most 2147483648 are written out": (
        lambda: Ownership.contiguous(2**40, 1).tokens_of(0)
    ),
    "position_ids: an array of 1099511627776 tokens; at most 2147483648 are written out": (
        lambda: values.position_ids(Packing.single(2**40))
    ),
    "needed_table: Ownership(contiguous, 0 tokens, 2147483647 ranks) has up to 2147483647 ranges "
    "on its ranks; at most 4194304 are looked at, so take fewer ranks or documents": lambda: (
        comm.needed_table(Mask.causal(Packing.single(0)), Ownership.contiguous(0, 2**31 - 1))
    ),
    "select_keys: 2147483647 slots; expected 0 to 1048576": lambda: dsa.select_keys(
        Q[0].transpose(0, 1), Q[0, 0], Q[0, :, :, 0].T, slots=2**31 - 1
    ),
    "window_lists: a window of 2147483647 of 2147483647 keys and 0 pools for each query; lists "
    "have at most 4194304 of each": lambda: dsa.window_lists(
        torch.zeros(1, 1, dtype=torch.int64), keys=2**31 - 1, window=2**31 - 1
    ),
    "shard: 8 tokens would be padded to 4294967294 for 2147483647 ranks; at most 16777216 pads are "
    "added": lambda: longspan.shard(IDS, rank=0, ranks=2**31 - 1),
    "shard: 8 tokens would be padded to 2199023255552 for 2 ranks; at most 16777216 pads are "
    "added": lambda: longspan.shard(IDS, rank=0, ranks=2, multiple=2**40),
    "return_needed: `tokens` is 2147483647; expected 0 to 268435456": lambda: comm.return_needed(
        Q, torch.zeros(0, 4, dtype=torch.int64), axis=0, tokens=2**31 - 1, group=Group()
    ),
    "run_ranks: `ranks` is 2147483647; expected 1 to 1024": lambda: longspan.run_ranks(
        2**31 - 1, print
    ),
    "run_ranks: `timeout` is -9.22337e+18 s; expected 0 to 1e+09, or a timedelta": lambda: (
        longspan.run_ranks(2, print, timeout=-(2**63))
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_a_refusal_says_which_argument(message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        REFUSED[message]()
    assert str(caught.value) == message


def test_half_characters_are_no_strategy() -> None:
    with pytest.raises(ValueError, match=r"'\\ud800' is not one of ring, gathered"):
        longspan.attend(Q, Q, Q, strategy="\ud800")


def test_empty_rows_cost_nothing() -> None:
    q = torch.empty(2**40, 2, 0, 4)
    with pytest.raises(ValueError, match=r"^Plan: 1099511627776 rows; plans go up to 16777216"):
        longspan.attend(q, q, q)
    with pytest.raises(ValueError, match=r"^select_and_attend: `kv` is .* but `q` "):
        dsa.select_and_attend(
            q, Q[0, 0], Q[0].transpose(0, 1), Q[0, 0], Q[0, :, :, 0].T, slots=3, scale=1.0
        )
    few = torch.empty(2**20, 2, 0, 4)
    out = longspan.attend(few, few, few)
    assert isinstance(out, torch.Tensor) and out.shape == few.shape


CLASSES = [
    kind
    for kind in vars(_C).values()
    if isinstance(kind, type) and not issubclass(kind, BaseException)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_object_without_a_value_says_so(kind: type) -> None:
    """`__new__` alone made it: no method reads memory that nobody wrote."""
    made = kind.__new__(kind)
    words = f"{kind.__name__}: this object was made by __new__ alone"
    if "__repr__" in vars(kind):
        with pytest.raises(TypeError, match=words):
            repr(made)
    for name, member in vars(kind).items():
        if isinstance(member, property):
            with pytest.raises(TypeError, match=words):
                getattr(made, name)
        elif callable(member) and not isinstance(member, staticmethod) and name[:2] != "__":
            with pytest.raises(TypeError):
                getattr(made, name)()
    with pytest.raises(TypeError):
        Mask.causal(made)
    with pytest.raises(TypeError):
        pickle.dumps(made)


@pytest.mark.parametrize("kind", [Strategy, Group])
def test_a_subclass_without_a_value_says_so(kind: type) -> None:
    made = kind.__new__(kind)
    for name in ("name", "rank", "size", "head_ranks"):
        if hasattr(kind, name):
            with pytest.raises(TypeError, match=f"^{kind.__name__}: this object was made by"):
                value = getattr(made, name)
                value()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_values_are_pickled_by_every_protocol(protocol: int) -> None:
    """Python's own way for 0 and 1 would end the process in pybind11."""
    for value in (Packing.of([5, 3]), OWNERS, values.TokenRange(2, 5), Strategy("ring")):
        assert pickle.loads(pickle.dumps(value, protocol)) == value
    with pytest.raises(TypeError, match=r"^Plan: cannot be pickled"):
        pickle.dumps(longspan.plan(OWNERS), protocol)


@pytest.mark.parametrize("kind", [Packing, Mask, Ownership, values.TokenRange, values.Cut])
def test_a_state_that_nobody_pickled_is_refused(kind: Any) -> None:
    for state in ((), (3,), ("x", None, 2, 3, 4, 5, 6, 7)):
        with pytest.raises(ValueError, match=f"^{kind.__name__}: "):
            kind.__setstate__(kind.__new__(kind), state)


def test_checks_are_looked_through_by_the_compiler() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def call(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, slots: int) -> Any:
        indices = dsa.select_keys(q, k, w, slots=slots)
        return dsa.attend_selected(q, k, indices, scale=0.5)

    q, k, w = torch.randn(8, 2, 4), torch.randn(8, 4), torch.randn(8, 2)
    for slots in (2, 3):
        expected = dsa.attend_selected(q, k, dsa.select_keys(q, k, w, slots=slots), scale=0.5)
        torch.testing.assert_close(call(q, k, w, slots), expected)
