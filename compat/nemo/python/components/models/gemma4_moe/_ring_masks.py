"""What the side tensors of a batch say, as masks that attention over ranks takes.

The ranks gather their document ids, vision groups and pads in one small exchange,
and every rank then makes the same masks of the whole rows. That is done once for
each set of side tensors: the answer is kept for as long as the first of them lives,
found by the tensors themselves (never by an address) and by their versions. So a
tensor that is passed again must be passed again by all ranks, and edited in place by
all or none, as in any program that all ranks run alike.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from longspan import AttentionLayout, Group, Mask, Ownership, Packing
from longspan.comm import all_gather_tokens
from longspan.compat.nemo._batch import check_row_matrix
from longspan.compat.nemo._strict import is_strict

METADATA_KEYS = (
    "mm_token_type_ids",
    "_packed_seq_ids",
    "padding_mask",
    "_gemma4_vision_group_ids",
)
TYPES, DOCUMENTS, PADS, GROUPS = METADATA_KEYS

Metadata = Mapping[str, Tensor | None]

# Bits of the third gathered number: which tensors a rank has, and whether the
# token is a pad.
_PRESENT = {key: 1 << bit for bit, key in enumerate(METADATA_KEYS)}
_ANY_PRESENT = sum(_PRESENT.values())
_PAD = _ANY_PRESENT + 1


def vision_group_ids(types: Tensor) -> Tensor:
    """Runs of vision tokens (types 1 and 2), numbered 0, 1, ... in each row; -1
    elsewhere."""
    vision = (types == 1) | (types == 2)
    left = torch.zeros_like(vision)
    left[..., 1:] = vision[..., :-1]
    numbers = (vision & ~left).cumsum(dim=-1) - 1
    return numbers.masked_fill(~vision, -1)


def window_of(module: Any) -> int | None:
    """The layer's sliding window, itself included."""
    window = getattr(module, "sliding_window", None)
    return None if window is None else int(window)


def sees_vision_groups(module: Any) -> bool:
    """Whether tokens of one image see each other both ways in this layer."""
    config = getattr(module, "config", None)
    both_ways = getattr(config, "use_bidirectional_attention", None) == "vision"
    return both_ways and window_of(module) is not None


@dataclasses.dataclass
class Rows:
    """The whole rows' side tensors, [B, T] on the CPU, and what was made of them."""

    tokens: int
    documents: Tensor | None
    groups: Tensor | None
    pads: Tensor | None
    layouts: dict[Any, AttentionLayout | None] = dataclasses.field(default_factory=dict)

    def layout(self, ranks: int, module: Any, causal: bool) -> AttentionLayout | None:
        """For `longspan.attend`; None where no mask of runs says the same."""
        window = window_of(module)
        if window is not None and window < 1:
            raise ValueError(
                f"layout: `sliding_window` is {window}, so no token sees itself; expected 1 or "
                "more, or None"
            )
        groups = self.groups if sees_vision_groups(module) else None
        key = (ranks, window, causal, groups is None)
        if key not in self.layouts:
            band = (None if window is None else window - 1, 0 if causal else None)
            masks = self._masks(groups, band)
            owners = Ownership.contiguous(self.tokens, ranks)
            self.layouts[key] = None if masks is None else AttentionLayout(owners, masks)
        return self.layouts[key]

    def _masks(
        self, groups: Tensor | None, band: tuple[int | None, int | None]
    ) -> list[Mask] | None:
        given = [t for t in (self.documents, groups, self.pads) if t is not None]
        if not given:
            return [Mask.banded(Packing.single(self.tokens), *band)]
        masks = []
        for row in range(given[0].shape[0]):
            documents, group, pads = (
                None if t is None else t[row] for t in (self.documents, groups, self.pads)
            )
            mask = mask_of_row(self.tokens, documents, group, pads, band)
            if mask is None:
                return None
            masks.append(mask)
        return masks


def mask_of_row(
    tokens: int,
    documents: Tensor | None,
    groups: Tensor | None,
    pads: Tensor | None,
    band: tuple[int | None, int | None],
) -> Mask | None:
    """None when the tokens of a document, or of a group inside one, are not one run.

    Pads and tokens of no document may lie anywhere: they neither see nor are seen.
    """
    seen = torch.ones(tokens, dtype=torch.bool)
    if documents is not None:
        seen &= documents > 0
    if pads is not None:
        seen &= ~pads
    at = seen.nonzero().squeeze(1)
    if at.numel() == 0:
        return Mask.banded(Packing.of([0], [tokens]), *band)

    ids = torch.zeros_like(at) if documents is None else documents[at]
    begins, ends = _runs(ids.unsqueeze(0))
    if not _distinct(ids[begins].unsqueeze(0)):
        return None
    first, last = at[begins], at[ends - 1]
    # A slot reaches to the next document; what lies before the first is an empty one.
    slots = [int(first[0]), *torch.diff(first, append=torch.tensor([tokens])).tolist()]
    lengths = [0, *(last + 1 - first).tolist()]
    mask = Mask.banded(Packing.of(lengths, slots), *band)

    gaps = ((torch.diff(at) > 1) & (torch.diff(ids) == 0)).nonzero().squeeze(1)
    if gaps.numel() > 0:
        mask = mask.with_hidden(_ranges(at[gaps] + 1, at[gaps + 1]))
    if groups is None:
        return mask

    numbered = torch.stack([ids, groups[at]])
    begins, ends = _runs(numbered)
    vision = numbered[1, begins] >= 0
    begins, ends = begins[vision], ends[vision]
    if not _distinct(numbered[:, begins]):
        return None
    return mask.with_groups(_ranges(at[begins], at[ends - 1] + 1)) if begins.numel() else mask


def _runs(columns: Tensor) -> tuple[Tensor, Tensor]:
    """First and one past the last index of every run of equal columns."""
    change = (columns[:, 1:] != columns[:, :-1]).any(dim=0).nonzero().squeeze(1) + 1
    edges = torch.cat([change.new_zeros(1), change, change.new_tensor([columns.shape[1]])])
    return edges[:-1], edges[1:]


def _distinct(columns: Tensor) -> bool:
    return bool(torch.unique(columns, dim=1).shape[1] == columns.shape[1])


def _ranges(begins: Tensor, ends: Tensor) -> list[tuple[int, int]]:
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def check_metadata(who: str, metadata: Metadata, rows: int, tokens: int) -> dict[str, Tensor]:
    """The tensors that are there, each [rows, tokens]."""
    return {
        key: check_row_matrix(who, key, metadata[key], rows, tokens)
        for key in METADATA_KEYS
        if metadata.get(key) is not None
    }


def rows_of(who: str, metadata: Metadata, like: Tensor, group: Group) -> Rows:
    """What the metadata of all ranks says; all ranks call, with queries `like`
    [B, H, L, D] on the device that the group talks over."""
    present = check_metadata(who, metadata, like.shape[0], like.shape[2])
    if not _kept_by_tensor(present):
        return _gather(present, like, group)
    first, *others = present.values()
    key = (group.name, is_strict(), tuple(present))
    versions = [t._version for t in present.values()]
    with _lock:
        entries = _known.setdefault(first, {})
        found = entries.get(key)
    if found is not None and found.is_of(others, versions):
        return found.rows  # type: ignore[no-any-return]
    rows = _gather(present, like, group)
    with _lock:
        entries[key] = _Entry([weakref.ref(t) for t in others], versions, rows)
    return rows


@dataclasses.dataclass(frozen=True)
class _Entry:
    others: list[weakref.ref[Tensor]]
    versions: list[int]
    rows: Rows

    def is_of(self, others: list[Tensor], versions: list[int]) -> bool:
        same = all(known() is other for known, other in zip(self.others, others, strict=True))
        return same and self.versions == versions


_lock = threading.Lock()
_known: Any = WeakTensorKeyDictionary()


def _kept_by_tensor(present: Mapping[str, Tensor]) -> bool:
    # Tensors of inference mode have no version.
    return bool(present) and not any(t.is_inference() for t in present.values())


def _gather(present: Mapping[str, Tensor], like: Tensor, group: Group) -> Rows:
    batch, local = like.shape[0], like.shape[2]
    types, groups = present.get(TYPES), present.get(GROUPS)
    if groups is None and types is not None and is_strict():
        groups = vision_group_ids(types)
    # One shape whatever tensors a rank has, so that a rank whose tensors differ from
    # the others' gets an error instead of waiting.
    share = torch.zeros(batch, local, 3, dtype=torch.int64, device=like.device)
    if DOCUMENTS in present:
        share[..., 0] = present[DOCUMENTS]
    numbers = types if groups is None else groups
    if numbers is not None:
        share[..., 1] = numbers
    share[..., 2] = sum(_PRESENT[key] for key in present)
    if PADS in present:
        share[..., 2] += present[PADS].to(torch.bool) * _PAD
    sizes = [local] * group.size()
    whole = all_gather_tokens(share, axis=1, sizes=sizes, group=group).cpu()

    _check_presence(whole[..., 2] & _ANY_PRESENT, group.size())
    documents, whole_groups, flags = whole.unbind(-1)
    if groups is None:
        whole_groups = vision_group_ids(whole_groups)
    return Rows(
        tokens=local * group.size(),
        documents=documents if DOCUMENTS in present else None,
        groups=None if numbers is None else whole_groups,
        pads=flags >= _PAD if PADS in present else None,
    )


def _check_presence(bits: Tensor, ranks: int) -> None:
    if bits.numel() == 0:
        return
    of_rank = bits[0].reshape(ranks, -1)[:, 0].tolist()
    if len(set(of_rank)) > 1:
        has = "; ".join(
            f"rank {rank} has "
            + (", ".join(key for key, bit in _PRESENT.items() if bits & bit) or "none")
            for rank, bits in enumerate(of_rank)
        )
        raise ValueError(f"metadata: every rank needs the same side tensors, but {has}")
