"""Documents that two shards share, as segments of variable length."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from longspan.compat.nemo._strict import is_strict


def build_segments(q_ids: Tensor, k_ids: Tensor) -> dict[str, Any] | None:
    """Tokens of each document that is in both shards, paired; None without one.

    Indices count over the flattened [B, S]. Documents come in the order in which
    they first occur in the query row, rows in order; ids <= 0 are pads.
    """
    q_rows, k_rows = q_ids.tolist(), k_ids.tolist()
    q_index: list[int] = []
    k_index: list[int] = []
    cu_q, cu_k = [0], [0]
    for row, (q_row, k_row) in enumerate(zip(q_rows, k_rows, strict=True)):
        q_places = _places(q_row, row * q_ids.shape[1])
        k_places = _places(k_row, row * k_ids.shape[1])
        for document, queries in q_places.items():
            if document in k_places:
                q_index += queries
                k_index += k_places[document]
                cu_q.append(len(q_index))
                cu_k.append(len(k_index))
    if len(cu_q) == 1:
        return None
    dense_local = all(_is_one_document(row) for row in q_rows)
    # The reference asks whether rows of keys are one document, not which one.
    dense_cross = dense_local and all(
        len(set(k_row)) == 1 and (k_row[0] > 0 if is_strict() else k_row[0] == q_row[0])
        for q_row, k_row in zip(q_rows, k_rows, strict=True)
    )
    pads = [token <= 0 for row in q_rows for token in row]

    def on_device(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=q_ids.device)

    return {
        "q_index": on_device(q_index, torch.int64),
        "k_index": on_device(k_index, torch.int64),
        "cu_q": on_device(cu_q, torch.int32),
        "cu_k": on_device(cu_k, torch.int32),
        "max_q": max(b - a for a, b in itertools.pairwise(cu_q)),
        "max_k": max(b - a for a, b in itertools.pairwise(cu_k)),
        "dense_local": dense_local,
        "dense_cross": dense_cross,
        "pad_rows": q_ids <= 0 if any(pads) else None,
    }


def _places(row: list[int], offset: int) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for at, document in enumerate(row):
        if document > 0:
            places.setdefault(document, []).append(offset + at)
    return places


def _is_one_document(row: list[int]) -> bool:
    """One document from the first token on, then nothing but pads."""
    real = [document for document in row if document > 0]
    return bool(real) and len(set(real)) == 1 and row[: len(real)] == real
