"""Run by test_trainers_trl.py: SFTTrainer over two ranks."""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.distributed as dist
import trl
import trl_cases as cases
from forked import run_forked

import longspan

folder = pathlib.Path(sys.argv[1])


def on_two() -> None:
    world = longspan.Group.from_environment()
    kind = longspan.hf.trainer(trl.SFTTrainer)
    for name in cases.CASES:
        found = cases.run(name, kind, folder)
        if world.rank() == 0:
            torch.save(found, folder / f"{name}.pt")
    dist.destroy_process_group()


run_forked(2, on_two)
