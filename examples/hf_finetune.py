"""Fine-tunes a transformers decoder with FSDP2 and context parallelism: packed
documents, each sequence cut over --cp ranks, replicas over the rest.

    python examples/hf_finetune.py                                     # one rank
    torchrun --nproc-per-node 4 examples/hf_finetune.py --cp 2         # 2 x 2
    torchrun --nproc-per-node 2 examples/hf_finetune.py --cp 2 --family mamba2
    torchrun --nproc-per-node 8 examples/hf_finetune.py --cp 8 \\
        --model Qwen/Qwen3-8B --text corpus.txt --length 131072 --dtype bfloat16

Without --model a tiny model of --family, with random weights, is trained on bytes:
any causal family of transformers, those with states and selected keys too. Without
--text the text is the repository's own README. The losses are those of one rank,
whatever --cp is.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import longspan

# Tiny families and the ids of bytes, as `longspan train` has them; a model of yours needs none.
from longspan._commands import Refusal, family_named
from longspan._families import built, config_of
from longspan._training import FIRST_BYTE, WORDS

README = pathlib.Path(__file__).parents[1] / "README.md"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or a folder of transformers")
    parser.add_argument("--family", default="llama", help="of the tiny model: mamba2, qwen3_next")
    parser.add_argument("--text", type=pathlib.Path, default=README)
    parser.add_argument("--cp", type=int, default=1, help="ranks that hold one sequence")
    parser.add_argument("--strategy", default="ring", choices=longspan.Strategy.names())
    layouts = ["auto", *(layout.name for layout in longspan.values.named_layouts())]
    parser.add_argument("--layout", default="auto", choices=layouts)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=2, help="rows of a step, over all replicas")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--json", action="store_true", help="one line of JSON a step")
    return parser.parse_args()


def pretrained(args: argparse.Namespace) -> Any:
    """The same parameters on every rank: read, or drawn from one seed."""
    torch.manual_seed(0)
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    try:
        family = family_named(args.family)
    except Refusal as refusal:
        sys.exit(f"hf_finetune: {refusal}")
    config = config_of(family, vocabulary=WORDS, positions=args.length + 8)
    return built(family, config).float()


def tokens_of(args: argparse.Namespace) -> list[list[int]]:
    """The documents of the text: its paragraphs."""
    paragraphs = [part for part in args.text.read_text().split("\n\n") if part.strip()]
    if args.model:
        encode = AutoTokenizer.from_pretrained(args.model)
        return [encode(part)["input_ids"] for part in paragraphs]
    return [[FIRST_BYTE + byte for byte in part.encode()] for part in paragraphs]


def batches(documents: list[list[int]], length: int, rows: int) -> Any:
    """Rows of whole and cut documents one after the other, over and over; positions
    that restart say where documents begin."""
    ids = torch.tensor([token for document in documents for token in document])
    positions = torch.tensor([i for document in documents for i in range(len(document))])
    at = 0
    while True:
        chosen = torch.arange(at, at + rows * length) % len(ids)
        at += rows * length
        batch = ids[chosen].view(rows, length)
        yield {
            "input_ids": batch,
            "labels": batch.clone(),
            "position_ids": positions[chosen].view(rows, length),
        }


def layers_of(model: Any) -> list[Any]:
    """The decoder layers, the first list of modules in it; none where layers share
    parameters, which then come and go with the whole model."""
    stack = next((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), [])
    held = [id(parameter) for layer in stack for parameter in layer.parameters()]
    return list(stack) if len(held) == len(set(held)) else []


def sharded(model: Any, mesh: DeviceMesh | None, dtype: torch.dtype) -> Any:
    """FSDP2 over all ranks: those of a sequence share the parameters too."""
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(args: argparse.Namespace) -> None:
    world = longspan.Group.from_environment()
    if world.size() % args.cp or args.rows % (world.size() // args.cp):
        sys.exit(
            f"hf_finetune: {world.size()} ranks and {args.rows} rows a step do not divide into "
            f"replicas of --cp {args.cp} ranks; change one of them"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = None
    if world.size() > 1:
        mesh = init_device_mesh(
            device, (world.size() // args.cp, args.cp), mesh_dim_names=("dp", "cp")
        )
    group = longspan.Group.of(mesh["cp"]) if mesh else longspan.Group.solo()
    replicas, replica = world.size() // args.cp, mesh["dp"].get_local_rank() if mesh else 0

    model = longspan.parallelize(
        pretrained(args).to(device), group, strategy=args.strategy, layout=args.layout
    )
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    dtype = getattr(torch, args.dtype)
    documents = tokens_of(args)
    rows = args.rows // replicas
    stream = batches(documents, args.length, args.rows)
    if world.rank() == 0 and not args.json:
        batch = next(batches(documents, args.length, rows))
        print(longspan.explain(model, batch, group, dtype=dtype))
    model = sharded(model, mesh, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    longspan.seed_ranks(0, group, replica)

    for step in range(args.steps):
        whole = next(stream)
        batch = {key: value[replica * rows :][:rows].to(device) for key, value in whole.items()}
        local = longspan.shard(batch, group, model=model)
        with torch.autocast(device, dtype, enabled=mesh is None and dtype != torch.float32):
            loss = model(**local).loss
        loss.backward()
        longspan.sum_gradients(model, group)
        norm = longspan.clip_grad_norm(model, 1.0, group)
        optimizer.step()
        optimizer.zero_grad()

        # The sum over a sequence, the mean over replicas.
        ones = [1] * world.size()
        losses = longspan.comm.all_gather_tokens(
            loss.detach().view(1), axis=0, sizes=ones, group=world
        )
        report(step, losses.sum().item() / replicas, norm.item(), args)


def main() -> None:
    train(arguments())
    if dist.is_initialized():
        dist.destroy_process_group()


def report(step: int, loss: float, norm: float, args: argparse.Namespace) -> None:
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    if args.json:
        print(json.dumps({"step": step, "loss": loss, "norm": norm}), flush=True)
    else:
        print(f"step {step + 1}/{args.steps}  loss {loss:.4f}  norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
