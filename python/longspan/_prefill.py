"""A prompt read by all ranks, then decoded by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longspan import _transformers
from longspan._arguments import check_kind, check_whole
from longspan._batch import shard, unshard
from longspan._local_batch import KEYWORD
from longspan._models import LocalAttention, state_of
from longspan._wrappings import holds_shards


class _Keeping(LocalAttention):
    """Attention that keeps the keys and values of every layer, in the order of the calls."""

    def __init__(self, other: LocalAttention) -> None:
        vars(self).update(vars(other))
        self.kept: list[tuple[torch.Tensor, ...]] = []

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        self.kept.append((k, v))
        return super().attend(q, k, v, **options)


@torch.no_grad()
def prefill(
    model: torch.nn.Module, batch: Mapping[str, Any], group: Any = None, *, rank: int | None = 0
) -> Any:
    """The cache of a prompt that all ranks of the model's group read together: a DynamicCache
    of transformers with all tokens but the last, for ``generate`` of the paused model. It
    comes into being on `rank` alone, and is None on others; with `rank` None every rank has
    it.

    `batch` has `input_ids` [B, S] and, where rows are padded on the left, `attention_mask`."""
    check_kind("prefill", "model", model, torch.nn.Module, "a torch.nn.Module")
    check_kind("prefill", "batch", batch, Mapping, "a batch with `input_ids`")
    state = state_of("prefill", model)
    if rank is not None:
        check_whole("prefill", "rank", rank, 0, state.group.size() - 1)
    part: Any = _transformers.whole_models(model)[0]
    _check(part, model, state, batch)
    given = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
    local = shard(given, group, model=model)
    keeping = _Keeping(local[KEYWORD])
    local[KEYWORD] = keeping
    part.base_model(**local)  # without a head: nobody asks for logits

    from transformers import DynamicCache

    cache = DynamicCache(config=part.config)
    mine = rank is None or rank == state.group.rank()
    for layer in range(len(keeping.kept)):
        pair = [unshard(one.transpose(1, 2), local)[:, :-1] for one in keeping.kept[layer]]
        keeping.kept[layer] = ()
        if mine:
            keys, values = (one.transpose(1, 2) for one in pair)
            cache.update(keys, values, layer)
    return cache if mine else None


def _check(part: Any, model: torch.nn.Module, state: Any, batch: Mapping[str, Any]) -> None:
    """What has no cache of plain keys and values."""
    name = type(part).__name__
    shared = getattr(part.config, "num_kv_shared_layers", 0)
    if shared or any(layer.selects or layer.pools or layer.recurrence for layer in state.layers):
        raise NotImplementedError(
            f"prefill: {name} keeps more, or less, than keys and values of each layer; let one "
            f"rank read the prompt, inside `with longspan.paused(model):`"
        )
    if holds_shards(model):
        raise NotImplementedError(
            f"prefill: the weights of {name} lie in shards, and one rank could not decode; give a "
            f"model with whole weights"
        )
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    for key, value in batch.items():
        if isinstance(value, (torch.Tensor, list, tuple)) and _adds(
            key, value, mask, state.first_position
        ):
            raise ValueError(
                f"prefill: `{key}` would go unheard, since a row is one prompt that begins at "
                f"position 0, read by its ids; leave it out, or let one rank read the prompt, "
                f"inside `with longspan.paused(model):`"
            )
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] < 2:
        raise ValueError("prefill: expected `input_ids` [rows, tokens] of two tokens or more")
    if isinstance(mask, torch.Tensor) and (
        mask.shape != ids.shape or not bool((mask[:, 1:].ne(0) >= mask[:, :-1].ne(0)).all())
    ):
        raise ValueError(
            "prefill: `attention_mask` has pads behind tokens, where decoding would go on; pad on "
            "the left"
        )


def _adds(key: str, value: Any, mask: Any, first: int) -> bool:
    """Whether an entry of a batch says more than its ids and their pads do."""
    if key in ("input_ids", "attention_mask", "labels"):
        return False
    if key == "token_type_ids":
        return bool(torch.as_tensor(value).ne(0).any())
    if key != "position_ids" or not isinstance(value, torch.Tensor) or value.dim() != 2:
        return True
    real = torch.ones_like(value).bool()
    if isinstance(mask, torch.Tensor):
        real = mask.ne(0).to(value.device)
    if value.shape != real.shape:
        return True
    counted = (real.cumsum(1) - 1)[real]
    return not any(value[real].long().equal(counted + begin) for begin in (0, first))
