"""Run by test_steps.py and test_remarks.py as two processes: wrappers and seeds that threads do
not have of their own. Each finding is a line."""

from __future__ import annotations

import pathlib
import sys
import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import longspan

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from oracle.tiny_decoders import decoder, packed

group = longspan.Group.from_environment()
mesh = init_device_mesh("cpu", (2,))
batch = packed([13, 9, 10]).batch


def fresh() -> Any:
    return longspan.parallelize(decoder("llama", torch.float32), group)


def step(model: Any, wrapped: Any, sums: bool) -> str:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(**longspan.shard(batch, group, model=model)).loss.backward()
    if sums:
        longspan.sum_gradients(wrapped, group)
    try:
        optimizer.step()
    except RuntimeError as error:
        return "raised" if "nobody summed" in str(error) else str(error)
    return "stepped"


def wrappers() -> None:
    for sums in (False, True):
        model = fresh()
        print("step: ddp", step(model, DistributedDataParallel(model), sums))
        model = fresh()
        print("step: fsdp", step(model, fully_shard(model, mesh=mesh), sums))
    model = fresh()
    fully_shard(model, mesh=mesh).set_gradient_divide_factor(2.0)
    print("step: factor", step(model, model, False))


def seeds() -> None:
    for seed in ("own", "one"):
        torch.manual_seed(7)
        model = decoder("llama", torch.float32)
        for layer in model.model.layers:
            layer.mlp.drop = torch.nn.Dropout(0.1)
            layer.mlp.register_forward_hook(lambda module, _, out: module.drop(out))
        model = longspan.parallelize(model, group, proof=False).train()
        if seed == "own":
            longspan.seed_ranks(7, group)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(**longspan.shard(batch, group, model=model)).loss.backward()
                longspan.sum_gradients(model, group)
                model.zero_grad()
        said = [str(one.message) for one in caught if "in the same state" in str(one.message)]
        print(f"seed: {seed}", *said)


for part in (wrappers, seeds):
    part()
