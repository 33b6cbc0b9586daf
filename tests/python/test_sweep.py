"""A sample of the sweep, and every family that once ran without a word and gave something
else. `make sweep` runs all, and makes docs/families.md."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from sweep.__main__ import no_longer_right, page
from sweep.families import SAMPLE, Family, families
from sweep.judging import Verdict, count, judge

pytestmark = pytest.mark.slow  # whole families are judged


def named(name: str) -> Family:
    return next(family for family in families() if family.name == name)


#: How families of the sample fare; the others are right.
REFUSED = {
    "gptj": "GPTJForCausalLM does not look its attention up by name",
    "llama, dynamic": "chooses its rotary frequencies by the longest position at hand",
    "llama4_text, full layers": "'model.layers.3.self_attn' (Llama4TextAttention) goes by the pla",
    "nemotron": "'model.layers.0.self_attn' (NemotronAttention) is not handed the keyword",
    "recurrent_gemma": "'model.layers.0.temporal_block.conv_1d' (Conv1d) mixes tokens",
}


def test_the_sample_has_25_families() -> None:
    assert len(set(SAMPLE)) == 25 and set(REFUSED) < set(SAMPLE)
    assert set(SAMPLE) <= {family.name for family in families()}


@pytest.mark.parametrize("name", SAMPLE)
def test_right_or_refused_by_name(name: str) -> None:
    verdict = judge(named(name))
    if name in REFUSED:
        assert verdict.word == "refused" and REFUSED[name] in verdict.why, str(verdict)
    else:
        assert verdict.word == "right", str(verdict)


#: Count positions from behind their padding index, which is not 0.
BEHIND_THE_PAD = ("roberta", "roberta-prelayernorm", "data2vec-text", "xlm-roberta-xl", "xmod")


@pytest.mark.parametrize("name", BEHIND_THE_PAD)
def test_positions_that_begin_behind_the_pad(name: str) -> None:
    assert judge(named(name)).word == "right"


def test_a_judge_who_sees_nothing_wrong_is_no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the numbers of RoBERTa its verdict is wrong, so the ruler can measure."""
    from longspan import _proving, _transformers

    monkeypatch.setattr(_transformers, "first_position", lambda _: 0)
    monkeypatch.setattr(_proving, "prove", lambda _: ([], None))
    verdict = judge(
        Family("another roberta", "roberta", {"is_decoder": True, "type_vocab_size": 3})
    )
    assert verdict.word == "wrong", str(verdict)
    assert count([verdict, Verdict("x", "right")], "wrong") == 1


def test_what_was_right_is_missed() -> None:
    """A page tells the next sweep what it may not lose, be it refused or gone wrong."""
    before = page(
        [Verdict("a", "right", "1e-15"), Verdict("b, c", "right"), Verdict("d", "refused")], 3
    )
    now = [
        Verdict("a", "refused"),
        Verdict("b, c", "wrong"),
        Verdict("d", "refused"),
        Verdict("e", "wrong"),
    ]
    assert [one.name for one in no_longer_right(now, before)] == ["a", "b, c"]
    assert no_longer_right([Verdict("a", "right")], before) == []
