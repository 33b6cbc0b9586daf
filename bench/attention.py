"""Costs of attention over ranks: bytes, memory, and time against torch.

    python bench/attention.py build/dev --save bench/results/...md

What has an answer checks it before it is timed. Times are ratios of medians
taken in turns in one run; two ranks are two processes over gloo.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.multiprocessing
import torch.nn.functional as F
from harness import Part, Row, in_turns, main, ratio_row

import longspan
from longspan import Group, Mask, Ownership, Packing


def step(attend: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Forward and backward; the output and the gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(ours, theirs, strict=True)
    )


def byte_rows() -> list[Row]:
    """Bytes counted where tensors are handed to c10d, against the plan."""
    rows = []
    packing = Packing.of([300, 70, 1, 130], [304, 72, 8, 256])
    ranks, heads, key_heads, dim = 4, 8, 2, 64
    for strategy in longspan.Strategy.names():
        sent: list[int] = []  # by every rank, one ownership after another
        planned: list[int] = []
        for ownership in (
            Ownership.contiguous(packing.tokens, ranks),
            Ownership.head_tail(packing.tokens, ranks),
            Ownership.per_document_head_tail(packing, ranks),
        ):
            mask = Mask.causal(packing)

            def work(
                group: Group, ownership: Ownership = ownership, mask: Mask = mask,
                strategy: str = strategy,
            ) -> int:  # fmt: skip
                local = ownership.local_tokens(group.rank())
                q = torch.randn(local, heads, dim, requires_grad=True)
                k, v = (torch.randn(local, key_heads, dim, requires_grad=True) for _ in range(2))
                before = group.sent_bytes
                longspan.attend(
                    q, k, v, mask=mask, layout=ownership, group=group, strategy=strategy
                ).sum().backward()  # type: ignore[union-attr]
                return group.sent_bytes - before

            sent += longspan.run_ranks(ranks, work)
            for rank in range(ranks):
                plan = longspan.plan(
                    ownership, mask, strategy=strategy, rank=rank, key_heads=key_heads
                )
                planned.append(
                    sum(
                        plan.sent_bytes(
                            direction, heads=heads, key_heads=key_heads, head_dim=dim,
                            bytes_per_element=4,
                        )
                        for direction in ("forward", "backward")
                    )
                )  # fmt: skip
        rows.append(
            {
                "work": f"bytes sent, {strategy}, 4 ranks, 3 ownerships, forward + backward",
                "right": True,
                "ours": f"{sum(sent)} bytes",
                "other": f"{sum(planned)} planned",
                "ratio": f"{sum(sent) / sum(planned):.4g}x",
                "bar": "equal",
                "met": sent == planned,
            }
        )
    return rows


def peak_of_rank(strategy: str, ranks: int, local: int) -> float:
    """Megabytes that a rank needs beyond its tensors, in a process of its own
    (its ranks are threads), from the high-water mark of the process."""
    script = f"""
import torch, longspan
torch.set_num_threads(1)
tokens = {local} * {ranks}
owners = longspan.Ownership.head_tail(tokens, {ranks})
layout = longspan.AttentionLayout(owners)
def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) / 1024
import threading
ready = threading.Barrier({ranks})
base = [0.0]
def work(group):
    q, k, v = (torch.randn(1, 4, {local}, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 4, {local}, 64)
    tiny = [torch.randn(1, 4, 2, 64, requires_grad=True) for _ in range(3)]
    small = longspan.AttentionLayout(longspan.Ownership.head_tail(2 * {ranks}, {ranks}))
    longspan.attend(*tiny, attention=small, group=group, strategy="{strategy}").sum().backward()
    if ready.wait() == 0:
        open("/proc/self/clear_refs", "w").write("5")
        base[0] = memory("VmRSS")
    ready.wait()
    longspan.attend(q, k, v, attention=layout, group=group, strategy="{strategy}").backward(dout)
longspan.run_ranks({ranks}, work, timeout=300)
print((memory("VmHWM") - base[0]) / {ranks})
"""
    # Without arenas and thresholds of malloc, freed memory goes back at once.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    out = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment
    ).stdout
    return float(out.split()[-1])


def memory_rows() -> list[Row]:
    local = 2048
    share = 4 * local * 64 * 4 / 2**20  # one of q, k, v
    rows = []
    for strategy, bar in (("ring", "flat in N"), ("gathered", "")):
        four, eight = (peak_of_rank(strategy, ranks, local) for ranks in (4, 8))
        rows.append(
            {
                "work": f"peak extra memory a rank, {strategy}, {local} tokens each, forward + "
                f"backward (a share of q is {share:.0f} MB)",
                "right": True,
                "ours": f"{eight:.1f} MB at N=8",
                "other": f"{four:.1f} MB at N=4",
                "ratio": f"{eight / four:.2f}x",
                "bar": bar,
                "met": not bar or eight / four < 1.1,
            }
        )
    return rows


def packed_rows() -> list[Row]:
    documents, length, heads, dim = 16, 512, 4, 64
    packing = Packing.rows(documents, length)
    tokens = packing.tokens
    q, k, v = (torch.randn(1, heads, tokens, dim) for _ in range(3))
    layout = longspan.AttentionLayout(Ownership.contiguous(tokens, 1), Mask.causal(packing))
    ids = torch.arange(tokens) // length
    dense = (ids[:, None] == ids[None, :]).tril()

    def ours() -> list[torch.Tensor]:
        return step(lambda q, k, v: longspan.attend(q, k, v, attention=layout), q, k, v)

    def theirs() -> list[torch.Tensor]:
        return step(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dense), q, k, v)

    right = close(ours(), theirs())
    t_ours, t_theirs = in_turns(ours, theirs, rounds=5)
    return [ratio_row(
        "16 packed documents of 512 against torch SDPA with the dense mask, fp32, fwd+bwd",
        right, t_ours, t_theirs, 4.0,
    )]  # fmt: skip


def torch_rows() -> list[Row]:
    rows = []
    q, k, v = (torch.randn(1, 8, 2048, 128) for _ in range(3))
    for name, mask, causal in (
        ("causal", Mask.causal(Packing.single(2048)), True),
        ("full", Mask.full(Packing.single(2048)), False),
    ):
        layout = longspan.AttentionLayout(Ownership.contiguous(2048, 1), mask)

        def ours(layout: longspan.AttentionLayout = layout) -> list[torch.Tensor]:
            return step(lambda q, k, v: longspan.attend(q, k, v, attention=layout), q, k, v)

        def theirs(causal: bool = causal) -> list[torch.Tensor]:
            return step(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, v
            )

        right = close(ours(), theirs())
        t_ours, t_theirs = in_turns(ours, theirs, rounds=5)
        rows.append(ratio_row(
            f"{name} attention of 2048 tokens, 8 x 128, against torch SDPA, fp32, fwd+bwd",
            right, t_ours, t_theirs, 1 / 3,
        ))  # fmt: skip
    return rows


TOKENS, HEADS, DIM = 8192, 4, 64


def timed_steps(group: Group, owners: Ownership) -> tuple[float, bool]:
    """Milliseconds, and whether the output is that of one rank."""
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, TOKENS, DIM) for _ in range(3)]
    mine = owners.tokens_of(group.rank())
    q, k, v = (t.index_select(2, mine) for t in whole)
    layout = longspan.AttentionLayout(owners)
    expected = longspan.attend(*whole).index_select(2, mine)  # type: ignore[union-attr]
    got = longspan.attend(q, k, v, attention=layout, group=group)
    right = torch.allclose(got, expected, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    times = []
    for _ in range(7):
        longspan.comm.agree(group, {})  # all at the same time
        start = time.perf_counter()
        step(lambda q, k, v: longspan.attend(q, k, v, attention=layout, group=group), q, k, v)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3, right


def rank_main(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(2 // ranks)
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks
        )
    group = Group.from_environment()
    took, right = timed_steps(group, Ownership.head_tail(TOKENS, ranks))
    pathlib.Path(folder, f"{ranks}-{rank}").write_text(json.dumps([took, right]))
    if ranks > 1:
        torch.distributed.destroy_process_group()


def ring_rows() -> list[Row]:
    took: dict[int, list[float]] = {1: [], 2: []}
    right = True
    for _ in range(3):  # in turns
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(rank_main, (ranks, folder), nprocs=ranks)
                found = [
                    json.loads(pathlib.Path(folder, f"{ranks}-{rank}").read_text())
                    for rank in range(ranks)
                ]
            took[ranks].append(max(milliseconds for milliseconds, _ in found))
            right = right and all(same for _, same in found)
    two, one = min(took[2]), min(took[1])
    return [
        {
            "work": "head-tail ring, 2 ranks x 1 thread against 1 rank x 2 threads, "
            f"{TOKENS} tokens, fp32, fwd+bwd",
            "right": right,
            "ours": f"{two:.0f} ms",
            "other": f"{one:.0f} ms",
            "ratio": f"{two / one:.3f}x the time",
            "bar": "<= 1.1x",
            "met": two / one <= 1.1,
        }
    ]


def overhead_rows(build: pathlib.Path) -> list[Row]:
    out = subprocess.run(
        [build / "bench" / "attention_bench"], check=True, capture_output=True, text=True
    ).stdout
    cpp = float(json.loads(out)["attend_us"])
    q = torch.randn(1, 2, 16, 16)
    ownership, mask = Ownership.contiguous(16, 1), Mask.causal(Packing.single(16))
    times = []
    for _ in range(4000):
        start = time.perf_counter()
        longspan.attend(q, q, q, mask=mask, layout=ownership)
        times.append((time.perf_counter() - start) * 1e6)
    extra = statistics.median(times[500:]) - cpp
    return [
        {
            "work": "attend on a tiny input from Python, over the same call in C++",
            "right": True, "ours": f"{extra:.0f} us more", "other": f"{cpp:.0f} us",
            "ratio": "", "bar": "< 50 us", "met": extra < 50,
        }
    ]  # fmt: skip


def parts(build: pathlib.Path) -> list[Part]:
    return [
        lambda: overhead_rows(build),
        byte_rows,
        memory_rows,
        ring_rows,
        packed_rows,
        torch_rows,
    ]


if __name__ == "__main__":
    sys.exit(
        main(
            __doc__ or "",
            "Attention over ranks",
            "one thread a rank unless it says otherwise",
            parts,
        )
    )
