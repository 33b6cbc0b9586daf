"""Input embeddings that somebody else wrote: each token's row must come from its id alone, since
a rank has no ids but those of its own tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longspan._twins import kind_of, looked_through
from longspan._walking import modes_kept, modules_in, walked
from longspan._wrappings import holds_shards, is_fully_sharded

#: Packages whose embeddings are tables; others nobody has looked at.
_LOOKED_AT = ("torch", "transformers", "peft", "bitsandbytes")
#: Ids of a call. All are tried, for one id may begin what the next ones are part of.
_IDS = 2048
_WAY_OUT = (
    "make the embeddings of the whole batch before `shard` and give them as `inputs_embeds` to a "
    "model with a plain nn.Embedding"
)


def check_lookup(part: Any) -> None:
    """Raises NotImplementedError where a model's input embeddings look at more than one id at a
    time; those of known packages are not tried. Under fully_shard every rank takes part."""
    table = _foreign(part)
    if table is None:
        return
    name = next((name for name, module in walked(part) if module is table), "embeddings")
    who = f"parallelize: '{name}' ({kind_of(table).__name__})"
    size = rows_of(table)
    if size is None:
        raise NotImplementedError(
            f"{who} embeds tokens and has no table of ids (a `weight` [ids, channels]), so nobody "
            f"can tell whether it looks at neighbours, which lie on other ranks; {_WAY_OUT}"
        )
    if any(p.device.type == "meta" for p in table.parameters()):
        raise NotImplementedError(
            f"{who} is no embedding of torch or transformers, and without weights (on the meta "
            f"device) it cannot be looked at; parallelize once it has them"
        )
    found = _looks_around(part, table, size)
    if found is not None:
        raise NotImplementedError(f"{who} {found}; {_WAY_OUT}")


def rows_of(table: Any) -> int | None:
    """How many ids embeddings have a row for; None where they are no table."""
    weight = getattr(table, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return int(getattr(table, "num_embeddings", 0) or weight.shape[0])


def _foreign(part: Any) -> nn.Module | None:
    """The input embeddings, where a forward in them is of none of the known packages."""
    try:
        table = part.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    if not isinstance(table, nn.Module):
        return None
    table = looked_through(table)
    forwards = [vars(one).get("forward", kind_of(one).forward) for one in table.modules()]
    homes = {str(getattr(one, "__module__", "")).partition(".")[0] for one in forwards}
    return None if homes <= set(_LOOKED_AT) else table


@torch.no_grad()
def _looks_around(part: nn.Module, table: nn.Module, size: int) -> str | None:
    """In words, where the rows of ids differ between calls with other ids around them."""
    device = next(table.parameters()).device
    every = torch.randperm(size, generator=torch.Generator().manual_seed(16)).to(device)
    with _whole(part, table), modes_kept(table):
        table.eval()
        for ids in torch.split(every, _IDS):
            rows = _rows(table, ids)
            if rows is None:
                return f"does not answer with a row for each id of {list(ids[None].shape)}"
            for first in range(min(2, len(ids))):
                mine = slice(first, None, 2)
                alone = _rows(table, ids[mine])
                by = torch.inf if alone is None else _difference(rows[mine], alone)
                if not by <= max(1e-5, 4 * torch.finfo(rows.dtype).eps):
                    return (
                        f"looks at other tokens: rows of ids were others by {by:.0e} when other "
                        f"ids stood around them, and those lie on other ranks"
                    )
    return None


def _rows(table: Any, ids: Tensor) -> Tensor | None:
    # Not by calling it: fully_shard would take it for the root of the model.
    found = table.forward(ids[None])
    if not isinstance(found, Tensor) or found.shape[:2] != (1, len(ids)):
        return None
    return found[0]


def _difference(one: Tensor, two: Tensor) -> float:
    if one.shape != two.shape:
        return torch.inf
    if not one.numel():
        return 0.0
    return float((one - two).abs().max() / one.abs().max().clamp(min=1e-30))


@contextlib.contextmanager
def _whole(part: nn.Module, table: nn.Module) -> Iterator[None]:
    """Its weights put together, where fully_shard spread them."""
    holder: Any = None
    if holds_shards(table):
        holders = [module for module in modules_in(part) if is_fully_sharded(module)]
        around = [one for one in holders if any(inner is table for inner in one.modules())]
        holder = min(around, key=lambda one: sum(1 for _ in one.modules()), default=None)
    if holder is not None:
        holder.unshard()
    try:
        yield
    finally:
        if holder is not None:
            holder.reshard()
