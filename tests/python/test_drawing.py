"""Pictures of plans from Python, and the examples that `make demo` runs."""

import json
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import longspan
from longspan import Mask, Ownership, Packing, Strategy
from longspan._parity import Difference, Parity

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("strategy", Strategy.names())
def test_a_plan_shows_itself(strategy: str) -> None:
    owners = Ownership.contiguous(64, ranks=4)
    picture = longspan.values.draw_plan(
        owners, strategy=strategy, heads=8, key_heads=2, head_dim=128
    )
    assert "What each rank computes and sends" in str(picture)
    assert picture._repr_svg_().startswith("<svg")
    full = longspan.values.draw_plan(
        owners, Mask.full(Packing.single(64)), strategy=strategy, heads=8, head_dim=4
    )
    assert "full" in str(full)


def test_values_show_themselves_in_a_notebook() -> None:
    packing = Packing.of([24, 13], [24, 16])
    svg = packing._repr_svg_()
    assert "Packing, 2 documents, 40 tokens" in svg
    assert "rank" not in svg
    plan = longspan.plan(Ownership.contiguous(64, ranks=4), rank=1)
    assert "<title" in plan._repr_svg_() and "Plan, ring, rank 1 of 4" in plan._repr_svg_()


def test_a_picture_names_itself() -> None:
    owners = Ownership.head_tail(64, ranks=4)
    assert repr(longspan.draw(owners)) == (
        'Picture("Ownership, head-tail: 64 tokens over 4 ranks", 1 panel)'
    )
    assert repr(longspan.draw(owners, Mask.causal(Packing.single(64)))).endswith("4 panels)")


def test_parity_is_a_table_in_a_notebook() -> None:
    found = Parity((Difference("logits", 1e-3, 1e-5), Difference("a<b", 1e-9, 1e-5)))
    table = ElementTree.fromstring(found._repr_html_())
    assert table.findtext("caption") == "2 tensors compared, 1 differ"
    rows = [[cell.text for cell in row] for row in table.iter("tr")][1:]
    assert rows == [["logits", "0.001", "1e-05", "differs"], ["a<b", "1e-09", "1e-05", "equal"]]
    bold = ["font-weight:bold" in row[0].get("style", "") for row in table.iter("tr")][1:]
    assert bold == [True, False]


def test_small_numbers_of_a_plan() -> None:
    text = str(
        longspan.values.draw_plan(
            Ownership.contiguous(64, ranks=4), heads=8, key_heads=2, head_dim=128
        )
    )
    for number in ("136", "392", "648", "904", "16384", "32768", "49152"):
        assert number in text


def test_a_plan_refuses_by_message() -> None:
    with pytest.raises(ValueError, match="is not one of ring, gathered"):
        longspan.values.draw_plan(
            Ownership.contiguous(4, ranks=2), strategy="torus", heads=1, head_dim=1
        )
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        longspan.values.draw_plan(
            Ownership.contiguous(4, ranks=2), heads=0, key_heads=1, head_dim=1
        )


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
def test_the_layouts_of_the_demo_lose_nothing() -> None:
    assert "Nothing is lost, doubled or moved." in run_example("layouts.py")


@pytest.mark.slow
def test_the_attention_of_the_demo_is_that_of_one_rank() -> None:
    found = json.loads(run_example("attention.py", "--json"))
    assert found["wrong"] == 0
    assert len(found["rows"]) == 20
    for row in found["rows"]:
        assert row["forward_sent"] == row["forward_planned"]
        assert row["backward_sent"] == row["backward_planned"]
