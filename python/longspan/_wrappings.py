"""What DistributedDataParallel and fully_shard do to gradients in backward."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longspan._group import Group


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Gradients are summed over `ranks` (of the world) and divided by their number,
    or by what the user set instead."""

    who: str
    ranks: frozenset[int]
    divisor: float | None = None  # None: the number of ranks


@dataclasses.dataclass(frozen=True)
class Trained:
    """A parameter that gets gradients. With fully_shard it is the shard, which has
    the gradient, also while the module shows the whole parameter."""

    name: str
    parameter: nn.Parameter
    reduction: Reduction | None  # None: nobody touches its gradient


def trained_parameters(model: nn.Module) -> list[Trained]:
    """Every parameter that gets gradients, once, in the order of the names."""
    known = {id(p): found for found in _managed(model) for p in found.seen_as}
    trained: dict[int, Trained] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        found = known.get(id(parameter))
        held = parameter if found is None else found.parameter
        reduction = None if found is None else found.reduction
        trained.setdefault(id(held), Trained(name, held, reduction))
    return sorted(trained.values(), key=lambda one: one.name)


def world_ranks(group: Group) -> frozenset[int] | None:
    """The ranks of the world that are in a group; None where torch.distributed
    does not know."""
    if not dist.is_initialized():
        return None
    if group.size() == 1:
        return frozenset([dist.get_rank()])
    try:
        return frozenset(dist.get_process_group_ranks(process_group_of(group)))
    except (RuntimeError, LookupError, ValueError):
        return None


def process_group_of(group: Group) -> Any:
    """Torch's group behind one of more than one rank."""
    c10d: Any = torch._C._distributed_c10d
    return c10d._resolve_process_group(group.name)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    # A model that has one has imported its module; we would pay for it at every start.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def holds_shards(module: nn.Module) -> bool:
    """Whether any parameter in it is one."""
    return any(map(is_sharded, module.parameters()))


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether fully_shard went over it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; writing there writes the tensor."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


@dataclasses.dataclass(frozen=True)
class _Managed:
    parameter: nn.Parameter
    seen_as: tuple[nn.Parameter, ...]  # what named_parameters may show for it
    reduction: Reduction


def _managed(model: nn.Module) -> Iterator[_Managed]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        who = f"`{name}`" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            yield from _managed_by_ddp(module, who)
        elif is_fully_sharded(module):
            yield from _managed_by_fully_shard(module, who)
        elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"{who} is a FullyShardedDataParallel, whose flat parameters hide the "
                "gradients; use torch.distributed.fsdp.fully_shard"
            )
        elif _is_replicated(module):
            raise ValueError(
                f"{who} went through the composable replicate, which does not say what it "
                "reduces; use DistributedDataParallel or fully_shard"
            )


def _managed_by_ddp(module: Any, who: str) -> Iterator[_Managed]:
    if not module.require_backward_grad_sync:
        raise ValueError(
            f"{who} is inside of no_sync, where DistributedDataParallel leaves gradients "
            "alone; call it after the last backward, which must be outside"
        )
    for hook, _ in module._comm_hooks:
        if not str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
            raise ValueError(
                f"{who} has the communication hook {getattr(hook, '__qualname__', hook)}, "
                "and only torch's own are known to average; reduce without it"
            )
    reduction = Reduction(
        "DistributedDataParallel",
        frozenset(dist.get_process_group_ranks(module.process_group)),
    )
    delayed = {id(p) for p in module._delay_all_reduce_params}
    for name, parameter in module.module.named_parameters(remove_duplicate=False):
        if name not in module.parameters_to_ignore or id(parameter) in delayed:
            yield _Managed(parameter, (parameter,), reduction)


def _managed_by_fully_shard(module: Any, who: str) -> Iterator[_Managed]:
    state = module._get_fsdp_state()
    # Since torch 2.12 there may be several groups of parameters.
    several = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if several is None else several:
        if group is None:
            continue
        if not (group.reduce_grads and group.all_reduce_grads):
            raise ValueError(
                f"fully_shard was told not to reduce the gradients of {who}; call "
                "set_requires_gradient_sync(True) before the last backward of a step"
            )
        if group._all_reduce_hook is not None:
            raise ValueError(
                f"fully_shard got an all-reduce hook for {who}, which may do anything to "
                "gradients; remove it: what it was for is done here"
            )
        ranks = frozenset(group.mesh_info.mesh.mesh.flatten().tolist())
        reduction = Reduction("fully_shard", ranks, group.gradient_divide_factor)
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            shown = (one.sharded_param,) if whole is None else (one.sharded_param, whole)
            yield _Managed(one.sharded_param, shown, reduction)


def _is_replicated(module: nn.Module) -> bool:
    contract = sys.modules.get("torch.distributed._composable.contract")
    registry = None if contract is None else contract._get_registry(module)
    return registry is not None and "replicate" in registry
