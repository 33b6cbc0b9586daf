"""On a device: the same answers as on the host, and at most one read."""

import pytest
import torch
from compat_support import DeviceMesh, Mesh, cp_utils, dsv4, gemma4, glm, packed_batch, row_batch

pytestmark = pytest.mark.cuda


def packed():
    return packed_batch(
        [[1, 2, 3, 0, 5, 6, 0, 0], [1, 2, 3, 4, 5, 6, 7, 0]],
        [[3, 2], [7, -1000]],
        [[4, 4], [8, -1000]],
    )


def additive():
    mask = torch.full((2, 1, 7, 7), -1.0).triu(1)
    mask[..., 6, 6] = -1.0
    return mask


CASES = {
    "head-tail": (
        lambda: row_batch(2, 7, attention_mask=torch.tensor([[1] * 6 + [0]] * 2)),
        lambda b: cp_utils.make_cp_batch_and_ctx(DeviceMesh(cp=2), b)[1],
    ),
    "additive head-tail": (
        lambda: row_batch(2, 7, attention_mask=additive()),
        lambda b: cp_utils.make_cp_batch_and_ctx(DeviceMesh(cp=2), b)[1],
    ),
    "te": (packed, lambda b: cp_utils.make_cp_batch_for_te(Mesh(2), b)),
    "te in chunks": (packed, lambda b: cp_utils.make_cp_batch_for_te(Mesh(2), b, num_chunks=2)),
    "glm": (packed, lambda b: glm.make_glm_dsa_packed_cp_batch_and_ctx(Mesh(2), None, b)[1]),
    "glm in chunks": (
        packed,
        lambda b: glm.make_glm_dsa_packed_cp_batch_and_ctx(Mesh(2), None, b, num_chunks=2)[1],
    ),
    "dsv4": (
        lambda: row_batch(2, 7),
        lambda b: dsv4.make_dsv4_contiguous_shard_cp_batch_and_ctx(Mesh(2), None, b)[1],
    ),
    "additive dsv4": (
        lambda: row_batch(2, 7, attention_mask=additive()),
        lambda b: dsv4.make_dsv4_contiguous_shard_cp_batch_and_ctx(Mesh(2), None, b)[1],
    ),
    "additive gemma4": (
        lambda: row_batch(2, 7, attention_mask=additive()),
        lambda b: gemma4.make_contiguous_shard_cp_batch_and_ctx(Mesh(2), None, b)[1],
    ),
    "te with a loss mask": (
        packed,
        lambda b: cp_utils.make_cp_batch_and_ctx(DeviceMesh(cp=2), b, b["labels"] * 2, use_te=True)[
            1
        ],
    ),
    "gemma4": (
        lambda: row_batch(2, 7),
        lambda b: gemma4.make_contiguous_shard_cp_batch_and_ctx(Mesh(2), None, b)[1],
    ),
}


def on_device(batch):
    return {k: v.cuda() if torch.is_tensor(v) else v for k, v in batch.items()}


@pytest.mark.parametrize("name", CASES)
def test_same_answer_with_at_most_one_read(group_of, monkeypatch, name):
    group_of(2, 1)
    # The profiler would ask the pretended group who is in it.
    monkeypatch.setattr(
        torch.profiler.profiler._KinetoProfile, "_get_distributed_info", lambda _: None
    )
    batch, call = CASES[name]
    expected = call(batch())
    call(on_device(batch()))  # warm up
    given = on_device(batch())
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = call(given)
        torch.cuda.synchronize()
    reads = sum(e.count for e in profile.key_averages() if "Memcpy DtoH" in e.key)
    assert reads <= 1
    assert list(out) == list(expected)
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert out[key].is_cuda, key
            assert torch.equal(out[key].cpu(), value), key
