"""Run by test_attend_torch.py as two processes: what torch must believe of the
operators when they communicate. Threads cannot trace at the same time."""

import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import longspan
from longspan import Mask, Ownership, Packing

group = longspan.Group.from_environment()
rank = group.rank()
assert group.size() == 2, group
ops = torch.ops.longspan


def inputs(tokens, packed, dtype=torch.double):
    def draw(heads, dim):
        shape = (tokens, heads, dim) if packed else (2, heads, tokens, dim)
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    return draw(4, 6), draw(2, 6), draw(2, 3), torch.randn(4, dtype=dtype, requires_grad=True)


def options(strategy):
    return (0.4, 3.0, strategy, 0, group.name)


# Registration.
for packed, strategy in ((False, "ring"), (True, "head_parallel")):
    owners = Ownership.head_tail(20, 2)
    layout = longspan.AttentionLayout(owners, Mask.causal(Packing.of([7, 13]))).tensor
    q, k, v, sink = inputs(owners.local_tokens(rank), packed)
    torch.library.opcheck(ops.attend.default, (q, k, v, sink, layout, *options(strategy)))
    with torch.no_grad():
        out, lse = ops.attend(q, k, v, sink, layout, *options(strategy))
    saved = [t.detach() for t in (q, k, v, sink)]
    torch.library.opcheck(
        ops.attend_backward.default,
        (torch.randn_like(out), *saved, out, lse, layout, *options(strategy)),
    )

# Tracing: one graph for every length and every number of documents.
for strategy in ("ring", "head_parallel"):
    torch.compiler.reset()
    counters.clear()

    def attention(q, k, v, sink, layout, strategy=strategy):
        out = longspan.attend(
            q * 2, k, v, attention=layout, sink=sink, strategy=strategy, group=group
        )
        return longspan.reduce_loss(out.square().sum(), q.shape[2], group)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([22], [10, 12, 4], [15, 1]):
        packing = Packing.of(lengths).with_tokens_multiple_of(4)
        owners = Ownership.head_tail(packing.tokens, 2)
        layout = longspan.AttentionLayout(owners, Mask.causal(packing))
        arguments = inputs(owners.local_tokens(rank), packed=False)
        answers = []
        for function in (attention, compiled):
            loss = function(*arguments, layout)
            answers.append((loss.detach(), *torch.autograd.grad(loss, arguments)))
        assert all(map(torch.equal, *answers)), (strategy, lengths)
    assert counters["stats"]["unique_graphs"] == 1, (strategy, counters["stats"])

dist.destroy_process_group()
sys.stdout.write("done\n")
