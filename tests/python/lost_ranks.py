"""Run by test_lost_ranks.py, one process a rank: the last rank kills itself at a moment of
its own while messages of many megabytes are under way.

Arguments: how long after the start, in seconds."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import longspan
from longspan import comm

delay = float(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
group = longspan.Group.of(dist.group.WORLD)
sizes = [1 << 20] * group.size()
x = torch.ones(1 << 20, 8)
comm.all_gather_tokens(x, axis=0, sizes=sizes, group=group)
dist.barrier()
died = time.monotonic() + delay  # about the same on all ranks
if group.rank() == group.size() - 1:

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(9)  # the first process of a namespace cannot kill itself

    threading.Timer(delay, die).start()
try:
    while True:
        comm.all_gather_tokens(x, axis=0, sizes=sizes, group=group)
except RuntimeError as error:
    sys.stdout.write(f"LOST after {time.monotonic() - died:.2f} s: {error}\n")
    sys.stdout.flush()
    os._exit(3)  # gloo may wait for the dead on its way out
