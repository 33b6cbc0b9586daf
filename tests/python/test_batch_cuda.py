"""Batches on a CUDA device: the host's answer, and at most one read."""

from __future__ import annotations

import pytest
import torch

import longspan

pytestmark = pytest.mark.cuda

LAYOUTS = [layout.name for layout in longspan.values.named_layouts()]
IDS = torch.stack([torch.arange(16), 1000 + torch.arange(16)])
DOCUMENTS = {
    "lengths": {
        "seq_lens": torch.tensor([[5, 6], [16, -1000]]),
        "seq_lens_padded": torch.tensor([[8, 8], [16, -1000]]),
    },
    "lengths alone": {"seq_lens": torch.tensor([[5, 6], [9, -1000]])},
    "mask": {"attention_mask": torch.tensor([[0, 0] + [1] * 14, [1] * 9 + [0] * 7])},
    "square mask": {
        "attention_mask": torch.ones(2, 1, 16, 16, dtype=torch.bool).tril(),
    },
    "nothing": {},
}


def reads_of(profile: torch.profiler.profile) -> int:
    return sum(event.count for event in profile.key_averages() if "Memcpy DtoH" in event.key)


def to(batch: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {key: tensor.to(device) for key, tensor in batch.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_a_share_is_the_hosts_with_at_most_one_read(layout: str, documents: str) -> None:
    batch = {"input_ids": IDS, "labels": IDS + 1, **DOCUMENTS[documents]}
    expected = longspan.shard(batch, rank=1, ranks=3, layout=layout)
    given = to(batch, "cuda")
    longspan.shard(given, rank=1, ranks=3, layout=layout)  # warm up
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        local = longspan.shard(given, rank=1, ranks=3, layout=layout)
        torch.cuda.synchronize()
    assert reads_of(profile) <= 1
    assert list(local) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert local[key].is_cuda, key
            assert torch.equal(local[key].cpu(), value), key
        else:
            assert local[key] == value, key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unshard_is_the_inverse_and_differentiable(layout: str) -> None:
    embeds = torch.randn(2, 16, 3, device="cuda", dtype=torch.double, requires_grad=True)
    batch = {"inputs_embeds": embeds, **to(DOCUMENTS["lengths"], "cuda")}
    shares = [longspan.shard(batch, rank=r, ranks=3, layout=layout) for r in range(3)]
    back = longspan.unshard([share["inputs_embeds"] for share in shares], shares[0])
    assert torch.equal(back, embeds)
    weight = torch.randn_like(back)
    (grad,) = torch.autograd.grad(back, embeds, weight)
    assert torch.equal(grad, weight)
