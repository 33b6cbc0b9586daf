"""Pictures of owners, masks, work and plans."""

from __future__ import annotations

from collections.abc import Sequence

from longspan import _C
from longspan._arguments import check_kind, check_whole
from longspan._attention import check_ownership, masks_of
from longspan._strategy import Strategy


def draw(
    ownership: _C.Ownership,
    mask: _C.Mask | None = None,
    *,
    packing: _C.Packing | None = None,
    against: _C.Ownership | None = None,
) -> _C.Picture:
    """Who owns which token; with a mask also who computes what at which ring
    step, and how much work each rank has. `against` draws a second ownership
    beside the first. Print the result, show it in a notebook, or write
    ``picture.to_svg()`` to a file."""
    check_ownership("draw", ownership)
    if mask is not None:
        check_kind("draw", "mask", mask, _C.Mask, "a Mask")
    if packing is not None:
        check_kind("draw", "packing", packing, _C.Packing, "a Packing")
    if against is not None:
        check_kind("draw", "against", against, _C.Ownership, "an Ownership")
    if mask is not None and packing is not None:
        raise ValueError("draw: the mask already says where documents lie; leave packing out")
    if against is not None:
        if mask is None:
            raise ValueError("draw: two ownerships are compared under a mask; give one")
        return _C.draw_comparison(mask, ownership, against)
    if mask is not None:
        return _C.draw_all(mask, ownership)
    packing = _C.Packing.single(ownership.tokens) if packing is None else packing
    return _C.draw_ownership(ownership, packing)


def draw_plan(
    ownership: _C.Ownership,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    *,
    strategy: str | Strategy = "ring",
    heads: int,
    key_heads: int | None = None,
    head_dim: int,
    value_dim: int | None = None,
    bytes_per_element: int = 2,
) -> _C.Picture:
    """What every rank computes, sends and receives at each step of a strategy, and
    the bytes it sends forward and backward; the mask is causal by default."""
    check_ownership("draw_plan", ownership)
    if mask is None:
        mask = _C.Mask.causal(_C.Packing.single(ownership.tokens))
    shape = {
        "heads": heads,
        "key_heads": heads if key_heads is None else key_heads,
        "head_dim": head_dim,
        "value_dim": head_dim if value_dim is None else value_dim,
        "bytes_per_element": bytes_per_element,
    }
    for name, size in shape.items():
        check_whole("draw_plan", name, size)
    masks = masks_of("draw_plan", mask)
    return _C.draw_plan(ownership, masks, Strategy.of(strategy), *shape.values())
