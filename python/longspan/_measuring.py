"""What `longspan verify` measures: a model over ranks and the model itself on each document
alone, in one step of training, who sees whom, which keys are selected, and what is sent."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longspan import _C
from longspan._batch import unshard
from longspan._explaining import explain
from longspan._gradients import sum_gradients
from longspan._group import Group, run_ranks
from longspan._local_batch import KEYWORD, LocalBatch
from longspan._losses import total_loss
from longspan._models import AUTO, parallelize, restore
from longspan._parity import changed_inside, movement, outputs_of
from longspan._probing import ordinary_ids
from longspan._recipes import recipes_in
from longspan._rulers import (
    IGNORED,
    AllDouble,
    Answer,
    Case,
    alone,
    distances,
    gradients_of,
    loss_of,
    packed_rows,
    share_of,
)
from longspan._shrinking import positions_of
from longspan._transformers import first_position
from longspan.comm import all_gather_tokens

#: Of the largest gradient; below that only rounding is left of what cancels out, such as those
#: of the biases of keys.
CANCELLED = 1e-4


@dataclass(frozen=True)
class Wishes:
    """How a model is to be tried."""

    ranks: int = 4
    tokens: int = 4096
    #: Of models that scan token by token, in Python; None: as many. What is wrong at a border
    #: is so at any length, and there are as many borders.
    fewer: int | None = None
    documents: int = 7
    dtype: torch.dtype = torch.float64
    strategy: str = "ring"
    layout: str = AUTO
    timeout: float = 600.0


def scans_by_token(model: nn.Module) -> bool:
    return any(recipe.by_token for _, _, recipe in recipes_in(model))


class Refused(Exception):
    """A model that may not be cut, with the reason."""

    def __init__(self, why: str, proof: dict[str, bool] | None = None) -> None:
        super().__init__(why)
        self.proof = proof or {}


class Unfit(Exception):
    """Arguments that this model cannot have; the text says which."""


class NotRun(Exception):
    """The plain model does not run."""


Tell = Callable[[str], None]


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in this type; buffers, such as rotary frequencies, at least in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                module._buffers[key] = buffer.to(wide)


def lengths_of(tokens: int, documents: int, seed: int) -> list[int]:
    """Documents of all sizes that make up a row; one of them a single token, where three or
    more share it."""
    random = torch.Generator().manual_seed(100 + seed)
    single = documents > 2
    count, total = (documents - 1, tokens - 1) if single else (documents, tokens)
    parts = 0.25 + torch.rand(count, generator=random, dtype=torch.float64)
    borders = (parts.cumsum(0) / parts.sum() * (total - count)).round().long().tolist()
    found = [end - begin + 1 for begin, end in zip([0, *borders], borders, strict=False)]
    if single:
        found.insert(documents // 2, 1)
    return found


def case_for(model: Any, wishes: Wishes, seed: int) -> Case:
    lengths = _fitting(model, wishes, seed)
    random = torch.Generator().manual_seed(200 + seed)
    usual = ordinary_ids(model)
    ids = usual[torch.randint(len(usual), (1, wishes.tokens), generator=random)]
    labels = ids.clone()
    begin = 0
    for length in lengths:
        labels[0, begin] = IGNORED  # nobody foretells the first token of a document
        begin += length
    return packed_rows(ids, labels, [lengths])


def _fitting(model: Any, wishes: Wishes, seed: int) -> list[int]:
    """As many documents as were wished for, or more where the model's positions end before
    the longest would; Unfit where no two tokens fit in there."""
    most = positions_of(model.config)
    documents = wishes.documents
    while 2 * documents <= wishes.tokens:
        lengths = lengths_of(wishes.tokens, documents, seed)
        if most is None or max(lengths) + first_position(model) <= most:
            return lengths
        documents += max(documents // 4, 1)
    raise Unfit(
        f"{type(model).__name__} has {most} positions, too few for documents that {wishes.tokens} "
        f"tokens could be cut into; give fewer --tokens, or a model with more"
    )


@dataclass(frozen=True)
class Truth:
    """Each document alone: in float64 throughout, and as the plain model has it in its own type,
    which is off by its errors."""

    answer: Answer
    plain: Answer
    errors: dict[str, float]
    loss_error: float
    measured: bool
    #: Selected keys of the plain model: for each indexer [tokens, slots], -1 where empty.
    selected: list[Tensor]
    #: Whether ranks are to be float64 throughout as well: scans are float32 from end to end,
    #: and two ways to cut a document into chunks differ by more than most faults.
    throughout: bool

    @staticmethod
    def of(model: Any, case: Case, dtype: torch.dtype, tell: Tell) -> Truth:
        tell("each document alone")
        selected: list[list[Tensor]] = []
        with _watched_indexers(model, selected):
            try:
                plain = alone(model, case)
            except Exception as error:
                raise NotRun(f"each document alone: {line_of(error)}") from error
        tell("each document alone, in float64 throughout")
        try:
            with AllDouble():  # type: ignore[no-untyped-call]
                answer = alone(copy.deepcopy(model).double(), case)
            measured = True
        except Exception:  # models that mix types on purpose
            answer, measured = plain, dtype == torch.float64
            if not measured:
                answer = alone(copy.deepcopy(model).double(), case)
        errors = distances(plain, answer, CANCELLED)
        loss = abs(plain.loss - answer.loss) / abs(answer.loss or 1.0)
        starts = [d.begin for d in case.documents]
        keys = [_joined(parts, starts) for parts in selected]
        known = measured and answer is not plain
        scans = any(recipe.carries for _, _, recipe in recipes_in(model))
        throughout = known and scans and dtype == torch.float64
        return Truth(answer, plain, errors, loss, known, keys, throughout)


class _watched_indexers:
    """Inside, keeps what indexers of the plain model select, call by call."""

    def __init__(self, model: nn.Module, into: list[list[Tensor]]) -> None:
        self._model, self._into = model, into
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            if name.endswith("self_attn.indexer"):
                kept: list[Tensor] = []
                self._into.append(kept)
                self._handles.append(
                    module.register_forward_hook(functools.partial(self._keep, kept))
                )

    @staticmethod
    def _keep(kept: list[Tensor], module: Any, given: Any, out: Any) -> None:
        indices = out[0] if isinstance(out, tuple) else out
        if isinstance(indices, Tensor) and indices.dim() == 3:
            kept.append(indices[0].detach().clone())

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _joined(parts: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """Selections of documents, in the tokens of the row; keys that a query does not see are
    empty slots."""
    width = max((part.shape[-1] for part in parts), default=0)
    rows = []
    for part, start in zip(parts, starts, strict=False):
        queries = torch.arange(part.shape[0]).unsqueeze(1)
        seen = (part >= 0) & (part <= queries)
        tokens = torch.where(seen, part + start, -1)
        rows.append(nn.functional.pad(tokens, (0, width - part.shape[-1]), value=-1))
    return torch.cat(rows) if rows else torch.empty(0, 0, dtype=torch.int64)


@dataclass(frozen=True)
class Slots:
    """Selected keys over ranks that the plain model did not select."""

    differ: int
    of: int
    near: float  #: how far the score of such a key is from that of the other, relative to it


@dataclass(frozen=True)
class Found:
    """What ranks gave, as rank 0 has it."""

    answer: Answer
    leaks: dict[str, tuple[int, float]]  #: tokens that moved by more than rounding, and the most
    slots: Slots | None
    sent: list[int]  #: of each rank, bytes
    predicted: list[int]
    seconds: float
    cut: _C.Cut
    layers: list[Any]
    attended: int  #: calls of attention
    strategy: str


def over_ranks(model: Any, case: Case, wishes: Wishes, group: Group | None, truth: Truth) -> Found:
    if group is not None:
        found = _on_rank(model, case, wishes, truth, group)
        restore(model)  # it is asked for more, as the plain model that it was
        return found
    copies = [copy.deepcopy(model) for _ in range(wishes.ranks)]  # deepcopy is not for threads

    def body(mine: Group) -> Found:
        return _on_rank(copies[mine.rank()], case, wishes, truth, mine)

    return run_ranks(wishes.ranks, body, timeout=wishes.timeout)[0]


def _on_rank(model: Any, case: Case, wishes: Wishes, truth: Truth, group: Group) -> Found:
    try:
        mine = parallelize(model, group, strategy=wishes.strategy, layout=wishes.layout)
    except NotImplementedError as error:
        raise Refused(str(error).removeprefix("parallelize: ")) from None
    local, wanted, count = share_of(mine, case, group)
    said = explain(mine, local)
    calls: list[tuple[Any, ...]] = []
    attended: list[tuple[Any, bool]] = []
    _watch(local, calls, attended)
    begin, before = time.monotonic(), group.sent_bytes
    logits = mine(**local).logits
    loss = loss_of(logits, wanted, count)
    loss.backward()  # type: ignore[no-untyped-call]
    seconds, sent = time.monotonic() - begin, group.sent_bytes - before
    predicted, attending, selecting = _predicted(said.layers, attended), len(attended), list(calls)
    if truth.throughout:
        mine.zero_grad()
        with AllDouble():  # type: ignore[no-untyped-call]
            logits = mine(**local).logits
            loss = loss_of(logits, wanted, count)
            loss.backward()  # type: ignore[no-untyped-call]
    sum_gradients(mine, group)
    whole = unshard(logits.detach(), local, group=group)
    answer = Answer(
        float(total_loss(loss.double(), group)),
        [whole[d.row, d.begin : d.end] for d in case.documents],
        gradients_of(mine),
    )
    mine.zero_grad()
    numbers = torch.tensor([[sent, predicted]], dtype=torch.int64)
    ones = [1] * group.size()
    every = all_gather_tokens(numbers, axis=0, sizes=ones, group=group).T.tolist()
    return Found(
        answer=answer,
        leaks=_leaks(mine, case, group, truth),
        slots=_slots(selecting, truth.selected, local, group),
        sent=every[0],
        predicted=every[1],
        seconds=seconds,
        cut=local.cut,
        layers=list(said.layers),
        attended=attending,
        strategy=wishes.strategy,
    )


def peak_of(model: Any, case: Case, wishes: Wishes) -> int | None:
    """Bytes of a step on rank 0, as `explain` counts them without values; None where it
    cannot."""
    said = explain(
        model,
        case.batch,
        ranks=wishes.ranks,
        device="cpu",
        strategy=wishes.strategy,
        layout=wishes.layout,
        optimizer="sgd",
        loss_tile=None,
    )
    return None if said.memory is None else said.memory.peak


# ---- Who sees whom.


def _leaks(model: Any, case: Case, group: Group, truth: Truth) -> dict[str, tuple[int, float]]:
    """Tokens whose output moved although nothing that they may see was changed."""
    batch = {key: value for key, value in case.batch.items() if key != "labels"}
    ids = case.ids
    odd, late = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for number, d in enumerate(case.documents):
        odd[d.row, d.begin : d.end] = bool(number % 2)
        late[d.row, (d.begin + d.end) // 2 : d.end] = True
    before = outputs_of(model, batch, group)
    size = float(before.abs().max()) or 1.0
    rounding = max(truth.errors["logits"], 100 * torch.finfo(before.dtype).eps)
    found = {}
    for what, changes in (("documents", (odd, ~odd)), ("future tokens", (late,))):
        moved, most = 0, 0.0
        for changed in changes:
            other = {**batch, "input_ids": changed_inside(ids, changed)}
            by = movement(before, outputs_of(model, other, group), ids.shape) / size
            by = by.masked_fill(changed, 0)
            moved += int((~(by <= rounding)).sum())
            most = max(most, float(by.max()))
        found[what] = (moved, most)
    return found


# ---- Selected keys.


def _watch(
    local: LocalBatch, calls: list[tuple[Any, ...]], attended: list[tuple[Any, bool]]
) -> None:
    """Keeps what layers of this batch select, by which tensors, and who attended: what it saw,
    and whether it learns."""
    attention = local[KEYWORD]
    select, attend = attention.select_keys, attention.attend

    def selected(q: Tensor, k: Tensor, weights: Tensor, *, slots: int) -> Tensor:
        indices: Tensor = select(q, k, weights, slots=slots)
        calls.append((indices, q, k, weights))
        return indices

    def attending(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        attended.append((options.get("window"), torch.is_grad_enabled()))
        out: Tensor = attend(q, k, v, **options)
        return out

    vars(attention)["select_keys"], vars(attention)["attend"] = selected, attending


def attending_layers(layers: Sequence[Any]) -> list[Any]:
    """Costs of the layers that call attention itself."""
    return [
        cost
        for cost in layers
        if cost.layer.selects is cost.layer.pools is cost.layer.recurrence is None
    ]


def _predicted(layers: Sequence[Any], attended: Sequence[tuple[Any, bool]]) -> int:
    """Bytes that `explain` foretells. It says what a call of a layer sends; some families call
    their layers several times, or without gradients, which is counted here."""
    plain = attending_layers(layers)
    once: int = sum(cost.sent_forward + cost.sent_backward for cost in layers)
    kinds: dict[Any, set[tuple[int, int]]] = {}
    for cost in plain:
        kinds.setdefault(cost.layer.window, set()).add((cost.sent_forward, cost.sent_backward))
    if len(attended) == len(plain) or any(len(kinds.get(w, ())) != 1 for w, _ in attended):
        return once
    total: int = once - sum(cost.sent_forward + cost.sent_backward for cost in plain)
    for window, learns in attended:
        ((forward, backward),) = kinds[window]
        total += forward + backward * learns
    return total


def _slots(
    calls: Sequence[tuple[Any, ...]], plain: Sequence[Tensor], local: LocalBatch, group: Group
) -> Slots | None:
    """Ours against those of the plain model, in the tokens of the row. Every rank calls it."""
    if not calls or len(calls) != len(plain):
        return None
    tokens = local.cut.ownership.tokens_of(local.cut.rank)
    shape = calls[0][0].shape[:2]
    place = unshard(tokens.expand(shape).contiguous(), local, group=group)[0]
    row_of = torch.full((int(place.max()) + 2,), -1)  # the last one is for empty slots
    row_of[place] = torch.arange(len(place))
    differ = of = 0
    near = 0.0
    for (indices, q, k, weights), theirs in zip(calls, plain, strict=True):
        ours = unshard(indices.long(), local, group=group, fill=-1)[0]
        ours = torch.where(ours >= 0, row_of[ours.clamp(min=0)], -1)
        lost = ~(theirs.unsqueeze(2) == ours.unsqueeze(1)).any(2) & (theirs >= 0)
        of += int((theirs >= 0).sum())
        if not bool(lost.any()):
            continue
        differ += int(lost.sum())
        whole = [unshard(one, local, group=group)[0] for one in (q, k, weights)]
        gained = ~(ours.unsqueeze(2) == theirs.unsqueeze(1)).any(2) & (ours >= 0)
        for query in lost.any(1).nonzero().flatten().tolist():
            out = _scores(whole, query, theirs[query][lost[query]])
            into = _scores(whole, query, ours[query][gained[query]])
            if len(into) != len(out):
                near = float("inf")
                continue
            mine = ours[query]
            size = max(float(_scores(whole, query, mine[mine >= 0]).abs().max()), 1e-30)
            near = max(near, float((into.sort().values - out.sort().values).abs().max()) / size)
    return Slots(differ, of, near)


def _scores(whole: Sequence[Tensor], query: int, keys: Tensor) -> Tensor:
    q, k, weights = (one.double() for one in whole)
    return (weights[query].unsqueeze(1) * (q[query] @ k[keys].T).clamp(min=0)).sum(0)


def line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
