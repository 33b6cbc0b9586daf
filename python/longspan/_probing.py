"""Calls of a model with tokens of our choice, and how what came of them is compared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan._agreement import Agreement
from longspan._batch import Place, Reading, share
from longspan._group import Group
from longspan._local_batch import KEYWORD, LocalBatch
from longspan._lookups import rows_of
from longspan._models import LocalAttention, state_of
from longspan._recipes.recipe import NotSharded
from longspan._tracing import Blame, Call, Pairing, Trace, guilty, traced

#: Tokens of a call. A prime: no other axis of a model is as long.
TOKENS = 37
#: With scans: their functions are float32 throughout, and chunks of another length round
#: otherwise.
SCANNED = 10
#: Of gradients; eager attention of transformers has a float32 softmax.
GRADIENTS = 3e-4
#: Inside, random numbers are those of one seed.
Draws = Callable[[], contextlib.AbstractContextManager[Any]]


class Refused(Exception):
    """What a model does that cutting its tokens would change; begins with the module."""


class _Alone(LocalAttention):
    """Attention in which every token sees itself only. What it returns depends on
    queries and keys too, so that nobody can hide in them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(groups, dim=1) for one in (k, v))
        scale = options.get("scale") or q.shape[-1] ** -0.5
        gate: Tensor = torch.sigmoid((q * k).sum(-1, keepdim=True) * scale)
        return v * gate


@dataclasses.dataclass(frozen=True)
class Probe:
    """Tokens for one call, as the test wants them."""

    ids: Tensor
    positions: Tensor

    @staticmethod
    def of(model: Any, tokens: int, seed: int) -> Probe:
        random = torch.Generator().manual_seed(seed)
        ids = ordinary_ids(model)
        chosen = torch.randint(len(ids), (1, tokens), generator=random)
        return Probe(ids[chosen], torch.arange(tokens)[None])


def ordinary_ids(model: Any) -> Tensor:
    """Ids that are no special tokens: models look for those."""
    config = model.config
    special: set[int] = set()
    for one in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        for key, value in vars(one).items():
            if key.endswith(("_id", "_ids", "_index", "_idx")):
                values = value if isinstance(value, (list, tuple)) else [value]
                special |= {v for v in values if isinstance(v, int)}
    words = getattr(config.get_text_config(), "vocab_size", None)  # that have a logit
    size = rows_of(model.get_input_embeddings()) or words or 1
    words = words or size
    usual = [i for i in range(min(size, words, 4096)) if i not in special]
    return torch.tensor(usual or [0])


def ids_of(twin: Any, tokens: int, seed: int) -> Tensor:
    return Probe.of(twin, tokens, seed).ids


def with_others(model: Any, call: Probe, other: Tensor, tokens: Tensor) -> Probe:
    """With other ids at some tokens."""
    ids = call.ids.clone()
    new = other[0, tokens]
    ids[0, tokens] = torch.where(new == ids[0, tokens], ordinary_ids(model)[0], new)
    return Probe(ids, call.positions)


class Run:
    """A forward pass without gradients: from outside, or with every module watched. Each is
    done once, when it is asked for."""

    def __init__(
        self,
        model: Any,
        given: Mapping[str, Any],
        draws: Draws = contextlib.nullcontext,
    ) -> None:
        self._model = model
        self._given = given
        self._draws = draws

    @functools.cached_property
    def outside(self) -> Trace:
        """The call of the whole model alone."""
        try:
            with torch.no_grad(), self._draws():
                out = self._model(**self._given)
        except Exception:
            self.inside  # noqa: B018  (raises, with the name of the module)
            raise
        inputs = {k: v for k, v in self._given.items() if isinstance(v, Tensor)}
        rows = {"rows": vectors_of(self._model, out).detach()}
        return Trace([Call("", type(self._model).__name__, inputs, rows)])

    @functools.cached_property
    def inside(self) -> Trace:
        with torch.no_grad(), self._draws():
            return watch_call(self._model, self._given)

    def blame(
        self,
        other: Run,
        pairing: Pairing,
        *,
        apart: bool,
        spare: Sequence[str] = (),
        watched: bool = False,
    ) -> Blame | None:
        """Who is to blame where two runs differ: a module, or else the whole model."""
        whole = guilty(self.outside, other.outside, pairing, apart=apart)
        if whole is None and not watched:
            return None
        return guilty(self.inside, other.inside, pairing, apart=apart, spare=spare) or whole


def call_apart(
    model: Any,
    call: Probe,
    draws: Draws = contextlib.nullcontext,
) -> Run:
    """One forward pass in which every token is a document."""
    return Run(model, arguments_of(model, call), draws)


def arguments_of(model: Any, call: Probe) -> dict[str, Any]:
    """What the model is called with for that."""
    batch = {
        "input_ids": call.ids,
        "position_ids": call.positions,
        "seq_lens": torch.ones(1, call.ids.shape[1], dtype=torch.int64),
    }
    local = share_of(model, batch)
    state = state_of("parallelize", model)
    local[KEYWORD] = _Alone(local.cut, state.group, state.strategy, state.sights)
    device = next(model.parameters()).device
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in local.items()}


def share_of(model: Any, batch: Mapping[str, Any]) -> LocalBatch:
    """What one rank gets of it."""
    state = state_of("parallelize", model)
    nobody = Agreement("parallelize", None)
    alone = Place.in_group(Group.solo())
    reading = Reading(who="parallelize")
    return share(batch, alone, nobody, state, reading, "contiguous-rows")


def watch_call(model: Any, arguments: Mapping[str, Any]) -> Trace:
    """A call with every module watched; Refused, with the module's name, where it raises."""
    with traced(model) as trace:
        try:
            model(**arguments)
        except Exception as error:
            raise Refused(_stumbled(trace, error, KEYWORD in arguments)) from error
    return trace


def _stumbled(trace: Trace, error: Exception, cut: bool) -> str:
    who = str(trace.open[-1]) if trace.open else "the model"
    if isinstance(error, NotSharded):
        return (
            f"{who} is not handed the keyword arguments of the model's call, so it cannot be told "
            f"which tokens of the batch it has"
        )
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not cut:
        return (
            f"{who} does not run in a twin, cut or not: {said}; pass proof=... a small model of "
            f"the same classes on the CPU, or proof=False to go without"
        )
    return f"{who} does not run on a cut batch: {said}"


def tokens_in_words(tokens: Any) -> str:
    numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if len(numbers) == 1:
        return f"token {numbers[0]}"
    shown = ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")
    return f"tokens {shown}"


def vectors_of(model: Any, out: Any) -> Tensor:
    """One vector a token: logits, or what a decoder without a head gives."""
    found = getattr(out, "logits", None)
    if found is None:
        found = getattr(out, "last_hidden_state", None)
    if not isinstance(found, Tensor) or found.dim() != 3:
        raise Refused(f"{type(model).__name__} gives neither logits nor last_hidden_state")
    return found


def loss_of(rows: Tensor, targets: Tensor, count: int) -> Tensor:
    """A part of the mean, in float64. Decoders without a head have few channels to name."""
    named = torch.where(targets == -100, targets, targets % rows.shape[-1])
    return nn.functional.cross_entropy(rows, named, ignore_index=-100, reduction="sum") / count


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def off_by(
    true: Mapping[str, Tensor], ours: Mapping[str, Tensor], rounding: float
) -> tuple[str, float] | None:
    """The parameter whose gradient is another, and by how much: the last, for gradients come
    from the end."""
    largest = max((float(g.abs().max()) for g in true.values()), default=1.0)
    wrong = None
    for key, gradient in true.items():
        other = ours.get(key, torch.zeros_like(gradient))
        # Of gradients that cancel out nothing but rounding is left.
        least = max(float(gradient.abs().max()), 1e-4 * largest)
        error = float((other - gradient).abs().max()) / least
        if not error <= rounding * GRADIENTS:
            wrong = key, error
    return wrong
