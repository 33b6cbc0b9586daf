"""A model of your own over ranks, no transformers needed: its attention by `longspan.attend`,
or left as it is, inside a context that sends torch's attention there.

    python examples/own_model.py --ranks 4                    # ranks are threads
    torchrun --nproc-per-node 4 examples/own_model.py         # ranks are processes

Everything else in the model must treat tokens one by one, by their content and by
`position_ids`: norms over channels, MLPs, embeddings, rotary positions do; convolutions
and means over tokens do not.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import longspan

WIDTH, HEADS, WORDS = 64, 4, 97


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        attended = self.attend(*mixed.chunk(3, dim=1))  # each [B, H, L, D]
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(4096, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.words(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---- The first way: say it in the model.


class LayerOverRanks(Layer):
    over: tuple[longspan.AttentionLayout, longspan.Group]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention, group = self.over
        return longspan.attend(q, k, v, attention=attention, group=group)


# ---- The second: leave the model alone.


class AttentionOverRanks(TorchFunctionMode):
    """While entered, causal attention of torch runs over the ranks. It holds for this thread
    and ends with its block; nothing of torch is replaced. Layers that are recomputed in backward
    (activation checkpoints) would need it there too: torch leaves modes out in
    backward, so write `longspan.attend` into those."""

    def __init__(self, attention: longspan.AttentionLayout, group: longspan.Group) -> None:
        super().__init__()
        self.attention, self.group = attention, group

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(*args, **(kwargs or {}))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        causal, scale = options.pop("is_causal", False), options.pop("scale", None)
        if not causal or any(options.values()):
            raise NotImplementedError(
                f"AttentionOverRanks: expected is_causal=True and no mask or dropout, got {options}"
            )
        return longspan.attend(q, k, v, attention=self.attention, group=self.group, scale=scale)


# ---- A step, as one rank sees it.


def loss_of(logits: Tensor, labels: Tensor, group: longspan.Group) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return longspan.reduce_loss(losses, labels.ne(-100).sum(), group)


def decoder() -> Decoder:
    """The same on every rank; ranks that are threads share torch's own generator."""
    model, draw = Decoder().double(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=draw)
    return model


def step(way: str, batch: dict[str, Tensor], group: longspan.Group) -> tuple[Tensor, Decoder]:
    model = decoder()
    local = longspan.shard(batch, group, shift_labels=True)
    attention = longspan.AttentionLayout(local)
    ids, positions = local["input_ids"], local["position_ids"]
    if way == "attend":
        for layer in model.layers:
            layer.__class__ = LayerOverRanks
            layer.over = (attention, group)
        logits = model(ids, positions)
    else:
        with AttentionOverRanks(attention, group):
            logits = model(ids, positions)
    loss = loss_of(logits, local["labels"], group)
    loss.backward()
    longspan.sum_gradients(model, group)
    return loss.detach(), model


def main(group: longspan.Group, tokens: int) -> None:
    ids = torch.arange(2 * tokens).mul(31).remainder(WORDS).view(2, tokens)
    batch = {"input_ids": ids, "labels": ids}
    plain = decoder()
    logits = plain(ids, torch.arange(tokens).expand(2, -1))
    alone = loss_of(logits[:, :-1], ids[:, 1:], longspan.Group.solo())
    alone.backward()
    for way in ("attend", "context"):
        loss, model = step(way, batch, group)
        worst = max(
            (mine.grad - whole.grad).abs().max() / whole.grad.abs().max()
            for mine, whole in zip(model.parameters(), plain.parameters(), strict=True)
        )
        assert worst < 1e-9 and torch.allclose(loss, alone.detach()), (way, worst)
        if group.rank() == 0:
            print(
                f"by {way}: loss {loss:.6f} on {group.size()} ranks, {alone:.6f} on one; largest "
                f"difference of a gradient {worst:.1e}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="threads, without torchrun")
    parser.add_argument("--tokens", type=int, default=103)
    args = parser.parse_args()
    world = longspan.Group.from_environment()
    if world.size() > 1:
        main(world, args.tokens)
        dist.destroy_process_group()
    else:
        longspan.run_ranks(args.ranks, lambda group: main(group, args.tokens))
