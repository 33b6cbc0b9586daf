"""What all ranks of a group hold, joined on one axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor

import longspan
from longspan.compat.nemo._batch import check_axis, tensor_at

# Torch's own, to see whether users have put something in their place.
_ALL_GATHER = torch.distributed.nn.functional.all_gather
_PLAIN_ALL_GATHER = dist.all_gather


def gather(who: str, tensor: Tensor, dim: int, group: Any) -> Tensor:
    """All ranks' tensors, which are of one shape; backward sums over the ranks."""
    axis = check_axis(who, tensor_at(who, "tensor", tensor), dim)
    ranks = longspan.Group.of(group)
    sizes = [tensor.shape[axis]] * ranks.size()
    return longspan.comm.all_gather_tokens(tensor, axis=axis, sizes=sizes, group=ranks)


def gather_activations(who: str, tensor: Tensor, dim: int, group: Any) -> Tensor:
    """`gather`, or what `torch.distributed.nn.functional.all_gather` was replaced by."""
    replaced: Any = torch.distributed.nn.functional.all_gather
    if replaced is _ALL_GATHER:
        return gather(who, tensor, dim, group)
    axis = check_axis(who, tensor_at(who, "tensor", tensor), dim)
    return torch.cat(list(replaced(tensor.contiguous(), group=group)), dim=axis)


def gather_metadata(who: str, tensor: Tensor, dim: int, group: Any, runtime: Any) -> Tensor:
    """`gather` without gradient, or by what `runtime.all_gather` was replaced by."""
    axis = check_axis(who, tensor_at(who, "tensor", tensor), dim)
    replaced: Any = getattr(runtime, "all_gather", _PLAIN_ALL_GATHER)
    if replaced is _PLAIN_ALL_GATHER:
        return gather(who, tensor.detach(), axis, group)
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(int(runtime.get_world_size(group=group)))]
    replaced(parts, mine, group=group)
    return torch.cat(parts, dim=axis)
