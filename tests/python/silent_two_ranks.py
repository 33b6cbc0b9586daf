"""Run by test_steps.py, test_remarks.py and test_estimates.py as two processes: wrappers, seeds
and memory that threads do not have of their own. Each finding is a line."""

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

from allocations import peak_of_step
from oracle.tiny_decoders import WIDER_GLM, WIDER_MAMBA, WIDER_V4, decoder, packed

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


def memory() -> None:
    """Attention over ranks has blocks of keys and sums beside what operators show."""
    lengths = [1500, 300, 248]
    ids = torch.zeros(1, sum(lengths), dtype=torch.int64)
    whole = {"input_ids": ids, "labels": ids, "seq_lens": torch.tensor([lengths])}
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    cases: list[tuple[str, str, torch.dtype, dict[str, Any]]] = [
        ("llama", strategy, dtype, {})
        for dtype in (torch.float32, torch.bfloat16)
        for strategy in ("ring", "gathered", "head_parallel")
    ]
    at_once = {"experts_implementation": "grouped_mm"}
    for family, more in (
        *(("mixtral", at_once), ("mamba2", WIDER_MAMBA)),
        *(("glm_moe_dsa", WIDER_GLM), ("deepseek_v4", WIDER_V4)),
    ):
        cases.append((family, "ring", torch.float32, more))
    for family, strategy, dtype, more in cases:
        model = decoder(family, dtype, **(sizes | more)).train()
        longspan.parallelize(model, group, strategy=strategy, proof=False)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        said = longspan.explain(model, lengths, ranks=2, rank=group.rank(), device="cpu")
        assert said.memory is not None, said.no_memory
        told = said.memory.peak - said.memory.weights - said.memory.optimizer
        real = peak_of_step(model, longspan.shard(whole, group, model=model))
        print(f"memory: {family}-{strategy} {dtype} {told / real:.3f}")


for part in (wrappers, seeds, memory):
    part()
