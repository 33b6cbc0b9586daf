"""The context that shards buffers while it is entered."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from torch import Tensor

from longspan.compat.nemo._batch import Mesh, mesh_size


class TokenShardContext:
    """Shards buffers and rings attention while entered; built, not yet enterable.

    With one rank there is nothing to shard, and entering does nothing.
    """

    def __init__(
        self,
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

    def __enter__(self) -> None:
        if mesh_size(self.cp_mesh) > 1:
            raise NotImplementedError(
                "create_context_parallel_ctx: entering the context comes with attention over ranks"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None
