"""Run by test_trainers.py: trainers over ranks, on two processes and then on four. Each run
is written into the folder that it is given."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import trainer_cases as cases
import transformers
from accelerate.utils import DistributedType
from forked import run_forked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import longspan
from longspan import Group

transformers.logging.set_verbosity_error()
folder = pathlib.Path(sys.argv[1])


def write(name: str, found: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        torch.save(found, folder / f"{name}.{dist.get_world_size()}.pt")


def over(name: str, group: Any = None, title: str | None = None, **options: Any) -> Any:
    """A case over the ranks of a group, all by default."""
    world = dist.get_world_size()
    size = world if group is None else Group.of(group).size()
    kind = longspan.hf.trainer(transformers.Trainer, group=group)
    trainer = cases.run(name, kind, folder / name, world // size, **options)
    write(title or name, cases.record(trainer))
    return trainer


class Mixed(longspan.hf.TrainerMixin, transformers.Trainer):
    """The other way to write it."""


class Sharded(transformers.Trainer):
    """accelerate's plugin for FSDP2 wants GPUs; in the state that it has there, it shards on
    CPUs too."""

    def _build_accelerator_args(self, **options: Any) -> Any:
        state = accelerate.Accelerator(cpu=True).state
        accelerate.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = options["fsdp_plugin"]
        return super()._build_accelerator_args(**options)


def on_two() -> None:
    world = Group.from_environment()
    saved = {"save_strategy": "steps", "save_steps": 2}
    for name in cases.CASES:
        trainer = over(name, **(saved if name in ("padded", "adapters") else {}))
        if name == "padded":  # the last batch has one row
            write("judged", cases.judged(trainer, 9))
    write("loop", cases.loop(world))
    # Losses and layers in tiles.
    kind = longspan.hf.trainer(transformers.Trainer, loss_tile=7, mlp_tile=5)
    trainer = cases.run("padded", kind, folder / "tiled")
    write("tiled", cases.record(trainer))
    write("judged tiled", cases.judged(trainer, 9))
    write("tiled smoothed", cases.record(cases.run("smoothed", kind, folder / "tiled smoothed")))
    # Random, and the same on both ranks, else they would say so.
    over("padded", title="grouped", train_sampling_strategy="group_by_length", max_steps=1)
    dist.destroy_process_group()


def on_four() -> None:
    Group.from_environment()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    trainer = over("padded", mesh["cp"], "replicas")
    write("judged", cases.judged(trainer, 8))
    over("streamed", mesh["cp"])
    # Neighbouring ranks hold different sequences.
    kind = longspan.hf.trainer(Mixed, group=mesh["dp"], strategy="head_parallel")
    trainer = cases.run("flattened", kind, folder / "strided", 2)
    write("strided", cases.record(trainer))
    write("judged strided", cases.judged(trainer, 8))
    # From a checkpoint of two ranks, on twice as many.
    for name in ("padded", "adapters"):
        over(name, title=f"resumed {name}", resume=str(folder / name / "checkpoint-2"))
    kind = longspan.hf.trainer(Sharded, group=mesh["cp"])
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    options = {"fsdp": True, "fsdp_config": config, "save_strategy": "steps", "save_steps": 4}
    trainer = cases.run("padded", kind, folder / "sharded", 2, **options)
    assert isinstance(trainer.model, FSDPModule)
    write("sharded", cases.record(trainer))
    dist.destroy_process_group()


run_forked(2, on_two)
run_forked(4, on_four)
