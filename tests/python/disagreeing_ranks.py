"""Run by test_disagreement.py, one process a rank: every so many-th way of disagreements.py in a
group of its own. Writes one line of JSON for each: what this rank raised, and when."""

import json
import sys
import time
from datetime import timedelta

import torch.distributed as dist
from disagreements import ways

import longspan

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
for way in ways()[:: int(sys.argv[1])]:
    group = longspan.Group.of(dist.new_group(timeout=timedelta(seconds=60)))
    act = way.odd if group.rank() == 1 else way.usual
    start = time.monotonic()
    try:
        act(group)
        # Those that need nothing of the others hear of it at the next exchange.
        longspan.comm.agree(group, {"end": 1})
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    record = {"way": way.name, "said": said, "seconds": time.monotonic() - start}
    sys.stdout.write("RESULT " + json.dumps(record) + "\n")
    sys.stdout.flush()
    dist.barrier()
