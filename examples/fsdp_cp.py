"""A training loop with everything in it: FSDP2 over all ranks, every sequence on --cp of them,
compiled layers, recomputed activations, gradient accumulation, a loss over all targets.

    torchrun --nproc-per-node 4 examples/fsdp_cp.py --cp 2
    torchrun --nproc-per-node 8 examples/fsdp_cp.py --cp 8 --compile inductor \\
        --model Qwen/Qwen3-8B --length 131072 --dtype bfloat16

The losses are those of one rank, whatever --cp is. Documents are random tokens; put your own
into `batches`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import longspan


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or a folder of transformers")
    parser.add_argument("--cp", type=int, default=1, help="ranks that hold one sequence")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=2, help="rows of a step, over all replicas")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--compile", default="inductor", help="a backend of torch.compile, or no")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", action="store_true", help="one line of JSON a step")
    return parser.parse_args()


def made(args: argparse.Namespace, device: str) -> Any:
    """The same parameters on every rank, drawn from one seed."""
    torch.manual_seed(0)
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = (
        AutoConfig.from_pretrained(args.model)
        if args.model
        else LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **tiny)
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()


def wrapped(model: Any, group: longspan.Group, args: argparse.Namespace, device: str) -> Any:
    """Attention over the sequence's ranks first, then what knows nothing of sequences."""
    longspan.parallelize(model, group)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.compile != "no":
        for layer in model.model.layers:
            layer.compile(backend=args.compile, dynamic=True)  # inside of the checkpoint
    if dist.is_initialized():
        every = init_device_mesh(device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32
        )
        for layer in model.model.layers:
            fully_shard(layer, mesh=every, mp_policy=policy)
        fully_shard(model, mesh=every, mp_policy=policy)
    return model


def batches(args: argparse.Namespace, words: int) -> Iterator[dict[str, torch.Tensor]]:
    """Rows of three packed documents each; positions that restart say where they begin."""
    draw = torch.Generator().manual_seed(1)
    first = args.length // 2
    lengths = [first, args.length // 3, args.length - first - args.length // 3]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(args.rows, -1)
    while True:
        # Few words, so that there is something to learn.
        ids = torch.randint(words // 8, (args.rows, args.length), generator=draw)
        labels = ids.masked_fill(positions == 0, -100)  # none across the border of documents
        yield {"input_ids": ids, "labels": labels, "position_ids": positions}


def train(args: argparse.Namespace) -> None:
    world = longspan.Group.from_environment()
    replicas, rest = divmod(world.size(), args.cp)
    if rest or args.rows % max(replicas, 1):
        sys.exit(
            f"fsdp_cp: {world.size()} ranks and {args.rows} rows do not divide into replicas of "
            f"--cp {args.cp} ranks; change one of them"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    group, replica = longspan.Group.solo(), 0
    if world.size() > 1:
        mesh = init_device_mesh(device, (replicas, args.cp), mesh_dim_names=("dp", "cp"))
        group, replica = longspan.Group.of(mesh["cp"]), mesh["dp"].get_local_rank()
    model = made(args, device)
    stream = batches(args, model.config.vocab_size)
    model = wrapped(model, group, args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3)
    longspan.seed_ranks(0, group, replica)
    rows = slice(replica * args.rows // replicas, (replica + 1) * args.rows // replicas)

    for step in range(args.steps):
        begin = time.perf_counter()
        whole = [next(stream) for _ in range(args.accumulate)]
        # Of all replicas, over which FSDP takes the mean.
        targets = sum(batch["labels"][:, 1:].ne(-100).sum().item() for batch in whole) / replicas
        loss = torch.zeros((), device=device)
        for number, batch in enumerate(whole):
            if world.size() > 1:
                model.set_requires_gradient_sync(number + 1 == len(whole))
            mine = {key: value[rows].to(device) for key, value in batch.items()}
            local = longspan.shard(mine | {"num_items_in_batch": targets}, group, model=model)
            part = model(**local).loss
            part.backward()
            loss += part.detach()
        longspan.sum_gradients(model, group)
        norm = longspan.clip_grad_norm(model, 1.0, group)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = longspan.total_loss(loss, world) / replicas
        if world.rank() == 0:
            seconds = time.perf_counter() - begin
            report(step, mean.item(), norm.item(), args, seconds)


def report(step: int, loss: float, norm: float, args: argparse.Namespace, seconds: float) -> None:
    if args.json:
        print(json.dumps({"step": step, "loss": loss, "norm": norm}), flush=True)
        return
    tokens = args.accumulate * args.rows * args.length
    print(
        f"step {step + 1}/{args.steps}  loss {loss:.4f}  norm {norm:.3f}  "
        f"{tokens / seconds:,.0f} tokens/s",
        flush=True,
    )


if __name__ == "__main__":
    train(arguments())
    if dist.is_initialized():
        dist.destroy_process_group()
