"""Run by test_long_runs.py as two ranks, each with two threads, each with a group of its
own: what both compute at once is what each computes alone."""

import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import longspan
from longspan import comm

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
groups = [longspan.Group.of(dist.new_group(timeout=timedelta(seconds=60))) for _ in range(2)]


def work(seed: int) -> list[torch.Tensor]:
    group = groups[seed]
    random = torch.Generator().manual_seed(seed)
    results = []
    for turn in range(60):
        tokens = 2 * int(torch.randint(4, 60, (), generator=random))
        whole = torch.randn(3, 1, 3, tokens, 4, generator=random)
        owners = longspan.Ownership.contiguous(tokens, 2)
        q, k, v = (
            t.requires_grad_() for t in whole.index_select(3, owners.tokens_of(group.rank()))
        )
        strategy = ("ring", "gathered", "needed")[turn % 3]
        out = longspan.attend(q, k, v, layout=owners, group=group, strategy=strategy)
        results += [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]
        results.append(comm.rotate(results[-1], axis=2, group=group))
    return results


alone = [work(seed) for seed in range(2)]
together: list[list[torch.Tensor]] = [[], []]


def run(seed: int) -> None:
    together[seed] = work(seed)


for _ in range(3):
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, other in zip(alone, together, strict=True):
        assert len(mine) == len(other)
        assert all(map(torch.equal, mine, other))
sys.stdout.write(f"equal: {sum(map(len, alone))} tensors\n")
sys.stdout.flush()
dist.barrier()
os._exit(0)
