"""Random calls of the whole surface: an answer, or a refusal in our words."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys

import pytest
from fuzz import surface
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import longspan

FUZZ = pathlib.Path(__file__).parents[2] / "tools" / "fuzz"
BUILD = os.environ.get("LONGSPAN_BUILD", "build/dev")

#: Not functions, or nothing to give them.
WITHOUT_ARGUMENTS = {
    *(
        "Cut",
        "DocumentRun",
        "FETCHES",
        "LocalBatch",
        "LostPeer",
        "NamedLayout",
        "PackedBatch",
        "RankWork",
    ),
    *("SelectedAnswer", "kernel_levels", "in_layer", "named_layouts", "seeded_ranks"),
    *("Proof", "comm", "dsa", "hf", "proof", "testing", "values", "__version__"),
    "TrainerMixin",  # a part of classes, with the arguments of their trainer
}


def test_every_public_function_is_a_target() -> None:
    known = {target.name.split(".")[0] for target in surface.TARGETS}
    parts = (longspan.comm, longspan.dsa, longspan.hf, longspan.proof, longspan.testing)
    for module in (longspan, *parts, longspan.values):
        assert set(module.__all__) - known <= WITHOUT_ARGUMENTS, module.__name__


def test_every_target_works_when_nothing_is_odd() -> None:
    """Else its other arguments would never be looked at."""
    refused = {}
    for number, target in enumerate(surface.TARGETS):
        for seed in range(20):
            rng = random.Random(seed)
            try:
                surface.perform(target, {n: make(rng) for n, make in target.arguments.items()})
            except surface.REFUSALS as error:
                refused[number] = f"{target.name}: {error}"
            else:
                refused.pop(number, None)
                break
    # A plain Linear is no model of transformers.
    expected = ("expert_counts", "explain", "mtp_losses", "parallelize", "paused")
    expected += ("prefill", "restore")
    assert all(text.startswith(expected) for text in refused.values())


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (ValueError("attend: `q` is None"), True),
        (TypeError("shard() got an unexpected keyword argument 'x'"), True),
        (ValueError("Mask::allows: query 8 of 8"), True),
        (TypeError("Packing.of: `lengths` is None; expected a list"), True),
        (TypeError("'NoneType' object has no attribute 'dim'"), False),
        (RuntimeError("attend: but not a refusal"), False),
        (ValueError("tensor does not have a device"), False),
        (MemoryError("std::bad_alloc"), False),
        (KeyError("attend"), False),
    ],
)
def test_it_tells_our_words_from_others(error: Exception, ours: bool) -> None:
    assert (surface.complaint(error) is None) == ours


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
anything = st.one_of(
    st.sampled_from(surface.ODD).map(lambda make: make()),
    st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=5,
    ),
)


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.sampled_from(surface.TARGETS), st.integers(0, 99), st.data())
def test_hypothesis_finds_no_foreign_words(
    target: surface.Target, seed: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    arguments = {name: make(rng) for name, make in target.arguments.items()}
    name = data.draw(st.sampled_from(sorted(arguments)))
    if name in ("body", "run"):
        return
    arguments[name] = data.draw(anything)
    note(surface.described(target, arguments))
    try:
        surface.perform(target, arguments)
    except Exception as error:
        wrong = surface.complaint(error)
        assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize("calls", [2_000, pytest.param(10_000, marks=pytest.mark.deep)])
def test_thousands_of_calls(calls: int) -> None:
    command = [sys.executable, str(FUZZ), BUILD, "--calls", str(calls), "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{calls:,} calls, 0 findings" in done.stdout


@pytest.mark.slow
def test_a_crash_is_a_finding(tmp_path: pathlib.Path) -> None:
    """The runner notices a worker that dies, and goes on behind the call."""
    broken = tmp_path / "tools" / "fuzz"
    broken.parent.mkdir()
    broken.write_text(FUZZ.read_text())
    package = tmp_path / "tests" / "fuzz"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    lines = (FUZZ.parents[1] / "tests" / "fuzz" / "surface.py").read_text()
    lines += (
        # So often that a few calls find them, however many targets there are.
        "\n\nFAULTY = ('Mask.full', 'Mask.causal')\n"
        "\n\nTARGETS = [*TARGETS, *4 * [t for t in TARGETS if t.name in FAULTY]]\n"
        "\n\ndef perform(target, arguments):\n"
        "    import os\n"
        "    if target.name == 'Mask.full':\n"
        "        os.kill(os.getpid(), 11)\n"
        "    if target.name == 'Mask.causal':\n"
        "        raise AttributeError('not ours')\n"
    )
    (package / "surface.py").write_text(lines)
    command = [sys.executable, str(broken), str(tmp_path), "--calls", "100", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Mask.full(" in done.stdout and "the process ended with -11" in done.stdout
    assert "AttributeError: not ours" in done.stdout
