"""Run by test_long_runs.py, one process a rank: trains a small model for many steps, with
lengths, layouts and strategies that change from step to step, and writes what it learned
and what it holds as JSON.

Faults on purpose: --bad-at gives the last rank a bad batch in that step, --kill-at kills it
amid that step, --leak keeps something of every step."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longspan

VOCABULARY, WIDTH, HEADS, KEY_HEADS = 31, 32, 4, 2
LAYOUTS = ("head-tail", "contiguous-rows", "contiguous-stream", "per-document-head-tail")
STRATEGIES = ("ring", "gathered", "needed", "head_parallel")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH * KEY_HEADS // HEADS, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, local: Any, group: longspan.Group, strategy: str) -> Tensor:
        x = self.embed(local["input_ids"])

        def heads(projected: Tensor) -> Tensor:
            split = projected.unflatten(-1, (-1, WIDTH // HEADS))
            return split.transpose(1, 2) if x.dim() == 3 else split

        k, v = self.kv(x).chunk(2, -1)
        out = longspan.attend(
            heads(self.q(x)),
            heads(k),
            heads(v),
            attention=longspan.AttentionLayout(local),
            group=group,
            strategy=strategy,
        )
        assert isinstance(out, Tensor)
        out = (out.transpose(1, 2) if x.dim() == 3 else out).flatten(-2)
        labels = local["labels"]
        total = nn.functional.cross_entropy(
            self.head(x + out).flatten(0, -2), labels.flatten(), reduction="sum"
        )
        return longspan.reduce_loss(total, (labels != -100).sum(), group)


def batch_of(step: int) -> dict[str, Tensor]:
    """Two rows, each of two documents, of lengths that are the step's own."""
    random = torch.Generator().manual_seed(step)
    length = int(torch.randint(8, 200, (), generator=random))
    cuts = torch.randint(1, length, (2,), generator=random)
    ids = torch.randint(0, VOCABULARY, (2, length), generator=random)
    return {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
        "seq_lens": torch.stack([cuts, length - cuts], 1),
        "seq_lens_padded": torch.stack([cuts, length - cuts], 1),
    }


def fresh() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def warm_up() -> None:
    """What torch imports in a first step takes seconds, which are not the deadline's."""
    model, optimizer = fresh()
    model(longspan.shard(batch_of(0)), longspan.Group(), "ring").backward()
    optimizer.step()


def held() -> dict[str, int]:
    """What this process holds: kB, threads, descriptors, entries of tables of ours."""
    gc.collect()
    resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    tables = 0
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "longspan":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_info"):
                    tables += value.cache_info().currsize
                elif isinstance(value, Sized) and not isinstance(value, (str, bytes, type)):
                    tables += len(value)
    return {
        "memory": resident * os.sysconf("SC_PAGE_SIZE") // 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tables": tables,
    }


class Leak:
    """Keeps something of everything that is measured."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def add(self) -> None:
        self.kept += [torch.ones(1 << 14), open(os.devnull)]  # noqa: SIM115
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        vars(longspan._group).setdefault("_kept", []).append(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--bad-at", type=int)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--leak", action="store_true")
    parser.add_argument("--checkpoint", type=pathlib.Path)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=60.0)
    told = parser.parse_args()

    warm_up()
    longspan.Group.from_environment()
    dist.barrier()
    group = longspan.Group.of(dist.group.WORLD, timeout=told.timeout)
    last = group.rank() == group.size() - 1
    model, optimizer = fresh()
    losses: list[float] = []
    if told.checkpoint and told.checkpoint.exists():
        state = torch.load(told.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    digest = hashlib.sha256()
    quarters: list[dict[str, int]] = []
    raised: list[str] = []
    leak = Leak()
    started = time.monotonic()

    for step in range(len(losses), told.steps):
        batch = batch_of(step)
        layout = LAYOUTS[step % len(LAYOUTS)]
        if step == told.bad_at:
            bad = batch | {"labels": batch["labels"][:, 1:]} if last else batch
            try:
                longspan.shard(bad, group, layout=layout)
            except ValueError as error:
                raised.append(str(error))
        local = longspan.shard(batch, group, layout=layout)
        loss = model(local, group, STRATEGIES[step // len(LAYOUTS) % len(STRATEGIES)])
        if step == told.kill_at and last:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        longspan.sum_gradients(model, group)
        losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            digest.update(parameter.grad.numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
        if told.leak:
            leak.add()
        if told.checkpoint and group.rank() == 0 and len(losses) % 10 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            beside = told.checkpoint.with_suffix(".new")
            torch.save(state | {"losses": losses}, beside)
            beside.replace(told.checkpoint)
        if told.pause:
            sys.stdout.write(f"STEP {step}\n")
            sys.stdout.flush()
            time.sleep(told.pause)
        if 4 * (step + 1) % told.steps == 0:
            quarters.append(held())
    digest.update(repr(losses).encode())
    result = {
        "digest": digest.hexdigest(),
        "losses": losses,
        "quarters": quarters,
        "raised": raised,
        "sent": group.sent_bytes,
        "seconds": time.monotonic() - started,
    }
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


try:
    main()
except RuntimeError as error:
    sys.stdout.write(f"LOST {time.monotonic()} {error}\n")
    sys.stdout.flush()
    os._exit(3)  # gloo may wait for the dead on its way out
