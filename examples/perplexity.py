"""The perplexity of a long text, each window of it on all ranks together.

    python examples/perplexity.py                                   # one rank, a tiny model
    torchrun --nproc-per-node 8 examples/perplexity.py \\
        --model meta-llama/Llama-3.1-8B --text book.txt --length 131072 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import math
import pathlib

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import longspan

README = pathlib.Path(__file__).parents[1] / "README.md"


def main(args: argparse.Namespace, group: longspan.Group) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"]
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes), dtype=dtype
        )
        ids = list(args.text.read_bytes())
    model = longspan.parallelize(model.to(device).eval(), group)

    total = targets = 0.0
    for window in torch.tensor(ids).split(args.length):
        if len(window) < 2 * group.size():
            break  # too short for a share on every rank
        batch = {"input_ids": window[None].to(device), "labels": window[None].to(device)}
        local = longspan.shard(batch, group, model=model)
        with torch.no_grad():
            part = model(**local).loss  # this rank's tokens, divided by all targets
        count = len(window) - 1
        total += longspan.total_loss(part, group).item() * count
        targets += count
    if group.rank() == 0:
        print(f"{targets:.0f} targets, perplexity {math.exp(total / targets):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or a folder of transformers")
    parser.add_argument("--text", type=pathlib.Path, default=README)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    main(parser.parse_args(), longspan.Group.from_environment())
    if dist.is_initialized():
        dist.destroy_process_group()
