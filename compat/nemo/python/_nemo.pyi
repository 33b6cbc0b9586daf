import torch

from longspan import Ownership

def pad_tokens(
    tensor: torch.Tensor, axis: int, count: int, value: int | float | bool
) -> torch.Tensor: ...
def continue_positions(positions: torch.Tensor, axis: int, count: int) -> torch.Tensor: ...
def take_share(
    tensor: torch.Tensor, ownership: Ownership, rank: int, axis: int
) -> torch.Tensor: ...
def thd_lengths(
    seq_lens: torch.Tensor,
    seq_lens_padded: torch.Tensor | None,
    sentinel: int,
    rows: int,
    row_length: int,
    strict: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]: ...
def document_partition(
    cu: torch.Tensor, total: int, ranks: int, rank: int, strict: bool
) -> torch.Tensor: ...
def padded_windows(
    cu: torch.Tensor, cu_padded: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...
def compact_windows(cu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
def pads_of_mask(mask: torch.Tensor, strict: bool) -> torch.Tensor: ...
def dense_causal_mask(
    position_ids: torch.Tensor,
    key_len: int,
    dtype: torch.dtype,
    pad_full: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor: ...
