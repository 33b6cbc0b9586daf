"""Gradients of the whole sequence, from those that every rank has of its tokens.

Backward on every rank of a group gives gradients that **sum** over the group to
those of one rank. Wrappers for data parallelism average instead, over ranks of
their own; `sum_gradients` corrects for that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from longspan import _C, _remarks
from longspan._agreement import tells_ranks
from longspan._arguments import check_whole
from longspan._group import Group, ranks_of
from longspan._reporting import note_step
from longspan._walking import walked
from longspan._wrappings import (
    Trained,
    is_sharded,
    local_part,
    process_group_of,
    trained_parameters,
    world_ranks,
)
from longspan.comm import all_gather_tokens, reduce_scatter_tokens

# What a parameter's gradient needs.
_ADD, _SCALE, _LEAVE = "add", "scale", "leave"
# What a rank reports about a gradient that it has or lacks.
_MISSING, _DENSE, _DONE, _ADDED_TO, _SPARSE, _COPIED = range(6)
#: Numbers of a summed gradient by which a copy of it is known.
_ENOUGH, _FEW = 4096, 16


@torch.no_grad()
@tells_ranks
def sum_gradients(model: nn.Module, group: Any, *, bucket_bytes: int = 1 << 26) -> None:
    """Makes the gradients of `model` those of the whole sequence: summed over the
    ranks of `group`, and over other ranks as the wrappers of the model say, which
    is their mean for DistributedDataParallel and fully_shard.

    Every rank of the group calls it once a step, after the last backward and before
    clipping; gradients of several backward passes add up first. A second call without
    new gradients is refused. A parameter that has a gradient on another rank only gets
    it here too. Sums are taken in the order of the ranks, in float32 for
    half types, `bucket_bytes` at a time, and repeat bit for bit.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"sum_gradients: expected a module, got {type(model).__name__}; the names of "
            "its parameters and its wrappers are needed"
        )
    check_whole("sum_gradients", "bucket_bytes", bucket_bytes, 1)
    ranks = ranks_of(group)
    trained: list[Trained] = []
    ways: list[str] = []
    refusal = None
    try:
        trained = trained_parameters(model)
        members = world_ranks(ranks)
        ways = [_way(one, members) for one in trained]
    except ValueError as error:
        trained, ways = [], []
        refusal = ValueError(f"sum_gradients: {error}")
    states = _agree_on_states(model, trained, ways, bucket_bytes, refusal, ranks)

    grads: dict[str, list[Tensor]] = {_ADD: [], _SCALE: [], _LEAVE: []}
    for one, way, state in zip(trained, ways, states, strict=True):
        if state != _DENSE:
            continue
        if way == _ADD and one.parameter.grad is None:
            one.parameter.grad = torch.zeros_like(one.parameter, dtype=_dtype(one))
        if one.parameter.grad is not None:
            grads[way].append(one.parameter.grad)
    _add_over(ranks, [local_part(grad) for grad in grads[_ADD]], bucket_bytes)
    if grads[_SCALE] and ranks.size() > 1:
        torch._foreach_mul_([local_part(grad) for grad in grads[_SCALE]], float(ranks.size()))
    for done in grads.values():
        mark(done)
    _watch(model, trained)
    note_step(ranks)
    if ranks.size() > 1:
        changed = [t.parameter for t, way in zip(trained, ways, strict=True) if way != _LEAVE]
        _keep_sample(changed)
        _keep_some(model, changed)
        _remarks.watch_scale([one.parameter for one in trained if one.reduction is None])


# ---- Who needs what.


def _way(one: Trained, members: frozenset[int] | None) -> str:
    """What the gradient of a parameter needs to become that of the sequence, which
    lies on these ranks of the world."""
    reduction = one.reduction
    if reduction is None and not is_sharded(one.parameter):
        return _ADD
    if members is None:
        who = "a DTensor" if reduction is None else f"reduced by {reduction.who}"
        raise ValueError(
            f"`{one.name}` is {who}, but torch.distributed does not know the ranks of the group; "
            "make it from a process group or a mesh of torch.distributed"
        )
    if reduction is None:
        sharded: Any = one.parameter
        others = frozenset(sharded.device_mesh.mesh.flatten().tolist())
        if len(others & members) > 1:
            raise ValueError(
                f"`{one.name}` is a DTensor over ranks {_listed(others)}, {_listed(members)} of "
                "which hold the sequence, and fully_shard does not manage it; leave the ranks of "
                "the sequence out of its mesh"
            )
        return _ADD
    if members <= reduction.ranks and len(reduction.ranks) % len(members) == 0:
        return _SCALE if reduction.divisor is None else _LEAVE
    if len(members & reduction.ranks) == 1:
        return _ADD
    raise ValueError(
        f"{reduction.who} reduces `{one.name}` over ranks {_listed(reduction.ranks)} and the "
        f"sequence lies on ranks {_listed(members)}; expected all of the latter among the former, "
        "or this rank alone"
    )


def _listed(ranks: Iterable[int]) -> str:
    return str(sorted(ranks))


# ---- Agreement, in one small exchange where the ranks do agree.


def _agree_on_states(
    model: nn.Module,
    trained: Sequence[Trained],
    ways: Sequence[str],
    bucket_bytes: int,
    refusal: ValueError | None,
    group: Group,
) -> list[int]:
    """For every parameter what holds for the group: _DENSE where a rank has a
    gradient to sum, else _DONE or _MISSING. Raises on all ranks or on none."""
    table = [
        (one.name, way, str(_dtype(one)), tuple(_shape(one, way)))
        for one, way in zip(trained, ways, strict=True)
    ]
    rescaled = _only_rescaled(trained)
    ran = any(_watched[one.parameter].ran for one in trained if one.parameter in _watched)
    found = [_ADDED_TO if ran and _was_added_to(one) else _state(one, rescaled) for one in trained]
    mine = bytes(_with_copies(trained, found))
    hashes = [_C.hash_of(repr((bucket_bytes, table)).encode()), _C.hash_of(mine)]
    words = [0 if refusal is None else 1, *(h & (1 << 63) - 1 for h in hashes)]
    if group.size() > 1:
        words += _remarks.facts(model, trained)
    said = stacked(torch.tensor(words), group).tolist()
    if refusal is not None:
        raise refusal
    refused = [rank for rank, row in enumerate(said) if row[0] != 0]
    if refused:
        raise ValueError(
            f"sum_gradients: rank {refused[0]} of the group refused; its own error says why"
        )
    strangers = [rank for rank, row in enumerate(said) if row[1] != said[0][1]]
    if strangers:
        raise ValueError(
            f"sum_gradients: rank {strangers[0]} has other parameters than rank 0, or wraps "
            "them otherwise; give every rank of the group the same model"
        )
    rows = [list(mine)]
    if any(row[2] != said[0][2] for row in said):
        rows = stacked(torch.tensor(list(mine), dtype=torch.uint8), group).tolist()
    if group.size() > 1:
        if any(row[-1] != said[0][-1] for row in said):
            _refuse_weights(model, group)
        _remarks.remark_on_facts(model, group.rank(), [row[3:] for row in said])
        _remarks.remark_on_hooks(model, group.rank(), trained)
    states = [max(column) for column in zip(*rows, strict=True)]
    for one, column in zip(trained, zip(*rows, strict=True), strict=True):
        if _SPARSE in column:
            raise sparse_error("sum_gradients", one.name)
        if _ADDED_TO in column:
            raise ValueError(
                f"sum_gradients: backward added to a gradient that was summed already (`{one.name}`"
                "); call it once a step, after the last backward, and model.zero_grad() before the "
                "next step"
            )
        if _COPIED in column:
            raise ValueError(
                f"sum_gradients: the gradient of `{one.name}` is a copy of one that was summed "
                "already, and no backward made it; copies carry no mark, and it would be summed "
                "twice: write into the gradient instead (p.grad.copy_(..)), or copy before the sum"
            )
        if _DONE in column and _DENSE in column:
            raise ValueError(
                f"sum_gradients: rank {column.index(_DONE)} still has the gradient of `{one.name}` "
                f"of an earlier step, and rank {column.index(_DENSE)} a new one; call "
                "model.zero_grad() on all ranks before a step"
            )
    if _DONE in states and _DENSE not in states:
        name = trained[states.index(_DONE)].name
        raise ValueError(
            f"sum_gradients: these gradients were summed already (`{name}` and all others), and "
            "no backward added to them; call it once a step, after the last backward"
        )
    return states


def _refuse_weights(model: nn.Module, group: Group) -> None:
    """Of ranks that differ, at the first sum: drawn by a seed of each rank's own, or read from
    other files."""
    own = _remarks.hashes_of_weights(model)
    names = _remarks.word_of(repr(list(own)).encode())
    if len(set(stacked(torch.tensor(names), group).tolist())) > 1:
        raise ValueError(
            "sum_gradients: the ranks of the group have models with other parameters; give every "
            "rank the same model"
        )
    rows = stacked(torch.tensor(list(own.values())), group).tolist()
    for name, column in zip(own, zip(*rows, strict=True), strict=True):
        rank = next((rank for rank, word in enumerate(column) if word != column[0]), None)
        if rank is not None:
            raise ValueError(
                f"sum_gradients: `{name}` has other values on rank {rank} than on rank 0, so each "
                "computed a part of another model; load the same weights on every rank, or draw "
                "them (those of adapters, too) from one seed before longspan.seed_ranks"
            )


def _dtype(one: Trained) -> torch.dtype:
    """The dtype of its gradient, which torch lets users choose since 2.12."""
    told: torch.dtype | None = getattr(one.parameter, "grad_dtype", None)
    return told or one.parameter.dtype


def _shape(one: Trained, way: str) -> torch.Size:
    """The shape that must be equal on all ranks: that of the whole for a shard."""
    return local_part(one.parameter).shape if way == _ADD else one.parameter.shape


def _state(one: Trained, rescaled: bool) -> int:
    grad = one.parameter.grad
    if grad is None:
        return _MISSING
    if not is_dense(grad):
        return _SPARSE
    if rescaled or mark_of(grad) == version_of(grad):
        return _DONE
    if _is_copy(one.parameter, grad):
        return _COPIED
    watch = _watched.get(one.parameter)
    return _ADDED_TO if watch is not None and watch.added else _DENSE


def is_dense(grad: Tensor) -> bool:
    return local_part(grad).layout == torch.strided


def sparse_error(who: str, name: str) -> ValueError:
    return ValueError(
        f"{who}: the gradient of `{name}` is sparse; make it dense, as Embedding does with "
        "sparse=False"
    )


# ---- Marks: which gradients were summed, and whether backward wrote since.


def version_of(grad: Tensor) -> int:
    return local_part(grad)._version


def mark_of(grad: Tensor) -> int | None:
    """The version that a summed gradient had then. A gradient that backward makes
    anew is another tensor, without a mark."""
    return getattr(grad, "_longspan_summed", None)


def mark(grads: Iterable[Tensor]) -> None:
    """Marks gradients once all are written: tensors in one buffer share a write count."""
    for grad in grads:
        grad._longspan_summed = version_of(grad)  # type: ignore[attr-defined]


def is_summed(parameter: nn.Parameter, trained: Sequence[Trained]) -> bool:
    """Whether its gradient was summed after the last backward. Those that others wrote to
    since, as clipping does, still are."""
    grad = parameter.grad
    if grad is None or mark_of(grad) is None:
        return False
    if mark_of(grad) == version_of(grad):
        return True
    watches = [_watched[one.parameter] for one in trained if one.parameter in _watched]
    return bool(watches) and not any(watch.ran for watch in watches)


@dataclasses.dataclass
class _Watch:
    """What backward did to a parameter since gradients were last summed."""

    ran: bool = False
    added: bool = False  # to what was summed


# Not an attribute of the parameters: those are pickled with a model.
_watched: Any = WeakIdKeyDictionary()


def _watch(model: nn.Module, trained: Sequence[Trained]) -> None:
    """One parameter stands for all; the first, because shards lie in one buffer and
    count their writes together. Others that were first once, before a part was thawed, too."""
    for one in trained:
        if one.parameter in _watched:
            _watched[one.parameter].ran = False
    first = next((p for p in model.parameters() if p.requires_grad), None)
    held: Any = next((one.parameter for one in trained if one.parameter is first), None)
    if held is None or held in _watched:
        return

    def note(parameter: Tensor) -> None:
        watch, grad = _watched[parameter], parameter.grad
        watch.ran = True
        mark = None if grad is None else mark_of(grad)
        if grad is None or mark is None:
            watch.added = False
        elif version_of(grad) == mark + 1:
            watch.added = True  # exactly one write since, this one: so nobody zeroed it

    _watched[held] = _Watch()
    held.register_post_accumulate_grad_hook(note)


def _only_rescaled(trained: Sequence[Trained]) -> bool:
    """Whether others wrote to summed gradients, all alike, and no backward did."""
    watch = next((_watched[t.parameter] for t in trained if t.parameter in _watched), None)
    grads = [one.parameter.grad for one in trained if one.parameter.grad is not None]
    marks = [mark_of(grad) for grad in grads]
    if watch is None or watch.ran or None in marks or not all(map(is_dense, grads)):
        return False
    writes = {version_of(grad) - (mark or 0) for grad, mark in zip(grads, marks, strict=True)}
    # All zeros were zeroed for a step in which this rank had nothing to add.
    return len(writes) == 1 and any(bool(local_part(grad).any()) for grad in grads)


# ---- Copies, which carry no mark.

#: The first numbers of the smallest gradient that was summed, until backward writes to it.
_samples: Any = WeakIdKeyDictionary()


def _keep_sample(parameters: Sequence[nn.Parameter]) -> None:
    found = [p for p in parameters if p.grad is not None and local_part(p.grad).numel()]
    smallest = min(found, key=lambda p: local_part(p).numel(), default=None)
    if smallest is None or smallest.grad is None:
        return
    if smallest not in _samples:
        hooked: Any = smallest
        hooked.register_post_accumulate_grad_hook(lambda p: _samples.__setitem__(p, None))
    _samples[smallest] = _sample_of(smallest.grad)


def _sample_of(grad: Tensor) -> Tensor:
    return local_part(grad).detach().flatten()[:_ENOUGH].clone()


def _is_copy(parameter: nn.Parameter, grad: Tensor) -> bool:
    """Whether it has the numbers of what was summed, and backward had no part in it. Zeros
    tell nothing."""
    kept: Tensor | None = _samples.get(parameter)
    if kept is None or mark_of(grad) is not None:
        return False
    found = _sample_of(grad)
    if (found.shape, found.dtype, found.device) != (kept.shape, kept.dtype, kept.device):
        return False
    return bool(kept.any()) and torch.equal(found, kept)


#: Some numbers of every gradient that was summed: all of these, and where they begin.
_some: Any = WeakIdKeyDictionary()


def _keep_some(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    tables = {id(m.weight) for _, m in walked(model) if isinstance(m, nn.Embedding)}
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[nn.Parameter, Tensor]]] = {}
    for parameter in parameters:
        if parameter.grad is None or not is_dense(parameter.grad):
            continue
        found = _some_of(parameter.grad, id(parameter) in tables)
        kinds.setdefault((found.dtype, found.device), []).append((parameter, found))
    for members in kinds.values():
        every, at = torch.cat([found for _, found in members]), 0
        for parameter, found in members:
            _some[parameter] = every, at, id(parameter) in tables
            at += len(found)


def _some_of(grad: Tensor, is_table: bool) -> Tensor:
    """The first, or the largest of a table: its first words may not have come."""
    own = local_part(grad).detach()
    if is_table and own.numel():
        largest: Tensor = torch.linalg.vector_norm(own, math.inf)  # without another table
        return largest.view(1)
    return (own.view(-1) if own.is_contiguous() else own.flatten())[:_FEW]


def _with_copies(trained: Sequence[Trained], states: list[int]) -> list[int]:
    """With those told apart that are copies of sums, where others are sums still: new ones
    beside these are rare, so that nobody else is looked at."""
    if _DONE not in states or _DENSE not in states:
        return states
    return [
        _COPIED if state == _DENSE and _has_some_of(one.parameter) else state
        for one, state in zip(trained, states, strict=True)
    ]


def _was_added_to(one: Trained) -> bool:
    """Whether backward wrote to a sum that others, of another optimizer say, have not zeroed: once,
    and more than clipping does, which leaves its numbers in proportion."""
    kept, grad = _some.get(one.parameter), one.parameter.grad
    if kept is None or grad is None or one.reduction is not None or is_sharded(one.parameter):
        return False
    every, at, is_table = kept
    mark = mark_of(grad)
    if is_table or mark is None or version_of(grad) != mark + 1 or grad.is_complex():
        return False
    now = _some_of(grad, is_table).double()
    then = every[at : at + len(now)].to(now)
    if not now.any() or not then.any():  # zeroed, or nothing to add to
        return False
    along = torch.dot(now, then) / (now.norm() * then.norm())
    return bool(along < 1 - 1e-4)


def _has_some_of(parameter: nn.Parameter) -> bool:
    kept, grad = _some.get(parameter), parameter.grad
    if kept is None or grad is None or mark_of(grad) is not None:
        return False
    every, at, is_table = kept
    found = _some_of(grad, is_table)
    if (found.dtype, found.device) != (every.dtype, every.device):
        return False
    return bool(found.any()) and torch.equal(found, every[at : at + len(found)])


# ---- Sums.


def _add_over(group: Group, grads: Sequence[Tensor], bucket_bytes: int) -> None:
    """Writes the sum over the group into every tensor."""
    if group.size() == 1:
        return
    plain = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
    flats = [g.contiguous().view(-1) for g in plain]
    for bucket in _buckets(flats, bucket_bytes):
        flat = bucket[0] if len(bucket) == 1 else torch.cat(bucket)
        sizes = [part.numel() for part in flat.tensor_split(group.size())]
        mine = reduce_scatter_tokens(flat, axis=0, sizes=sizes, group=group)
        total = all_gather_tokens(mine, axis=0, sizes=sizes, group=group)
        torch._foreach_copy_(bucket, torch.split(total, [part.numel() for part in bucket]))
    for grad, flat in zip(plain, flats, strict=True):
        if not grad.is_contiguous():  # then the flat one is a copy
            grad.copy_(flat.view_as(grad))


def _buckets(flats: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Pieces of one dtype and device, together at most `bucket_bytes` or one element."""
    kinds: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    for flat in flats:
        kinds.setdefault((flat.dtype, flat.device.type), []).append(flat)
    for (dtype, _), members in kinds.items():
        room = most = max(1, bucket_bytes // dtype.itemsize)
        bucket: list[Tensor] = []
        for flat in members:
            while flat.numel():
                piece, flat = flat[:room], flat[room:]
                bucket.append(piece)
                room -= piece.numel()
                if room == 0:
                    yield bucket
                    bucket, room = [], most
        if bucket:
            yield bucket


def stacked(value: Tensor, group: Group) -> Tensor:
    """The values of all ranks, in rank order."""
    if group.size() == 1:
        return value.unsqueeze(0)
    # A group of NCCL alone moves no tensors of the CPU.
    kinds = {device.type for device in process_group_of(group)._device_types}
    sent = value if value.device.type in kinds or "cuda" not in kinds else value.cuda()
    sizes = [1] * group.size()
    stacked = all_gather_tokens(sent.unsqueeze(0), axis=0, sizes=sizes, group=group)
    return stacked.to(value.device)
