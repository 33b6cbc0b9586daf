"""What is right: a model on each document alone. Batches of which it is known where their
documents lie, the answer of the plain model, and how far another one is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from longspan._batch import shard
from longspan._group import Group
from longspan._local_batch import LocalBatch

#: A token without anything to learn.
IGNORED = -100


@dataclass(frozen=True)
class Document:
    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class Case:
    """A batch as a collator gives it, and where its documents lie."""

    batch: Mapping[str, Tensor]
    documents: tuple[Document, ...]

    @property
    def ids(self) -> Tensor:
        return self.batch["input_ids"]

    def targets(self) -> Tensor:
        """The label of the next token of the row; nothing where the token is a pad."""
        shifted = torch.full_like(self.batch["labels"], IGNORED)
        shifted[:, :-1] = self.batch["labels"][:, 1:]
        kept = torch.full_like(shifted, IGNORED)
        for d in self.documents:
            kept[d.row, d.begin : d.end] = shifted[d.row, d.begin : d.end]
        return kept


def packed_rows(ids: Tensor, labels: Tensor, rows: Sequence[Sequence[int]]) -> Case:
    """Rows of documents one after the other, told apart by their positions."""
    documents, positions = [], torch.zeros_like(ids)
    for row, lengths in enumerate(rows):
        begin = 0
        for size in lengths:
            documents.append(Document(row, begin, begin + size))
            positions[row, begin : begin + size] = torch.arange(size)
            begin += size
    return Case({"input_ids": ids, "labels": labels, "position_ids": positions}, tuple(documents))


@dataclass(frozen=True)
class Answer:
    """Of a whole batch: the mean loss of its targets, logits [tokens, words] of each document,
    and every gradient."""

    loss: float
    logits: list[Tensor]
    gradients: dict[str, Tensor]


class AllDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """On the thread that enters it, every cast to float32 is one to float64.

    Decoders of transformers compute norms, rotary angles, softmaxes and the loss in float32,
    whatever their type. Inside, a float64 model has no other numbers, so that what one rank and
    many give can be compared to 1e-12. Models are made outside: their rotary frequencies are
    float32 numbers, and stay those."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        return func(*args, **options)


def loss_of(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    """A part of the mean, in the type of the logits: those of transformers are float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    summed = cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return summed / count


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
    }


def alone(model: Any, case: Case) -> Answer:
    """The plain model on each document alone. Leaves it without gradients."""
    targets = case.targets()
    count = max(int(targets.ne(IGNORED).sum()), 1)
    model.zero_grad()
    total, logits = 0.0, []
    for d in case.documents:
        ids = case.ids[d.row : d.row + 1, d.begin : d.end]
        out = model(input_ids=ids, use_cache=False).logits
        loss = loss_of(out, targets[d.row : d.row + 1, d.begin : d.end], count)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        logits.append(out[0].detach())
    found = gradients_of(model)
    model.zero_grad()
    return Answer(total, logits, found)


def share_of(model: Any, case: Case, group: Group) -> tuple[LocalBatch, Tensor, int]:
    """One rank's share of a case for a parallelized model, without labels, so that the loss is
    that of `loss_of`; the targets of its tokens, and how many the whole batch has."""
    targets = case.targets()
    batch = {key: value for key, value in case.batch.items() if key != "labels"}
    local = shard({**batch, "shift_labels": targets}, group, model=model)
    wanted = local.pop("shift_labels")
    for key in ("labels", "num_items_in_batch"):
        local.pop(key, None)
    return local, wanted, max(int(targets.ne(IGNORED).sum()), 1)


def distances(ours: Answer, true: Answer, least: float = 1e-6) -> dict[str, float]:
    """The largest difference of the logits and of each gradient, relative to the largest value of
    its tensor; of a gradient that cancels out, to `least` of the largest one."""
    size = max(float(logits.abs().max()) for logits in true.logits)
    found = {"logits": 0.0}
    for mine, theirs in zip(ours.logits, true.logits, strict=True):
        error = float((mine.double() - theirs.double()).abs().max()) / size
        found["logits"] = _larger(found["logits"], error)
    largest = max(float(g.abs().max()) for g in true.gradients.values())
    for name, gradient in true.gradients.items():
        other = ours.gradients.get(name)
        error_of = gradient if other is None else other.double() - gradient.double()
        # Of gradients that cancel out nothing but rounding is left.
        scale = max(float(gradient.abs().max()), least * largest)
        found[name] = float(error_of.abs().max()) / scale
    return found


def worst_of(errors: Mapping[str, float]) -> tuple[str, float]:
    """The largest, and whose it is; a NaN is larger than all."""
    return max(errors.items(), key=lambda one: float("inf") if one[1] != one[1] else one[1])


def _larger(one: float, other: float) -> float:
    return other if other != other or other > one else one
