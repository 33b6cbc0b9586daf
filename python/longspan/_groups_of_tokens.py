"""Groups of tokens that see each other both ways, as a batch names them: the images and
videos of Gemma 4. Each family has its own rule of how groups meet windows, and of which
layers know groups at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from longspan import _C
from longspan._arguments import is_dense, said

#: A number for each token, as processors of transformers give it.
KEY = "mm_token_type_ids"
#: Those of images and videos; neighbours of either kind are one group.
_KINDS = (1, 2)


@dataclass(frozen=True)
class _Rule:
    """How far tokens of a group see in it (`Mask.with_group_reach`) in layers with a
    window and without; None where groups are text like any other."""

    sliding: str | None
    full: str | None


#: By the type of the text configuration. This is what the forward of each model masks, for
#: transformers 5.22: Gemma 4 by window and (causal or group), its unified model by
#: (causal and window) or group.
_RULES = {
    "gemma4_text": _Rule(sliding="within_window", full=None),
    "gemma4_unified_text": _Rule(sliding="whole_group", full="whole_group"),
}


def reach_of(config: Any, window: int | None) -> str | None:
    """How far tokens of a group see in it in a layer with this window, if it knows groups:
    small models of these families do not."""
    rule = _RULES.get(getattr(config, "model_type", ""))
    if rule is None or getattr(config, "use_bidirectional_attention", None) != "vision":
        return None
    return rule.full if window is None else rule.sliding


def groups_in(packed: _C.PackedBatch) -> list[list[_C.TokenRange]]:
    """The groups of each row, or of the stream; empty where the batch names none."""
    if KEY not in dict(packed.source.tokens):
        return []
    groups = _C.groups_of(packed, KEY, _KINDS)
    return groups if any(groups) else []


def check_groups(who: str, name: str, configs: Iterable[Any], batch: Mapping[str, Any]) -> None:
    """Refuses groups that the model called `name` does not know, and kinds of tokens that
    are no numbers."""
    kinds = batch.get(KEY)
    if not isinstance(kinds, torch.Tensor) or not is_dense(kinds):
        return  # nothing, or refused where the batch is read
    whole = kinds.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if kinds.dim() != 2 or not whole:
        raise ValueError(
            f"{who}: `{KEY}` is {said(kinds)} {list(kinds.shape)}; expected whole numbers [B, S]"
        )
    if any(getattr(config, "model_type", "") in _RULES for config in configs):
        return
    if bool(torch.isin(kinds, torch.tensor(_KINDS, device=kinds.device)).any()):
        raise ValueError(
            f"{who}: `{KEY}` names images, but {name} has no groups of tokens that see each "
            f"other; leave the key out, or give a decoder of Gemma 4"
        )
