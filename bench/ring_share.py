"""One rank's share of a causal head-tail ring on a GPU, without the wire,
against torch's attention on one rank.

    python bench/ring_share.py build/dev --save bench/results/...md

The other ranks are not there: what they would send lies ready, and everything
else is what `attend` does. The whole ring is played first, one rank after
another, and must give one rank's answer. TFLOP/s count visible pairs: 4 times
heads and channels for each of them forward, and 10 times backward.

Attention brings a card to the limit of its power, and then its clock falls. So
times are taken in turns, over as much work for each (a share as often as there
are ranks), once after a rest and once after as long under the same load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import report
from machine import write_whole
from torch.nn.attention import SDPBackend, sdpa_kernel

import longspan
from longspan import Group, Ownership

Row = dict[str, Any]
Tensors = list[torch.Tensor]


class Shape(NamedTuple):
    tokens: int
    ranks: int
    heads: int
    key_heads: int
    dim: int


class Whole(NamedTuple):
    """The sequence of all ranks, [tokens, heads, dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def of(self, tokens: torch.Tensor) -> Whole:
        return Whole(*(t.index_select(0, tokens) for t in self))

    def key_block(self, ranges: list[Any]) -> torch.Tensor:
        """Keys and values side by side, as they travel."""
        places = [slice(r.begin, r.end) for r in ranges]
        return torch.cat([torch.cat([self.k[p], self.v[p]], 2) for p in places]).unsqueeze(1)


def both_ways(attend: Callable[..., Any], inputs: Whole) -> Tensors:
    """Output and gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = attend(*leaves)
    out.backward(inputs.dout)
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


def sdpa(backend: SDPBackend | None) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    return attend


class Share:
    """One rank, and what the others would send to it."""

    def __init__(
        self,
        shape: Shape,
        whole: Whole,
        rank: int,
        gradients: Tensors | None = None,
        copies: bool = False,
    ) -> None:
        self.owners = Ownership.head_tail(shape.tokens, shape.ranks)
        self.layout = longspan.AttentionLayout(self.owners)
        self.plan = longspan.plan(self.owners, rank=rank, key_heads=shape.key_heads)
        self.pairs = sum(step.pairs for step in self.plan.steps)
        self.tokens = self.owners.tokens_of(rank).to(whole.q.device)
        self.inputs = whole.of(self.tokens)
        keys = [whole.key_block(r) for step in self.plan.steps for _, r in step.arrivals]
        if gradients is None:
            gradients = [
                torch.zeros(sum(r.end - r.begin for r in ranges), 1, shape.key_heads,
                            2 * shape.dim, device=whole.q.device)
                for step in self.plan.steps for _, ranges in step.homecomings
            ]  # fmt: skip
        ops = torch.ops.longspan_bench
        self.name = ops.absent_ranks(rank, shape.ranks, keys, gradients, copies)
        self.group = Group.named(self.name)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return longspan.attend(q, k, v, attention=self.layout, group=self.group)

    def run(self) -> Tensors:
        return both_ways(self.attend, self.inputs)

    def run_and_keep(self) -> tuple[Tensors, Tensors]:
        """The answer, and the gradients it sends home."""
        torch.ops.longspan_bench.sent_gradients(self.name, self.inputs.q)
        answer = self.run()
        return answer, torch.ops.longspan_bench.sent_gradients(self.name, self.inputs.q)


def homecomings(shares: list[Share], sent: list[Tensors], rank: int) -> Tensors:
    """What the others found about the keys of a rank, step by step."""
    coming = []
    for i, step in enumerate(shares[rank].plan.steps):
        for peer, _ in step.homecomings:
            before = sum(len(s.returns) for s in shares[peer].plan.steps[:i])
            targets = [to for to, _ in shares[peer].plan.steps[i].returns]
            coming.append(sent[peer][before + targets.index(rank)])
    return coming


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = got.float(), expected.float()
    return float((a - b).norm() / b.norm())


def timed(
    functions: dict[str, Callable[[], Any]], calls: dict[str, int], rested: bool, rounds: int
) -> dict[str, float]:
    """Median milliseconds of a call, in turns."""
    took: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if rested:
                time.sleep(0.5)
            else:
                for _ in range(2 * calls[name]):
                    function()
            start.record()
            for _ in range(calls[name]):
                function()
            end.record()
            end.synchronize()
            took[name].append(start.elapsed_time(end) / calls[name])
    return {name: statistics.median(times) for name, times in took.items()}


class Memory(NamedTuple):
    kept: int  # between the passes, the inputs with it
    peak: int  # during both


def memory_of(attend: Callable[..., Any], inputs: Whole) -> Memory:
    both_ways(attend, inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    given = sum(t.nbytes for t in inputs)
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = attend(*leaves)
    kept = torch.cuda.memory_allocated() - before + given - inputs.dout.nbytes
    out.backward(inputs.dout)
    torch.cuda.synchronize()
    return Memory(kept, torch.cuda.max_memory_allocated() - before + given)


def speed_rows(shape: Shape, whole: Whole, shares: list[Share], right: bool,
               rounds: int) -> Iterator[Row]:  # fmt: skip
    def one_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return longspan.attend(q, k, v)

    cuda = whole.q.is_cuda
    played = {f"rank {share.plan.rank}": share for share in (shares[0], shares[-1])}
    others: dict[str, Callable[..., Any]] = {
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION if cuda else None),
        "flash": sdpa(SDPBackend.FLASH_ATTENTION if cuda else None),
        "one rank": one_rank,
    }
    functions: dict[str, Callable[[], Any]] = {
        **{name: share.run for name, share in played.items()},
        **{name: lambda f=f: both_ways(f, whole) for name, f in others.items()},
    }
    counted = {name: share.pairs for name, share in played.items()}
    calls = {name: shape.ranks if name in played else 1 for name in functions}
    for function in functions.values():
        function()
    for state in ("after a rest", "under load"):
        times = dict.fromkeys(functions, math.nan)
        if cuda:
            times = timed(functions, calls, state == "after a rest", rounds)
        pairs = shape.tokens * (shape.tokens + 1) // 2
        speed = {
            name: 14 * counted.get(name, pairs) * shape.heads * shape.dim / took / 1e9
            for name, took in times.items()
        }
        for name, other, wanted in (
            *((name, "cuDNN", 0.92) for name in played),
            ("one rank", "cuDNN", 0.92),
            (f"rank {shape.ranks - 1}", "flash", 1.0),
        ):
            ratio = speed[name] / speed[other]
            yield {
                "work": f"{name}{f' of {shape.ranks}' * (name in played)} against SDPA by {other} "
                f"on one rank, {state}",
                "right": right,
                "ours": f"{speed[name]:.0f} TFLOP/s, {times[name]:.2f} ms",
                "other": f"{speed[other]:.0f} TFLOP/s, {times[other]:.2f} ms",
                "ratio": f"{ratio:.3f}x",
                "bar": f">= {wanted}x",
                "met": ratio >= wanted,
            }


def kernels_of(share: Share, runs: int = 6) -> str:
    """Where the time of a share goes, under load."""
    for _ in range(4 * runs):
        share.run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        for _ in range(runs):
            share.run()
        host = (time.perf_counter() - start) / runs
        torch.cuda.synchronize()
    table: str = profile.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=10, max_name_column_width=60
    )
    kernels = [e.time_range for e in profile.events() if e.device_type.name == "CUDA"]
    busy = sum(k.end - k.start for k in kernels) / runs / 1e3
    span = (max(k.end for k in kernels) - min(k.start for k in kernels)) / runs / 1e3
    return f"{table}\neach run: {span:.2f} ms, kernels {busy:.2f} ms, host {host * 1e3:.2f} ms\n"


def memory_rows(shape: Shape, whole: Whole) -> Iterator[Row]:
    share = Share(shape, whole, shape.ranks - 1, copies=True)
    part = memory_of(share.attend, share.inputs)
    one = memory_of(lambda q, k, v: longspan.attend(q, k, v), whole)
    for name, ours, other, bar in (
        ("bytes kept from forward to backward", part.kept, one.kept, 1.05),
        ("peak bytes of both passes", part.peak, one.peak, None),
    ):
        ratio = ours * shape.ranks / other
        yield {
            "work": f"{name}, rank {shape.ranks - 1} of {shape.ranks} against one rank",
            "right": True,
            "ours": f"{ours / 2**20:.0f} MiB",
            "other": f"{other / 2**20:.0f} MiB",
            "ratio": f"1/{shape.ranks} x {ratio:.3f}",
            "bar": f"1/{shape.ranks} within 5 %" if bar else "",
            "met": bar is None or ratio <= bar,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda", help="cpu checks the answer only")
    parser.add_argument("--profile", action="store_true", help="print kernels of a share too")
    parser.add_argument("--save", type=pathlib.Path, help="also write the table here")
    parser.add_argument("--json", action="store_true", help="print JSON too")
    options = parser.parse_args()
    torch.ops.load_library(options.build / "bench" / "absent_ranks.so")
    shape = Shape(options.tokens, options.ranks, options.heads, options.key_heads, options.dim)

    torch.manual_seed(0)
    like = {"device": options.device, "dtype": torch.bfloat16}
    q, dout = (torch.randn(shape.tokens, shape.heads, shape.dim, **like) for _ in range(2))
    k, v = (torch.randn(shape.tokens, shape.key_heads, shape.dim, **like) for _ in range(2))
    whole = Whole(q, k, v, dout)

    backend = SDPBackend.CUDNN_ATTENTION if options.device == "cuda" else None
    expected = both_ways(sdpa(backend), whole)
    shares = [Share(shape, whole, rank) for rank in range(shape.ranks)]
    sent = [share.run_and_keep()[1] for share in shares]
    worst = 0.0
    for rank in range(shape.ranks):
        coming = homecomings(shares, sent, rank)
        share = Share(shape, whole, rank, coming)
        for got, truth in zip(share.run(), expected, strict=True):
            worst = max(worst, apart(got, truth.index_select(0, share.tokens)))
        if rank in (0, shape.ranks - 1):
            shares[rank] = share
    del sent, expected
    right = worst < 1e-2  # bf16 against bf16
    rows = list(speed_rows(shape, whole, shares, right, options.rounds))
    if options.device == "cuda":
        kernel = longspan.which_kernel(*shares[0].inputs[:3])
        device = torch.cuda.get_device_name()
        if options.profile:
            for share in (shares[0], shares[-1]):
                print(kernels_of(share))
        shares.clear()
        rows += memory_rows(shape, whole)
    else:
        kernel = device = "cpu"
    text = report(rows, "One rank's share of a ring, without the wire", device, "make bench-cuda")
    text += (
        f"\n{shape.tokens} tokens on one rank, {shape.tokens // shape.ranks} in a share; forward "
        f"and backward; {shape.heads} heads and {shape.key_heads} key heads of {shape.dim} "
        f"channels, bfloat16, causal, head-tail, [tokens, heads, channels] in memory; kernel: "
        f"{kernel}. The ring as a whole, played rank by rank, is "
        f"{worst:.1e} (relative norm, the worst of out, dq, dk and dv) from SDPA on one rank.\n"
    )
    print(text, end="")
    if options.json:
        print(json.dumps(rows, indent=2))
    if options.save:
        write_whole(options.save, text)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
