"""Pictures of owners, masks and work."""

from __future__ import annotations

from longspan import _C


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
