"""Why a model may be cut over ranks, shown on a tiny twin of it: the model's own classes
with small sizes, random weights everywhere, in float64 on the CPU.

isolation  changing some tokens moves no other ones, where attention sees its own token only
order      tokens permuted with their `position_ids` give permuted outputs
numbering  without `position_ids` the model counts as `shard` does
ruler      one rank gives what the plain twin gives on a document longer than every window,
           and two ranks what it gives on each document alone, packed and padded: logits, loss
           and every gradient

`parallelize` asks for it; here it can be read. See docs/models.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from longspan import _transformers
from longspan._admission import (
    Proof,
    check_adapters,
    check_guests,
    check_twin,
    check_version,
    check_wrappers,
    known_of,
    look_at,
    proof_of,
)
from longspan._arguments import check_kind, wrong
from longspan._models import find_state
from longspan._twins import kind_of

__all__ = ["Proof", "prove"]


def prove(model: torch.nn.Module, *, twin: torch.nn.Module | None = None) -> Proof:
    """Whether `parallelize` would let a model in, and what holds or who is to blame. `twin`
    is a small model of the same classes, where none can be made. Nothing is
    communicated, and nothing of the model is touched."""
    check_kind("prove", "model", model, torch.nn.Module, "a torch.nn.Module")
    if twin is not None and (
        not isinstance(twin, torch.nn.Module) or twin not in _transformers.whole_models(twin)
    ):
        raise wrong("prove", "twin", twin, "a small model of transformers")
    if find_state(model) is not None:
        raise ValueError(
            "prove: this model is parallelized, so it was let in already; call "
            "longspan.restore(model) to look again"
        )
    shown: list[str] = []
    seconds = 0.0
    name = type(model).__name__
    try:
        _transformers.attention_layers(model)
        check_version()
        parts = _transformers.whole_models(model)
        if twin is not None:
            check_twin("prove", "twin", twin, parts)
        check_wrappers(model, parts)
        check_adapters(model)
        check_guests(model, parts)
        for part in parts:
            name = kind_of(part).__name__
            known = known_of(part, "auto" if twin is None else twin)
            found = proof_of(known)
            shown += found.shown
            seconds += found.seconds
            if found.refusal is not None:
                return dataclasses.replace(found, seconds=seconds)
            look_at(part, known)
    except (NotImplementedError, TypeError, ImportError) as error:
        return Proof(name, tuple(shown), _said(error), seconds)
    return Proof(name, tuple(dict.fromkeys(shown)), None, seconds)


def _said(error: Any) -> str:
    return str(error).removeprefix("parallelize: ")
