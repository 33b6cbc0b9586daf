"""One rank's share of a stream in the per-document head-tail layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan import _C
from longspan.compat.nemo._batch import Batch, is_integral, required, shape_of, tensor_at
from longspan.compat.nemo._strict import is_strict

_PER_TOKEN = ("input_ids", "labels", "position_ids", "padding_mask")


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
    """Spec 4.2; the per-token tensors of `batch` become shares.

    `offsets` are the slots' on the host, without sentinels. If `batch` has no
    mask of pads it follows from `lengths`, the cumulative real ones.
    """
    strict = is_strict()
    share = _Share(who, offsets.to(torch.int32), ranks, rank, strict)
    for key in _PER_TOKEN[:3]:
        batch[key] = share.of(key, required(who, batch, key))
    ids = batch["input_ids"]
    padding = batch.get("padding_mask")
    if padding is None and lengths is not None and not strict:
        padding = padding_of_offsets(lengths, offsets, share.total).to(ids.device)
    if padding is not None:
        padding = share.of("padding_mask", padding)
        if "padding_mask" in batch:
            batch["padding_mask"] = padding
    if strict or not ids.is_floating_point():
        ids = ids.to(torch.int64)
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
        "padding_mask": local_padding(padding, ids, padding_token_id),
        "cp_size": ranks,
        "cp_rank": rank,
    }
    if loss_mask is not None:
        out["loss_mask"] = share.of("loss_mask", loss_mask)
    return out


def local_padding(padding: Tensor | None, ids: Tensor, padding_token_id: int) -> Tensor:
    """A rank's mask of pads: known from the stream, or read off the token ids."""
    if not is_strict():
        if padding is not None:
            return padding.to(torch.bool)
        if ids.is_floating_point():
            return torch.zeros(ids.shape[:1], dtype=torch.bool, device=ids.device)
    return ids == padding_token_id


def offsets_on_host(
    who: str, cu: Any, cu_padded: Any, sentinel: int
) -> tuple[Tensor | None, Tensor]:
    """(cumulative real lengths or None, offsets of the slots), with one read.

    Both without sentinels. The first is None where `cu` serves as both.
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
        return offsets[(offsets != sentinel) & (offsets >= 0)]

    return (None, real(lengths)) if cu_padded is None else (real(lengths), real(slots))


def padding_of_offsets(lengths: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Pads of a stream, from cumulative real lengths and offsets of slots."""
    real = lengths.diff().to(torch.int64).unsqueeze(0)
    slots = offsets.diff().to(torch.int64).unsqueeze(0)
    *_, padding = _C.thd_lengths(real, slots, -1000, 1, total, False)
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
            self._index = _C.document_partition(
                self._offsets, self.total, self._ranks, self._rank, self._strict
            )
        if self._index.device != tensor.device:
            self._index = self._index.to(tensor.device)
        return tensor.index_select(0, self._index)
