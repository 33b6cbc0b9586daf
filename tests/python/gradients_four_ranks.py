"""Run by test_gradients.py as four processes: two data-parallel replicas of two
context-parallel ranks. Every case prints its name when it holds."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from test_gradient_contract import batch_of, one_rank, seeded
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan import Group

world = Group.from_environment()
rank = world.rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
flat = mesh._flatten("all")
cp = Group.of(mesh["cp"])
at = mesh["dp"].get_local_rank()

CASES: list[Callable[[], None]] = []
Grads = dict[str, Tensor]
Rows = tuple[int, int]  # [begin, end) of the batch
BATCH: Rows = (0, 4)


def halves_of(rows: Rows) -> list[Rows]:
    """Two replicas, or two microbatches."""
    begin, end = rows
    return [(begin, (begin + end) // 2), ((begin + end) // 2, end)]


HALVES = halves_of(BATCH)


def case(body: Callable[[], None]) -> Callable[[], None]:
    CASES.append(body)
    return body


def mean(parts: list[Grads]) -> Grads:
    return {name: torch.stack([p[name] for p in parts]).mean(0) for name in parts[0]}


def added(parts: list[Grads]) -> Grads:
    return {name: torch.stack([p[name] for p in parts]).sum(0) for name in parts[0]}


def batch(rows: Rows) -> dict[str, Tensor]:
    return {key: value[rows[0] : rows[1]] for key, value in batch_of().items()}


@functools.cache
def alone(rows: Rows, dtype: torch.dtype = torch.float64) -> Grads:
    return one_rank(seeded().to(dtype), batch(rows))[1]


def grads_of(model: nn.Module) -> Grads:
    found = {}
    for one in longspan._wrappings.trained_parameters(model):
        grad = one.parameter.grad
        assert grad is not None, one.name
        whole = grad.full_tensor() if longspan._wrappings.is_sharded(grad) else grad
        found[one.name.removeprefix("module.")] = whole.clone()
    return found


def norm_of(grads: Grads, order: float = 2.0) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.values()]), order)


def assert_close(got: Grads, expected: Grads) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        tight = tensor.dtype == torch.float64
        torch.testing.assert_close(
            got[name],
            tensor,
            rtol=1e-11 if tight else 1e-4,
            atol=1e-13 if tight else 1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def in_microbatches(replicas: list[Rows]) -> Grads:
    return mean([added([alone(part) for part in halves_of(rows)]) for rows in replicas])


@contextlib.contextmanager
def refuses(sentence: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(f"nobody said: {sentence}")


def backward(model: nn.Module, rows: Rows, group: Group = cp) -> None:
    loss, _ = model(longspan.shard(batch(rows), group, layout="contiguous-stream"), group)
    loss.backward()


def sharded(on: Any, dtype: torch.dtype = torch.float64) -> Any:
    model: Any = seeded().to(dtype)
    for block in model.blocks:
        fully_shard(block, mesh=on)
    return fully_shard(model, mesh=on)


def averaged(on: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(seeded(), process_group=on.get_group(), **options)


# ---- What every wrapping must give: the mean over replicas, and its norm.


def check_step(model: nn.Module, *, replicas: bool, group: Group = cp) -> None:
    """A step on one batch a replica; then one of two microbatches; then clipping."""
    rows = HALVES[at] if replicas else BATCH
    expected = mean([alone(half) for half in HALVES]) if replicas else alone(BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    backward(model, rows, group)
    longspan.sum_gradients(model, group)
    assert_close(grads_of(model), expected)
    with refuses("these gradients were summed already"):
        longspan.sum_gradients(model, group)
    for order in (2.0, 1.0, 3.0, torch.inf):
        norm = longspan.clip_grad_norm(model, torch.inf, group, norm_type=order)
        assert type(norm) is Tensor
        torch.testing.assert_close(norm, norm_of(expected, order), rtol=1e-11, atol=0)
    longspan.comm.agree(world if replicas else group, {"norm": norm})
    norm = longspan.clip_grad_norm(model, 0.5, group)
    factor = 0.5 / (norm + 1e-6)
    assert factor < 1
    assert_close(grads_of(model), {name: g * factor for name, g in expected.items()})
    with refuses("these gradients were summed already"):
        longspan.sum_gradients(model, group)
    optimizer.zero_grad()

    for part in halves_of(rows):
        backward(model, part, group)
    longspan.sum_gradients(model, group)
    assert_close(grads_of(model), in_microbatches(HALVES if replicas else [BATCH]))

    backward(model, rows, group)  # on top of what was summed
    with refuses("backward added to a gradient that was summed already"):
        longspan.sum_gradients(model, group)
    optimizer.zero_grad()
    backward(model, rows, group)
    longspan.sum_gradients(model, group)
    assert_close(grads_of(model), expected)


@case
def plain_models_are_summed_inside_a_replica() -> None:
    model = seeded()
    backward(model, HALVES[at])
    longspan.sum_gradients(model, mesh["cp"])
    assert_close(grads_of(model), alone(HALVES[at]))


@case
def ddp_over_the_sequence() -> None:
    check_step(averaged(mesh["cp"]), replicas=False)


@case
def ddp_over_everything() -> None:
    check_step(averaged(flat), replicas=True)


@case
def ddp_over_data_alone() -> None:
    check_step(averaged(mesh["dp"]), replicas=True)


@case
def ddp_with_one_rank_a_sequence() -> None:
    model = averaged(flat)
    backward(model, (rank, rank + 1), Group.solo())
    longspan.sum_gradients(model, Group.solo())
    assert_close(grads_of(model), mean([alone((row, row + 1)) for row in range(4)]))


@case
def ddp_that_waits_with_no_sync() -> None:
    for on in (flat, mesh["dp"]):
        model = averaged(on)
        with model.no_sync():
            backward(model, halves_of(HALVES[at])[0])
            with refuses("inside of no_sync"):
                longspan.sum_gradients(model, cp)
        backward(model, halves_of(HALVES[at])[1])
        longspan.sum_gradients(model, cp)
        assert_close(grads_of(model), in_microbatches(HALVES))


@case
def ddp_with_gradients_in_buckets() -> None:
    for on in (flat, mesh["dp"]):
        model = averaged(on, gradient_as_bucket_view=True)
        for _ in range(3):
            model.zero_grad()
            backward(model, HALVES[at])
            longspan.sum_gradients(model, cp)
            assert_close(grads_of(model), mean([alone(half) for half in HALVES]))


@case
def ddp_leaves_some_parameters_out() -> None:
    model = seeded()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
    wrapped = DistributedDataParallel(model, process_group=flat.get_group())
    backward(wrapped, HALVES[at])
    longspan.sum_gradients(wrapped, cp)
    expected = mean([alone(half) for half in HALVES])
    expected["head.weight"] = alone(HALVES[at])["head.weight"]  # summed, averaged by nobody
    assert_close(grads_of(wrapped), expected)


@case
def ddp_hooks_of_others_are_refused() -> None:
    model = averaged(flat)
    model.register_comm_hook(None, allreduce_hook)
    backward(model, HALVES[at])
    longspan.sum_gradients(model, cp)
    assert_close(grads_of(model), mean([alone(half) for half in HALVES]))

    def doubled(state, bucket):  # torch reads the annotations
        return allreduce_hook(None, bucket)

    other = averaged(flat)
    other.register_comm_hook(None, doubled)
    backward(other, HALVES[at])
    with refuses("has the communication hook"):
        longspan.sum_gradients(other, cp)


@case
def fully_shard_over_data_and_sequence() -> None:
    check_step(sharded(mesh), replicas=True)


@case
def fully_shard_in_replicas_over_the_sequence() -> None:
    # Shards lie over data, the sequence replicates.
    group = Group.of(turned["cp"])
    model = sharded(turned)
    data = turned["dp"].get_local_rank()
    backward(model, HALVES[data], group)
    longspan.sum_gradients(model, group)
    expected = mean([alone(half) for half in HALVES])
    assert_close(grads_of(model), expected)
    norm = longspan.clip_grad_norm(model, 1.0, group)
    torch.testing.assert_close(norm, norm_of(expected), rtol=1e-11, atol=0)


@case
def fully_shard_over_everything_flattened() -> None:
    check_step(sharded(flat), replicas=True)


@case
def fully_shard_over_the_sequence() -> None:
    check_step(sharded(mesh["cp"]), replicas=False)


@case
def fully_shard_over_data_alone() -> None:
    check_step(sharded(mesh["dp"]), replicas=True)


@case
def fully_shard_over_one_sequence_on_all_ranks() -> None:
    check_step(sharded(flat), replicas=False, group=Group.of(flat))


@case
def fully_shard_in_float32() -> None:
    for on in (mesh, flat, mesh["dp"]):
        model = sharded(on, torch.float32)
        backward(model, HALVES[at])
        longspan.sum_gradients(model, cp)
        assert_close(grads_of(model), mean([alone(half, torch.float32) for half in HALVES]))


@case
def a_divisor_that_was_set_is_the_last_word() -> None:
    for on in (mesh, flat):
        for divisor in (2.0, 1.0):  # as many as replicas; and the sum over all tokens
            model = sharded(on)
            for module in (model, *model.blocks):
                module.set_gradient_divide_factor(divisor)
            backward(model, HALVES[at])
            longspan.sum_gradients(model, cp)
            total = added([alone(half) for half in HALVES])
            assert_close(grads_of(model), {name: g / divisor for name, g in total.items()})
            with refuses("these gradients were summed already"):
                longspan.sum_gradients(model, cp)


@case
def the_numbers_of_the_page() -> None:
    """docs/gradients.md: 4 and 2 of 6 tokens, 1 and 3 of 4."""
    tokens, total, slope = [(4, 6, 1), (2, 6, 1), (1, 4, 3), (3, 4, 3)][rank]
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).double())
    for count, group, before, after in (
        (total, cp, 1.0, 2.0),
        (10, world, 18 / 40, 18 / 10),
    ):
        model.zero_grad()
        x = torch.ones(tokens, 1, dtype=torch.float64)
        (slope * model(x).sum() / count).backward()
        torch.testing.assert_close(model.module.weight.grad.item(), before)
        longspan.sum_gradients(model, group)
        torch.testing.assert_close(model.module.weight.grad.item(), after)


@case
def a_loss_over_all_replicas_is_summed_over_all() -> None:
    expected = one_rank(seeded(), batch(BATCH))[1]
    for model in (seeded(), averaged(flat), sharded(mesh), sharded(flat)):
        local = longspan.shard(batch(HALVES[at]), cp, layout="contiguous-stream")
        loss, _ = model(local, cp, world)
        loss.backward()
        longspan.sum_gradients(model, world)
        assert_close(grads_of(model), expected)
        norm = longspan.clip_grad_norm(model, 1.0, world)
        torch.testing.assert_close(norm, norm_of(expected), rtol=1e-11, atol=0)


@case
def fully_shard_that_waits() -> None:
    model = sharded(mesh)
    model.set_requires_gradient_sync(False)
    backward(model, halves_of(HALVES[at])[0])
    with refuses("fully_shard was told not to reduce"):
        longspan.sum_gradients(model, cp)
    model.set_requires_gradient_sync(True)
    backward(model, halves_of(HALVES[at])[1])
    longspan.sum_gradients(model, cp)
    assert_close(grads_of(model), in_microbatches(HALVES))


@case
def fully_shard_that_keeps_whole_parameters() -> None:
    for on in (flat, mesh["dp"]):
        model = sharded(on)
        model.set_reshard_after_backward(False)
        backward(model, HALVES[at])
        longspan.sum_gradients(model, cp)
        expected = mean([alone(half) for half in HALVES])
        assert_close(grads_of(model), expected)
        norm = longspan.clip_grad_norm(model, 1.0, cp)
        torch.testing.assert_close(norm, norm_of(expected), rtol=1e-11, atol=0)


@case
def fully_shard_with_a_hook_is_refused() -> None:
    model = sharded(mesh["dp"])
    model.set_all_reduce_hook(lambda grad: dist.all_reduce(grad, group=mesh["cp"].get_group()))
    backward(model, HALVES[at])
    with refuses("got an all-reduce hook for the model"):
        longspan.sum_gradients(model, cp)


@case
def a_group_half_in_the_mesh_is_refused() -> None:
    for model in (sharded(mesh["cp"]), averaged(mesh["cp"])):
        backward(model, HALVES[at])
        with refuses(f"over ranks {[2 * at, 2 * at + 1]} and the sequence lies on ranks [0, 1, 2"):
            longspan.sum_gradients(model, world)


@case
def one_rank_that_refuses_ends_all() -> None:
    model = averaged(flat)
    backward(model, HALVES[at])
    model.require_backward_grad_sync = cp.rank() != 0
    with refuses("inside of no_sync" if cp.rank() == 0 else "rank 0 of the group refused"):
        longspan.sum_gradients(model, cp)


@case
def plain_and_sharded_parameters_together() -> None:
    """Shards of a few elements, so that some ranks have none of them."""
    for on, divided in ((flat, 2), (mesh["dp"], 2), (mesh["cp"], 1)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
        fully_shard(model[1], mesh=on)
        x = torch.arange(3, dtype=torch.float64) + rank
        model(x).sum().backward()
        longspan.sum_gradients(model, cp)
        got = grads_of(model)
        torch.manual_seed(1)
        same = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
        wanted = {name: torch.zeros_like(p) for name, p in same.named_parameters()}
        for other in range(4):
            same.zero_grad()
            same(torch.arange(3, dtype=torch.float64) + other).sum().backward()
            for name, p in same.named_parameters():
                if name.startswith("1.") and divided == 2:
                    wanted[name] += p.grad / 2
                elif other // 2 == at:
                    wanted[name] += p.grad
        assert_close(got, wanted)
        for order in (2.0, torch.inf):
            for foreach in (None, False):
                norm = longspan.clip_grad_norm(
                    model, torch.inf, cp, norm_type=order, foreach=foreach
                )
                torch.testing.assert_close(norm, norm_of(wanted, order), rtol=1e-12, atol=0)


@case
def tensor_parallel_models_are_summed_too() -> None:
    """Two ranks of a sequence by two that split every layer; then fully_shard over
    the sequence besides."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    group = Group.of(grid["cp"])
    inputs = [torch.arange(4.0).double() + place for place in range(2)]

    def model() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double()

    reference = model()
    for x in inputs:
        reference(x).square().sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for also_sharded in (False, True):
        split = parallelize_module(
            model(), grid["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
        )
        if also_sharded:
            fully_shard([split[0], split[1]], mesh=grid["cp"])  # one group of parameters
            fully_shard(split, mesh=grid["cp"])
        split(inputs[group.rank()]).square().sum().backward()
        longspan.sum_gradients(split, group)
        assert_close(grads_of(split), expected)
        for order in (2.0, torch.inf):
            norm = longspan.clip_grad_norm(split, torch.inf, group, norm_type=order)
            torch.testing.assert_close(norm, norm_of(expected, order), rtol=1e-12, atol=0)
    with refuses("is a DTensor over ranks"):
        tensors = parallelize_module(model(), grid["cp"], {"0": ColwiseParallel()})
        longspan.sum_gradients(tensors, group)


@case
def a_group_outside_of_the_world_is_refused() -> None:
    def on_a_thread(group: Group) -> None:
        model: Any = wrapped[group.rank()]
        with refuses("torch.distributed does not know the ranks of the group"):
            longspan.sum_gradients(model, group)

    wrapped = [averaged(flat), averaged(flat)]
    longspan.run_ranks(2, on_a_thread)


@case
def sharded_gradients_that_ranks_lack_become_zeros() -> None:
    """Over data alone; each rank of a sequence used another expert."""
    torch.manual_seed(1)
    experts = nn.ModuleList(nn.Linear(3, 2).double() for _ in range(3))
    for expert in experts:
        fully_shard(expert, mesh=mesh["dp"])
    x = torch.ones(3, dtype=torch.float64) * (1 + rank)
    experts[cp.rank()](x).sum().backward()
    longspan.sum_gradients(experts, cp)
    for index in range(2):
        grad: Any = experts[index].weight.grad
        expected = torch.full((2, 3), (1 + index + 3 + index) / 2, dtype=torch.float64)
        assert torch.equal(grad.full_tensor(), expected)
    assert experts[2].weight.grad is None


@case
def dropout_differs_between_ranks_and_repeats() -> None:
    def mask(*streams: int) -> Tensor:
        longspan.seed_ranks(5, cp, *streams)
        return nn.functional.dropout(torch.ones(64), 0.5)

    def distinct(mine: Tensor, group: Group) -> int:
        rows = longspan.comm.all_gather_tokens(
            mine.unsqueeze(0), axis=0, sizes=[1] * group.size(), group=group
        )
        return len({tuple(row.tolist()) for row in rows})

    assert distinct(mask(), world) == 2  # replicas alike, ranks of a sequence not
    assert distinct(mask(at), world) == 4
    assert torch.equal(mask(at), mask(at))
    torch.manual_seed(9)
    parameters = torch.randn(4)
    assert distinct(parameters, world) == 1


for body in CASES:
    body()
    sys.stdout.write(f"{body.__name__} holds\n")
    sys.stdout.flush()
dist.destroy_process_group()
