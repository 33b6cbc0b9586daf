"""Rows with length tables become streams: what the THD, TE and GLM paths share.

The length tables are read to the host once for each batch; everything that
follows from them is computed there and sent to where the tensors live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import (
    INT32_MAX,
    Batch,
    check_row_matrix,
    integer,
    is_integral,
    required,
    shape_of,
    tensor_at,
)
from longspan.compat.nemo._strict import is_strict

_REQUIRED = ("input_ids", "labels", "position_ids", "seq_lens", "seq_lens_padded")


@dataclass(frozen=True)
class Stream:
    """One group of rows laid end to end. Offsets are on the host."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None
    padding: Tensor
    loss_mask: Tensor | None
    cu: Tensor | None
    cu_padded: Tensor | None
    longest: Tensor | None

    @property
    def offsets(self) -> Tensor | None:
        """Where the slots of the documents begin and end."""
        return self.cu if self.cu_padded is None else self.cu_padded


@dataclass(frozen=True)
class Streams:
    """All groups of rows of one batch, and its entries that are no tensors."""

    who: str
    streams: list[Stream]
    others: dict[str, Any]
    device: torch.device  # of the length tables
    sentinel: int
    chunked: bool

    def as_map(self) -> dict[str, Any]:
        """What the reference returns: with a chunk axis if it was asked for."""
        return self._stacked() if self.chunked else self.one()

    def one(self) -> dict[str, Any]:
        """The only stream, without a chunk axis."""
        (stream,) = self.streams
        out: dict[str, Any] = {
            "input_ids": stream.tokens,
            "position_ids": stream.positions,
            "cu_seqlens": self._there(stream.cu),
            "labels": stream.labels,
            "padding_mask": stream.padding,
        }
        if stream.cu_padded is not None:
            out["cu_seqlens_padded"] = self._there(stream.cu_padded)
        if stream.longest is not None:
            out["max_seqlen"] = self._there(stream.longest)
        return self._with_others(out, stream.loss_mask)

    def _stacked(self) -> dict[str, Any]:
        streams = self.streams
        positions = [s.positions for s in streams if s.positions is not None]
        if len(positions) != len(streams):
            raise ValueError(f"{self.who}: `position_ids` is null; chunks need positions")
        if any(each.shape != positions[0].shape for each in positions):
            raise ValueError(
                f"{self.who}: `position_ids` does not split into equal chunks; "
                "give one row of positions for each row"
            )
        out: dict[str, Any] = {
            "input_ids": torch.stack([s.tokens for s in streams]),
            "labels": torch.stack([s.labels for s in streams]),
            "position_ids": torch.stack(positions),
            "cu_seqlens": self._ragged([s.cu for s in streams]),
            "padding_mask": torch.stack([s.padding for s in streams]),
        }
        if any(s.cu_padded is not None for s in streams):
            out["cu_seqlens_padded"] = self._ragged([s.offsets for s in streams])
        longest = [s.longest for s in streams if s.longest is not None]
        if len(longest) == len(streams):
            out["max_seqlen"] = self._there(torch.stack(longest))
        masks = [s.loss_mask for s in streams if s.loss_mask is not None]
        return self._with_others(out, torch.stack(masks) if masks else None)

    def _ragged(self, offsets: list[Tensor | None]) -> Tensor | None:
        rows = [row for row in offsets if row is not None]
        if not rows:
            return None
        return self._there(pad_sequence(rows, batch_first=True, padding_value=self.sentinel))

    def _there(self, host: Tensor | None) -> Tensor | None:
        return None if host is None else host.to(self.device)

    def _with_others(self, out: dict[str, Any], loss_mask: Tensor | None) -> dict[str, Any]:
        for key, value in self.others.items():
            out.setdefault(key, value)
        if loss_mask is not None:
            out["loss_mask"] = loss_mask
        return out


@dataclass(frozen=True)
class _Rows:
    """The checked batch. Lengths are on the host, [rows, documents]."""

    who: str
    tokens: Tensor
    labels: Tensor
    positions: Tensor | None
    padding: Tensor | None  # None: from the lengths, or strict
    loss_mask: Tensor | None
    lengths: Tensor | None
    slots: Tensor | None
    sentinel: int
    pad_id: int
    strict: bool

    def stream(self, first: int, stop: int) -> Stream:
        """Rows [first, stop) end to end."""
        rows, length = stop - first, self.tokens.shape[1]
        total = rows * length
        tokens = self._cut(self.tokens, first, stop).reshape(total, -1).squeeze(-1)
        cu = cu_padded = longest = padding = None
        if self.lengths is not None:
            cu, cu_padded, longest, padding = self._offsets(first, stop)
        if self.padding is not None:
            padding = self._cut(self.padding, first, stop).reshape(total)
        elif self.strict:
            padding = tokens == self.pad_id
        assert padding is not None
        return Stream(
            tokens=tokens,
            labels=self._cut(self.labels, first, stop).reshape(-1),
            positions=None
            if self.positions is None
            else self._cut(self.positions, first, stop).reshape(-1),
            padding=padding.to(tokens.device),
            loss_mask=None
            if self.loss_mask is None
            else self._cut(self.loss_mask, first, stop).reshape(total),
            cu=cu,
            cu_padded=cu_padded,
            longest=longest,
        )

    def _cut(self, tensor: Tensor, first: int, stop: int) -> Tensor:
        whole = stop - first == self.tokens.shape[0]
        return tensor if whole else tensor[first:stop]

    def _offsets(
        self, first: int, stop: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        assert self.lengths is not None
        lengths = self._cut(self.lengths, first, stop)
        slots = None if self.slots is None else self._cut(self.slots, first, stop)
        rows, length = stop - first, self.tokens.shape[1]
        if self.strict:  # the reference sees one list of lengths, no rows
            lengths = lengths.reshape(1, -1)
            slots = None if slots is None else slots.reshape(1, -1)
            rows, length = 1, rows * length
        return _nemo.thd_lengths(lengths, slots, self.sentinel, rows, length, self.strict)


def streams_of(
    who: str,
    batch: Batch,
    num_chunks: Any,
    sentinel: Any,
    pad_id: Any,
    loss_mask: Any = None,
) -> Streams:
    """Check a batch of rows and lay `num_chunks` groups of them end to end."""
    rows = _checked(who, batch, sentinel, pad_id, loss_mask)
    chunks = max(integer(who, "num_chunks", num_chunks), 1)
    count = rows.tokens.shape[0]
    each = count // chunks
    if each == 0 or (count % chunks != 0 and not rows.strict):
        raise ValueError(
            f"{who}: {count} rows do not split into {chunks} equal chunks; "
            "choose a num_chunks that divides the rows, or add rows"
        )
    seq_lens = batch["seq_lens"]
    return Streams(
        who=who,
        streams=[rows.stream(i * each, (i + 1) * each) for i in range(chunks)],
        others={k: v for k, v in batch.items() if not isinstance(v, Tensor)},
        device=torch.device("cpu") if seq_lens is None else seq_lens.device,
        sentinel=rows.sentinel,
        chunked=chunks > 1,
    )


def _checked(who: str, batch: Batch, sentinel: Any, pad_id: Any, loss_mask: Any) -> _Rows:
    if not isinstance(batch, Mapping):
        raise TypeError(f"{who}: the batch is a {type(batch).__name__}; pass a dict")
    values = {key: required(who, batch, key) for key in _REQUIRED}
    strict = is_strict()
    sentinel = integer(who, "seq_lens_padding_value", sentinel)
    if abs(sentinel) > INT32_MAX:
        raise ValueError(f"{who}: seq_lens_padding_value {sentinel} does not fit in int32")
    pad_id = integer(who, "padding_token_id", pad_id)
    tokens = tensor_at(who, "input_ids", values["input_ids"])
    if tokens.dim() not in (2, 3):
        raise ValueError(
            f"{who}: `input_ids` is {shape_of(tokens)}; expected [rows, tokens] "
            "or [rows, tokens, width]"
        )
    if tokens.numel() == 0:
        raise ValueError(f"{who}: `input_ids` is {shape_of(tokens)}: the batch is empty")
    count, length = tokens.shape[:2]
    if values["seq_lens"] is not None and count * length > INT32_MAX:
        raise ValueError(
            f"{who}: {count} rows of {length} tokens are {count * length} tokens; "
            f"int32 offsets end at {INT32_MAX}, use more chunks or smaller batches"
        )
    labels = check_row_matrix(who, "labels", values["labels"], count, length)
    lengths, slots = _lengths(who, values["seq_lens"], values["seq_lens_padded"], count, strict)
    if loss_mask is not None:
        loss_mask = check_row_matrix(who, "loss_mask", loss_mask, count, length)
    padding = None
    if not strict:
        padding = _padding(who, batch, tokens, lengths is not None, pad_id)
    return _Rows(
        who=who,
        tokens=tokens,
        labels=labels,
        positions=_positions(who, values["position_ids"], count, length, strict),
        padding=padding,
        loss_mask=loss_mask,
        lengths=lengths,
        slots=slots,
        sentinel=sentinel,
        pad_id=pad_id,
        strict=strict,
    )


def _positions(who: str, given: Any, rows: int, length: int, strict: bool) -> Tensor | None:
    if given is None:
        return None
    positions = tensor_at(who, "position_ids", given)
    if strict and positions.dim() > 0:
        return positions
    if tuple(positions.shape) not in ((rows, length), (1, length)):
        raise ValueError(
            f"{who}: `position_ids` is {shape_of(positions)}; expected "
            f"[{rows}, {length}] (a stream has one position for each token)"
        )
    return positions.expand(rows, length)


def _lengths(
    who: str, lengths: Any, slots: Any, rows: int, strict: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Both tables on the host, with one read if they are on a device."""
    if lengths is None:
        return None, None
    tables = [_table(who, "seq_lens", lengths, rows, strict)]
    if slots is not None:
        tables.append(_table(who, "seq_lens_padded", slots, rows, strict))
    if any(table.device.type != "cpu" for table in tables):
        flat = torch.cat([t.reshape(-1).to(lengths.device) for t in tables]).cpu()
        parts = [flat[: lengths.numel()], flat[lengths.numel() :]]
        tables = [p.view(t.shape) for p, t in zip(parts, tables, strict=False)]
    return tables[0], tables[1] if slots is not None else None


def _table(who: str, name: str, value: Any, rows: int, strict: bool) -> Tensor:
    table = tensor_at(who, name, value)
    if not is_integral(table):
        raise ValueError(f"{who}: `{name}` is {table.dtype}; lengths are integers")
    if table.dim() == 1 and table.shape[0] == rows:
        table = table.unsqueeze(1)  # one document in each row
    elif table.dim() == 1 and rows == 1:
        table = table.unsqueeze(0)
    of_rows = table.dim() == 2 and table.shape[0] == rows
    if table.dim() == 0 or not (of_rows or strict):
        raise ValueError(
            f"{who}: `{name}` is {shape_of(table)}; expected one row of lengths "
            f"for each of the {rows} rows"
        )
    return table.to(torch.int64)


def _padding(
    who: str, batch: Batch, tokens: Tensor, lengths_known: bool, pad_id: int
) -> Tensor | None:
    """[rows, tokens], or None where the lengths tell."""
    rows, length = tokens.shape[:2]
    given = batch.get("padding_mask")
    if given is not None:
        mask = check_row_matrix(who, "padding_mask", given, rows, length)
        if mask.is_floating_point() or mask.is_complex():
            raise ValueError(
                f"{who}: `padding_mask` is {mask.dtype} {shape_of(mask)}; expected "
                f"bool [{rows}, {length}], True = pad"
            )
        return mask.to(torch.bool)
    if lengths_known:
        return None
    if tokens.dim() == 3:
        return torch.zeros(rows, length, dtype=torch.bool, device=tokens.device)
    mask = tokens == pad_id
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            f"{who}: token id {pad_id} stands before other tokens of its row, so "
            "ids cannot tell pads from content; pass `seq_lens` or `padding_mask`"
        )
    return mask
