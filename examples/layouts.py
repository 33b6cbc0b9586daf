"""Every layout of a packed batch: a picture of who owns which token, and a
table that cuts the batch over four ranks and joins it again.

    make demo
    python examples/layouts.py --ranks 4 --out build/demo
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch

import longspan

LENGTHS = [[19, 10], [24, 5]]
SLOTS = [[20, 12], [24, 8]]


def packed_rows() -> dict[str, torch.Tensor]:
    """Two rows of packed documents with pads; every token says where it is
    from, 1000 * row + column, so that a wrong one names its source."""
    row = torch.arange(32)
    ids = torch.stack([row, 1000 + row])
    return {
        "input_ids": ids,
        "labels": ids + 1,
        "seq_lens": torch.tensor(LENGTHS),
        "seq_lens_padded": torch.tensor(SLOTS),
    }


def share_of(
    batch: dict[str, torch.Tensor], name: str, rank: int, ranks: int
) -> longspan.values.LocalBatch:
    if name != "uneven":
        return longspan.shard(batch, rank=rank, ranks=ranks, layout=name)
    # A quarter of the tokens on rank 0, an eighth on the last one, the rest on
    # rank 1, and nothing on those between.
    tokens = longspan.values.pack(batch).tokens
    sizes = [0] * ranks
    sizes[0] = tokens // 4
    sizes[-1] += tokens // 8
    sizes[min(1, ranks - 1)] += tokens - sum(sizes)
    ownership = longspan.Ownership.of_sizes(sizes)
    return longspan.shard(batch, rank=rank, ranks=ranks, layout=ownership, form="stream")


def check(
    batch: dict[str, torch.Tensor], shares: list[longspan.values.LocalBatch]
) -> dict[str, int]:
    """Counts what would be wrong: all zero when shard and unshard are inverse."""
    ids = batch["input_ids"]
    held = torch.cat([share["input_ids"][~share["padding_mask"]] for share in shares])
    pads = torch.stack([torch.ones(32, dtype=torch.bool)] * 2)
    for row, (lengths, slots) in enumerate(zip(LENGTHS, SLOTS, strict=True)):
        begin = 0
        for length, slot in zip(lengths, slots, strict=True):
            pads[row, begin : begin + length] = False
            begin += slot
    real = ids[~pads]
    back = longspan.unshard([share["input_ids"] for share in shares], shares[0])
    return {
        "real": len(real),
        "lost": len(set(real.tolist()) - set(held.tolist())),
        "doubled": len(held) - len(set(held.tolist())),
        "moved": int((back != ids).sum()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, help="also write the pictures as SVG here")
    options = parser.parse_args()
    batch = packed_rows()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in [*(layout.name for layout in longspan.values.named_layouts()), "uneven"]:
        shares = [share_of(batch, name, rank, options.ranks) for rank in range(options.ranks)]
        cut = shares[0].cut
        mask = longspan.Mask.causal(cut.packings[0])
        picture = longspan.draw(cut.ownership, packing=cut.packings[0])
        print(f"== {name}" + (" (row 0 of 2)" if cut.form == "rows" else ""))
        print(picture)
        work = [longspan.values.work_of(mask, cut.ownership, r).pairs for r in range(options.ranks)]
        print(f"causal pairs of each rank: {' '.join(map(str, work))}\n")
        rows.append((name, cut, check(batch, shares)))
        if options.out:
            svg = longspan.draw(cut.ownership, mask).to_svg()
            (options.out / f"{name}.svg").write_text(svg)
    print(
        f"A batch of 2 x 32 tokens, 58 of them real in 4 documents, over {options.ranks} ranks:\n"
    )
    print(f"{'layout':24}{'form':8}{'tokens a rank':>16}{'lost':>6}{'doubled':>9}{'moved':>7}")
    wrong = 0
    for name, cut, result in rows:
        held = [cut.ownership.local_tokens(r) for r in range(options.ranks)]
        even = len(set(held)) == 1
        print(
            f"{name:24}{cut.form:8}{(str(held[0]) if even else '/'.join(map(str, held))):>16}"
            f"{result['lost']:>6}{result['doubled']:>9}{result['moved']:>7}"
        )
        wrong += result["lost"] + result["doubled"] + result["moved"]
    print()
    print(
        "Nothing is lost, doubled or moved."
        if wrong == 0
        else f"{wrong} tokens are not where they belong."
    )
    if options.out:
        print(f"Pictures: {options.out}/*.svg")
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
