"""What commands of the Python entry share: arguments, refusals in one sentence, progress, and
models that are a configuration or a family's name."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from longspan import _C
from longspan._arguments import as_text
from longspan._models import AUTO
from longspan._strategy import Strategy

#: Exit statuses.
DONE, WRONG, BAD_USAGE, REFUSED = 0, 1, 2, 3

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


class Refusal(Exception):
    """A sentence for a bad argument."""


class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(message)


#: Names elsewhere, where no list of ours is asked for them.
_ELSEWHERE = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def add_strategy(parser: Arguments) -> None:
    names = Strategy.names()
    add_word(parser, "--strategy", names, default="ring", asked=Strategy.of)


def add_layout(parser: Arguments) -> None:
    names = [AUTO, *(layout.name for layout in _C.named_layouts())]
    add_word(parser, "--layout", names, AUTO, asked=lambda name: _C.layout_named("", name))


def add_word(
    parser: Arguments,
    flag: str,
    names: Sequence[str],
    default: str | None = None,
    help: str | None = None,
    asked: Callable[[str], Any] | None = None,
) -> None:
    """An option that is one of some names. Of others the refusal has the nearest; who is `asked`
    for one raises with what papers and other libraries call it."""

    def read(text: str) -> str:
        if text in names:
            return text
        near = _meant(text, names, asked)
        hint = f"; did you mean {near}?" if near else ""
        raise Refusal(f"{flag} is '{text}'; expected {', '.join(names)}{hint}")

    said = f"default: {default}" if help is None else help
    parser.add_argument(flag, default=default, choices=tuple(names), type=read, help=said)


def _meant(text: str, names: Sequence[str], asked: Callable[[str], Any] | None) -> str | None:
    small = text.lower()
    try:
        if asked is not None:
            asked(as_text(text))
    except ValueError as error:
        found = re.search(r"; did you mean (.*)\?$", str(error))
        if found is not None:
            return found[1]
    if _ELSEWHERE.get(small) in names:
        return _ELSEWHERE[small]
    return next(iter(difflib.get_close_matches(small, names, 1)), None)


def number(text: str, least: int = 0) -> int:
    """Of tokens: 4096, 8k or 1M."""
    found = re.fullmatch(r"(\d{1,12})([kKmM]?)", text.strip())
    if found is None:
        raise Refusal(f"'{text}' is no number of tokens; expected such as 4096, 8k or 1M")
    value = int(found[1]) * _UNITS[found[2].lower()]
    if value < least:
        raise Refusal(f"'{text}' tokens are too few; expected at least {least}")
    return value


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def progress(who: str, what: str) -> None:
    """A line on a terminal; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"{who}: {what} ...", file=sys.stderr, flush=True)


def need_transformers() -> Any:
    """The module; a Refusal where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise Refusal("models come from transformers, which is not installed here") from None
    # Its warnings are about models that nobody keeps.
    found: Any = transformers
    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    return found


def family_named(name: str) -> Any:
    """A family of transformers by its model_type; a Refusal with the nearest names else."""
    need_transformers()
    from longspan._families import families

    known = {family.name: family for family in families()}
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        like = f"; like it are {', '.join(near)}" if near else ""
        raise Refusal(
            f"'{name}' is neither a causal family of transformers, such as llama, nor a folder "
            f"with a config.json{like}"
        )
    return known[name]


def config_in(path: str) -> Any:
    """The configuration in a folder, or in a file."""
    transformers = need_transformers()
    where = Path(path)
    file = where / "config.json" if where.is_dir() else where
    if not file.is_file():
        raise Refusal(f"'{path}' has no config.json; expected the folder of a model")
    try:
        return transformers.AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever constructors raise
        raise Refusal(f"'{file}' is no configuration of transformers: {one_line(error)}") from None


def is_launched() -> bool:
    """Whether torchrun, or who does as it does, started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def group_of(ranks: int) -> Any:
    """The processes that were started as ranks."""
    from longspan._group import Group

    group = Group.from_environment()
    if group.size() != ranks:
        raise Refusal(f"--ranks is {ranks}, but {group.size()} were started")
    return group


@contextmanager
def threads_for(ranks: int) -> Iterator[None]:
    """Inside, so many ranks of this process share its threads of operators."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(before // ranks, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def launch(ranks: int, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> int:
    """The same command as processes of torchrun on this host, with some more variables."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "longspan", *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **(more or {})}
    return subprocess.run(command, env=environment, check=False).returncode
