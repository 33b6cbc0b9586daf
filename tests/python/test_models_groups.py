"""Images in Gemma 4 over ranks: loss, logits and every gradient are those of the model of
transformers on each document alone with its own kinds of tokens."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, Ownership, run_ranks
from longspan._models import state_of

pytest.importorskip("transformers")

from oracle.all_double import AllDouble
from oracle.tiny_decoders import Answer, decoder
from oracle.tiny_decoders import packed as packed_text
from oracle.tiny_images import (
    CASES,
    FAMILIES,
    KINDS,
    answer_of,
    embedded,
    masks_of,
    text_of,
    whole,
)
from oracle.whole_models import check, put_together

pytestmark = pytest.mark.slow  # whole models over ranks

RANKS = (1, 2, 3, 4)


@functools.cache
def answer(family: str, case: str) -> Answer:
    return answer_of(whole(family), CASES[case]())


def over_ranks(
    family: str,
    case: str,
    ranks: int,
    *,
    text: bool = False,
    batch: Any = None,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> Answer:
    """The same, put together from what the ranks computed; with `text` by the decoder
    alone."""
    given, model = CASES[case](), whole(family)
    batch = embedded(model, given) if batch is None else batch

    def body(group: Group) -> tuple[float, dict[str, Tensor], Tensor]:
        mine = copy.deepcopy(model)
        called = longspan.parallelize(text_of(mine) if text else mine, group, **options)
        local = longspan.shard(batch, group, model=called)
        with inside():
            out = called(**local)
            out.loss.backward()
        gradients = {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}
        return out.loss.item(), gradients, longspan.unshard(out.logits.detach(), local)

    return put_together(run_ranks(ranks, body), given.documents)


def exact(ours: Answer, true: Answer) -> None:
    """The loss is float32 in these models, and so the gradients; logits are not."""
    check(ours, true)
    for mine, theirs in zip(ours.logits, true.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_each_document_alone(family: str, case: str, ranks: int) -> None:
    exact(over_ranks(family, case, ranks), answer(family, case))


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_throughout_it_is_that_to_the_last_digits(family: str) -> None:
    model, case = whole(family), CASES["rows"]()
    with AllDouble():
        batch, true = embedded(model, case), answer_of(model, case)
    found = over_ranks(family, "rows", 3, batch=batch, inside=AllDouble)
    check(found, true, tolerance=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_decoder_alone_sees_the_same(family: str, ranks: int) -> None:
    exact(over_ranks(family, "rows", ranks, text=True), answer(family, "rows"))


@pytest.mark.parametrize("layout", [layout.name for layout in longspan.values.named_layouts()])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout(family: str, layout: str) -> None:
    exact(over_ranks(family, "rows", 3, layout=layout), answer(family, "rows"))
    exact(over_ranks(family, "left", 2, layout=layout), answer(family, "left"))


@pytest.mark.parametrize("layout", [layout.name for layout in longspan.values.named_layouts()])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_four_ranks(family: str, layout: str) -> None:
    exact(over_ranks(family, "short", 4, layout=layout), answer(family, "short"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_uneven_ownership_cuts_images(family: str) -> None:
    uneven = Ownership.of_sizes([3, 1, 19])
    exact(over_ranks(family, "rows", 3, layout=uneven), answer(family, "rows"))
    idle = Ownership.of_sizes([11, 12, 5])  # the last rank holds pads alone
    exact(over_ranks(family, "rows", 3, layout=idle), answer(family, "rows"))


@pytest.mark.parametrize("strategy", longspan.Strategy.names())
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy(family: str, strategy: str) -> None:
    exact(over_ranks(family, "rows", 2, strategy=strategy), answer(family, "rows"))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_not_the_answer_without_groups(family: str) -> None:
    """The cases above have teeth: without the kinds, losses differ by far more."""
    batch = embedded(whole(family), CASES["rows"]())
    text = over_ranks(family, "rows", 2, batch={k: v for k, v in batch.items() if k != KINDS})
    assert abs(text.loss - answer(family, "rows").loss) > 1e-4


def test_small_models_mask_images_as_text() -> None:
    """Where the configuration does not say "vision", transformers ignores the kinds."""
    model = whole("gemma4", use_bidirectional_attention=None)
    case = CASES["rows"]()
    batch = embedded(model, case)
    mine = longspan.parallelize(copy.deepcopy(model))
    local = longspan.shard(batch, model=mine)
    logits = longspan.unshard(mine(**local).logits.detach(), local)
    for d, true in zip(case.documents, answer_of(model, case).logits, strict=True):
        torch.testing.assert_close(logits[d.row, d.begin : d.end], true, rtol=1e-12, atol=1e-12)


# ---- Who sees whom.


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_those_of_transformers_at_every_pair(family: str) -> None:
    """For random kinds of tokens, denser and sparser, in a document of its own."""
    plain, mine = whole(family), longspan.parallelize(whole(family))
    random = torch.Generator().manual_seed(3)
    for _ in range(12):
        share = torch.rand(1, generator=random)
        kinds = (torch.rand(1, 26, generator=random) < share) * torch.randint(
            1, 4, (1, 26), generator=random
        )
        batch = {"input_ids": torch.ones_like(kinds), KINDS: kinds}
        layers = longspan.shard(batch, model=mine, layout="contiguous-rows")["longspan"]
        for layer, seen in zip(
            state_of("test", mine).layers[:2], masks_of(plain, kinds), strict=True
        ):
            (mask,) = layer.masks(layers.cut, layers.groups)
            for query in range(26):
                assert [mask.allows(query, key) for key in range(26)] == seen[query].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_document_sees_another(family: str, ranks: int) -> None:
    model = whole(family)
    batch = embedded(model, CASES["rows"]())

    def body(group: Group) -> list[Any]:
        mine = longspan.parallelize(copy.deepcopy(model), group)
        return longspan.leak_probe(mine, batch, group)

    assert run_ranks(ranks, body) == [[]] * ranks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_future_is_seen_inside_images_alone(family: str) -> None:
    """A token is changed: of the tokens before it, only those of its image move."""
    model, case = whole(family), CASES["one"]()  # an image of the tokens 2 to 15
    batch = embedded(model, case)

    def logits(changed: int | None) -> Tensor:
        embeds = batch["inputs_embeds"].clone()
        if changed is not None:
            embeds[:, changed] *= -1

        def body(group: Group) -> Tensor:
            mine = longspan.parallelize(copy.deepcopy(model), group)
            local = longspan.shard({**batch, "inputs_embeds": embeds}, group, model=mine)
            with torch.no_grad():
                return longspan.unshard(mine(**local).logits, local)

        return run_ranks(3, body)[0]

    before = logits(None)

    def moved(changed: int) -> list[int]:
        return (logits(changed) != before)[0].any(-1).nonzero().flatten().tolist()

    assert moved(17)[0] == 17
    assert moved(16)[0] == 16
    assert moved(15)[0] == 2  # all of its image, however long
    assert moved(1)[0] == 1


# ---- What users see, and what is refused.


def test_attention_says_what_it_has() -> None:
    model = longspan.parallelize(whole("gemma4"))
    local = longspan.shard(embedded(model, CASES["rows"]()), model=model)
    kinds = "LocalAttention(causal, window 5 within_window; ring"
    assert repr(local["longspan"]).startswith(kinds)
    assert local[KINDS].shape == local["position_ids"].shape
    text = longspan.shard(packed_text([7, 9]).batch, model=model)
    assert repr(text["longspan"]).startswith("LocalAttention(causal, window 5; ring")


def test_explain_counts_groups() -> None:
    model = longspan.parallelize(whole("gemma4_unified"))
    batch = embedded(model, CASES["one"]())
    seen = longspan.explain(model, batch).layers
    assert longspan.explain(model, longspan.shard(batch, model=model)).layers == seen
    text = longspan.explain(model, {k: v for k, v in batch.items() if k != KINDS}).layers
    # 14 tokens: behind them 0 to 13, of which the window of 5 shows 4; ahead 13 to 0.
    assert [s.pairs - t.pairs for s, t in zip(seen[:2], text[:2], strict=True)] == [136, 91]
    assert "window 5 groups" in str(longspan.explain(model, batch))


def refused(batch: Any, model: Any, ranks: int = 2) -> str:
    def body(group: Group) -> str:
        mine = longspan.parallelize(copy.deepcopy(model), group)
        sent = group.sent_bytes
        with pytest.raises(ValueError) as error:
            longspan.shard(batch, group, model=mine)
        # Before anything was sent.
        assert group.sent_bytes == sent
        return str(error.value)

    messages = set(run_ranks(ranks, body))
    assert len(messages) == 1
    return messages.pop()


def test_refuses_groups_for_a_text_model() -> None:
    case = CASES["rows"]()
    assert refused(case.batch, decoder("llama")) == (
        "shard: `mm_token_type_ids` names images, but LlamaForCausalLM has no groups of tokens "
        "that see each other; leave the key out, or give a decoder of Gemma 4"
    )
    nothing = {**case.batch, KINDS: torch.zeros_like(case.batch[KINDS])}
    assert longspan.shard(nothing, model=longspan.parallelize(decoder("llama")))


def test_refuses_kinds_that_are_not_one_for_each_token() -> None:
    model = whole("gemma4_unified")
    batch = embedded(model, CASES["rows"]())

    def message(kinds: Any) -> str:
        return refused({**batch, KINDS: kinds}, model)

    assert message(batch[KINDS][:, 1:]) == (
        "shard: `mm_token_type_ids` is int64 [2, 22]; expected 2 rows of 23 tokens at axes 0 and 1"
    )
    assert message(batch[KINDS].double()) == (
        "shard: `mm_token_type_ids` is a float64 tensor [2, 23]; expected whole numbers [B, S]"
    )
    assert message(batch[KINDS].unsqueeze(-1)) == (
        "shard: `mm_token_type_ids` is an int64 tensor [2, 23, 1]; expected whole numbers [B, S]"
    )
