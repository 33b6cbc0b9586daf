"""A frozen target model on shards of the sequence, and full-length answers for a
draft that knows nothing of ranks (EAGLE-3).

    python compat/nemo/examples/eagle3_target.py --ranks 4
    python compat/nemo/examples/eagle3_target.py --ranks 4 --target glm_moe_dsa

Ranks are threads here. Under torchrun `mesh` is `init_device_mesh(...)["cp"]`,
and nothing else changes. A context over SDPA serves models whose layers see all
keys; GLM selects its keys, so a target of any family of transformers is
parallelized instead, and answers the same.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longspan
from longspan.compat.nemo.components.distributed.cp_utils import (
    attach_context_parallel_hooks,
    gather_cp_seq,
    make_target_cp_ctx,
)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, tokens, dim], half split."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = (position_ids[..., None].to(x.dtype) * rates).unsqueeze(1)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.dim = width // heads
        self.q = nn.Linear(width, heads * self.dim, bias=False)
        self.k = nn.Linear(width, key_heads * self.dim, bias=False)
        self.v = nn.Linear(width, key_heads * self.dim, bias=False)
        self.o = nn.Linear(heads * self.dim, width, bias=False)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        def heads_of(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.dim)).transpose(1, 2)

        q, k = rotate(heads_of(self.q(x)), position_ids), rotate(heads_of(self.k(x)), position_ids)
        # As in transformers, a lone query is not called causal. A context knows better.
        out = F.scaled_dot_product_attention(
            q,
            k,
            heads_of(self.v(x)),
            attn_mask=attention_mask,
            is_causal=is_causal and attention_mask is None and x.shape[1] > 1,
            enable_gqa=True,
        )
        return self.o(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(width)
        self.self_attn = SelfAttention(width, heads, key_heads)
        self.mlp_norm = RMSNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(
            self.input_norm(x), position_ids=position_ids, attention_mask=attention_mask
        )
        return x + self.mlp(self.mlp_norm(x))


class TinyLlama(nn.Module):
    """The shape of a Llama at the size of a test."""

    def __init__(
        self, layers: int = 8, width: int = 32, heads: int = 4, key_heads: int = 2, words: int = 64
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, key_heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Logits; `attention_mask` is [rows, 1, tokens, tokens], True = attend."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        for layer in self.layers:
            x = layer(x, position_ids, attention_mask)
        return self.lm_head(self.norm(x))


def causal_mask(padding_mask: Tensor) -> Tensor:
    """For one rank: [rows, 1, tokens, tokens] that hides pads. A pad sees itself, since
    torch has no answer for a query without keys."""
    tokens = padding_mask.shape[1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() & ~padding_mask[:, None, None]
    return seen | torch.eye(tokens, dtype=torch.bool)


class TargetOutput(NamedTuple):
    """What a draft learns from, all of full length and shifted left by one, but the
    hidden states."""

    hidden: Tensor  # [rows, tokens, 3 * width]
    logits: Tensor
    input_ids: Tensor
    loss_mask: Tensor


class Target:
    """A frozen model whose hidden states and logits supervise a draft."""

    def __init__(
        self, model: nn.Module, mesh: Any = None, layer_ids: Sequence[int] | None = None
    ) -> None:
        self.model, self.mesh = model.eval(), mesh
        self.layer_ids = three_of(len(model.layers), layer_ids)
        self.ranks = 1 if mesh is None else max(mesh.size(), 1)
        if self.ranks > 1:
            if not any(name.endswith("self_attn") for name, _ in model.named_modules()):
                raise ValueError("Target: no module's name ends in self_attn")
            if "position_ids" not in inspect.signature(model.forward).parameters:
                raise ValueError("Target: the model's forward takes no position_ids")
            attach_context_parallel_hooks(model)

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, loss_mask: Tensor, padding_mask: Tensor | None = None
    ) -> TargetOutput:
        if self.ranks == 1:
            mask = None if padding_mask is None else causal_mask(padding_mask)
            states = self._states(input_ids, attention_mask=mask)
        else:
            context, ids, positions, length = make_target_cp_ctx(self.mesh, input_ids)
            if padding_mask is not None:
                context.hide(padding_mask)
            with context:
                states = self._states(ids, position_ids=positions)
                states = gather_cp_seq(self.mesh, states, 1, length)
        *hidden, logits = states
        return TargetOutput(
            torch.cat(hidden, -1), shifted(logits), shifted(input_ids), shifted(loss_mask)
        )

    def _states(self, input_ids: Tensor, **keywords: Any) -> list[Tensor]:
        """The outputs of the three layers, and the logits."""
        states: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for at in self.layer_ids:

                def keep(_: nn.Module, __: Any, out: Tensor, at: int = at) -> None:
                    states[at] = out

                stack.callback(self.model.layers[at].register_forward_hook(keep).remove)
            logits = self.model(input_ids, **keywords)
        return [*(states[at] for at in self.layer_ids), logits]


class ParallelizedTarget:
    """The same for a model of transformers, whatever its layers see."""

    def __init__(
        self, model: Any, mesh: Any = None, layer_ids: Sequence[int] | None = None
    ) -> None:
        layers = model.config.get_text_config().num_hidden_layers
        self.model, self.layer_ids = model.eval(), three_of(layers, layer_ids)
        self.group = None if mesh is None else longspan.Group.of(mesh.get_group())
        if self.group is not None:
            longspan.parallelize(model, self.group)

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, loss_mask: Tensor, padding_mask: Tensor | None = None
    ) -> TargetOutput:
        batch: dict[str, Any] = {"input_ids": input_ids, "output_hidden_states": True}
        if padding_mask is not None:
            batch["attention_mask"] = (~padding_mask).long()
        if self.group is None:
            *hidden, logits = self._states(self.model(**batch, use_cache=False))
        else:
            local = longspan.shard(batch, self.group, model=self.model)
            *hidden, logits = (
                longspan.unshard(state, local) for state in self._states(self.model(**local))
            )
        return TargetOutput(
            torch.cat(hidden, -1), shifted(logits), shifted(input_ids), shifted(loss_mask)
        )

    def _states(self, out: Any) -> list[Tensor]:
        """The outputs of the three layers, behind the embeddings, and the logits."""
        return [*(out.hidden_states[at + 1] for at in self.layer_ids), out.logits]


def three_of(layers: int, layer_ids: Sequence[int] | None) -> list[int]:
    """Those that were named, or one near the beginning, in the middle and near the end."""
    ids = [1, layers // 2 - 1, layers - 4] if layer_ids is None else list(layer_ids)
    if len(ids) != 3 or len(set(ids)) != 3 or not all(0 <= i < layers for i in ids):
        raise ValueError(
            f"Target: layers {ids} of a model with {layers}; name three different ones"
        )
    return ids


def shifted(x: Tensor) -> Tensor:
    """Every token gets the next one's entry, the last one 0."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


class ThreadMesh:
    """What a one-dimensional DeviceMesh answers, for ranks that are threads."""

    def __init__(self, group: longspan.Group) -> None:
        self.group = group

    def size(self) -> int:
        return self.group.size()

    def get_group(self) -> longspan.Group:
        return self.group

    def get_local_rank(self) -> int:
        return self.group.rank()


def family_model(name: str) -> Any:
    """A tiny model of a family of transformers, with eight layers and random weights."""
    from longspan._commands import Refusal, family_named
    from longspan._families import made

    try:
        return made(dataclasses.replace(family_named(name), layers=8))
    except Refusal as refusal:
        sys.exit(f"eagle3_target: {refusal}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--target", default="tiny", help="a family of transformers: glm_moe_dsa")
    options = parser.parse_args()
    torch.manual_seed(0)
    tiny = options.target == "tiny"
    model = TinyLlama().double() if tiny else family_model(options.target)
    target = Target if tiny else ParallelizedTarget
    ids = torch.randint(1, 64, (2, options.tokens))
    pads = torch.zeros_like(ids, dtype=torch.bool)
    pads[0, :3] = True  # on the left of row 0, on the right of row 1
    pads[1, -5:] = True
    loss_mask = (~pads).long()
    whole = target(copy.deepcopy(model))(ids, loss_mask, pads)
    copies = [copy.deepcopy(model) for _ in range(options.ranks)]  # not for threads

    def work(group: longspan.Group) -> TargetOutput:
        mine = target(copies[group.rank()], ThreadMesh(group))
        return mine(ids, loss_mask, pads)

    worst = 0.0
    for rank, out in enumerate(longspan.run_ranks(options.ranks, work)):
        real = ~pads
        parts = ((out.hidden, whole.hidden, real), (out.logits, whole.logits, shifted(real)))
        far = max(float((a - b)[keep].abs().max()) for a, b, keep in parts)
        print(f"rank {rank}: hidden {list(out.hidden.shape)}, off by at most {far:.1e}")
        worst = max(worst, far)
    same = worst < (1e-12 if tiny else 1e-5)  # models of transformers cast to float32
    verb = "give" if same else "do not give"
    print(f"{options.tokens} tokens over {options.ranks} ranks {verb} what one rank gives.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
