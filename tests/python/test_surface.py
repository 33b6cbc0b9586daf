"""The public names, by module. A name more or fewer is a decision: write it down here."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import pytest

import longspan

TOP = [
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
    "draw",
    "expert_counts",
    "explain",
    "leak_probe",
    "linear_cross_entropy",
    "mtp_losses",
    "parallelize",
    "paused",
    "plan",
    "reduce_loss",
    "report",
    "restore",
    "run_ranks",
    "seed_ranks",
    "shard",
    "sum_gradients",
    "total_loss",
    "unshard",
    "which_kernel",
]

MODULES = {
    "comm": [
        "HaloPlan",
        "LostPeer",
        "StatePlan",
        "agree",
        "all_gather_tokens",
        "all_to_all_heads",
        "all_to_all_tokens",
        "carry_states",
        "exchange_needed",
        "in_layer",
        "needed_table",
        "rank_seed",
        "received_ranges",
        "reduce_scatter_tokens",
        "return_needed",
        "roll",
        "rotate",
        "seeded_ranks",
        "tokens_before",
    ],
    "dsa": [
        "FETCHES",
        "PoolPlan",
        "SelectedAnswer",
        "attend_selected",
        "compare_selections",
        "document_windows",
        "gather_pools",
        "index_loss",
        "index_scores",
        "pool_tokens",
        "rotate_channels",
        "score_selected",
        "select_and_attend",
        "select_keys",
        "selected_weights",
        "top_keys",
        "window_lists",
    ],
    "hf": ["TrainerMixin", "prefill", "trainer"],
    "proof": ["Proof", "prove"],
    "testing": ["attend_dense", "kernel_levels", "merge"],
    "values": [
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
    ],
}


#: What takes most of a second to import and few programs need.
HEAVY = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers")


def test_the_top() -> None:
    assert sorted(longspan.__all__) == sorted([*TOP, *MODULES])
    # In an interpreter of its own: other tests may have imported more below it.
    lines = (
        "import sys, longspan; print(*(n for n in dir(longspan) if not n.startswith('_')))\n"
        f"print(*(n for n in {HEAVY} if n in sys.modules))"
    )
    seen = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    names, heavy = seen.stdout.splitlines()
    assert set(names.split()) == {*TOP, *MODULES} - {"__version__"}
    assert not heavy, f"importing longspan imports {heavy}, which takes longer than all of it"


@pytest.mark.parametrize("name", MODULES)
def test_a_module(name: str) -> None:
    module = getattr(longspan, name)
    assert sorted(module.__all__) == sorted(MODULES[name])
    made_here = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    assert made_here <= set(module.__all__)


def test_everything_public_says_what_it_is() -> None:
    for name, names in {"": TOP, **MODULES}.items():
        module = getattr(longspan, name) if name else longspan
        for key in names:
            value = getattr(module, key)
            if inspect.isclass(value) or isinstance(value, types.FunctionType):
                assert value.__doc__, f"{name}.{key} has no docstring"
