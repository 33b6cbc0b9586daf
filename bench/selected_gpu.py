"""Selected keys on a GPU: the indexer with its selection, and attention to listed
keys in both directions, against torch's operators in the same run and against what
others reached on an H200.

    python bench/selected_gpu.py --save bench/results

bfloat16, causal, 2048 slots, lists random and ascending. TFLOP/s count all slots, also
those that a query near the start leaves empty: 2 T H k (Dk + Dv) forward, 2 T H k
(3 Dk + 2 Dv) backward with everything that a call launches. Times are medians of single
calls between events, with the least and the greatest. `answer` says how far some rows of
the call that is timed are from double precision; dkv, which all rows make, is compared on
1024 tokens. torch's own selection sums in bfloat16, so its answer is not the same.
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
from machine import write_whole

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


class Times(NamedTuple):
    """Milliseconds."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        digits = 1 if self.median >= 10 else 2 if self.median >= 1 else 3
        return (
            f"{self.median:.{digits}f} ({self.least:.{digits}f} to {self.greatest:.{digits}f}) ms"
        )


def time_of(run: Callable[[], Any], calls: int = 7) -> Times:
    run()
    times = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return Times(statistics.median(times), min(times), max(times))


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
        "value": 2 * 8192**3 / took.median / 1e9,
        "unit": "TFLOP/s",
        "took": took,
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
        theirs = time_of(lambda: torch_selection(q, k, w, slots), 3).median
    yield {
        "work": f"indexer {heads} x {dim} and the best {slots}, {tokens} tokens",
        "right": right,
        "error": "a stable sort of its own scores",
        "value": took.median,
        "unit": "ms",
        "took": took,
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
            "value": (torch.cuda.max_memory_allocated() - before) / 2**30,
            "unit": "GiB",
            "less": True,
            **Others("19.6 GiB", "17 GiB", 0.6, 0.55)._asdict(),
        }
    if tokens == 4096:
        return
    lists = select()
    grads = normal(tokens, slots, dtype=torch.float32, seed=3)

    def score() -> Any:
        return ops.score_selected(q, k, w, lists)

    def score_backward() -> Any:
        return ops.score_selected_backward(grads, q, k, w, lists, True)

    exact = [t.double() for t in (q[some], k, w[some])]
    truth = ops.score_selected(*exact, lists[some])
    listed = lists[some] >= 0
    error = off(score()[some][listed], truth[listed])
    dq, _, dw = score_backward()
    true_dq, _, true_dw = ops.score_selected_backward(
        grads[some].double(), *exact, lists[some], True
    )
    errors = off(dq[some], true_dq), off(dw[some], true_dw)
    for work, run, right, answer in (
        ("scores of listed keys", score, error < 1e-6, f"{error:.0e}"),
        (
            "their derivative", score_backward, errors[0] < 6e-3 and errors[1] < 1e-5,
            "dq {:.1e}, dweights {:.0e}".format(*errors),
        ),
    ):  # fmt: skip
        took = time_of(run)
        yield {
            "work": f"{work}, {heads} x {dim}, {slots} slots, {tokens} tokens",
            "right": right,
            "error": answer,
            "value": took.median,
            "unit": "ms",
            "took": took,
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


class Call:
    """One call of both directions."""

    def __init__(self, form: Form) -> None:
        self.q = normal(form.tokens, form.heads, form.dim)
        self.kv = normal(form.tokens, form.dim, seed=1)
        self.dout = normal(form.tokens, form.heads, 512, seed=2)
        self.sink = normal(form.heads, dtype=torch.float32, seed=3) if form.sink else None
        self.lists = causal_lists(form.tokens, form.slots)
        self.scale = form.dim**-0.5
        self.out, self.lse = self.forward()

    def some(self, queries: torch.Tensor) -> Call:
        """This call for some queries, in double precision."""
        part = object.__new__(Call)
        part.q, part.dout = self.q[queries].double(), self.dout[queries].double()
        part.kv = self.kv.double()
        part.sink = None if self.sink is None else self.sink.double()
        part.lists, part.scale = self.lists[queries], self.scale
        part.out, part.lse = part.forward()
        return part

    def forward(self) -> Any:
        return ops.attend_selected(self.q, self.kv, self.lists, self.sink, self.scale, 512)

    def backward(self) -> Any:
        return ops.attend_selected_backward(
            self.dout, self.q, self.kv, self.lists, self.sink, self.out, self.lse,
            self.scale, 512, True,
        )  # fmt: skip

    def weights(self) -> Any:
        return ops.selected_weights(self.q, self.kv, self.lists, self.lse, self.sink, self.scale)


def errors_of_dkv(form: Form) -> float:
    small = Call(form._replace(tokens=1024, slots=min(form.slots, 512)))
    every = torch.arange(1024, device="cuda")
    return off(small.backward()[1], small.some(every).backward()[1])


def attention_rows(form: Form, forward: Others, backward: Others) -> Iterator[Row]:
    call = Call(form)
    queries = torch.linspace(0, form.tokens - 1, 16, device="cuda").long()
    exact = call.some(queries)
    pairs = 2 * form.tokens * form.heads * form.slots / 1e9
    errors = off(call.out[queries], exact.out), off(call.lse[queries], exact.lse)
    took = time_of(call.forward)
    theirs = None
    if form.tokens <= 4096:
        theirs = time_of(lambda: torch_attention(call.q, call.kv, call.lists, call.scale), 3)
    rate = pairs * (form.dim + 512)
    yield {
        "work": f"attention to listed keys forward, {form}",
        "right": errors[0] <= 2.8e-3 and errors[1] <= 1e-6,
        "error": "out {:.1e}, lse {:.0e}".format(*errors),
        "value": rate / took.median,
        "unit": "TFLOP/s",
        "took": took,
        "torch": None if theirs is None else rate / theirs.median,
        **forward._asdict(),
    }
    errors = off(call.backward()[0][queries], exact.backward()[0]), errors_of_dkv(form)
    took = time_of(call.backward)
    yield {
        "work": f"backward, {form}",
        "right": errors[0] <= 6e-3 and errors[1] <= 4.8e-3,
        "error": "dq {:.1e}, dkv {:.1e}".format(*errors),
        "value": pairs * (3 * form.dim + 2 * 512) / took.median,
        "unit": "TFLOP/s",
        "took": took,
        **backward._asdict(),
    }
    if form.tokens == 16384:
        error = off(call.weights()[queries], exact.weights())
        took = time_of(call.weights)
        yield {
            "work": f"weights of listed keys, {form}",
            "right": error <= 1e-5,
            "error": f"{error:.0e}",
            "value": took.median,
            "unit": "ms",
            "took": took,
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

    if row.get("bar") is None or not row.get("right", True):
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
        "its TileLang kernels; FlashMLA forward, cuDNN backward and indexer; all skip empty "
        "tails where they can), not in this run",
        "",
        "| work | answer | ours | took | torch | reference | best public | bar | goal | reached |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in all_rows:
        answer = "" if "right" not in row else row["error"] if row["right"] else "WRONG"
        cells = [shown(row, name) for name in ("torch", "reference", "public", "bar", "goal")]
        lines.append(
            f"| {row['work']} | {answer} | {shown(row, 'value')} {row['unit']} "
            f"| {row.get('took', '')} | " + " | ".join(cells) + f" | {verdict(row)} |"
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
        write_whole(options.save / name, text)
    return 0 if all(row.get("right", True) for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
