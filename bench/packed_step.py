"""A training step on packed documents on one GPU: transformers as it is, and the
same model after `parallelize`.

    make bench-gpu
    python bench/packed_step.py --tokens 32768 --documents 16

Four layers with the widths of an 8B Llama, bf16, forward and backward with the
model's own loss, once over its 128,256 words and once over a thousand: then it is
the layers that are timed. Both see the documents in `position_ids`: then
transformers masks the other documents out, and what is compared is two right
answers. The losses and the gradient of the embedding must agree as bf16 does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import sys
from typing import Any

import torch
import transformers
from harness import commit, versions
from machine import write_whole
from transformers import LlamaConfig, LlamaForCausalLM

import longspan


def model_of(layers: int, words: int, checkpointing: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        max_position_embeddings=1 << 20,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batch_of(tokens: int, documents: int, words: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(words, (1, tokens), generator=torch.Generator().manual_seed(1)).cuda()
    positions = torch.arange(tokens // documents, device="cuda").repeat(documents)[None]
    labels = ids.masked_fill(positions == 0, -100)  # a document's first token has no predecessor
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def step(model: LlamaForCausalLM, batch: Any) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def milliseconds(model: LlamaForCausalLM, batch: Any, rounds: int) -> tuple[float, float]:
    """The median of `rounds` steps after three, and the peak in GiB over the weights."""
    took = []
    for i in range(3 + rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if i == 3:
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        begin.record()
        step(model, batch)
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
    return statistics.median(took[3:]), (torch.cuda.max_memory_allocated() - base) / 2**30


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted.double()
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def measure(documents: int, words: int, options: argparse.Namespace) -> dict[str, Any]:
    tokens, rounds = options.tokens, options.rounds
    model = model_of(options.layers, words, options.checkpointing)
    batch = batch_of(tokens, documents, words)
    loss = step(model, batch)
    gradient = model.model.embed_tokens.weight.grad.clone()
    plain, plain_peak = milliseconds(model, batch, rounds)
    group = longspan.Group()
    longspan.parallelize(model, group)
    local = longspan.shard(batch, group, model=model)
    our_loss = step(model, local)
    errors = {
        "loss": off(our_loss, loss),
        "gradient": off(model.model.embed_tokens.weight.grad, gradient),
    }
    ours, peak = milliseconds(model, local, rounds)
    longspan.restore(model)
    again, _ = milliseconds(model, batch, rounds)
    plain = min(plain, again)
    return {
        "work": f"{options.layers} layers, {words} words, {tokens} tokens, "
        f"{documents} document{'s' if documents > 1 else ''}",
        "right": errors["loss"] < 1e-3 and errors["gradient"] < 3e-2,
        "errors": errors,
        "transformers_ms": plain,
        "ours_ms": ours,
        "ratio": plain / ours,
        "transformers_gib": plain_peak,
        "ours_gib": peak,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# A packed training step on one GPU",
        "",
        f"- date: {datetime.date.today()}, commit: {commit()}",
        f"- command: `make bench-gpu`, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
        f"- {versions()}, transformers {transformers.__version__} (sdpa)",
        "- widths of an 8B Llama, bf16, the model's own loss, forward and backward",
        "",
        "| work | off from transformers: loss, gradient | transformers | ours | ratio "
        "| peak over weights |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        answer = "{loss:.0e}, {gradient:.0e}".format(**row["errors"])
        lines.append(
            f"| {row['work']} | {answer if row['right'] else 'WRONG: ' + answer} "
            f"| {row['transformers_ms']:.0f} ms | {row['ours_ms']:.0f} ms | {row['ratio']:.2f}x "
            f"| {row['transformers_gib']:.1f} -> {row['ours_gib']:.1f} GiB |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--words", type=int, nargs="+", default=[128256, 1024])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=pathlib.Path, help="the folder to write the table to")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/packed_step.py: there is no CUDA device here", file=sys.stderr)
        return 1
    rows = [
        measure(documents, words, options)
        for words in options.words
        for documents in options.documents
    ]
    text = table(rows)
    print(json.dumps(rows, indent=2) if options.json else text, end="")
    if options.save:
        card = torch.cuda.get_device_name().replace("NVIDIA", "").strip().lower().replace(" ", "-")
        write_whole(options.save / f"packed-step_{card}_{datetime.date.today()}.md", text)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
