"""What models pay for context parallelism: a Llama layer at one rank against the
plain model, what a rank keeps for backward, and how long the proof takes.

    python bench/models.py build/dev --save bench/results/...md
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import warnings
from typing import Any

import torch
import transformers
from harness import Part, Row, in_turns, main

import longspan
import longspan.proof
from longspan import Group
from longspan._families import families, made

LAYER = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
TOKENS = 2048
RANKS, LONG = 8, 65536


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    common = {"vocab_size": 256, "num_hidden_layers": 1, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(common | options)))


def layer_rows() -> list[Row]:
    """The same model twice, one of them parallelized over one rank."""
    torch.set_num_threads(2)
    plain, ours = llama(**LAYER), llama(**LAYER)
    longspan.parallelize(ours)
    ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}

    def step(model: Any, inputs: Any) -> torch.Tensor:
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    def their_step() -> torch.Tensor:
        return step(plain, batch | {"use_cache": False})

    def our_step() -> torch.Tensor:
        return step(ours, longspan.shard(batch, model=ours))

    right = torch.allclose(their_step(), our_step(), rtol=1e-5)
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    right &= all(torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6) for a, b in pairs)
    mine, theirs = in_turns(our_step, their_step, rounds=15)
    return [
        {
            "work": f"a Llama layer, {TOKENS} tokens, fp32 fwd+bwd, shard included, 2 threads",
            "right": right,
            "ours": f"{mine:.0f} ms",
            "other": f"plain transformers, sdpa: {theirs:.0f} ms",
            "ratio": f"{mine / theirs:.3f}",
            "bar": "1.02",
            "met": mine / theirs <= 1.02,
        }
    ]


def first_rows(layers: int, bar: float | None) -> list[Row]:
    """What the first call of a model costs on top, once a model like it was let in. It is
    narrow, so that this is not lost in products."""
    torch.set_num_threads(1)
    options = SMALL | {"num_hidden_layers": layers}
    longspan.parallelize(llama(**options))
    ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}

    def plain() -> torch.Tensor:
        return models.pop()(**batch, use_cache=False).loss

    def ours() -> torch.Tensor:
        model = longspan.parallelize(models.pop())
        return model(**longspan.shard(batch, model=model)).loss

    rounds = 31
    models = [llama(**options) for _ in range(2 * rounds + 4)]
    right = torch.allclose(plain(), ours(), rtol=1e-5)
    mine, theirs = in_turns(ours, plain, rounds=rounds, warm=1)
    return [
        {
            "work": f"the first call of a narrow Llama of {layers} layers, 64 tokens, parallelize "
            "and shard included, the proof known, 1 thread",
            "right": right,
            "ours": f"{mine:.1f} ms",
            "other": f"plain transformers: {theirs:.1f} ms",
            "ratio": f"{mine - theirs:+.1f} ms",
            "bar": "" if bar is None else f"{bar:+g} ms",
            "met": bar is None or mine - theirs < bar,
        }
    ]


class Kept:
    """Bytes of the tensors that autograd keeps for backward, each storage once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._seen: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._seen[storage.data_ptr()] = storage.nbytes()
            self._alive.append(tensor)  # so that no address is used twice
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self._seen.values())


def memory_rows() -> list[Row]:
    """Forward of a small model on a long row; what each rank keeps."""
    ids = torch.randint(0, 256, (1, LONG), generator=torch.Generator().manual_seed(1))

    # Made before the ranks are: as threads they have one state of random numbers.
    models = [llama(**SMALL, num_key_value_heads=1) for _ in range(RANKS)]

    def body(group: Group) -> tuple[int, torch.Tensor]:
        model = longspan.parallelize(models[group.rank()], group)
        local = longspan.shard({"input_ids": ids, "labels": ids}, group, model=model)
        kept = Kept(model)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            loss = model(**local).loss
        return kept.bytes, loss.detach()

    whole, loss = body(Group())
    models[0] = llama(**SMALL, num_key_value_heads=1)
    shares, losses = zip(*longspan.run_ranks(RANKS, body, timeout=600), strict=True)
    ratio = max(shares) * RANKS / whole
    return [
        {
            "work": f"bytes kept for backward by a rank of {RANKS}, {LONG} tokens, Llama layer",
            "right": torch.allclose(torch.stack(losses).sum(), loss, rtol=1e-4),
            "ours": f"{max(shares) / 1e6:.1f} MB",
            "other": f"one rank: {whole / 1e6:.1f} MB",
            "ratio": f"{ratio:.3f} / {RANKS}",
            "bar": f"1.05 / {RANKS}",
            "met": ratio <= 1.05,
        }
    ]


def proof_rows() -> list[Row]:
    """How long a model waits until it is let in, or refused by the proof, the first time."""
    torch.set_num_threads(2)
    took: dict[str, float] = {}
    for family in families():
        try:
            model = made(family)
        except Exception:  # docs/families.md says why
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            proof = longspan.proof.prove(model)
        if proof.seconds > 0:
            took[family.name] = proof.seconds
    worst = max(took, key=lambda name: took[name])
    return [
        {
            "work": f"the proof, not known, of {len(took)} families that come so far, 2 threads",
            "right": True,
            "ours": f"the worst, {worst}: {took[worst]:.2f} s",
            "other": f"the median: {statistics.median(took.values()):.2f} s",
            "ratio": "",
            "bar": "2 s",
            "met": took[worst] <= 2,
        }
    ]


def parts(_: pathlib.Path) -> list[Part]:
    transformers.logging.set_verbosity_error()
    return [
        layer_rows,
        lambda: first_rows(1, 5.0),
        lambda: first_rows(32, 5.0),
        memory_rows,
        proof_rows,
    ]


if __name__ == "__main__":
    versions = f"threads as it says, transformers {transformers.__version__}"
    sys.exit(main(__doc__, "Models under context parallelism", versions, parts))
