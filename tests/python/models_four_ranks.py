"""Run by test_models_sharded.py as four processes: decoders under FSDP2 and DDP,
two replicas of two context-parallel ranks, against one rank. Every case prints its
name when it holds."""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan import Group
from longspan._twins import kind_of

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from oracle.tiny_decoders import Answer, answer_of, decoder, packed

world = Group.from_environment()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
flat = mesh._flatten("all")
cp = Group.of(mesh["cp"])
replica = mesh["dp"].get_local_rank()
CASES = [packed([4, 9, 1, 11]), packed([21, 2, 2])]


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


#: Its hyper-connections add up over tokens in float32, in models of float64 too; and scans
#: are float32 throughout.
TOLERANCE = {"deepseek_v4": 5e-5, "qwen3_next": 2e-4, "mamba2": 2e-4}


def check(name: str, model: Any, true: Mapping[str, Tensor], norm: Tensor) -> None:
    tolerance = TOLERANCE.get(name.split()[0], 3e-6)
    parameters = dict(model.named_parameters())
    for key, gradient in true.items():
        found = whole(parameters[key].grad)
        error = (found - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max(), (name, key, error)
    expected = torch.stack([g.norm() for g in true.values()]).norm()
    torch.testing.assert_close(norm, expected, rtol=tolerance, atol=0)
    if world.rank() == 0:
        print(name, flush=True)


def step(model: Any, inner: Any) -> Tensor:
    """One step up to the norm, as users write it."""
    local = longspan.shard(CASES[replica].batch, cp, model=inner)
    model(**local).loss.backward()
    longspan.sum_gradients(model, cp)
    return longspan.clip_grad_norm(model, float("inf"), cp)


def truth(family: str) -> dict[str, Tensor]:
    """The mean over replicas of what one rank gives for each batch."""
    answers: list[Answer] = [answer_of(decoder(family), case) for case in CASES]
    names = answers[0].gradients
    return {name: sum(a.gradients[name] for a in answers) / 2 for name in names}


def layers_sharded(model: Any, over: Any) -> Any:
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


#: Whose batches do not reach every expert, or whose selections have no gradient.
UNUSED = ("gpt_oss", "glm_moe_dsa", "deepseek_v32", "deepseek_v4")
for family in ("llama", *UNUSED, "qwen3_next", "mamba2"):
    true = truth(family)
    for kind, over in (("two axes", mesh), ("flat", flat), ("replicas", mesh["dp"])):
        model = layers_sharded(longspan.parallelize(decoder(family), cp), over)
        check(f"{family} fsdp {kind}", model, true, step(model, model))
    # Wrapped first, parallelized then; with recomputation.
    model = layers_sharded(decoder(family), mesh)
    longspan.parallelize(model, cp)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    check(f"{family} fsdp first", model, true, step(model, model))
    model = DistributedDataParallel(
        longspan.parallelize(decoder(family), cp),
        find_unused_parameters=family in UNUSED,
    )
    named = {f"module.{name}": gradient for name, gradient in true.items()}
    check(f"{family} ddp", model, named, step(model, model))

# Losses in tiles, from an output layer that the root holds, or that comes and goes by itself.
true = truth("llama")
for kind in ("whole", "apart", "first"):
    model, tiles = decoder("llama"), {"loss_tile": 7, "mlp_tile": 5}
    if kind != "first":
        longspan.parallelize(model, cp, **tiles)
    if kind != "whole":
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    model = layers_sharded(model, mesh)
    if kind == "first":
        longspan.parallelize(model, cp, **tiles)
    check(f"llama fsdp tiles {kind}", model, true, step(model, model))
model = DistributedDataParallel(longspan.parallelize(decoder("llama"), cp, loss_tile=7))
named = {f"module.{name}": gradient for name, gradient in true.items()}
check("llama ddp tiles", model, named, step(model, model))

compiled = layers_sharded(longspan.parallelize(decoder("llama"), cp), mesh)
for layer in compiled.model.layers:
    layer.compile(backend="aot_eager")
check("llama fsdp compiled", compiled, truth("llama"), step(compiled, compiled))
# Restored inside of a wrapper it is the plain model, and may be parallelized again.
for family in ("llama", "deepseek_v4"):
    plain, true = decoder(family), truth(family)
    ids, classes = CASES[0].ids, [type(module) for module in plain.modules()]
    expected = plain(input_ids=ids).logits
    for kind in ("fsdp", "ddp"):
        inner = longspan.parallelize(decoder(family), cp)
        if kind == "fsdp":
            model, prefix = layers_sharded(inner, mesh), ""
        else:
            model, prefix = DistributedDataParallel(inner, find_unused_parameters=True), "module."
        step(model, inner)
        model.zero_grad()
        longspan.restore(model)
        assert model(input_ids=ids).logits.equal(expected), (family, kind)
        assert [kind_of(module) for module in inner.modules()] == classes
        assert not any("forward" in vars(module) for module in inner.modules())
        longspan.parallelize(model, cp)
        named = {prefix + name: gradient for name, gradient in true.items()}
        check(f"{family} {kind} restored", model, named, step(model, inner))
# A checkpoint of a parallelized model, read by one that is not, cut otherwise.
for family in ("glm_moe_dsa", "deepseek_v4"):
    place = [tempfile.mkdtemp() if world.rank() == 0 else ""]
    dist.broadcast_object_list(place)
    saved = layers_sharded(longspan.parallelize(decoder(family), cp), mesh)
    dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=place[0])
    fresh = decoder(family)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh = layers_sharded(fresh, flat)
    state = get_model_state_dict(fresh)
    dcp.load({"model": state}, checkpoint_id=place[0])
    plain = decoder(family).state_dict()
    assert set(state) == set(plain)
    for name, value in state.items():
        assert whole(value).equal(plain[name]), name
    dist.barrier()
    if world.rank() == 0:
        shutil.rmtree(place[0])
        print(f"{family} checkpoint", flush=True)
dist.destroy_process_group()
