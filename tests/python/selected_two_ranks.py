"""Run by test_selected_ranks.py as two processes: what torch must believe of the
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


def inputs(tokens):
    shapes = ((tokens, 4, 6), (tokens, 6), (tokens, 2, 3), (tokens, 3), (tokens, 2))
    return [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]


# Registration.
owners = Ownership.head_tail(20, 2)
layout = longspan.AttentionLayout(owners, Mask.causal(Packing.of([7, 13]))).tensor
tensors = inputs(owners.local_tokens(rank))
for fetch in longspan.dsa.FETCHES:
    torch.library.opcheck(
        ops.select_and_attend.default,
        (*tensors, None, None, None, 3, 0.4, 5, True, True, True, layout, fetch, group.name),
    )

# Tracing: one graph for every length and every number of documents.
for fetch in longspan.dsa.FETCHES:
    torch.compiler.reset()
    counters.clear()

    def layers(q, kv, index_q, index_k, weights, layout, fetch=fetch):
        where = {"attention": layout, "group": group}
        found = longspan.dsa.select_and_attend(
            q * 2, kv, index_q, index_k, weights, slots=3, scale=0.4, balanced=True, fetch=fetch,
            scores=True, target=True, **where,
        )  # fmt: skip
        again = longspan.dsa.attend_selected(
            found.out, kv, found.indices, scale=0.3, fetch=fetch, **where
        )
        losses = longspan.dsa.index_loss(found.scores, found.target)
        return longspan.reduce_loss(losses.sum() + again.square().sum(), q.shape[0], group)

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([22], [10, 12, 4], [15, 1]):
        packing = Packing.of(lengths).with_tokens_multiple_of(4)
        owners = Ownership.head_tail(packing.tokens, 2)
        layout = longspan.AttentionLayout(owners, Mask.causal(packing))
        arguments = inputs(owners.local_tokens(rank))
        answers = []
        for function in (layers, compiled):
            loss = function(*arguments, layout)
            answers.append((loss.detach(), *torch.autograd.grad(loss, arguments)))
        assert all(map(torch.equal, *answers)), (fetch, lengths)
    assert counters["stats"]["unique_graphs"] == 1, (fetch, counters["stats"])

dist.destroy_process_group()
sys.stdout.write("done\n")
