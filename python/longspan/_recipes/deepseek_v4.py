"""DeepSeek-V4: windows of keys, and pools of the tokens before them.

Every layer has one row of keys a token, which is also the values, and sees a window of
them. Layers with a compressor also see *pools*: every whole window of `compress_rate`
tokens of a document makes one row, by softmax pooling. Compressed sparse layers (ratio 4,
windows that overlap) see the pools that an indexer selects, heavily compressed ones
(ratio 128) all that have ended.

What travels is known from the documents alone: the rows before each border, parts of pools
that straddle ranks, and the finished pools, to every rank. Attention then looks at lists
of rows that are all here. The `forward` of each attention is replaced by one made of its
own projections, norms and rotary embeddings, so that adapters on them count; norms before
and after, hyper-connections and experts are per token and the family's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from longspan import comm, dsa
from longspan._agreement import in_layer_of
from longspan._local_batch import KEYWORD
from longspan._models import AttentionLayer, LocalAttention, Parallelized, Pooling, Selection
from longspan._recipes.recipe import (
    Recipe,
    check_no_cache,
    check_no_dropout,
    class_names,
    not_sharded,
)

_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_MODULE = "transformers.models.deepseek_v4.modeling_deepseek_v4"


def _forward(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    position_ids: torch.Tensor,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """In place of an attention's `forward`: [B, L, hidden] of this rank's tokens."""
    local = rest.get(KEYWORD)
    if not isinstance(local, LocalAttention):
        raise not_sharded(module)
    check_no_cache(module, past_key_values)
    check_no_dropout(module, module.attention_dropout if module.training else 0.0)
    cos, sin = position_embeddings[module.rope_layer_type]
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    residual = module.q_a_norm(module.q_a_proj(hidden_states))
    q = module.q_b_norm(module.q_b_proj(residual).view(heads).transpose(1, 2))
    q = _rotated(q.transpose(1, 2), cos.unsqueeze(2), sin.unsqueeze(2))
    kv = _rotated(module.kv_norm(module.kv_proj(hidden_states)), cos, sin)
    with in_layer_of(module):
        rows, lists = _window(local, kv, module.sliding_window)
        if module.compressor is not None:
            made, plan = _compressed(local, module.compressor, hidden_states)
            pools = dsa.gather_pools(made.to(rows.dtype), plan, group=local.group)
            indexer = getattr(module.compressor, "indexer", None)
            if indexer is None:
                seen = plan.ended(rows.device)
            else:
                seen = _selected(local, indexer, hidden_states, residual, position_ids)
            lists = torch.cat([lists, torch.where(seen < 0, seen, seen + rows.shape[0])], dim=-1)
            rows = torch.cat([rows, pools])
        out = dsa.attend_selected(
            q.flatten(0, 1), rows, lists, scale=module.scaling, sink=module.sinks
        )
    assert isinstance(out, torch.Tensor)
    # Values carry their rotation, which is taken back at the query's position.
    out = _rotated(out.view_as(q), cos.unsqueeze(2), sin.unsqueeze(2), inverse=True)
    grouped = out.reshape(*hidden_states.shape[:-1], module.config.o_groups, -1)
    return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None


def _window(
    local: LocalAttention, kv: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of keys [B, L, D] with those before the borders behind them, and which of
    them each token sees."""
    halo = local.halo(window - 1)
    own = kv.flatten(0, 1)
    came = comm.exchange_needed(own, halo.sends, axis=0, group=local.group, received=halo.received)
    return torch.cat([own, came]), halo.seen(kv.device)


def _compressed(
    local: LocalAttention, compressor: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, dsa.PoolPlan]:
    """This rank's pools as keys, normed and rotated to where their windows begin, of a
    compressor or an indexer."""
    plan = local.pools(compressor.compress_rate, _overlaps(compressor))
    made = dsa.pool_tokens(
        compressor.kv_proj(hidden_states),
        compressor.gate_proj(hidden_states),
        compressor.position_bias,
        plan,
        group=local.group,
    )
    normed = compressor.kv_norm(made)
    positions = plan.positions(made.device).unsqueeze(0)
    cos, sin = compressor.rotary_emb(
        normed, position_ids=positions, layer_type=compressor.rope_layer_type
    )
    return _rotated(normed, cos[0], sin[0]), plan


@torch.no_grad()
def _selected(
    local: LocalAttention,
    indexer: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """The pools that the indexer chooses for each token, from those that ended; none of
    its parameters learns by that."""
    keys, plan = _compressed(local, indexer, hidden_states)
    cos, sin = indexer.rotary_emb(
        hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type
    )
    q = indexer.q_b_proj(residual).unflatten(-1, (indexer.num_heads, indexer.head_dim))
    q = _rotated(q, cos.unsqueeze(2), sin.unsqueeze(2)).flatten(0, 1)
    scorer = indexer.scorer
    # A positive factor passes through max(0, .), so the scores' scale goes here.
    weights = scorer.weights_proj(hidden_states).float().flatten(0, 1)
    weights = weights * (scorer.weights_scaling * scorer.softmax_scale)
    if q.dtype == torch.float64:  # the family scores in float32, whatever its type
        q, keys = q.float(), keys.float()
    every = dsa.gather_pools(keys.to(q.dtype), plan, group=local.group)
    start, end = plan.windows(q.device)
    chosen = dsa.select_keys(
        q, every, weights, slots=min(indexer.index_topk, plan.total), start=start, end=end
    )
    assert isinstance(chosen, torch.Tensor)
    return chosen


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """What the family's apply_rotary_pos_emb makes of the last channels, with -sin if `inverse`;
    but in the order of tokens, and without its slices, whose derivatives are as large as x."""
    return dsa.rotate_channels(x, cos, sin, first=-2 * cos.shape[-1], inverse=inverse)


def _overlaps(compressor: Any) -> bool:
    """Whether tokens have channels for the window after their own."""
    return bool(compressor.position_bias.shape[-1] == 2 * compressor.head_dim)


def _layer(name: str, module: Any) -> AttentionLayer:
    """Raises where a configuration leaves no pools to make or to choose."""
    compressor = module.compressor
    pools = Pooling()
    if compressor is not None:
        if compressor.compress_rate < 1:
            raise ValueError(
                f"parallelize: '{name}.compressor' makes pools of {compressor.compress_rate} "
                f"tokens (compress_rates); expected at least 1"
            )
        indexer = getattr(compressor, "indexer", None)
        if indexer is not None and indexer.index_topk < 1:
            raise ValueError(
                f"parallelize: '{name}.compressor.indexer' selects {indexer.index_topk} pools "
                f"(index_topk); expected at least 1"
            )
        selects = indexer and Selection(indexer.index_topk, indexer.num_heads, indexer.head_dim)
        pools = Pooling(compressor.compress_rate, _overlaps(compressor), selects or None)
    return AttentionLayer(
        name=name,
        heads=module.num_heads,
        key_heads=1,
        head_dim=module.head_dim,
        value_dim=module.head_dim,
        window=module.sliding_window,
        sink=True,
        pools=pools,
    )


def _redirect(name: str, module: Any, state: Parallelized) -> None:
    if "forward" in vars(module):
        raise NotImplementedError(
            f"parallelize: `forward` of '{name}' was replaced already, so what it does is not "
            f"known; put the family's own back first"
        )
    state.replace(module, "forward", functools.partial(_forward, module))


def _check_batch(who: str, model: torch.nn.Module, batch: Mapping[str, Any]) -> None:
    """Experts that are chosen by ids need them."""
    if batch.get("inputs_embeds") is None:
        return
    for name, module in model.named_modules():
        if f"{_MODULE}.DeepseekV4HashRouter" in class_names(type(module)):
            raise ValueError(
                f"{who}: '{name}' chooses experts by token id, and `inputs_embeds` has no ids; "
                f"give `input_ids`"
            )


RECIPES = (
    Recipe(
        family="DeepSeek-V4",
        attention=f"{_MODULE}.DeepseekV4Attention",
        layer_kinds=frozenset({"sliding_attention", _SPARSE, _HEAVY}),
        layer=_layer,
        redirect=_redirect,
        check_batch=_check_batch,
    ),
)
