"""Context parallelism: who owns which token, who sees whom, and batches cut and
joined from those values.

The words are those of the C++ library, and the work is done there.
"""

import torch as _torch  # noqa: F401  (its libraries must be loaded first)

from longspan._C import (
    Layout,
    Mask,
    Ownership,
    PackedBatch,
    Packing,
    Picture,
    RankWork,
    TokenRange,
    TokenTable,
    __version__,
    cumulative_lengths,
    cumulative_padded_lengths,
    document_ids,
    key_windows,
    padding_mask,
    position_ids,
    tiles,
    work_of,
    work_per_rank,
)
from longspan.attention import STRATEGIES, attend, attention_layout, merge, plan
from longspan.batch import LocalBatch, pack, pad, shard, shard_chunks, unshard
from longspan.drawing import draw
from longspan.group import Group, run_ranks

__all__ = [
    "Layout",
    "LocalBatch",
    "Mask",
    "Ownership",
    "PackedBatch",
    "Packing",
    "Picture",
    "RankWork",
    "TokenRange",
    "TokenTable",
    "__version__",
    "cumulative_lengths",
    "cumulative_padded_lengths",
    "document_ids",
    "draw",
    "key_windows",
    "pack",
    "pad",
    "padding_mask",
    "position_ids",
    "shard",
    "shard_chunks",
    "tiles",
    "unshard",
    "work_of",
    "work_per_rank",
]
