"""The tiled loss against torch's, whose logits exist whole: time and memory of forward and
backward, and the share of the rate that its products alone reach.

    python bench/loss.py build/dev --save bench/results/...md

On a GPU where there is one: bfloat16, 8192 tokens of 4096 channels, 128256 words; else on
the CPU: float32, 2048 tokens of 512 channels, 32000 words. Memory is the most that tensors
took at a time over the inputs.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import Part, Row, in_turns, main, ratio_row
from machine import resident

import longspan


class Shape(NamedTuple):
    tokens: int
    channels: int
    words: int
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens} x {self.channels} -> {self.words}, {kind}, fwd+bwd"


GPU = Shape(8192, 4096, 128256, torch.bfloat16, "cuda")
CPU = Shape(2048, 512, 32000, torch.float32, "cpu")


def inputs_of(shape: Shape) -> list[torch.Tensor]:
    torch.manual_seed(0)
    like: Any = {"device": shape.device, "dtype": shape.dtype}
    hidden = torch.randn(shape.tokens, shape.channels, **like).requires_grad_()
    weight = (torch.randn(shape.words, shape.channels, **like) * 0.02).requires_grad_()
    return [hidden, weight, torch.randint(shape.words, (shape.tokens,), device=shape.device)]


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
    return longspan.linear_cross_entropy(hidden, weight, labels).loss


def theirs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
    """As transformers has it: logits of the model's type, the loss in float32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def both(loss: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    made = loss(*inputs)
    return [made.detach(), *torch.autograd.grad(made, inputs[:2])]


def products(shape: Shape, inputs: list[torch.Tensor]) -> Callable[[], Any]:
    """The three products that nobody can leave out, logits whole."""
    hidden, weight = (t.detach() for t in inputs[:2])
    d = torch.randn(shape.tokens, shape.words, device=shape.device, dtype=shape.dtype)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=d)
        torch.mm(d, weight)
        torch.mm(d.t(), hidden)

    return run


def on_device(run: Callable[[], Any], rounds: int = 7) -> float:
    """Milliseconds, the median of single calls."""
    times = []
    for i in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i > 1:
            times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).float().norm() / y.float().norm()) for x, y in zip(a, b, strict=True))


def device_rows(shape: Shape) -> list[Row]:
    inputs = inputs_of(shape)
    right = apart(both(ours, inputs), both(theirs, inputs)) < 1e-2
    torch.cuda.empty_cache()
    peaks = []
    for loss in (ours, theirs):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both(loss, inputs)
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
    mine, other = (on_device(lambda f=f: both(f, inputs)) for f in (ours, theirs))
    bare = on_device(products(shape, inputs))
    rate = 6 * shape.tokens * shape.channels * shape.words / 1e9
    return [
        ratio_row(f"{shape} against torch untiled", right, mine, other, 1.0),
        {
            "work": f"{shape}: share of the rate of its three products",
            "right": right,
            "ours": f"{rate / mine:.0f} TFLOP/s, {mine:.1f} ms",
            "other": f"products: {rate / bare:.0f} TFLOP/s, {bare:.1f} ms",
            "ratio": f"{bare / mine:.3f}x",
            "bar": ">= 0.7x",
            "met": bare / mine >= 0.7,
        },
        memory_row(shape, peaks[0], peaks[1], right),
    ]


def memory_row(shape: Shape, mine: float, other: float, right: bool) -> Row:
    return {
        "work": f"{shape}: peak memory over the inputs",
        "right": right,
        "ours": f"{mine:.2f} GiB",
        "other": f"torch untiled: {other:.2f} GiB",
        "ratio": f"1/{other / mine:.1f}",
        "bar": "<= 1/8" if shape.device == "cpu" else "",
        "met": shape.device != "cpu" or other / mine >= 8,
    }


def host_peak(who: str) -> float:
    """GiB over what the process had, in a process of its own."""
    command = [sys.executable, __file__, "--peak", who]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def peak_main(who: str) -> None:
    loss = ours if who == "ours" else theirs
    both(loss, inputs_of(CPU._replace(tokens=64, words=500)))  # libraries load
    inputs = inputs_of(CPU)
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    both(loss, inputs)
    print((resident("VmHWM") - before) / 2**20)


def host_rows(shape: Shape) -> list[Row]:
    torch.set_num_threads(2)
    inputs = inputs_of(shape)
    right = apart(both(ours, inputs), both(theirs, inputs)) < 1e-4
    mine, other = in_turns(
        lambda: both(ours, inputs), lambda: both(theirs, inputs), rounds=5, warm=1
    )
    return [
        ratio_row(f"{shape}, 2 threads, against torch untiled", right, mine, other, 1.0),
        memory_row(shape, host_peak("ours"), host_peak("theirs"), right),
    ]


def parts(_: pathlib.Path) -> list[Part]:
    if torch.cuda.is_available():
        return [lambda: device_rows(GPU)]
    return [lambda: host_rows(CPU)]


if __name__ == "__main__":
    if "--peak" in sys.argv:
        peak_main(sys.argv[2])
    else:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "2 cores"
        sys.exit(main(__doc__ or "", "The loss in tiles", where, parts))
