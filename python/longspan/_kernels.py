"""Which kernel computes what, and why a faster one does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longspan import _C
from longspan._arguments import (
    check_choice,
    check_number,
    check_tensors,
    check_whole,
    speaking_as,
)
from longspan._attention import masks_of

#: Operations on selected keys, and what kernels call their work.
_SELECTED = {
    "attend_selected": "forward",
    "attend_selected_backward": "backward",
    "selected_weights": "weights",
}
_INDEXER = {
    "select_keys": "select",
    "score_selected": "score",
    "score_selected_backward": "score_backward",
}
_OPERATIONS = ("attend", *_SELECTED, *_INDEXER)


def which_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    third: torch.Tensor,
    /,
    operation: str = "attend",
    *,
    mask: _C.Mask | Sequence[_C.Mask] | None = None,
    softcap: float | None = None,
    value_dim: int | None = None,
    slots: int | None = None,
) -> str:
    """Which kernel computes such a call on one rank, and why a faster one does
    not: "avx512", "hopper", "flash, not cudnn: it takes no windows", "ampere, not hopper:
    elements are not bfloat16". "torch" stands for its operators on some queries at a time.

    The tensors are those of the operation: ``q, k, v`` for "attend", with its `mask`
    (causal by default) and `softcap`; ``q, kv, indices`` for "attend_selected",
    "attend_selected_backward" and "selected_weights", with `value_dim`; ``q, k, weights`` of
    an indexer for "select_keys", "score_selected" and "score_selected_backward", with
    `slots`.
    """
    check_choice("which_kernel", "operation", operation, _OPERATIONS)
    check_tensors("which_kernel", q=q, k=k, third=third)
    for name, whole in (("value_dim", value_dim), ("slots", slots)):
        if whole is not None:
            check_whole("which_kernel", name, whole)
    if softcap is not None:
        check_number("which_kernel", "softcap", softcap)
    given = {"mask": mask, "softcap": softcap, "value_dim": value_dim, "slots": slots}
    taken: tuple[str, ...] = ("mask", "softcap")
    if operation in _SELECTED:
        taken = ("value_dim",)
    elif operation in _INDEXER:
        taken = ("slots",)
    for name, value in given.items():
        if value is not None and name not in taken:
            raise ValueError(f"which_kernel: {operation} has no `{name}`; leave it out")
    if operation in _SELECTED:
        work = _SELECTED[operation]
        with speaking_as("which_kernel", "which_selected_kernel"):
            return _C.which_selected_kernel(q, k, third, value_dim or 0, work)
    if operation in _INDEXER:
        if slots is None:
            raise ValueError(f"which_kernel: {operation} needs `slots`, the keys of a query")
        with speaking_as("which_kernel", "which_indexer_kernel"):
            return _C.which_indexer_kernel(q, k, third, slots, _INDEXER[operation])
    masks = masks_of("which_kernel", mask)
    return _C.which_kernel(q, k, third, masks, 0.0 if softcap is None else softcap)
