"""The reference's batch algorithms in plain torch, as one would write them:
index vectors for each tensor, then index_select. Written from the behaviour,
for comparison only."""

from __future__ import annotations

import torch


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    lengths = lengths.flatten()
    lengths = lengths[lengths != -1000]
    zero = torch.zeros(1, dtype=lengths.dtype, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0)]).to(torch.int32)


def partition(cu: torch.Tensor, total: int, ranks: int, rank: int) -> torch.Tensor:
    """What a rank holds when every document is cut into 2 * ranks chunks."""
    starts = (cu // ranks).to(torch.int64)
    local = torch.arange(total // ranks)
    document = torch.searchsorted(starts, local, right=True) - 1
    document = document.clamp(0, len(cu) - 2)
    begin = starts[document]
    half = (starts[document + 1] - begin) // 2
    inside = local - begin
    chunk = torch.where(inside < half, rank, 2 * (ranks - 1) - rank)
    return inside + begin * ranks + half * chunk


def shard_packed(batch: dict[str, torch.Tensor], ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """One stream from rows, padding mask from the layout, one rank's share."""
    cu, cu_padded = offsets(batch["seq_lens"]), offsets(batch["seq_lens_padded"])
    stream = {key: batch[key].reshape(-1) for key in ("input_ids", "labels", "position_ids")}
    total = stream["input_ids"].numel()
    token = torch.arange(total)
    document = torch.searchsorted(cu_padded.to(torch.int64), token, right=True) - 1
    document = document.clamp(0, len(cu) - 2)
    length = (cu[1:] - cu[:-1]).to(torch.int64)
    stream["padding_mask"] = token - cu_padded[document] >= length[document]
    share = {}
    for key, tensor in stream.items():
        index = partition(cu_padded, tensor.shape[0], ranks, rank)
        share[key] = tensor.index_select(0, index)
    share["cu_seqlens"] = cu_padded
    share["max_seqlen"] = (cu_padded[1:] - cu_padded[:-1]).max()
    return share


def padded_windows(cu: torch.Tensor, cu_padded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per query of the padded stream the half-open window of its keys."""
    query = torch.arange(int(cu_padded[-1]), dtype=torch.int32)
    document = torch.searchsorted(cu_padded, query, right=True) - 1
    document = document.clamp(0, len(cu) - 2)
    start = cu_padded[document]
    length = (cu[1:] - cu[:-1])[document]
    end = torch.maximum(torch.minimum(query + 1, start + length), start + 1)
    return start, end
