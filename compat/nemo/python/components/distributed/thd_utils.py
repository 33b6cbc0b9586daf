"""Rows with length tables become one stream of documents ("THD")."""

from __future__ import annotations

from longspan.compat.nemo._batch import Batch
from longspan.compat.nemo._edge import public
from longspan.compat.nemo._stream import streams_of

__all__ = ["process_input_for_thd", "split_batch_into_thd_chunks"]


@public
def process_input_for_thd(
    batch: Batch, seq_lens_padding_value: int = -1000, padding_token_id: int = 0
) -> Batch:
    """Lay the rows of a batch end to end and add cumulative lengths.

    `padding_mask` is the caller's, or follows from the lengths; token ids are
    compared only where there are no lengths, and then the matches must end
    their rows.
    """
    return streams_of(
        "process_input_for_thd", batch, 1, seq_lens_padding_value, padding_token_id
    ).one()


@public
def split_batch_into_thd_chunks(
    batch: Batch,
    num_chunks: int,
    seq_lens_padding_value: int = -1000,
    padding_token_id: int = 0,
) -> Batch:
    """`process_input_for_thd` of `num_chunks` equal groups of rows, stacked on a new axis."""
    return streams_of(
        "split_batch_into_thd_chunks",
        batch,
        num_chunks,
        seq_lens_padding_value,
        padding_token_id,
    ).as_map()
