"""One training step of a long share on a GPU: layers of an 8B Llama, checkpointed, with the loss
and feed-forward modules whole or in tiles, and layer inputs on the card or on the host.

    python bench/long_step.py --save bench/results/...md

bfloat16, 4 layers of 4096 channels, 32 and 8 heads of 128, 14336 inside of a feed-forward
module, 128256 words, one rank's tokens. Peak is over weights; a step is forward and backward.
What does not fit says so.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from harness import Row, report
from machine import write_whole

import longspan

CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": False,
}
GIB = 2**30


def model_of() -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).bfloat16()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def measured(tokens: int, rounds: int, **options: Any) -> tuple[float, float, float] | None:
    """GiB over weights, milliseconds of a step, and the loss; None where it does not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    model = longspan.parallelize(model_of(), **options)
    weights = torch.cuda.memory_allocated()
    ids = torch.randint(0, CONFIG["vocab_size"], (1, tokens), device="cuda")
    local = longspan.shard({"input_ids": ids, "labels": ids}, model=model)
    times, loss = [], 0.0
    try:
        torch.cuda.reset_peak_memory_stats()
        for i in range(rounds + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            made = model(**local).loss  # logits go with the rest of the answer
            made.backward()
            loss = made.item()
            torch.cuda.synchronize()
            if i:
                times.append((time.perf_counter() - start) * 1e3)
            model.zero_grad()
            del made
    except torch.OutOfMemoryError:
        return None
    peak = (torch.cuda.max_memory_allocated() - weights) / GIB
    return peak, statistics.median(times), loss


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"loss_tile": None},
    "loss in tiles": {"loss_tile": "auto"},
    "+ feed-forward in tiles of 8192": {"loss_tile": "auto", "mlp_tile": 8192},
    "+ layer inputs on the host": {"loss_tile": "auto", "mlp_tile": 8192, "offload": "hidden"},
}
#: GiB that a way may take, by tokens.
BARS = {
    (65536, "loss in tiles"): 21.0,
    (65536, "+ feed-forward in tiles of 8192"): 14.0,
    (131072, "loss in tiles"): 41.0,
    (131072, "+ feed-forward in tiles of 8192"): 27.0,
    (131072, "+ layer inputs on the host"): 30.0,
}


def rows(sizes: list[int], rounds: int) -> list[Row]:
    made: list[Row] = []
    for tokens in sizes:
        first: tuple[float, float, float] | None = None
        for name, options in WAYS.items():
            print(f"{tokens} tokens, {name}", file=sys.stderr, flush=True)
            found = measured(tokens, rounds, **options)
            bar = BARS.get((tokens, name))
            if name == "whole":
                first = found
            if found is None:
                shown, met, other, right = "does not fit", bar is None, "", True
            else:
                shown = f"{found[0]:.1f} GiB, {found[1]:.0f} ms"
                met = bar is None or found[0] <= bar
                other = "" if first is None else f"whole: {first[0]:.1f} GiB, {first[1]:.0f} ms"
                right = first is None or abs(found[2] - first[2]) <= 1e-3 * first[2]
            ratio = "" if found is None or first is None else f"{found[1] / first[1]:.3f}x"
            made.append(
                {
                    "work": f"{tokens} tokens, {name}",
                    "right": right,
                    "ours": shown,
                    "other": other,
                    "ratio": ratio,
                    "bar": "" if bar is None else f"<= {bar:g} GiB",
                    "met": met,
                }
            )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="65536,131072")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=pathlib.Path)
    options = parser.parse_args()
    sizes = [int(n) for n in options.tokens.split(",")]
    found = rows(sizes, options.rounds)
    text = report(found, "One step of a long share", torch.cuda.get_device_name(), "make bench-gpu")
    print(text, end="")
    if options.save:
        write_whole(options.save, text)
    return 0 if all(row["right"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
