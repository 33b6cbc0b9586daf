"""Context parallelism: who owns which token, who sees whom, and batches cut and
joined from those values.

The words are those of the C++ library, and the work is done there. What most programs
need is here; `longspan.comm` has collectives, `longspan.dsa` attention to selected keys,
`longspan.values` the other values and what is made from them, `longspan.hf` trainers of Hugging
Face, `longspan.proof` why a model may be cut, `longspan.testing` slow and plain answers to
compare with.
"""

import torch as _torch  # noqa: F401  (its libraries must be loaded first)

from longspan import _torch_version  # noqa: F401  (refuses another torch)

# isort: split

from longspan import comm, dsa, hf, proof, testing, values
from longspan._attention import AttentionLayout, attend, plan
from longspan._batch import shard, unshard
from longspan._C import Mask, Ownership, Packing, Plan, __version__
from longspan._clipping import clip_grad_norm
from longspan._cross_entropy import linear_cross_entropy
from longspan._drawing import draw
from longspan._explaining import explain
from longspan._gradients import sum_gradients
from longspan._group import Group, run_ranks
from longspan._kernels import which_kernel
from longspan._losses import reduce_loss, total_loss
from longspan._models import parallelize, paused, restore
from longspan._mtp import mtp_losses
from longspan._parity import check_parity, leak_probe
from longspan._randomness import seed_ranks
from longspan._reporting import report
from longspan._routers import expert_counts
from longspan._strategy import Strategy

__all__ = [
    "AttentionLayout",
    "Group",
    "Mask",
    "Ownership",
    "Packing",
    "Plan",
    "Strategy",
    "__version__",
    "attend",
    "check_parity",
    "clip_grad_norm",
    "comm",
    "draw",
    "dsa",
    "expert_counts",
    "explain",
    "hf",
    "leak_probe",
    "linear_cross_entropy",
    "mtp_losses",
    "parallelize",
    "paused",
    "plan",
    "proof",
    "reduce_loss",
    "report",
    "restore",
    "run_ranks",
    "seed_ranks",
    "shard",
    "sum_gradients",
    "testing",
    "total_loss",
    "unshard",
    "values",
    "which_kernel",
]
