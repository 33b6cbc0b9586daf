"""`longspan estimate`: `explain` for a model that is a configuration alone, and lengths."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longspan._commands import (
    Arguments,
    Refusal,
    add_layout,
    add_strategy,
    add_word,
    number,
    progress,
)
from longspan._explaining import explain
from longspan._memory import DEVICES, OPTIMIZERS
from longspan._printing import printed

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str]) -> int:
    try:
        given = _parser().parse_args(arguments)
        text = _answer(given)
    except Refusal as refusal:
        print(f"longspan estimate: {refusal}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, NotImplementedError) as error:
        sentence = " ".join(str(error).split()).removeprefix("explain: ")
        print(f"longspan estimate: {sentence}", file=sys.stderr)
        return 2
    return printed("longspan estimate", text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="longspan estimate",
        description="What a training step of a model will compute, send and keep in memory.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="config.json of the model, or its folder")
    add("--tokens", metavar="N", help="one document of so many tokens: 1M is 1048576, 8k is 8192")
    add("--documents", metavar="N,N", help="documents of one row instead, by their lengths")
    add("--ranks", type=int, default=1, metavar="N", help="ranks that hold the sequence")
    add("--rank", type=int, default=0, metavar="N", help="the one that is asked for")
    add_word(parser, "--device", (*DEVICES, "cpu"), "h200")
    add_strategy(parser)
    add_layout(parser)
    add_word(parser, "--dtype", tuple(_DTYPES), "bfloat16")
    add_word(parser, "--optimizer", tuple(OPTIMIZERS), "adamw")
    add("--shards", type=int, default=1, metavar="N", help="ranks of fully_shard (FSDP2)")
    add("--mlp-tile", type=int, metavar="N", help="tokens in a feed-forward module at a time")
    add_word(parser, "--offload", ("hidden",), help="layer inputs wait on the host")
    add("--whole-logits", action="store_true", help="the loss is not made in tiles")
    add("--checkpointing", action="store_true", help="activations are made again in backward")
    add("--json", action="store_true", help="for machines")
    return parser


def _answer(given: argparse.Namespace) -> str:
    if (given.tokens is None) == (given.documents is None):
        raise Refusal("give --tokens 1M or --documents 4096,512, one of them")
    texts = [given.tokens] if given.documents is None else given.documents.split(",")
    lengths = [number(text) for text in texts]
    if given.offload is not None and not given.checkpointing:
        raise Refusal(f"--offload {given.offload} moves what --checkpointing keeps; give both")
    progress("longspan estimate", "making the model without weights")
    model = _model(given.model, _DTYPES[given.dtype])
    if given.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    progress("longspan estimate", "running it without values")
    said = explain(
        model,
        lengths,
        ranks=given.ranks,
        rank=given.rank,
        device=given.device,
        strategy=given.strategy,
        layout=given.layout,
        optimizer=given.optimizer,
        shards=given.shards,
        loss_tile=None if given.whole_logits else "auto",
        mlp_tile=given.mlp_tile,
        offload=given.offload,
    )
    return json.dumps(said.to_json(), indent=1) if given.json else str(said)


def _model(path: str, dtype: torch.dtype) -> Any:
    try:
        import transformers
    except ImportError:
        raise Refusal("models come from transformers, which is not installed here") from None
    where = Path(path)
    file = where / "config.json" if where.is_dir() else where
    if not file.is_file():
        raise Refusal(f"--model is '{path}'; expected a config.json, or the folder of one")
    try:
        autos: Any = transformers
        config = autos.AutoConfig.from_pretrained(str(file), local_files_only=True)
        with torch.device("meta"):
            return autos.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        sentence = " ".join(str(error).split())
        raise Refusal(f"'{path}' makes no causal model of transformers: {sentence}") from None
