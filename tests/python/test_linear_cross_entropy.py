"""The tiled loss against torch's, whole and in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocations import peak_of
from torch import Tensor

import longspan
from longspan import Group, linear_cross_entropy, run_ranks

WORDS, CHANNELS, TOKENS = 2309, 48, 75

#: Each option alone, and all of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "capped": {"softcap": 3.0},
    "smoothed": {"label_smoothing": 0.1},
    "z": {"z_loss": 1e-2},
    "all": {"scale": 1.7, "softcap": 2.0, "label_smoothing": 0.2, "z_loss": 1e-2},
}


def problem(
    dtype: torch.dtype = torch.float64, bias: bool = True, tokens: int = TOKENS, words: int = WORDS
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    random = torch.Generator().manual_seed(3)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random).to(dtype).requires_grad_()

    hidden, weight = normal(tokens, CHANNELS), normal(words, CHANNELS)
    labels = torch.randint(words, (tokens,), generator=random)
    labels[::5] = -100
    return hidden, weight, labels, normal(words) if bias else None


def exact(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The losses of all tokens by torch, logits whole; of the type of hidden."""
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide, labels, reduction="none", label_smoothing=label_smoothing)
    return losses + z_loss * wide.logsumexp(-1).square() * (labels != -100)


def gradients_of(loss: Tensor, *of: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [t for t in of if t is not None]))


def doubled(*tensors: Tensor | None) -> list[Any]:
    return [
        t if t is None or not t.is_floating_point() else t.detach().double().requires_grad_()
        for t in tensors
    ]


def off(a: Tensor, truth: Tensor) -> float:
    return float(((a.double() - truth).norm() / truth.norm()).detach())


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("tile", [None, 1, 16, 74, 75, 1000])
@pytest.mark.parametrize("name", OPTIONS)
def test_double_is_exact(name: str, tile: int | None, bias: bool) -> None:
    hidden, weight, labels, b = problem(bias=bias)
    options = OPTIONS[name]
    ours = linear_cross_entropy(hidden, weight, labels, b, tile=tile, **options)
    true = exact(hidden, weight, labels, b, **options)
    assert torch.allclose(ours.losses, true, rtol=1e-12, atol=1e-12)
    assert torch.allclose(ours.loss, true.sum(), rtol=1e-12)
    for got, want in zip(
        gradients_of(ours.loss * 0.7, hidden, weight, b),
        gradients_of(true.sum() * 0.7, hidden, weight, b),
        strict=True,
    ):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", OPTIONS)
def test_other_reductions(name: str, reduction: str) -> None:
    hidden, weight, labels, bias = problem()
    options = OPTIONS[name]
    ours = linear_cross_entropy(
        hidden, weight, labels, bias, reduction=reduction, tile=20, **options
    ).loss
    true = exact(hidden, weight, labels, bias, **options)
    if reduction == "mean":
        true = true.sum() / (labels != -100).sum()
    else:
        weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
        ours, true = (ours * weights).sum(), (true * weights).sum()
    assert torch.allclose(ours, true, rtol=1e-12)
    for got, want in zip(
        gradients_of(ours, hidden, weight, bias),
        gradients_of(true, hidden, weight, bias),
        strict=True,
    ):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [[40, 30, 5], [3, 72, 0]])
def test_the_mean_over_ranks_is_reduced(sizes: list[int]) -> None:
    """As docs/memory.md has it; the third rank has nothing to learn."""
    hidden, weight, labels, bias = problem()
    labels[sizes[0] + sizes[1] :] = -100
    whole = linear_cross_entropy(hidden, weight, labels, bias, reduction="mean").loss
    wanted = gradients_of(whole, hidden, weight, bias)

    def body(group: Group) -> tuple[Tensor, list[Tensor]]:
        mine, targets = hidden.split(sizes)[group.rank()], labels.split(sizes)[group.rank()]
        found = linear_cross_entropy(mine, weight, targets, bias)
        loss = longspan.reduce_loss(found.loss, (targets != -100).sum(), group)
        return loss.detach(), gradients_of(loss, hidden, weight, bias)

    losses, gradients = zip(*run_ranks(3, body), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, whole.detach())
    for parts, want in zip(zip(*gradients, strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), want)


@pytest.mark.parametrize("reduction", ["sum", "none", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_channels_give_the_bias_alone(dtype: torch.dtype, reduction: str) -> None:
    hidden = torch.empty(1, 3, 0, dtype=dtype, requires_grad=True)
    weight = torch.empty(5, 0, dtype=dtype, requires_grad=True)
    bias = torch.arange(5, dtype=dtype, requires_grad=True)
    labels = torch.tensor([[1, 4, -100]])
    loss = linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction).loss
    true = F.cross_entropy(bias.double().expand(3, 5), labels.view(3), reduction=reduction)
    torch.testing.assert_close(loss.double().view(true.shape), true, atol=1e-6, rtol=1e-6)
    (found,) = torch.autograd.grad(loss.sum(), bias, retain_graph=True)
    (wanted,) = torch.autograd.grad(true.sum(), bias)
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)
    assert [t.shape for t in gradients_of(loss.sum(), hidden, weight)] == [(1, 3, 0), (5, 0)]


@pytest.mark.parametrize("channels", [0, 4])
def test_no_words_have_no_labels(channels: int) -> None:
    hidden, weight = torch.randn(3, channels), torch.randn(0, channels)
    assert linear_cross_entropy(hidden, weight, torch.tensor([-100] * 3)).loss == 0
    with pytest.raises(ValueError, match="label 1 of token 0 is none of the 0 words, and not"):
        linear_cross_entropy(hidden, weight, torch.tensor([1, -100, -100]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_half_and_single_are_no_further_off_than_torch(name: str, dtype: torch.dtype) -> None:
    given = problem(dtype)
    options = OPTIONS[name]
    wide = doubled(*given)
    hidden, weight, _, bias = given
    true = exact(*wide, **options)
    plain = exact(*given, **options)
    ours = linear_cross_entropy(*given, tile=16, **options)
    assert ours.losses.dtype == torch.float32
    assert off(ours.losses, true) <= 2 * off(plain, true) + 1e-7
    wanted = gradients_of(true.sum(), wide[0], wide[1], wide[3])
    for got, theirs, want in zip(
        gradients_of(ours.loss, hidden, weight, bias),
        gradients_of(plain.sum(), hidden, weight, bias),
        wanted,
        strict=True,
    ):
        assert got.dtype == dtype
        assert off(got, want) <= 2 * off(theirs, want) + 1e-7


def test_what_trainers_log() -> None:
    hidden, weight, labels, bias = problem()
    ours = linear_cross_entropy(hidden, weight, labels, bias, tile=11)
    logits = F.linear(hidden, weight, bias)
    real = labels != -100
    spread = torch.distributions.Categorical(logits=logits).entropy()  # type: ignore[no-untyped-call]
    assert torch.allclose(ours.entropy, spread.where(real, 0.0), rtol=1e-12)
    assert torch.allclose(ours.lse, logits.logsumexp(-1).where(real, 0.0), rtol=1e-12)
    assert ours.right.equal((logits.argmax(-1) == labels) & real)
    assert not any(t.requires_grad for t in ours[1:])
    best = logits.argmax(-1)
    assert linear_cross_entropy(hidden, weight, best, bias).right.all()


def test_equal_logits_go_to_the_lower_word() -> None:
    hidden, weight = torch.ones(3, 2), torch.ones(50, 2)
    labels = torch.tensor([0, 1, 49])
    assert linear_cross_entropy(hidden, weight, labels).right.tolist() == [True, False, False]


def test_words_that_cannot_come() -> None:
    """A bias of -inf, as padded vocabularies have it."""
    hidden, weight, labels, bias = problem(bias=True)
    assert bias is not None
    never = bias.detach().clone()
    never[-300:] = -torch.inf
    labels = labels.clamp(max=WORDS - 301)
    ours = linear_cross_entropy(hidden, weight, labels, never)
    true = exact(hidden, weight, labels, never)
    assert torch.allclose(ours.losses, true)
    assert ours.entropy.isfinite().all()
    for got, want in zip(
        gradients_of(ours.loss, hidden, weight),
        gradients_of(true.sum(), hidden, weight),
        strict=True,
    ):
        assert torch.allclose(got, want) and got.isfinite().all()


def test_nan_stays_with_its_token() -> None:
    hidden, weight, labels, bias = problem()
    spoilt = hidden.detach().clone()
    spoilt[7] = torch.nan
    labels[7] = 5
    ours = linear_cross_entropy(spoilt, weight, labels, bias, reduction="none")
    assert ours.loss[7].isnan() and ours.loss.isnan().sum() == 1


def test_nothing_to_learn_from() -> None:
    """All tokens ignored, and none at all: zeros."""
    hidden, weight, labels, bias = problem()
    for kept in (TOKENS, 0):
        ours = linear_cross_entropy(
            hidden[:kept], weight, torch.full_like(labels[:kept], -100), bias
        )
        assert ours.loss == 0
        for gradient in gradients_of(ours.loss, hidden, weight, bias):
            assert not gradient.any()


def test_only_what_is_wanted_is_made() -> None:
    hidden, weight, labels, bias = problem()
    with torch.no_grad():
        ours = linear_cross_entropy(hidden, weight, labels, bias)
    assert not ours.loss.requires_grad
    frozen = linear_cross_entropy(hidden, weight.detach(), labels, None).loss
    (gradient,) = torch.autograd.grad(frozen, hidden)
    (want,) = torch.autograd.grad(exact(hidden, weight.detach(), labels, None).sum(), hidden)
    assert torch.allclose(gradient, want)
    made = torch.ops.longspan.linear_cross_entropy(
        hidden.detach(), weight.detach(), labels, None, 1.0, 0.0, -100, 0.0, 0.0, 0, 1
    )
    assert made[5].shape == hidden.shape and made[6].numel() == made[7].numel() == 0


def test_rows_and_strides() -> None:
    hidden, weight, labels, bias = problem(tokens=TOKENS)
    rows = hidden.detach().view(3, 25, CHANNELS).mT.contiguous().mT.requires_grad_()
    wide = weight.detach().t().contiguous().t().requires_grad_()
    ours = linear_cross_entropy(rows, wide, labels.view(3, 25), bias, ignore_index=-100)
    assert ours.losses.shape == (3, 25)
    true = exact(hidden, weight, labels, bias).sum()
    assert torch.allclose(ours.loss, true)
    for got, want in zip(
        gradients_of(ours.loss, rows, wide), gradients_of(true, hidden, weight), strict=True
    ):
        assert torch.allclose(got.reshape(want.shape), want)


@pytest.mark.parametrize("words", [1, 3, 15, 16, 17, 1023, 1024, 1025, 2048])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_vocabularies_that_divide_nothing(name: str, words: int) -> None:
    hidden, weight, labels, bias = problem(torch.float32, words=words)
    wide = doubled(hidden, weight, labels, bias)
    ours = linear_cross_entropy(hidden, weight, labels, bias, **OPTIONS[name])
    true = exact(*wide, **OPTIONS[name])
    assert torch.allclose(ours.losses.double(), true, rtol=1e-5, atol=1e-5)
    for got, want in zip(
        gradients_of(ours.loss, hidden, weight, bias),
        gradients_of(true.sum(), wide[0], wide[1], wide[3]),
        strict=True,
    ):
        assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4)


def test_autocast_takes_the_type_of_products() -> None:
    hidden, weight, labels, _ = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, labels)
    halves = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    want = linear_cross_entropy(halves[0], halves[1], labels)
    assert ours.loss.equal(want.loss)
    for got, half in zip(
        gradients_of(ours.loss, hidden, weight), gradients_of(want.loss, *halves), strict=True
    ):
        assert got.dtype == torch.float32 and got.equal(half.float())


def test_repeats_bit_for_bit_and_for_any_threads() -> None:
    hidden, weight, labels, bias = problem(torch.float32)

    def answer() -> list[Tensor]:
        ours = linear_cross_entropy(hidden, weight, labels, bias, softcap=5.0)
        return [ours.losses, *gradients_of(ours.loss, hidden, weight, bias)]

    first = answer()
    assert all(a.equal(b) for a, b in zip(first, answer(), strict=True))


def test_backward_twice_and_no_second_derivative() -> None:
    hidden, weight, labels, bias = problem()
    loss = linear_cross_entropy(hidden, weight, labels, bias).loss
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.autograd.grad(loss * 3, hidden)[0].allclose(3 * first)
    for reduction in ("sum", "none"):
        again = linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction).loss.sum()
        with pytest.raises((ValueError, RuntimeError), match="second derivative"):
            torch.autograd.grad(again, hidden, create_graph=True)


def test_what_was_kept_becomes_the_gradient_where_nobody_else_can_see_it() -> None:
    """A gradient of a gigabyte exists once."""

    def gradient(**options: Any) -> Tensor:
        hidden, weight, labels, _ = problem(torch.float32)
        loss = 3 * linear_cross_entropy(hidden, weight, labels).loss
        first = torch.autograd.grad(loss, weight, **options)[0]
        if options:
            assert torch.autograd.grad(loss, weight)[0].equal(first)
        return first

    seen: list[tuple[Tensor, Tensor]] = []

    def look(tensor: Tensor) -> Tensor:
        seen.append((tensor, tensor.clone()))
        return tensor

    alone = gradient()
    assert gradient(retain_graph=True).equal(alone)
    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        assert gradient().equal(alone)
    assert seen and all(one.equal(before) for one, before in seen)


def test_backward_makes_no_second_gradient_of_the_weight() -> None:
    hidden, weight, labels, _ = problem(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels).loss / 7
    assert peak_of(loss.backward) < weight.nbytes
    assert weight.grad is not None


def test_it_takes_an_eighth_of_the_memory_of_whole_logits() -> None:
    """Forward and backward, with the gradients that both make; 16 tokens a channel."""
    random = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 128, generator=random) for n in (2048, 8000))
    labels = torch.randint(8000, (2048,), generator=random)

    def tiled(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels).loss

    def whole(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits, labels, reduction="sum")

    def peak(loss: Callable[..., Tensor]) -> int:
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        return peak_of(lambda: loss(*inputs).backward())  # type: ignore[no-untyped-call]

    assert peak(tiled) <= peak(whole) / 8


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "labels of another length": (
        {"labels": torch.zeros(3, dtype=torch.int64)},
        r"`labels` is \[3\] and `hidden`",
    ),
    "a label beyond the words": (
        {"labels": torch.full((TOKENS,), WORDS)},
        "label 2309 of token 0 is none of the 2309 words",
    ),
    "a negative label": ({"labels": torch.full((TOKENS,), -3)}, "label -3 of token 0"),
    "weight of another width": ({"weight": torch.zeros(9, 5)}, "`weight` is float32"),
    "weight of another type": ({"weight": torch.zeros(WORDS, CHANNELS)}, "`weight` is float32"),
    "bias of another length": ({"bias": torch.zeros(4)}, "`bias` is float32"),
    "softcap 0": ({"softcap": 0.0}, "`softcap` is 0"),
    "smoothing above 1": ({"label_smoothing": 1.5}, "`label_smoothing` is 1.5"),
    "negative z": ({"z_loss": -1.0}, "`z_loss` is -1"),
    "an infinite scale": ({"scale": float("inf")}, "`scale` is"),
    "reduction": ({"reduction": "max"}, "reduction"),
    "tile 0": ({"tile": 0}, "`tile` is 0"),
    "labels that are no words": ({"labels": torch.zeros(TOKENS)}, "`labels` is a float32 tensor"),
    "no tensor": ({"weight": None}, "`weight` is None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    hidden, weight, labels, bias = problem()
    changed, said = BAD[name]
    given: dict[str, Any] = {"weight": weight, "labels": labels, "bias": bias} | changed
    with pytest.raises((ValueError, TypeError), match=said):
        linear_cross_entropy(hidden, **given)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [0, 1, 7])
def test_is_registered_correctly(wanted: int) -> None:
    hidden, weight, labels, bias = problem(torch.float32, tokens=9, words=17)
    if wanted == 0:
        hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach()  # type: ignore[union-attr]
    if wanted == 1:
        weight, bias = weight.detach(), bias.detach()  # type: ignore[union-attr]
    given = (hidden, weight, labels, bias, 1.0, 2.0, -100, 0.1, 0.1, 4)
    torch.library.opcheck(torch.ops.longspan.linear_cross_entropy, (*given, wanted))
    torch.library.opcheck(torch.ops.longspan.linear_token_losses, given)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_compiles_whole(reduction: str) -> None:
    hidden, weight, labels, bias = problem(torch.float32)

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        made = longspan.linear_cross_entropy(
            hidden * 2, weight, labels, bias, reduction=reduction, softcap=3.0
        )
        return made.loss.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (TOKENS, 31):
        got = gradients_of(compiled(hidden[:tokens], labels[:tokens]), hidden, weight, bias)
        want = gradients_of(loss(hidden[:tokens], labels[:tokens]), hidden, weight, bias)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
