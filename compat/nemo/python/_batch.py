"""What the batch functions of the drop-in share.

Checks speak with the name of the public function that was called. None of these
helpers edits the caller's batch unless its name says so.
"""

from __future__ import annotations

import operator
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan import _C
from longspan.compat.nemo import _nemo
from longspan.compat.nemo._strict import is_strict

Batch = MutableMapping[str, Any]

PRIMARY_KEYS = ("inputs_embeds", "input_ids")

INT32_MAX = 2**31 - 1


class Mesh(Protocol):
    """All that is ever asked of a mesh; `get_local_rank` only if it exists."""

    def size(self) -> int: ...

    def get_group(self) -> Any: ...


class unchanged_on_error:
    """Puts the caller's batch back as it was if the body raises."""

    def __init__(self, who: str, batch: Batch) -> None:
        if not isinstance(batch, MutableMapping):
            raise TypeError(f"{who}: the batch is a {type(batch).__name__}; pass a dict")
        self._batch = batch
        self._before = dict(batch)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._batch.clear()
            self._batch.update(self._before)


# Meshes and ranks.


def submesh(device_mesh: Any, axis: str) -> Any:
    """The named axis of a device mesh, or None where there is no such axis."""
    if device_mesh is None:
        return None
    names = getattr(device_mesh, "mesh_dim_names", None) or ()
    return device_mesh[axis] if axis in names else None


def mesh_size(mesh: Any) -> int:
    """Ranks of a mesh; no mesh counts as 0."""
    return 0 if mesh is None else int(mesh.size())


def initialized(dist: Any) -> bool:
    """Whether the distributed runtime can answer."""
    available = getattr(dist, "is_available", None)
    return bool((available is None or available()) and dist.is_initialized())


def cp_rank(who: str, mesh: Any, dist: Any, *, ask_mesh: bool) -> int:
    """This process in the CP group.

    The process group answers if it can; then the mesh, where the reference's
    module asks it too; else the rank is 0.
    """
    rank = 0
    if initialized(dist):
        rank = rank_in(mesh.get_group(), dist)
    elif ask_mesh and hasattr(mesh, "get_local_rank"):
        rank = int(mesh.get_local_rank())
    elif isinstance(mesh.get_group(), _C.Group):
        rank = mesh.get_group().rank()
    return check_rank(who, rank, mesh_size(mesh))


def check_rank(who: str, rank: int, ranks: int) -> int:
    """`rank`, which must be one of the mesh's."""
    if not 0 <= rank < ranks:
        raise ValueError(
            f"{who}: this process is rank {rank} of {ranks} ranks; build the mesh over "
            "the process group that it asks, and call this in its ranks alone"
        )
    return rank


def cp_enabled(group: Any, dist: Any) -> bool:
    """The one rule for "there is someone to talk to"."""
    if isinstance(group, _C.Group):
        return group.size() > 1
    return group is not None and initialized(dist) and size_of(group, dist) > 1


def rank_in(group: Any, dist: Any) -> int:
    """This process in a group of ours or of torch."""
    return group.rank() if isinstance(group, _C.Group) else int(dist.get_rank(group=group))


def size_of(group: Any, dist: Any) -> int:
    """Ranks in a group of ours or of torch."""
    return group.size() if isinstance(group, _C.Group) else int(dist.get_world_size(group=group))


# Checks.


def integer(who: str, name: str, value: Any) -> int:
    """`value` as an int, or an error that names it."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{who}: `{name}` is {value!r}; expected an integer") from None


def tensor_at(who: str, name: str, value: Any) -> Tensor:
    """`value`, which must be a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{who}: `{name}` is a {type(value).__name__}; expected a tensor")
    return value


def required(who: str, batch: Batch, key: str) -> Any:
    """An entry of the batch that must be there."""
    if key not in batch:
        raise KeyError(f"{who}: the batch has no `{key}`; it has {sorted(map(str, batch))}")
    return batch[key]


def shape_of(tensor: Tensor) -> str:
    """A shape as messages print it: [2, 8]."""
    return str(list(tensor.shape))


def check_rows(who: str, name: str, value: Any, rows: int, length: int) -> Tensor:
    """A per-token tensor: [rows, length, ...]."""
    tensor = tensor_at(who, name, value)
    if tensor.dim() < 2 or tuple(tensor.shape[:2]) != (rows, length):
        raise ValueError(
            f"{who}: `{name}` is {shape_of(tensor)}; expected [{rows}, {length}] like the tokens"
        )
    return tensor


def check_row_matrix(who: str, name: str, value: Any, rows: int, length: int) -> Tensor:
    """A per-token tensor with one number for each token: [rows, length]."""
    tensor = check_rows(who, name, value, rows, length)
    if tensor.dim() != 2:
        raise ValueError(f"{who}: `{name}` is {shape_of(tensor)}; expected [{rows}, {length}]")
    return tensor


def is_integral(tensor: Tensor) -> bool:
    """Integers, without bool."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


# The parts of a batch of rows.


def primary_of(who: str, batch: Batch) -> tuple[str, Tensor]:
    """The one of `inputs_embeds` and `input_ids` that carries the tokens."""
    present = [key for key in PRIMARY_KEYS if batch.get(key) is not None]
    if len(present) != 1:
        raise AssertionError(
            f"{who}: exactly one of `inputs_embeds` and `input_ids` must be in "
            f"the batch, found {' and '.join(present) or 'neither'}"
        )
    key = present[0]
    tensor = tensor_at(who, key, batch[key])
    rank = 3 if key == "inputs_embeds" else 2
    if tensor.dim() != rank:
        expected = "[rows, tokens, width]" if rank == 3 else "[rows, tokens]"
        raise ValueError(f"{who}: `{key}` is {shape_of(tensor)}; expected {expected}")
    if key == "input_ids" and not is_integral(tensor):
        raise ValueError(
            f"{who}: `input_ids` is {tensor.dtype}; token ids are integers "
            "(embeddings go into `inputs_embeds`)"
        )
    if tensor.shape[0] == 0 or tensor.shape[1] == 0:
        raise ValueError(f"{who}: `{key}` is {shape_of(tensor)}: the batch is empty")
    return key, tensor


def drop_attention_mask(who: str, batch: Batch) -> Tensor | None:
    """Removes `attention_mask`; the pads it shows if no mask of pads is there."""
    mask = batch.pop("attention_mask", None)
    if mask is None or batch.get("padding_mask") is not None:
        return None
    pads, _ = pads_of_attention_mask(who, mask, look=False)
    return pads


def pads_of_attention_mask(who: str, mask: Any, *, look: bool) -> tuple[Tensor, bool]:
    """[rows, tokens] bool, True = pad; with `look`, whether there is any.

    A mask on a device is read at most once, to look and to check that what is
    added is not above 0.
    """
    tensor = tensor_at(who, "attention_mask", mask)
    if tensor.dim() not in (2, 4):
        raise ValueError(
            f"{who}: `attention_mask` is {shape_of(tensor)}; expected "
            "[rows, tokens] or [rows, 1, tokens, tokens], or pass `padding_mask`"
        )
    if tensor.dim() == 4 and (tensor.shape[2] != tensor.shape[3] or tensor.shape[1] == 0):
        raise ValueError(
            f"{who}: `attention_mask` is {shape_of(tensor)}; expected a square of "
            "queries and keys, or pass `padding_mask`"
        )
    checked = tensor.dim() == 4 and tensor.dtype != torch.bool and not is_strict()
    if checked and not tensor.is_floating_point():
        raise ValueError(
            f"{who}: `attention_mask` of rank 4 is {tensor.dtype}; 1 could mean "
            "attend or add 1, so use bool (True = attend) or floating (0 = attend)"
        )
    # Like the reference only the diagonal is read, also outside strict: what
    # else is in the mask (documents, groups) travels in other keys.
    pads = _nemo.pads_of_mask(tensor, True)
    facts = []
    if checked:
        facts.append((tensor.diagonal(dim1=-2, dim2=-1) > 0).any())
    if look:
        facts.append(pads.any())
    answers = torch.stack(facts).tolist() if facts else []
    if checked and answers[0]:
        raise ValueError(
            f"{who}: `attention_mask` of rank 4 is {tensor.dtype} and above 0 on its "
            "diagonal, but additive masks are <= 0 (0 = attend); if 1 means attend, use bool"
        )
    return pads, bool(answers[-1]) if look else True


def positions_into(who: str, batch: Batch, primary: Tensor, *, expand: bool) -> tuple[Tensor, int]:
    """Writes `position_ids` into the batch; with their sequence axis, the last one.

    Absent ones count from 0 in every row. `expand` turns [1, S] into [B, S].
    """
    rows, length = primary.shape[:2]
    given = batch.get("position_ids")
    if given is None:
        counted = torch.arange(length, device=primary.device)
        batch["position_ids"] = counted.expand(rows, length).contiguous()
        return batch["position_ids"], 1
    positions = tensor_at(who, "position_ids", given)
    axis = positions.dim() - 1
    if (
        positions.dim() == 0
        or positions.shape[axis] != length
        or (positions.dim() == 2 and positions.shape[0] not in (1, rows))
    ):
        raise ValueError(
            f"{who}: `position_ids` is {shape_of(positions)}; expected "
            f"[{rows}, {length}], [1, {length}] or planes of them, [.., {length}]"
        )
    if expand and axis == 1 and positions.shape[0] == 1 and rows > 1:
        positions = positions.expand(rows, length).contiguous()
        batch["position_ids"] = positions
    return positions, axis


def labels_or_loss_mask(who: str, batch: Batch, loss_mask: Any) -> tuple[Any, Any]:
    """Labels and what is left of the loss mask, which stands in for labels."""
    labels = batch.get("labels")
    if labels is not None:
        return labels, loss_mask
    if loss_mask is not None:
        return loss_mask, None
    raise KeyError(f"{who}: the batch has no `labels` and no loss_mask takes their place")


# Padding on one axis.


def pad_axis(who: str, value: Any, axis: int, count: int, fill: Any) -> Tensor:
    """Right padding by `fill`; the same object when there is nothing to add."""
    tensor = tensor_at(who, "tensor", value)
    axis = check_axis(who, tensor, axis)
    count = integer(who, "pad_len", count)
    if count <= 0:
        return tensor
    if is_integral(tensor):
        bounds = torch.iinfo(tensor.dtype)
        if not bounds.min <= fill <= bounds.max:
            raise ValueError(
                f"{who}: {tensor.dtype} cannot hold the pad value {fill}; use a wider dtype"
            )
    return _nemo.pad_tokens(tensor, axis, count, fill)


def continue_axis(who: str, positions: Any, axis: int, count: int) -> Tensor:
    """Positions that count on; the same object when there is nothing to add."""
    tensor = tensor_at(who, "position_ids", positions)
    axis = check_axis(who, tensor, axis)
    count = integer(who, "pad_len", count)
    if count <= 0:
        return tensor
    if tensor.shape[axis] == 0:
        raise ValueError(f"{who}: `position_ids` is empty, nothing to count on from")
    if not (is_integral(tensor) or tensor.is_floating_point()):
        raise ValueError(f"{who}: `position_ids` is {tensor.dtype}; expected integers")
    return _nemo.continue_positions(tensor, axis, count)


def check_axis(who: str, tensor: Tensor, axis: Any) -> int:
    """`axis` counted from the front."""
    from_either_end = integer(who, "seq_dim", axis)
    if not -tensor.dim() <= from_either_end < tensor.dim():
        raise ValueError(f"{who}: axis {axis} of a tensor {shape_of(tensor)}")
    return from_either_end % tensor.dim()


def share_rows(
    who: str,
    name: str,
    tensor: Tensor,
    axis: int,
    ownership: _C.Ownership,
    tokens: int,
    rank: int,
) -> Tensor:
    """This rank's contiguous run of one per-token tensor."""
    if tensor.shape[axis] != tokens:
        raise ValueError(
            f"{who}: `{name}` is {shape_of(tensor)} after padding; expected "
            f"{tokens} tokens on axis {axis}"
        )
    return _nemo.take_share(tensor, ownership, rank, axis)
