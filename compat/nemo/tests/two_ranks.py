"""Run by test_processes.py as two processes: a real DeviceMesh, and compiled layers."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compat_support import cp_utils, dsv4, example, glm
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

llama = example("eagle3_target")
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))

torch.manual_seed(0)
MODEL = llama.TinyLlama(layers=2, width=16).double()
TOKENS = 13
ids = torch.randint(1, 64, (2, TOKENS))
pads = torch.zeros(2, TOKENS, dtype=torch.bool)
pads[0, :3] = pads[1, 6:8] = pads[1, -2:] = True
labels = torch.randint(64, (2, TOKENS)).masked_fill(pads, -100)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


whole = copy.deepcopy(MODEL)
expected = loss_of(whole(ids, attention_mask=llama.causal_mask(pads)), labels)
expected.backward()


def train(model, *, embeds=False):
    """One step over both ranks gives the loss and gradients of one rank."""
    batch = {"labels": labels.clone(), "attention_mask": (~pads).long()}
    if embeds:
        batch["inputs_embeds"] = model.embed_tokens(ids)
    else:
        batch["input_ids"] = ids.clone()
    factory, batch = cp_utils.make_cp_batch_and_ctx(mesh, batch)
    with factory():
        keys = ("input_ids", "inputs_embeds", "position_ids")
        logits = model(**{key: batch[key] for key in keys if key in batch})
        assert logits.shape[1] == 8, logits.shape
        loss = loss_of(logits, batch["labels"])
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach())
    parameters = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, parameters[name].grad, rtol=1e-9, atol=1e-11)
    assert torch._C._len_torch_function_stack() == 0


def compiled(model):
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    return model


def hooked(model):
    cp_utils.attach_context_parallel_hooks(model)
    cp_utils.attach_cp_sdpa_hooks(model, mesh["cp"])
    return model


def checkpointed(model):
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    return model


def fresh():
    return copy.deepcopy(MODEL)


train(fresh())
train(fresh(), embeds=True)
train(hooked(fresh()))
train(hooked(checkpointed(fresh())))
train(checkpointed(fresh()))

# Compiled layers see the context, with hooks and without, and one graph serves
# new contexts of the same shape.
for model in (compiled(fresh()), compiled(hooked(fresh()))):
    torch._dynamo.reset()
    train(model)
    model.zero_grad()
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(model)

# Without a context the hooks alone do it.
pads.zero_()
plain = fresh()
full = plain(ids[:, :12])
model = compiled(hooked(fresh()))
mine = torch.cat([torch.arange(3) + 3 * rank, torch.arange(3) + 3 * (3 - rank)])
out = model(ids[:, mine], mine[None])
torch.testing.assert_close(out, full[:, mine])
for length in (16, 20, 24):  # one graph for all lengths
    longer = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(1))
    quarter = length // 4
    mine = torch.cat(
        [torch.arange(quarter) + quarter * rank, torch.arange(quarter) + quarter * (3 - rank)]
    )
    torch.testing.assert_close(model(longer[:, mine], mine[None]), plain(longer)[:, mine])


# Another mesh, another graph: compiled code does not go on with the first one's group.
class Elsewhere:
    def size(self):
        return 2

    def get_group(self):
        raise LookupError("another mesh")


cp_utils.attach_cp_sdpa_hooks(model, Elsewhere())
try:
    model(longer[:, mine], mine[None])
except Exception as error:
    assert "another mesh" in str(error), error
else:
    raise AssertionError("the first mesh")

# Gathers over a process group.
group = mesh["cp"].get_group()
for gather in (glm.glm_dsa_cp_all_gather, dsv4.dsv4_cp_all_gather):
    x = torch.full((1, 2), float(rank), requires_grad=True)
    both = gather(x, dim=1, cp_group=group)
    assert both.tolist() == [[0, 0, 1, 1]]
    (both * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [[3, 3]]
flags = dsv4.dsv4_cp_all_gather_metadata(torch.tensor([rank == 1]), dim=0, cp_group=group)
assert flags.tolist() == [False, True]

# The target of EAGLE-3.
loss_mask = torch.ones_like(ids)
pads[0, :3] = True
deep = llama.TinyLlama(layers=8, width=16).double()
alone = llama.Target(copy.deepcopy(deep))(ids, loss_mask, pads)
over = llama.Target(copy.deepcopy(deep), mesh["cp"])(ids, loss_mask, pads)
torch.testing.assert_close(over.hidden[~pads], alone.hidden[~pads])

dist.destroy_process_group()
sys.stdout.write(f"done {os.getpid()}\n")
