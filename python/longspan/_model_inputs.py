"""What batches and calls may not ask of a parallelized model, and why."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from longspan._arguments import check_number, said


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


_TARGETS = "the targets of the whole batch, 1 or more"


def check_inputs(who: str, given: Mapping[str, Any]) -> None:
    """Refuses what a model would answer for its own tokens only. `who` speaks."""
    for key, (is_asked, why) in _REFUSED.items():
        if key in given and is_asked(given[key]):
            raise NotImplementedError(f"{who}: got `{key}`: {why}")
    if _asked(given.get("output_attentions")):
        _warn_of_attentions()
    if given.get("num_items_in_batch") is not None:
        check_divisor(who, given["num_items_in_batch"])


def check_divisor(who: str, count: Any, on_device: bool = False) -> None:
    """That a loss may be divided by it: one number above 0. Of tensors on a device only with
    `on_device`, since the host waits for what it looks at."""
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.dtype == torch.bool or count.is_complex():
            raise TypeError(
                f"{who}: `num_items_in_batch` is {said(count)} {list(count.shape)}; expected one "
                f"number, {_TARGETS}"
            )
        # Of tensors without values, and while tracing, nobody knows.
        known = type(count) is torch.Tensor and not torch.compiler.is_compiling()
        if not known or not (count.is_cpu or (on_device and count.is_cuda)):
            return
        count = count.item()
    else:
        check_number(who, "num_items_in_batch", count)
    if not 0 < count < math.inf:
        raise ValueError(
            f"{who}: `num_items_in_batch` is {count}, by which the loss is divided; expected "
            f"{_TARGETS}: leave it to shard, or count the labels that are not -100, and give 1 "
            f"where there are none"
        )


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
