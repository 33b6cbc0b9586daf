"""Every function that takes a group takes a mesh, a process group, a name or a Group."""

from __future__ import annotations

import json

import pytest
from entrances_two_ranks import ENTRANCES, KINDS
from processes import outputs_of, start_ranks


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    outputs = outputs_of(start_ranks("entrances_two_ranks.py", 2))
    assert all("FOUND " in output for output in outputs), "\n----\n".join(outputs)
    return [json.loads(output.split("FOUND ")[1]) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entrance", list(ENTRANCES))
def test_takes_every_kind_of_group(entrance: str, kind: str, found: list[dict[str, str]]) -> None:
    assert [rank[f"{entrance}/{kind}"] for rank in found] == ["same", "same"]
