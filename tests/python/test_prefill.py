"""Prompts read by all ranks and decoded by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan
from longspan import Group, run_ranks

pytest.importorskip("transformers")

from oracle.tiny_decoders import SELECTING, decoder

PROMPT = torch.arange(2 * 23).mul(7).remainder(58).add(3).view(2, 23)
PADDED = torch.ones_like(PROMPT)
PADDED[1, :6] = 0


def decoded(model: Any, mask: torch.Tensor | None, cache: Any = None) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        PROMPT, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False
    )
    return tokens


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "left pads"])
def test_one_rank_decodes_what_all_have_read(family: str, mask: torch.Tensor | None) -> None:
    plain = decoded(decoder(family).eval(), mask)

    def body(group: Group) -> torch.Tensor | None:
        model = longspan.parallelize(decoder(family).eval(), group)
        batch = {"input_ids": PROMPT} | ({} if mask is None else {"attention_mask": mask})
        cache = longspan.hf.prefill(model, batch, group, rank=group.size() - 1)
        if cache is None:
            return None
        assert cache.get_seq_length() == PROMPT.shape[1] - 1
        with longspan.paused(model):
            return decoded(model, mask, cache)

    for ranks in (1, 3):
        *others, last = run_ranks(ranks, body)
        assert last is not None and last.equal(plain) and others == [None] * (ranks - 1)


def test_streams_too_and_every_rank_that_asks() -> None:
    plain = decoded(decoder("llama").eval(), None)

    def body(group: Group) -> torch.Tensor:
        model = longspan.parallelize(decoder("llama").eval(), group, layout="head-tail-stream")
        cache = longspan.hf.prefill(model, {"input_ids": PROMPT}, group, rank=None)
        with longspan.paused(model):
            return decoded(model, None, cache)

    assert all(one.equal(plain) for one in run_ranks(2, body))


def test_what_cannot_be_decoded_is_refused() -> None:
    model = longspan.parallelize(decoder("llama"))
    with pytest.raises(ValueError, match="prefill: `attention_mask` has pads behind tokens"):
        longspan.hf.prefill(model, {"input_ids": PROMPT, "attention_mask": PADDED.flip(1)})
    with pytest.raises(ValueError, match="of two tokens or more"):
        longspan.hf.prefill(model, {"input_ids": PROMPT[:, :1]})
    with pytest.raises(ValueError, match="prefill: `rank` is 1; expected 0 to 0"):
        longspan.hf.prefill(model, {"input_ids": PROMPT}, rank=1)
    for family in (next(iter(SELECTING)), "gemma4"):
        model = longspan.parallelize(decoder(family))
        with pytest.raises(
            NotImplementedError, match=r"prefill: .* keeps more, or less, than keys"
        ):
            longspan.hf.prefill(model, {"input_ids": PROMPT})


def test_what_would_go_unheard_is_refused() -> None:
    model = longspan.parallelize(decoder("llama"))
    rows = torch.arange(23).expand(2, 23)
    behind = (PADDED.cumsum(1) - 1).clamp(min=0)
    padded = {"input_ids": PROMPT, "attention_mask": PADDED}
    plain = {"input_ids": PROMPT, "labels": PROMPT, "token_type_ids": torch.zeros_like(PROMPT)}
    for batch in (plain | {"position_ids": rows}, padded | {"position_ids": behind}):
        assert longspan.hf.prefill(model, batch).get_seq_length() == 22
    documents = {"seq_lens": torch.tensor([[10, 13]] * 2)}
    for more in ({"position_ids": rows % 10}, {"position_ids": rows + 1}, documents):
        with pytest.raises(ValueError, match=f"prefill: `{next(iter(more))}` would go unheard"):
            longspan.hf.prefill(model, plain | more)
    with pytest.raises(ValueError, match="prefill: `position_ids` would go unheard"):
        longspan.hf.prefill(model, padded | {"position_ids": rows})
    with pytest.raises(ValueError, match="prefill: `token_type_ids` would go unheard"):
        longspan.hf.prefill(model, plain | {"token_type_ids": torch.ones_like(PROMPT)})
