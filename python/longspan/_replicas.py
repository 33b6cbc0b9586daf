"""Replicas in the world of a trainer: which ranks hold one sequence together, which batches
they load, and what is counted once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from longspan._group import Group
from longspan._wrappings import world_ranks


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The ranks of the world in replicas of one size, each of which holds its own
    sequences; this rank is in number `own`."""

    group: Group
    own: int
    #: The first rank of the world in every replica, ascending.
    first: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.first)

    @staticmethod
    def around(who: str, group: Group) -> Replicas:
        """Those of all ranks, each of which calls it with its own group."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        members = world_ranks(group) if world > 1 else frozenset(range(group.size()))
        if members is None or (world == 1 and group.size() > 1):
            raise ValueError(
                f"{who}: {group} is not of torch.distributed, by whose ranks trainers load batches "
                f"and gather; make it from a process group or a mesh, in processes of torchrun"
            )
        every: list[Any] = [sorted(members)]
        if world > 1:
            every = [None] * world
            dist.all_gather_object(every, sorted(members))
        teams = sorted(set(map(tuple, every)))
        sizes = {len(team) for team in teams}
        if sorted(rank for team in teams for rank in team) != list(range(world)) or len(sizes) > 1:
            raise ValueError(
                f"{who}: the groups of the ranks are {', '.join(map(str, map(list, teams)))}; "
                f"expected every one of the {world} ranks in one group, all of one size"
            )
        first = tuple(team[0] for team in teams)
        return Replicas(group, first.index(min(members)), first)

    def loader(self, accelerator: Any, seed: int, plain: Any, on_device: bool | None) -> Any:
        """A loader of accelerate's that deals batches out to the replicas: their ranks get the
        same ones. Samplers without a generator get one with this seed."""
        from accelerate.data_loader import (  # type: ignore[import-untyped]
            get_sampler,
            prepare_data_loader,
        )

        if not getattr(plain, "_is_accelerate_prepared", False):
            sampler = get_sampler(plain)
            if getattr(sampler, "generator", seed) is None:
                sampler.generator = torch.Generator().manual_seed(seed)
            plain = prepare_data_loader(
                plain,
                accelerator.device,
                num_processes=self.count,
                process_index=self.own,
                split_batches=accelerator.split_batches,
                put_on_device=accelerator.device_placement if on_device is None else on_device,
                rng_types=accelerator.rng_types.copy(),
                # One process that reads for all would deal out to ranks.
                dispatch_batches=False,
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=seed,
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
        if plain not in accelerator._dataloaders:
            accelerator._dataloaders.append(plain)
        return plain

    def gathered(self, accelerator: Any, values: Any) -> Any:
        """The values of all replicas for metrics: rows, which all ranks of a replica have, once
        for each; and of the last batch only those that were not loaded to fill it up. Single
        numbers are those of every rank."""
        from accelerate.utils import recursively_apply  # type: ignore[import-untyped]

        if isinstance(values, torch.Tensor) and values.dim() == 0:
            return accelerator.gather(values)
        if self.count > 1:
            every = accelerator.gather(values)
            values = recursively_apply(self._once, every)
        state = accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return values
        return recursively_apply(lambda one: one[: state.remainder], values)

    def _once(self, every: torch.Tensor) -> torch.Tensor:
        by_rank = every.chunk(self.count * self.group.size())
        return torch.cat([by_rank[rank] for rank in self.first])


def mapped(function: Callable[[torch.Tensor], torch.Tensor], nested: Any) -> Any:
    """The same lists, tuples and dictionaries of other tensors."""
    if isinstance(nested, torch.Tensor):
        return function(nested)
    if isinstance(nested, dict):
        return {key: mapped(function, value) for key, value in nested.items()}
    if isinstance(nested, (tuple, list)):
        return type(nested)(mapped(function, value) for value in nested)
    return nested
