"""Ranges for profilers, and what steps took."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import longspan
from longspan import Group, dsa, run_ranks

OWNERS = longspan.Ownership.head_tail(32, 4)


def names_of(strategy: str) -> set[str]:
    """The names of ranges that rank 1 of 4 shows in a step."""

    def body(group: Group) -> set[str]:
        q = torch.randn(8, 4, 8, requires_grad=True)

        def step() -> None:
            longspan.attend(q, q, q, layout=OWNERS, mask=MASK, group=group, strategy=strategy)[
                :, 0, 0
            ].sum().backward()

        if group.rank() != 1:
            step()
            return set()
        with torch.autograd.profiler.profile() as profile:
            step()
        return {event.name for event in profile.function_events}

    return run_ranks(4, body)[1]


MASK = longspan.Mask.causal(longspan.Packing.single(32))


def test_steps_and_waits_have_names() -> None:
    names = names_of("ring")
    assert {
        "ring 1/4, own keys",
        "ring 2/4, keys from 0",
        "ring 4/4, keys from 0",
        "ring 2/4, keys from 0, backward",
        "wait, ring attention forward, keys, hop 1 of 3",
        "wait, ring attention backward, gradients, hop 1 of 3",
    } <= names
    assert {"gathered 1/2, own keys", "gathered 2/2, keys from 0, 2, 3"} <= names_of("gathered")


def ranges_of(step: Callable[[], object]) -> set[str]:
    """Those of kernels, on one rank."""
    with torch.autograd.profiler.profile() as profile:
        step()
    return {event.name for event in profile.function_events if event.name.startswith("kernel ")}


def test_kernels_have_names() -> None:
    q = torch.randn(8, 4, 16, requires_grad=True)
    level = longspan.which_kernel(q, q, q)
    found = ranges_of(lambda: longspan.attend(q, q, q).sum().backward())
    assert found == {f"kernel attend, {level}", f"kernel attend backward, {level}"}

    rows = torch.randn(8, 16, requires_grad=True)
    lists = torch.zeros(8, 3, dtype=torch.int32)
    found = ranges_of(
        lambda: dsa.attend_selected(q, rows, lists, scale=1.0, value_dim=16).sum().backward()
    )
    assert found == {
        f"kernel attend_selected, {level}",
        f"kernel attend_selected backward, {level}",
    }

    found = ranges_of(lambda: dsa.select_keys(q, rows, torch.ones(8, 4), slots=3))
    assert found == {f"kernel select_keys, {level}"}


def test_tiles_of_the_loss_have_names() -> None:
    hidden = torch.randn(40, 8, requires_grad=True)
    weight, labels = torch.randn(64, 8), torch.zeros(40, dtype=torch.long)
    found = ranges_of(lambda: longspan.linear_cross_entropy(hidden, weight, labels, tile=16))
    named = sorted(name.partition("tokens ")[2] for name in found)
    assert named == ["0 to 15", "16 to 31", "32 to 39"]


def steps(group: Group, count: int) -> None:
    model = torch.nn.Embedding(64, 1)
    ids = torch.arange(64).view(2, 32)
    for _ in range(count):
        local = longspan.shard({"input_ids": ids}, group)
        model(local["input_ids"]).sum().backward()
        longspan.sum_gradients(model, group)
        model.zero_grad()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_report_counts_steps(ranks: int) -> None:
    def body(group: Group) -> longspan._reporting.Report:
        before = group.sent_bytes
        steps(group, 3)
        said = longspan.report(group)
        sent = sum(step.sent_bytes for step in said.steps)
        # All but what was compared before the first batch was cut.
        assert 0 <= group.sent_bytes - before - sent <= 1000
        return said

    for said in run_ranks(ranks, body):
        assert [step.tokens for step in said.steps[-2:]] == [64, 64]
        assert all(step.seconds > 0 and step.peak_bytes > 0 for step in said.steps)
        assert all((step.sent_bytes > 0) == (ranks > 1) for step in said.steps)
        assert all(0 <= step.waited <= step.seconds for step in said.steps)
        assert json.loads(json.dumps(said.to_json()))["steps"][-1]["tokens"] == 64
        lines = str(said).splitlines()
        assert lines[1].split()[:4] == ["step", "seconds", "tokens", "tokens/s"]
        assert len(lines) == 2 + len(said.steps)
        assert ElementTree.fromstring(said._repr_html_()).findtext("caption") == lines[0]


@pytest.fixture
def step_peaks() -> Iterator[None]:
    gc.collect()  # so that no step gives back what others had
    longspan.report(step_peaks=True)
    yield
    longspan.report(step_peaks=False)


def needing(megabytes: Sequence[int], group: Group) -> Sequence[longspan._reporting.Step]:
    """Steps that have so much more than the least of them."""
    model = torch.nn.Embedding(64, 1)
    for size in megabytes:
        local = longspan.shard({"input_ids": torch.arange(64).view(2, 32)}, group)
        torch.ones(size << 18)
        model(local["input_ids"]).sum().backward()
        longspan.sum_gradients(model, group)
        model.zero_grad()
    return longspan.report(group).steps[-len(megabytes) :]


def test_every_step_has_a_peak_of_its_own(step_peaks: None) -> None:
    steps(Group(), 1)
    small, large, again = needing([1, 200, 1], Group())
    peaks = [step.step_peak_bytes for step in (small, large, again)]
    assert None not in peaks
    assert peaks[1] - peaks[0] > 100e6
    assert peaks[1] - peaks[2] > 100e6
    assert large.peak_bytes == again.peak_bytes >= peaks[1]
    assert again.cells()[6:] == (f"{peaks[2] / 1e9:.2f} GB", f"{large.peak_bytes / 1e9:.2f} GB")


def test_spans_do_not_take_peaks_from_each_other(step_peaks: None) -> None:
    """Ranks that are threads begin steps while others are inside of theirs."""
    torch.ones(300 << 18)  # no span here raises the peak of the process
    outer = longspan._peaks.Span()
    torch.ones(200 << 18)
    inner = longspan._peaks.Span()
    short, long = inner.end().of_span, outer.end().of_span
    assert short is not None and long is not None
    assert long - short > 100e6


def test_a_step_that_raises_no_peak_says_at_most() -> None:
    step = longspan._reporting.Step(0, 1.0, 64, 0, 0.0, 3_000_000_000, None)
    assert step.cells()[6:] == ("<= 3.00 GB", "3.00 GB")
    known = replace(step, step_peak_bytes=2_500_000_000)
    assert known.cells()[6:] == ("2.50 GB", "3.00 GB")


class Device:
    """Stands for torch.cuda: what is allocated, and the one counter of its peak."""

    def __init__(self) -> None:
        self.now = self.peak = self.resets = 0

    def allocate(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def reset(self) -> None:
        self.peak, self.resets = self.now, self.resets + 1


def test_the_counter_of_a_device_is_left_alone_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: device.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", device.reset)
    monkeypatch.setattr(longspan._peaks, "_so_far", {})

    def span(size: int) -> tuple[int, int | None]:
        one = longspan._peaks.Span()
        device.allocate(size)
        device.allocate(-size)
        return one.end()

    assert [span(size) for size in (5, 3, 7)] == [(5, 5), (5, None), (7, 7)]
    assert device.resets == 0 and device.peak == 7
    longspan._peaks.renew("test", True)
    try:
        assert [span(size) for size in (5, 3, 9, 2)] == [(7, 5), (7, 3), (9, 9), (9, 2)]
        assert device.resets > 0
    finally:
        longspan._peaks.renew("test", False)
    resets = device.resets
    assert span(4) == (9, None) and device.resets == resets


def test_peaks_that_cannot_be_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(longspan._peaks, "_CLEAR", tmp_path / "none" / "clear_refs")
    with pytest.raises(RuntimeError, match="report: the peak memory of a step is not known here"):
        longspan.report(step_peaks=True)
    with pytest.raises(TypeError, match="report: `step_peaks` is an int; expected True or False"):
        longspan.report(step_peaks=1)


def test_groups_that_are_gone_leave_nothing() -> None:
    for _ in range(3):
        run_ranks(2, lambda group: steps(group, 1))
    assert len(longspan._reporting._groups) <= 5


def test_lines_on_demand(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "longspan"):
        steps(Group(), 1)
        assert caplog.messages == []
        monkeypatch.setenv("LONGSPAN_LOG", "info")
        steps(Group(), 2)
    assert len(caplog.messages) == 2
    assert "tokens 64, tokens/s" in caplog.messages[0]


@pytest.mark.parametrize(("asked", "lines"), [("INFO", 1), (" Info ", 1), ("off", 0), ("", 0)])
def test_lines_are_asked_for_in_any_letters(
    asked: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LONGSPAN_LOG", asked)
    with caplog.at_level("INFO", "longspan"), warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(Group(), 1)
    assert len(caplog.messages) == lines


def test_another_word_for_lines_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LONGSPAN_LOG", "debug")
    longspan._reporting._say_what_is_known.cache_clear()
    with caplog.at_level("INFO", "longspan"), pytest.warns(UserWarning) as told:
        steps(Group(), 3)
    assert caplog.messages == []
    assert [str(one.message) for one in told] == [
        "longspan: LONGSPAN_LOG is 'debug'; known are `info`, a line after each step of rank 0, and"
        " `off`"
    ]


def test_tokens_of_an_evaluation_are_in_the_step_after() -> None:
    def body(group: Group) -> list[int]:
        batch = {"input_ids": torch.zeros(1, 40, dtype=torch.int64)}
        steps(group, 1)
        longspan.shard(batch, group)
        steps(group, 2)
        return [step.tokens for step in longspan.report(group).steps]

    assert run_ranks(2, body) == [[64, 104, 64]] * 2


def test_nothing_was_cut() -> None:
    def body(group: Group) -> int:
        return len(longspan.report(group).steps)

    assert run_ranks(2, body) == [0, 0]
