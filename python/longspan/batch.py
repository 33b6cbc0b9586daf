"""Batches: pack, pad, shard and unshard dictionaries as collators give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from longspan import _C
from longspan.agreement import Agreement
from longspan.collectives import all_gather_tokens
from longspan.group import Group
from longspan.local_batch import LocalBatch

_SENTINEL = -1000
#: Of the whole stream, for attention functions; a share has others.
_FOR_FLASH = ("max_length_q", "max_length_k")
_LENGTHS_AND_MASKS = ("seq_lens", "seq_lens_padded", "attention_mask", "cu_seqlens")


#: What shard itself writes beside the tensors of the batch.
_ADDED = ("position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")


class _Cut(NamedTuple):
    kind: str
    form: str


#: Every named layout: how tokens are cut, and whether rows stay rows.
LAYOUTS: Mapping[str, _Cut] = {
    "head-tail": _Cut("head-tail", "rows"),
    "contiguous-rows": _Cut("contiguous", "rows"),
    "contiguous-stream": _Cut("contiguous", "stream"),
    "head-tail-stream": _Cut("head-tail", "stream"),
    "per-document-head-tail": _Cut("per-document-head-tail", "stream"),
}


def pack(
    batch: Mapping[str, Any],
    *,
    form: str = "stream",
    table: _C.TokenTable | None = None,
    sentinel: int = _SENTINEL,
    pass_through: Sequence[str] = (),
) -> _C.PackedBatch:
    """Lays the documents of all rows end to end (``form="stream"``) or leaves
    rows as they are (``form="rows"``). Nothing is copied yet."""
    rows, _ = read(batch, table, sentinel, pass_through)
    return _C.pack(rows, form)


def pad(
    packed: _C.PackedBatch,
    *,
    layout: str | None = None,
    ranks: int | None = None,
    multiple: int = 1,
    slots: int = 1,
) -> _C.PackedBatch:
    """Lengthens a packed batch: to what `layout` needs over `ranks` ranks, with
    shares of a multiple of `multiple` tokens; or, without a layout, every
    document to a multiple of `slots` and the whole to one of `multiple`."""
    if not isinstance(packed, _C.PackedBatch):
        raise TypeError(f"pad: expected what pack returned, got {type(packed).__name__}")
    if layout is None:
        if ranks is not None:
            raise ValueError("pad: `ranks` goes with `layout`; name the layout")
        return _C.pad(packed, slots, multiple)
    if slots != 1:
        raise ValueError("pad: the layout says how documents are padded; leave `slots` out")
    cut = _cut_named("pad", layout)
    if cut.form != packed.form:
        raise ValueError(f"pad: layout '{layout}' cuts {cut.form}, but the batch is {packed.form}")
    return _C.pad(
        packed, *_C.padding_for(cut.kind, cut.form, 1 if ranks is None else ranks, multiple)
    )


def shard(
    batch: Mapping[str, Any],
    group: Any = None,
    *,
    rank: int | None = None,
    ranks: int | None = None,
    model: torch.nn.Module | None = None,
    layout: str | None = None,
    ownership: _C.Ownership | None = None,
    multiple: int = 1,
    table: _C.TokenTable | None = None,
    sentinel: int = _SENTINEL,
    pass_through: Sequence[str] = (),
    shift_labels: bool = False,
    ahead: Mapping[str, tuple[str, int]] | None = None,
    check_agreement: bool = True,
) -> LocalBatch:
    """One rank's share of a batch as a collator gives it.

    With a `model` that `parallelize` was called on, the result is for
    ``model(**local)``: cut as the model wants it, `labels` shifted before the cut
    and passed on as `shift_labels` with the batch's `num_items_in_batch`, targets of
    pads ignored, and how its layers attend under the key "longspan".

    The rank comes from `group` (a `longspan.Group` or what `Group.of` takes; anything
    else that answers rank() and size() too), or from `rank` and `ranks` (one rank of one
    by default). `layout` ("head-tail" by default) is one of `LAYOUTS`; for any other cut
    give an `ownership` of the padded tokens (pads go to the end) and "rows" or "stream" as layout.
    The shares of a named layout are a multiple of `multiple` tokens. `shift_labels`
    says that labels are unshifted: each token then gets the label of the next one
    in its row, before the cut. `ahead` adds tensors for multi-token prediction,
    {"next_ids": ("input_ids", 1)}.

    With a group the ranks first compare hashes of the tensors and of
    the layout, in one small exchange: where they were given different data, every
    rank raises and names what differs. `check_agreement=False` leaves that out.

    The batch is not changed, and every per-token tensor in the result is new.
    """
    if model is not None:
        from longspan.model_batch import shard_for_model

        if rank is not None or ranks is not None or shift_labels:
            raise ValueError(
                "shard: with a model the ranks are those of its group, and labels are always "
                "shifted; leave `rank`, `ranks` and `shift_labels` out"
            )
        return shard_for_model(
            batch,
            group,
            model,
            layout,
            ownership,
            multiple,
            lambda: shifted(*read(batch, table, sentinel, pass_through), False, ahead),
            check_agreement,
        )
    rank, ranks, over = _share_of(group, rank, ranks)
    with Agreement("shard", over, check_agreement) as agreement:
        rows, others = read(batch, table, sentinel, pass_through)
        rows, others = shifted(rows, others, shift_labels, ahead)
        name = "head-tail" if layout is None else layout
        return share(batch, rows, others, rank, ranks, name, ownership, multiple, over, agreement)


def shard_chunks(
    batch: Mapping[str, Any],
    num_chunks: int,
    group: Any = None,
    *,
    rank: int | None = None,
    ranks: int | None = None,
    layout: str = "head-tail",
    multiple: int = 1,
    table: _C.TokenTable | None = None,
    sentinel: int = _SENTINEL,
    pass_through: Sequence[str] = (),
    shift_labels: bool = False,
    ahead: Mapping[str, tuple[str, int]] | None = None,
    check_agreement: bool = True,
) -> list[LocalBatch]:
    """The rows in equal chunks (micro-batches of a pipeline), each sharded."""
    rank, ranks, over = _share_of(group, rank, ranks)
    with Agreement("shard_chunks", over, check_agreement) as agreement:
        rows, others = read(batch, table, sentinel, pass_through)
        rows, others = shifted(rows, others, shift_labels, ahead)
        parts = _C.chunks(rows, num_chunks)
        return [
            share(batch, part, others, rank, ranks, layout, None, multiple, over, agreement)
            for part in parts
        ]


def unshard(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    local: LocalBatch | _C.Cut,
    *,
    group: Any = None,
    trim: bool = True,
    fill: int | float | bool = 0,
    axis: int | None = None,
) -> torch.Tensor:
    """What shard cut, as one tensor in the original order: ``[B, S, ...]``, or with
    ``trim=False`` as padded rows or stream. `fill` stands where packing left a
    loaded pad behind. Differentiable.

    `tensors` is this rank's tensor when the batch was sharded with a group or one is
    given: all ranks must call, and each gets the whole.
    Otherwise it is the tensors of all ranks in rank order, as a list or as one
    tensor that holds them all."""
    cut = local.cut if isinstance(local, LocalBatch) else local
    if not isinstance(cut, _C.Cut):
        raise TypeError(
            f"unshard: expected the dictionary that shard returned, or its cut; "
            f"got {type(local).__name__}"
        )
    over = None if group is None else Group.of(group)
    if over is None and isinstance(local, LocalBatch):
        over = local.group
    if isinstance(local, LocalBatch) and local.as_row:
        tensors = _without_row(tensors)
    if over is not None and isinstance(tensors, torch.Tensor):
        tensors = _gathered(tensors, cut, over, axis)
    shards = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    if not isinstance(shards, Sequence) or not all(isinstance(t, torch.Tensor) for t in shards):
        raise TypeError("unshard: expected a tensor, or a list with the tensor of every rank")
    if not shards:
        raise ValueError("unshard: no tensors; give one for each rank")
    return _C.unshard(shards, cut, trim, fill, axis)


def _without_row(
    tensors: torch.Tensor | Sequence[torch.Tensor],
) -> torch.Tensor | list[torch.Tensor]:
    """The stream of every tensor, out of the one row it was given."""
    if not isinstance(tensors, torch.Tensor):
        return [_without_row(tensor) for tensor in tensors]  # type: ignore[misc]
    if tensors.dim() == 0 or tensors.shape[0] != 1:
        raise ValueError(
            f"unshard: the batch lies in one row, so expected [1, tokens, ...], got "
            f"{list(tensors.shape)}"
        )
    return tensors.squeeze(0)


def _gathered(
    tensor: torch.Tensor, cut: _C.Cut, group: Group, axis: int | None
) -> torch.Tensor:
    if group.size() != cut.ranks:
        raise ValueError(
            f"unshard: the batch was cut for {cut.ranks} ranks, the group has {group.size()}"
        )
    axis = cut.axis if axis is None else axis
    if not -tensor.dim() <= axis < tensor.dim() or tensor.shape[axis] != cut.local_tokens:
        raise ValueError(
            f"unshard: expected this rank's {cut.local_tokens} tokens at axis {axis} of "
            f"{list(tensor.shape)}"
        )
    sizes = [cut.ownership.local_tokens(rank) for rank in range(cut.ranks)]
    return all_gather_tokens(tensor, axis=axis, sizes=sizes, group=group)


def check_layout(who: str, layout: str) -> None:
    """An error that names the layouts, unless this is one of them."""
    _cut_named(who, layout)


def _cut_named(who: str, layout: str) -> _Cut:
    cut = LAYOUTS.get(layout) if isinstance(layout, str) else None
    if cut is None:
        raise ValueError(f"{who}: layout '{layout}' is not one of {', '.join(LAYOUTS)}")
    return cut


class _Share(NamedTuple):
    """Whose share is cut, and the group where its ranks can compare and gather."""

    rank: int
    ranks: int
    group: Group | None


def _share_of(group: Any, rank: int | None, ranks: int | None) -> _Share:
    if group is not None:
        if rank is not None or ranks is not None:
            raise ValueError("shard: give a group, or rank and ranks, not both")
        if _only_counts(group):
            return _Share(group.rank(), group.size(), None)
        over = Group.of(group)
        return _Share(over.rank(), over.size(), over)
    if (rank is None) != (ranks is None):
        raise ValueError("shard: rank and ranks go together")
    for name, value in (("rank", rank), ("ranks", ranks)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"shard: {name} is a {type(value).__name__}; expected an int")
    return _Share(0, 1, None) if rank is None or ranks is None else _Share(rank, ranks, None)


def _only_counts(group: Any) -> bool:
    """Whether it is no group that communicates, but answers rank() and size()."""
    return not isinstance(group, (_C.Group, torch.distributed.ProcessGroup)) and all(
        callable(getattr(group, name, None)) for name in ("rank", "size")
    )


def read(
    batch: Mapping[str, Any],
    table: _C.TokenTable | None = None,
    sentinel: int = _SENTINEL,
    pass_through: Sequence[str] = (),
) -> tuple[_C.RowBatch, dict[str, Any]]:
    """The tensors as rows, and the entries that are no tensors."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"shard: expected a batch as a mapping, got {type(batch).__name__}")
    if isinstance(pass_through, str):
        raise TypeError(f"shard: pass_through is a list of keys; write ['{pass_through}']")
    tensors = [(key, value) for key, value in batch.items() if isinstance(value, torch.Tensor)]
    others = {
        key: value
        for key, value in batch.items()
        if not isinstance(value, torch.Tensor) and value is not None and key not in _FOR_FLASH
    }
    table = _C.TokenTable() if table is None else table
    _check_tensors(others, table, pass_through)
    return _C.read_rows(tensors, table, sentinel, list(pass_through)), others


def _check_tensors(
    others: Mapping[str, Any], table: _C.TokenTable, pass_through: Sequence[str]
) -> None:
    """Lists and arrays under the name of a tensor would be passed on whole."""
    if not others:
        return
    for key in (*_LENGTHS_AND_MASKS, *(row.key for row in table.rows)):
        if key in others and key not in pass_through:
            raise TypeError(
                f"`{key}` is a {type(others[key]).__name__}; give it as a tensor, or name it "
                f"in pass_through to leave it as it is"
            )


def shifted(
    rows: _C.RowBatch,
    others: dict[str, Any],
    shift_labels: bool,
    ahead: Mapping[str, tuple[str, int]] | None,
) -> tuple[_C.RowBatch, dict[str, Any]]:
    """What was read, with labels shifted and tensors of tokens further on."""
    if shift_labels:
        rows = _C.shift_left(rows, "labels", "labels")
    for name, what in (ahead or {}).items():
        if not (isinstance(what, tuple) and len(what) == 2 and isinstance(what[0], str)):
            raise TypeError(f"shard: ahead['{name}'] is {what!r}; expected (key, steps)")
        if name in dict(rows.tokens) or name in _ADDED:
            raise ValueError(f"shard: ahead would replace '{name}'; choose another name")
        rows = _C.shift_left(rows, what[0], name, what[1])
    return rows, others


def share(
    batch: Mapping[str, Any],
    rows: _C.RowBatch,
    others: Mapping[str, Any],
    rank: int,
    ranks: int,
    layout: str,
    ownership: _C.Ownership | None,
    multiple: int,
    group: Group | None,
    agreement: Agreement,
    also: Mapping[str, Any] | None = None,
) -> LocalBatch:
    """One rank's share of rows that were read; `layout` as in `shard`. `also` holds
    what else the ranks should agree on."""
    if ownership is None:
        cut = _cut_named("shard", layout)
        to = _C.padding_for(cut.kind, cut.form, ranks, multiple)
        packed = _C.pad(_C.pack(rows, cut.form), *to)
        # Every row is cut alike, whatever documents it holds.
        stream = cut.form == "stream"
        cut_along = packed.packings[0] if stream else _C.Packing.single(packed.tokens)
        ownership = _C.Ownership.of(cut.kind, cut_along, ranks)
    else:
        if not isinstance(ownership, _C.Ownership):
            raise TypeError(f"shard: ownership is a {type(ownership).__name__}, not an Ownership")
        form = layout if layout in ("rows", "stream") else _cut_named("shard", layout).form
        if ownership.ranks != ranks:
            raise ValueError(f"shard: the ownership has {ownership.ranks} ranks, the group {ranks}")
        packed = _C.pack(rows, form)
        if ownership.tokens > packed.tokens > 0:
            packed = _C.pad(packed, 1, ownership.tokens)
    agreement.compare(
        dict(rows.tokens)
        | {"layout": layout, "ownership": ownership}
        | {"documents": repr([_C.hash_of(p) for p in packed.packings])}
        | dict(also or {})
    )
    local = _C.shard(packed, ownership, rank)
    made = dict(local.tokens)
    kept = dict(local.payload) | dict(others)
    entries: dict[str, Any] = {}
    for key in [*batch, *made]:
        if key in made:
            entries[key] = made[key]
        elif key in kept:
            entries[key] = kept[key]
    if packed.form == "stream":
        packing = packed.packings[0]
        device = next(iter(made.values())).device
        entries["cu_seqlens"] = _C.cumulative_lengths(packing).to(device)
        entries["cu_seqlens_padded"] = _C.cumulative_padded_lengths(packing).to(device)
        entries["max_seqlen"] = packing.longest
    return LocalBatch(entries, local.cut, group)
