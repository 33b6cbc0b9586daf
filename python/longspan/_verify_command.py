"""`longspan verify`: shows on this machine that a model over ranks is the model itself."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

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
    config_in,
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
from longspan._group import Group
from longspan._measuring import Unfit, Wishes
from longspan._printing import printed
from longspan._tables import aligned
from longspan._verify_report import page
from longspan._verifying import ANSWERS, Verdict, verify
from longspan._written import check_writable, write_whole

_WHO = "longspan verify"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
#: Where rank 0 of processes that we started leaves the exit status.
_STATUS = "LONGSPAN_VERIFY_STATUS"
_TITLES = ("", "found", "allowed", "")
#: Of a batch, and of one for models that scan token by token, in Python.
_TOKENS, _FEWER = 4096, 1024


@dataclass(frozen=True)
class _Target:
    """What is verified: a family, or a folder with a configuration."""

    name: str
    folder: bool = False
    weights: bool = False

    def make(self, longest: int) -> Any:
        """The model; its documents have at most so many tokens."""
        transformers = need_transformers()
        from longspan import _families

        positions = longest + 8  # some count from behind their padding index
        if not self.folder:
            return _families.made(family_named(self.name), positions=positions)
        config = config_in(self.name)
        if self.weights:
            return _with_weights(transformers, self.name)
        kind = _class_for(transformers, config, self.name)
        return _families.with_random_weights(
            kind, _families.small_config(config, positions=positions)
        )


def main(arguments: Sequence[str]) -> int:
    begin = time.monotonic()
    try:
        given = _parser().parse_args(arguments)
        wishes = _wishes(given)
        targets = _targets(given)
        if given.report is not None:
            why = check_writable(Path(given.report))
            if why is not None:
                raise Refusal(f"the report '{given.report}' cannot be written: {why}")
        if given.launcher == "torchrun" and not is_launched():
            return _launched(given.ranks, arguments)
        group = group_of(given.ranks) if is_launched() else None
        with threads_for(1 if group is not None else given.ranks):
            verdicts = list(_verdicts(targets, wishes, group, given.jobs))
    except (Refusal, Unfit) as refusal:
        print(f"{_WHO}: {refusal}", file=sys.stderr)
        return _status(BAD_USAGE)
    if group is not None and group.rank() > 0:
        return DONE
    seconds = time.monotonic() - begin
    status = _exit_of(verdicts, several=given.models == ["all"])
    if given.report is not None:
        try:
            text = page(verdicts, wishes, seconds)
            write_whole(Path(given.report), lambda path: path.write_text(text))
        except OSError as error:
            print(f"{_WHO}: cannot write '{given.report}': {one_line(error)}", file=sys.stderr)
            return _status(WRONG)
    told = _json(verdicts, wishes, seconds) if given.json else _text(verdicts, seconds, given)
    return _status(printed(_WHO, told) or status)


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog=_WHO,
        description="Compares a model over ranks with the model itself on each document alone: "
        "loss, logits, every gradient, who sees whom, and what is sent. Exit status: 1 where "
        "something is wrong, 3 where the model is refused, 2 for a bad argument.",
    )
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a family of transformers (llama, glm_moe_dsa, all), whose tiny twin is made, or a "
        "folder with a config.json",
    )
    add("--weights", action="store_true", help="the folder's own sizes and weights, no twin")
    add("--ranks", type=int, default=4, metavar="N", help="default: 4")
    add(
        "--tokens",
        metavar="N",
        help=f"of the batch: 4096, 8k; default: {_TOKENS}, and {_FEWER} for models that scan token "
        "by token",
    )
    add("--documents", type=int, default=7, metavar="N", help="that share it; default: 7")
    add_word(parser, "--dtype", tuple(DTYPES), "float64")
    add_strategy(parser)
    add_layout(parser)
    add_word(
        parser,
        "--launcher",
        ("threads", "torchrun"),
        "threads",
        help="ranks are threads over gloo, or processes; started by torchrun itself, on one host "
        "or many, the command takes the ranks it finds",
    )
    add("--jobs", type=int, metavar="N", help="models at a time; default: one for each core")
    add("--json", action="store_true", help="for machines")
    add("--report", metavar="FILE", help="one HTML page with pictures")
    return parser


def _wishes(given: argparse.Namespace) -> Wishes:
    if not 1 <= given.ranks <= 64:
        raise Refusal(f"--ranks is {given.ranks}; expected 1 to 64")
    tokens = _TOKENS if given.tokens is None else number(given.tokens)
    if given.documents < 1:
        raise Refusal(f"--documents is {given.documents}; expected at least 1")
    least = max(4 * given.ranks, 2 * given.documents)
    if not least <= tokens <= 1 << 20:
        raise Refusal(
            f"--tokens is {tokens}; expected {least} to {1 << 20} for {given.ranks} ranks and "
            f"{given.documents} documents"
        )
    if given.jobs is not None and given.jobs < 1:
        raise Refusal(f"--jobs is {given.jobs}; expected at least 1")
    return Wishes(
        ranks=given.ranks,
        tokens=tokens,
        fewer=max(_FEWER, least) if given.tokens is None else None,
        documents=given.documents,
        dtype=DTYPES[given.dtype],
        strategy=given.strategy,
        layout=given.layout,
    )


def _targets(given: argparse.Namespace) -> list[_Target]:
    need_transformers()
    if given.models == ["all"]:
        if given.weights:
            raise Refusal("--weights goes with a folder, and `all` are families")
        from longspan._families import families

        return [_Target(family.name) for family in families()]
    if "all" in given.models and not Path("all").exists():
        raise Refusal("`all` are all families; give it alone")
    found = []
    for name in given.models:
        if os.sep in name or Path(name).exists():
            config = config_in(name)
            if not given.weights:
                _class_for(need_transformers(), config, name)
            found.append(_Target(name, folder=True, weights=given.weights))
        else:
            if given.weights:
                raise Refusal(f"--weights goes with a folder, and '{name}' is none")
            family_named(name)
            found.append(_Target(name))
    return found


def _class_for(transformers: Any, config: Any, name: str) -> Any:
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        kind = known[type(config)]
    except KeyError:
        raise Refusal(
            f"'{name}' is a {getattr(config, 'model_type', '?')}, of which transformers makes no "
            f"causal model"
        ) from None
    return kind[0] if isinstance(kind, (list, tuple)) else kind


def _with_weights(transformers: Any, folder: str) -> Any:
    """The model as it lies in the folder, in float64. Nothing of it may be drawn at random."""
    try:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float64,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # whatever readers of files raise
        raise Unfit(f"the weights in '{folder}' do not load: {one_line(error)}") from None
    for what in ("mismatched_keys", "missing_keys"):
        if told.get(what):
            first = sorted(map(str, told[what]))[0]
            raise Unfit(
                f"the weights in '{folder}' are not those of its config.json: {what[:-5]} {first} "
                f"and {len(told[what]) - 1} more"
            )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise Unfit(f"the weights in '{folder}' are not all finite: {name}")
    return model.eval()


def _launched(ranks: int, arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "status"
        status = launch(ranks, ["verify", *arguments], {_STATUS: str(kept)})
        return int(kept.read_text()) if kept.exists() else status or WRONG


def _status(status: int) -> int:
    """To be returned by this process; under our own torchrun its parent is told instead."""
    kept = os.environ.get(_STATUS)
    if kept is None or not is_launched():
        return status
    if os.environ["RANK"] == "0":
        Path(kept).write_text(str(status))
    return DONE


# ---- One model after another.


def _verdicts(
    targets: Sequence[_Target], wishes: Wishes, group: Group | None, jobs: int | None
) -> Iterator[Verdict]:
    workers = min(jobs or os.cpu_count() or 1, len(targets))
    if group is not None or workers == 1 or (jobs is None and len(targets) < 3):
        for index, target in enumerate(targets):
            verdict = _one(target, wishes, group)
            _announce(index, targets, verdict)
            yield verdict
        return
    with _one_thread_each():
        for index, verdict in enumerate(_side_by_side(targets, wishes, workers)):
            _announce(index, targets, verdict)
            yield verdict


def _side_by_side(targets: Sequence[_Target], wishes: Wishes, workers: int) -> Iterator[Verdict]:
    """Verdicts in the order of the targets, from so many processes. Each has a thread here that
    hands it one model after another, so that it is known whose process ended."""
    found: list[Future[Verdict]] = [Future() for _ in targets]
    left = SimpleQueue[int]()
    for index in range(len(targets)):
        left.put(index)

    def hand_out() -> None:
        process: ProcessPoolExecutor | None = None
        while True:
            try:
                index = left.get_nowait()
            except Empty:
                break
            process = process or _process()
            try:
                found[index].set_result(process.submit(_one, targets[index], wishes).result())
            except BrokenExecutor as error:
                why = f"the process that verified it ended: {one_line(error)}"
                found[index].set_result(Verdict(targets[index].name, "wrong", why))
                process.shutdown()
                process = None
            except BaseException as error:  # for the thread that asks
                found[index].set_exception(error)
        if process is not None:
            process.shutdown()

    with ThreadPoolExecutor(workers) as threads:
        for _ in range(workers):
            threads.submit(hand_out)
        try:
            for one in found:
                yield one.result()
        finally:
            while not left.empty():  # nobody asks any more
                with suppress(Empty):
                    left.get_nowait()


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started inside have one thread an operation."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _one(target: _Target, wishes: Wishes, group: Group | None = None) -> Verdict:
    quiet = group is not None and group.rank() > 0

    def tell(what: str) -> None:
        if not quiet:
            progress(_WHO, f"{target.name}: {what}")

    make: Callable[[int], Any] = target.make
    try:
        return verify(target.name, make, wishes, group=group, tell=tell)
    finally:
        gc.collect()  # models hold themselves; the next one needs the memory


def _announce(index: int, targets: Sequence[_Target], verdict: Verdict) -> None:
    if len(targets) > 1 and sys.stderr.isatty():
        print(f"[{index + 1}/{len(targets)}] {_headline(verdict)}", file=sys.stderr, flush=True)


# ---- Answers.


def _exit_of(verdicts: Sequence[Verdict], *, several: bool) -> int:
    words = {verdict.word for verdict in verdicts}
    if "wrong" in words:
        return WRONG
    return DONE if several or words == {"right"} else REFUSED


def _headline(verdict: Verdict) -> str:
    kind = f" ({verdict.kind})" if verdict.kind else ""
    why = f": {verdict.why}" if verdict.word != "right" and verdict.why else ""
    return f"{verdict.model}{kind}: {verdict.word} in {verdict.seconds:.1f} s{why}"


def _text(verdicts: Sequence[Verdict], seconds: float, given: argparse.Namespace) -> str:
    lines: list[str] = []
    if len(verdicts) > 3:
        lines += map(_headline, verdicts)
    else:
        for verdict in verdicts:
            lines += [_headline(verdict), *_table(verdict), ""]
        lines = lines[:-1]
    if len(verdicts) > 1:
        words = ("right", "refused", "not made", "wrong")
        counts = ((word, sum(v.word == word for v in verdicts)) for word in words)
        told = ", ".join(f"{count} {word}" for word, count in counts if count)
        lines.append(f"{told}; {seconds:.0f} s")
    if given.report is not None:
        lines.append(f"report: {given.report}")
    return "\n".join(lines) + "\n"


def _table(verdict: Verdict) -> list[str]:
    if not verdict.rows:
        return []
    marks = {True: "holds", False: "WRONG", None: ""}
    table = [_TITLES, *((r.what, r.found, r.allowed, marks[r.holds]) for r in verdict.rows)]
    held = ", ".join(answer for answer in ANSWERS if verdict.proof.get(answer))
    return ["  " + line for line in (*aligned(table), f"proof on a twin: {held} hold")]


def _json(verdicts: Sequence[Verdict], wishes: Wishes, seconds: float) -> str:
    told = {
        "ranks": wishes.ranks,
        "tokens": wishes.tokens,
        "documents": wishes.documents,
        "dtype": str(wishes.dtype).removeprefix("torch."),
        "seconds": seconds,
        "models": [verdict.to_json() for verdict in verdicts],
    }
    return json.dumps(told, indent=1) + "\n"
