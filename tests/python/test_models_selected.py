"""Decoders whose layers attend to the keys that an indexer selects: GLM-5.2,
DeepSeek-V3.2 and the families with the same layer."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from oracle.tiny_decoders import CASES, SELECTING, answer
from oracle.whole_models import check, over_ranks

RANKS = (1, 2, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", SELECTING)
def test_it_is_each_document_alone(family: str, case: str, ranks: int) -> None:
    check(over_ranks(family, case, ranks), answer(family, case))
