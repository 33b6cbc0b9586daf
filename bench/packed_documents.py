"""How far packed and padded batches are from each document alone: transformers as
it is, and over two ranks of ours.

    python bench/packed_documents.py
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import sys
from typing import Any

import torch
import transformers

import longspan
from longspan import Group

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from oracle.tiny_decoders import FAMILIES, Case, answer_of, decoder, packed, padded

PACKED = packed([6, 8, 9], [21, 2])
LEFT = padded([13, 5, 17], 17, "left")


def difference(model: Any, case: Case, logits: torch.Tensor) -> float:
    """The largest one of a logit, relative to the largest logit."""
    alone = answer_of(model, case).logits
    found = [logits[d.row, d.begin : d.end] for d in case.documents]
    worst = torch.stack([(f - a).abs().max() for f, a in zip(found, alone, strict=True)])
    return (worst.max() / torch.stack([a.abs().max() for a in alone]).max()).item()


@torch.no_grad()
def theirs(model: Any, case: Case, **options: Any) -> torch.Tensor:
    return model(input_ids=case.ids, **options).logits


def ours(model: Any, case: Case) -> torch.Tensor:
    batch = {key: value for key, value in case.batch.items() if key != "labels"}

    def body(group: Group) -> torch.Tensor:
        mine = longspan.parallelize(copy.deepcopy(model), group)
        local = longspan.shard(batch, group, model=mine)
        with torch.no_grad():
            return longspan.unshard(mine(**local).logits, local)

    return longspan.run_ranks(2, body)[0]


def row(family: str) -> dict[str, Any]:
    model = decoder(family)
    eager = decoder(family)
    eager.set_attn_implementation("eager")
    positions = PACKED.batch["position_ids"]
    mask = LEFT.batch["attention_mask"]
    real = (mask.cumsum(1) - 1).clamp(min=0)
    ones = torch.ones_like(PACKED.ids)
    return {
        "family": family,
        "packed": difference(model, PACKED, theirs(model, PACKED, position_ids=positions)),
        "packed, no cache": difference(
            model, PACKED, theirs(model, PACKED, position_ids=positions, use_cache=False)
        ),
        "packed, no cache, mask of ones": difference(
            model,
            PACKED,
            theirs(model, PACKED, position_ids=positions, use_cache=False, attention_mask=ones),
        ),
        "left pads": difference(
            model, LEFT, theirs(model, LEFT, position_ids=real, attention_mask=mask)
        ),
        "left pads, eager": difference(
            eager, LEFT, theirs(eager, LEFT, position_ids=real, attention_mask=mask)
        ),
        "ours, packed": difference(model, PACKED, ours(model, PACKED)),
        "ours, left pads": difference(model, LEFT, ours(model, LEFT)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [row(family) for family in FAMILIES]
    if args.json:
        print(json.dumps({"transformers": transformers.__version__, "rows": rows}))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("| --- " * len(rows[0]) + "|")
    for one in rows:
        cells = [v if isinstance(v, str) else f"{v:.0e}" for v in one.values()]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
