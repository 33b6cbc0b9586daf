"""Gemma4's ring: N ranks give what the rules give pair by pair, both ways."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat_support import NEMO
from torch import Tensor

import longspan
from longspan import Group, run_ranks
from longspan.compat.nemo import strict

cpa = pytest.importorskip(NEMO + "models.gemma4_moe.cp_attention")

TOKENS, ROWS, HEADS, WIDTH = 24, 2, 4, 6
TYPES, DOCUMENTS, PADS, GROUPS = (
    *("mm_token_type_ids", "_packed_seq_ids", "padding_mask"),
    "_gemma4_vision_group_ids",
)


class Mesh:
    """A mesh axis over a longspan group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def size(self) -> int:
        return self._group.size()

    def get_group(self) -> Group:
        return self._group

    def get_local_rank(self) -> int:
        return self._group.rank()


@dataclasses.dataclass(frozen=True)
class Case:
    """Runs of (value, tokens); a row each, or one for both rows."""

    name: str
    documents: tuple[Any, ...] | None = None
    pads: tuple[Any, ...] | None = None
    groups: tuple[Any, ...] | None = None
    types: tuple[Any, ...] | None = None
    window: int | None = None
    config: str | None = "vision"
    causal: bool = True
    key_heads: int = 2
    in_pieces: bool = False  # no mask of runs says it

    def metadata(self) -> dict[str, Tensor | None]:
        given = {TYPES: self.types, DOCUMENTS: self.documents, PADS: self.pads, GROUPS: self.groups}
        made = {key: None if runs is None else rows_from(runs) for key, runs in given.items()}
        if made[PADS] is not None:
            made[PADS] = made[PADS].bool()
        return made

    def module(self) -> Any:
        config = SimpleNamespace(use_bidirectional_attention=self.config)
        return SimpleNamespace(sliding_window=self.window, config=config)


def rows_from(rows: tuple[Any, ...]) -> Tensor:
    if isinstance(rows[0][0], int):
        rows = (rows, rows)
    full = [[value for value, count in runs for _ in range(count)] for runs in rows]
    assert all(len(row) == TOKENS for row in full), [len(row) for row in full]
    return torch.tensor(full)


ONE_IMAGE = ((-1, 3), (0, 10), (-1, 11))
IMAGES = ((-1, 2), (0, 5), (-1, 1), (1, 6), (2, 3), (-1, 7))

CASES = [
    Case("nothing_known"),
    Case("every_head_its_keys", key_heads=4),
    Case("one_key_head", key_heads=1),
    Case("not_causal", causal=False),
    Case("window", window=5),
    Case("window_of_one", window=1),
    Case("window_longer_than_a_row", window=99),
    Case("window_not_causal", window=5, causal=False),
    Case("documents_across_borders", ((3, 5), (1, 9), (2, 10))),
    Case("documents_of_one_token", tuple((i + 1, 1) for i in range(TOKENS))),
    Case("other_documents_in_each_row", (((1, 24),), ((1, 7), (2, 1), (3, 16)))),
    Case("no_document_at_the_end", ((1, 9), (2, 4), (0, 11))),
    Case("no_document_in_front_and_between", ((0, 3), (1, 8), (-1, 3), (2, 6), (0, 4))),
    Case("no_document_at_all_in_a_row", (((1, 24),), ((0, 24),))),
    Case("pads_at_the_end", pads=((0, 10), (1, 14))),
    Case("pads_in_front", pads=(((1, 13), (0, 11)), ((0, 24),))),
    Case("pads_inside_a_document", pads=((0, 4), (1, 1), (0, 6), (1, 4), (0, 9))),
    Case("nothing_but_pads", pads=(((0, 24),), ((1, 24),))),
    # As the batch makes them: no document on pads, so document 1 comes back after them.
    Case("documents_made_of_pads", ((0, 2), (1, 7), (0, 3), (1, 8), (0, 4)),
         ((1, 2), (0, 7), (1, 3), (0, 8), (1, 4))),
    Case("documents_and_other_pads", ((1, 10), (2, 9), (0, 5)), ((1, 2), (0, 6), (1, 6), (0, 10))),
    # Key 0 is a pad, and queries without a document are none.
    Case("no_document_and_a_pad_in_front", ((1, 3), (0, 6), (2, 15)), ((1, 1), (0, 23))),
    Case("window_and_documents", ((1, 13), (2, 11)), window=4),
    Case("an_image_across_borders", groups=ONE_IMAGE, window=3),
    Case("an_image_over_the_whole_row", groups=((0, 24),), window=2),
    Case("images", groups=IMAGES, window=4),
    Case("images_not_causal", groups=IMAGES, window=3, causal=False),
    Case("images_and_documents", ((1, 6), (2, 7), (3, 11)), groups=IMAGES, window=4),
    Case("images_documents_and_pads", ((1, 6), (2, 7), (0, 2), (3, 9)),
         ((0, 4), (1, 2), (0, 18)), groups=IMAGES, window=4),
    Case("one_number_in_two_documents", ((1, 12), (2, 12)),
         groups=((-1, 2), (0, 7), (-1, 5), (0, 6), (-1, 4)), window=3),
    Case("images_of_a_full_layer", groups=IMAGES),
    Case("images_of_a_causal_model", groups=IMAGES, window=4, config=None),
    Case("images_from_types", types=((0, 3), (1, 8), (0, 2), (2, 5), (1, 1), (0, 5)), window=3),
    Case("images_from_types_in_documents", ((1, 8), (2, 16)),
         types=((0, 3), (1, 8), (0, 2), (2, 5), (1, 1), (0, 5)), window=3),
    Case("groups_outweigh_types", types=((1, 24),), groups=ONE_IMAGE, window=3),
    Case("a_document_in_two_pieces", ((1, 6), (2, 9), (1, 9)), in_pieces=True),
    Case("a_document_in_two_pieces_in_a_window", ((1, 6), (2, 3), (1, 15)), window=9,
         in_pieces=True),
    Case("an_image_in_two_pieces", groups=((0, 5), (-1, 4), (1, 3), (0, 6), (-1, 6)), window=3,
         in_pieces=True),
    Case("all_in_pieces", ((1, 5), (2, 5), (1, 4), (0, 4), (2, 6)), ((0, 7), (1, 2), (0, 15)),
         groups=((0, 5), (1, 6), (0, 6), (-1, 7)), window=4, in_pieces=True),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


@functools.cache
def visible(case: Case) -> tuple[Tensor, Tensor]:
    """[B, T, T] of who sees whom, rule by rule, and [B, T] of rows without output."""
    known = case.metadata()
    groups = known[GROUPS]
    if groups is None and known[TYPES] is not None:
        groups = torch.full((ROWS, TOKENS), -1)
        for row in range(ROWS):
            number = -1
            for t in range(TOKENS):
                if known[TYPES][row, t] in (1, 2):
                    number += t == 0 or known[TYPES][row, t - 1] not in (1, 2)
                    groups[row, t] = number
    seen = torch.zeros(ROWS, TOKENS, TOKENS, dtype=torch.bool)
    empty = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    for row in range(ROWS):
        of = {key: None if t is None else t[row].tolist() for key, t in known.items()}
        group = None if groups is None else groups[row].tolist()
        for q in range(TOKENS):
            for k in range(TOKENS):
                ok = k <= q or not case.causal
                if case.window is not None:
                    ok = ok and q - k < case.window
                    if case.config == "vision" and group is not None:
                        ok = ok or (group[q] == group[k] and group[q] >= 0)
                if of[DOCUMENTS] is not None:
                    ok = ok and of[DOCUMENTS][q] == of[DOCUMENTS][k] and of[DOCUMENTS][q] > 0
                if of[PADS] is not None:
                    ok = ok and not of[PADS][k]
                seen[row, q, k] = ok
            nowhere = of[DOCUMENTS] is not None and of[DOCUMENTS][q] <= 0
            empty[row, q] = nowhere or (of[PADS] is not None and of[PADS][q])
    return seen & ~empty.unsqueeze(-1), empty


@dataclasses.dataclass
class Answer:
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def each(self, other: Answer) -> list[tuple[str, Tensor, Tensor]]:
        fields = [field.name for field in dataclasses.fields(self)]
        return [(name, getattr(self, name), getattr(other, name)) for name in fields]


@dataclasses.dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @staticmethod
    def of(case: Case, dtype: torch.dtype) -> Inputs:
        random = torch.Generator().manual_seed(3)

        def draw(heads: int) -> Tensor:
            shape = (ROWS, heads, TOKENS, WIDTH)
            return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

        return Inputs(draw(HEADS), draw(case.key_heads), draw(case.key_heads), draw(HEADS))

    def dense(self, case: Case, dtype: torch.dtype) -> Answer:
        """All tokens on one rank, every score written out, in `dtype`."""
        seen, empty = visible(case)
        q, k, v = (t.to(dtype).clone().requires_grad_() for t in (self.q, self.k, self.v))
        shared = HEADS // case.key_heads
        keys, values = (t.repeat_interleave(shared, dim=1) for t in (k, v))
        scores = q @ keys.transpose(-1, -2) / math.sqrt(WIDTH)
        scores = scores.masked_fill(~(seen | empty.unsqueeze(-1)).unsqueeze(1), -math.inf)
        weights = torch.softmax(scores, -1).masked_fill(empty[:, None, :, None], 0)
        out = weights @ values
        out.backward(self.dout.to(dtype))
        return Answer(out.detach(), *(t.grad for t in (q, k, v)))


def ring_on(
    group: Group, case: Case, inputs: Inputs, metadata: dict[str, Tensor | None]
) -> tuple[Tensor, ...]:
    """One rank's part, through the function that the hooks call."""
    local = TOKENS // group.size()
    begin = group.rank() * local

    def share(tensor: Tensor, axis: int = 2) -> Tensor:
        return tensor.narrow(axis, begin, local).clone()

    module = case.module()
    module._cp_manual_metadata = {
        key: None if t is None else share(t, 1) for key, t in metadata.items()
    }
    q, k, v = (share(t).requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    out = cpa._gemma4_cp_manual_attention(
        module, q, k, v, cp_mesh=Mesh(group), attn_mask=None, dropout_p=0.0,
        is_causal=case.causal, scale=None, enable_gqa=False, kwargs={},
    )  # fmt: skip
    out.backward(share(inputs.dout))
    return out.detach(), q.grad, k.grad, v.grad


def ring(case: Case, ranks: int, inputs: Inputs) -> Answer:
    parts = run_ranks(
        ranks, lambda group: ring_on(group, case, inputs, case.metadata()), timeout=20
    )
    return Answer(*(torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True)))


@functools.cache
def exact(name: str) -> Answer:
    case = BY_NAME[name]
    return Inputs.of(case, torch.float64).dense(case, torch.float64)


def close(got: Answer, expected: Answer, case: Case) -> None:
    for name, a, b in got.each(expected):
        assert torch.isfinite(a).all(), name
        assert (a - b).abs().max() < 1e-12, name
    _, empty = visible(case)
    nothing = empty[:, None, :, None]
    assert (got.out.masked_select(nothing) == 0).all()
    assert (got.dq.masked_select(nothing) == 0).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_give_what_the_rules_give(case, ranks, monkeypatch):
    attended = []
    monkeypatch.setattr(
        cpa, "attend", lambda *args, **kw: attended.append(1) or longspan.attend(*args, **kw)
    )
    close(ring(case, ranks, Inputs.of(case, torch.float64)), exact(case.name), case)
    assert len(attended) == (0 if case.in_pieces else ranks)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_replaced_chunk_function_is_called_and_gives_the_same(case, ranks, monkeypatch):
    own, calls = cpa._run_gemma4_flex_chunk, []

    def chunk(module, ctx, *, key_chunk, value_chunk, metadata_chunk, kv_global_start):
        calls.append((ctx.cp_rank, kv_global_start // ctx.seq_local))
        return own(
            module, ctx, key_chunk=key_chunk, value_chunk=value_chunk,
            metadata_chunk=metadata_chunk, kv_global_start=kv_global_start,
        )  # fmt: skip

    monkeypatch.setattr(cpa, "_run_gemma4_flex_chunk", chunk)
    close(ring(case, ranks, Inputs.of(case, torch.float64)), exact(case.name), case)
    for rank in range(ranks):
        owners = [(rank - step) % ranks for step in range(ranks)]
        # Once forward and once more backward, in the order of the ring.
        assert [owner for r, owner in calls if r == rank] == owners * 2


HALF = ["nothing_known", "images_documents_and_pads", "documents_made_of_pads", "all_in_pieces"]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HALF)
def test_errs_at_most_twice_as_much_as_one_rank_in_plain(name, dtype, ranks):
    case = BY_NAME[name]
    inputs = Inputs.of(case, dtype)
    truth = inputs.dense(case, torch.float64)
    plain = inputs.dense(case, dtype)
    got = ring(case, ranks, inputs)
    for (part, a, b), (_, p, _) in zip(got.each(truth), plain.each(truth), strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= 2 * (p - b).abs().max(), part


def test_segments_asked_for_give_the_same():
    case = BY_NAME["documents_across_borders"]
    inputs = Inputs.of(case, torch.float64)

    def rank(group):
        local = TOKENS // group.size()
        module = case.module()
        cpa.attach_gemma4_cp_ring_attention(module, use_ffpa=True)
        begin = group.rank() * local
        module._cp_manual_metadata = {DOCUMENTS: case.metadata()[DOCUMENTS].narrow(1, begin, local)}
        q, k, v = (t.narrow(2, begin, local) for t in (inputs.q, inputs.k, inputs.v))
        return module.run_cp_manual_attention(
            q, k, v, cp_mesh=Mesh(group), attn_mask=None, dropout_p=0.0, is_causal=True,
            scale=None, enable_gqa=False, kwargs={},
        )  # fmt: skip

    out = torch.cat(run_ranks(2, rank), dim=2)
    assert (out - exact(case.name).out).abs().max() < 1e-12


TYPES_ALONE = BY_NAME["images_from_types"]


def test_strict_numbers_images_of_each_shard_alone():
    inputs = Inputs.of(TYPES_ALONE, torch.float64)

    def rank(group):
        with strict():
            return ring_on(group, TYPES_ALONE, inputs, TYPES_ALONE.metadata())

    got = Answer(*(torch.cat(parts, dim=2) for parts in zip(*run_ranks(3, rank), strict=True)))
    shards = TYPES_ALONE.metadata()[TYPES].unflatten(1, (3, -1))
    numbers = torch.stack([cpa.gemma4_vision_group_ids(t) for t in shards.unbind(1)], dim=1)
    runs = tuple(tuple((int(n), 1) for n in row) for row in numbers.flatten(1))
    local = dataclasses.replace(TYPES_ALONE, types=None, groups=runs)
    expected = inputs.dense(local, torch.float64)
    close(got, expected, local)
    assert (got.out - exact(TYPES_ALONE.name).out).abs().max() > 1e-3


def test_a_replaced_chunk_function_gets_numbers_of_whole_rows(monkeypatch):
    seen = {}

    def chunk(module, ctx, *, key_chunk, value_chunk, metadata_chunk, kv_global_start):
        seen[kv_global_start] = metadata_chunk[GROUPS][0].tolist()
        return torch.zeros_like(ctx.query), ctx.query[..., 0], None, 8

    monkeypatch.setattr(cpa, "_run_gemma4_flex_chunk", chunk)
    inputs = Inputs.of(TYPES_ALONE, torch.float64)

    def rank(group):
        local = TOKENS // group.size()
        begin = group.rank() * local
        module = TYPES_ALONE.module()
        module._cp_manual_metadata = {TYPES: TYPES_ALONE.metadata()[TYPES].narrow(1, begin, local)}
        q, k, v = (t.narrow(2, begin, local) for t in (inputs.q, inputs.k, inputs.v))
        cpa._gemma4_cp_manual_attention(
            module, q, k, v, cp_mesh=Mesh(group), attn_mask=None, dropout_p=0.0,
            is_causal=True, scale=None, enable_gqa=False, kwargs={},
        )  # fmt: skip

    run_ranks(3, rank)
    whole = cpa.gemma4_vision_group_ids(TYPES_ALONE.metadata()[TYPES])[0].tolist()
    assert [n for begin in sorted(seen) for n in seen[begin]] == whole


def context(group: Group, case: Case, metadata: dict[str, Tensor | None], **more: Any) -> Any:
    local = TOKENS // group.size()
    begin = group.rank() * local
    inputs = Inputs.of(case, torch.float64)
    q, k, v = (t.narrow(2, begin, local) for t in (inputs.q, inputs.k, inputs.v))
    made = cpa.CPRingAttentionContext(
        module=case.module(), query=q, key=k, value=v, cp_mesh=None, cp_group=group,
        cp_size=group.size(), cp_rank=group.rank(), seq_local=local, seq_full=TOKENS,
        seq_global_start=begin, attn_mask=None, dropout_p=0.0, is_causal=True, scale=None,
        enable_gqa=True, kwargs={}, metadata=metadata, metadata_seq_dims={},
    )  # fmt: skip
    return cpa.replace(made, **more)


def test_metadata_is_gathered_once_and_again_when_it_changed(monkeypatch):
    masks = pytest.importorskip(NEMO + "models.gemma4_moe._ring_masks")
    gathered = []
    gather = masks._gather
    monkeypatch.setattr(masks, "_gather", lambda *a: gathered.append(1) or gather(*a))
    case = BY_NAME["documents_across_borders"]
    documents = case.metadata()[DOCUMENTS]
    pads = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    metadata = {DOCUMENTS: documents, PADS: pads}

    def run(**more: Any) -> Tensor:
        return cpa._run_gemma4_cp_ring_attention(None, context(Group(), case, metadata, **more))

    first = run()
    assert torch.equal(run(is_causal=True), first)
    run(is_causal=False)
    assert len(gathered) == 1
    pads[:, 5] = True
    changed = run()
    assert len(gathered) == 2
    assert not torch.equal(changed, first)
    metadata[PADS] = pads.clone()
    assert torch.equal(run(), changed)
    assert len(gathered) == 3
    with strict():
        run()
    assert len(gathered) == 4
    with torch.inference_mode():
        metadata[PADS] = pads.clone()
        run(), run()
    assert len(gathered) == 6
    known = len(masks._known)
    metadata.clear()
    del documents
    assert len(masks._known) == known - 1


def test_ranks_with_other_metadata_are_told_so():
    case = BY_NAME["documents_across_borders"]

    def rank(group):
        shape = (ROWS, TOKENS // 2)
        metadata = {DOCUMENTS: torch.ones(shape, dtype=torch.int64)}
        if group.rank() == 1:
            metadata[PADS] = torch.zeros(shape, dtype=torch.bool)
        cpa._run_gemma4_cp_ring_attention(case.module(), context(group, case, metadata))

    with pytest.raises(ValueError, match=r"rank 0 has _packed_seq_ids; rank 1 has .*padding_mask"):
        run_ranks(2, rank)


def test_forward_alone_keeps_no_graph_and_sets_the_flag(monkeypatch):
    monkeypatch.setattr(cpa, "_GEMMA4_CP_FLEX_RING_OK_LOGGED", False)
    case = BY_NAME["documents_across_borders"]
    ctx = context(Group(), case, case.metadata())
    ctx = cpa.replace(ctx, query=ctx.query.clone().requires_grad_())
    out = cpa._run_gemma4_cp_ring_attention_forward(ctx.module, ctx)
    assert not out.requires_grad
    assert (out - exact(case.name).out).abs().max() < 1e-12
    assert cpa._GEMMA4_CP_FLEX_RING_OK_LOGGED is True


@pytest.mark.parametrize(
    "run", [cpa._run_gemma4_cp_ring_attention, cpa._run_gemma4_cp_ring_attention_forward]
)
def test_refuses_dropout_and_a_ring_without_chunks(run, monkeypatch):
    case = BY_NAME["nothing_known"]
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1"):
        run(case.module(), context(Group(), case, {}, dropout_p=0.1))
    monkeypatch.setattr(cpa, "_collect_ring_kv_chunks", lambda ctx: [])
    with pytest.raises(RuntimeError, match="no output chunks"):
        run(case.module(), context(Group(), case, {}))


def test_refuses_what_does_not_fit():
    case = BY_NAME["nothing_known"]
    run = cpa._run_gemma4_cp_ring_attention
    short = {PADS: torch.zeros(ROWS, TOKENS - 1)}
    with pytest.raises(ValueError, match=r"^_run_gemma4_cp_ring_attention: `padding_mask` is \[2"):
        run(case.module(), context(Group(), case, short))
    with pytest.raises(ValueError, match="`sliding_window` is 0"):
        run(SimpleNamespace(sliding_window=0), context(Group(), case, {}))
    q = torch.ones(1, 2, 4, 8)
    how = dict(cp_mesh=Mesh(Group()), attn_mask=None, dropout_p=0.0, is_causal=True)
    how |= dict(scale=None, enable_gqa=False, kwargs={})
    with pytest.raises(ValueError, match=r"^_gemma4_cp_manual_attention: `query` is \[2, 4, 8\]"):
        cpa._gemma4_cp_manual_attention(case.module(), q[0], q, q, **how)
    with pytest.raises(ValueError, match="`query`, `key` and `value` have 4, 3 and 4 tokens"):
        cpa._gemma4_cp_manual_attention(case.module(), q, q[:, :, 1:], q, **how)
