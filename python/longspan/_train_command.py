"""`longspan train`: a tiny model of a family on the bytes of a text, over ranks."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longspan._charts import curve_in_text, loss_curve
from longspan._commands import (
    BAD_USAGE,
    DONE,
    REFUSED,
    WRONG,
    Arguments,
    Refusal,
    add_layout,
    add_strategy,
    add_word,
    family_named,
    group_of,
    is_launched,
    launch,
    need_transformers,
    number,
    one_line,
    progress,
    threads_for,
)
from longspan._printing import printed
from longspan._shrinking import positions_of
from longspan._training import (
    WORDS,
    Checkpoint,
    Corpus,
    Course,
    Step,
    Torn,
    Wishes,
    check_fits,
    latest,
    load,
    path_of,
    train,
)
from longspan._written import check_writable, write_whole

_WHO = "longspan train"
_DTYPES = ("float32", "float64")


def main(arguments: Sequence[str]) -> int:
    try:
        given = _parser().parse_args(arguments)
        wishes = _wishes(given)
        course, corpus = _course(given)
        model = _model(given, course)
        begin = _begin(given, course, model)
        if given.launcher == "torchrun" and not is_launched():
            return launch(given.ranks, ["train", *arguments])
        group = group_of(given.ranks) if is_launched() else None
    except (Refusal, Torn) as refusal:
        print(f"{_WHO}: {refusal}", file=sys.stderr)
        return BAD_USAGE
    leads = group is None or group.rank() == 0
    tell = _teller(given) if leads else lambda _: None
    try:
        with threads_for(1 if group is not None else given.ranks):
            losses = train(model, corpus, course, wishes, begin=begin, group=group, tell=tell)
        if leads and given.curve is not None:
            title = f"{course.family}, loss of a byte, {given.ranks} ranks"
            drawn = loss_curve(losses, 1, title)
            write_whole(Path(given.curve), lambda path: path.write_text(drawn))
    except NotImplementedError as error:
        print(f"{_WHO}: {one_line(error).removeprefix('parallelize: ')}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"{_WHO}: {one_line(error)}", file=sys.stderr)
        return WRONG
    if not leads or given.json:
        return DONE if all(map(math.isfinite, losses)) else WRONG
    lines = [curve_in_text(losses)]
    if given.save is not None:
        lines.append(f"checkpoint: {path_of(Path(given.save), wishes.steps)}")
    if given.curve is not None:
        lines.append(f"curve: {given.curve}")
    status = printed(_WHO, "\n".join(lines) + "\n")
    return status or (DONE if all(map(math.isfinite, losses)) else WRONG)


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog=_WHO,
        description="Trains a tiny model of a family on the bytes of a text. The losses are those "
        "of one rank, whatever --ranks is.",
    )
    add = parser.add_argument
    add("family", metavar="FAMILY", help="of transformers: llama, glm_moe_dsa, ...")
    add("--text", required=True, metavar="FILE", help="whose bytes are the tokens")
    add_word(parser, "--split", ("paragraphs", "lines"), "paragraphs", "into documents")
    add("--ranks", type=int, default=1, metavar="N", help="that hold a sequence; default: 1")
    add("--steps", type=int, default=50, metavar="N", help="in all; default: 50")
    add("--tokens", default="512", metavar="N", help="of a step; default: 512")
    add("--rate", type=float, default=3e-3, metavar="X", help="of AdamW; default: 0.003")
    add_word(parser, "--dtype", _DTYPES, "float32")
    add_strategy(parser)
    add_layout(parser)
    add_word(parser, "--launcher", ("threads", "torchrun"), "threads", "what ranks are")
    add("--save", metavar="FOLDER", help="for checkpoints, as safetensors")
    add("--every", type=int, default=0, metavar="N", help="steps between them; 0: the last alone")
    add("--resume", metavar="PATH", help="a checkpoint, or the folder of some; with any --ranks")
    add("--curve", metavar="FILE", help="the losses as SVG")
    add("--json", action="store_true", help="one line of JSON a step")
    return parser


def _wishes(given: argparse.Namespace) -> Wishes:
    if not 1 <= given.ranks <= 64:
        raise Refusal(f"--ranks is {given.ranks}; expected 1 to 64")
    for name in ("steps", "every"):
        least = 0 if name == "every" else 1
        if getattr(given, name) < least:
            raise Refusal(f"--{name} is {getattr(given, name)}; expected at least {least}")
    if not 0 < given.rate < math.inf:
        raise Refusal(f"--rate is {given.rate}; expected more than 0")
    if given.curve is not None:
        why = check_writable(Path(given.curve))
        if why is not None:
            raise Refusal(f"the curve '{given.curve}' cannot be written: {why}")
    folder = None if given.save is None else Path(given.save)
    if folder is not None:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise Refusal(f"--save '{given.save}' is no folder: {one_line(error)}") from None
        if not os.access(folder, os.W_OK):
            raise Refusal(f"--save '{given.save}' may not be written to")
    return Wishes(given.ranks, given.steps, given.strategy, given.layout, folder, given.every)


def _course(given: argparse.Namespace) -> tuple[Course, Corpus]:
    tokens = number(given.tokens)
    if not 4 * given.ranks <= tokens <= 1 << 20:
        raise Refusal(
            f"--tokens is {tokens}; expected {4 * given.ranks} to {1 << 20} for {given.ranks} ranks"
        )
    try:
        text = Path(given.text).read_bytes()
    except OSError as error:
        raise Refusal(f"the text '{given.text}' cannot be read: {one_line(error)}") from None
    try:
        corpus = Corpus.of(text, given.split)
    except ValueError as error:
        raise Refusal(f"the text '{given.text}': {error}") from None
    made = Course(given.family, tokens, given.rate, given.dtype, given.split, corpus.name)
    return made, corpus


def _model(given: argparse.Namespace, course: Course) -> Any:
    """Tiny, with the weights that the family itself begins with, from one seed."""
    need_transformers()
    from longspan import _families

    progress(_WHO, "making the model")
    family = family_named(given.family)
    try:
        config = _families.config_of(family, vocabulary=WORDS, positions=course.tokens + 8)
        model = _families.built(family, config)
    except Exception as error:  # whatever constructors raise
        said = f"{type(error).__name__}: {one_line(error)}"
        raise Refusal(f"transformers makes no tiny {given.family}: {said}") from None
    most = positions_of(config)
    if most is not None and most < course.tokens:
        raise Refusal(
            f"--tokens is {course.tokens}, but {given.family} has {most} positions; give fewer"
        )
    # No layer draws random numbers then.
    return model.to(getattr(torch, given.dtype)).eval()


def _begin(given: argparse.Namespace, course: Course, model: Any) -> Checkpoint | None:
    if given.resume is None:
        return None
    path = latest(Path(given.resume))
    found = load(path, course)
    check_fits(path, found, model)
    if found.steps >= given.steps:
        raise Refusal(f"'{path}' has {found.steps} steps already; give more than that as --steps")
    progress(_WHO, f"going on from step {found.steps} of '{path}'")
    return found


def _teller(given: argparse.Namespace) -> Any:
    tokens = number(given.tokens)

    def tell(step: Step) -> None:
        if given.json:
            told = json.dumps({"step": step.step, "loss": step.loss, "norm": step.norm})
        else:
            rate = tokens / max(step.seconds, 1e-9)
            told = (
                f"step {step.step}/{given.steps}  loss {step.loss:.4f}  norm {step.norm:.3f}  "
                f"{rate:,.0f} tokens/s"
            )
        print(told, flush=True)

    return tell
