"""python -m sweep [--only TEXT] [--jobs N] [--page docs/families.md] [--was PAGE]: judges every
causal family of the installed transformers, and writes the table as a page."""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import transformers

from sweep.families import families
from sweep.judging import Verdict, count, judge

_HEAD = """\
# Families

Every causal family of transformers {version}, and some more configurations, as tiny models
with random weights: {named} families and {more} configurations. Made by `make sweep`.

| | families | more configurations |
| --- | --- | --- |
{counts}

*right* means that logits and every gradient over 2 and 3 ranks, with packed, left-padded and
right-padded batches, are those of each document alone, to the largest difference shown
(relative to the largest value of the tensor, float64; many families compute norms, rotary tables or
routers in float32; families with scans, which are float32 throughout, were made to compute in
float64). *refused* means that `parallelize` raises the message. *not made* means
that transformers itself does not build or run the family from its own defaults, on a CPU,
with nothing but `input_ids` and the packages that were installed (gemma3n wants PIL and timm for
its tower; its text decoder, gemma3n_text, needs neither).

"""


def page(verdicts: list[Verdict], named: int) -> str:
    """The table as a page."""
    words = ["right", "refused", "late", "wrong", "crashed", "not made"]
    counts = "\n".join(
        f"| {word} | {count(verdicts[:named], word)} | {count(verdicts[named:], word)} |"
        for word in words
    )
    text = _HEAD.format(
        version=transformers.__version__,
        named=named,
        more=len(verdicts) - named,
        counts=counts,
    )
    text += "| family | | |\n| --- | --- | --- |\n"
    for one in verdicts:
        why = one.why.removeprefix("parallelize: ").replace("|", "\\|")
        text += f"| {one.name} | {one.word} | {why} |\n"
    return text


def no_longer_right(verdicts: list[Verdict], before: str) -> list[Verdict]:
    """Of families that were right on an earlier page."""
    was = set(re.findall(r"^\| (\S[^|]*) \| right \|", before, re.MULTILINE))
    return [one for one in verdicts if one.name in was and one.word != "right"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--was", type=pathlib.Path, help="a page whose right ones must be right")
    options = parser.parse_args()
    wanted = [family for family in families() if options.only in family.name]
    begin = time.monotonic()
    # Of another module than this one: processes that are started afresh find it.
    workers = ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,))
    with workers as pool:
        verdicts = []
        for verdict in pool.map(judge, wanted):
            print(f"{verdict} {verdict.seconds:.1f} s", flush=True)
            verdicts.append(verdict)
    named = sum(family.name == family.kind for family in wanted)
    words = ("right", "refused", "late", "wrong", "crashed", "not made")
    print(", ".join(f"{count(verdicts, word)} {word}" for word in words), end="; ")
    print(f"{time.monotonic() - begin:.0f} s")
    if options.page and not options.only:
        options.page.write_text(page(verdicts, named))
    lost = no_longer_right(verdicts, options.was.read_text()) if options.was else []
    for one in lost:
        print(f"was right: {one}")
    return 1 if lost or any(v.word in ("late", "wrong", "crashed") for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
