"""What every module of a model took and gave in one call, and which module is to blame
where two calls differ."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Call:
    """One call of a module: its tensors, by where they stood."""

    name: str
    kind: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"'{self.name}' ({self.kind})" if self.name else self.kind


@dataclass
class Trace:
    """The calls of one forward pass, in the order in which they ended."""

    calls: list[Call] = field(default_factory=list)
    #: Those that have begun and not ended: after an error, whose it was.
    open: list[Call] = field(default_factory=list)


@contextlib.contextmanager
def traced(model: nn.Module) -> Iterator[Trace]:
    """Inside, calls of the model are noted."""
    trace = Trace()
    handles = []

    def begin(name: str) -> Any:
        def hook(module: nn.Module, in_order: tuple[Any, ...], named: dict[str, Any]) -> None:
            found = dict(tensors_in(in_order, "")) | dict(tensors_in(named, ""))
            trace.open.append(Call(name, type(module).__name__, _kept(found)))

        return hook

    def end(_: nn.Module, __: Any, output: Any) -> None:
        call = trace.open.pop()
        call.outputs = _kept(dict(tensors_in(output, "")))
        trace.calls.append(call)

    for name, module in model.named_modules():
        # First in line: what other hooks raise is then said of the right module.
        handles += [
            module.register_forward_pre_hook(begin(name), with_kwargs=True, prepend=True),
            module.register_forward_hook(end),
        ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Blame:
    """A module whose outputs differ where its inputs do not."""

    name: str
    kind: str
    tokens: tuple[int, ...]
    by: float

    def __str__(self) -> str:
        return f"'{self.name}' ({self.kind})" if self.name else self.kind


@dataclass(frozen=True)
class Pairing:
    """Which token of one call is which of another, and how equal their values must be.
    Tokens of the first in the order of the second; those left out are not compared."""

    tokens: int  #: of the first call
    other_tokens: int
    first: Tensor
    second: Tensor
    tolerance: float

    @staticmethod
    def same(tokens: int, tolerance: float) -> Pairing:
        every = torch.arange(tokens)
        return Pairing(tokens, tokens, every, every, tolerance)

    def differing(self, one: Tensor, two: Tensor) -> Tensor | None:
        """By how much the values of each compared token differ, relative to the largest of
        the tensor; None where there is no axis of tokens in both."""
        axis = _axis(one, self.tokens)
        if axis is None or axis != _axis(two, self.other_tokens) or one.dim() != two.dim():
            return None
        one = _by_token(one, axis)[self.first.to(one.device)]
        two = _by_token(two, axis)[self.second.to(two.device)]
        if one.shape != two.shape:
            return None
        return _difference(one, two)


def differences(
    one: Trace, two: Trace, pairing: Pairing
) -> Iterator[tuple[Call, Tensor | None, Tensor]]:
    """For every call whose outputs can be compared: by how much its inputs and outputs
    differ at each compared token. None stands for inputs that differ as a whole."""
    others = dict(_numbered(two.calls))
    for key, call in _numbered(one.calls):
        other = others.get(key)
        if other is None:
            continue
        outputs = [
            found
            for where, value in call.outputs.items()
            if where in other.outputs
            # Whole numbers are choices and places; what came of them shows elsewhere.
            and value.is_floating_point()
            and (found := pairing.differing(value, other.outputs[where])) is not None
        ]
        if not outputs:
            continue
        yield call, _inputs(call, other, pairing), torch.stack(outputs).amax(0)


def guilty(
    one: Trace, two: Trace, pairing: Pairing, *, apart: bool, spare: Iterable[str] = ()
) -> Blame | None:
    """The first module whose outputs differ where its inputs do not. With `apart` tokens
    have nothing to do with each other, and differing inputs excuse their own tokens only; else
    any difference of the inputs excuses the call. Modules under a name in `spare` have
    somebody else to answer for them."""
    spared = tuple(spare)
    for call, before, after in differences(one, two, pairing):
        if before is None or any(_under(call.name, name) for name in spared):
            continue
        moved = after > pairing.tolerance
        excused = before > pairing.tolerance
        wrong = moved & ~excused if apart else moved & ~excused.any()
        if wrong.any():
            tokens = pairing.first[wrong.nonzero().flatten().cpu()].tolist()
            return Blame(call.name, call.kind, tuple(tokens), float(after[wrong].max()))
    return None


def _inputs(call: Call, other: Call, pairing: Pairing) -> Tensor | None:
    moved = torch.zeros(len(pairing.first))
    for where, value in call.inputs.items():
        theirs = other.inputs.get(where)
        if theirs is None:
            continue
        found = pairing.differing(value, theirs)
        if found is not None:
            moved = torch.maximum(moved, found.cpu())
        elif _differs_whole(value, theirs, pairing.tokens):
            return None
    return moved


def _differs_whole(one: Tensor, two: Tensor, tokens: int) -> bool:
    """Of tensors that have no axis of tokens."""
    if one.shape != two.shape or _axes(one, tokens):
        return False
    return bool((_difference(one.reshape(1, -1), two.reshape(1, -1)) > 1e-9).any())


def _numbered(calls: Sequence[Call]) -> Iterator[tuple[tuple[str, int], Call]]:
    """Calls by name, and the how-manieth of it."""
    seen: Counter[str] = Counter()
    for call in calls:
        yield (call.name, seen[call.name]), call
        seen[call.name] += 1


def _difference(one: Tensor, two: Tensor) -> Tensor:
    """Of each row, relative to the largest value of the first tensor."""
    equal = (one == two) | (one.isnan() & two.isnan() if one.is_floating_point() else one == two)
    one, two = one.double(), two.double()
    finite = one[one.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    apart = torch.where(equal, 0.0, (one - two).abs()).nan_to_num(nan=torch.inf)
    return (apart.flatten(1).amax(1) if apart.numel() else apart.new_zeros(len(apart))).cpu() / (
        size or 1.0
    )


def _axes(value: Tensor, tokens: int) -> int:
    return sum(size == tokens for size in value.shape)


def _axis(value: Tensor, tokens: int) -> int | None:
    """Where the tokens lie, if that is plain."""
    if _axes(value, tokens) != 1:
        return None
    return next(axis for axis, size in enumerate(value.shape) if size == tokens)


def _by_token(value: Tensor, axis: int) -> Tensor:
    return value.movedim(axis, 0)


def _under(name: str, above: str) -> bool:
    return name == above or name.startswith(above + ".")


def _kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies: models write into tensors that they took and gave."""
    return {where: value.detach().clone() for where, value in tensors.items()}


def tensors_in(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    """Those in nested arguments, by where they stand."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield where, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from tensors_in(one, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from tensors_in(one, f"{where}.{place}")
