"""Selected keys on a GPU: the indexer with its selection, and attention to listed
keys in both directions, against torch's operators in the same run and against what
others reached on an H200.

    python bench/selected_gpu.py --save bench/results

bfloat16, causal, 2048 slots, lists random and ascending. TFLOP/s count all slots, also
those that a query near the start leaves empty: 2 T H k (Dk + Dv) forward, 2 T H k
(3 Dk + 2 Dv) backward with everything that a call launches. Times are medians of single
calls between events. What a row says of `answer` was checked just before it was timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from harness import commit, versions

Row = dict[str, Any]
ops = torch.ops.longspan
BF16 = torch.bfloat16


class Others(NamedTuple):
    """Figures of others for the same work on an H200, and what ours are held to."""

    reference: str = ""
    public: str = ""
    bar: float | None = None
    goal: float | None = None


def normal(*sizes: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, generator=g, device="cuda", dtype=dtype)


def time_of(run: Callable[[], Any], calls: int = 5) -> float:
    """Median milliseconds."""
    run()
    times = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def causal_lists(tokens: int, slots: int, seed: int = 1) -> torch.Tensor:
    """Query t lists min(t + 1, slots) of its keys, one from each of equal parts."""
    g = torch.Generator("cuda").manual_seed(seed)
    lists = torch.empty(tokens, slots, dtype=torch.int32, device="cuda")
    j = torch.arange(slots, device="cuda")
    for first in range(0, tokens, 4096):
        seen = torch.arange(first, min(first + 4096, tokens), device="cuda").unsqueeze(1) + 1
        low, high = j * seen // slots, (j + 1) * seen // slots
        share = torch.rand(low.shape, generator=g, device="cuda")
        chosen = (low + (share * (high - low)).long()).minimum(high - 1)
        every = torch.where(j < seen, j, -1)
        lists[first : first + 4096] = torch.where(seen <= slots, every, chosen)
    return lists


def causal_window(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    end = torch.arange(1, tokens + 1, dtype=torch.int32, device="cuda")
    return torch.zeros_like(end), end


def off(a: torch.Tensor, truth: torch.Tensor) -> float:
    return float((a.double() - truth.double()).norm() / truth.double().norm())


def torch_selection(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, slots: int, rows: int = 256
) -> torch.Tensor:
    """The indexer as torch's operators have it, some queries at a time."""
    tokens, picked = q.shape[0], []
    keys = torch.arange(tokens, device="cuda")
    for first in range(0, tokens, rows):
        some = slice(first, min(first + rows, tokens))
        products = torch.einsum("thd,sd->ths", q[some], k).relu()
        scores = torch.einsum("ths,th->ts", products, w[some].to(BF16)).float()
        seen = keys <= torch.arange(some.start, some.stop, device="cuda").unsqueeze(1)
        scores = scores.masked_fill(~seen, -torch.inf)
        picked.append(scores.topk(min(slots, tokens), -1).indices.int())
    return torch.cat(picked)


def torch_attention(
    q: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor, scale: float, rows: int = 64
) -> torch.Tensor:
    """Gathered keys and torch's attention, some queries at a time."""
    out = []
    for first in range(0, q.shape[0], rows):
        some = slice(first, first + rows)
        keys = kv[lists[some].clamp_min(0)]
        empty = (lists[some] < 0).unsqueeze(1)
        scores = (torch.matmul(q[some], keys.mT) * scale).masked_fill(empty, -torch.inf)
        out.append(torch.matmul(scores.float().softmax(-1).to(BF16), keys[..., :512]))
    return torch.cat(out)


def yardstick() -> Iterator[Row]:
    a, b = normal(8192, 8192), normal(8192, 8192, seed=1)
    took = time_of(lambda: a @ b, 11)
    yield {
        "work": "yardstick: torch.matmul, 8192 x 8192 x 8192",
        "value": 2 * 8192**3 / took / 1e9,
        "unit": "TFLOP/s",
    }


def selection_rows(tokens: int, others: Others, heads: int = 32, dim: int = 128) -> Iterator[Row]:
    slots = 2048
    q, k = normal(tokens, heads, dim), normal(tokens, dim, seed=1)
    w = normal(tokens, heads, dtype=torch.float32, seed=2)
    start, end = causal_window(tokens)

    def select() -> Any:
        return ops.select_keys(q, k, w, start, end, slots, False)[1]

    lists = select()
    some = torch.linspace(0, tokens - 1, 24, device="cuda").long()
    given = (q[some], k, w[some], start[some], end[some])
    scores, keys = ops.select_keys(*given, tokens, True)
    right = True
    for i, t in enumerate(some.tolist()):
        order = scores[i, : t + 1].sort(descending=True, stable=True).indices
        want = keys[i].gather(0, order)[:slots].sort().values
        right &= torch.equal(lists[t, : min(t + 1, slots)], want)
        right &= bool((lists[t, t + 1 :] == -1).all())
    took = time_of(select)
    theirs = None
    if tokens <= 16384:
        theirs = time_of(lambda: torch_selection(q, k, w, slots), 1)
    yield {
        "work": f"indexer {heads} x {dim} and the best {slots}, {tokens} tokens",
        "right": right,
        "error": "a stable sort of its own scores",
        "value": took,
        "unit": "ms",
        "less": True,
        "torch": theirs,
        **others._asdict(),
    }
    del scores, keys, lists
    if tokens == 65536:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        select()
        yield {
            "work": "the same, memory at the peak over the inputs",
            "right": True,
            "error": "",
            "value": (torch.cuda.max_memory_allocated() - before) / 2**30,
            "unit": "GiB",
            "less": True,
            **Others("19.6 GiB", "17 GiB", 0.6, 0.55)._asdict(),
        }
    if tokens != 4096:
        lists = select()
        grads = normal(tokens, slots, dtype=torch.float32, seed=3)
        both = {
            "scores of listed keys": lambda: ops.score_selected(q, k, w, lists),
            "their derivative": lambda: ops.score_selected_backward(grads, q, k, w, lists, True),
        }
        for work, run in both.items():
            yield {
                "work": f"{work}, {heads} x {dim}, {slots} slots, {tokens} tokens",
                "right": True,
                "error": "tests",
                "value": time_of(run, 3),
                "unit": "ms",
                "less": True,
            }


class Form(NamedTuple):
    tokens: int
    heads: int = 64
    dim: int = 576
    slots: int = 2048
    sink: bool = False

    def __str__(self) -> str:
        sinks = " with sinks" * self.sink
        return (
            f"{self.dim}/512{sinks}, {self.heads} heads, {self.slots} slots, {self.tokens} tokens"
        )


def errors_of(form: Form) -> tuple[bool, str]:
    """Of out, dq, dkv and lse on a small stream with every key in play."""
    small = form._replace(tokens=1024, slots=min(form.slots, 512))
    q, kv = normal(small.tokens, small.heads, small.dim), normal(small.tokens, small.dim, seed=1)
    dout = normal(small.tokens, small.heads, 512, seed=2)
    sink = normal(small.heads, dtype=torch.float32, seed=3) if form.sink else None
    lists = causal_lists(small.tokens, small.slots)
    options = (sink, small.dim**-0.5, 512)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        args = q.to(dtype), kv.to(dtype), lists
        extra = (None if sink is None else sink.to(args[0].dtype), *options[1:])
        out, lse = ops.attend_selected(*args, *extra)
        back = ops.attend_selected_backward(
            dout.to(dtype), *args, extra[0], out, lse, *extra[1:], True
        )
        return [out, back[0], back[1], lse]

    errors = [off(a, b) for a, b in zip(run(BF16), run(torch.double), strict=True)]
    bars = [2.8e-3, 6e-3, 4.8e-3, 1e-6]
    right = all(e <= bar for e, bar in zip(errors, bars, strict=True))
    return right, "out {:.1e}, dq {:.1e}, dkv {:.1e}, lse {:.0e}".format(*errors)


def attention_rows(form: Form, forward: Others, backward: Others | None) -> Iterator[Row]:
    right, error = errors_of(form)
    q, kv = normal(form.tokens, form.heads, form.dim), normal(form.tokens, form.dim, seed=1)
    sink = normal(form.heads, dtype=torch.float32, seed=3) if form.sink else None
    lists = causal_lists(form.tokens, form.slots)
    options = (sink, form.dim**-0.5, 512)
    out, lse = ops.attend_selected(q, kv, lists, *options)
    pairs = 2 * form.tokens * form.heads * form.slots / 1e9
    took = time_of(lambda: ops.attend_selected(q, kv, lists, *options))
    theirs = None
    if form.tokens <= 4096:
        theirs = time_of(lambda: torch_attention(q, kv, lists, form.dim**-0.5), 1)
    yield {
        "work": f"attention to listed keys forward, {form}",
        "right": right,
        "error": error,
        "value": pairs * (form.dim + 512) / took,
        "unit": "TFLOP/s",
        "torch": None if theirs is None else pairs * (form.dim + 512) / theirs,
        **forward._asdict(),
    }
    if backward is not None:
        dout = normal(form.tokens, form.heads, 512, seed=2)
        took = time_of(
            lambda: ops.attend_selected_backward(
                dout, q, kv, lists, sink, out, lse, *options[1:], True
            )
        )
        yield {
            "work": f"backward, {form}",
            "right": right,
            "error": "as above",
            "value": pairs * (3 * form.dim + 2 * 512) / took,
            "unit": "TFLOP/s",
            **backward._asdict(),
        }
    if form.tokens == 16384:
        took = time_of(lambda: ops.selected_weights(q, kv, lists, lse, sink, options[1]), 3)
        yield {
            "work": f"weights of listed keys, {form}",
            "right": True,
            "error": "tests",
            "value": took,
            "unit": "ms",
            "less": True,
        }


def rows() -> Iterator[Row]:
    yield from yardstick()
    for tokens, others in (
        (4096, Others("1.04", "0.27", 0.35, 0.25)),
        (16384, Others("9.65", "3.1", 2.8, 2.2)),
        (65536, Others("128", "48", 38, 30)),
    ):
        yield from selection_rows(tokens, others)
    for tokens, forward, backward in (
        (4096, Others("317", "835", 760, 860), Others("59", "590", 200)),
        (16384, Others("327", "623", 580, 660), Others("53", "439", 200)),
        (65536, Others("323", "546", 520, 600), Others("50", "315", 180)),
    ):
        yield from attention_rows(Form(tokens), forward, backward)
    yield from attention_rows(Form(16384, 128), Others("331", "595", 570, 660), Others())
    v4 = Form(16384, dim=512, slots=640, sink=True)
    yield from attention_rows(v4, Others(bar=480, goal=600), Others())
    yield from yardstick()


def shown(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    digits = 0 if row["unit"] == "TFLOP/s" else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def verdict(row: Row) -> str:
    def reached(mark: float) -> bool:
        return bool(row["value"] <= mark if row.get("less") else row["value"] >= mark)

    if row.get("bar") is None:
        return ""
    if not reached(row["bar"]):
        return "bar missed"
    return "goal" if row.get("goal") is not None and reached(row["goal"]) else "bar"


def table(all_rows: list[Row]) -> str:
    lines = [
        "# Selected keys on a GPU",
        "",
        f"- date: {datetime.date.today()}, commit: {commit()}",
        f"- command: `make bench-gpu`, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
        f"- {versions()}",
        "- reference and best public: what others reached on an H200 before (the reference with "
        "its TileLang kernels; FlashMLA forward, cuDNN backward and indexer), not in this run",
        "",
        "| work | answer | ours | torch | reference | best public | bar | goal | reached |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in all_rows:
        answer = "" if "right" not in row else row["error"] if row["right"] else "WRONG"
        cells = [shown(row, name) for name in ("torch", "reference", "public", "bar", "goal")]
        lines.append(
            f"| {row['work']} | {answer} | {shown(row, 'value')} {row['unit']} | "
            + " | ".join(cells)
            + f" | {verdict(row)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=pathlib.Path, help="the folder to write the table to")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/selected_gpu.py: there is no CUDA device here", file=sys.stderr)
        return 1
    done = []
    for row in rows():
        done.append(row)
        if sys.stderr.isatty():
            print(f"\r{len(done)} rows ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r" + " " * 20 + "\r", end="", file=sys.stderr)
    text = table(done)
    print(json.dumps(done, indent=2) if options.json else text, end="")
    if options.save:
        card = torch.cuda.get_device_name().replace("NVIDIA", "").strip().lower().replace(" ", "-")
        name = f"selected-gpu_{card}_{datetime.date.today()}.md"
        (options.save / name).write_text(text)
    return 0 if all(row.get("right", True) for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
