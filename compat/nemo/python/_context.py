"""The context that shards buffers while it is entered."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from longspan import _C
from longspan._agreement import tell_unless_known
from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import Mesh, check_axis, mesh_size, shape_of, tensor_at
from longspan.compat.nemo._ranks import STRATEGIES, AttentionInContext, group_of, leave


class TokenShardContext:
    """While entered, buffers are this rank's shards, and attention is over ranks.

    The very tensor objects become shards; their old memory is left alone, so that
    views of it keep what they show. Leaving, also by an error, ends the attention
    over ranks and gives all buffers but `no_restore` their full tokens back. It
    can be entered once. With one rank there is nothing to shard, and entering
    does nothing.
    """

    def __init__(
        self,
        who: str,
        cp_mesh: Mesh,
        buffers: Sequence[Tensor],
        seq_dims: Sequence[int],
        no_restore: set[Tensor],
        rotate_method: str | None,
        layout: str,
    ) -> None:
        self.cp_mesh = cp_mesh
        self.buffers = list(buffers)
        self.seq_dims = list(seq_dims)
        self.no_restore = no_restore
        self.rotate_method = rotate_method
        self.layout = layout
        self._who = who
        self._entered = False
        self._pads: Tensor | None = None
        self._length: int | None = None
        self._batch: MutableMapping[str, Any] | None = None
        self._attention: AttentionInContext | None = None
        self._restore: list[tuple[Tensor, Tensor]] = []
        self._restore_entries: list[tuple[str, Tensor]] = []

    def hide(self, padding_mask: Tensor | None = None, *, length: int | None = None) -> None:
        """Tells which tokens are pads: nobody sees them, and they see nothing.

        `padding_mask` is [rows, tokens], True = pad; tokens behind its end are pads
        too. Without one, tokens from `length` on are. Read when entering.
        """
        if padding_mask is not None:
            mask = tensor_at(self._who, "padding_mask", padding_mask)
            if mask.dim() != 2:
                raise ValueError(
                    f"{self._who}: `padding_mask` is {shape_of(mask)}; expected [rows, tokens]"
                )
        self._pads, self._length = padding_mask, length

    def replace_in(self, batch: MutableMapping[str, Any]) -> None:
        """Allows buffers that require gradients if they are entries of `batch`: there
        they are replaced by their differentiable share when the context is entered."""
        self._batch = batch

    def __enter__(self) -> None:
        if mesh_size(self.cp_mesh) <= 1:
            return
        if self._entered:
            raise RuntimeError(
                f"{self._who}: the context was entered before, and its buffers are shards "
                "since; make a new one for each batch"
            )
        group = group_of(self._who, self.cp_mesh)
        ownership = self._ownership(group.size())
        entries = self._entries()
        attention = AttentionInContext(
            group, STRATEGIES[self.rotate_method], ownership, self._hidden(ownership.tokens)
        )
        # One object may stand for several, as ids that are their own labels do.
        shares = {
            id(buffer): _nemo.take_share(buffer, ownership, group.rank(), axis % buffer.dim())
            for buffer, axis in zip(self.buffers, self.seq_dims, strict=True)
        }
        # Nothing has changed so far.
        self._entered = True
        kept_local = {id(buffer) for buffer in self.no_restore}
        changed: list[tuple[Tensor, Tensor]] = []
        try:
            for buffer in {id(buffer): buffer for buffer in self.buffers}.values():
                if not buffer.requires_grad:
                    changed.append((buffer, buffer.detach()))
                    buffer.data = shares[id(buffer)]
        except BaseException:
            for buffer, full in changed:
                buffer.data = full
            raise
        self._restore = [(buffer, full) for buffer, full in changed if id(buffer) not in kept_local]
        for key, buffer in entries:
            assert self._batch is not None
            if id(buffer) not in kept_local:
                self._restore_entries.append((key, buffer))
            self._batch[key] = shares[id(buffer)]
        self._attention = attention
        attention.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._attention is None:
            return
        leave(self._attention)
        self._attention = None
        if error is not None:
            tell_unless_known(group_of(self._who, self.cp_mesh), error)
        for buffer, full in self._restore:
            buffer.data = full
        for key, full in self._restore_entries:
            assert self._batch is not None
            self._batch[key] = full
        self._restore, self._restore_entries = [], []

    def _ownership(self, ranks: int) -> _C.Ownership:
        """Who owns which token of the buffers, which must all be of one length."""
        if not self.buffers:
            raise ValueError(f"{self._who}: no buffers, so the number of tokens is unknown")
        tokens = self.buffers[0].shape[check_axis(self._who, self.buffers[0], self.seq_dims[0])]
        seen: dict[int, int] = {}
        for at, (buffer, axis) in enumerate(zip(self.buffers, self.seq_dims, strict=True)):
            first = seen.setdefault(id(buffer), at)
            if axis % buffer.dim() != self.seq_dims[first] % buffer.dim():
                raise ValueError(
                    f"{self._who}: buffer {at} is buffer {first} again, with axis {axis} "
                    f"instead of {self.seq_dims[first]}"
                )
            length = buffer.shape[check_axis(self._who, buffer, axis)]
            if length != tokens:
                raise ValueError(
                    f"{self._who}: buffer {at} is {shape_of(buffer)} with {length} tokens on "
                    f"axis {axis}, but buffer 0 has {tokens}"
                )
        cut = _C.Ownership.head_tail if self.layout == "head-tail" else _C.Ownership.contiguous
        try:
            return cut(tokens, ranks)
        except ValueError as refused:
            _, _, why = str(refused).partition(": ")
            raise ValueError(f"{self._who}: {why}") from None

    def _entries(self) -> list[tuple[str, Tensor]]:
        """Buffers that cannot become shards in place, with their keys in the batch."""
        entries = []
        for at, buffer in enumerate(self.buffers):
            if not buffer.requires_grad:
                continue
            keys = [key for key, value in (self._batch or {}).items() if value is buffer]
            if not keys:
                raise ValueError(
                    f"{self._who}: buffer {at} requires gradients and cannot become a shard in "
                    "place; pass it to make_cp_batch_and_ctx in the batch, as `inputs_embeds`, "
                    "whose share is differentiable"
                )
            entries += [(key, buffer) for key in keys]
        return entries

    def _hidden(self, tokens: int) -> list[list[tuple[int, int]]]:
        """Ranges of pads: none, those of all rows, or those of each row."""
        if self._pads is None:
            length = tokens if self._length is None else self._length
            return [[(length, tokens)]] if length < tokens else []
        pads = self._pads.detach().to("cpu", torch.bool)
        if pads.shape[1] > tokens:
            raise ValueError(
                f"{self._who}: `padding_mask` is {shape_of(pads)} but the buffers have "
                f"{tokens} tokens"
            )
        pads = _nemo.pad_tokens(pads, 1, tokens - pads.shape[1], True)
        ranges = [_ranges(row) for row in pads]
        if all(row == ranges[0] for row in ranges):
            return ranges[:1] if ranges and ranges[0] else []
        return ranges


def _ranges(pads: Tensor) -> list[tuple[int, int]]:
    """Where a row of pads is True, as half-open ranges."""
    edge = torch.zeros(1, dtype=torch.int8)
    steps = torch.diff(torch.cat([edge, pads.to(torch.int8), edge]))
    begins = (steps > 0).nonzero().flatten().tolist()
    ends = (steps < 0).nonzero().flatten().tolist()
    return list(zip(begins, ends, strict=True))
