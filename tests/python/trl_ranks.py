"""Run by test_trainers_trl.py: SFTTrainer over two ranks, and over two replicas of two."""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.distributed as dist
import trl
import trl_cases as cases
from forked import run_forked
from torch.distributed.device_mesh import init_device_mesh

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


def on_four() -> None:
    """Two replicas of two ranks."""
    longspan.Group.from_environment()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    found = cases.run("completions", longspan.hf.trainer(trl.SFTTrainer, mesh["cp"]), folder, 2)
    if dist.get_rank() == 0:
        torch.save(found, folder / "replicas.pt")
    dist.destroy_process_group()


run_forked(2, on_two)
run_forked(4, on_four)
