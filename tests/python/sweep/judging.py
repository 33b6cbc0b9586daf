"""How one family fares: cut over ranks, against each document alone."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from oracle.tiny_decoders import packed, padded
from torch import Tensor

import longspan
from longspan import Group, run_ranks
from longspan._recipes import recipes_in
from longspan._rulers import (
    AllDouble,
    Answer,
    Case,
    alone,
    distances,
    gradients_of,
    loss_of,
    share_of,
    worst_of,
)
from sweep.families import Family, made

#: Of the largest value, in logits and in every gradient: norms, rotary tables and
#: routers of many families are float32 inside. What is off by more, but little, is computed
#: again with float64 in their place, where rounding is next to nothing: the one scale of all
#: hidden states of HY v4 is off by 1e-5 on one CPU and by 4e-5 on another, and then by 3e-13.
TOLERANCE = 3e-5
MAY_BE_ROUNDING = 1e-3
TOLERANCE_IN_DOUBLE = 1e-9
#: Sliding layers see five keys, and rows have two documents at least.
CASES: dict[str, Case] = {
    "packed": packed([6, 8, 9], [21, 2]),
    "left": padded([13, 5, 17], 17, "left"),
    "right": padded([13, 5, 17], 17, "right"),
}
RANKS = (2, 3)


@dataclass(frozen=True)
class Verdict:
    """right, refused (when parallelized), late (refused after), wrong, crashed; or not made,
    where transformers cannot build or run the family itself."""

    name: str
    word: str
    why: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.word}" + (f" ({self.why})" if self.why else "")


def judge(family: Family) -> Verdict:
    """The first thing that is not right about it."""
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        word, why = _judged(family)
    return Verdict(family.name, word, why, time.monotonic() - begin)


def _judged(family: Family) -> tuple[str, str]:
    try:
        model = made(family)
    except Exception as error:
        return "not made", _line(error)
    before = _seen(model)
    try:
        longspan.restore(longspan.parallelize(model))
    except (NotImplementedError, TypeError, ValueError) as error:
        ours = str(error).startswith("parallelize: ")
        if _seen(model) != before:
            return "wrong", f"refused, and another model than before: {_line(error)}"
        return ("refused", _line(error, "")) if ours else ("crashed", _line(error))
    except Exception as error:
        return "crashed", _line(error)
    if _seen(model) != before:
        return "wrong", "another model after restore"
    scans = any(recipe.carries for _, _, recipe in recipes_in(model))
    # Scans are float32 throughout, which hides much.
    word, why, error = _compared(model, AllDouble if scans else nullcontext, TOLERANCE)
    if word == "wrong" and not scans and error <= MAY_BE_ROUNDING:
        word, why, _ = _compared(model, AllDouble, TOLERANCE_IN_DOUBLE)
    return word, why


#: How a model computes.
Computing = Callable[[], AbstractContextManager[Any]]


def _compared(model: Any, computing: Computing, tolerance: float) -> tuple[str, str, float]:
    """Over ranks against alone: the word, why, and the largest difference so far."""
    worst = 0.0
    for name, case in CASES.items():
        try:
            with computing():
                true = alone(model, case)
        except Exception as error:
            return "not made", f"alone, {name}: {_line(error)}", worst
        for ranks in RANKS:
            try:
                ours = _over_ranks(model, case, ranks, computing)
            except (NotImplementedError, TypeError, ValueError) as error:
                return "late", f"{name}, {ranks} ranks: {_line(error)}", worst
            except Exception as error:
                return "crashed", f"{name}, {ranks} ranks: {_line(error)}", worst
            where, error = worst_of(distances(ours, true))
            worst = max(worst, error)
            if not error <= tolerance:
                return "wrong", f"{name}, {ranks} ranks: {where} by {error:.0e}", error
    return "right", f"{worst:.0e}", worst


def _seen(model: Any) -> list[Any]:
    """All objects that its modules hold, and how many entries those have that are dictionaries:
    hooks, parameters, modules."""
    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        for key, value in vars(module).items():
            found.append((key, id(value), len(value) if isinstance(value, dict) else 0))
    found += [parameter._version for parameter in model.parameters()]
    return found


def _line(error: Exception, kind: str | None = None) -> str:
    text = " ".join(str(error).split())
    return text if kind is not None else f"{type(error).__name__}: {text}"


def _over_ranks(model: Any, case: Case, ranks: int, computing: Computing) -> Answer:
    copies = [copy.deepcopy(model) for _ in range(ranks)]  # deepcopy is not for threads

    def body(group: Group) -> tuple[float, Tensor, dict[str, Tensor]]:
        mine = longspan.parallelize(copies[group.rank()], group)
        local, wanted, count = share_of(mine, case, group)
        with computing():
            logits = mine(**local).logits
            loss = loss_of(logits, wanted, count)
            loss.backward()
        whole = longspan.unshard(logits.detach(), local)
        return float(loss.detach()), whole, gradients_of(mine)

    results = run_ranks(ranks, body, timeout=60)
    gradients: dict[str, Tensor] = {}
    for _, _, some in results:
        for name, gradient in some.items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient
    whole = results[0][1]
    total = sum(loss for loss, _, _ in results)
    return Answer(total, [whole[d.row, d.begin : d.end] for d in case.documents], gradients)


def count(verdicts: Sequence[Verdict], word: str) -> int:
    return sum(verdict.word == word for verdict in verdicts)
