"""Run by test_attend_faults.py, one process a rank: the last rank is killed while
the others wait for it in the middle of attention.

Arguments: strategy, and the pass in which the last rank stops for ever."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import longspan

strategy, stops_in = sys.argv[1:]
dist.init_process_group("gloo", timeout=timedelta(seconds=15))
group = longspan.Group.of(dist.group.WORLD)
owners = longspan.Ownership.head_tail(12 * group.size(), group.size())
is_victim = group.rank() == group.size() - 1


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def stop(gradient: torch.Tensor | None = None) -> None:
    say(f"waiting in {stops_in}")
    time.sleep(600)


q, k, v = (torch.randn(1, 3, 12, 8, requires_grad=True) for _ in range(3))
options = {"layout": owners, "group": group, "strategy": strategy}
longspan.attend(q, k, v, **options).sum().backward()  # all is well so far
dist.barrier()
start = time.monotonic()
try:
    if is_victim and stops_in == "forward":
        stop()
    out = longspan.attend(q, k, v, **options)
    # Another layer above this one: its keys are in backward when the victim stops.
    more = longspan.attend(out, k, v, **options)
    if is_victim and stops_in == "backward":
        out.register_hook(stop)
    more.sum().backward()
except RuntimeError as error:
    say(f"lost after {time.monotonic() - start:.1f} s: {error}")
    os._exit(3)  # gloo may wait for the dead on its way out
say("finished")
