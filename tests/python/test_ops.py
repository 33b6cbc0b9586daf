"""torch.ops.longspan.move_tokens: the registered operator, its derivatives, its
tracing, and everything it must not do with bad runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import longspan  # noqa: F401  (registers the operator)

move_tokens = torch.ops.longspan.move_tokens


def runs_of(*runs: tuple[int, int, int]) -> torch.Tensor:
    """(source, target, length) for each run."""
    return torch.tensor(runs, dtype=torch.long).reshape(-1, 3)


def slowly(
    source: torch.Tensor, axis: int, runs: torch.Tensor, target_tokens: int, fill: Any
) -> torch.Tensor:
    shape = list(source.shape)
    shape[axis] = target_tokens
    target = torch.full(shape, fill, dtype=source.dtype)
    for a, b, n in runs.tolist():
        target.narrow(axis, b, n).copy_(source.narrow(axis, a, n))
    return target


@dataclass(frozen=True)
class Move:
    name: str
    source_tokens: int
    target_tokens: int
    runs: tuple[tuple[int, int, int], ...]


MOVES = [
    Move("head_tail", 8, 4, ((0, 0, 2), (6, 2, 2))),
    Move("padding", 5, 8, ((0, 0, 5),)),
    Move("swapped", 6, 6, ((3, 0, 3), (0, 3, 3))),
    Move("runs_in_any_order", 9, 10, ((0, 7, 2), (6, 0, 3), (3, 4, 1))),
    Move("empty_runs", 4, 4, ((4, 0, 0), (0, 2, 2), (2, 2, 0))),
    Move("all_filled", 3, 2, ()),
    Move("no_source", 0, 3, ()),
    Move("no_target", 3, 0, ()),
]

move_cases = pytest.mark.parametrize("move", MOVES, ids=lambda m: m.name)


@move_cases
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_moves_every_type_on_every_axis(move: Move, dtype: torch.dtype) -> None:
    runs = runs_of(*move.runs)
    rows = torch.arange(2 * move.source_tokens * 3).view(2, move.source_tokens, 3).to(dtype)
    for axis in (0, 1, 2, -1):
        source = rows.movedim(1, axis)
        got = move_tokens(source, axis, runs, move.target_tokens, 1)
        expected = slowly(source, axis, runs, move.target_tokens, 1)
        assert got.dtype == dtype
        assert got.is_contiguous()
        wide = torch.complex128 if dtype.is_complex else torch.float64
        assert torch.equal(got.to(wide), expected.to(wide))


@move_cases
def test_reads_strided_and_zero_stride_sources(move: Move) -> None:
    runs = runs_of(*move.runs)
    n = move.source_tokens
    sources = [
        torch.arange(4 * n).view(2, 2 * n)[:, ::2],
        torch.arange(2 * n).view(n, 2).t(),
        torch.arange(n).unsqueeze(0).expand(3, n),
        torch.tensor(7).expand(3, n),
        torch.arange(2 * n).view(2, n).flip(1),
        torch.arange(2 * (n + 1)).view(2, n + 1)[:, 1:],
    ]
    for source in sources:
        before = source.clone()
        got = move_tokens(source, 1, runs, move.target_tokens, -1)
        assert torch.equal(got, slowly(source, 1, runs, move.target_tokens, -1))
        assert torch.equal(source, before)


def test_resolves_conjugates_and_strided_runs() -> None:
    source = torch.tensor([[1 + 2j, 3 + 4j, 5 + 6j]]).conj()
    runs = torch.tensor([[1, 0, 2, 9], [0, 9, 9, 9]])[:1, :3]
    assert not runs.is_contiguous() or runs.size(0) == 1
    got = move_tokens(source, 1, runs, 3, 1j)
    assert got.tolist() == [[3 - 4j, 5 - 6j, 1j]]
    columns = torch.tensor([[0, 2], [2, 0], [2, 2]]).t()  # strides are not [3, 1]
    assert move_tokens(torch.arange(4), 0, columns, 4, 0).tolist() == [2, 3, 0, 1]


def test_never_returns_or_changes_its_argument() -> None:
    source = torch.arange(4)
    got = move_tokens(source, 0, runs_of((0, 0, 4)), 4, 0)
    assert got.data_ptr() != source.data_ptr()
    assert source._version == 0


# ---- Derivatives.


@move_cases
def test_derivative_is_the_adjoint(move: Move) -> None:
    runs = runs_of(*move.runs)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-9, 10, (2, move.source_tokens, 3), generator=generator).double()
    y = torch.randint(-9, 10, (2, move.target_tokens, 3), generator=generator).double()
    x.requires_grad_()
    moved = move_tokens(x, 1, runs, move.target_tokens, 0)
    (grad,) = torch.autograd.grad(moved, x, y)
    assert (moved * y).sum() == (x * grad).sum()
    swapped = runs[:, [1, 0, 2]]
    assert torch.equal(grad, slowly(y, 1, swapped, move.source_tokens, 0))


@pytest.mark.parametrize("dtype", [torch.double, torch.complex128], ids=str)
@pytest.mark.parametrize("move", MOVES[:4], ids=lambda m: m.name)
def test_first_and_second_derivatives_check(move: Move, dtype: torch.dtype) -> None:
    runs = runs_of(*move.runs)
    x = torch.randn(2, move.source_tokens, dtype=dtype, requires_grad=True)

    def squared(source: torch.Tensor) -> torch.Tensor:
        return move_tokens(source, -1, runs, move.target_tokens, 2) ** 2

    assert torch.autograd.gradcheck(squared, (x,))
    assert torch.autograd.gradgradcheck(squared, (x,))


def test_bfloat16_gradients_keep_their_type() -> None:
    x = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    move_tokens(x, 1, runs_of((0, 2, 2)), 5, 0).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.tolist() == [[1, 1, 0, 0]]


# ---- Registration and tracing.


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "with_gradient"])
@move_cases
def test_is_registered_correctly(move: Move, requires_grad: bool) -> None:
    source = torch.randn(2, move.source_tokens, 3, requires_grad=requires_grad)
    arguments = (source, 1, runs_of(*move.runs), move.target_tokens, 0.5)
    torch.library.opcheck(move_tokens, arguments)


def test_is_registered_correctly_for_strides_and_integers() -> None:
    ids = torch.arange(12).view(3, 4).t()
    torch.library.opcheck(move_tokens, (ids, -2, runs_of((1, 0, 2)), 5, -100))
    zero_stride = torch.arange(4).unsqueeze(0).expand(2, 4)
    torch.library.opcheck(move_tokens, (zero_stride, 1, runs_of((1, 0, 2)), 5, -100))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def test_compiles_whole_with_gradients() -> None:
    runs = runs_of((0, 0, 2), (6, 2, 2))

    def loss(x: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        return (move_tokens(x * 2, 1, runs, 6, 1.0) ** 2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, 3, dtype=torch.double, requires_grad=True)
    expected, got = loss(x, runs), compiled(x, runs)
    assert torch.equal(expected, got)
    (a,) = torch.autograd.grad(expected, x)
    (b,) = torch.autograd.grad(got, x)
    assert torch.equal(a, b)


def test_compiles_once_for_any_length() -> None:
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def pad(x: torch.Tensor, runs: torch.Tensor, tokens: int) -> torch.Tensor:
        return move_tokens(x, 1, runs, tokens, -1) + 1

    for chosen in (backend, "aot_eager"):
        torch.compiler.reset()
        compiled = torch.compile(pad, fullgraph=True, backend=chosen, dynamic=True)
        for length, tokens, documents in ((5, 8, 1), (7, 9, 2), (12, 30, 3), (6, 6, 1)):
            x = torch.arange(2 * length).view(2, length)
            each = length // documents
            runs = runs_of(*((i * each, i * (each + 1), each) for i in range(documents)))
            tokens = max(tokens, documents * (each + 1))
            assert torch.equal(compiled(x, runs, tokens), pad(x, runs, tokens))
    assert graphs <= 2


def test_compiles_with_lengths_from_shapes() -> None:
    def double(x: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        return move_tokens(x, 0, runs, 2 * x.shape[0], 0).sum(0)

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (3, 5, 8):
        x = torch.randn(n, 2, requires_grad=True)
        runs = runs_of((0, 1, n))
        assert torch.equal(compiled(x, runs), double(x, runs))
        compiled(x, runs).sum().backward()
        assert torch.equal(x.grad, torch.ones(n, 2))


def test_fake_tensors_know_the_shape() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.zeros(2, 5, 3, dtype=torch.bfloat16))
        runs = mode.from_tensor(runs_of((0, 0, 5)))
        got = move_tokens(x, 1, runs, 9, 0)
    assert got.shape == (2, 9, 3)
    assert got.dtype == torch.bfloat16
    assert got.device == torch.device("cpu")


# ---- Refusals: never memory out of bounds.

MOST = 2**63 - 1


@dataclass(frozen=True)
class Refusal:
    name: str
    arguments: tuple[Any, ...]
    message: str
    error: type[Exception] = ValueError


X = torch.arange(12).view(2, 6)

REFUSED = [
    Refusal(
        "source_behind_the_end", (X, 1, runs_of((4, 0, 3)), 6, 0), "3 tokens from 4 to 0 do not fit"
    ),
    Refusal(
        "target_behind_the_end", (X, 1, runs_of((0, 4, 3)), 6, 0), "3 tokens from 0 to 4 do not fit"
    ),
    Refusal(
        "negative_source", (X, 1, runs_of((-1, 0, 2)), 6, 0), "2 tokens from -1 to 0 do not fit"
    ),
    Refusal(
        "negative_target", (X, 1, runs_of((0, -1, 2)), 6, 0), "2 tokens from 0 to -1 do not fit"
    ),
    Refusal(
        "negative_length", (X, 1, runs_of((2, 2, -1)), 6, 0), "-1 tokens from 2 to 2 do not fit"
    ),
    Refusal("overflowing_source", (X, 1, runs_of((MOST, 0, 2)), 6, 0), "do not fit 6 source"),
    Refusal("overflowing_length", (X, 1, runs_of((1, 1, MOST)), 6, 0), "do not fit 6 source"),
    Refusal("lowest_length", (X, 1, runs_of((1, 1, -MOST - 1)), 6, 0), "do not fit 6 source"),
    Refusal(
        "source_twice", (X, 1, runs_of((0, 0, 3), (2, 3, 2)), 6, 0), "source token 2 moves twice"
    ),
    Refusal(
        "target_twice",
        (X, 1, runs_of((0, 0, 3), (3, 2, 2)), 6, 0),
        "target token 2 is written twice",
    ),
    Refusal("negative_tokens", (X, 1, runs_of(), -1, 0), "-1 target tokens"),
    Refusal("axis_too_high", (X, 2, runs_of(), 6, 0), "axis 2 of a tensor with 2 axes"),
    Refusal("axis_too_low", (X, -3, runs_of(), 6, 0), "axis -3 of a tensor with 2 axes"),
    Refusal("no_axes", (torch.tensor(1), 0, runs_of(), 1, 0), "`source` has no axes"),
    Refusal(
        "flat_runs",
        (X, 1, torch.tensor([0, 0, 3]), 6, 0),
        r"`runs` is int64 \[3\]; expected int64 \[n, 3\]",
    ),
    Refusal("pairs_as_runs", (X, 1, torch.zeros(2, 2).long(), 6, 0), r"`runs` is int64 \[2, 2\]"),
    Refusal("float_runs", (X, 1, torch.zeros(1, 3), 6, 0), r"`runs` is float32 \[1, 3\]"),
    Refusal("narrow_runs", (X, 1, torch.zeros(1, 3).int(), 6, 0), r"`runs` is int32 \[1, 3\]"),
    Refusal(
        "runs_without_values", (X, 1, runs_of((0, 0, 3)).to("meta"), 6, 0), "`runs` is on meta"
    ),
    Refusal(
        "fill_too_large", (X.to(torch.int8), 1, runs_of(), 6, 300), "fill 300 does not fit int8"
    ),
    Refusal(
        "fill_below_zero", (X.to(torch.uint8), 1, runs_of(), 6, -1), "fill -1 does not fit uint8"
    ),
    Refusal("fill_with_a_fraction", (X, 1, runs_of(), 6, 0.5), "fill 0.5 does not fit int64"),
    Refusal(
        "fill_without_a_value", (X, 1, runs_of(), 6, float("nan")), "fill nan does not fit int64"
    ),
]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda r: r.name)
def test_refuses(refusal: Refusal) -> None:
    with pytest.raises(refusal.error, match=refusal.message):
        move_tokens(*refusal.arguments)


@pytest.mark.parametrize(
    "refusal", [r for r in REFUSED if "fill" not in r.name], ids=lambda r: r.name
)
def test_refuses_with_gradient_too(refusal: Refusal) -> None:
    source, *rest = refusal.arguments
    with pytest.raises(refusal.error, match=refusal.message):
        move_tokens(source.double().requires_grad_(), *rest)


def test_refuses_what_is_no_tensor() -> None:
    with pytest.raises(RuntimeError, match="move_tokens"):
        move_tokens("tokens", 0, runs_of(), 2, 0)


def test_sparse_sources_have_no_kernel() -> None:
    with pytest.raises(NotImplementedError, match="move_tokens"):
        move_tokens(X.to_sparse(), 1, runs_of((0, 0, 2)), 2, 0)


# ---- Other devices.


@pytest.mark.cuda
@move_cases
def test_cuda_gives_the_same_answer_and_derivative(move: Move) -> None:
    runs = runs_of(*move.runs)
    x = torch.randn(2, move.source_tokens, 3, dtype=torch.double)
    y = torch.randn(2, move.target_tokens, 3, dtype=torch.double)
    results = []
    for device in ("cpu", "cuda"):
        here = x.detach().to(device).requires_grad_()
        moved = move_tokens(here, 1, runs, move.target_tokens, 0.5)
        (grad,) = torch.autograd.grad(moved, here, y.to(device))
        results.append((moved.detach().cpu(), grad.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
