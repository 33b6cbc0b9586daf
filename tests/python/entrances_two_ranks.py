"""Run by test_entrances.py as two processes: every function that takes a group, with
everything that `Group.of` takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import longspan
from longspan import Ownership, Packing

KINDS = ("group", "process_group", "mesh", "name")

OWNERS = Ownership.of_sizes([3, 1])
SIZES = [3, 1]
SENDS = torch.tensor([[0, 1, 0, 2], [1, 0, 0, 1]])


def rank_of(group: Any) -> int:
    return longspan.Group.of(group).rank()


def local(*shape: int, group: Any) -> torch.Tensor:
    """This rank's tokens of a tensor [4, ...] that is the same everywhere."""
    whole = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    return whole[OWNERS.tokens_of(rank_of(group))].contiguous()


def cut(group: Any) -> longspan.values.LocalBatch:
    return longspan.shard({"input_ids": torch.arange(8)[None]}, group)


def summed(group: Any) -> torch.Tensor:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.full_like(model.weight, float(rank_of(group) + 1))
    longspan.sum_gradients(model, group)
    return longspan.clip_grad_norm(model, 1.0, group) + model.weight.grad


def seeds(group: Any) -> torch.Tensor:
    with longspan.comm.seeded_ranks(3, group) as within:
        return torch.tensor(
            [longspan.seed_ranks(3, group), longspan.comm.rank_seed(3, group), within]
        )


class Toy(torch.nn.Module):
    """What check_parity and leak_probe call: no token sees another."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.table = torch.nn.Parameter(torch.randn(16, 4, generator=generator))

    def forward(self, batch: Any, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.table[batch["input_ids"]]
        return longspan.reduce_loss(out.square().sum(), out.shape[1], group), out


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def parallelized(group: Any) -> torch.Tensor:
    model = longspan.parallelize(llama(), group)
    batch = {"input_ids": torch.arange(8)[None]}
    share = longspan.shard(batch, group, model=model)
    assert longspan.explain(model, batch, group).ranks == 2
    return model(**share).logits


def indexer(group: Any) -> tuple[torch.Tensor, ...]:
    return local(2, 4, group=group), local(4, group=group), local(2, group=group)


def selected(group: Any) -> torch.Tensor:
    q, kv = local(2, 4, group=group), local(4, group=group)
    indices = longspan.dsa.select_keys(*indexer(group), slots=2, layout=OWNERS, group=group)
    out, lse = longspan.dsa.attend_selected(
        q, kv, indices, scale=0.5, layout=OWNERS, group=group, return_lse=True
    )
    over = {"layout": OWNERS, "group": group}
    scores = longspan.dsa.score_selected(*indexer(group), indices, **over)
    weights = longspan.dsa.selected_weights(q, kv, indices, lse, scale=0.5, **over)
    same = longspan.dsa.compare_selections(indices, indices, *indexer(group), **over)
    layer = longspan.dsa.select_and_attend(q, kv, *indexer(group), slots=2, scale=0.5, **over)
    assert same.differing == 0 and torch.equal(layer.out, out)
    return torch.cat([t.flatten() for t in (out, scores, weights)])


#: Name -> what it gives on this rank, as a tensor.
ENTRANCES: dict[str, Callable[[Any], torch.Tensor]] = {
    "shard": lambda g: cut(g)["input_ids"],
    "shard_chunks": lambda g: longspan.values.shard_chunks(
        {"input_ids": torch.arange(8)[None]}, 1, g
    )[0]["input_ids"],
    "unshard": lambda g: longspan.unshard(cut(g)["input_ids"], cut(g)),
    "unshard_over": lambda g: longspan.unshard(cut(g)["input_ids"], cut(g).cut, group=g),
    "agree": lambda g: torch.tensor(longspan.comm.agree(g, {"packing": Packing.single(4)}) is None),
    "reduce_loss": lambda g: longspan.reduce_loss(torch.ones(()), 1 + rank_of(g), g),
    "gradients": summed,
    "seeds": seeds,
    "attend": lambda g: longspan.attend(
        *(local(2, 4, group=g) for _ in range(3)), layout=OWNERS, group=g
    ),
    "parallelize": parallelized,
    "check_parity": lambda g: torch.tensor(
        bool(longspan.check_parity(Toy(), {"input_ids": torch.arange(8)[None]}, g))
    ),
    "leak_probe": lambda g: torch.tensor(
        longspan.leak_probe(Toy(), {"input_ids": torch.arange(8)[None]}, g) == []
    ),
    "selected": selected,
    "all_gather_tokens": lambda g: longspan.comm.all_gather_tokens(
        local(3, group=g), axis=0, sizes=SIZES, group=g
    ),
    "reduce_scatter_tokens": lambda g: longspan.comm.reduce_scatter_tokens(
        torch.ones(4, 3), axis=0, sizes=SIZES, group=g
    ),
    "all_to_all_heads": lambda g: longspan.comm.all_to_all_heads(
        local(2, 3, group=g),
        token_axis=0,
        head_axis=1,
        token_sizes=SIZES,
        head_sizes=[1, 1],
        group=g,
    ),
    "all_to_all_tokens": lambda g: longspan.comm.all_to_all_tokens(
        torch.arange(12.0).view(4, 1, 3),
        token_axis=0,
        head_axis=1,
        token_sizes=SIZES,
        head_sizes=[1, 1],
        group=g,
    ),
    "rotate": lambda g: longspan.comm.rotate(local(3, group=g), group=g, sizes=SIZES),
    "roll": lambda g: longspan.comm.roll(local(3, group=g), 1, axis=0, sizes=SIZES, group=g),
    "exchange_needed": lambda g: longspan.comm.exchange_needed(
        local(3, group=g), SENDS, axis=0, group=g
    ),
    "return_needed": lambda g: longspan.comm.return_needed(
        torch.ones([1, 2][rank_of(g)], 3), SENDS, axis=0, tokens=SIZES[rank_of(g)], group=g
    ),
}


def main() -> None:
    """Prints what differs from the answer over a Group, for each entrance and kind."""
    group = longspan.Group.from_environment()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    given = {"group": group, "process_group": dist.group.WORLD, "mesh": mesh, "name": group.name}
    found: dict[str, str] = {}
    for name, call in ENTRANCES.items():
        expected = call(group)
        for kind in KINDS:
            try:
                same = torch.equal(call(given[kind]), expected)
                found[f"{name}/{kind}"] = "same" if same else "differs"
            except Exception as error:
                found[f"{name}/{kind}"] = repr(error)
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
