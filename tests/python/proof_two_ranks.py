"""Run by test_proof.py as two processes: models under fully_shard with modules that their
twins do not have. Every case prints its name when it holds."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import longspan
from longspan import Group

world = Group.from_environment()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.roll(1, 1)


def centred(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
    return out - out.mean(1, keepdim=True)


def hooked(hook: Any) -> Any:
    """A sharded model with a hook on one module, if there is one for this rank."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if hook is not None:
        model.model.layers[1].mlp.register_forward_hook(hook)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["cp"])
    return fully_shard(model, mesh=mesh["cp"])


def refused(model: Any) -> str:
    try:
        longspan.parallelize(model, world)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return ""


def sharded(last: nn.Module) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, last)
        fully_shard(layer, mesh=mesh["cp"])
    return fully_shard(model, mesh=mesh["cp"])


model = longspan.parallelize(sharded(nn.Tanh()), world)
local = longspan.shard({"input_ids": torch.arange(16)[None]}, world, model=model)
said = longspan.explain(model, local).proof
assert said.startswith("LlamaForCausalLM: isolation, order"), said
assert said.endswith("on the model itself, for 'model.layers.*.mlp' (Sequential)"), said
model(**local).logits.sum().backward()
print("harmless", flush=True)

try:
    longspan.parallelize(sharded(Mixing()), world)
except NotImplementedError as error:
    assert "'model.layers.0.mlp.1' (Mixing) mixes tokens outside attention" in str(error), error
    print("named", flush=True)

plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
longspan.parallelize(plain, world)
for layer in plain.model.layers:
    fully_shard(layer, mesh=mesh["cp"])
fully_shard(plain, mesh=mesh["cp"])
longspan.shard({"input_ids": torch.arange(16)[None]}, world, model=plain)
print("sharded afterwards", flush=True)


class Doubled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


class Running(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).cumsum(1)


def embedded_by(kind: type[nn.Embedding]) -> Any:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.set_input_embeddings(kind(61, 32))
    return fully_shard(model, mesh=mesh["cp"])


model = longspan.parallelize(embedded_by(Doubled), world)
model(**longspan.shard({"input_ids": torch.arange(16)[None]}, world, model=model))
try:
    longspan.parallelize(embedded_by(Running), world)
except NotImplementedError as error:
    assert "'model.embed_tokens' (" in str(error), error
    print("embeddings", flush=True)

longspan.parallelize(hooked(lambda *_: None), world)
assert "'model.layers.1.mlp' (LlamaMLP) mixes tokens" in refused(hooked(centred))
# A look at the model is a call of all ranks.
said = refused(hooked(centred if world.rank() == 0 else None))
assert said.startswith("parallelize: the ranks of the group were given different `hooks`"), said
print("hooks", flush=True)
torch.distributed.destroy_process_group()
