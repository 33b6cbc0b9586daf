"""`layout="auto"`: per document where that costs few pads, else head-tail, and the same answer."""

from __future__ import annotations

import pytest
import torch

import longspan
from longspan import Group, Ownership, run_ranks

pytest.importorskip("transformers")

from oracle.tiny_decoders import answer_of, decoder, packed, padded
from oracle.whole_models import check, over_ranks

#: Documents that four ranks share without a pad, in rows that are not.
EVEN = packed([24, 16, 8], [32, 8, 8])


def layout_of(case: object, ranks: int, **options: object) -> tuple[str, str]:
    def body(group: Group) -> tuple[str, str]:
        model = longspan.parallelize(decoder("llama"), group, proof=False)
        local = longspan.shard(case.batch, group, model=model, **options)  # type: ignore[attr-defined]
        return local.cut.ownership.kind, local.cut.form

    found = set(run_ranks(ranks, body))
    assert len(found) == 1
    return found.pop()


def test_documents_decide() -> None:
    assert layout_of(EVEN, 4) == ("per-document-head-tail", "stream")
    assert layout_of(packed([21, 19, 8]), 4) == ("head-tail", "rows")  # 24 + 24 + 8: 17 % pads
    assert layout_of(packed([48]), 4) == ("head-tail", "rows")
    assert layout_of(padded([13, 17], 17, "left"), 2) == ("head-tail", "rows")
    assert layout_of(EVEN, 4, layout="head-tail") == ("head-tail", "rows")
    assert layout_of(EVEN, 4, multiple=5) == ("head-tail", "rows")


def test_models_of_older_words_are_cut_as_they_say() -> None:
    model = longspan.parallelize(decoder("llama"), layout="contiguous-rows", proof=False)
    assert longspan.shard(EVEN.batch, model=model).cut.ownership.kind == "contiguous"
    # Without a model rows stay rows.
    assert longspan.shard(EVEN.batch, rank=0, ranks=4).cut.ownership.kind == "head-tail"
    assert longspan.shard(EVEN.batch, rank=0, ranks=4, layout="auto").cut.form == "stream"


@pytest.mark.parametrize("family", ["llama", "gemma3", "glm_moe_dsa"])
def test_the_answer_is_each_document_alone(family: str) -> None:
    check(over_ranks(family, EVEN, 2), answer_of(decoder(family), EVEN))


def test_a_layout_that_is_none_is_still_refused() -> None:
    with pytest.raises(ValueError, match="parallelize: layout 'automatic' is not one of head-tail"):
        longspan.parallelize(decoder("llama"), layout="automatic")
    with pytest.raises(ValueError, match="parallelize: the ownership has 2 ranks, the group 1"):
        longspan.parallelize(decoder("llama"), layout=Ownership.contiguous(8, 2))
    with pytest.raises(ValueError, match="`form` goes with an Ownership"):
        longspan.shard(EVEN.batch, layout="auto", form="rows")


def test_it_evens_out_what_head_tail_does_not() -> None:
    model = decoder("llama", torch.float32)
    said = longspan.explain(model, [512, 256, 128, 128], ranks=8)
    assert said.balance is not None and said.balance.layout == "per-document-head-tail"
    assert said.balance.heaviest == pytest.approx(1.0)
    whole = longspan.explain(model, [512, 256, 128, 128], ranks=8, layout="head-tail")
    assert whole.balance is not None and whole.balance.heaviest > 1.2
    assert whole.balance.others["per-document-head-tail"] == (said.balance.heaviest, 0.0)
    assert "per-document-head-tail would give 1.00 x, 0.0 % pads" in str(whole)
