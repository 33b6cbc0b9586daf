"""Long runs: nothing grows, bits repeat, and faults cost no more than the step they hit."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import hosts
import pytest
import torch
from processes import outputs_of, start_ranks

import longspan
from longspan import Group, Ownership, run_ranks

SCRIPT = "long_run.py"
#: kB of memory that may come between the first quarter of a run and its end: what the
#: allocator keeps for lengths that it has not seen. The leak of the test below is 64 kB a step.
MEMORY_NOISE = 2 << 10
THREAD_NOISE = 1  # the one that wakes waits comes and goes


def results_of(outputs: list[str]) -> list[dict[str, Any]]:
    results = []
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert len(lines) == 1, f"rank {rank}:\n{output}"
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
    return results


def run(steps: int, *arguments: str) -> list[dict[str, Any]]:
    return results_of(outputs_of(start_ranks(SCRIPT, 2, str(steps), *arguments)))


def grown(result: dict[str, Any]) -> list[str]:
    """What a rank holds more of at a later quarter than after the first, which warms up."""
    first, *later = result["quarters"]
    assert len(later) == 3
    noise = {"memory": MEMORY_NOISE, "threads": THREAD_NOISE, "descriptors": 0, "tables": 0}
    return [
        name for name, most in noise.items() if max(q[name] for q in later) > first[name] + most
    ]


# ---- Many steps.


@pytest.fixture(scope="module")
def without_faults() -> list[dict[str, Any]]:
    return run(100)


@pytest.mark.slow
def test_nothing_grows_and_bits_repeat() -> None:
    first, second = run(200), run(200)
    for a, b in zip(first, second, strict=True):
        assert len(a["losses"]) == 200
        assert a["digest"] == b["digest"] == first[0]["digest"]
        assert a["losses"][-1] < a["losses"][0]
        assert not grown(a), a["quarters"]


@pytest.mark.slow
def test_what_grows_is_seen() -> None:
    for result in run(200, "--leak"):
        assert grown(result) == ["memory", "threads", "descriptors", "tables"]


# ---- Many groups.


def test_64_runs_at_once_are_right() -> None:
    whole = torch.randn(64, 3, 1, 2, 16, 4, dtype=torch.double)
    owners = Ownership.head_tail(16, 2)
    mask = longspan.Mask.causal(longspan.Packing.single(16))
    expected = [longspan.attend(*each, mask=mask) for each in whole]
    found: list[Any] = [None] * len(whole)

    def one(at: int) -> None:
        def body(group: Group) -> torch.Tensor:
            mine = whole[at].index_select(3, owners.tokens_of(group.rank()))
            out = longspan.attend(*mine, mask=mask, layout=owners, group=group)
            assert isinstance(out, torch.Tensor)
            return out

        found[at] = run_ranks(2, body, timeout=60)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(whole))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, one_rank in zip(found, expected, strict=True):
        assert isinstance(one_rank, torch.Tensor)
        for rank, out in enumerate(outs):
            torch.testing.assert_close(out, one_rank[:, :, owners.tokens_of(rank)])


def test_two_groups_in_two_threads_keep_apart() -> None:
    for output in outputs_of(start_ranks("two_groups_ranks.py", 2)):
        assert "equal: 600 tensors\n" in output, output


# ---- Faults, and on.


@pytest.mark.slow
def test_a_bad_batch_on_one_rank_costs_that_step_alone(
    without_faults: list[dict[str, Any]],
) -> None:
    """The group goes on: all ranks left the same call."""
    for rank, result in enumerate(run(100, "--bad-at", "70")):
        assert len(result["raised"]) == 1
        assert "shard: " in result["raised"][0] and "`labels`" in result["raised"][0]
        assert ("rank 1: ValueError: " in result["raised"][0]) == (rank == 0)
        assert result["digest"] == without_faults[0]["digest"]


@pytest.mark.slow
def test_a_lost_rank_and_a_new_run_from_the_last_checkpoint(
    without_faults: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    kept = ("--checkpoint", str(tmp_path / "state.pt"))
    processes = start_ranks(SCRIPT, 2, "100", "--kill-at", "73", *kept)
    started = time.monotonic()
    survivor = outputs_of(processes)[0]
    assert time.monotonic() - started < 50  # no deadline of 60 s
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode == 3
    assert "rank 1: process " in survivor and " is gone" in survivor, survivor
    for result in run(100, *kept):
        assert result["losses"] == without_faults[0]["losses"]


# ---- Cables.

#: Seconds.
DEADLINE, MORE = 5, 2


@pytest.fixture(scope="module")
def cables() -> None:
    why = hosts.why_not()
    if why:
        pytest.skip(why)


def wait_for_step(processes: list[subprocess.Popen[str]], step: int) -> None:
    for process in processes:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if line == f"STEP {step}\n":
                break
        else:
            raise AssertionError(seen)


def assert_all_lost(processes: list[subprocess.Popen[str]], since: float) -> list[float]:
    """Seconds that the ranks took to say so."""
    took = []
    for rank, output in enumerate(outputs_of(processes, timeout=60)):
        lost = [line for line in output.splitlines() if line.startswith("LOST ")]
        assert len(lost) == 1, f"rank {rank}:\n{output}"
        _, at, words = lost[0].split(" ", 2)
        assert f"rank {rank} " in words, words
        took.append(float(at) - since)
    sys.stdout.write(f"noticed after {', '.join(f'{t:.2f} s' for t in took)}\n")
    assert max(took) < DEADLINE + MORE, took
    return took


def on_hosts(network: hosts.Hosts, steps: int, pause: float = 0) -> list[subprocess.Popen[str]]:
    return network.start(SCRIPT, str(steps), "--timeout", str(DEADLINE), "--pause", str(pause))


@pytest.mark.slow
@pytest.mark.usefixtures("cables")
@pytest.mark.parametrize("host", [0, pytest.param(2, marks=pytest.mark.deep)])  # 0: the store
def test_a_pulled_cable_ends_every_rank_in_time(host: int) -> None:
    with hosts.hosts_of(3) as network:
        processes = on_hosts(network, 10_000, pause=0.001)
        wait_for_step(processes, 20)
        network.pull(host)
        assert_all_lost(processes, time.monotonic())
        network.plug(host)
        results_of(outputs_of(on_hosts(network, 20)))


@pytest.mark.slow
@pytest.mark.usefixtures("cables")
def test_a_rank_killed_on_another_host_is_noticed_within_a_message() -> None:
    """Its host answers that nobody listens any more; gloo alone waits for the deadline, 60 s."""
    with hosts.hosts_of(2) as network:
        network.slow(1, 400_000_000)  # so that it dies within a message
        output = outputs_of(network.start("lost_ranks.py", "1.5"), timeout=100)[0]
        found = re.search(r"LOST after ([\d.-]+) s: (.*)", output)
        assert found is not None, output[-2000:]
        assert float(found[1]) < 10  # a busy machine; 0.5 s on an idle one
        assert "rank 1: process 1 on " in found[2] and " is gone" in found[2], found[2]


@pytest.mark.deep
@pytest.mark.usefixtures("cables")
def test_a_partition_that_heals_in_time_changes_nothing(
    without_faults: list[dict[str, Any]],
) -> None:
    with hosts.hosts_of(2) as network:
        processes = on_hosts(network, 60, pause=0.001)
        wait_for_step(processes, 20)
        network.pull(1)
        time.sleep(1)
        network.plug(1)
        for result in results_of(outputs_of(processes)):
            assert result["losses"] == without_faults[0]["losses"][:60]


@pytest.mark.deep
@pytest.mark.usefixtures("cables")
def test_a_slow_link_is_waited_for_until_the_deadline(
    without_faults: list[dict[str, Any]],
) -> None:
    with hosts.hosts_of(2) as network:
        network.slow(1, 500_000)
        for result in results_of(outputs_of(on_hosts(network, 12))):
            assert result["losses"] == without_faults[0]["losses"][:12]
            # What does not pass at once (64 kB) takes its time, so the link is slow indeed.
            assert result["sent"] > 2 * hosts.BURST
            assert result["seconds"] > 8 * (result["sent"] - hosts.BURST) / 500_000

        network.slow(1, 1_000_000_000)
        processes = on_hosts(network, 10_000, pause=0.001)
        wait_for_step(processes, 20)
        network.slow(1, 2_000)  # a message of a step takes minutes
        assert_all_lost(processes, time.monotonic())
        network.slow(1, 1_000_000_000)
        results_of(outputs_of(on_hosts(network, 20)))
