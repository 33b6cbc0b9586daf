"""Pictures whose features the towers of Gemma 4 make, over ranks: loss, logits and every
gradient, those of the towers too, are those of the model of transformers on each document
alone with its own pictures."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, Ownership, run_ranks

pytest.importorskip("transformers")

from oracle.tiny_decoders import Answer
from oracle.tiny_images import (
    FAMILIES,
    KINDS,
    Pictures,
    answer_of_pictures,
    pictured,
    with_eyes,
)
from oracle.whole_models import check, put_together

from longspan import _images
from longspan._images import Routes, dealt

pytestmark = pytest.mark.slow  # whole models over ranks


def image(width: int, height: int) -> tuple[int, int, str]:
    return width, height, "image"


def frame(width: int, height: int) -> tuple[int, int, str]:
    return width, height, "video"


#: Pictures longer than the window, across every border, two at once, at both ends of a
#: document, fewer than ranks, and a document without any.
CASES: dict[str, list[list[list[Any]]]] = {
    "rows": [
        [[2, image(3, 2), 3], [image(1, 1), 4, image(2, 2), image(1, 2)]],
        [[6], [1, image(4, 3), 1, image(1, 1), 1]],
    ],
    "one": [[[1, image(4, 4), 6]]],
    "frames": [[[2, frame(2, 2), frame(2, 2), 1, image(2, 1)], [3, frame(1, 1), 5]]],
}


@functools.cache
def case_of(family: str, case: str) -> Pictures:
    return pictured(family, *CASES[case])


@functools.cache
def model_of(family: str) -> Any:
    return with_eyes(family)


@functools.cache
def answer(family: str, case: str) -> Answer:
    return answer_of_pictures(copy.deepcopy(model_of(family)), case_of(family, case))


def over_ranks(family: str, case: str, ranks: int, **options: Any) -> Answer:
    given, model = case_of(family, case), model_of(family)

    def body(group: Group) -> tuple[float, dict[str, Tensor], Tensor]:
        mine = longspan.parallelize(copy.deepcopy(model), group, **options)
        local = longspan.shard(given.batch, group, model=mine)
        out = mine(**local)
        out.loss.backward()
        gradients = {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}
        return out.loss.item(), gradients, longspan.unshard(out.logits.detach(), local)

    return put_together(run_ranks(ranks, body), given.documents)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_each_document_alone(family: str, case: str, ranks: int) -> None:
    true = answer(family, case)
    assert any("embed_vision" in name and g.abs().max() > 0 for name, g in true.gradients.items())
    check(over_ranks(family, case, ranks), true)


@pytest.mark.parametrize("layout", [layout.name for layout in longspan.values.named_layouts()])
def test_every_layout(layout: str) -> None:
    check(over_ranks("gemma4", "rows", 3, layout=layout), answer("gemma4", "rows"))


def test_an_uneven_ownership_cuts_pictures() -> None:
    """The last rank has pads alone, and looks at pictures for the others."""
    uneven = Ownership.of_sizes([3, 19, 4])
    check(over_ranks("gemma4", "rows", 3, layout=uneven), answer("gemma4", "rows"))


def test_a_forgotten_picture_is_seen() -> None:
    """The cases above have teeth: another picture moves the loss by far more."""
    given = case_of("gemma4", "one")
    mine = longspan.parallelize(copy.deepcopy(model_of("gemma4")))
    other = {**given.batch, "pixel_values": given.batch["pixel_values"].flip(1)}
    loss = mine(**longspan.shard(other, model=mine)).loss.item()
    assert abs(loss - answer("gemma4", "one").loss) > 1e-3


def test_plain_again_after_restore_and_while_paused() -> None:
    """The model's own call takes whole pixels, and the parallelized one none but shares."""
    model = copy.deepcopy(model_of("gemma4"))
    given = {
        k: v[None] if v.dim() == 1 else v for k, v in case_of("gemma4", "one").alone[0].items()
    }
    before = model(**given, use_cache=False).logits
    longspan.parallelize(model)
    with longspan.paused(model):
        assert model(**given, use_cache=False).logits.equal(before)
    assert longspan.restore(model)(**given, use_cache=False).logits.equal(before)


def test_compiled_and_checkpointed() -> None:
    """Towers read how many patches a picture has, so that graphs break there, as they do in
    the plain model."""
    given = case_of("gemma4", "one")

    def body(group: Group) -> tuple[float, dict[str, Tensor], Tensor]:
        model = copy.deepcopy(model_of("gemma4"))
        model.gradient_checkpointing_enable()
        mine: Any = torch.compile(longspan.parallelize(model.train(), group), backend="eager")
        local = longspan.shard(given.batch, group, model=mine)
        out = mine(**local)
        out.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return out.loss.item(), gradients, longspan.unshard(out.logits.detach(), local)

    check(put_together([body(Group.solo())], given.documents), answer("gemma4", "one"))


# ---- Who looks at what, and what travels.


def test_pictures_are_dealt_evenly() -> None:
    """Within 1.2 of what nobody can do better: the mean, or the smallest pictures that must
    share a rank."""
    random = torch.Generator().manual_seed(2)
    for pictures in range(1, 60):
        patches = sorted(torch.randint(60, 280, (pictures,), generator=random).tolist())[::-1]
        for ranks in (1, 2, 3, 4, 7):
            deal = dealt(patches, ranks)
            assert sorted(one for own in deal for one in own) == list(range(pictures))
            work = [sum(patches[one] for one in own) for own in deal]
            shared = [
                sum(patches[k * ranks - k : k * ranks + 1])
                for k in range((pictures - 1) // ranks + 1)
            ]
            least = max(sum(patches) / ranks, patches[0], *shared)
            if pictures >= 8:
                assert max(work) <= 1.2 * least, (pictures, ranks)
    assert dealt([5, 5, 5], 2) == [[0, 2], [1]]  # ties to the lower rank
    assert dealt([280] * 8, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_features_travel_as_predicted_and_come_back() -> None:
    """Each feature once, and nothing that stays; gradients the same way back."""
    random = torch.Generator().manual_seed(4)
    counts = [5, 1, 7, 2, 9]
    owners = torch.randint(-1, 3, (sum(counts),), generator=random)
    places = torch.randperm(sum(counts), generator=random)
    deal = dealt(counts, 3)
    rows = torch.randn(sum(counts), 6, generator=random)
    first = [0, 5, 6, 13, 15]

    def body(group: Group) -> tuple[Tensor, Tensor, int, int]:
        own = [torch.arange(first[p], first[p] + counts[p]) for p in deal[group.rank()]]
        made = rows[torch.cat(own)].requires_grad_()
        routes = Routes.of(counts, deal, owners, places, group.rank())
        before = group.sent_bytes
        got = routes.carry(made, group)
        sent = group.sent_bytes - before
        (got * got).sum().backward()
        assert made.grad is not None
        wanted = owners[torch.cat(own)] >= 0
        torch.testing.assert_close(made.grad, 2 * made.detach() * wanted[:, None])
        return got.detach(), routes.sends, sent, routes.bytes_sent(group.rank(), 24)

    for rank, (got, sends, sent, predicted) in enumerate(run_ranks(3, body)):
        mine = (owners == rank).nonzero().flatten()
        assert got.equal(rows[mine[places[mine].argsort()]])
        assert sent == predicted > 0
        assert int(sends[:, 3].sum()) == int((owners >= 0).sum())


# ---- What is refused.


def refused(change: dict[str, Any], kind: type[Exception] = ValueError, ranks: int = 2) -> str:
    batch = {**case_of("gemma4", "rows").batch, **change}

    def body(group: Group) -> str:
        mine = longspan.parallelize(copy.deepcopy(model_of("gemma4")), group)
        sent = group.sent_bytes
        with pytest.raises(kind) as error:
            longspan.shard({k: v for k, v in batch.items() if v is not None}, group, model=mine)
        assert group.sent_bytes == sent  # before anything was sent
        return str(error.value)

    (message,) = set(run_ranks(ranks, body))
    return message


def test_refuses_pictures_and_tokens_that_do_not_belong_together() -> None:
    batch = case_of("gemma4", "rows").batch
    count = int((batch["input_ids"] == 60).sum())
    assert refused({"pixel_values": None}) == (
        f"shard: `input_ids` has {count} soft tokens of images (60) and the batch no "
        f"`pixel_values`; give the pixels, or `inputs_embeds` that have the features"
    )
    fewer = {key: batch[key][1:] for key in ("pixel_values", "image_position_ids")}
    assert f"makes {count - 6} features for 5 images, and `input_ids` has {count} soft" in refused(
        fewer
    )
    words = torch.where(batch["input_ids"] == 60, 7, batch["input_ids"])
    assert "`input_ids` has 0 soft tokens (60)" in refused({"input_ids": words})


def test_refuses_what_it_cannot_read() -> None:
    batch = case_of("gemma4", "rows").batch
    assert "`image_position_ids` is None; expected whole numbers [6, 48, 2]" in refused(
        {"image_position_ids": None}
    )
    assert "expected a floating tensor [pictures, patches, channels]" in refused(
        {"pixel_values": batch["pixel_values"][0]}
    )
    sound = refused({"input_features": torch.zeros(1, 4, 8)}, NotImplementedError)
    assert sound.startswith("shard: got `input_features`: the tower of Gemma4Model for sound")
    assert "whose features are not cut" in refused(
        {"mm_encoder_outputs": {"image": None}}, NotImplementedError
    )


def test_ranks_with_different_pictures_are_told() -> None:
    given = case_of("gemma4", "one").batch

    def body(group: Group) -> str:
        mine = longspan.parallelize(copy.deepcopy(model_of("gemma4")), group)
        own = {**given, "pixel_values": given["pixel_values"] + group.rank()}
        with pytest.raises(ValueError) as error:
            longspan.shard(own, group, model=mine)
        return str(error.value)

    assert all("pixel_values" in message for message in run_ranks(2, body))


def test_pixels_that_were_dropped_after_shard_are_missed() -> None:
    given = case_of("gemma4", "one").batch
    mine = longspan.parallelize(copy.deepcopy(model_of("gemma4")))
    local = longspan.shard(given, model=mine)
    del local["pixel_values"]
    with pytest.raises(ValueError, match="was sharded with `pixel_values`, which is gone"):
        mine(**local)
    assert KINDS in local and _images.KEYS[1] in local
