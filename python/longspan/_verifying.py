"""What `longspan verify` finds: whether what was measured of a model over ranks is the model
itself, as a verdict with the rows of a table and pictures."""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longspan import _C
from longspan._drawing import draw
from longspan._group import Group
from longspan._measuring import (
    CANCELLED,
    Found,
    NotRun,
    Refused,
    Tell,
    Truth,
    Unfit,
    Wishes,
    attending_layers,
    case_for,
    cast,
    lengths_of,
    line_of,
    over_ranks,
    peak_of,
    scans_by_token,
)
from longspan._models import Recurrence
from longspan._rulers import Case, distances, worst_of
from longspan.proof import prove

#: The tests of a proof, in their order.
ANSWERS = ("numbering", "isolation", "order", "ruler")
#: What an error may be where the plain model makes none: roundings of a step.
_FLOORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
#: Where a model does not run in float64 throughout, nobody knows its own rounding; and in float64
#: ranks and the plain model cast nearly the same numbers to float32. What is wrong is off by 1e-2.
_NEARLY = 3e-5
#: Scores are float32; keys this near to each other, relative to the score, may trade places.
_NEAR = 1e-5
#: Batches that are drawn until no two scores are that near.
_DRAWS = 3


@dataclass(frozen=True)
class Row:
    """One line of the table: what was found, against what; `holds` is None where it is told
    and not judged."""

    what: str
    found: str
    allowed: str = ""
    holds: bool | None = None


@dataclass(frozen=True)
class Verdict:
    """right, wrong, refused (by `parallelize`), or not made, where transformers cannot build or
    run the model itself."""

    model: str
    word: str
    why: str = ""
    kind: str = ""  #: the class
    seconds: float = 0.0
    proof: dict[str, bool] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    #: For machines, under the names of the rows.
    numbers: dict[str, Any] = field(default_factory=dict)
    #: Worst gradient of each layer: (layer, ours, the plain model's own).
    layers: tuple[tuple[str, float, float], ...] = ()
    #: Title to SVG.
    pictures: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For machines: plain dictionaries, lists and numbers; without pictures."""
        told = dataclasses.asdict(self)
        del told["pictures"], told["rows"], told["layers"]
        told["layers"] = [
            {"layer": layer, "error": ours, "plain_error": plain}
            for layer, ours, plain in self.layers
        ]
        told["checks"] = {row.what: row.holds for row in self.rows if row.holds is not None}
        return told


def verify(
    name: str,
    make: Callable[[int], Any],
    wishes: Wishes,
    *,
    group: Group | None = None,
    tell: Tell = lambda _: None,
) -> Verdict:
    """What is found about the model that `make` makes for documents of so many tokens: over
    threads, or over the ranks of a group, on all of which it is called, and rank 0 judges."""
    begin = time.monotonic()
    try:
        tell("making the model")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make(max(lengths_of(wishes.tokens, wishes.documents, 0)))
    except Unfit:
        raise
    except Exception as error:  # whatever constructors raise
        return Verdict(name, "not made", line_of(error), seconds=time.monotonic() - begin)
    kind = type(model).__name__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _verified(name, model, wishes, group, tell)
    except Refused as refusal:
        found = Verdict(name, "refused", str(refusal), proof=refusal.proof)
    except Unfit:
        raise
    except NotRun as error:
        found = Verdict(name, "not made", str(error))
    except Exception as error:
        found = Verdict(name, "wrong", f"it ended with {line_of(error)}")
    return dataclasses.replace(found, kind=kind, seconds=time.monotonic() - begin)


def _verified(name: str, model: Any, wishes: Wishes, group: Group | None, tell: Tell) -> Verdict:
    tell("the proof")
    proof = prove(model)
    answers = {answer: answer in proof.shown for answer in ANSWERS}
    if not proof:
        raise Refused(str(proof.refusal), answers)
    if wishes.fewer is not None and scans_by_token(model):
        wishes = dataclasses.replace(wishes, tokens=wishes.fewer)
    cast(model, wishes.dtype)
    for draw_number in range(_DRAWS):
        case = case_for(model, wishes, draw_number)
        truth = Truth.of(model, case, wishes.dtype, tell)
        tell(f"{wishes.ranks} ranks")
        found = over_ranks(model, case, wishes, group, truth)
        if found.slots is None or found.slots.differ == 0 or not found.slots.near <= _NEAR:
            break  # else two scores were as near as rounding, and gradients are others there
        if wishes.dtype == torch.bfloat16:
            break  # there they always are
    peak = peak_of(model, case, wishes)
    return _judged(name, found, truth, case, wishes, answers, draw_number, peak)


# ---- Judging.


def _judged(
    name: str,
    found: Found,
    truth: Truth,
    case: Case,
    wishes: Wishes,
    answers: dict[str, bool],
    redrawn: int,
    peak: int | None,
) -> Verdict:
    errors = distances(found.answer, truth.answer, CANCELLED)
    loss_error = abs(found.answer.loss - truth.answer.loss) / abs(truth.answer.loss or 1.0)
    floor = _FLOORS[wishes.dtype] if truth.measured else _NEARLY
    logits, plain_logits = errors.pop("logits"), truth.errors["logits"]
    plain = {key: value for key, value in truth.errors.items() if key != "logits"}
    where, gradient = worst_of(errors)
    plain_gradient = worst_of(plain)[1]
    lengths = [d.end - d.begin for d in case.documents]
    named = "" if len(lengths) == wishes.documents else " (its positions end)"
    if wishes.tokens == wishes.fewer:
        named += " (it scans token by token)"
    rows = [
        Row(
            "batch",
            f"{wishes.tokens} tokens, {len(lengths)} documents of {min(lengths)} to "
            f"{max(lengths)}{named}",
            f"{len(found.sent)} ranks, {_type(wishes.dtype)}",
        ),
        # The errors of a loss cancel out by chance; it is known as well as its logits are.
        _bounded(
            "loss",
            f"{found.answer.loss:.6f}, off by",
            loss_error,
            max(truth.loss_error, plain_logits),
            floor,
        ),
        _bounded("logits", "off by", logits, plain_logits, floor),
        _bounded("worst gradient", "off by", gradient, plain_gradient, floor, f" ({where})"),
    ]
    like = truth.answer if truth.throughout else truth.plain
    nearest = worst_of(distances(found.answer, like, CANCELLED))[1]
    # Where experts or keys are chosen otherwise in float64 throughout, only this is strict.
    strict = wishes.dtype == torch.float64
    rows.append(
        Row(
            "against the plain model",
            f"logits and gradients off by {nearest:.1e}"
            + (", all in float64" if truth.throughout else ""),
            f"{_NEARLY:.1e}" if strict else "",
            nearest <= _NEARLY if strict else None,
        )
    )
    for what, (moved, most) in found.leaks.items():
        rows.append(
            Row(
                f"leaks: {what}",
                f"{moved} tokens" + (f", moved by {most:.0e}" if moved else ""),
                "0",
                moved == 0,
            )
        )
    if found.slots is not None:
        # States that are rounded to bfloat16 have other scores in every layer.
        slots, exact = found.slots, wishes.dtype != torch.bfloat16
        near = f", {slots.near:.0e} from the k-th score" if slots.differ else ""
        again = f"; batch {redrawn + 1} of those drawn" if redrawn else ""
        rows.append(
            Row(
                "selected slots",
                f"{slots.differ} of {slots.of:,} differ{near}{again}",
                f"within {_NEAR:.0e}" if exact else "",
                slots.near <= _NEAR if exact else None,
            )
        )
    once = len(attending_layers(found.layers))
    several = f"{found.attended} call{'s' * (found.attended != 1)}"
    times = f" for {several}" if found.attended != once else ""
    rows += [
        Row(
            "bytes sent",
            f"{sum(found.sent):,}",
            f"{sum(found.predicted):,} predicted{times}",
            found.sent == found.predicted,
        ),
        Row(
            "peak memory a rank",
            "not known" if peak is None else f"{peak / 1e6:.1f} MB by estimate",
        ),
        Row("time of a step", f"{found.seconds:.2f} s"),
    ]
    wrong = [row for row in rows if row.holds is False]
    why = "; ".join(f"{row.what}: {row.found}, allowed {row.allowed}" for row in wrong)
    return Verdict(
        name,
        "wrong" if wrong else "right",
        why if wrong else f"{gradient:.0e}",
        proof=answers,
        rows=tuple(rows),
        numbers={
            "loss": found.answer.loss,
            "loss_error": loss_error,
            "logits_error": logits,
            "gradient_error": gradient,
            "gradient": where,
            "error_to_plain": nearest,
            "plain": {
                "loss_error": truth.loss_error,
                "logits_error": plain_logits,
                "gradient_error": plain_gradient,
                "measured": truth.measured,
            },
            "leaks": {what: moved for what, (moved, _) in found.leaks.items()},
            "slots": None if found.slots is None else dataclasses.asdict(found.slots),
            "sent_bytes": found.sent,
            "predicted_bytes": found.predicted,
            "peak_bytes": peak,
            "step_seconds": found.seconds,
        },
        layers=_by_layer(errors, plain),
        pictures=_pictures(found, wishes.dtype),
    )


def _bounded(
    what: str, text: str, error: float, plain: float, floor: float, where: str = ""
) -> Row:
    allowed = max(2 * plain, floor)
    return Row(what, f"{text} {error:.1e}{where}", f"{allowed:.1e}", error <= allowed)


def _by_layer(
    ours: dict[str, float], plain: dict[str, float]
) -> tuple[tuple[str, float, float], ...]:
    """The worst gradient of each layer; what is in none goes by its own name."""
    found: dict[str, tuple[float, float]] = {}
    for name, error in ours.items():
        layer = re.search(r"\b(layers|h|blocks|layer)\.(\d+)\.", name)
        key = f"layer {layer[2]}" if layer else name.removesuffix(".weight").split(".")[-1]
        one, other = found.get(key, (0.0, 0.0))
        found[key] = max(one, error), max(other, plain.get(name, 0.0))
    return tuple((key, one, other) for key, (one, other) in found.items())


def _pictures(found: Found, dtype: torch.dtype) -> dict[str, str]:
    """Who owns, sees and computes what, in each kind of layer that there is; of layers with
    states the runs of documents, and what goes over the borders between them."""
    made: dict[str, str] = {}
    for cost in found.layers:
        layer = cost.layer
        masks = layer.masks(found.cut)
        if layer.recurrence is not None:
            title = _runs_of(layer.recurrence)
            if title not in made:
                made[title] = _drawn_runs(layer.recurrence, found.cut, masks, dtype).to_svg()
            continue
        sight = (
            "causal layers" if layer.window is None else f"layers with a window of {layer.window}"
        )
        title = f"Who owns, sees and computes what: {sight}"
        if title not in made:
            made[title] = draw(found.cut.ownership, masks[0]).to_svg()
    return made


def _runs_of(made: Recurrence) -> str:
    looks = f"layers with a convolution of {made.kernel} tokens"
    if made.transition is None:
        return f"Runs, and what is before them: {looks}"
    return (
        f"Runs and states: {looks} and states of {made.heads} x {made.rows} x {made.columns}, "
        f"each with a {made.transition} as transition"
    )


def _drawn_runs(
    made: Recurrence, cut: _C.Cut, masks: Sequence[_C.Mask], dtype: torch.dtype
) -> _C.Picture:
    return _C.draw_states(
        cut.ownership,
        masks,
        made.kernel - 1,
        made.channels * dtype.itemsize,
        *made.bytes_of_state(made.itemsize(dtype)),
        made.way(cut.ownership, masks, len(cut.packings)),
    )


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
