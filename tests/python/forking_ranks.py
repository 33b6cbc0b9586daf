"""Run by test_lost_ranks.py as two ranks, each with children that it forks: a group is
refused there by name, and what needs no communication works. The parent goes on."""

import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import longspan
from longspan import comm

trials = int(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
group = longspan.Group.of(dist.group.WORLD)
batch = {"input_ids": torch.arange(16).view(1, 16)}
longspan.shard(batch, group)


def child() -> str:
    """What a worker of a DataLoader may do."""
    local = longspan.shard(batch, group, check_agreement=False)
    assert local["input_ids"].shape == (1, 8)
    for act in (
        lambda: longspan.shard(batch, group),
        lambda: comm.agree(group, {"x": 1}),
        lambda: comm.rotate(torch.ones(3), group=group),
    ):
        try:
            act()
        except ValueError as error:
            if "this is a child that it forked" not in str(error):
                return f"said {error}"
        else:
            return "accepted"
    return ""


started = time.monotonic()
wrong = 0
for trial in range(trials):
    if trial % 50 == 0:
        longspan.shard(batch, group)  # the parent's group still works
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            words = child()
            status = 0 if not words else 2
            if words:
                sys.stdout.write(words + "\n")
                sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    wrong += os.waitpid(pid, 0)[1] != 0
longspan.shard(batch, group)
sys.stdout.write(f"{trials} children, {wrong} wrong, {time.monotonic() - started:.1f} s\n")
sys.stdout.flush()
dist.barrier()
os._exit(0)
