"""Run by test_lost_ranks.py as two ranks. Rank 1 does not come; rank 0 is interrupted
from the keyboard while it waits. Then both make a new group, which works."""

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

# Programs that a script starts in the background ignore the key.
signal.signal(signal.SIGINT, signal.default_int_handler)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
group = longspan.Group.of(dist.new_group(timeout=timedelta(seconds=60)))
q = torch.ones(1, 2, 4, 8, requires_grad=True)
owners = longspan.Ownership.contiguous(8, 2)
before = threading.active_count()
if group.rank() == 0:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        longspan.attend(q, q, q, layout=owners, group=group)
        said = "finished"
    except KeyboardInterrupt:
        said = f"interrupted after {time.monotonic() - start:.2f} s"
    sys.stdout.write(said + "\n")
else:
    time.sleep(2)
again = longspan.Group.of(dist.new_group(timeout=timedelta(seconds=60)))
longspan.attend(q, q, q, layout=owners, group=again).sum().backward()
total = comm.all_gather_tokens(torch.ones(1), axis=0, sizes=[1, 1], group=again).sum().item()
sys.stdout.write(f"again {total:.0f}, threads {threading.active_count() - before}\n")
sys.stdout.flush()
os._exit(0)
