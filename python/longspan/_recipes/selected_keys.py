"""Families that attend to the keys an indexer selects (DeepSeek Sparse Attention):
GLM-5.2, DeepSeek-V3.2, A.X K2 and HY v4.

Their layers keep a *latent row* a token, from which `kv_b_proj` makes the keys and
values of every head. One row is what travels between ranks, not the heads: queries
are taken into the rows' space instead (absorbed), attend to rows there, and the answer
is taken to the values' space afterwards.

Three methods of each instance are the seams. `expand_kv` hands rows on as they are, the
indexer's `forward` selects among the keys of all ranks, and the attention function (ours,
by its name in the configuration) gets both. Everything else, norms, rotary
positions, gates and projections, is the family's own code.

GLM-5.2 and DeepSeek-V3.2, where nothing comes between queries and `q_b_proj`, get a
`forward` made of their own projections and norms in place of the first seam: their
queries turn while they are taken to the rows' space, and are never taken apart.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longspan._agreement import in_layer_of
from longspan._local_batch import KEYWORD
from longspan._models import AttentionLayer, LocalAttention, Parallelized, Selection
from longspan._recipes.recipe import Recipe, check_no_cache, check_no_dropout, not_sharded


@dataclass(frozen=True)
class _Form:
    """How a family's indexer rotates: by which function of its module, and where in a
    head the rotated channels lie."""

    rotary: str
    rotated_last: bool = False
    #: How many results its attention's `forward` has, where ours takes its place.
    results: int | None = None


#: cos and sin of rotary positions.
_Angles = tuple[torch.Tensor, torch.Tensor]


def _rows(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `expand_kv`: [B, 1, L, C] and [B, 1, L, R] as rows [B, 1, L, C + R],
    in which a value is the first C channels of its key."""
    rows = torch.cat((latents, rotated.to(latents.dtype)), dim=-1)
    return rows, latents


@torch.no_grad()
def _select(
    form: _Form,
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Any,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
) -> torch.Tensor:
    """In place of an indexer's `forward`: for each query the tokens of the stream with
    the greatest scores, int32 [B, L, slots]; -1 where it sees fewer. The mask is
    what `shard` put in place of one."""
    local = attention_mask
    if not isinstance(local, LocalAttention):
        raise not_sharded(indexer)
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    normed = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype))
    k = normed.to(hidden_states.dtype).unsqueeze(2)
    q, k = _rotated(form, indexer, q, k, position_embeddings)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    # A positive factor passes through max(0, .), so the scores' scale goes here.
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    if q.dtype == torch.float64:  # the family scores in float32, whatever its type
        q, k = q.float(), k.float()
    with in_layer_of(indexer):
        return local.select_keys(q, k.squeeze(2), weights, slots=indexer.index_topk)


def _rotated(
    form: _Form,
    indexer: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    rotate = getattr(sys.modules[type(indexer).__module__], form.rotary)
    turned, still = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
    sizes = [still, turned] if form.rotated_last else [turned, still]
    parts_q, parts_k = list(torch.split(q, sizes, -1)), list(torch.split(k, sizes, -1))
    at = 1 if form.rotated_last else 0
    cos, sin = position_embeddings
    parts_q[at], parts_k[at] = rotate(parts_q[at], parts_k[at], cos, sin, unsqueeze_dim=2)
    return torch.cat(parts_q, dim=-1), torch.cat(parts_k, dim=-1)


def _forward(
    results: int,
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    position_ids: torch.Tensor | None = None,
    prev_topk_indices: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[Any, ...]:
    """In place of an attention's `forward`: [B, L, hidden] of this rank's tokens, and in
    families whose layers share selections that of this one."""
    local = rest.get(KEYWORD)
    if not isinstance(local, LocalAttention):
        raise not_sharded(module)
    check_no_cache(module, past_key_values)
    check_no_dropout(module, module.attention_dropout if module.training else 0.0)
    # Of each pair of channels; they stand there twice.
    cos, sin = (table[..., : table.shape[-1] // 2] for table in position_embeddings)
    residual = module.q_a_layernorm(module.q_a_proj(hidden_states))
    q = module.q_b_proj(residual).unflatten(-1, (-1, module.qk_head_dim))
    q = q.to(torch.promote_types(q.dtype, cos.dtype))  # as autocast leaves them
    latents, rotated = torch.split(
        module.kv_a_proj_with_mqa(hidden_states),
        [module.kv_lora_rank, module.qk_rope_head_dim],
        dim=-1,
    )
    rows, _ = _rows(module.kv_a_layernorm(latents), _turned(rotated, cos, sin))
    chosen = prev_topk_indices
    if module.indexer is not None:
        chosen = module.indexer(
            hidden_states, residual, position_embeddings, attention_mask, position_ids
        )
    assert chosen is not None, "the first layer selects"
    with in_layer_of(module):
        out = _attended(module, local, q, rows, chosen, module.scaling, angles=(cos, sin))
    return (module.o_proj(out.flatten(2)), None, chosen)[:results]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of neighbouring channels, which become halves."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(
    module: Any,
    local: LocalAttention,
    query: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Heads [B, H, L, D] that attend to selected rows [B, 1, L, C + R]; [B, L, H, Dv]
    comes back."""
    return _attended(
        module, local, query.transpose(1, 2), rows.squeeze(1), indices, scale, sink=sink
    )


def _attended(
    module: Any,
    local: LocalAttention,
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    *,
    sink: torch.Tensor | None = None,
    angles: _Angles | None = None,
) -> torch.Tensor:
    """q [B, L, H, K + R], of which R channels are yet to turn if there are angles, and rows
    [B, L, C + R]; [B, L, H, Dv] comes back."""
    to_keys, to_values = _expansion(module)
    # As the latent rows would have made the heads' keys; what is rotated stays behind.
    q = _times_of_heads(q, to_keys.to(q.dtype), angles)
    out = local.attend_selected(
        q, rows, indices, scale=scale, value_dim=module.kv_lora_rank, sink=sink
    )
    return _times_of_heads(out, to_values.to(out.dtype))


def _times_of_heads(
    x: torch.Tensor, matrices: torch.Tensor, angles: _Angles | None = None
) -> torch.Tensor:
    """x [B, L, H, K + R] of which K channels are multiplied by a matrix of each head
    [H, K, C], and R stay behind them, or turn: contiguous [B, L, H, C + R], as kernels
    read heads. Angles are cos and sin, [B, L, R / 2]."""
    cos, sin = (None, None) if angles is None else (t.to(x.dtype).unsqueeze(2) for t in angles)
    if not torch.compiler.is_compiling():
        made: torch.Tensor = _TimesOfHeads.apply(x, matrices, cos, sin)  # type: ignore[no-untyped-call]
        return made
    # Graphs know no products that are written between other channels.
    first = matrices.shape[1]
    out = torch.matmul(x[..., :first].transpose(1, 2), matrices).transpose(1, 2)
    rest = x[..., first:]
    if cos is not None and sin is not None:
        rest = _turned(rest, cos, sin)
    return torch.cat((out, rest), dim=-1)


class _TimesOfHeads(torch.autograd.Function):
    """Products go where they belong at once: a copy of the queries of a long share, which are
    576 channels wide, costs as much as some percent of attention."""

    @staticmethod
    def forward(ctx: Any, x: Any, matrices: Any, cos: Any, sin: Any) -> Any:
        ctx.save_for_backward(x, matrices, cos, sin)
        _, first, channels = matrices.shape
        out = x.new_empty(*x.shape[:-1], channels + x.shape[-1] - first)
        for row, to in zip(x[..., :first], out[..., :channels], strict=True):
            torch.bmm(row.transpose(0, 1), matrices, out=to.transpose(0, 1))
        rest, to = x[..., first:], out[..., channels:]
        if cos is None:
            to.copy_(rest)
        else:
            _turn((rest[..., 0::2], rest[..., 1::2]), to.chunk(2, -1), cos, sin)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Any) -> Any:
        x, matrices, cos, sin = ctx.saved_tensors
        _, first, channels = matrices.shape
        own = d[..., :channels]
        dx = dmatrices = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            for row, to in zip(own, dx[..., :first], strict=True):
                torch.bmm(row.transpose(0, 1), matrices.mT, out=to.transpose(0, 1))
            rest, to = d[..., channels:], dx[..., first:]
            if cos is None:
                to.copy_(rest)
            else:
                _turn(rest.chunk(2, -1), (to[..., 0::2], to[..., 1::2]), cos, sin, back=True)
        if ctx.needs_input_grad[1]:
            rows = zip(x[..., :first], own, strict=True)
            products = [torch.bmm(r.permute(1, 2, 0), o.transpose(0, 1)) for r, o in rows]
            dmatrices = functools.reduce(torch.add, products)
        return dx, dmatrices, None, None


def _turn(x: Any, to: Any, cos: Any, sin: Any, *, back: bool = False) -> None:
    """Pairs of channels (a, b) into others, with no pass over anything else."""
    sign = -1 if back else 1
    torch.mul(x[0], cos, out=to[0]).addcmul_(x[1], sin, value=-sign)
    torch.mul(x[1], cos, out=to[1]).addcmul_(x[0], sin, value=sign)


def _expansion(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What `kv_b_proj` does to a latent row, for each head: [H, K, C] to its key, and
    [H, C, V] to its value. Adapters count: it is asked what it makes of the unit rows."""
    linear = module.kv_b_proj
    if type(linear) is nn.Linear and not linear._forward_hooks:
        whole = linear.weight
    else:
        _check_without_chance(linear)
        like = next(linear.parameters())
        units = torch.eye(module.kv_lora_rank, dtype=_computed_in(like), device=like.device)
        whole = linear(units).t()
    made = whole.reshape(module.num_heads, -1, module.kv_lora_rank)
    keys, values = torch.split(made, [module.qk_nope_head_dim, module.v_head_dim], 1)
    return keys, values.transpose(1, 2)


def _computed_in(like: torch.Tensor) -> torch.dtype:
    """Quantized weights are no floating tensors; what they compute in is."""
    return like.dtype if like.is_floating_point() else torch.get_default_dtype()


def _check_without_chance(linear: Any) -> None:
    """Dropout in front of an adapter acts on tokens, and there are none here."""
    for part in linear.modules():
        if isinstance(part, nn.Dropout) and part.p > 0 and part.training:
            raise NotImplementedError(
                f"kv_b_proj: an adapter drops {part.p:g} of its inputs in training, but its matrix "
                f"is applied to queries, not to tokens; set the adapter's dropout to 0"
            )


def _redirect(form: _Form, name: str, module: Any, state: Parallelized) -> None:
    for owner, method in ((module, "expand_kv"), (module.indexer, "forward")):
        if owner is not None and method in vars(owner):
            raise NotImplementedError(
                f"parallelize: `{method}` of '{name}' was replaced already, so what it does is not "
                f"known; put the family's own back first"
            )
    if any(part.endswith("bias") for part, _ in module.kv_b_proj.named_parameters()):
        raise NotImplementedError(
            f"parallelize: '{name}.kv_b_proj' has a bias, and rows that attention sees cannot "
            f"carry one; train its adapters without"
        )
    if form.results is None or "forward" in vars(module):
        state.replace(module, "expand_kv", _rows)
    else:  # nobody calls expand_kv then
        state.replace(module, "forward", functools.partial(_forward, form.results, module))
    if module.indexer is not None:
        state.replace(module.indexer, "forward", functools.partial(_select, form, module.indexer))


def _layer(name: str, module: Any) -> AttentionLayer:
    """Raises where a configuration leaves nothing to select."""
    if module.indexer is None and module.layer_idx == 0:
        raise ValueError(
            f"parallelize: '{name}' takes over a selection, but no layer comes before it; the "
            f"first of indexer_types is 'full'"
        )
    if module.indexer is not None and module.indexer.index_topk < 1:
        raise ValueError(
            f"parallelize: '{name}.indexer' selects {module.indexer.index_topk} keys "
            f"(index_topk); expected at least 1"
        )
    row = module.kv_lora_rank + module.qk_rope_head_dim
    config = module.config
    return AttentionLayer(
        name=name,
        heads=module.num_heads,
        key_heads=1,
        head_dim=row,
        value_dim=module.kv_lora_rank,
        sink=isinstance(getattr(module, "sinks", None), torch.Tensor),
        selects=Selection(
            slots=config.index_topk,
            heads=config.index_n_heads,
            head_dim=config.index_head_dim,
            shared=module.indexer is None,
        ),
    )


#: What transformers calls these layers, and their mask: since 5.18, and before.
_KINDS = ("indexed_attention", "deepseek_sparse_attention")


def _recipe(family: str, folder: str, prefix: str, form: _Form) -> Recipe:
    return Recipe(
        family=family,
        attention=f"transformers.models.{folder}.modeling_{folder}.{prefix}Attention",
        layer_kinds=frozenset({*_KINDS, "full_attention"}),
        layer=_layer,
        redirect=functools.partial(_redirect, form),
        masks=_KINDS,
    )


_INTERLEAVED, _HALVES = "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb"

RECIPES = (
    _recipe("GLM-5.2", "glm_moe_dsa", "GlmMoeDsa", _Form(_INTERLEAVED, results=3)),
    _recipe("DeepSeek-V3.2", "deepseek_v32", "DeepseekV32", _Form(_HALVES, results=2)),
    _recipe("A.X K2", "axk2", "AXK2", _Form(_HALVES)),
    _recipe("HY v4", "hy_v4", "HYV4", _Form(_HALVES, rotated_last=True)),
)
