"""The gradient contract: summed over the context-parallel ranks, gradients are
those of one rank; and the checks that tell users when theirs are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan import AttentionLayout, Group, Mask, Ownership, Packing, run_ranks
from longspan.values import LocalBatch

FORMS = {layout.name: layout.form for layout in longspan.values.named_layouts()}
LAYOUTS = list(FORMS)
VOCABULARY, WIDTH, HEADS, KEY_HEADS = 23, 16, 4, 2
IGNORED = -100


# ---- A transformer as small as they come.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, HEADS * dim, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * dim, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * dim, bias=False)
        self.out = nn.Linear(HEADS * dim, WIDTH)
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, layout: AttentionLayout, group: Group, strategy: str) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            split = projected.unflatten(-1, (-1, WIDTH // HEADS))
            return split.transpose(1, 2) if x.dim() == 3 else split

        out = longspan.attend(
            heads(self.q(x)),
            heads(self.k(x)),
            heads(self.v(x)),
            sink=self.sink,
            attention=layout,
            group=group,
            strategy=strategy,
        )
        assert isinstance(out, Tensor)
        return self.out((out.transpose(1, 2) if x.dim() == 3 else out).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, layout: AttentionLayout, group: Group, strategy: str) -> Tensor:
        x = x + self.attention(self.norm(x), layout, group, strategy)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Returns the mean loss over all tokens of `loss_group`, and the logits."""

    strategy = "ring"

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def layout_of(self, local: LocalBatch, group: Group) -> AttentionLayout:
        return longspan.AttentionLayout(local)

    def reduced(self, total: Tensor, count: Tensor, group: Group) -> Tensor:
        return longspan.reduce_loss(total, count, group)

    def attention_group(self, group: Group) -> Group:
        return group

    def forward(
        self, local: LocalBatch, group: Group, loss_group: Group | None = None
    ) -> tuple[Tensor | None, Tensor]:
        layout = self.layout_of(local, group)
        x = self.embed(local["input_ids"]) + self.place(local["position_ids"])
        for block in self.blocks:
            x = block(x, layout, self.attention_group(group), self.strategy)
        logits = self.head(self.norm(x))
        if "labels" not in local:
            return None, logits
        labels = local["labels"]
        total = nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        count = (labels != IGNORED).sum()
        return self.reduced(total, count, loss_group or group), logits


def seeded(kind: Callable[..., Transformer] = Transformer, **options: Any) -> Transformer:
    torch.manual_seed(3)
    return kind(**options).double()


def batch_of(rows: int = 4, length: int = 16) -> dict[str, Tensor]:
    """Packed documents in every row, of different lengths, with pads between and
    behind them."""
    random = torch.Generator().manual_seed(11)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=random)
    labels = torch.randint(0, VOCABULARY, (rows, length), generator=random)
    lengths = torch.tensor([[7, 1, 3], [16, -1000, -1000], [2, 9, -1000], [5, 5, 5]])[:rows]
    slots = torch.tensor([[8, 2, 6], [16, -1000, -1000], [4, 12, -1000], [5, 6, 5]])[:rows]
    for row in range(rows):
        begin = 0
        for real, slot in zip(lengths[row].tolist(), slots[row].tolist(), strict=True):
            if slot > 0:
                labels[row, begin + real : begin + slot] = IGNORED
                begin += slot
    return {"input_ids": ids, "labels": labels, "seq_lens": lengths, "seq_lens_padded": slots}


def rows_of(batch: dict[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    return {key: value.chunk(parts)[part] for key, value in batch.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def one_rank(model: Transformer, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    loss, _ = model(longspan.shard(batch), Group())
    loss.backward()
    return loss.detach(), gradients(model)


# ---- Every way to spread four ranks over data and context.


def on_grid(data: int, context: int, body: Callable[[Group, int, Group], Any]) -> list[list[Any]]:
    """Runs body(world, data rank, context group) on data x context threads, and
    returns the results by data rank, then by context rank."""
    runs = [longspan._group._Run(context, timedelta(seconds=30)) for _ in range(data)]

    def rank_main(world: Group) -> Any:
        at, member = divmod(world.rank(), context)
        return body(world, at, runs[at].join(member) if context > 1 else Group())

    try:
        results = run_ranks(data * context, rank_main)
    finally:
        for run in runs:
            run.end()
    return [results[at * context : (at + 1) * context] for at in range(data)]


def summed(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            got[name], expected[name], rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
        )


GRIDS = [(1, 4), (2, 2), (4, 1)]
each_grid = pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"dp{g[0]}_cp{g[1]}")


@each_grid
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_sum_over_context_and_average_over_data(
    grid: tuple[int, int], layout: str
) -> None:
    model, batch = seeded(), batch_of()

    def body(world: Group, at: int, group: Group) -> tuple[Tensor, dict[str, Tensor]]:
        mine = copy.deepcopy(model)
        local = longspan.shard(rows_of(batch, at, grid[0]), group, layout=layout)
        loss, _ = mine(local, group)
        loss.backward()
        return loss.detach(), gradients(mine)

    results = on_grid(*grid, body)
    alone = [one_rank(model, rows_of(batch, at, grid[0])) for at in range(grid[0])]
    for ranks, (loss, _) in zip(results, alone, strict=True):
        # The mean over the replica's tokens, the same bits on each of its ranks.
        assert all(torch.equal(found, ranks[0][0]) for found, _ in ranks)
        torch.testing.assert_close(ranks[0][0], loss)
    got = [summed([found for _, found in ranks]) for ranks in results]
    expected = summed([found for _, found in alone])
    assert_close(
        {name: total / grid[0] for name, total in summed(got).items()},
        {name: total / grid[0] for name, total in expected.items()},
    )


@each_grid
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("strategy", ["ring", "gathered", "needed", "head_parallel"])
def test_a_loss_over_all_ranks_needs_no_average(
    grid: tuple[int, int], strategy: str, tied: bool
) -> None:
    """Replicas hold different numbers of labels; counted together, plain sums of
    gradients are those of the whole batch."""
    model, batch = seeded(tied=tied), batch_of()
    model.strategy = strategy

    def body(world: Group, at: int, group: Group) -> tuple[Tensor, dict[str, Tensor]]:
        mine = copy.deepcopy(model)
        local = longspan.shard(rows_of(batch, at, grid[0]), group)
        loss, _ = mine(local, group, world)
        loss.backward()
        return loss.detach(), gradients(mine)

    results = [each for ranks in on_grid(*grid, body) for each in ranks]
    loss, expected = one_rank(model, batch)
    for found, _ in results:
        torch.testing.assert_close(found, loss)
    assert_close(summed([found for _, found in results]), expected)


def test_a_step_of_training_keeps_replicas_equal() -> None:
    """Three steps on 2 x 2 ranks move the weights as three steps on one."""
    batch = batch_of()
    alone = seeded()
    for _ in range(3):
        alone.zero_grad()
        alone(longspan.shard(batch), Group())[0].backward()
        with torch.no_grad():
            for p in alone.parameters():
                p -= 0.1 * p.grad

    model = seeded()

    def body(world: Group, at: int, group: Group) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        for _ in range(3):
            mine.zero_grad()
            mine(longspan.shard(rows_of(batch, at, 2), group), group, world)[0].backward()
            with torch.no_grad():
                for p in mine.parameters():
                    every = longspan.comm.all_gather_tokens(
                        p.grad.unsqueeze(0), axis=0, sizes=[1] * 4, group=world
                    )
                    p -= 0.1 * every.sum(0)
        return mine.state_dict()

    states = [state for ranks in on_grid(2, 2, body) for state in ranks]
    for state in states:
        assert all(torch.equal(state[name], states[0][name]) for name in state)
    assert_close(states[0], alone.state_dict())


def test_a_rank_without_labels_gives_its_keys_gradients() -> None:
    """All labels on the last tokens: the other ranks have a loss of nothing, yet
    their keys were seen."""
    batch = batch_of(1)
    batch["seq_lens"] = batch["seq_lens_padded"] = torch.tensor([[16]])
    batch["labels"][:, :-2] = IGNORED
    batch["labels"][:, -2:] = 3
    model = seeded()

    def body(group: Group) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        local = longspan.shard(batch, group, layout="contiguous-rows")
        loss, _ = mine(local, group)
        loss.backward()
        return gradients(mine)

    parts = run_ranks(4, body)
    assert float(parts[0]["blocks.0.attention.v.weight"].abs().sum()) > 0
    assert_close(summed(parts), one_rank(model, batch)[1])


@pytest.mark.parametrize("weight", [0.1, 1.0, 3.0])
def test_weighted_tokens_may_be_less_than_one(weight: float) -> None:
    """The mean of tokens that all weigh the same is their mean, whatever they weigh."""

    def body(group: Group) -> tuple[float, float]:
        rank = group.rank()
        loss = torch.tensor([1.0, 4.0, 7.0][rank], dtype=torch.float64, requires_grad=True)
        mean = longspan.reduce_loss(weight * loss, weight, group)
        mean.backward()
        assert loss.grad is not None
        return float(mean), float(loss.grad)

    for mean, gradient in run_ranks(3, body):
        assert mean == pytest.approx(4.0) and gradient == pytest.approx(1 / 3)


def test_nothing_counted_anywhere_is_a_loss_of_zero() -> None:
    batch = batch_of(2)
    batch["labels"].fill_(IGNORED)

    model = seeded()

    def body(group: Group) -> None:
        mine = copy.deepcopy(model)
        loss, _ = mine(longspan.shard(batch, group), group)
        loss.backward()
        assert loss.item() == 0
        assert all(float(g.abs().sum()) == 0 for g in gradients(mine).values())

    run_ranks(2, body)


# ---- check_parity.


class WrongScale(Transformer):
    """The habit of data parallelism: every rank counts as much as all."""

    def reduced(self, total: Tensor, count: Tensor, group: Group) -> Tensor:
        return super().reduced(total, count, group) * group.size()


class LocalMean(Transformer):
    def reduced(self, total: Tensor, count: Tensor, group: Group) -> Tensor:
        return total / count


class WrongDerivative(Transformer):
    """The right loss with a gradient that is N times too large."""

    def reduced(self, total: Tensor, count: Tensor, group: Group) -> Tensor:
        loss = super().reduced(total, count, group)
        return loss.detach() + (loss - loss.detach()) * group.size()


class PartOfTheMean(Transformer):
    """Right too: the share's sum over the count of all, not added up."""

    def reduced(self, total: Tensor, count: Tensor, group: Group) -> Tensor:
        counts = longspan.comm.all_gather_tokens(
            count.reshape(1), axis=0, sizes=[1] * group.size(), group=group
        )
        return total / counts.sum()


class LocalAttention(Transformer):
    """Every rank on its own, as a layer does that nobody has told."""

    def layout_of(self, local: LocalBatch, group: Group) -> AttentionLayout:
        tokens = local.cut.local_tokens
        return longspan.AttentionLayout(Ownership.contiguous(tokens, 1))

    def attention_group(self, group: Group) -> Group:
        return Group()


class NoDocuments(Transformer):
    """Documents are forgotten: causal over the whole row or stream."""

    def layout_of(self, local: LocalBatch, group: Group) -> AttentionLayout:
        owners = local.cut.ownership
        return longspan.AttentionLayout(owners, Mask.causal(Packing.single(owners.tokens)))


class FullMask(Transformer):
    def layout_of(self, local: LocalBatch, group: Group) -> AttentionLayout:
        owners = local.cut.ownership
        return longspan.AttentionLayout(owners, Mask.full(Packing.single(owners.tokens)))


class DroppedMask(Transformer):
    """The mask is lost on the way to several ranks."""

    def layout_of(self, local: LocalBatch, group: Group) -> AttentionLayout:
        if group.size() == 1:
            return super().layout_of(local, group)
        return FullMask.layout_of(self, local, group)  # type: ignore[arg-type]


class OneSidedGradient(Transformer):
    """One layer's gradients are dropped on all ranks but the first."""

    def forward(self, local: LocalBatch, group: Group, loss_group: Any = None) -> Any:
        self.blocks[1].mlp.requires_grad_(group.rank() == 0)
        try:
            return super().forward(local, group, loss_group)
        finally:
            self.blocks[1].mlp.requires_grad_()


class BannedTokens(Transformer):
    def forward(self, local: LocalBatch, group: Group, loss_group: Any = None) -> Any:
        loss, logits = super().forward(local, group, loss_group)
        banned = torch.zeros(VOCABULARY).index_fill(0, torch.tensor([2, 5]), -torch.inf)
        return loss, logits + banned


def parity_on(
    ranks: int, model: Transformer, batch: dict[str, Tensor], **options: Any
) -> longspan._parity.Parity:
    def body(group: Group) -> longspan._parity.Parity:
        return longspan.check_parity(copy.deepcopy(model), batch, group, **options)

    answers = run_ranks(ranks, body)
    assert all(str(answer) == str(answers[0]) for answer in answers)
    return answers[0]


both_sizes = pytest.mark.parametrize("ranks", [1, 3])
RIGHT = [Transformer, PartOfTheMean, BannedTokens]
WRONG = [
    (WrongScale, "loss"),
    (LocalMean, "loss"),
    (WrongDerivative, "embed.weight"),
    (LocalAttention, "logits"),
    (DroppedMask, "logits"),
    (OneSidedGradient, "blocks.1.mlp.0.weight"),
]


@both_sizes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_check_parity_passes_the_right_model(
    kind: type[Transformer], layout: str, ranks: int
) -> None:
    parity = parity_on(ranks, seeded(kind), batch_of(), layout=layout)
    assert parity, str(parity)
    parity.raise_if_different()
    assert parity.first is None
    assert [d.name for d in parity.differences[:3]] == ["logits", "loss", "embed.weight"]


@pytest.mark.parametrize("kind, named", WRONG, ids=lambda w: getattr(w, "__name__", w))
def test_check_parity_names_the_first_tensor_that_differs(
    kind: type[Transformer], named: str
) -> None:
    model = seeded(kind)
    assert parity_on(1, model, batch_of()), "one rank is always right"
    parity = parity_on(3, model, batch_of())
    assert not parity
    assert parity.first is not None and parity.first.name == named, str(parity)
    with pytest.raises(AssertionError, match=f"^check_parity: {named}: "):
        parity.raise_if_different()


def test_check_parity_takes_an_ownership_and_single_precision() -> None:
    batch = batch_of()
    owners = Ownership.of_ranges([[(0, 3)], [(10, 16), (3, 5)], [(5, 10)]])
    model = seeded().float()
    assert parity_on(3, model, batch, layout=owners, form="rows")
    assert not parity_on(3, model, batch, tolerance=0.0)


def test_check_parity_without_labels_compares_the_logits() -> None:
    batch = batch_of()
    del batch["labels"]
    parity = parity_on(3, seeded(), batch)
    assert parity and [d.name for d in parity.differences] == ["logits"]


@both_sizes
def test_checks_leave_the_models_gradients_as_they_were(ranks: int) -> None:
    batch = batch_of()
    models = [seeded() for _ in range(ranks)]

    def body(group: Group) -> None:
        model = models[group.rank()]
        for i, p in enumerate(model.parameters()):
            if i % 2:
                p.grad = torch.full_like(p, i)
        before = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        weights = copy.deepcopy(model.state_dict())
        assert longspan.check_parity(model, batch, group)
        assert longspan.leak_probe(model, batch, group, documents=2) == []
        with pytest.raises(ZeroDivisionError):
            longspan.check_parity(model, batch, group, run=lambda *_: 1 / 0)
        for p, (grad, value) in zip(model.parameters(), before, strict=True):
            assert p.grad is grad
            assert grad is None or torch.equal(grad, value)
        assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())

    run_ranks(ranks, body)


# ---- leak_probe.


def leaks_on(
    ranks: int, model: nn.Module, batch: dict[str, Tensor], **options: Any
) -> list[longspan._parity.Leak]:
    answers = run_ranks(
        ranks, lambda group: longspan.leak_probe(copy.deepcopy(model), batch, group, **options)
    )
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@both_sizes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leak_probe_finds_nothing_in_the_right_model(layout: str, ranks: int) -> None:
    assert leaks_on(ranks, seeded(), batch_of(), layout=layout) == []


@both_sizes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [NoDocuments, FullMask], ids=lambda kind: kind.__name__)
def test_leak_probe_finds_documents_that_see_each_other(
    kind: type[Transformer], layout: str, ranks: int
) -> None:
    leaks = leaks_on(ranks, seeded(kind), batch_of(), layout=layout)
    assert leaks
    first = leaks[0]
    assert first.changed_document == 1 and first.moved_document == 2
    assert (first.row, first.token) == (0, 8)  # where the second document begins
    assert first.by > 0
    assert str(first).startswith(
        "document 1 was changed, and the output of token 8 of row 0, in document 2, moved by "
    )
    if kind is FullMask and FORMS[layout] == "stream":
        # All see all: each of the 9 documents moves another.
        assert [leak.changed_document for leak in leaks] == list(range(1, 10))


def test_leak_probe_tries_no_more_documents_than_asked() -> None:
    leaks = leaks_on(1, seeded(FullMask), batch_of(), layout="contiguous-stream", documents=4)
    assert [leak.changed_document for leak in leaks] == [1, 2, 3, 4]


def test_leak_probe_changes_ids_that_are_all_alike() -> None:
    batch = batch_of()
    batch["input_ids"].zero_()
    assert leaks_on(1, seeded(), batch) == []
    assert leaks_on(1, seeded(FullMask), batch)


def test_leak_probe_knows_infinite_logits_and_single_outputs() -> None:
    batch = batch_of()
    assert leaks_on(3, seeded(BannedTokens), batch) == []

    def one_number(model: nn.Module, local: LocalBatch, group: Group) -> tuple[None, Tensor]:
        return None, model(local, group)[1].sum(-1)

    assert leaks_on(3, seeded(), batch, run=one_number) == []
    assert leaks_on(3, seeded(FullMask), batch, run=one_number)


class Embedded(nn.Module):
    """A model of embeddings, without a head."""

    def __init__(self, inner: Transformer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, local: LocalBatch, group: Group) -> tuple[None, Tensor]:
        x = local["inputs_embeds"]
        for block in self.inner.blocks:
            x = block(x, self.inner.layout_of(local, group), group, "ring")
        return None, x


class TwoHalves(Transformer):
    """Knows by itself that every row holds two documents."""

    def layout_of(self, local: LocalBatch, group: Group) -> AttentionLayout:
        owners = local.cut.ownership
        return longspan.AttentionLayout(owners, Mask.causal(Packing.of([8, 8])))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by", ["seq_lens", "position_ids"])
def test_leak_probe_reads_lengths_and_positions_and_negates_embeddings(by: str, ranks: int) -> None:
    random = torch.Generator().manual_seed(5)
    batch = {"inputs_embeds": torch.randn(2, 16, WIDTH, generator=random).double()}
    if by == "seq_lens":
        batch["seq_lens"] = torch.tensor([[8, 8], [8, 8]])
    else:
        batch["position_ids"] = torch.arange(8).repeat(2, 2)
    assert leaks_on(ranks, Embedded(seeded(TwoHalves)), batch) == []
    found = leaks_on(ranks, Embedded(seeded(NoDocuments)), batch)
    assert [(leak.changed_document, leak.moved_document) for leak in found] == [(1, 2), (3, 4)]


def test_leak_probe_keeps_documents_whose_positions_skip_or_begin_late() -> None:
    """Only positions that do not grow begin a document; pads belong to none."""
    batch = {
        "input_ids": torch.arange(12).view(2, 6),
        "position_ids": torch.tensor([[3, 4, 7, 8, 9, 10], [1, 1, 0, 1, 0, 1]]),
        "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]),
    }
    ids = longspan._parity._document_ids(batch, {})
    assert ids.tolist() == [[1] * 6, [0, 0, 2, 2, 3, 3]]
