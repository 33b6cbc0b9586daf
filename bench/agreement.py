"""What it costs that ranks compare their calls.

    python bench/agreement.py --save bench/results/...md

The same work with LONGSPAN_AGREE=off and =first, in turns, as processes over gloo: a step
(attention forward and backward) of T tokens on N ranks, and the smallest call that
exchanges nothing, where all that is left is the host's time. Medians over all turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

from machine import commit, cpu_name, write_whole

MODES = ("off", "first")


def rank_main(tokens: int, ranks: int, steps: int) -> None:
    """One rank: prints its times, in seconds."""
    import torch
    import torch.distributed as dist

    import longspan

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = longspan.Group.of(dist.group.WORLD)
    local = tokens // ranks
    attention = longspan.AttentionLayout(longspan.Ownership.head_tail(tokens, ranks))
    q, k, v = (torch.randn(1, 8, local, 64, requires_grad=True) for _ in range(3))

    def step() -> None:
        longspan.attend(q, k, v, attention=attention, group=group).sum().backward()

    # One document a rank: nothing travels.
    small = longspan.Ownership.contiguous(ranks, ranks)
    apart = longspan.AttentionLayout(small, longspan.Mask.causal(longspan.Packing.of([1] * ranks)))
    tiny = torch.randn(1, 1, 1, 8)

    def call() -> None:
        for _ in range(100):
            longspan.attend(tiny, tiny, tiny, attention=apart, group=group)

    times: dict[str, list[float]] = {}
    for name, act, count in (("step", step, steps), ("call", call, 20)):
        act()
        dist.barrier()
        for _ in range(count):
            start = time.perf_counter()
            act()
            times.setdefault(name, []).append(time.perf_counter() - start)
        dist.barrier()
    if group.rank() == 0:
        sys.stdout.write(json.dumps(times) + "\n")
        sys.stdout.flush()
    os._exit(0)


def turn(mode: str, tokens: int, ranks: int, steps: int) -> dict[str, list[float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "LONGSPAN_AGREE": mode}
    command = [sys.executable, __file__, "--rank", str(tokens), str(ranks), str(steps)]
    started = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    times: dict[str, list[float]] = json.loads(outputs[0])
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--save", type=pathlib.Path, help="a file to keep the table in")
    parser.add_argument("--rank", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(*options.rank)
    times: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    for number in range(options.turns):
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            for name, more in turn(mode, options.tokens, options.ranks, options.steps).items():
                times[mode].setdefault(name, []).extend(more)
        print(f"turn {number + 1} of {options.turns}", file=sys.stderr, flush=True)
    middle = {
        mode: {name: statistics.median(values) for name, values in found.items()}
        for mode, found in times.items()
    }
    ratio = middle["first"]["step"] / middle["off"]["step"]
    extra = (middle["first"]["call"] - middle["off"]["call"]) / 100 * 1e6
    table = [
        "# What it costs that ranks compare their calls",
        "",
        f"- date: {datetime.date.today()}, commit: {commit()}",
        f"- command: `python bench/agreement.py --tokens {options.tokens} --ranks "
        f"{options.ranks}`, {os.cpu_count()} cores, {cpu_name()}, gloo",
        "",
        "| work | off | first | bar |",
        "| --- | --- | --- | --- |",
        f"| a step, forward and backward, T = {options.tokens}, N = {options.ranks} | "
        f"{middle['off']['step'] * 1e3:.1f} ms | {middle['first']['step'] * 1e3:.1f} ms "
        f"({(ratio - 1) * 100:+.1f} %) | +2 % |",
        f"| a call that exchanges nothing | {middle['off']['call'] * 1e4:.1f} us | "
        f"{middle['first']['call'] * 1e4:.1f} us ({extra:+.1f} us) | +20 us |",
    ]
    print("\n".join(table))
    if options.save:
        write_whole(options.save, "\n".join(table) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
