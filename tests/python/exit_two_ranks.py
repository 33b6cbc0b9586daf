"""One rank of a program whose group and model live in globals until the interpreter
ends. Started by test_comm.py."""

import sys

import torch
import torch.distributed as dist

import longspan

# Threads of gloo that wait for the interpreter wait until this one waits itself.
sys.setswitchinterval(60)
group = longspan.Group.from_environment()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        # As parallelize leaves it: the group, in a cycle that no count ends.
        self.kept = [self, group]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return longspan.comm.all_gather_tokens(
            self.inner(x), axis=0, sizes=[2, 2], group=group
        ).sum()


model = Model()
loss = model(torch.ones(2, 4))
loss.backward()
longspan.sum_gradients(model, group)
if sys.argv[1] == "destroy":
    # A thread of gloo lets go of the tensor at some time after this, and needs the
    # interpreter for it; the end of the group waits for the thread.
    dist.all_reduce(loss.detach())
    dist.destroy_process_group()
print(f"{group} sent {group.sent_bytes > 0}", flush=True)
