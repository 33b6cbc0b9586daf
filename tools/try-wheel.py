"""try-wheel.py cpu|cuda: run in an environment that a wheel was installed into. It has code for
CUDA if its name says so, and two ranks give one's answer, on a GPU too where there is one."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import torch

import longspan

kind = sys.argv[1]
if not pathlib.Path(longspan.__file__).is_relative_to(sys.prefix):
    sys.exit(f"try-wheel: longspan came from {longspan.__file__}, not from the wheel")
told = subprocess.run(
    [sys.executable, "-m", "longspan", "info", "--json"], capture_output=True, text=True, check=True
)
has_cuda = json.loads(told.stdout)["cuda_kernels"]
if has_cuda != (kind == "cuda"):
    sys.exit(f"try-wheel: a wheel for {kind} says cuda_kernels: {has_cuda}")
ids = torch.arange(32).view(1, -1)


def body(group: Any, device: str) -> torch.Tensor:
    local = longspan.shard({"input_ids": ids}, group)
    x = torch.nn.functional.one_hot(local["input_ids"], 32).float().unsqueeze(1).to(device)
    out = longspan.attend(x, x, x, attention=longspan.AttentionLayout(local), group=group)
    assert isinstance(out, torch.Tensor)
    return longspan.unshard(out.squeeze(1), local).cpu()


def selected(device: str) -> torch.Tensor:
    """A kernel of our own, on CUDA as on the CPU."""
    x = torch.linspace(-1, 1, 8 * 4 * 16, device=device).view(8, 4, 16)
    lists = torch.arange(8, device=device, dtype=torch.int32).view(8, 1)
    out = longspan.dsa.attend_selected(x, x[:, 0].contiguous(), lists, scale=1.0)
    assert isinstance(out, torch.Tensor)
    return out.cpu()


one = longspan.run_ranks(1, lambda group: body(group, "cpu"))[0]
with_gpu = kind == "cuda" and torch.cuda.is_available()
for device in ("cpu", "cuda") if with_gpu else ("cpu",):
    two = longspan.run_ranks(2, lambda group, device=device: body(group, device))[0]
    if not torch.allclose(two, one, atol=1e-6):
        sys.exit(f"try-wheel: two ranks on {device} give another answer than one")
    if not torch.allclose(selected(device), selected("cpu"), atol=1e-5):
        sys.exit(f"try-wheel: attend_selected on {device} gives another answer than on the CPU")
print(f"longspan {longspan.__version__} beside torch {torch.__version__}: works")
if kind == "cuda" and not with_gpu:
    print("its code for CUDA was loaded and not run: torch sees no GPU here")
