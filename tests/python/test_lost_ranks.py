"""Ranks that are killed, interrupted, forked or used by two threads: noticed at once and
named, and nothing hangs. Deadlines are 60 s and never reached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from processes import outputs_of, start_ranks

import longspan
from longspan import Group, comm, run_ranks


@pytest.mark.parametrize("delay", [0.05, 0.25])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_a_rank_killed_within_a_message_is_noticed_and_named(ranks: int, delay: float) -> None:
    outputs = outputs_of(start_ranks("lost_ranks.py", ranks, str(delay)), timeout=100)
    for output in outputs[:-1]:
        found = re.search(r"LOST after ([\d.-]+) s: (.*)", output)
        assert found is not None, output[-2000:]
        assert float(found[1]) < 10  # a busy machine; 0.4 s on an idle one
        assert re.search(rf"(for|reach) rank {ranks - 1}: ", found[2]), found[2]


def test_a_wait_ends_with_a_key_and_a_new_group_works() -> None:
    first, second = outputs_of(start_ranks("interrupted_ranks.py", 2), timeout=100)
    found = re.search(r"interrupted after ([\d.]+) s", first)
    assert found is not None, first
    assert float(found[1]) < 5  # the key comes after half a second
    for output in (first, second):
        assert "again 2, threads 0" in output


def test_children_of_a_rank_are_refused_and_the_rank_goes_on() -> None:
    for output in outputs_of(start_ranks("forking_ranks.py", 2, "50"), timeout=100):
        assert "50 children, 0 wrong" in output


def test_a_second_thread_inside_a_call_is_refused() -> None:
    def body(group: Group) -> list[str]:
        said: list[str] = []

        def work(number: int) -> None:
            for _ in range(20):
                x = torch.full((2000,), float(number))
                try:
                    all_of = comm.all_gather_tokens(x, axis=0, sizes=[2000, 2000], group=group)
                except ValueError as error:
                    said.append(str(error))
                else:
                    said.append("" if torch.equal(all_of, x.repeat(2)) else "wrong")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    start = time.monotonic()
    for said in run_ranks(2, body, timeout=60):
        assert "wrong" not in said
        assert any("one thread at a time" in words for words in said)
    assert time.monotonic() - start < 20


def test_a_rank_that_raises_is_heard_and_all_go_on() -> None:
    def body(group: Group) -> list[str]:
        said: list[str] = []
        for step in range(6):
            sizes = [2, 2] if step != 3 or group.rank() == 0 else [2]
            try:
                comm.all_gather_tokens(torch.ones(2), axis=0, sizes=sizes, group=group)
                said.append("")
            except ValueError as error:
                said.append(str(error))
        return said

    heard, raised = run_ranks(2, body, timeout=60)
    assert [bool(words) for words in heard] == [step == 3 for step in range(6)]
    assert raised[3].startswith("all_gather_tokens: `sizes` has 1 entries")
    assert f"another rank raised: rank 1: {raised[3][:40]}" in heard[3]


def test_a_rank_that_raised_where_others_finished_is_out_of_step() -> None:
    """Nothing travels between documents of one rank, so the others do not wait there."""
    owners = longspan.Ownership.contiguous(8, 2)
    apart = longspan.Mask.causal(longspan.Packing.of([4, 4]))

    def body(group: Group) -> list[str]:
        comm.agree(group, {"x": 1})
        tokens = 4 if group.rank() == 0 else 5
        said: list[str] = []
        try:
            x = torch.ones(1, 1, tokens, 4)
            longspan.attend(x, x, x, mask=apart, layout=owners, group=group)
        except ValueError as error:
            said.append(str(error))
        for _ in range(2):
            with pytest.raises(ValueError) as raised:
                comm.all_gather_tokens(torch.ones(2), axis=0, sizes=[2, 2], group=group)
            said.append(str(raised.value))
        return said

    finished, alone = run_ranks(2, body, timeout=60)
    assert len(finished) == 2 and len(alone) == 3
    for words in (finished[0], finished[1]):
        assert f"in call 2 (attend) another rank raised: rank 1: {alone[0]}" in words
    assert "do different things in call 2: rank 0: attend" in alone[1]


def run_with(variable: str, value: str, program: str) -> subprocess.CompletedProcess[str]:
    """The variables of groups are read once, so each value has a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
@pytest.mark.parametrize("value", ["7.5", "", "soon", "-1"])
def test_the_timeout_of_the_environment(value: str) -> None:
    program = (
        "import longspan\nprint(longspan.run_ranks(2, lambda group: group.timeout, timeout=33))\n"
    )
    done = run_with("LONGSPAN_TIMEOUT", value, program)
    if value in ("7.5", ""):
        assert done.stdout.strip() == str([7.5 if value else 33.0] * 2)
    else:
        assert f"LONGSPAN_TIMEOUT is '{value}'; expected a number of seconds" in done.stderr


def test_a_timeout_of_a_group() -> None:
    def body(group: Group) -> float:
        assert Group.of(group, timeout=2.5).timeout == 2.5
        for wrong in (0, -1.0):
            with pytest.raises(ValueError, match="expected a number of seconds above zero"):
                Group.of(group, timeout=wrong)
        with pytest.raises(TypeError, match="expected seconds or a timedelta"):
            Group.of(group, timeout="soon")  # type: ignore[arg-type]
        return group.timeout

    assert run_ranks(2, body) == [2.5, 2.5]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["every", "off"])
def test_how_often_ranks_compare(mode: str) -> None:
    program = (
        "import longspan, torch\n"
        "from longspan import comm\n"
        "def body(group):\n"
        "    x = torch.ones(2, dtype=torch.float32 if group.rank() == 0 else torch.int32)\n"
        "    comm.all_gather_tokens(torch.ones(2), axis=0, sizes=[2, 2], group=group)\n"
        "    comm.all_gather_tokens(x, axis=0, sizes=[2, 2], group=group)\n"
        "try:\n"
        "    longspan.run_ranks(2, body, timeout=3)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = run_with("LONGSPAN_AGREE", mode, program)
    assert ("different things in call 2" in done.stdout) == (mode == "every"), done
    assert ("DistBackendError" in done.stdout) == (mode == "off"), done
