"""Context parallelism: who owns which token, who sees whom, and batches cut and
joined from those values.

The words are those of the C++ library, and the work is done there.
"""

import torch as _torch  # noqa: F401  (its libraries must be loaded first)

from longspan._attention import (
    AttentionLayout,
    attend,
    kernel_levels,
    merge,
    plan,
    which_kernel,
)
from longspan._batch import pack, pad, shard, shard_chunks, unshard
from longspan._C import (
    Cut,
    Mask,
    Ownership,
    PackedBatch,
    Packing,
    Picture,
    Plan,
    RankWork,
    TokenRange,
    TokenTable,
    __version__,
    cumulative_lengths,
    cumulative_padded_lengths,
    document_ids,
    key_windows,
    named_layouts,
    needed_table,
    padding_mask,
    position_ids,
    received_ranges,
    tiles,
    work_of,
    work_per_rank,
)
from longspan._clipping import clip_grad_norm
from longspan._drawing import draw, draw_plan
from longspan._explaining import explain
from longspan._gradients import sum_gradients
from longspan._group import Group, LostPeer, agree, run_ranks
from longspan._local_batch import LocalBatch
from longspan._losses import reduce_loss
from longspan._models import parallelize, restore
from longspan._parity import check_parity, leak_probe
from longspan._randomness import rank_seed, seed_ranks, seeded_ranks
from longspan._strategy import Strategy
from longspan.comm import (
    all_gather_tokens,
    all_to_all_heads,
    all_to_all_tokens,
    exchange_needed,
    reduce_scatter_tokens,
    return_needed,
    roll,
    rotate,
)
from longspan.operators import (
    attend_dense,
    document_windows,
    index_scores,
    rotate_channels,
    window_lists,
)
from longspan.selected import (
    FETCHES,
    attend_selected,
    compare_selections,
    index_loss,
    score_selected,
    select_and_attend,
    select_keys,
    selected_weights,
    top_keys,
    which_indexer_kernel,
    which_selected_kernel,
)

__all__ = [
    "FETCHES",
    "AttentionLayout",
    "Cut",
    "Group",
    "LocalBatch",
    "LostPeer",
    "Mask",
    "Ownership",
    "PackedBatch",
    "Packing",
    "Picture",
    "Plan",
    "RankWork",
    "Strategy",
    "TokenRange",
    "TokenTable",
    "__version__",
    "agree",
    "all_gather_tokens",
    "all_to_all_heads",
    "all_to_all_tokens",
    "attend",
    "attend_dense",
    "attend_selected",
    "check_parity",
    "clip_grad_norm",
    "compare_selections",
    "cumulative_lengths",
    "cumulative_padded_lengths",
    "document_ids",
    "document_windows",
    "draw",
    "draw_plan",
    "exchange_needed",
    "explain",
    "index_loss",
    "index_scores",
    "kernel_levels",
    "key_windows",
    "leak_probe",
    "merge",
    "named_layouts",
    "needed_table",
    "pack",
    "pad",
    "padding_mask",
    "parallelize",
    "plan",
    "position_ids",
    "rank_seed",
    "received_ranges",
    "reduce_loss",
    "reduce_scatter_tokens",
    "restore",
    "return_needed",
    "roll",
    "rotate",
    "rotate_channels",
    "run_ranks",
    "score_selected",
    "seed_ranks",
    "seeded_ranks",
    "select_and_attend",
    "select_keys",
    "selected_weights",
    "shard",
    "shard_chunks",
    "sum_gradients",
    "tiles",
    "top_keys",
    "unshard",
    "which_indexer_kernel",
    "which_kernel",
    "which_selected_kernel",
    "window_lists",
    "work_of",
    "work_per_rank",
]
