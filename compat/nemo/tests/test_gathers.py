"""Gathers over real ranks: what comes back, and where its gradient goes."""

import batch_oracle as oracle
import pytest
import torch
from compat_support import RankMesh, cp_utils, dsv4, glm, packed_batch, row_batch

from longspan import run_ranks

RANKS = [1, 2, 3, 4]
GATHERS = [glm.glm_dsa_cp_all_gather, dsv4.dsv4_cp_all_gather]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("gather", GATHERS, ids=["glm", "dsv4"])
def test_activations_join_and_gradients_sum_over_the_ranks(ranks, dim, gather):
    def work(group):
        mine = torch.full((2, 3, 4), float(group.rank())).transpose(0, 2).requires_grad_()
        full = gather(mine, dim=dim, cp_group=group)
        assert (full is mine) == (ranks == 1)
        weights = torch.arange(full.numel()).view(full.shape) * (group.rank() + 1.0)
        (full * weights).sum().backward()
        return full.detach(), weights, mine.grad

    results = run_ranks(ranks, work)
    whole = torch.cat([torch.full((4, 3, 2), float(rank)) for rank in range(ranks)], dim)
    summed = sum(weights for _, weights, _ in results).chunk(ranks, dim)
    for rank, (full, _, grad) in enumerate(results):
        assert torch.equal(full, whole)
        assert torch.equal(grad, summed[rank])


@pytest.mark.parametrize("ranks", RANKS)
def test_metadata_joins_without_gradient(ranks):
    def work(group):
        gather = dsv4.dsv4_cp_all_gather_metadata
        assert gather(None, dim=1, cp_group=group) is None
        ids = torch.tensor([[group.rank(), -1]])
        scores = torch.ones(1, 2, requires_grad=True)
        if ranks > 1:
            assert not gather(scores, dim=1, cp_group=group).requires_grad
        assert dsv4.dsv4_cp_rank(group) == group.rank()
        assert dsv4.dsv4_cp_size(group) == ranks
        return gather(ids, dim=1, cp_group=group), gather(ids < 0, dim=1, cp_group=group)

    for ids, flags in run_ranks(ranks, work):
        assert ids.tolist() == [[x for rank in range(ranks) for x in (rank, -1)]]
        assert flags.tolist() == [[False, True] * ranks]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("window", [None, 3])
def test_dense_mask_hides_the_pads_of_all_ranks(ranks, window):
    pads = torch.zeros(2, 4 * ranks, dtype=torch.bool)
    pads[0, :2] = pads[1, -3:] = True
    positions = torch.arange(4 * ranks).repeat(2, 1)

    def work(group):
        mine = slice(4 * group.rank(), 4 * group.rank() + 4)
        mask = dsv4.build_dsv4_cp_causal_padding_mask(
            position_ids=positions[:, mine],
            key_len=4 * ranks,
            dtype=torch.float32,
            device="cpu",
            cp_group=group,
            padding_mask=pads[:, mine],
            sliding_window=window,
        )
        return mine, mask

    whole = oracle.dense_causal_mask(positions, 4 * ranks, torch.float32, pads, window)
    for mine, mask in run_ranks(ranks, work):
        assert torch.equal(mask, whole[:, :, mine])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("axis", [1, 2, -1])
def test_sequences_come_back_trimmed_and_without_gradient(ranks, axis):
    length = 3 * ranks - 1
    full = torch.arange(2.0 * 12 * 12).view(2, 12, 12)[:, : 3 * ranks, : 3 * ranks]

    def work(group):
        shard = full.narrow(axis, 3 * group.rank(), 3).clone().requires_grad_()
        flags = shard.detach() % 2 == 0
        return cp_utils.gather_cp_seq(RankMesh(group), (shard, flags), axis, length)

    for out, flags in run_ranks(ranks, work):
        assert torch.equal(out, full.narrow(axis, 0, length))
        assert torch.equal(flags, out % 2 == 0)
        assert out.is_contiguous() and not out.requires_grad


def test_sequences_unwrap_distributed_tensors():
    class Wrapped:
        def __init__(self, local):
            self.local = local

        def to_local(self):
            return self.local

    def work(group):
        shard = Wrapped(torch.tensor([[group.rank()]]))
        return cp_utils.gather_cp_seq(RankMesh(group), [shard], 1, 2)[0].tolist()

    assert run_ranks(2, work) == [[[0, 1]]] * 2


def test_sequences_follow_the_context_they_are_gathered_in():
    def work(group):
        ids, positions = torch.arange(8)[None], torch.arange(8)[None]
        buffers = [ids, positions]
        context = cp_utils.create_context_parallel_ctx(RankMesh(group), buffers, [1, 1], set())
        with context:
            out = cp_utils.gather_cp_seq(RankMesh(group), buffers, 1, 7)
            with pytest.raises(ValueError, match=r"3 tokens on axis 1, but shards.* have 4"):
                cp_utils.gather_cp_seq(RankMesh(group), [torch.ones(1, 3)], 1, 3)
        plain = cp_utils.gather_cp_seq(RankMesh(group), [torch.tensor([group.rank()])], 0, 2)
        return [t.tolist() for t in (*out, *plain)]

    row = [list(range(7))]
    assert run_ranks(2, work) == [[row, row, [0, 1]]] * 2


def test_batch_functions_ask_such_a_group_for_the_rank():
    def work(group):
        mesh, rank = RankMesh(group), group.rank()
        _, rows = dsv4.make_dsv4_contiguous_shard_cp_batch_and_ctx(mesh, None, row_batch(length=4))
        assert rows["input_ids"].tolist() == [[2 * rank + 1, 2 * rank + 2]]
        assert rows["_dsv4_cp_group"] is group
        packed = packed_batch([[1, 2, 3, 4]], [[4]], [[4]])
        _, stream = glm.make_glm_dsa_packed_cp_batch_and_ctx(mesh, None, packed)
        assert stream["input_ids"].tolist() == [2 * rank + 1, 2 * rank + 2]
        stream = cp_utils.make_cp_batch_for_te(mesh, packed)
        assert stream["input_ids"].tolist() == [[1, 4], [2, 3]][rank]

    run_ranks(2, work)


def test_gathers_name_a_bad_axis():
    def work(group):
        for name, call in (
            ("glm_dsa_cp_all_gather", glm.glm_dsa_cp_all_gather),
            ("dsv4_cp_all_gather", dsv4.dsv4_cp_all_gather),
            ("dsv4_cp_all_gather_metadata", dsv4.dsv4_cp_all_gather_metadata),
        ):
            with pytest.raises(ValueError, match=f"^{name}: axis 3 of a tensor"):
                call(torch.ones(2, 2), dim=3, cp_group=group)
        with pytest.raises(ValueError, match=r"^gather_cp_seq: cannot keep 5 tokens.* and 2 ranks"):
            cp_utils.gather_cp_seq(RankMesh(group), [torch.ones(2, 2)], 1, 5)

    run_ranks(2, work)
