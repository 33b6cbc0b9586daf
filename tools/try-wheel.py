"""Run in an environment that a wheel was installed into: two ranks give one's answer."""

import pathlib
import sys
from typing import Any

import torch

import longspan

if not pathlib.Path(longspan.__file__).is_relative_to(sys.prefix):
    sys.exit(f"try-wheel: longspan came from {longspan.__file__}, not from the wheel")
ids = torch.arange(32).view(1, -1)


def body(group: Any) -> torch.Tensor:
    local = longspan.shard({"input_ids": ids}, group)
    x = torch.nn.functional.one_hot(local["input_ids"], 32).float().unsqueeze(1)
    out = longspan.attend(x, x, x, attention=longspan.AttentionLayout(local), group=group)
    assert isinstance(out, torch.Tensor)
    return longspan.unshard(out.squeeze(1), local)


two, one = (longspan.run_ranks(ranks, body)[0] for ranks in (2, 1))
if not torch.allclose(two, one, atol=1e-6):
    sys.exit("try-wheel: two ranks give another answer than one")
print(f"longspan {longspan.__version__} beside torch {torch.__version__}: works")
