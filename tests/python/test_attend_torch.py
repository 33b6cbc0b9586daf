"""attend is a good citizen of torch: registered, traced, checkpointed, cast, and
indifferent to strides, threads and to who needs a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from processes import outputs_of, start_ranks
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import longspan
from longspan import Group, Mask, Ownership, Packing, run_ranks

ops = torch.ops.longspan
PACKING = Packing.of([9, 0, 4, 5], [10, 1, 4, 5])
TOKENS = PACKING.tokens
STRATEGIES = ("ring", "gathered", "needed", "head_parallel")

both_forms = pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@dataclasses.dataclass
class Share:
    """A rank's tensors, drawn from its own seed."""

    group: Group
    packed: bool = False
    dtype: torch.dtype = torch.float32
    tokens: int = TOKENS
    mask: Mask = dataclasses.field(default_factory=lambda: Mask.causal(PACKING))

    def __post_init__(self) -> None:
        self.owners = Ownership.head_tail(self.tokens, self.group.size())
        self.layout = longspan.AttentionLayout(self.owners, self.mask)
        self.random = torch.Generator().manual_seed(self.group.rank())
        self.q, self.k, self.v = self.draw(4, 6), self.draw(2, 6), self.draw(2, 3)
        self.dout = self.draw(4, 3).detach()
        self.sink = self.leaf(torch.randn(4, generator=self.random, dtype=torch.double))

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype).requires_grad_()

    def draw(self, heads: int, dim: int) -> torch.Tensor:
        local = self.owners.local_tokens(self.group.rank())
        shape = (local, heads, dim) if self.packed else (2, heads, local, dim)
        return self.leaf(torch.randn(shape, generator=self.random, dtype=torch.double))

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.q, self.k, self.v, self.sink]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor,
               strategy: str = "ring") -> torch.Tensor:  # fmt: skip
        out = longspan.attend(
            q, k, v, sink=sink, attention=self.layout, group=self.group, strategy=strategy
        )
        assert isinstance(out, torch.Tensor)
        return out

    def answer(self, strategy: str = "ring") -> list[torch.Tensor]:
        """Output and gradients, by the plainest call there is."""
        inputs = [t.detach().clone().requires_grad_() for t in self.inputs]
        out = self.attend(*inputs, strategy=strategy)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.dout)]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    names = ("out", "dq", "dk", "dv", "dsink")
    wrong = [n for n, a, b in zip(names, got, expected, strict=True) if not torch.equal(a, b)]
    assert not wrong


# ---- Registration.


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("with_sink", [False, True], ids=["no_sink", "sink"])
def test_operators_of_one_rank_pass_opcheck(packed: bool, with_sink: bool) -> None:
    share = Share(Group(), packed)
    sink = share.sink if with_sink else None
    options = (0.4, 3.0, "ring", 0, "")
    arguments = (share.q, share.k, share.v, sink, share.layout.tensor, *options)
    torch.library.opcheck(ops.attend.default, arguments)
    plain = [None if t is None else t.detach() for t in (share.q, share.k, share.v, sink)]
    out, lse = ops.attend(*plain, share.layout.tensor, *options)
    torch.library.opcheck(
        ops.attend_backward.default,
        (share.dout, *plain, out, lse, share.layout.tensor, *options),
    )


@pytest.mark.deep
def test_two_processes_pass_opcheck_and_compile_once_for_every_length() -> None:
    outputs = outputs_of(start_ranks("attend_two_ranks.py", 2))
    assert all("done" in output for output in outputs), "\n----\n".join(outputs)


@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_fake_tensors_know_the_shape(packed: bool, dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    share = Share(Group(), packed, dtype)
    plain = [t.detach() for t in (*share.inputs, share.layout.tensor)]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in plain]
        fake = ops.attend(*fakes, 0.4, 0.0, "ring", 0, "")
    real = ops.attend(*share.inputs, share.layout.tensor, 0.4, 0.0, "ring", 0, "")
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# ---- Compilation.


@pytest.mark.parametrize("grouped", [False, True], ids=["no_group", "group"])
def test_compiles_once_for_every_length_and_layout(grouped: bool) -> None:
    group = Group() if grouped else None

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor,
             layout: longspan.AttentionLayout) -> torch.Tensor:  # fmt: skip
        out = longspan.attend(q * 2, k, v, sink=sink, attention=layout, group=group)
        return longspan.reduce_loss(out.square().sum(), q.shape[2], group)

    counters.clear()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([10], [5, 7], [7, 1, 0, 12, 2], [1] * 30, [8]):
        packing = Packing.of(lengths)
        share = Share(Group(), tokens=packing.tokens, mask=Mask.causal(packing))
        answers = []
        for function in (loss, compiled):
            total = function(*share.inputs, share.layout)
            answers.append([total.detach(), *torch.autograd.grad(total, share.inputs)])
        assert_same(answers[1], answers[0])
    assert counters["stats"]["unique_graphs"] == 1


def test_another_layout_of_the_same_length_is_no_new_graph() -> None:
    """The graph knows the layout as a tensor: its numbers are not baked in."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  layout: longspan.AttentionLayout) -> torch.Tensor:  # fmt: skip
        out = longspan.attend(q, k, v, attention=layout)
        assert isinstance(out, torch.Tensor)
        return out

    counters.clear()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    share = Share(Group())
    results = []
    for lengths in ([TOKENS - 1, 1], [1, TOKENS - 1], [7, TOKENS - 7]):
        owners = Ownership.contiguous(TOKENS, 1)
        layout = longspan.AttentionLayout(owners, Mask.causal(Packing.of(lengths)))
        results.append(compiled(share.q, share.k, share.v, layout))
        assert torch.equal(results[-1], attention(share.q, share.k, share.v, layout))
    assert not torch.equal(results[0], results[1])
    assert counters["stats"]["unique_graphs"] == 1


def test_compiles_under_autocast() -> None:
    share = Share(Group())

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return share.attend(*inputs)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    got, expected = compiled(*share.inputs), attention(*share.inputs)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected)
    grads = [torch.autograd.grad(out, share.inputs, share.dout.bfloat16())
             for out in (got, expected)]  # fmt: skip
    assert all(map(torch.equal, *grads))


# ---- Activation checkpointing.


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
@each_strategy
def test_checkpointing_changes_nothing(strategy: str, use_reentrant: bool) -> None:
    def body(group: Group) -> None:
        share = Share(group)

        def two_layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       sink: torch.Tensor) -> torch.Tensor:  # fmt: skip
            first = share.attend(q, k, v, sink, strategy)
            return share.attend(q + 1, k, first[:, :2] + v, sink, strategy)

        answers = []
        for checkpointed in (False, True):
            # Random states belong to the process, and the ranks are threads.
            out = (
                checkpoint(
                    two_layers,
                    *share.inputs,
                    use_reentrant=use_reentrant,
                    preserve_rng_state=False,
                )
                if checkpointed
                else two_layers(*share.inputs)
            )
            answers.append([out.detach(), *grads_by_backward(out, share)])
        assert_same(answers[1], answers[0])

    run_ranks(2, body)


def grads_by_backward(out: torch.Tensor, share: Share) -> list[torch.Tensor]:
    for t in share.inputs:
        t.grad = None
    out.backward(share.dout)
    grads = [t.grad for t in share.inputs]
    assert all(g is not None for g in grads)
    return grads  # type: ignore[return-value]


# ---- Autocast.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_tokens_and_returns_gradients_as_they_came(
    dtype: torch.dtype, ranks: int
) -> None:
    def body(group: Group) -> None:
        share = Share(group)
        with torch.autocast("cpu", dtype):
            out = share.attend(*share.inputs)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out, share.inputs, share.dout.to(dtype))
        assert [g.dtype for g in grads] == [torch.float32] * 4
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in share.inputs[:3])
        plain = share.attend(q, k, v, share.sink)
        expected = torch.autograd.grad(plain, (q, k, v, share.sink), share.dout.to(dtype))
        assert_same([out, *grads], [plain, *(g.float() for g in expected)])

    run_ranks(ranks, body)


def test_autocast_leaves_double_alone() -> None:
    share = Share(Group(), dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert share.attend(*share.inputs).dtype == torch.float64


# ---- Strides.


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def every_second_channel(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def first_channels(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def channels_outside(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def odd_offset(x: torch.Tensor) -> torch.Tensor:
    memory = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


STRIDES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    transposed,
    every_second_channel,
    first_channels,
    channels_outside,
    odd_offset,
]


@both_forms
@each_strategy
@pytest.mark.parametrize("strided", STRIDES, ids=lambda f: f.__name__)
def test_strides_change_nothing(
    strided: Callable[[torch.Tensor], torch.Tensor], strategy: str, packed: bool
) -> None:
    def body(group: Group) -> None:
        share = Share(group, packed)
        inputs = [strided(t.detach()).requires_grad_() for t in (share.q, share.k, share.v)]
        assert all(map(torch.equal, inputs, share.inputs[:3]))
        sink = torch.stack([share.sink.detach()] * 2, 1)[:, 0].requires_grad_()
        out = share.attend(*inputs, sink, strategy=strategy)
        grads = torch.autograd.grad(out, (*inputs, sink), strided(share.dout))
        assert_same([out, *grads], share.answer(strategy))

    run_ranks(2, body)


@both_forms
@each_strategy
def test_expanded_inputs_are_as_good_as_copies(strategy: str, packed: bool) -> None:
    def body(group: Group) -> None:
        share = Share(group, packed)
        heads = 1
        # One key head for all, one value channel for all, one gradient for all.
        inputs = [
            share.q.detach(),
            share.k.detach().narrow(heads, 0, 1).expand_as(share.k),
            share.v.detach()[..., :1].expand_as(share.v),
        ]
        dout = torch.tensor(0.5).expand_as(share.dout)
        answers = []
        for tensors, upstream in (
            (inputs, dout),
            ([t.contiguous() for t in inputs], dout.contiguous()),
        ):
            leaves = [t.requires_grad_() for t in tensors]
            out = share.attend(*leaves, share.sink, strategy=strategy)
            answers.append([out, *torch.autograd.grad(out, (*leaves, share.sink), upstream)])
        assert_same(answers[0], answers[1])

    run_ranks(2, body)


def test_results_are_contiguous_whatever_came() -> None:
    share = Share(Group())
    out, lse = longspan.attend(
        *(transposed(t.detach()) for t in share.inputs[:3]), attention=share.layout, return_lse=True
    )
    assert out.is_contiguous() and lse.is_contiguous()


# ---- Who needs a gradient.


@pytest.mark.parametrize("needed", ["q", "k", "v", "s", "qk", "kv", "vs", "qkvs"])
@each_strategy
def test_only_those_who_ask_get_gradients(needed: str, strategy: str) -> None:
    def body(group: Group) -> None:
        share = Share(group)
        expected = share.answer(strategy)
        inputs = [
            t.detach().clone().requires_grad_(name in needed)
            for name, t in zip("qkvs", share.inputs, strict=True)
        ]
        out = share.attend(*inputs, strategy=strategy)
        out.backward(share.dout)
        for name, t, grad in zip("qkvs", inputs, expected[1:], strict=True):
            if name in needed:
                assert t.grad is not None and torch.equal(t.grad, grad), name
            else:
                assert t.grad is None, name

    run_ranks(2, body)


def test_ranks_may_ask_for_different_gradients() -> None:
    def body(group: Group) -> None:
        share = Share(group)
        expected = share.answer()
        inputs = [t.detach().clone() for t in share.inputs]
        inputs[group.rank()].requires_grad_()
        share.attend(*inputs).backward(share.dout)
        grad = inputs[group.rank()].grad
        assert grad is not None and torch.equal(grad, expected[1 + group.rank()])

    run_ranks(2, body)


@pytest.mark.parametrize("mode", ["nobody_asks", "no_grad", "inference_mode"])
@each_strategy
def test_without_gradients_the_output_is_the_same(mode: str, strategy: str) -> None:
    def body(group: Group) -> None:
        share = Share(group)
        expected = share.answer(strategy)[0]
        if mode == "nobody_asks":
            out = share.attend(*(t.detach() for t in share.inputs), strategy=strategy)
        elif mode == "no_grad":
            with torch.no_grad():
                out = share.attend(*share.inputs, strategy=strategy)
        else:
            with torch.inference_mode():
                out = share.attend(*share.inputs, strategy=strategy)
                fresh = share.attend(*(t * 1 for t in share.inputs), strategy=strategy)
            assert torch.equal(fresh, expected) and out.is_inference()
        assert not out.requires_grad and torch.equal(out, expected)

    run_ranks(2, body)


def test_the_log_sum_exp_has_no_gradient() -> None:
    share = Share(Group())
    out, lse = longspan.attend(*share.inputs[:3], attention=share.layout, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.sum().backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_derivative_is_refused_before_anything_is_sent(ranks: int) -> None:
    def body(group: Group) -> None:
        share = Share(group)
        out = share.attend(*share.inputs)
        sent = group.sent_bytes
        with pytest.raises(
            RuntimeError,
            match=r"^attend: there is no second derivative; call backward without create_graph$",
        ):
            torch.autograd.grad(out, share.q, share.dout, create_graph=True)
        assert group.sent_bytes == sent

    run_ranks(ranks, body)


def test_a_graph_may_be_kept_and_walked_twice() -> None:
    def body(group: Group) -> None:
        share = Share(group)
        out = share.attend(*share.inputs)
        first = torch.autograd.grad(out, share.inputs, share.dout, retain_graph=True)
        again = torch.autograd.grad(out, share.inputs, share.dout)
        assert all(map(torch.equal, first, again))

    run_ranks(2, body)


def test_an_input_changed_after_forward_is_noticed() -> None:
    share = Share(Group())
    out = share.attend(*share.inputs)
    with torch.no_grad():
        share.k += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(share.dout)


# ---- Purity.


@both_forms
@each_strategy
def test_nobodys_tensors_are_changed(strategy: str, packed: bool) -> None:
    def body(group: Group) -> None:
        share = Share(group, packed)
        held = [*share.inputs, share.dout, share.layout.tensor]
        before = [t.detach().clone() for t in held]
        out = share.attend(*share.inputs, strategy=strategy)
        answer = out.detach().clone()
        torch.autograd.grad(out, share.inputs, share.dout)
        assert all(map(torch.equal, held, before)) and torch.equal(out, answer)
        assert all(t._version == 0 for t in held)

    run_ranks(2, body)


@each_strategy
def test_results_are_memory_of_their_own(strategy: str) -> None:
    def body(group: Group) -> None:
        share = Share(group)
        answers = [share.attend(*share.inputs, strategy=strategy).detach()]
        out = share.attend(*share.inputs, strategy=strategy)
        grads = torch.autograd.grad(out, share.inputs, share.dout)
        tensors = [*answers, *grads, *share.inputs, share.dout]
        places = [t.untyped_storage().data_ptr() for t in tensors]
        assert len(set(places)) == len(places)

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@each_strategy
def test_every_run_gives_the_same_bits_on_any_number_of_threads(
    strategy: str, dtype: torch.dtype
) -> None:
    packing = Packing.of([333, 150, 1], [334, 152, 2])

    def body(group: Group) -> list[list[torch.Tensor]]:
        share = Share(group, dtype=dtype, tokens=packing.tokens, mask=Mask.causal(packing))
        threads = torch.get_num_threads()
        answers = []
        try:
            for count in (1, 2, 1, 3):
                torch.set_num_threads(count)
                answers.append(share.answer(strategy))
        finally:
            torch.set_num_threads(threads)
        return answers

    for answers in run_ranks(2, body):
        for other in answers[1:]:
            assert_same(other, answers[0])


@each_strategy
def test_no_result_depends_on_memory_that_nobody_wrote(strategy: str) -> None:
    """Under this flag torch fills new memory with NaN."""

    def body(group: Group) -> list[torch.Tensor]:
        return Share(group).answer(strategy)

    expected = run_ranks(2, body)
    torch.use_deterministic_algorithms(True)
    try:
        filled = run_ranks(2, body)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(filled, expected, strict=True):
        assert_same(a, b)


# ---- Other ways to differentiate, and to leave Python.


def test_derivatives_check() -> None:
    share = Share(Group(), dtype=torch.float64)
    assert torch.autograd.gradcheck(share.attend, share.inputs)


def test_saved_tensors_may_be_moved_away() -> None:
    def body(group: Group) -> None:
        share = Share(group)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1):
            out = share.attend(*share.inputs)
        grads = torch.autograd.grad(out, share.inputs, share.dout)
        assert_same([out, *grads], share.answer())

    run_ranks(2, body)


def test_functorch_and_forward_mode_are_refused_not_wrong() -> None:
    share = Share(Group())
    q, k, v = (t.detach() for t in share.inputs[:3])

    def total(q: torch.Tensor) -> torch.Tensor:
        return ops.attend(q, k, v, None, share.layout.tensor, 0.4, 0.0, "ring", 0, "")[0].sum()

    with pytest.raises(ValueError, match=r"^attend: torch\.func\.grad, .* cannot look through it"):
        torch.func.grad(total)(q)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"^attend: there is no forward-mode derivative"),
    ):
        total(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))


def test_an_exported_program_takes_other_lengths_and_layouts() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    layout: longspan.AttentionLayout) -> torch.Tensor:  # fmt: skip
            out = longspan.attend(q * 2, k, v, attention=layout)
            assert isinstance(out, torch.Tensor)
            return out

    share = Share(Group())
    tokens, numbers = torch.export.Dim("tokens", max=640), torch.export.Dim("numbers", max=6400)
    exported = torch.export.export(
        Attention(),
        (share.q, share.k, share.v, share.layout),
        dynamic_shapes=({2: tokens}, {2: tokens}, {2: tokens}, [{0: numbers}]),
    )
    packing = Packing.of([1, 0, 13, 28])
    other = Share(Group(), tokens=packing.tokens, mask=Mask.causal(packing))
    arguments = (other.q, other.k, other.v, other.layout)
    assert torch.equal(exported.module()(*arguments), Attention()(*arguments))
