"""Run by test_comm.py as two processes with torchrun's variables."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import longspan

group = longspan.Group.from_environment()
rank = group.rank()
assert group.size() == 2, group
assert longspan.Group.from_environment().name == group.name
assert group.timeout > 0

# Groups of a mesh and of torch's own calls.
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
cp = longspan.Group.of(mesh["cp"])
assert (cp.rank(), cp.size()) == (rank, 2)
assert longspan.Group.of(mesh["dp"]).size() == 1
try:
    longspan.Group.of(mesh)
except ValueError as error:
    assert "name the one that holds the sequence" in str(error)
else:
    raise AssertionError("a mesh of two dimensions")
assert longspan.Group.of(dist.new_group([0, 1])).rank() == rank

sizes = [3, 1]
heads = [2, 1]
sends = torch.tensor([[0, 1, 0, 2], [1, 0, 0, 1], [0, 0, 1, 2], [1, 1, 0, 0]])
mine = torch.randn(2, sizes[rank], 3, dtype=torch.double, requires_grad=True)
whole = torch.randn(2, 4, heads[rank], dtype=torch.double, requires_grad=True)
received = [3, 2][rank]
pieces = torch.randn(2, received, 3, dtype=torch.double, requires_grad=True)
ops = torch.ops.longspan
cases = [
    (ops.all_gather_tokens, (mine, 1, sizes, cp.name)),
    (ops.reduce_scatter_tokens, (torch.randn(2, 4, 3, requires_grad=True), 1, sizes, cp.name)),
    (ops.all_to_all_heads, (mine, 1, 2, sizes, heads, cp.name)),
    (ops.all_to_all_tokens, (whole, 1, 2, sizes, heads, cp.name)),
    (ops.rotate, (mine, 1, 1, sizes, cp.name)),
    (ops.roll, (mine, 1, 2, sizes, cp.name)),
    (ops.exchange_needed, (mine, 1, sends, received, cp.name)),
    (ops.return_needed, (pieces, 1, sends, sizes[rank], cp.name)),
]
for op, arguments in cases:
    torch.library.opcheck(op.default, arguments)


def model(x: torch.Tensor) -> torch.Tensor:
    full = longspan.comm.all_gather_tokens(x, axis=1, sizes=sizes, group=cp)
    part = longspan.comm.reduce_scatter_tokens(full * full, axis=1, sizes=sizes, group=cp)
    turned = longspan.comm.all_to_all_heads(
        part, token_axis=1, head_axis=2, token_sizes=sizes, head_sizes=heads, group=cp
    )
    back = longspan.comm.all_to_all_tokens(
        turned, token_axis=1, head_axis=2, token_sizes=sizes, head_sizes=heads, group=cp
    )
    rolled = longspan.comm.roll(back, 1, axis=1, sizes=sizes, group=cp)
    away = longspan.comm.rotate(rolled, 1, axis=1, sizes=sizes, group=cp)
    home = longspan.comm.rotate(away, -1, axis=1, sizes=sizes[::-1], group=cp)
    return longspan.comm.exchange_needed(home, sends, axis=1, group=cp, received=received)


def answer(function):
    x = torch.arange(mine.numel(), dtype=torch.double).view(mine.shape).requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return y.detach(), x.grad


eager = answer(model)
compiled = answer(torch.compile(model, fullgraph=True, backend="aot_eager"))
assert all(map(torch.equal, eager, compiled))

longspan.comm.agree(cp, {"ids": torch.arange(5), "step": 3})
try:
    longspan.comm.agree(cp, {"ids": torch.arange(5) + rank, "step": 3})
except ValueError as error:
    assert "different `ids` (rank 1 differs from rank 0)" in str(error)
else:
    raise AssertionError("the ranks differ")
dist.destroy_process_group()
sys.stdout.write("done\n")
