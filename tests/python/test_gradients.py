"""`sum_gradients` and `clip_grad_norm`: one call each gives the gradients of one
rank, however the model is wrapped."""

from __future__ import annotations

import copy
import io
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import outputs_of, start_ranks
from test_gradient_contract import assert_close, batch_of, gradients, one_rank, rows_of, seeded
from torch import Tensor, nn

import longspan
from longspan import Group, run_ranks

# ---- Wrapped models need processes; the script has one function for each case.

SCRIPT = "gradients_four_ranks.py"
CASES = re.findall(r"^@case\ndef (\w+)", (pathlib.Path(__file__).parent / SCRIPT).read_text(), re.M)


@pytest.fixture(scope="module")
def four_ranks() -> list[str]:
    return outputs_of(start_ranks(SCRIPT, 4))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_on_two_replicas_of_two_ranks(case: str, four_ranks: list[str]) -> None:
    for rank, output in enumerate(four_ranks):
        assert f"{case} holds\n" in output, f"rank {rank}:\n{output}"


# ---- Plain models, on threads.


def norm_of(grads: dict[str, Tensor], order: float = 2.0) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.values()]), order)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_any_number_of_ranks_gives_the_gradients_of_one(ranks: int, tied: bool) -> None:
    model, batch = seeded(tied=tied), batch_of(length=16)
    _, expected = one_rank(model, batch)

    def body(group: Group) -> tuple[dict[str, Tensor], Tensor]:
        mine = copy.deepcopy(model)
        local = longspan.shard(batch, group, layout="contiguous-stream", multiple=12)
        loss, _ = mine(local, group)
        loss.backward()
        longspan.sum_gradients(mine, group)
        found = {name: grad.clone() for name, grad in gradients(mine).items()}
        return found, longspan.clip_grad_norm(mine, 1.0, group)

    results = run_ranks(ranks, body)
    for found, norm in results:
        assert_close(found, expected)
        torch.testing.assert_close(norm, norm_of(expected), rtol=1e-12, atol=0)
        assert torch.equal(norm, results[0][1])
        assert all(torch.equal(found[name], results[0][0][name]) for name in expected)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 26])
def test_buckets_change_nothing(bucket_bytes: int) -> None:
    def body(group: Group) -> list[Tensor]:
        model = nn.Linear(5, 7)
        for at, p in enumerate(model.parameters()):
            p.grad = torch.arange(p.numel()).view(p.shape).float() * (1 + group.rank() + at)
        longspan.sum_gradients(model, group, bucket_bytes=bucket_bytes)
        return [p.grad for p in model.parameters()]

    for weight, bias in run_ranks(3, body):
        assert torch.equal(weight, torch.arange(35).view(7, 5) * 6.0)
        assert torch.equal(bias, torch.arange(7) * 9.0)


def test_few_collectives_carry_many_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    send = longspan._gradients.reduce_scatter_tokens
    monkeypatch.setattr(
        longspan._gradients,
        "reduce_scatter_tokens",
        lambda x, **options: calls.append(x.numel()) or send(x, **options),
    )

    def body(group: Group) -> None:
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(50))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        longspan.sum_gradients(model, group)

    run_ranks(2, body)
    assert calls == [50 * 20] * 2  # one for each rank


class Kinds(nn.Module):
    """A parameter of every kind that a gradient may be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.float64 = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.float32 = nn.Parameter(torch.zeros(2, 2))
        self.bfloat16_ = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.complex64 = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.zeros(4, 3).t())
        self.empty = nn.Parameter(torch.zeros(0))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def test_every_kind_of_tensor_is_summed() -> None:
    def body(group: Group) -> Kinds:
        model = Kinds()
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
                steps = torch.arange(p.numel()).view(p.shape)
                p.grad.copy_(steps * (1j if p.is_complex() else 1) + 1 + group.rank())
        longspan.sum_gradients(model, group)
        return model

    for model in run_ranks(3, body):
        for name, p in model.named_parameters():
            if name == "frozen":
                assert p.grad is None
                continue
            steps = torch.arange(p.numel()).view(p.shape)
            expected = 3 * steps * (1j if p.is_complex() else 1) + 6
            assert torch.equal(p.grad, expected.to(p.dtype)), name
            assert p.grad.stride() == p.stride(), name


def test_half_types_are_summed_in_float32() -> None:
    def body(group: Group) -> Tensor:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        # In bfloat16 256 + 1 is 256, so that single additions would be lost.
        model.weight.grad = torch.full((1, 1), [256.0, 1.0, 1.0][group.rank()]).bfloat16()
        longspan.sum_gradients(model, group)
        return model.weight.grad

    assert [float(grad) for grad in run_ranks(3, body)] == [258.0] * 3


def test_a_gradient_that_some_rank_lacks() -> None:
    def body(group: Group) -> list[Tensor | None]:
        model = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(4))
        if group.rank() < 2:  # the last rank has no gradient at all
            x = torch.full((2,), 1.0 + group.rank())
            (model[group.rank()](x) + model[2](x)).backward()
        longspan.sum_gradients(model, group)
        return [linear.weight.grad for linear in model]

    for first, second, both, nobody in run_ranks(3, body):
        assert first.tolist() == [[1.0, 1.0]]
        assert second.tolist() == [[2.0, 2.0]]
        assert both.tolist() == [[3.0, 3.0]]
        assert nobody is None


def test_microbatches_add_up_before_the_sum() -> None:
    model, batch = seeded(), batch_of()
    parts = [rows_of(batch, part, 2) for part in range(2)]
    alone = [one_rank(model, part)[1] for part in parts]

    def body(group: Group) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        for part in parts:
            loss, _ = mine(longspan.shard(part, group, layout="contiguous-stream"), group)
            (loss / 2).backward()
        longspan.sum_gradients(mine, group)
        return gradients(mine)

    for found in run_ranks(2, body):
        assert_close(found, {name: (alone[0][name] + alone[1][name]) / 2 for name in found})


# ---- Once a step.


def step(model: nn.Module, group: Group) -> None:
    model(torch.ones(2)).sum().backward()
    longspan.sum_gradients(model, group)


def changes(model: nn.Module, group: Group) -> None:
    """Ways to the next step that are right."""
    for to_none in (True, False, False, True):
        model.zero_grad(set_to_none=to_none)
        step(model, group)
        assert torch.equal(model.weight.grad, torch.full((2, 2), float(group.size())))


def twice(model: nn.Module, group: Group) -> None:
    step(model, group)
    longspan.sum_gradients(model, group)


def twice_with_clipping_between(model: nn.Module, group: Group) -> None:
    step(model, group)
    longspan.clip_grad_norm(model, 1.0, group)
    longspan.sum_gradients(model, group)


def twice_with_clipping_of_torch_between(model: nn.Module, group: Group) -> None:
    step(model, group)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    longspan.sum_gradients(model, group)


def after_every_microbatch(model: nn.Module, group: Group) -> None:
    step(model, group)
    step(model, group)


def after_every_microbatch_of_a_later_step(model: nn.Module, group: Group) -> None:
    step(model, group)
    model.zero_grad(set_to_none=False)
    step(model, group)
    model(torch.ones(2)).sum().backward()
    model(torch.ones(2)).sum().backward()
    longspan.sum_gradients(model, group)


ALREADY = "these gradients were summed already"
ADDED = "backward added to a gradient that was summed already"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "body, sentence",
    [
        (changes, None),
        (twice, ALREADY),
        (twice_with_clipping_between, ALREADY),
        (twice_with_clipping_of_torch_between, ALREADY),
        (after_every_microbatch, ADDED),
        (after_every_microbatch_of_a_later_step, ADDED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gradients_are_summed_once_a_step(
    ranks: int, body: Callable[[nn.Module, Group], None], sentence: str | None
) -> None:
    def rank_main(group: Group) -> None:
        model = nn.Linear(2, 2)
        if sentence is None:
            body(model, group)
        else:
            with pytest.raises(ValueError, match=sentence):
                body(model, group)

    run_ranks(ranks, rank_main)


@pytest.mark.parametrize("copied_by", [0, 1])
def test_a_copy_of_a_sum_is_not_summed_again(copied_by: int) -> None:
    """All ranks refuse where one has copies."""

    def body(group: Group) -> None:
        model = nn.Linear(2, 2)
        step(model, group)
        if group.rank() == copied_by:
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clone()
        with pytest.raises(ValueError, match="`bias` is a copy of one that was summed already"):
            longspan.sum_gradients(model, group)
        model.zero_grad()
        step(model, group)  # and goes on

    run_ranks(2, body)


@pytest.mark.parametrize("copied", ["0.weight", "1.bias"])
def test_a_copy_of_some_sums_is_not_summed_again(copied: str) -> None:
    """As of trainers that move, or keep, the gradients of some layers."""

    def body(group: Group) -> None:
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        step(model, group)
        parameter = model.get_parameter(copied)
        parameter.grad = parameter.grad.clone()
        with pytest.raises(ValueError, match=f"`{copied}` is a copy of one that was summed"):
            longspan.sum_gradients(model, group)
        parameter.grad = torch.ones_like(parameter)  # by hand
        longspan.sum_gradients(model, group)
        assert bool((parameter.grad == 2).all())
        model.zero_grad()
        step(model, group)  # and goes on

    run_ranks(2, body)


def test_gradients_that_no_backward_made_are_summed() -> None:
    """Set by hand, with a copy before the sum, and zeros."""

    def body(group: Group) -> None:
        model = nn.Linear(2, 2)
        for value in (1.0, 3.0, 0.0, 0.0, 5.0):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value).clone()
            longspan.sum_gradients(model, group)
            assert all((p.grad == 2 * value).all() for p in model.parameters())
        for _ in range(2):  # the same data again
            model.zero_grad()
            model(torch.ones(2)).sum().backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clone()
            longspan.sum_gradients(model, group)
            assert torch.equal(model.bias.grad, torch.full((2,), 2.0))

    run_ranks(2, body)


def test_what_no_backward_reached_again_stays() -> None:
    """Some users zero and train a part of the parameters only."""

    def body(group: Group) -> None:
        model = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))
        for layer in model:
            layer(torch.ones(2)).backward()
        longspan.sum_gradients(model, group)
        model[1].zero_grad()
        model[1](torch.ones(2)).backward()
        longspan.sum_gradients(model, group)
        assert [layer.weight.grad.tolist() for layer in model] == [[[2.0, 2.0]]] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("clips", [False, True])
def test_sums_that_one_of_two_optimizers_left(clips: bool) -> None:
    """The first parameter is zeroed, and backward adds to the sum of another; or nobody touches
    that but torch's clipping."""

    def body(group: Group) -> None:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(2))
        for step, used in enumerate(([0, 1], [0] if clips else [0, 1])):
            data = torch.arange(4.0) ** (1 + step) + group.rank()
            sum(model[at](data) for at in used).backward()
            if step and not clips:
                with pytest.raises(ValueError, match=r"backward added to .* already \(`1.weight`"):
                    longspan.sum_gradients(model, group)
                return
            longspan.sum_gradients(model, group)
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            model[0].zero_grad()

    run_ranks(2, body)


def test_a_first_parameter_may_rest_for_a_step() -> None:
    """Zeroed in place and not used: nothing that was summed twice."""

    def body(group: Group) -> None:
        model = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))
        for used in ([0, 1], [1], [0]):
            model.zero_grad(set_to_none=False)
            sum(model[at](torch.ones(2)) for at in used).backward()
            longspan.sum_gradients(model, group)
            for at in range(2):
                assert model[at].weight.grad.tolist() == [[2.0 * (at in used)] * 2]

    run_ranks(2, body)


def test_a_rank_may_rest_for_a_step() -> None:
    def body(group: Group) -> None:
        model = nn.Linear(2, 2)
        step(model, group)
        model.zero_grad(set_to_none=False)
        if group.rank() == 0:
            model(torch.ones(2)).sum().backward()
        longspan.sum_gradients(model, group)
        assert torch.equal(model.weight.grad, torch.ones(2, 2))

    run_ranks(2, body)


def test_a_refusal_can_be_left_behind() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=ADDED):
        after_every_microbatch(model, Group())
    with pytest.raises(ValueError, match=ADDED):
        longspan.sum_gradients(model, Group())
    changes(model, Group())


def test_a_summed_model_can_be_copied_and_saved() -> None:
    model = nn.Linear(2, 2)
    step(model, Group())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        step(other, Group())
        assert torch.equal(other.weight.grad, model.weight.grad)


def test_a_model_without_gradients_has_nothing_to_sum() -> None:
    def body(group: Group) -> None:
        for model in (nn.Identity(), nn.Linear(2, 2)):
            longspan.sum_gradients(model, group)
            longspan.sum_gradients(model, group)
            assert longspan.clip_grad_norm(model, 1.0, group) == 0.0

    run_ranks(2, body)


# ---- Refusals.


def sparse_on_one_rank(group: Group) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "table": nn.Embedding(4, 2, sparse=True)})
    if group.rank() == 0:
        model["table"](torch.tensor([1])).sum().backward()
    longspan.sum_gradients(model, group)


def other_shapes(group: Group) -> None:
    longspan.sum_gradients(nn.Linear(2 + group.rank(), 2), group)


def other_names(group: Group) -> None:
    longspan.sum_gradients(nn.ModuleDict({f"layer{group.rank()}": nn.Linear(2, 2)}), group)


def other_buckets(group: Group) -> None:
    longspan.sum_gradients(nn.Linear(2, 2), group, bucket_bytes=1 + group.rank())


def left_over_on_one_rank(group: Group) -> None:
    model = nn.Linear(2, 2)
    step(model, group)
    if group.rank() == 0:
        model.zero_grad()
        model(torch.ones(2)).sum().backward()
    longspan.sum_gradients(model, group)


def unsummed(group: Group) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    longspan.clip_grad_norm(model, 1.0, group)


REFUSED: list[tuple[Callable[[Group], Any], type[Exception], str]] = [
    (sparse_on_one_rank, ValueError, "sum_gradients: the gradient of `table.weight` is sparse;"),
    (other_shapes, ValueError, "sum_gradients: rank 1 has other parameters than rank 0"),
    (other_names, ValueError, "sum_gradients: rank 1 has other parameters than rank 0"),
    (other_buckets, ValueError, "sum_gradients: rank 1 has other parameters than rank 0"),
    (left_over_on_one_rank, ValueError, "sum_gradients: rank 1 still has the gradient of `bias`"),
    (unsummed, ValueError, "clip_grad_norm: the gradient of `bias` was not summed over the group"),
]


@pytest.mark.parametrize("body, kind, sentence", REFUSED, ids=[r[0].__name__ for r in REFUSED])
def test_a_refusal_reaches_every_rank(
    body: Callable[[Group], Any], kind: type[Exception], sentence: str
) -> None:
    def rank_main(group: Group) -> None:
        with pytest.raises(kind) as error:
            body(group)
        assert str(error.value).startswith(sentence)

    run_ranks(2, rank_main)


def test_wrong_arguments_get_a_sentence() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="sum_gradients: expected a module, got list"):
        longspan.sum_gradients(list(model.parameters()), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Group: expected a process group"):
        longspan.sum_gradients(model, 3)
    with pytest.raises(ValueError, match="`bucket_bytes` is 0; expected 1 or more"):
        longspan.sum_gradients(model, None, bucket_bytes=0)
    with pytest.raises(TypeError, match="clip_grad_norm: a parameter is a str"):
        longspan.clip_grad_norm(["weight"], 1.0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"clip_grad_norm: max_norm is -1.0"):
        longspan.clip_grad_norm(model, -1)
    with pytest.raises(ValueError, match=r"clip_grad_norm: max_norm is nan"):
        longspan.clip_grad_norm(model, float("nan"))
    with pytest.raises(ValueError, match=r"clip_grad_norm: norm_type is 0.0"):
        longspan.clip_grad_norm(model, 1, norm_type=0)


# ---- Norms.


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6])
def test_clipping_is_that_of_torch(order: float, foreach: bool | None, max_norm: float) -> None:
    ours, theirs = (seeded() for _ in range(2))
    for model in (ours, theirs):
        loss, _ = model(longspan.shard(batch_of()), Group())
        loss.backward()
    norm = longspan.clip_grad_norm(ours, max_norm, norm_type=order, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type=order)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    assert_close(gradients(ours), gradients(theirs))


def test_parameters_come_in_any_way() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.grad = torch.full((2, 2), 2.0)
    alone = nn.Parameter(torch.zeros(1))
    for given in (layer, layer.weight, [layer.weight, layer.weight, alone], iter([layer.weight])):
        assert longspan.clip_grad_norm(given, torch.inf) == 4.0
    assert longspan.clip_grad_norm([], 1.0) == 0.0
    assert longspan.clip_grad_norm(alone, 1.0) == 0.0


def test_half_types_are_measured_in_float32() -> None:
    p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    p.grad = torch.full((1000,), 1.0, dtype=torch.bfloat16)
    norm = longspan.clip_grad_norm(p, torch.inf)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(1000.0).sqrt())
    q = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    q.grad = torch.tensor([3 + 4j, 0])
    assert longspan.clip_grad_norm(q, torch.inf, norm_type=1) == 5.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite(value: float) -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, value])
    with pytest.raises(RuntimeError, match=f"clip_grad_norm: the norm of order 2.0 .* is {value}"):
        longspan.clip_grad_norm(p, 1.0, error_if_nonfinite=True)
    assert p.grad[0] == 1.0
    assert not longspan.clip_grad_norm(p, 1.0).isfinite()
