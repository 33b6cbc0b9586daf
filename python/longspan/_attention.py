"""Attention over the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node

from longspan import _C
from longspan._group import ranks_of
from longspan._local_batch import LocalBatch
from longspan._strategy import Strategy, operator_arguments


class AttentionLayout:
    """Who owns which token and who may see whom: all that attention over ranks knows
    about the tokens. Made once a batch, outside of compiled code; `tensor` holds it all,
    as operators take it: int64 on the CPU.

    `owners` is an ownership, or what `shard` returned; with the latter the mask is
    causal inside the batch's documents unless one is given (or one a row).
    """

    tensor: torch.Tensor

    def __init__(
        self,
        owners: _C.Ownership | LocalBatch | _C.Cut,
        mask: _C.Mask | Sequence[_C.Mask] | None = None,
    ) -> None:
        if isinstance(owners, LocalBatch):
            owners = owners.cut
        if isinstance(owners, _C.Cut):
            ownership = owners.ownership
            if mask is None:
                mask = [_C.Mask.causal(packing) for packing in owners.packings]
        elif isinstance(owners, _C.Ownership):
            ownership = owners
            if mask is None:
                mask = _C.Mask.causal(_C.Packing.single(ownership.tokens))
        else:
            raise TypeError(
                "AttentionLayout: expected an Ownership or what shard returned, "
                f"got {type(owners).__name__}"
            )
        self.tensor = _C.attention_layout(ownership, masks_of("AttentionLayout", mask))

    @staticmethod
    def of_tensor(tensor: torch.Tensor) -> AttentionLayout:
        """The one that has this tensor inside."""
        made = AttentionLayout.__new__(AttentionLayout)
        made.tensor = tensor
        return made

    @property
    def ownership(self) -> _C.Ownership:
        return _C.attention_layout_values(self.tensor)[0]

    @property
    def masks(self) -> list[_C.Mask]:
        """One for all rows, or one for each."""
        return _C.attention_layout_values(self.tensor)[1]

    def __repr__(self) -> str:
        try:
            return f"AttentionLayout({self.ownership}, {self.masks})"
        except (RuntimeError, ValueError):  # traced, or no tensor of ours
            return f"AttentionLayout({tuple(self.tensor.shape)})"


# So that torch.export and torch.func see the tensor inside.
register_pytree_node(
    AttentionLayout,
    lambda layout: ([layout.tensor], None),
    lambda tensors, _: AttentionLayout.of_tensor(*tensors),
    serialized_type_name="longspan.AttentionLayout",
    flatten_with_keys_fn=lambda layout: ([(GetAttrKey("tensor"), layout.tensor)], None),
)


def masks_of(who: str, mask: _C.Mask | Sequence[_C.Mask] | None) -> list[_C.Mask]:
    """One mask, or one a row, as a list; None is an empty one."""
    if mask is None:
        return []
    if not isinstance(mask, (_C.Mask, Iterable)):
        raise TypeError(f"{who}: mask is a {type(mask).__name__}; expected a Mask, or one a row")
    masks = [mask] if isinstance(mask, _C.Mask) else list(mask)
    for one in masks:
        if not isinstance(one, _C.Mask):
            raise TypeError(f"{who}: a mask is a {type(one).__name__}, not a Mask")
    return masks


def layout_named(who: str, layout: Any) -> _C.NamedLayout:
    """What the name of a layout stands for; a TypeError where it is none and no
    `Ownership`, which callers have looked for."""
    if not isinstance(layout, str):
        raise TypeError(
            f"{who}: layout is a {type(layout).__name__}; expected a name or an Ownership"
        )
    return _C.layout_named(who, layout)


def check_ownership(who: str, ownership: Any) -> None:
    """For functions that take no names, since nothing tells them of tokens and ranks."""
    if not isinstance(ownership, _C.Ownership):
        raise TypeError(f"{who}: expected an Ownership, got {type(ownership).__name__}")


def ownership_of(
    who: str,
    layout: str | _C.Ownership | None,
    mask: _C.Mask | Sequence[_C.Mask] | None,
    ranks: int,
    here: int,
) -> _C.Ownership:
    """Who owns the tokens, of which this rank has `here`: one rank all of them, and the
    ranks of a named layout what it says about the packing of the mask."""
    if isinstance(layout, _C.Ownership):
        return layout
    if layout is None:
        if ranks != 1:
            raise ValueError(f"{who}: {ranks} ranks need a layout; give `layout` or `attention`")
        return _C.Ownership.contiguous(here, 1)
    named = layout_named(who, layout)
    masks = masks_of(who, mask)
    if not masks and ranks == 1:
        return _C.Ownership.contiguous(here, 1)
    if not masks or (named.form == "stream" and len(masks) > 1):
        missing = "a mask" if not masks else f"one mask, not {len(masks)}"
        raise ValueError(
            f"{who}: layout '{layout}' needs {missing}, whose packing it cuts; give it, an "
            f"Ownership, or `attention`"
        )
    return _C.Ownership.of(named.kind, masks[0].packing, ranks)


def attention_tensor(who: str, attention: AttentionLayout) -> torch.Tensor:
    """What operators take for `attention`."""
    if not isinstance(attention, AttentionLayout):
        raise TypeError(
            f"{who}: attention is a {type(attention).__name__}; expected an AttentionLayout"
        )
    return attention.tensor


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    layout: str | _C.Ownership | None = None,
    attention: AttentionLayout | None = None,
    group: Any = None,
    strategy: str | Strategy = "ring",
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks of `group`:
    what one rank would give for these tokens, forward and backward.

    ``q`` is [B, H, L, D] or packed [L, H, D], ``k`` and ``v`` likewise with H heads
    or fewer (GQA); L are the rank's own tokens in the ownership's local order.
    `mask` (causal by default) and `layout` describe the whole stream: `layout` is an
    `Ownership`, or the name of a layout for the packing of the mask. `attention` gives
    both at once, for many layers. Without a group there is one rank. `strategy` is a
    `Strategy` or its name; all give the same result.

    Local losses backpropagated on every rank give parameter gradients whose sum
    over the group is the full gradient. A query that sees no key gets 0.
    """
    ranks = ranks_of(group)
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"attend: dropout_p is {dropout_p}; attention over ranks has no dropout, "
            "since its random numbers would depend on the ranks; set it to 0"
        )
    if q.dim() == 0:
        raise ValueError("attend: `q` has no axes; expected [B, H, L, D] or [L, H, D]")
    if attention is None:
        here = q.shape[2 if q.dim() == 4 else 0]
        attention = AttentionLayout(ownership_of("attend", layout, mask, ranks.size(), here), mask)
    elif mask is not None or layout is not None:
        raise ValueError("attend: `attention` already holds mask and owners; leave them out")
    name, head_ranks = operator_arguments(strategy)
    out, lse = torch.ops.longspan.attend(
        q,
        k,
        v,
        sink,
        attention_tensor("attend", attention),
        1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale,
        0.0 if softcap is None else softcap,
        name,
        head_ranks,
        ranks.name,
    )
    return (out, lse) if return_lse else out


def plan(
    ownership: _C.Ownership,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    *,
    strategy: str | Strategy = "ring",
    rank: int = 0,
    key_heads: int = 1,
    rows: int = 1,
) -> _C.Plan:
    """What a rank will compute, send and receive; print it to see the steps."""
    check_ownership("plan", ownership)
    if mask is None:
        mask = _C.Mask.causal(_C.Packing.single(ownership.tokens))
    masks = masks_of("plan", mask)
    return _C.Plan.of(ownership, masks, Strategy.of(strategy), rank, key_heads, rows)
