"""Checks that users can run on their own models: the same answer on N ranks as
on one, and no document that changes the output of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longspan import _C
from longspan._agreement import Agreement
from longspan._arguments import (
    check_callable,
    check_kind,
    check_number,
    check_tensors,
    check_whole,
)
from longspan._batch import Place, Reading, shard, share, unshard
from longspan._group import Group, ranks_of
from longspan._local_batch import KEYWORD, LocalBatch
from longspan._models import find_state
from longspan._tables import html_table
from longspan.comm import all_gather_tokens

#: How a model runs on a share: the loss (None without labels), and one output for
#: each token. The loss is the mean over the tokens of all ranks, the same on every
#: rank, as `reduce_loss` makes it; or each rank's part of that mean.
Run = Callable[[nn.Module, LocalBatch, Group], tuple[Tensor | None, Tensor]]


def run_model(model: nn.Module, local: LocalBatch, group: Group) -> tuple[Tensor | None, Tensor]:
    """``model(**local)`` where `shard` knew the model, which `parallelize` was called
    on; else ``model(local, group)``, which returns the loss and the logits."""
    if KEYWORD in local:
        out = model(**local)
        return out.loss, out.logits
    loss, logits = model(local, group)
    return loss, logits


@dataclasses.dataclass(frozen=True)
class Difference:
    """One tensor of the run over the ranks, against the one-rank run."""

    name: str
    error: float  # Frobenius norm of the difference, over that of the tensor
    allowed: float

    @property
    def differs(self) -> bool:
        return not self.error <= self.allowed  # NaN differs too

    def __str__(self) -> str:
        sign = ">" if self.differs else "<="
        return f"{self.name}: {self.error:.3g} {sign} {self.allowed:.3g}"


@dataclasses.dataclass(frozen=True)
class Parity:
    """What `check_parity` found; true when nothing differs."""

    differences: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs, in the order of computation."""
        return next((d for d in self.differences if d.differs), None)

    def __bool__(self) -> bool:
        return self.first is None

    @property
    def _head(self) -> str:
        wrong = sum(d.differs for d in self.differences)
        return f"{len(self.differences)} tensors compared, {wrong} differ"

    def _repr_html_(self) -> str:
        """A table for notebooks, what differs in bold."""
        return html_table(
            self._head,
            ("tensor", "relative error", "allowed", ""),
            [
                (d.name, f"{d.error:.3g}", f"{d.allowed:.3g}", "differs" if d.differs else "equal")
                for d in self.differences
            ],
            marked=[index for index, d in enumerate(self.differences) if d.differs],
        )

    def __str__(self) -> str:
        return "\n  ".join([self._head, *map(str, self.differences)])

    def raise_if_different(self) -> None:
        if self.first is not None:
            raise AssertionError(f"check_parity: {self.first}\n{self}")


def check_parity(
    model: nn.Module,
    batch: Mapping[str, Any],
    group: Any,
    *,
    run: Run = run_model,
    tolerance: float | None = None,
    **options: Any,
) -> Parity:
    """Runs `model` on this rank's share of `batch` and on the whole batch, and
    compares the loss, the logits and the gradient of every parameter. The model is
    one that `parallelize` was called on, or what `run` can call.

    Every rank of the group calls it with the same model and batch. `run` says how
    the model is called; `options` go to `shard`. `tolerance` is relative to each
    tensor's norm; by default 64 roundings of the coarser of its dtype and the
    model's. Gradients the model had before are left as they were.
    """
    ranks = ranks_of(group)
    _check_call("check_parity", model, batch, run)
    if tolerance is not None:
        check_number("check_parity", "tolerance", tolerance)
    whole = _whole(model, batch, options)
    share = _share(model, batch, ranks, options)
    coarsest = max(
        (torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()),
        default=0.0,
    )

    def compared(name: str, got: Tensor, expected: Tensor) -> Difference:
        got, expected = got.detach(), expected.detach()
        eps = max(torch.finfo(expected.dtype).eps, coarsest)
        # An infinity is no difference to itself: logits of banned tokens are -inf.
        size = float(expected[expected.isfinite()].double().norm())
        error = float(torch.where(got == expected, 0, got.double() - expected.double()).norm())
        return Difference(
            name, error / size if size else error, 64 * eps if tolerance is None else tolerance
        )

    with _own_gradients(model):
        loss, logits = run(model, whole, Group.solo())
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        expected_logits = unshard([logits.detach()], whole)
        gradients = {
            name: None if p.grad is None else p.grad.clone() for name, p in _trained(model)
        }
    with _own_gradients(model):
        local_loss, local_logits = run(model, share, ranks)
        got = unshard(local_logits.detach(), share, group=ranks)
        found = [compared("logits", got, expected_logits)]
        if local_loss is not None and loss is not None:
            local_loss.backward()  # type: ignore[no-untyped-call]
            mean = _summed if KEYWORD in share else _mean_loss
            found.append(compared("loss", mean(local_loss, ranks), loss))
            for name, parameter in _trained(model):
                grad = parameter.grad
                mine = torch.zeros_like(parameter) if grad is None else grad
                expected = gradients[name]
                found.append(
                    compared(
                        name,
                        _summed(mine, ranks),
                        torch.zeros_like(parameter) if expected is None else expected,
                    )
                )
    return Parity(tuple(found))


@dataclasses.dataclass(frozen=True)
class Leak:
    """An output that moved although only another document was changed."""

    changed_document: int
    moved_document: int
    row: int
    token: int
    by: float

    def __str__(self) -> str:
        return (
            f"document {self.changed_document} was changed, and the output of token "
            f"{self.token} of row {self.row}, in document {self.moved_document}, moved by "
            f"{self.by:.3g}"
        )


def leak_probe(
    model: nn.Module,
    batch: Mapping[str, Any],
    group: Any = None,
    *,
    run: Run = run_model,
    documents: int | None = None,
    **options: Any,
) -> list[Leak]:
    """Changes one document after another and watches the outputs of all others.

    Returns the outputs that changed: an empty list proves, bit by bit, that no document
    saw another. Documents are those of `seq_lens`, of `position_ids` that restart, or
    rows. Token ids are shifted by one, embeddings are negated. `documents` limits
    how many are tried. Every rank of the group calls it with the same batch.
    """
    ranks = ranks_of(group)
    _check_call("leak_probe", model, batch, run)
    if documents is not None:
        check_whole("leak_probe", "documents", documents, 0)
    key = "inputs_embeds" if batch.get("inputs_embeds") is not None else "input_ids"
    check_tensors("leak_probe", **{key: batch.get(key)})
    inputs: Tensor = batch[key]
    ids = _document_ids(batch, options)

    def outputs(changed: Tensor) -> Tensor:
        return outputs_of(model, {**batch, key: changed}, ranks, run=run, options=options)

    before = outputs(inputs)
    leaks = []
    for document in sorted(set(ids.flatten().tolist()) - {0})[:documents]:
        inside = (ids == document).to(inputs.device)
        moved = movement(before, outputs(changed_inside(inputs, inside)), ids.shape)
        others = moved.cpu().masked_fill((ids == document) | (ids == 0), 0)
        for row, token in (others != 0).nonzero().tolist():
            leaks.append(
                Leak(document, int(ids[row, token]), row, token, float(others[row, token]))
            )
            break  # one for each changed document says enough
    return leaks


def outputs_of(
    model: nn.Module,
    batch: Mapping[str, Any],
    group: Group,
    *,
    run: Run = run_model,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """The outputs of all tokens in their order, on every rank, without gradients."""
    share = _share(model, batch, group, options or {})
    with torch.no_grad():
        _, logits = run(model, share, group)
        return unshard(logits, share, group=group)


def changed_inside(inputs: Tensor, inside: Tensor) -> Tensor:
    """Other ids, or negated embeddings, where `inside` [B, S] is true."""
    if inputs.is_floating_point():
        return torch.where(inside.unsqueeze(-1), -inputs, inputs)
    # Two at least: one id alone would change into itself.
    vocabulary = max(int(inputs.max()) + 1, 2)
    return torch.where(inside, (inputs + 1) % vocabulary, inputs)


def movement(before: Tensor, after: Tensor, shape: Sequence[int]) -> Tensor:
    """By how much the output of each token [B, S] moved, at most."""
    moved = torch.where(after == before, 0, (after - before).abs())
    return moved.reshape(*shape, -1).amax(-1)


def _check_call(who: str, model: Any, batch: Any, run: Any) -> None:
    check_kind(who, "model", model, nn.Module, "a torch.nn.Module")
    check_kind(who, "batch", batch, Mapping, "a batch as a mapping")
    check_callable(who, "run", run)


def _share(
    model: nn.Module, batch: Mapping[str, Any], group: Group, options: Mapping[str, Any]
) -> LocalBatch:
    known = None if find_state(model) is None else model
    return shard(batch, group, model=known, **options)


def _whole(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any]) -> LocalBatch:
    """The batch for one rank alone, also where the model is set up for many."""
    alone = _for_one_rank(options)
    state = find_state(model)
    if state is None:
        return shard(batch, rank=0, ranks=1, **alone)
    names = ("table", "sentinel", "pass_through", "ahead")
    reading = Reading(**{key: alone[key] for key in names if key in alone})
    layout = state.layout if isinstance(state.layout, str) else "contiguous-rows"
    solo = dataclasses.replace(state, group=Group.solo(), layout=alone.get("layout", layout))
    nobody = Agreement("check_parity", None)
    alone_at = Place.in_group(solo.group)
    return share(batch, alone_at, nobody, solo, reading, multiple=alone.get("multiple", 1))


def _document_ids(batch: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
    """[B, S]: 1, 2, ... over all rows, 0 where there is no document."""
    whole = shard(batch, rank=0, ranks=1, **_for_one_rank(options))
    packings = whole.cut.packings
    made = [_C.document_ids(packing) for packing in packings]
    if len(made) == 1 and whole.cut.form == "stream":
        ids = unshard([made[0]], whole)
    else:
        rows, used = [], 0
        for row in made:
            rows.append(torch.where(row > 0, row + used, row))
            used += int(row.max()) if row.numel() else 0
        ids = unshard([torch.stack(rows)], whole)
    return ids


def _for_one_rank(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `shard` without what fixes the number of ranks."""
    alone = {key: value for key, value in options.items() if key not in ("form", "check_agreement")}
    if isinstance(options.get("layout"), _C.Ownership):
        alone["layout"] = f"contiguous-{options.get('form') or 'rows'}"
    return alone


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _stacked(value: Tensor, group: Group) -> Tensor:
    """The values of all ranks, in rank order."""
    return all_gather_tokens(
        value.detach().unsqueeze(0), axis=0, sizes=[1] * group.size(), group=group
    )


def _summed(value: Tensor, group: Group) -> Tensor:
    """The sum over the group, in rank order."""
    return value.detach() if group.size() == 1 else _stacked(value, group).sum(0)


def _mean_loss(loss: Tensor, group: Group) -> Tensor:
    """The mean that every rank has, or else the sum of the parts that they have."""
    losses = _stacked(loss, group)
    return losses[0] if bool((losses == losses[0]).all()) else losses.sum(0)


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, the model has no gradients; afterwards, those it had before."""
    kept = [(p, p.grad) for p in model.parameters()]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in kept:
            p.grad = grad
