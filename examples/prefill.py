"""A long prompt read by all ranks, and its answer decoded by one.

    python examples/prefill.py                                      # one rank, a tiny model
    torchrun --nproc-per-node 8 examples/prefill.py \\
        --model meta-llama/Llama-3.1-8B-Instruct --text book.txt --dtype bfloat16
"""

from __future__ import annotations

import argparse
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
        words = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        prompt = words(args.text.read_text(), return_tensors="pt")["input_ids"]
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes), dtype=dtype
        )
        prompt = torch.tensor([list(args.text.read_bytes()[:1000])])
    model, prompt = model.to(device).eval(), prompt.to(device)

    longspan.parallelize(model, group)
    cache = longspan.hf.prefill(model, {"input_ids": prompt}, group)  # on rank 0
    if cache is not None:
        with longspan.paused(model):
            tokens = model.generate(
                prompt, past_key_values=cache, max_new_tokens=args.new, do_sample=False
            )
        answer = tokens[0, prompt.shape[1] :].tolist()
        print(f"{prompt.shape[1]} tokens on {group.size()} ranks, then", end=" ")
        print(words.decode(answer) if args.model else answer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or a folder of transformers")
    parser.add_argument("--text", type=pathlib.Path, default=README)
    parser.add_argument("--new", type=int, default=8, help="tokens to decode")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    main(parser.parse_args(), longspan.Group.from_environment())
    if dist.is_initialized():
        dist.barrier()  # others wait for the answer
        dist.destroy_process_group()
