"""A model over thread ranks, put together to what one rank would answer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from oracle.all_double import AllDouble
from oracle.tiny_decoders import (
    CASES,
    VOCABULARY,
    Answer,
    Case,
    Document,
    answer_of,
    decoder,
    embedded,
    gradients_of,
    packed,
)
from torch import Tensor

import longspan
from longspan import Group, run_ranks


def over_ranks(
    family: str,
    case: str | Case,
    ranks: int,
    *,
    dtype: torch.dtype = torch.float64,
    embeds: bool = False,
    cut: dict[str, Any] | None = None,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Answer:
    """The same answer, put together from what the ranks computed inside a context."""
    whole = CASES[case]() if isinstance(case, str) else case
    model = decoder(family, dtype, **(config or {}))

    def body(group: Group) -> tuple[float, dict[str, Tensor], Tensor]:
        mine = longspan.parallelize(copy.deepcopy(model), group, **options)
        batch = embedded(model, whole.batch) if embeds else whole.batch
        local = longspan.shard(batch, group, model=mine, **(cut or {}))
        with inside():
            out = mine(**local)
            out.loss.backward()
        logits = longspan.unshard(out.logits.detach(), local)
        return out.loss.item(), gradients_of(mine), logits

    return put_together(run_ranks(ranks, body), whole.documents)


def put_together(
    results: Sequence[tuple[float, dict[str, Tensor], Tensor]], documents: Sequence[Document]
) -> Answer:
    """From each rank's part of the loss and of the gradients, and the whole logits."""
    gradients: dict[str, Tensor] = {}
    for _, some, _ in results:
        for name, gradient in some.items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient
    for _, _, logits in results:
        assert logits.equal(results[0][2])
    return Answer(
        sum(loss for loss, _, _ in results),
        gradients,
        tuple(results[0][2][d.row, d.begin : d.end] for d in documents),
    )


def check_as_exact(
    losses: Sequence[float], gradients: Sequence[dict[str, Tensor]], true: Answer, plain: Answer
) -> None:
    """That the ranks' parts sum to what is as far from float64 as one rank of their type."""
    assert sum(losses) == pytest.approx(true.loss, abs=2 * abs(plain.loss - true.loss) + 0.02)

    def error(of: Mapping[str, Any]) -> Tensor:
        parts = [
            (of[name].double() - gradient).norm() / gradient.norm()
            for name, gradient in true.gradients.items()
        ]
        return torch.stack(parts).mean()

    summed = {name: sum(g[name] for g in gradients) for name in true.gradients}
    assert error(summed) <= 2 * error(plain.gradients)


def parts_of(model: Any) -> dict[int, dict[str, Any]]:
    """What each module of a model holds, as it is now: its mappings change in place. Of hooks
    the functions in their order, for their numbers are never given twice."""

    def now(held: Any) -> Any:
        if not isinstance(held, dict):
            return held
        return [value if isinstance(key, int) else (key, value) for key, value in held.items()]

    return {id(m): {name: now(held) for name, held in vars(m).items()} for m in model.modules()}


def check_restored(model: Any, batch: Mapping[str, Tensor], steps: int = 0) -> None:
    """That `restore` leaves every module and the answer as they were, also after steps."""
    plain = model(input_ids=batch["input_ids"]).logits
    before = parts_of(model)
    longspan.parallelize(model)
    for _ in range(steps):
        model(**longspan.shard(batch, model=model)).loss.backward()
        model.zero_grad()
    longspan.restore(model)
    assert parts_of(model) == before
    assert model(input_ids=batch["input_ids"]).logits.equal(plain)


def check(ours: Answer, true: Answer, tolerance: float = 3e-6) -> None:
    """Norms, rotary embeddings and the loss are float32 inside these models, also
    in float64; so parts of 1e-6 are what can be asked. A gradient of one number is a sum of
    both signs that no larger neighbour hides: HY v4's `hc_head.hc_scale` is 4e-6 off under
    transformers 5.17 on one rank, and on more."""
    assert ours.loss == pytest.approx(true.loss, rel=tolerance)
    for mine, theirs in zip(ours.logits, true.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert ours.gradients.keys() == true.gradients.keys()
    for name, gradient in true.gradients.items():
        error, size = (ours.gradients[name] - gradient).abs().max(), gradient.abs().max()
        allowed = tolerance * size * (4 if gradient.numel() == 1 else 1)
        assert error <= allowed, f"{name}: {error:.1e} off, of {size:.1e}"


def in_float64(
    family: str, case: Case, embeds: bool = False, config: Mapping[str, Any] | None = None
) -> Answer:
    """Every document alone, in float64 throughout."""
    model = decoder(family, **(config or {}))
    with AllDouble():
        return answer_of(model, case, embeds)


def exactly(family: str, case: str, ranks: int, **options: Any) -> None:
    """That a family's answer over ranks is that of each document alone to 1e-12, both in float64
    throughout."""
    true = in_float64(family, CASES[case]())
    check(over_ranks(family, case, ranks, inside=AllDouble, **options), true, tolerance=1e-12)


def rounding(found: Answer, true: Answer) -> dict[str, float]:
    """How far off an answer is, relative to the greatest number of each; of gradients the root
    mean square, since that of one parameter may be rounded luckily."""

    def far(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max() / b.abs().max())

    gradients = [far(found.gradients[name], g) ** 2 for name, g in true.gradients.items()]
    return {
        "gradients": (sum(gradients) / len(gradients)) ** 0.5,
        "logits": max(far(a, b) for a, b in zip(found.logits, true.logits, strict=True)),
        "loss": max(abs(found.loss / true.loss - 1), torch.finfo(torch.float32).eps),
    }


def check_rounding(family: str, ranks: int) -> None:
    """That a model with float32 inside is no further from float64 than twice what the family's
    own code is. On one document, so that both add as many numbers up."""
    case = packed([57])
    true = in_float64(family, case)
    theirs = rounding(answer_of(decoder(family), case), true)
    ours = rounding(over_ranks(family, case, ranks), true)
    assert all(ours[what] <= 2 * theirs[what] for what in ours), (ours, theirs)


def sees_no_future(model: Any, case: Case, group: Group, tokens: Sequence[int]) -> None:
    """That another token of the first row leaves the logits of all before it as they are, bit
    for bit, and moves its own. Every rank calls it with its parallelized model."""

    def logits(ids: Tensor) -> Tensor:
        local = longspan.shard({**case.batch, "input_ids": ids}, group, model=model)
        with torch.no_grad():
            return longspan.unshard(model(**local).logits, local)

    before = logits(case.ids)
    for token in tokens:
        changed = case.ids.clone()
        changed[0, token] = (changed[0, token] + 1) % VOCABULARY
        moved = (logits(changed) != before).any(-1)
        assert not moved[0, :token].any(), token
        assert moved[0, token], token
        assert not moved[1:].any(), token


def sends_what_it_says(model: Any, batch: Any, group: Group) -> tuple[Any, Any]:
    """That a step of a parallelized model sends the bytes that `explain` tells, forward and
    backward; what it told, and the rank's share."""
    said = longspan.explain(model, batch, group)
    local = longspan.shard(batch, group, model=model)
    before = group.sent_bytes
    loss = model(**local).loss
    forward = group.sent_bytes
    loss.backward()
    assert sum(cost.sent_forward for cost in said.layers) == forward - before
    assert sum(cost.sent_backward for cost in said.layers) == group.sent_bytes - forward
    return said, local
