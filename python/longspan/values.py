"""Values beside those at the top, and what is made from them: batches before and after
the cut, tiles and work of ranks, tensors that say where documents lie, pictures."""

from longspan._batch import pack, pad, shard_chunks
from longspan._C import (
    Cut,
    DocumentRun,
    NamedLayout,
    PackedBatch,
    Picture,
    RankWork,
    TokenRange,
    TokenTable,
    cumulative_lengths,
    cumulative_padded_lengths,
    document_ids,
    key_windows,
    named_layouts,
    padding_mask,
    position_ids,
    runs_of,
    tiles,
    work_of,
    work_per_rank,
)
from longspan._drawing import draw_plan
from longspan._local_batch import LocalBatch

__all__ = [
    "Cut",
    "DocumentRun",
    "LocalBatch",
    "NamedLayout",
    "PackedBatch",
    "Picture",
    "RankWork",
    "TokenRange",
    "TokenTable",
    "cumulative_lengths",
    "cumulative_padded_lengths",
    "document_ids",
    "draw_plan",
    "key_windows",
    "named_layouts",
    "pack",
    "pad",
    "padding_mask",
    "position_ids",
    "runs_of",
    "shard_chunks",
    "tiles",
    "work_of",
    "work_per_rank",
]
