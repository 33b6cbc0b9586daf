"""The tiled loss on a GPU."""

from __future__ import annotations

import pytest
import torch
from test_linear_cross_entropy import OPTIONS, doubled, exact, gradients_of, off, problem
from torch import Tensor

from longspan import linear_cross_entropy

pytestmark = pytest.mark.cuda


def on_gpu(*tensors: Tensor | None) -> list[Tensor | None]:
    return [
        None if t is None else t.detach().cuda().requires_grad_(t.is_floating_point())
        for t in tensors
    ]


@pytest.mark.parametrize("words", [1, 17, 2048, 2309, 50257])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("name", OPTIONS)
def test_is_no_further_off_than_torch(name: str, dtype: torch.dtype, words: int) -> None:
    given = on_gpu(*problem(dtype, words=words))
    hidden, weight, labels, bias = given
    assert hidden is not None and weight is not None and labels is not None
    options = OPTIONS[name]
    wide = doubled(*given)
    true = exact(*wide, **options)
    plain = exact(hidden, weight, labels, bias, **options)
    ours = linear_cross_entropy(hidden, weight, labels, bias, tile=32, **options)
    least = 1e-12 if dtype == torch.float64 else 1e-6
    assert off(ours.losses, true) <= 2 * off(plain, true) + least or words == 1
    for got, theirs, want in zip(
        gradients_of(ours.loss, hidden, weight, bias),
        gradients_of(plain.sum(), hidden, weight, bias),
        gradients_of(true.sum(), wide[0], wide[1], wide[3]),
        strict=True,
    ):
        assert got.dtype == dtype
        if words > 1:
            assert off(got, want) <= 2 * off(theirs, want) + least
        else:
            assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_says_what_the_cpu_says(dtype: torch.dtype) -> None:
    given = problem(dtype)
    hidden, weight, labels, bias = on_gpu(*given)
    assert hidden is not None and weight is not None and labels is not None
    ours = linear_cross_entropy(hidden, weight, labels, bias, reduction="none", tile=20)
    host = linear_cross_entropy(*given, reduction="none")
    for a, b in zip(ours, host, strict=True):
        assert torch.allclose(a.cpu().float(), b.float(), rtol=2e-2, atol=2e-2)


def test_a_label_that_is_no_word_is_nan() -> None:
    hidden, weight, labels, _ = on_gpu(*problem(torch.bfloat16))
    assert hidden is not None and weight is not None and labels is not None
    labels = labels.clone()
    labels[3] = 10**6
    ours = linear_cross_entropy(hidden, weight, labels)
    assert ours.loss.isnan() and ours.losses.isnan().sum() == 1
    torch.cuda.synchronize()


def test_repeats_bit_for_bit() -> None:
    hidden, weight, labels, bias = on_gpu(*problem(torch.bfloat16, tokens=700))
    assert hidden is not None and weight is not None and labels is not None

    def answer() -> list[Tensor]:
        ours = linear_cross_entropy(hidden, weight, labels, bias, tile=256)
        return [ours.losses, *gradients_of(ours.loss, hidden, weight, bias)]

    first = answer()
    for _ in range(20):
        assert all(a.equal(b) for a, b in zip(first, answer(), strict=True))


def test_logits_never_exist_whole() -> None:
    """8192 tokens and 32768 words: 1 GiB of logits in float32, of which a tile is there."""
    hidden = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32768, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(32768, (8192,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, tile=512).loss.backward()  # type: ignore[no-untyped-call]
    assert torch.cuda.max_memory_allocated() - before < 200 << 20
