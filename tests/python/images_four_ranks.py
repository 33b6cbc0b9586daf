"""Run by test_models_groups_torch.py as four processes: Gemma 4 with images under FSDP2 and
DDP, two replicas of two context-parallel ranks, against each document alone. Every case
prints its name when it holds."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan import Group

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from oracle import tiny_images

world = Group.from_environment()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
cp = Group.of(mesh["cp"])
CASES = [tiny_images.rows(), tiny_images.one()]
mine = CASES[mesh["dp"].get_local_rank()]


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def sharded(model: Any) -> Any:
    for layer in model.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


for family in tiny_images.FAMILIES:
    answers = [tiny_images.answer_of(tiny_images.whole(family), case) for case in CASES]
    batch = tiny_images.embedded(tiny_images.whole(family), mine)
    plain = longspan.parallelize(tiny_images.whole(family), cp)
    for name, model in (
        ("fsdp", sharded(longspan.parallelize(tiny_images.whole(family), cp))),
        ("ddp", DistributedDataParallel(plain, find_unused_parameters=True)),
    ):
        local = longspan.shard(batch, cp, model=model)
        model(**local).loss.backward()
        longspan.sum_gradients(model, cp)
        found = {key.removeprefix("module."): p.grad for key, p in model.named_parameters()}
        for key in answers[0].gradients:
            gradient = sum(answer.gradients[key] for answer in answers) / 2
            error = (whole(found[key]) - gradient).abs().max()
            assert error <= 3e-6 * gradient.abs().max() + 1e-12, (family, name, key, error)
        if world.rank() == 0:
            print(family, name, flush=True)

# With the towers that make features, wrapped by themselves; one image, so that a rank of every
# replica has none.
case = tiny_images.pictured("gemma4", [[2, (3, 2, "image"), 3], [6]])
answer = tiny_images.answer_of_pictures(tiny_images.with_eyes("gemma4"), case)
for name in ("fsdp", "ddp"):
    model = longspan.parallelize(tiny_images.with_eyes("gemma4"), cp)
    if name == "fsdp":
        fully_shard(model.model.vision_tower, mesh=mesh)
        model = sharded(model)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    local = longspan.shard(case.batch, cp, model=model)
    model(**local).loss.backward()
    longspan.sum_gradients(model, cp)
    found = {key.removeprefix("module."): p.grad for key, p in model.named_parameters()}
    for key, gradient in answer.gradients.items():
        error = (whole(found[key]) - gradient).abs().max()
        assert error <= 3e-5 * gradient.abs().max() + 1e-9, ("towers", name, key, error)
    if world.rank() == 0:
        print("towers", name, flush=True)
dist.destroy_process_group()
