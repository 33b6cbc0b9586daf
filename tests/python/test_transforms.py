"""torch.func, forward mode and second derivatives: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode

import longspan
from longspan import Mask, Ownership, Packing, dsa

Q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
LISTS = torch.arange(3, dtype=torch.int32).expand(8, 3)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attend": lambda q: longspan.attend(q, q, q).sum(),  # type: ignore[union-attr]
    "attend_selected": lambda q: dsa.attend_selected(  # type: ignore[union-attr]
        q[0].transpose(0, 1), q[0, 0], LISTS, scale=0.5
    ).sum(),
    "index_scores": lambda q: dsa.index_scores(
        q[0].transpose(0, 1), q[0, 0], q[0, :, :, 0].transpose(0, 1)
    ).sum(),
    "score_selected": lambda q: dsa.score_selected(
        q[0].transpose(0, 1), q[0, 0], q[0, :, :, 0].transpose(0, 1), LISTS
    ).sum(),
    "rotate_channels": lambda q: dsa.rotate_channels(q, Q[..., :2], Q[..., 2:]).square().sum(),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(f)(Q),
    "vjp": lambda f: torch.func.vjp(f, Q)[1](torch.tensor(1.0, dtype=Q.dtype)),
    "jvp": lambda f: torch.func.jvp(f, (Q,), (Q,)),
    "jacrev": lambda f: torch.func.jacrev(f)(Q),
    "hessian": lambda f: torch.func.hessian(f)(Q),
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(Q),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([Q, Q])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_transform_is_right_or_refused_by_name(name: str, transform: str) -> None:
    words = "torch.func.grad, vjp, jvp and what is made of them cannot look through it; call"
    try:
        TRANSFORMS[transform](FUNCTIONS[name])
    except ValueError as error:
        assert str(error).startswith(f"{name}: {words}")


def test_refusals_are_not_the_only_answer() -> None:
    """Where a transform answers, it answers right."""
    for name, function in FUNCTIONS.items():
        x = Q.clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(x), x)
        try:
            found = torch.func.grad(function)(Q)
        except ValueError:
            continue
        torch.testing.assert_close(found, expected, msg=name)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_a_loop(name: str) -> None:
    many = torch.randn(3, *Q.shape, dtype=Q.dtype)
    expected = torch.stack([FUNCTIONS[name](one) for one in many])
    torch.testing.assert_close(torch.func.vmap(FUNCTIONS[name])(many), expected)


def test_forward_mode_is_refused_by_name() -> None:
    with forward_mode.dual_level():
        dual = forward_mode.make_dual(Q, Q)
        with pytest.raises(ValueError, match=r"^attend: there is no forward-mode derivative"):
            longspan.attend(dual, dual, dual)
        with pytest.raises(ValueError, match=r"^rotate_channels: there is no forward-mode"):
            dsa.rotate_channels(dual, Q[..., :2], Q[..., :2])
        ids = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
        local = longspan.shard(ids, rank=0, ranks=2)
        with pytest.raises(ValueError, match=r"^unshard: there is no forward-mode"):
            longspan.unshard(dual[0, 0, :, :1].transpose(0, 1), local)


def test_a_second_derivative_is_refused_by_name() -> None:
    x = Q.clone().requires_grad_()
    out = longspan.attend(x, x, x)
    assert isinstance(out, torch.Tensor)
    with pytest.raises(RuntimeError, match=r"^attend: there is no second derivative"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_what_is_linear_has_every_derivative() -> None:
    x = Q.clone().requires_grad_()
    half = Q[..., :2]
    (first,) = torch.autograd.grad(
        dsa.rotate_channels(x, half, half).square().sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), x)
    turned = dsa.rotate_channels(torch.ones_like(Q), half, half)
    torch.testing.assert_close(second, 2 * dsa.rotate_channels(turned, half, half, inverse=True))


def test_layouts_made_inside_of_a_transform_are_constants() -> None:
    mask = Mask.causal(Packing.of([5, 3]))

    def made_inside(q: torch.Tensor) -> torch.Tensor:
        layout = longspan.AttentionLayout(Ownership.contiguous(8, 1), mask)
        return longspan.attend(q, q, q, attention=layout)  # type: ignore[return-value]

    found = torch.func.vmap(made_inside)(torch.stack([Q, 2 * Q]))
    torch.testing.assert_close(found[1], made_inside(2 * Q))


def test_vmap_of_a_mean_loss() -> None:
    """Counts have no values inside."""
    sums, counts = torch.tensor([2.0, 6.0]), torch.tensor([2, 3])
    found = torch.func.vmap(lambda s, c: longspan.reduce_loss(s, c))(sums, counts)
    assert found.tolist() == [1.0, 2.0]
