"""What `longspan train` does: a tiny model of a family learns the bytes of a text over ranks,
with the losses of one rank, and goes on from checkpoints with any number of them."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan._batch import shard
from longspan._clipping import clip_grad_norm
from longspan._gradients import sum_gradients
from longspan._group import Group, run_ranks
from longspan._losses import total_loss
from longspan._models import parallelize
from longspan._rulers import IGNORED, loss_of
from longspan._shrinking import VOCABULARY
from longspan._written import write_whole

#: Ids of bytes come behind those that a family may give a meaning.
FIRST_BYTE = VOCABULARY
WORDS = FIRST_BYTE + 256
_SUFFIX = ".safetensors"
_FORMAT = "longspan train 1"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNT = "step"  #: of a parameter; fewer than those taken where it had no gradient at first


class Torn(Exception):
    """A checkpoint that cannot be gone on from; the text says why."""


@dataclass(frozen=True)
class Corpus:
    """The documents of a text, laid end to end again and again."""

    tokens: Tensor  #: ids of all bytes
    document: Tensor  #: of each, the number of its document
    name: str  #: a hash of all that

    @staticmethod
    def of(text: bytes, split: str) -> Corpus:
        """Paragraphs or lines are documents; ValueError where there is none."""
        border = b"\n\n" if split == "paragraphs" else b"\n"
        documents = [part.strip(b"\n") for part in text.replace(b"\r\n", b"\n").split(border)]
        documents = [part for part in documents if part.strip()]
        if sum(map(len, documents)) < 2:
            raise ValueError("it has no two bytes to learn")
        tokens = torch.tensor(list(b"".join(documents))) + FIRST_BYTE
        sizes = torch.tensor([len(part) for part in documents])
        numbers = torch.arange(len(documents)).repeat_interleave(sizes)
        whole = hashlib.sha256(b"\0".join(documents)).hexdigest()
        return Corpus(tokens, numbers, whole)

    def batch(self, step: int, tokens: int) -> dict[str, Tensor]:
        """The row of a step: whole and cut documents, told apart by their positions."""
        chosen = torch.arange(step * tokens, (step + 1) * tokens) % len(self.tokens)
        ids, numbers = self.tokens[chosen], self.document[chosen]
        begins = torch.ones(tokens, dtype=torch.bool)
        begins[1:] = (numbers[1:] != numbers[:-1]) | (chosen[1:] == 0)
        places = torch.arange(tokens)
        positions = places - torch.where(begins, places, 0).cummax(0).values
        labels = torch.where(begins, IGNORED, ids)  # nobody foretells where a document begins
        return {
            "input_ids": ids.unsqueeze(0),
            "labels": labels.unsqueeze(0),
            "position_ids": positions.unsqueeze(0),
        }


@dataclass(frozen=True)
class Course:
    """What a training is, whatever the number of ranks; a checkpoint is of one course."""

    family: str
    tokens: int
    rate: float
    dtype: str
    split: str
    text: str  #: the name of its corpus


@dataclass(frozen=True)
class Step:
    step: int
    loss: float
    norm: float
    seconds: float


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds: parameters and moments by name, and the losses so far."""

    tensors: dict[str, Tensor]
    losses: list[float]

    @property
    def steps(self) -> int:
        return len(self.losses)


def save(path: Path, model: Any, optimizer: Any, course: Course, losses: Sequence[float]) -> None:
    """Beside the place first: whoever reads finds a whole checkpoint."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach().contiguous()
        for moment in (*_MOMENTS, _COUNT):
            kept = optimizer.state.get(parameter, {}).get(moment)
            if kept is not None:
                tensors[f"{moment}.{name}"] = kept.contiguous()
    facts = {"format": _FORMAT, "course": json.dumps(vars(course)), "losses": json.dumps(losses)}
    write_whole(path, lambda beside: save_file(tensors, str(beside), metadata=facts))


def load(path: Path, course: Course) -> Checkpoint:
    """A checkpoint of this course; Torn, with the reason, where it is not one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise Torn(f"'{path}' is torn or no checkpoint ({said}); go on from an older one") from None
    try:
        if facts.get("format") != _FORMAT:
            raise ValueError
        then = json.loads(facts["course"])
        if not isinstance(then, dict):
            raise TypeError
        losses = [float(loss) for loss in json.loads(facts["losses"])]
    except (KeyError, ValueError, TypeError):
        raise Torn(f"'{path}' was not written by longspan train") from None
    for key, now in vars(course).items():
        if then.get(key) != now:
            what = {"text": "another text", "split": "documents of another kind"}.get(key)
            raise Torn(
                f"'{path}' is of {what or f'--{key} {then.get(key)}'}"
                + ("" if what else f", and this training of {now}")
                + "; give what it was begun with"
            )
    return Checkpoint(tensors, losses)


def latest(where: Path) -> Path:
    """The file itself, or the last checkpoint of a folder; Torn where there is none."""
    if where.is_file():
        return where
    found = sorted(where.glob(f"step-*{_SUFFIX}")) if where.is_dir() else []
    if not found:
        raise Torn(f"'{where}' holds no checkpoint; expected step-*{_SUFFIX} in a folder, or one")
    return found[-1]


def path_of(folder: Path, steps: int) -> Path:
    return folder / f"step-{steps:06d}{_SUFFIX}"


@dataclass(frozen=True)
class Wishes:
    """How a course is run this time."""

    ranks: int
    steps: int
    strategy: str = "ring"
    layout: str = "auto"
    folder: Path | None = None  #: for checkpoints
    every: int = 0  #: steps between them; 0: at the end alone
    timeout: float = 600.0


def train(
    model: Any,
    corpus: Corpus,
    course: Course,
    wishes: Wishes,
    *,
    begin: Checkpoint | None = None,
    group: Group | None = None,
    tell: Callable[[Step], None] = lambda _: None,
) -> list[float]:
    """Losses of all steps, those before a checkpoint included. Ranks are threads, or those of
    a group, on all of which it is called."""

    def body(mine: Group, own: Any) -> list[float]:
        return _on_rank(own, corpus, course, wishes, begin, mine, tell)

    if group is not None:
        return body(group, model)
    copies = [copy.deepcopy(model) for _ in range(wishes.ranks)]  # deepcopy is not for threads
    return run_ranks(
        wishes.ranks, lambda mine: body(mine, copies[mine.rank()]), timeout=wishes.timeout
    )[0]


def _on_rank(
    model: Any,
    corpus: Corpus,
    course: Course,
    wishes: Wishes,
    begin: Checkpoint | None,
    group: Group,
    tell: Callable[[Step], None],
) -> list[float]:
    model = parallelize(model, group, strategy=wishes.strategy, layout=wishes.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=course.rate)
    losses: list[float] = []
    if begin is not None:
        losses = list(begin.losses)
        _restore(model, optimizer, begin)
    while len(losses) < wishes.steps:
        began = time.monotonic()
        local = shard(corpus.batch(len(losses), course.tokens), group, model=model)
        # The loss in the type of the logits: that of transformers is float32.
        wanted, count = local.pop("shift_labels"), int(local.pop("num_items_in_batch"))
        local.pop("labels")
        loss = loss_of(model(**local).logits, wanted, count)
        loss.backward()  # type: ignore[no-untyped-call]
        sum_gradients(model, group)
        norm = clip_grad_norm(model, 1.0, group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total_loss(loss, group)))
        if group.rank() > 0:
            continue
        tell(Step(len(losses), losses[-1], float(norm), time.monotonic() - began))
        due = wishes.every and len(losses) % wishes.every == 0
        if wishes.folder is not None and (due or len(losses) == wishes.steps):
            save(path_of(wishes.folder, len(losses)), model, optimizer, course, losses)
    return losses


def _restore(model: Any, optimizer: Any, begin: Checkpoint) -> None:
    """Parameters and moments of a checkpoint that `check_fits` looked at."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(begin.tensors[f"model.{name}"])
            if f"{_MOMENTS[0]}.{name}" in begin.tensors:
                state = {moment: begin.tensors[f"{moment}.{name}"].clone() for moment in _MOMENTS}
                count = begin.tensors.get(f"{_COUNT}.{name}", torch.tensor(float(begin.steps)))
                state[_COUNT] = count.clone()
                optimizer.state[parameter] = state


def check_fits(path: Path, begin: Checkpoint, model: Any) -> None:
    """Torn where a checkpoint has not what this model has, each in its shape."""
    for name, parameter in model.named_parameters():
        found = begin.tensors.get(f"model.{name}")
        if found is None or found.shape != parameter.shape or found.dtype != parameter.dtype:
            has = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise Torn(
                f"'{path}' has {has} for {name}, which is {parameter.dtype} "
                f"{list(parameter.shape)} here; another transformers may have written it"
            )
        moments = [begin.tensors.get(f"{moment}.{name}") for moment in _MOMENTS]
        if any(one is not None for one in moments) and any(
            one is None or one.shape != parameter.shape for one in moments
        ):
            raise Torn(
                f"'{path}' has not both moments of AdamW for {name}, {list(parameter.shape)} each; "
                f"go on from an older one"
            )
    if begin.steps and not any(name.startswith(_MOMENTS) for name in begin.tensors):
        raise Torn(f"'{path}' has weights and no moments of AdamW; go on from an older one")
