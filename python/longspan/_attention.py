"""Attention over the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node

from longspan import _C
from longspan._agreement import tells_ranks
from longspan._arguments import (
    as_text,
    check_flags,
    check_number,
    check_optional_tensors,
    check_tensors,
    check_whole,
    is_dense,
    said,
    wrong,
)
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
            raise wrong("AttentionLayout", "owners", owners, "an Ownership, or what shard returned")
        self.tensor = _C.attention_layout(ownership, masks_of("AttentionLayout", mask))

    @staticmethod
    def of_tensor(tensor: torch.Tensor) -> AttentionLayout:
        """The one that has this tensor inside."""
        made = AttentionLayout.__new__(AttentionLayout)
        made.tensor = tensor
        return made

    @property
    def ownership(self) -> _C.Ownership:
        return self._values()[0]

    @property
    def masks(self) -> list[_C.Mask]:
        """One for all rows, or one for each."""
        return self._values()[1]

    def _values(self) -> tuple[_C.Ownership, list[_C.Mask]]:
        check_tensors("AttentionLayout", tensor=self.tensor)
        if self.tensor.dtype != torch.int64:
            raise wrong("AttentionLayout", "tensor", self.tensor, "the int64 tensor of one")
        return _C.attention_layout_values(self.tensor)

    def __repr__(self) -> str:
        try:
            return f"AttentionLayout({self.ownership}, {self.masks})"
        except (RuntimeError, ValueError, TypeError):  # traced, or no tensor of ours
            what = tuple(self.tensor.shape) if is_dense(self.tensor) else said(self.tensor)
            return f"AttentionLayout({what})"


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
    if not isinstance(mask, (_C.Mask, Iterable)) or isinstance(mask, torch.Tensor):
        raise wrong(who, "mask", mask, "a Mask, or one a row")
    try:
        masks = [mask] if isinstance(mask, _C.Mask) else list(mask)
    except TypeError:  # arrays without axes call themselves iterable
        raise wrong(who, "mask", mask, "a Mask, or one a row") from None
    for one in masks:
        if not isinstance(one, _C.Mask):
            raise TypeError(f"{who}: `mask` holds {said(one)}; expected a Mask, or one a row")
    return masks


def layout_named(who: str, layout: Any) -> _C.NamedLayout:
    """What the name of a layout stands for; a TypeError where it is none and no
    `Ownership`, which callers have looked for."""
    if not isinstance(layout, str):
        raise wrong(who, "layout", layout, "the name of a layout, or an Ownership")
    return _C.layout_named(who, as_text(layout))


def check_ownership(who: str, ownership: Any) -> None:
    """For functions that take no names, since nothing tells them of tokens and ranks."""
    if not isinstance(ownership, _C.Ownership):
        raise wrong(who, "ownership", ownership, "an Ownership")


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
        raise wrong(who, "attention", attention, "an AttentionLayout")
    if not isinstance(attention.tensor, torch.Tensor):
        raise wrong(who, "attention.tensor", attention.tensor, "a tensor")
    return attention.tensor


@tells_ranks
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
    check_tensors("attend", q=q, k=k, v=v)
    check_optional_tensors("attend", sink=sink)
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            check_number("attend", name, number)
    check_number("attend", "dropout_p", dropout_p)
    check_flags("attend", return_lse=return_lse)
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
    named, head_ranks = operator_arguments(strategy)
    out, lse = torch.ops.longspan.attend(
        q,
        k,
        v,
        sink,
        attention_tensor("attend", attention),
        1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale,
        0.0 if softcap is None else softcap,
        named,
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
    check_whole("plan", "rank", rank, 0, 2**31 - 1)
    check_whole("plan", "key_heads", key_heads, 1)
    check_whole("plan", "rows", rows, 0)
    return _C.Plan.of(ownership, masks, Strategy.of(strategy), rank, key_heads, rows)
