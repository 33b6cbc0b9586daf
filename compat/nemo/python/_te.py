"""One rank's share of a stream in the per-document head-tail layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import (
    INT32_MAX,
    Batch,
    is_integral,
    required,
    shape_of,
    tensor_at,
)
from longspan.compat.nemo._stream import Streams
from longspan.compat.nemo._strict import is_strict

# The dispatcher's loss mask on its way through make_cp_batch_for_te, which has no
# argument for it and may be replaced: (the batch it belongs to, the mask).
_carried: ContextVar[tuple[Batch, Any] | None] = ContextVar(
    "longspan.compat.nemo.loss_mask", default=None
)


@contextlib.contextmanager
def carrying_loss_mask(batch: Batch, loss_mask: Any) -> Iterator[None]:
    """Inside, `carried_loss_mask(batch)` is `loss_mask`."""
    token = _carried.set(None if loss_mask is None else (batch, loss_mask))
    try:
        yield
    finally:
        _carried.reset(token)


def carried_loss_mask(batch: Batch) -> Any:
    """The loss mask that is carried for `batch`, or for the rows it was made of."""
    carried = _carried.get()
    if carried is None:
        return None
    owner, mask = carried
    if batch is owner:
        return mask
    ids = batch.get("input_ids")
    fits = isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape[:2]
    return mask if fits else None


def share_streams(
    who: str,
    streams: Streams,
    ranks: int,
    rank: int,
    *,
    qkv_format: str,
    padding_token_id: int,
) -> Batch:
    """The shares of all chunks, stacked if there is a chunk axis."""
    converted = streams.as_map()
    shares = []
    for chunk, stream in enumerate(streams.streams):
        if stream.offsets is None:
            raise ValueError(
                f"{who}: BSHD format is not supported: `seq_lens` is null; give "
                "the lengths of the documents"
            )
        fields = converted
        if streams.chunked:
            fields = {
                key: value[chunk] if isinstance(value, Tensor) else value
                for key, value in converted.items()
            }
        shares.append(
            share_stream(
                who,
                fields,
                ranks,
                rank,
                qkv_format=qkv_format,
                offsets=stream.offsets,
                padding_token_id=padding_token_id,
                loss_mask=stream.loss_mask,
            )
        )
    if not streams.chunked:
        return shares[0]
    return {
        key: torch.stack([each[key] for each in shares]) if isinstance(value, Tensor) else value
        for key, value in shares[0].items()
    }


def share_stream(
    who: str,
    batch: Batch,
    ranks: int,
    rank: int,
    *,
    qkv_format: str,
    offsets: Tensor,
    padding_token_id: int,
    lengths: Tensor | None = None,
    loss_mask: Tensor | None = None,
) -> dict[str, Any]:
    """A rank's share of one stream; the per-token tensors of `batch` become shares.

    `offsets` of the slots and `lengths`, the cumulative real ones, are on the host,
    without sentinels. They tell the pads if `batch` has no mask of them; without
    `lengths` all slots are full.
    """
    strict = is_strict()
    share = _Share(who, _checked_offsets(who, offsets, ranks), ranks, rank, strict)
    for key in ("input_ids", "labels", "position_ids"):
        batch[key] = share.of(key, required(who, batch, key))
    ids = batch["input_ids"]
    padding = batch.get("padding_mask")
    if padding is not None:
        padding = batch["padding_mask"] = share.of("padding_mask", padding)
    if strict:  # of the ids as they came: 0.5 is no 0
        padding = ids == padding_token_id
    if strict or not ids.is_floating_point():
        ids = ids.to(torch.int64)
    if padding is None:
        real = offsets if lengths is None else lengths
        padding = padding_of_offsets(who, real, offsets, share.total).to(ids.device)
        padding = share.of("padding_mask", padding)
    published = batch.get("cu_seqlens_padded")
    if published is None:
        published = batch["cu_seqlens"]
    out: dict[str, Any] = {
        "input_ids": ids.contiguous(),
        "labels": batch["labels"].to(torch.int64).contiguous(),
        "position_ids": batch["position_ids"].to(torch.int64).contiguous(),
        "cu_seqlens": published.to(torch.int32),
        "max_seqlen": offsets.diff().max().to(torch.int32).to(published.device),
        "qkv_format": qkv_format,
        "padding_mask": padding.to(torch.bool),
        "cp_size": ranks,
        "cp_rank": rank,
    }
    if loss_mask is not None:
        out["loss_mask"] = share.of("loss_mask", loss_mask)
    return out


def _checked_offsets(who: str, offsets: Tensor, ranks: int) -> Tensor:
    """int32, with at least one document."""
    if offsets.numel() < 2:
        raise ValueError(
            f"{who}: `cu_seqlens` is {offsets.tolist()}: no document to share over "
            f"{ranks} ranks; give at least one length (a row of pads alone is a document "
            "of length 0 in a slot as long as the row)"
        )
    if int(offsets.max()) > INT32_MAX:
        raise ValueError(f"{who}: an offset of {int(offsets.max())} does not fit in int32")
    return offsets.to(torch.int32)


def offsets_on_host(who: str, cu: Any, cu_padded: Any, sentinel: int) -> tuple[Tensor, Tensor]:
    """(cumulative real lengths, offsets of the slots), with one read.

    Both without sentinels. Where `cu` is alone it serves as both.
    """
    arrays = [tensor_at(who, "cu_seqlens", cu).reshape(-1)]
    if cu_padded is not None:
        arrays.append(tensor_at(who, "cu_seqlens_padded", cu_padded).reshape(-1))
    for array in arrays:
        if not is_integral(array):
            raise ValueError(f"{who}: offsets are {array.dtype}; expected integers")
    both = torch.cat([array.to(arrays[0].device) for array in arrays]).cpu()
    both = both.to(torch.int64)
    lengths, slots = both[: arrays[0].numel()], both[arrays[0].numel() :]

    def real(offsets: Tensor) -> Tensor:
        kept = (offsets != sentinel) & (offsets >= 0)
        kept[:1] = offsets[:1] >= 0  # where the first document begins, also if that is 0
        return offsets[kept]

    return real(lengths), real(lengths if cu_padded is None else slots)


def padding_of_offsets(who: str, lengths: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Pads of a stream, from cumulative real lengths and offsets of slots.

    What lies behind the last slot is a pad too.
    """
    for name, array in (("cu_seqlens", lengths), ("cu_seqlens_padded", offsets)):
        if array.numel() == 0:
            continue
        if int(array[0]) != 0 or bool((array.diff() < 0).any()):
            raise ValueError(f"{who}: `{name}` must start with 0 and never fall")
        if int(array[-1]) > total:
            raise ValueError(
                f"{who}: `{name}` ends at {int(array[-1])} but the stream has {total} tokens"
            )
    # One slot may hold several documents.
    if lengths.numel() != offsets.numel() and offsets.numel() != 2:
        raise ValueError(
            f"{who}: `cu_seqlens` has {lengths.numel()} offsets but `cu_seqlens_padded` "
            f"has {offsets.numel()}; give one slot for each document"
        )
    real = lengths.diff().unsqueeze(0)
    slots = offsets.diff().unsqueeze(0)
    *_, padding = _nemo.thd_lengths(real, slots, -1000, 1, total, False)
    assert padding is not None
    return padding


class _Share:
    """Takes a rank's tokens from tensors of the stream."""

    def __init__(self, who: str, offsets: Tensor, ranks: int, rank: int, strict: bool) -> None:
        self._who = who
        self._offsets = offsets
        self._ranks = ranks
        self._rank = rank
        self._strict = strict
        self._index: Tensor | None = None
        self.total = 0

    def of(self, name: str, value: Any) -> Tensor:
        """The share of one tensor [T, ...]."""
        if value is None:
            raise ValueError(
                f"{self._who}: `{name}` is null; a rank's share needs it, and a "
                "rank cannot make up what holds for the whole stream"
            )
        tensor = tensor_at(self._who, name, value)
        if tensor.dim() == 0:
            raise ValueError(f"{self._who}: `{name}` is a scalar; expected [tokens]")
        if self._index is None or tensor.shape[0] != self.total:
            if self._index is not None and not self._strict:
                raise ValueError(
                    f"{self._who}: `{name}` is {shape_of(tensor)} but the stream "
                    f"has {self.total} tokens"
                )
            self.total = tensor.shape[0]
            self._index = _nemo.document_partition(
                self._offsets, self.total, self._ranks, self._rank, self._strict
            )
        if self._index.device != tensor.device:
            self._index = self._index.to(tensor.device)
        return tensor.index_select(0, self._index)
