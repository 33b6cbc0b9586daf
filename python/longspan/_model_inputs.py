"""What batches and calls may not ask of a parallelized model, and why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch


def _asked(value: Any) -> bool:
    """Whether an option was given and switched on."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 or bool(value)
    return value is not None and value is not False and not (type(value) is int and value == 0)


def _given(value: Any) -> bool:
    return value is not None


def _keeps(value: Any) -> bool:
    """A tensor names the tokens to keep, also one without axes: 0 in it is not the int that
    keeps all."""
    return isinstance(value, torch.Tensor) or _asked(value)


def _is_another(value: Any) -> bool:
    return not (isinstance(value, int) and value == -100)


_CACHE = (
    "a cache holds the keys of whole rows, and every rank has a part of each; leave it out, or "
    "call longspan.restore(model) to decode"
)
_OTHER_STATES = (
    "attends to states that are no tokens of the batch, which are not cut; the decoder runs over "
    "ranks with text alone"
)
#: Key: (when it is too much, why).
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_cache": (_asked, _CACHE),
    "past_key_values": (_given, _CACHE),
    "cross_attention_states": (_given, _OTHER_STATES),
    "encoder_hidden_states": (_given, _OTHER_STATES),
    "logits_to_keep": (
        _keeps,
        "every rank would keep the last tokens of its own share; take them from "
        "longspan.unshard(out.logits, local)",
    ),
    "num_logits_to_keep": (_keeps, "every rank would keep the last tokens of its own share"),
    "ignore_index": (
        _is_another,
        "targets that teach nothing are -100 over ranks, those of pads too, and are counted so; "
        "give labels with -100 there and leave it out",
    ),
}


def check_inputs(who: str, given: Mapping[str, Any]) -> None:
    """Refuses what a model would answer for its own tokens only. `who` speaks."""
    for key, (is_asked, why) in _REFUSED.items():
        if key in given and is_asked(given[key]):
            raise NotImplementedError(f"{who}: got `{key}`: {why}")
    if _asked(given.get("output_attentions")):
        _warn_of_attentions()


_warned = False


def _warn_of_attentions() -> None:
    """Once: attention over ranks never has its weights in one place."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "longspan: `output_attentions` gives None for every layer of a parallelized model, "
            "whose attention weights are never in one place",
            stacklevel=3,
        )
