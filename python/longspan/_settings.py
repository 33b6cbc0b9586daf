"""What configurations and attention layers say about masks and numbers. A proof holds for what
they said when a model was let in; changed later, some of it would reach the family's code and
not ours, or ours and not the family's."""

from __future__ import annotations

import copy
import functools
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from longspan._walking import has

_ABSENT = object()
#: What trainers and users set and no answer over ranks depends on, or what is looked at with
#: every batch.
_FREE = frozenset(
    {
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "router_aux_loss_coef", "aux_loss_coef"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"),
        *("mask_token_id", "unk_token_id", "decoder_start_token_id"),
        *("vocab_size", "max_position_embeddings", "tie_word_embeddings", "initializer_range"),
        *("dtype", "torch_dtype", "architectures", "name_or_path", "transformers_version"),
        *("id2label", "label2id", "num_labels", "problem_type", "tokenizer_class", "auto_map"),
        *("quantization_config", "task_specific_params", "finetuning_task", "prefix"),
    }
)
#: Parts of the names of such settings: noise of routers is looked at with every batch, and
#: dropout of attention in every call.
_FREE_PARTS = ("dropout", "pdrop", "jitter")
#: Parts of the names of what families read where a configuration has it, and do without.
_READ = (
    *("window", "layer_types", "attention", "softcap", "scal", "rope", "rotary", "causal"),
    *("bidirectional", "chunk", "multiplier"),
)
#: What our attention reads of the family's attention, and what rotary tables go by.
_OF_ATTENTION = ("sliding_window", "is_causal", "layer_idx")
_OF_ROTATION = "rope_type"
#: What Bamba adds to its loss, a mean over the tokens at hand.
_OF_LOSS = "z_loss_coefficient"
_ATTENTION = "_attn_implementation_internal"


class Settings:
    """What they said once: our copies of configurations, those that the copies were made of,
    and the modules that hold the copies."""

    def __init__(
        self,
        ours: Iterable[Any],
        originals: Iterable[Any],
        holders: Iterable[tuple[str, torch.nn.Module]],
    ) -> None:
        self._ours = [(config, vars(config)[_ATTENTION]) for config in ours]
        every = [*(config for config, _ in self._ours), *originals]
        self._configs = [(config, _said_by(config)) for config in every]
        self._holders = [
            (name, vars(module), vars(module).get("config"), _read_of(module))
            for name, module in holders
        ]

    def changed(self) -> str | None:
        """What else is another now, before and after, such as "`sliding_window` of its
        MistralConfig was 5 when the model was parallelized and is 3 now"."""
        return self._other_config() or self._other_module()

    def other_attention(self) -> str | None:
        """Where layers would look up another attention function than ours."""
        for config, name in self._ours:
            now = vars(config).get(_ATTENTION)
            if now != name:
                whose = f"its {type(config).__name__}"
                return _in_words("_attn_implementation", whose, name, now)
        return None

    def _other_config(self) -> str | None:
        for config, before in self._configs:
            now = vars(config)
            key = _first_other(before, now)
            if key is not None:
                whose = f"its {type(config).__name__}"
                return _in_words(key, whose, before.get(key, _ABSENT), now.get(key, _ABSENT))
        return None

    def _other_module(self) -> str | None:
        for name, now, config, values in self._holders:
            if now.get("config") is not config:
                kind = type(now.get("config")).__name__
                return f"`config` of '{name}' is another {kind} than when it was parallelized"
            for key, value in values.items():
                if now.get(key, _ABSENT) != value:
                    whose = f"'{name}'" if name else "the model"
                    return _in_words(key, whose, value, now.get(key, _ABSENT))
        return None


def _read_of(module: torch.nn.Module) -> dict[str, Any]:
    own = vars(module)
    if has(module, "is_causal"):
        return {key: own.get(key, _ABSENT) for key in _OF_ATTENTION}
    if _OF_LOSS in own:
        return {_OF_LOSS: own[_OF_LOSS]}
    kinds = copy.copy(own.get(_OF_ROTATION))  # some have one for each kind of layer
    return {} if kinds is None else {_OF_ROTATION: kinds}


def _said_by(config: Any) -> dict[str, Any]:
    """With copies of what can be changed in place."""
    return {
        key: copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value
        for key, value in vars(config).items()
        if not _is_free(key)
    }


def _first_other(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for key, value in before.items():
        other = now.get(key, _ABSENT)
        if other is not value and (other is _ABSENT or not _equal(other, value)):
            return key
    for key, value in now.items():
        if key not in before and value is not None and _may_be_read(key):
            return key
    return None


def _may_be_read(key: str) -> bool:
    return not _is_free(key) and any(part in key for part in _READ)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # tensors and what else compares by elements
        return False


@functools.cache  # the same names with every batch
def _is_free(key: str) -> bool:
    return key.startswith("_") or key in _FREE or any(part in key for part in _FREE_PARTS)


def _in_words(key: str, whose: str, was: Any, now: Any) -> str:
    key, was, now = _where(key, was, now)
    before, after = ("not there" if v is _ABSENT else reprlib.repr(v) for v in (was, now))
    return f"`{key}` of {whose} was {before} when the model was parallelized and is {after} now"


def _where(key: str, was: Any, now: Any) -> tuple[str, Any, Any]:
    """The entry that differs, of lists and mappings with the same places."""
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        places = list(was)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        places = list(range(len(was)))
    else:
        return key, was, now
    place = next((at for at in places if not _equal(was[at], now[at])), None)
    return (key, was, now) if place is None else _where(f"{key}[{place!r}]", was[place], now[place])
