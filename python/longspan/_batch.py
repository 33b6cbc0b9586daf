"""Batches: pack, pad, shard and unshard dictionaries as collators give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from longspan import _C, _transformers
from longspan._agreement import Agreement, tells_ranks
from longspan._arguments import (
    as_text,
    check_choice,
    check_flags,
    check_kind,
    check_whole,
    is_dense,
    said,
    speaking_as,
    wrong,
)
from longspan._group import Group, hash_value
from longspan._images import add_pictures, without_pictures
from longspan._local_batch import KEYWORD, LocalBatch
from longspan._model_batch import (
    add_attention,
    check_counting,
    check_group,
    check_jumps,
    counted_from_zero,
    documents_of_seq_idx,
    with_targets,
)
from longspan._models import AUTO, Parallelized, WholeBatch, state_of
from longspan._remarks import remark_on_labels, remark_on_shifting
from longspan._reporting import note_tokens
from longspan._walking import still
from longspan.comm import all_gather_tokens

_SENTINEL = -1000
#: Of the whole stream, for attention functions; a share has others.
_FOR_FLASH = ("max_length_q", "max_length_k")
_LENGTHS_AND_MASKS = ("seq_lens", "seq_lens_padded", "attention_mask", "cu_seqlens")


_FORMS = ("rows", "stream")
#: More are a slip in a number, not a batch.
_MOST_PADS = 1 << 24
_OF_EVERY_RANK = "or a list with the tensor of every rank"

#: What shard itself writes beside the tensors of the batch.
_ADDED = ("position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")


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
    check_choice("pack", "form", form, _FORMS)
    rows, _ = Reading(table, sentinel, pass_through, who="pack").rows_of(batch)
    return _C.pack(rows, form)


def pad(
    packed: _C.PackedBatch,
    *,
    layout: str | _C.Ownership | None = None,
    ranks: int | None = None,
    multiple: int = 1,
    slots: int = 1,
) -> _C.PackedBatch:
    """Lengthens a packed batch: to what `layout` needs over `ranks` ranks, with
    shares of a multiple of `multiple` tokens; to the tokens of an `Ownership`; or,
    without a layout, every document to a multiple of `slots` and the whole to one of
    `multiple`."""
    if not isinstance(packed, _C.PackedBatch):
        raise wrong("pad", "packed", packed, "what pack returned")
    check_whole("pad", "multiple", multiple)
    check_whole("pad", "slots", slots)
    if ranks is not None:
        check_whole("pad", "ranks", ranks, 1, 2**31 - 1)
    if layout is None:
        if ranks is not None:
            raise ValueError("pad: `ranks` goes with `layout`; name the layout")
        return _C.pad(packed, slots, multiple)
    if slots != 1:
        raise ValueError("pad: the layout says how documents are padded; leave `slots` out")
    if isinstance(layout, _C.Ownership):
        if ranks not in (None, layout.ranks) or multiple != 1:
            raise ValueError(
                f"pad: {layout} says how many ranks and tokens there are; leave `ranks` and "
                f"`multiple` out"
            )
        if layout.tokens < packed.tokens:
            raise ValueError(
                f"pad: the ownership has {layout.tokens} tokens but the batch {packed.tokens}, and "
                f"padding only lengthens; make it from the packed batch"
            )
        return _C.pad_to(packed, layout)
    return _C.pad_for(packed, _named("pad", layout), 1 if ranks is None else ranks, multiple)


def shard(
    batch: Mapping[str, Any],
    group: Any = None,
    *,
    rank: int | None = None,
    ranks: int | None = None,
    model: torch.nn.Module | None = None,
    layout: str | _C.Ownership | None = None,
    form: str | None = None,
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
    by default). `layout` is a name of `longspan.values.named_layouts()`, whose shares are a
    multiple of `multiple` tokens; "auto", which is "per-document-head-tail" where several
    documents share a row and that pads less than 2 % of the tokens, else "head-tail" (zigzag);
    by default what the model was told, or "head-tail"; or an `Ownership` of the
    padded tokens (pads go to the end), where `form` says whether "rows" stay rows (as by
    default) or become one "stream". `shift_labels` says that labels are unshifted: each
    token then gets the label of the next one in its row, before the cut. `ahead` adds
    tensors for multi-token prediction, {"next_ids": ("input_ids", 1)}.

    With a group the ranks first compare hashes of the tensors and of the layout, in
    one small exchange: where they were given different data, every rank raises and
    names what differs. `check_agreement=False` leaves that out.

    The batch is not changed, and every per-token tensor in the result is new.
    """
    state = None
    check_flags("shard", shift_labels=shift_labels, check_agreement=check_agreement)
    if model is None:
        place = Place.of("shard", group, rank, ranks)
    else:
        if rank is not None or ranks is not None or shift_labels:
            raise ValueError(
                "shard: with a model the ranks are those of its group, and labels are always "
                "shifted; leave `rank`, `ranks` and `shift_labels` out"
            )
        state = state_of("shard", model)
        check_group("shard", state, group)
        place = Place.in_group(state.group)
    with Agreement("shard", place.group, check_agreement) as agreement:
        if model is not None and state is not None:
            with still(model):
                _transformers.check_unchanged(state, model)
                _transformers.check_batch(model, batch)
        reading = Reading(table, sentinel, pass_through, shift_labels, ahead)
        local = share(batch, place, agreement, state, reading, layout, form, multiple)
        if state is not None:
            check_counting("shard", local[KEYWORD].whole.rows, state.layers)
            check_jumps("shard", batch, state.first_position)
    if shift_labels and place.rank == 0:
        remark_on_shifting("shard", batch)
    if place.group is not None:
        note_tokens(place.group, local.cut)
    return local


def shard_chunks(
    batch: Mapping[str, Any],
    num_chunks: int,
    group: Any = None,
    *,
    rank: int | None = None,
    ranks: int | None = None,
    layout: str | _C.Ownership = "head-tail",
    form: str | None = None,
    multiple: int = 1,
    table: _C.TokenTable | None = None,
    sentinel: int = _SENTINEL,
    pass_through: Sequence[str] = (),
    shift_labels: bool = False,
    ahead: Mapping[str, tuple[str, int]] | None = None,
    check_agreement: bool = True,
) -> list[LocalBatch]:
    """The rows in equal chunks (micro-batches of a pipeline), each sharded."""
    who = "shard_chunks"
    check_flags(who, shift_labels=shift_labels, check_agreement=check_agreement)
    place = Place.of(who, group, rank, ranks)
    with Agreement(who, place.group, check_agreement) as agreement:
        check_whole(who, "num_chunks", num_chunks)
        reading = Reading(table, sentinel, pass_through, shift_labels, ahead, who)
        rows, others = reading.rows_of(batch)
        if shift_labels and place.rank == 0:
            remark_on_shifting(who, batch)
        with speaking_as(who, "chunks"):
            parts = _C.chunks(rows, num_chunks)
        return [
            _cut(who, batch, part, others, place, agreement, layout, form, multiple, {})[0]
            for part in parts
        ]


@tells_ranks
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
    ``trim=False`` as padded rows or stream. Loaded pads that packing left out come
    back as `fill`. Differentiable.

    `tensors` is this rank's tensor when the batch was sharded with a group or one is
    given: all ranks must call, and each gets the whole.
    Otherwise it is the tensors of all ranks in rank order, as a list or as one
    tensor that holds them all."""
    if tensors is None:
        raise TypeError(
            f"unshard: `tensors` is None; expected a tensor, {_OF_EVERY_RANK}. A loss in tiles "
            f"leaves no logits behind: for those call the model with output_logits=True"
        )
    cut = local.cut if isinstance(local, LocalBatch) else local
    if not isinstance(cut, _C.Cut):
        raise TypeError(
            f"unshard: expected the dictionary that shard returned, or its cut; got {said(local)}"
        )
    over = None if group is None else Group.of(group)
    if over is None and isinstance(local, LocalBatch):
        over = local.group
    if isinstance(local, LocalBatch) and local.as_row:
        tensors = _without_row(tensors)
    check_flags("unshard", trim=trim)
    if axis is not None:
        check_whole("unshard", "axis", axis)
    if over is not None and isinstance(tensors, torch.Tensor):
        tensors = _gathered(tensors, cut, over, axis)
    shards = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    if not isinstance(shards, Sequence):
        raise wrong("unshard", "tensors", shards, f"a tensor, {_OF_EVERY_RANK}")
    for one in shards:
        if not is_dense(one):
            raise TypeError(
                f"unshard: `tensors` holds {said(one)}; expected a tensor, {_OF_EVERY_RANK}"
            )
    if not shards:
        raise ValueError("unshard: no tensors; give one for each rank")
    return _C.unshard(shards, cut, trim, fill, axis)


def _without_row(
    tensors: torch.Tensor | Sequence[torch.Tensor],
) -> torch.Tensor | list[torch.Tensor]:
    """The stream of every tensor, out of the one row it was given."""
    if not isinstance(tensors, torch.Tensor):
        if not isinstance(tensors, Sequence) or isinstance(tensors, str):
            raise wrong("unshard", "tensors", tensors, f"a tensor, {_OF_EVERY_RANK}")
        return [_without_row(tensor) for tensor in tensors]  # type: ignore[misc]
    if tensors.dim() == 0 or tensors.shape[0] != 1:
        raise ValueError(
            f"unshard: the batch lies in one row, so expected [1, tokens, ...], got "
            f"{list(tensors.shape)}"
        )
    return tensors.squeeze(0)


def _gathered(tensor: torch.Tensor, cut: _C.Cut, group: Group, axis: int | None) -> torch.Tensor:
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


class Place(NamedTuple):
    """Whose share is cut, and the group where its ranks can compare and gather."""

    rank: int
    ranks: int
    group: Group | None

    @staticmethod
    def of(who: str, group: Any, rank: int | None, ranks: int | None) -> Place:
        """What callers of `who` say about it."""
        if group is not None:
            if rank is not None or ranks is not None:
                raise ValueError(f"{who}: give a group, or rank and ranks, not both")
            if _only_counts(group):
                return Place(group.rank(), group.size(), None).checked(who)
            try:
                return Place.in_group(Group.of(group))
            except TypeError:
                raise TypeError(
                    f"{who}: a group is a process group, a DeviceMesh, a name, or answers rank() "
                    f"and size(); got {said(group)}"
                ) from None
        if (rank is None) != (ranks is None):
            raise ValueError(f"{who}: rank and ranks go together")
        if rank is None or ranks is None:
            return Place(0, 1, None)
        return Place(rank, ranks, None).checked(who)

    def checked(self, who: str) -> Place:
        """The same, where rank and ranks are what they should be."""
        check_whole(who, "ranks", self.ranks, 1, 2**31 - 1)
        check_whole(who, "rank", self.rank, 0, self.ranks - 1)
        return self

    @staticmethod
    def in_group(group: Group) -> Place:
        return Place(group.rank(), group.size(), group)


def _only_counts(group: Any) -> bool:
    """Whether it only answers rank() and size(), and cannot communicate."""
    return not isinstance(group, (_C.Group, torch.distributed.ProcessGroup)) and all(
        callable(getattr(group, name, None)) for name in ("rank", "size")
    )


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a batch as a collator gives it is to be understood; see `shard`."""

    table: _C.TokenTable | None = None
    sentinel: int = _SENTINEL
    pass_through: Sequence[str] = ()
    shift_labels: bool = False
    ahead: Mapping[str, tuple[str, int]] | None = None
    who: str = "shard"

    def rows_of(self, batch: Mapping[str, Any]) -> tuple[_C.RowBatch, dict[str, Any]]:
        """The tensors as rows, shifted where that was asked for, and the entries that are
        not tensors."""
        if not isinstance(batch, Mapping):
            raise TypeError(f"{self.who}: expected a batch as a mapping, got {said(batch)}")
        for key in batch:
            if not isinstance(key, str):
                raise TypeError(f"{self.who}: `batch` has the key {key!r}; expected names")
        if isinstance(self.pass_through, str):
            raise TypeError(
                f"{self.who}: pass_through is a list of keys; write ['{self.pass_through}']"
            )
        if not isinstance(self.pass_through, (Sequence, Set)) or not all(
            isinstance(key, str) for key in self.pass_through
        ):
            raise wrong(self.who, "pass_through", self.pass_through, "a list of keys")
        if self.table is not None:
            check_kind(self.who, "table", self.table, _C.TokenTable, "a TokenTable")
        check_whole(self.who, "sentinel", self.sentinel)
        tensors = [(key, value) for key, value in batch.items() if isinstance(value, torch.Tensor)]
        others = {
            key: value
            for key, value in batch.items()
            if not isinstance(value, torch.Tensor) and value is not None and key not in _FOR_FLASH
        }
        table = _C.TokenTable() if self.table is None else self.table
        for key, tensor in tensors:
            if not is_dense(tensor):
                raise wrong(self.who, key, tensor, "a dense tensor")
        _check_tensors(self.who, others, table, self.pass_through)
        with speaking_as(self.who, "read_rows", "shift_left"):
            rows = _C.read_rows(tensors, table, self.sentinel, list(self.pass_through))
            return self._shifted(rows), others

    def _shifted(self, rows: _C.RowBatch) -> _C.RowBatch:
        if self.shift_labels:
            rows = _C.shift_left(rows, "labels", "labels")
        if self.ahead is not None and not isinstance(self.ahead, Mapping):
            raise wrong(self.who, "ahead", self.ahead, "a mapping from a new key to (key, steps)")
        for name, what in (self.ahead or {}).items():
            if not isinstance(name, str):
                raise TypeError(f"{self.who}: `ahead` has the key {name!r}; expected a new name")
            if not (isinstance(what, tuple) and len(what) == 2 and isinstance(what[0], str)):
                raise TypeError(f"{self.who}: ahead['{name}'] is {what!r}; expected (key, steps)")
            check_whole(self.who, f"ahead['{name}'][1]", what[1])
            if name in dict(rows.tokens) or name in _ADDED:
                raise ValueError(f"{self.who}: ahead would replace '{name}'; choose another name")
            rows = _C.shift_left(rows, what[0], name, what[1])
        return rows


_AS_IS = Reading()


def _check_tensors(
    who: str, others: Mapping[str, Any], table: _C.TokenTable, pass_through: Sequence[str]
) -> None:
    """Lists and arrays under the name of a tensor would be passed on whole."""
    if not others:
        return
    for key in (*_LENGTHS_AND_MASKS, *(row.key for row in table.rows)):
        if key in others and key not in pass_through:
            raise TypeError(
                f"{who}: `{key}` is {said(others[key])}; give it as a tensor, or name it in "
                f"pass_through to leave it as it is"
            )


def share(
    batch: Mapping[str, Any],
    place: Place,
    agreement: Agreement,
    state: Parallelized | None = None,
    reading: Reading = _AS_IS,
    layout: str | _C.Ownership | None = None,
    form: str | None = None,
    multiple: int = 1,
) -> LocalBatch:
    """One rank's share of a batch: read, cut, and with what the layers of a model want.
    Without a layout it is what the model was told, or head-tail."""
    pictures: Mapping[str, Any] = {}
    if state is not None:
        batch = documents_of_seq_idx(counted_from_zero(batch, state.first_position))
        if state.eyes is not None:
            batch, pictures = without_pictures(batch)
    rows, others = reading.rows_of(batch)
    if state is not None:
        layout = state.layout_for(layout)
    elif layout is None:
        layout = "head-tail"
    if state is None:
        return _cut(reading.who, batch, rows, others, place, agreement, layout, form, multiple, {})[
            0
        ]
    remark_on_labels(state, dict(rows.tokens))
    rows, targets = with_targets(rows)
    divisor = batch.get("num_items_in_batch")
    also = {
        "strategy": state.strategy,
        "num_items_in_batch": None if divisor is None else _divisor(reading.who, divisor),
        **pictures,
    }
    local, packed = _cut(
        reading.who, batch, rows, others, place, agreement, layout, form, multiple, also
    )
    add_attention(local, packed, dict(rows.tokens).keys(), targets, state)
    if pictures:
        local[KEYWORD].routes = add_pictures(local, batch["input_ids"], pictures, state.eyes)

    def cut_too(others: _C.RowBatch) -> dict[str, torch.Tensor]:
        _, laid, owners = _laid_out(reading.who, others, place, layout, form, multiple)
        return dict(_C.shard(laid, owners, place.rank).tokens)

    local[KEYWORD].whole = WholeBatch(rows, cut_too)
    if state.first_position:
        local["position_ids"] = local["position_ids"] + state.first_position
    return local


def _divisor(who: str, given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        raise wrong(who, "num_items_in_batch", given, "a number") from None


def _cut(
    who: str,
    batch: Mapping[str, Any],
    rows: _C.RowBatch,
    others: Mapping[str, Any],
    place: Place,
    agreement: Agreement,
    layout: str | _C.Ownership,
    form: str | None,
    multiple: int,
    also: Mapping[str, Any],
) -> tuple[LocalBatch, _C.PackedBatch]:
    """One rank's tokens of rows that were read, and the batch they were cut from. `also`
    holds what else the ranks should agree on."""
    name, packed, ownership = _laid_out(who, rows, place, layout, form, multiple)
    loaded = rows.length if packed.form == "rows" else rows.rows * rows.length
    if packed.tokens - loaded > _MOST_PADS:
        raise ValueError(
            f"{who}: {loaded} tokens would be padded to {packed.tokens} for {place.ranks} ranks; "
            f"at most {_MOST_PADS} pads are added"
        )
    agreement.compare(
        _comparable(dict(rows.payload) | dict(others))
        | dict(rows.tokens)
        | {"layout": name, "ownership": ownership}
        | {"documents": repr([_C.hash_of(p) for p in packed.packings])}
        | dict(also)
    )
    local = _C.shard(packed, ownership, place.rank)
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
    return LocalBatch(entries, local.cut, place.group), packed


def _laid_out(
    who: str,
    rows: _C.RowBatch,
    place: Place,
    layout: str | _C.Ownership,
    form: str | None,
    multiple: int,
) -> tuple[str, _C.PackedBatch, _C.Ownership]:
    """The name of a layout, or of the form that goes with an Ownership, and what it makes of
    rows."""
    check_whole(who, "multiple", multiple)
    if form is not None:
        check_choice(who, "form", form, _FORMS)
    if isinstance(layout, _C.Ownership):
        if layout.ranks != place.ranks:
            raise ValueError(
                f"{who}: the ownership has {layout.ranks} ranks, the group {place.ranks}"
            )
        if multiple != 1:
            raise ValueError(
                f"{who}: {layout} says how many tokens a rank holds; leave `multiple` out"
            )
        name = "rows" if form is None else form
        return name, *_C.lay_out(rows, layout, name)
    name = _named(who, layout)
    if name == AUTO:
        name = _C.fitting_layout(rows, place.ranks, multiple)
    if form is not None:
        raise ValueError(
            f"{who}: layout '{name}' says what becomes of rows; `form` goes with an Ownership"
        )
    _C.layout_named(who, name)
    return name, *_C.lay_out(rows, name, place.ranks, multiple)


def _comparable(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What is not cut must be equal on all ranks as well, where it has a hash. Most
    batches have few of these; beyond that they are compared as one."""
    kept = {
        key: value
        for key, value in entries.items()
        if isinstance(value, (torch.Tensor, bool, int, float, str))
    }
    if len(kept) <= 16:
        return kept
    return {"what is not cut": repr([(key, hash_value(value)) for key, value in kept.items()])}


def _named(who: str, layout: Any) -> str:
    if not isinstance(layout, str):
        raise wrong(who, "layout", layout, "the name of a layout, or an Ownership")
    return as_text(layout)
