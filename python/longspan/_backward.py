"""What comes back through a model: the gradients of what its modules were given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from longspan._tracing import tensors_in
from longspan._walking import walked

#: Numbers of parameters whose gradients are looked at, the small ones: routers, gates and norms.
_SMALL, _TOGETHER = 1 << 20, 1 << 26


@dataclass
class Gradients:
    """Of one backward pass."""

    inputs: dict[str, Tensor]  #: of what modules were given, by name in the order of their calls
    parameters: dict[str, Tensor]


def backward_of(
    model: nn.Module, rows: Callable[[], Tensor], tokens: int, scale: float
) -> Gradients:
    """Of one number that is a sum over the rows of an answer, `scale` times; with 0 only what
    modules add in backward is left. Gradients of users stay as they are."""
    held = _small_parameters(model)
    with torch.enable_grad(), _inputs_kept(model, tokens) as seen:
        out = rows()
        random = torch.Generator().manual_seed(5)
        upstream = scale * torch.randn(out.shape, generator=random)
        wanted = [*seen.values(), *held.values()]
        found = torch.autograd.grad(out, wanted, upstream.to(out), allow_unused=True)
    named = {
        name: torch.zeros_like(value) if gradient is None else gradient.detach()
        for (name, value), gradient in zip((*seen.items(), *held.items()), found, strict=True)
    }
    return Gradients({name: named[name] for name in seen}, {name: named[name] for name in held})


@contextlib.contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """But without dropout, and without checkpoints, which know backward of everything only. Whoever
    calls this keeps the modes of modules."""
    again = [m for _, m in walked(model) if vars(m).get("gradient_checkpointing") is True]
    model.train()
    for _, module in walked(model):
        if isinstance(module, _DropoutNd):
            module.training = False
    try:
        for module in again:
            vars(module)["gradient_checkpointing"] = False
        yield
    finally:
        for module in again:
            vars(module)["gradient_checkpointing"] = True


def _small_parameters(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    together = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        if parameter.requires_grad and size <= _SMALL and together + size <= _TOGETHER:
            found[name] = parameter
            together += size
    return found


@contextlib.contextmanager
def _inputs_kept(model: nn.Module, tokens: int) -> Iterator[dict[str, Tensor]]:
    """What modules are given that has a gradient and an entry for each token, once. Embeddings
    that learn nothing are where it ends."""
    seen: dict[str, Tensor] = {}
    known: set[int] = set()
    handles = []

    def keep(who: str) -> Callable[..., None]:
        def hook(_: nn.Module, *given: object) -> None:
            for __, value in tensors_in(given, ""):
                if value.requires_grad and tokens in value.shape and id(value) not in known:
                    known.add(id(value))
                    seen.setdefault(who, value)

        return hook

    def begin(_: nn.Module, __: object, out: object) -> None:
        if isinstance(out, Tensor) and not out.requires_grad:
            out.requires_grad_()

    for name, module in walked(model):
        kind = type(module).__name__
        who = f"'{name}' ({kind})" if name else kind
        handles.append(module.register_forward_pre_hook(keep(who), with_kwargs=True))
        if isinstance(module, nn.Embedding):
            handles.append(module.register_forward_hook(begin))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
