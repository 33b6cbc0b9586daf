"""Optimizers that would step on gradients which nobody summed.

A parallelized model on more than one rank has gradients of this rank's tokens alone (or their
mean, under wrappers that average) until `sum_gradients`. torch offers a look before the step of
every optimizer; ours is there while such a model is, and looks at its parameters only.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from longspan._gradients import is_summed
from longspan._walking import MARK
from longspan._wrappings import Trained, trained_parameters

#: Taken again when garbage is collected inside.
_lock = threading.RLock()
_guarded: dict[int, weakref.ref[nn.Module]] = {}
_handle: Any = None


def guard(model: nn.Module) -> None:
    """From now on optimizers refuse gradients of `model` that were not summed, while it is
    marked: not while it is paused."""
    global _handle
    with _lock:
        key = id(model)
        _guarded[key] = weakref.ref(model, lambda _: _forget(key))
        if _handle is None:
            _handle = register_optimizer_step_pre_hook(_before_step)


def unguard(state: Any) -> None:
    """Forgets the model with this mark; with the last one torch forgets us."""
    with _lock:
        for model in _models():
            if vars(model).get(MARK) is state:
                _forget(id(model))


def _forget(key: int) -> None:
    global _handle
    with _lock:
        _guarded.pop(key, None)
        if not _guarded and _handle is not None:
            _handle.remove()
            _handle = None


def _models() -> list[nn.Module]:
    with _lock:
        found = [reference() for reference in _guarded.values()]
    return [model for model in found if model is not None]


def guards() -> int:
    """How many models are looked after; 0 means that torch knows nothing of us."""
    with _lock:
        return 0 if _handle is None else len(_guarded)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():
        return None
    # A closure makes the gradients inside the step, which are looked at when it has.
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _looking_after(kwargs["closure"], optimizer)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _looking_after(args[1], optimizer), *args[2:]), kwargs
    _check(optimizer)
    return None


def _looking_after(
    closure: Callable[[], Any], optimizer: torch.optim.Optimizer
) -> Callable[[], Any]:
    @functools.wraps(closure)
    def looked() -> Any:
        loss = closure()
        _check(optimizer)
        return loss

    return looked


def _check(optimizer: torch.optim.Optimizer) -> None:
    stepped = {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
    for model in _models():
        state = vars(model).get(MARK)
        if state is None:  # paused
            continue
        trained = _trained(model)
        for one in trained:
            if id(one.parameter) not in stepped or _scaled_by_user(one):
                continue
            if not is_summed(one.parameter, trained):
                ranks = state.group.size()
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: the gradient of `{one.name}` is not that "
                    f"of the whole batch: the {ranks} ranks of {type(model).__name__} hold other "
                    "tokens each, and nobody summed their gradients after the last backward; add "
                    "the line longspan.sum_gradients(model, group) between backward and clipping "
                    "(also for DDP and FSDP2, which average), or, where you sum them yourself, "
                    "longspan.parallelize(..., check_steps=False)"
                )


def _trained(model: nn.Module) -> list[Trained]:
    try:
        return trained_parameters(model)
    except ValueError:  # wrappers that sum_gradients refuses by name
        named = model.named_parameters()
        return [Trained(name, p, None) for name, p in named if p.requires_grad]


def _scaled_by_user(one: Trained) -> bool:
    """With a divisor of the user's own fully_shard has summed, and sum_gradients would leave
    it alone."""
    return one.reduction is not None and one.reduction.divisor is not None
