"""Ranks that do different things are told what, all of them, at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from disagreements import ways
from processes import outputs_of, start_ranks


def test_there_are_many_ways_and_each_has_its_name() -> None:
    names = [way.name for way in ways()]
    assert len(names) >= 120
    assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "step"), [(2, 8), (3, 4), pytest.param(3, 1, marks=pytest.mark.deep)]
)
def test_every_rank_is_told_what_differs(ranks: int, step: int) -> None:
    """All ways run in the same processes, one group each, at a deadline of 60 s: with a third
    rank, which agrees with one of the others; some with two, of whom nobody can be right."""
    outputs = outputs_of(start_ranks("disagreeing_ranks.py", ranks, str(step)), timeout=400)
    answers: dict[str, list[dict[str, Any]]] = {}
    for output in outputs:
        for line in output.splitlines():
            if line.startswith("RESULT "):
                record = json.loads(line.removeprefix("RESULT "))
                answers.setdefault(record["way"], []).append(record)
    wrong: list[str] = []
    for way in ways()[::step]:
        said = answers.get(way.name, [])
        if len(said) != ranks:
            wrong.append(f"{way.name}: {len(said)} ranks of {ranks} answered")
        for record in said:
            if record["seconds"] > 10 or not all(w in record["said"] for w in way.words):
                wrong.append(f"{way.name}, {record['seconds']:.1f} s: {record['said']}")
    assert not wrong, "\n".join([*wrong, outputs[0][-1000:]])
