"""Seeds: different on every rank, the same in every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import longspan
from longspan import Group, run_ranks


def test_every_rank_and_stream_has_its_own_seed() -> None:
    def body(group: Group) -> list[int]:
        return [
            longspan.comm.rank_seed(seed, group, *streams)
            for seed in range(8)
            for streams in [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]
        ]

    seeds = [seed for found in run_ranks(4, body) for seed in found]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [seed for found in run_ranks(4, body) for seed in found]


def test_one_rank_alone_is_rank_0() -> None:
    seeds = run_ranks(3, lambda group: longspan.comm.rank_seed(7, group, 2))
    assert longspan.comm.rank_seed(7, Group(), 2) == longspan.comm.rank_seed(7, None, 2) == seeds[0]


def test_seeds_stay_what_they_were() -> None:
    """Runs of other versions and machines must repeat."""
    assert longspan._randomness._mixed(0) == 0xE220A8397B1DCDAF
    assert longspan.comm.rank_seed(0) == 6017775124710473527
    assert longspan.comm.rank_seed(1234, None, 5) == 1922131702972665688
    assert longspan.comm.rank_seed(-1) == longspan.comm.rank_seed(2**64 - 1)


def test_whole_numbers_are_expected() -> None:
    with pytest.raises(TypeError, match="rank_seed: expected whole numbers, got a float"):
        longspan.comm.rank_seed(1.5)  # type: ignore[arg-type]


def test_seeding_is_that_of_torch() -> None:
    own = longspan.seed_ranks(3, None, 1)
    drawn = torch.rand(4)
    torch.manual_seed(own)
    assert own == longspan.comm.rank_seed(3, None, 1)
    assert torch.equal(drawn, torch.rand(4))


def test_a_scope_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with longspan.comm.seeded_ranks(3) as own:
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    longspan.seed_ranks(3)
    assert torch.equal(torch.rand(4), inside)
    assert own == longspan.comm.rank_seed(3)


@pytest.mark.slow
def test_recomputation_draws_the_same_numbers() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    x = torch.randn(8, 16)

    def grad(recompute: bool) -> Tensor:
        layer.zero_grad()
        longspan.seed_ranks(3)
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        torch.rand(5)  # others draw before backward
        out.square().sum().backward()
        assert layer[0].weight.grad is not None
        return layer[0].weight.grad.clone()

    assert torch.equal(grad(recompute=True), grad(recompute=False))
