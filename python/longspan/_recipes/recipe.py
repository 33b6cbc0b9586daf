"""What a recipe says about a family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from longspan._models import AttentionLayer, Parallelized


@dataclass(frozen=True)
class Recipe:
    """How the attention of one family is cut, where redirecting its attention function
    is not enough. Only instances inside a parallelized model change, by
    `Parallelized.replace`, which `restore` undoes."""

    family: str
    #: The class of its attention, in full.
    attention: str
    #: Kinds of layers, in the configuration's words, that it answers for.
    layer_kinds: frozenset[str]
    #: What one attention module computes: (name, module).
    #: None where it is none, but on the way to one.
    layer: Callable[[str, Any], AttentionLayer] | None
    #: Replaces methods of one attention module; raises before it does where this
    #: module is not what the recipe was written for: (name, module, state).
    redirect: Callable[[str, Any, Parallelized], None]
    #: Where the model looks for masks that are ready, so that it builds none: keys of the
    #: mapping it takes as `attention_mask`.
    masks: tuple[str, ...] = ()
    #: Its module does not attend, but carries states or rows over borders.
    carries: bool = False
    #: Without kernels, transformers scans it in Python, a token at a time.
    by_token: bool = False
    #: Refuses a batch that the family would get wrong: (who, model, batch).
    check_batch: Callable[[str, torch.nn.Module, Mapping[str, Any]], None] | None = None


def class_names(kind: type) -> list[str]:
    """Of a class and those it was derived from, in full."""
    return [f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__]


def check_no_dropout(module: torch.nn.Module, dropout: float) -> None:
    """Of attention weights, for layers whose attention is a list of keys."""
    if dropout != 0.0:
        raise NotImplementedError(
            f"{type(module).__name__}: drops {dropout:g} of its attention weights in training, "
            f"which would depend on the ranks; set attention_dropout to 0"
        )


def check_no_cache(module: torch.nn.Module, past_key_values: object) -> None:
    if past_key_values is not None:
        raise ValueError(
            f"{type(module).__name__}: got a cache, which would hold this rank's tokens alone; "
            f"pass use_cache=False, as shard does"
        )


class NotSharded(ValueError):
    """A layer was called without a word about the batch."""


def not_sharded(module: torch.nn.Module) -> NotSharded:
    """A parallelized model got a batch of another kind."""
    return NotSharded(
        f"{type(module).__name__}: a parallelized model was called without a sharded batch; "
        f"call model(**longspan.shard(batch, group, model=model)), or longspan.restore(model)"
    )
