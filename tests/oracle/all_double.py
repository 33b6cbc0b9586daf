"""Models that are float64 throughout.

Decoders of transformers compute norms, rotary angles, softmaxes and the loss in float32,
whatever their type. Inside `AllDouble` every cast to float32 is one to float64, so a float64
model has no other numbers, and what one rank and many give can be compared to 1e-12. Models
are made outside: their rotary frequencies are float32 numbers, and stay those."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class AllDouble(TorchDispatchMode):
    """On the thread that enters it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        return func(*args, **options)
