"""The norm of gradients that lie whole on every rank or in shards, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan._arguments import check_flags, check_number, said, wrong
from longspan._gradients import is_dense, mark, mark_of, sparse_error, stacked, version_of
from longspan._group import Group
from longspan._wrappings import is_sharded, local_part, trained_parameters

_PARAMETERS = "a module, a tensor, or an iterable of tensors"


@torch.no_grad()
def clip_grad_norm(
    model: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    group: Any = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients so that their norm, as that of one vector, is at most
    `max_norm`, and returns the norm they had: a plain tensor, the same on every rank.

    Takes a module or parameters, after `sum_gradients`: plain gradients are then
    equal on all ranks of the group, and those of fully_shard (DTensors) are pieces
    of one, whose norms are combined over their mesh. With a `group`, gradients that
    were not summed are refused; `group` serves nothing else. Norms are taken in
    float32 for half types. `max_norm` inf only measures.
    """
    named = _named_gradients(model)
    for name, number in (("max_norm", max_norm), ("norm_type", norm_type)):
        # torch's own takes tensors of one number too.
        if not (isinstance(number, Tensor) and number.numel() == 1):
            check_number("clip_grad_norm", name, number)
    check_flags("clip_grad_norm", error_if_nonfinite=error_if_nonfinite)
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm: max_norm is {max_norm}; expected 0 or more")
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm: norm_type is {norm_type}; expected above 0, or inf")
    if group is not None and Group.of(group).size() > 1:
        for name, grad in named:
            if mark_of(grad) is None:
                raise ValueError(
                    f"clip_grad_norm: the gradient of `{name}` was not summed over the "
                    "group; call sum_gradients first, after the last backward"
                )
    for name, grad in named:
        if not is_dense(grad):
            raise sparse_error("clip_grad_norm", name)
    grads = [grad for _, grad in named]
    one_by_one = foreach is False
    total = _total_norm(grads, norm_type, one_by_one)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm: the norm of order {norm_type} of the gradients is {total.item()}; "
            "look for the first loss that is not finite, or pass error_if_nonfinite=False"
        )
    if max_norm < math.inf:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        marked = [grad for grad in grads if mark_of(grad) == version_of(grad)]
        for device, parts in _by_device([local_part(grad) for grad in grads]):
            here = factor.to(device)
            if one_by_one:
                for part in parts:
                    part.mul_(here)
            else:
                torch._foreach_mul_(parts, here)
        mark(marked)
    return total


def _named_gradients(given: nn.Module | Tensor | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Every gradient once, in an order that all ranks share."""
    if isinstance(given, nn.Module):
        try:
            named = [(one.name, one.parameter) for one in trained_parameters(given)]
        except ValueError as error:
            raise ValueError(f"clip_grad_norm: {error}") from None
    else:
        if not isinstance(given, (Tensor, Iterable)):
            raise wrong("clip_grad_norm", "model", given, _PARAMETERS)
        listed = [given] if isinstance(given, Tensor) else list(given)
        for one in listed:
            if not isinstance(one, Tensor):
                raise TypeError(
                    f"clip_grad_norm: a parameter is {said(one)}; expected {_PARAMETERS}"
                )
        unique = {id(p): (f"parameter {at}", p) for at, p in reversed([*enumerate(listed)])}
        named = list(reversed(unique.values()))
    return [(name, p.grad) for name, p in named if p.grad is not None]


def _total_norm(grads: Sequence[Tensor], order: float, one_by_one: bool) -> Tensor:
    if not grads:
        return torch.tensor(0.0)
    double = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    dtype = torch.float64 if double else torch.float32
    # Shards of one mesh and along the same of its axes are put together at once.
    pieces: dict[Any, list[Tensor]] = {}
    for grad in grads:
        mesh: Any = None
        axes: tuple[int, ...] = ()
        if is_sharded(grad):
            sharded: Any = grad
            if any(placement.is_partial() for placement in sharded.placements):
                grad = sharded.full_tensor()
            else:
                mesh = sharded.device_mesh
                axes = tuple(
                    a for a, placed in enumerate(sharded.placements) if not placed.is_replicate()
                )
        pieces.setdefault((mesh, axes) if axes else None, []).append(local_part(grad))
    norms = []
    for key, parts in pieces.items():
        norm = _norm(parts, order, dtype, one_by_one)
        if key is not None:
            mesh, axes = key
            for axis in axes:
                over = stacked(norm, Group.of(mesh.get_group(axis)))
                norm = torch.linalg.vector_norm(over, order)
        norms.append(norm.to(local_part(grads[0]).device))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return total


def _norm(parts: Sequence[Tensor], order: float, dtype: torch.dtype, one_by_one: bool) -> Tensor:
    """The norm of the gradients on this rank, as of one vector."""
    home = parts[0].device
    norms: list[Tensor] = []
    for _, some in _by_device([part for part in parts if part.numel()]):
        real = [part.abs() if part.is_complex() else part for part in some]
        if one_by_one:
            found = [torch.linalg.vector_norm(part, order, dtype=dtype) for part in real]
        else:
            found = list(torch._foreach_norm(real, order, dtype=dtype))
        norms.extend(norm.to(home) for norm in found)
    if not norms:
        return torch.zeros((), dtype=dtype, device=home)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return total


def _by_device(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.device, list[Tensor]]]:
    kinds: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device, []).append(tensor)
    yield from kinds.items()
