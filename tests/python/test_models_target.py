"""A parallelized model as the target of a draft (EAGLE-3): the states of its layers and its
logits, gathered, are those of one rank, also where a rank holds one token."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

from oracle import tiny_images
from oracle.tiny_decoders import FAMILIES, POOLING, SELECTING, Case, decoder, packed

pytestmark = pytest.mark.slow  # every family runs

IMAGES = [f"{family} with images" for family in tiny_images.FAMILIES]
TARGETS = [*FAMILIES, *SELECTING, *POOLING, *IMAGES]


def target(name: str, case: Case) -> tuple[Any, Mapping[str, Any]]:
    """A model, and the batch for it; images are the tokens from the second to the last but
    one of each document."""
    family, _, images = name.partition(" with ")
    if not images:
        return decoder(family).eval(), case.batch
    kinds = torch.zeros_like(case.ids)
    for d in case.documents:
        kinds[d.row, d.begin + 1 : d.end - 1] = 1
    model = tiny_images.whole(family).eval()
    return model, tiny_images.embedded(model, tiny_images.with_images(case, kinds.tolist()))


def states_of(out: Any) -> list[Tensor]:
    return [*out.hidden_states, out.logits]


@torch.no_grad()
def alone(model: Any, batch: Mapping[str, Any], case: Case) -> list[list[Tensor]]:
    """The states of every document by itself."""
    per_token = {"input_ids", "inputs_embeds", "per_layer_inputs", tiny_images.KINDS}
    found = []
    for d in case.documents:
        inputs = {
            key: batch[key][d.row : d.row + 1, d.begin : d.end] for key in per_token & {*batch}
        }
        out = model(**inputs, use_cache=False, output_hidden_states=True)
        found.append([state[0] for state in states_of(out)])
    return found


@pytest.mark.parametrize(
    ("layout", "ranks", "lengths"),
    [
        ("contiguous-rows", 3, [3]),
        ("contiguous-rows", 4, [3, 1]),
        ("contiguous-stream", 3, [7, 9]),
        ("head-tail", 2, [9, 4]),
    ],
)
@pytest.mark.parametrize("name", TARGETS)
def test_states_and_logits_are_those_of_one_rank(
    name: str, layout: str, ranks: int, lengths: list[int]
) -> None:
    """3 tokens over 3 ranks: transformers would call each of them not causal."""
    case = packed(lengths)
    model, batch = target(name, case)
    wanted = {**batch, "output_hidden_states": True}
    wanted.pop("labels")

    @torch.no_grad()
    def body(group: Group) -> list[Tensor]:
        mine = longspan.parallelize(copy.deepcopy(model), group, layout=layout)
        local = longspan.shard(wanted, group, model=mine)
        if layout == "contiguous-rows" and sum(lengths) == ranks:
            assert local["position_ids"].shape == (1, 1)
        return [longspan.unshard(state, local) for state in states_of(mine(**local))]

    expected = alone(model, batch, case)
    layers = model.config.get_text_config().num_hidden_layers
    for states in run_ranks(ranks, body):
        assert len(states) == layers + 2  # embeddings, layers, logits
        for d, true in zip(case.documents, expected, strict=True):
            for state, of_document in zip(states, true, strict=True):
                torch.testing.assert_close(
                    state[d.row, d.begin : d.end], of_document, rtol=1e-6, atol=1e-6
                )
