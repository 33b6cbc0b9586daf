"""Dense attention on a GPU: documents, windows, softcap, sinks and wide heads, ours against
the kernels of torch that we took before, flex_attention (compiled) and SDPA, in one run.
Where ours leaves a call to cuDNN because that is faster, our own kernel is timed as well.

    python bench/dense_gpu.py --save bench/results
    python bench/dense_gpu.py --only documents

bfloat16, [1, heads, tokens, channels] in memory, 16384 tokens unless said. TFLOP/s count
visible pairs: 2 (D + Dv) for each of them and each head forward, 2 (4 D + 3 Dv) in both
directions. Times are medians of batches between events, taken in turns, since the clock
falls under load; a yardstick is taken before and after. flex is given one pair of bounds
for each query, whatever the mask, and is compiled for each shape; the time for compiling
is not counted, but when there is no time left, what is not compiled is left out.

`fixed order` is the time of our own backward kernel while torch is told to be
deterministic, by its time in any order; the bar is 1.25.

`answer` says how far ours is from double precision: out, lse and dq of 64 queries of two
heads, dk and dv of 32 keys of two key heads.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness import commit, versions
from machine import write_whole
from torch.nn.attention import SDPBackend, sdpa_kernel

import longspan
from longspan import AttentionLayout, Mask, Ownership, Packing

Row = dict[str, Any]
Run = Callable[[], Any]
BF16 = torch.bfloat16
TOKENS = 16384
#: What LONGSPAN_CUDA_KERNEL is for them.
FORCED = {"own kernel": "hopper", "old path": "cudnn"}
OTHERS = (*FORCED, "flex", "SDPA")


class Speed(NamedTuple):
    """TFLOP/s."""

    forward: float
    both: float

    def __str__(self) -> str:
        return f"{self.forward:.0f} / {self.both:.0f}"

    def reaches(self, other: Speed) -> bool:
        return self.forward >= other.forward and self.both >= other.both


class Case(NamedTuple):
    name: str
    lengths: tuple[int, ...] = (TOKENS,)
    window: int | None = None
    heads: int = 32
    key_heads: int = 8
    dim: int = 128
    value_dim: int = 128
    softcap: float = 0.0
    sinks: bool = False
    against: tuple[str, ...] = ("old path",)
    bar: Speed | None = None  # of ours
    goal: Speed | None = None
    of_sdpa: bool = False  # bar and goal are multiples of SDPA's, of this run

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def mask(self) -> Mask:
        packing = Packing.of(list(self.lengths))
        return Mask.causal(packing) if self.window is None else Mask.sliding(packing, self.window)

    def flops(self, pairs: int) -> Speed:
        each = 2 * pairs * self.heads
        both = 4 * self.dim + 3 * self.value_dim
        return Speed(each * (self.dim + self.value_dim), each * both)


def wide(name: str, **others: Any) -> Case:
    return Case(name, heads=16, dim=256, value_dim=256, **others)


def sinks(name: str, **others: Any) -> Case:
    return Case(name, heads=64, dim=64, value_dim=64, sinks=True, **others)


HALVES = (*(TOKENS >> i for i in range(1, 15)), 1)
CASES = [
    Case("128 channels, causal, 32/8", against=OTHERS, of_sdpa=True,
         bar=Speed(0.95, 0.95), goal=Speed(1.05, 1.05)),
    Case("16 documents of 1024", (1024,) * 16, against=("old path", "flex"),
         bar=Speed(420, 350), goal=Speed(520, 450)),
    Case("documents 8192, 4096, ... 2, 1, 1", HALVES, against=("old path", "flex"),
         bar=Speed(560, 480), goal=Speed(620, 560)),
    Case("window 4096, 32/8", window=4096, against=("old path", "flex"),
         bar=Speed(560, 470), goal=Speed(640, 560)),
    Case("MLA 192 / 128, 32/32", key_heads=32, dim=192, against=(*FORCED, "SDPA"),
         bar=Speed(630, 540), goal=Speed(700, 600)),
    wide("256 channels, causal, 16/8", against=OTHERS, bar=Speed(650, 430), goal=Speed(720, 480)),
    wide("256 channels, window 1024, 16/8", window=1024, against=("old path", "flex"),
         bar=Speed(450, 330), goal=Speed(560, 420)),
    wide("256 channels, softcap 50, 16/8", softcap=50.0, against=("old path", "flex"),
         bar=Speed(400, 280), goal=Speed(500, 360)),
    Case("512 channels, causal, 16/4", heads=16, key_heads=4, dim=512, value_dim=512,
         against=("old path", "SDPA"), bar=Speed(330, 200), goal=Speed(480, 300)),
    sinks("64 channels, sinks, causal, 64/8", against=tuple(FORCED),
          bar=Speed(430, 400), goal=Speed(500, 450)),
    sinks("64 channels, sinks, window 128, 64/8", window=128,
          bar=Speed(140, 110), goal=Speed(250, 180)),
]  # fmt: skip


def web_lengths(tokens: int = 65536) -> tuple[int, ...]:
    """Log-normal with a median of 600, as the lengths of pages are; the last one is cut."""
    random = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = math.exp(math.log(600) + 1.3 * float(torch.randn((), generator=random)))
        lengths.append(min(max(1, round(drawn)), tokens - sum(lengths)))
    return tuple(lengths)


def more_cases() -> list[Case]:
    web = web_lengths()
    growth = [
        Case(f"documents: {n * n} of {TOKENS // n}, equal pairs", (TOKENS // n,) * (n * n),
             against=()) for n in (1, 2, 4, 8)
    ]  # fmt: skip
    short = Case("1024 documents of 16", (16,) * 1024)
    return [
        Case(f"web: {len(web)} documents, 65536 tokens", web, against=("old path", "flex")),
        *growth,
        short,
    ]


def normal(*sizes: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, generator=random, device="cuda", dtype=dtype)


class Bounds(NamedTuple):
    """The keys [begin, end) of every query."""

    begin: torch.Tensor
    end: torch.Tensor

    @staticmethod
    def of(case: Case) -> Bounds:
        lengths = torch.tensor(case.lengths, device="cuda")
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        query = torch.arange(case.tokens, device="cuda")
        begin = first if case.window is None else first.maximum(query - case.window + 1)
        return Bounds(begin.int(), (query + 1).int())


class Call:
    """The tensors of a case, and the ways to attend to them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        sizes = (
            (case.heads, case.dim), (case.key_heads, case.dim),
            (case.key_heads, case.value_dim), (case.heads, case.value_dim),
        )  # fmt: skip
        q, k, v, self.dout = (
            normal(1, heads, case.tokens, dim, seed=i) for i, (heads, dim) in enumerate(sizes)
        )
        self.leaves = [t.requires_grad_() for t in (q, k, v)]
        self.sink = normal(case.heads, dtype=torch.float32, seed=9) if case.sinks else None
        self.mask = case.mask()
        self.layout = AttentionLayout(Ownership.contiguous(case.tokens, 1), self.mask)
        self.bounds = Bounds.of(case)
        everything = (0, case.tokens)
        self.pairs = self.mask.pairs(everything, everything)
        seen = int((self.bounds.end - self.bounds.begin).long().sum())
        assert seen == self.pairs, f"{case.name}: the mask has {self.pairs} pairs, flex {seen}"

    def kernel(self) -> str:
        q, k, v = self.leaves
        return longspan.which_kernel(q, k, v, mask=self.mask, softcap=self.case.softcap)

    def ours(self) -> torch.Tensor:
        out = longspan.attend(
            *self.leaves, attention=self.layout, softcap=self.case.softcap, sink=self.sink
        )
        assert isinstance(out, torch.Tensor)
        return out

    def forced(self, kernel: str) -> Callable[[], torch.Tensor]:
        def attend() -> torch.Tensor:
            with asking_first(kernel):
                return self.ours()

        return attend

    def sdpa(self) -> torch.Tensor:
        # Wider than cuDNN goes, torch chooses.
        cudnn = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        with cudnn if self.case.dim <= 256 else contextlib.nullcontext():
            return F.scaled_dot_product_attention(*self.leaves, is_causal=True, enable_gqa=True)

    def flex(self) -> Callable[[], torch.Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        begin, end = self.bounds
        softcap = self.case.softcap

        def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
            return (key >= begin[query]) & (key < end[query])

        def capped(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
            return softcap * torch.tanh(score / softcap)

        tokens = self.case.tokens
        blocks = create_block_mask(visible, None, None, tokens, tokens, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)

        def attend() -> torch.Tensor:
            out = compiled(
                *self.leaves, block_mask=blocks, enable_gqa=True,
                score_mod=capped if softcap else None,
            )  # fmt: skip
            assert isinstance(out, torch.Tensor)
            return out

        return attend

    def gradients(
        self, attend: Callable[[], torch.Tensor], first: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        out = attend()
        with asking_first(first):
            return torch.autograd.grad(out, self.leaves, self.dout)


@contextlib.contextmanager
def asking_first(kernel: str | None) -> Iterator[None]:
    """None: as the caller has it."""
    before = os.environ.get("LONGSPAN_CUDA_KERNEL")
    os.environ["LONGSPAN_CUDA_KERNEL"] = kernel or before or ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["LONGSPAN_CUDA_KERNEL"]
        else:
            os.environ["LONGSPAN_CUDA_KERNEL"] = before


# ---- Times.


def once(run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def timed(functions: dict[str, Run], rounds: int = 5) -> dict[str, float]:
    """Median milliseconds of a call. Each batch follows a call that is not timed."""
    slow = {}
    for name, run in functions.items():
        once(run)
        slow[name] = once(run)
    took: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds):
        for name, run in functions.items():
            if slow[name] > 60 and i >= 2:
                continue
            calls = min(max(int(15 / slow[name]), 1), 40)
            run()

            def batch(run: Run = run, calls: int = calls) -> None:
                for _ in range(calls):
                    run()

            took[name].append(once(batch) / calls)
    return {name: statistics.median(times) for name, times in took.items()}


def reason_of(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return " ".join(str(error).split())[:60].replace("|", "/") or type(error).__name__


class Compiler:
    """Lets flex be compiled once for each shape, for as long as there is time."""

    #: Seconds that another shape may take.
    MOST = 35.0

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.last: Any = None

    def takes(self, case: Case) -> bool:
        """Cases of one shape follow one another; the masks are data."""
        shape = (case.tokens, case.heads, case.key_heads, case.dim, case.value_dim, case.softcap)
        if shape == self.last:
            return True
        if time.monotonic() + self.MOST > self.deadline:
            return False
        torch.compiler.reset()
        self.last = shape
        return True


def has_own(call: Call) -> bool:
    with asking_first("hopper"):
        return call.kernel() == "hopper"


def ways_of(call: Call, compiler: Compiler) -> tuple[dict[str, Any], dict[str, str]]:
    """Functions that work, ours first, and what is said of the others."""
    ways: dict[str, Any] = {"ours": call.ours}
    said: dict[str, str] = {}
    own = has_own(call)
    for name in call.case.against:
        try:
            if name == "flex":
                if not compiler.takes(call.case):
                    said[name] = "no time"
                    continue
                way = call.flex()
            elif name in FORCED:
                if not own:
                    said[name] = "the same"
                    continue
                with asking_first(FORCED[name]):
                    said[name] = call.kernel().split(":")[0]
                way = call.forced(FORCED[name])
            else:
                way = call.sdpa
            call.gradients(way, FORCED.get(name))
            torch.cuda.synchronize()
            ways[name] = way
        except Exception as error:  # whatever torch says: the others go on
            said[name] = f"fails: {reason_of(error)}"
            torch.cuda.empty_cache()
    return ways, said


def speeds_of(call: Call, ways: dict[str, Any]) -> dict[str, Speed]:
    forward = timed(dict(ways))
    both = timed(
        {
            name: lambda way=way, name=name: call.gradients(way, FORCED.get(name))
            for name, way in ways.items()
        }
    )
    flops = call.case.flops(call.pairs)
    return {
        name: Speed(flops.forward / forward[name] / 1e9, flops.both / both[name] / 1e9)
        for name in ways
    }


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    memory = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # torch's own fills are no work of ours
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


def fixed_order(call: Call) -> float:
    """By how much backward is slower in one order; not a number if bits differ."""
    out = call.forced("hopper")()

    def backward() -> tuple[torch.Tensor, ...]:
        with asking_first("hopper"):
            return torch.autograd.grad(out, call.leaves, call.dout, retain_graph=True)

    def in_order() -> tuple[torch.Tensor, ...]:
        with deterministic():
            return backward()

    same = all(torch.equal(a, b) for a, b in zip(in_order(), in_order(), strict=True))
    times = timed({"any": backward, "fixed": in_order})
    return times["fixed"] / times["any"] if same else math.nan


# ---- Answers.


def off(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    a, b = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (found, truth))
    return float((a - b).norm() / b.norm())


class Errors(NamedTuple):
    out: float
    lse: float
    dq: float
    dk: float
    dv: float

    def __str__(self) -> str:
        return " ".join(f"{name} {e:.0e}" for name, e in zip(self._fields, self, strict=True))

    def right(self, kernel: str) -> bool:
        lse = 1e-6 if kernel == "hopper" else 1e-5
        return self.out <= 5e-3 and self.lse <= lse and max(self.dq, self.dk, self.dv) <= 1e-2


def errors_of(call: Call) -> Errors:
    """Of some rows, in double precision. dk and dv are sums over queries whose out and lse
    are taken as ours has them: those are looked at first."""
    case = call.case
    group = case.heads // case.key_heads
    q, k, v = (t.detach()[0] for t in call.leaves)
    dout = call.dout[0]
    out, lse = (
        t.detach()[0] for t in longspan.attend(
            *call.leaves, attention=call.layout, softcap=case.softcap, sink=call.sink,
            return_lse=True,
        )
    )  # fmt: skip
    dq, dk, dv = (t[0] for t in call.gradients(call.ours))
    begin, end = (b.long().unsqueeze(1) for b in call.bounds)

    def scores(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """And what softcap makes of a gradient."""
        plain = queries @ keys.mT * case.scale
        if not case.softcap:
            return plain, torch.ones_like(plain)
        bent = torch.tanh(plain / case.softcap)
        return case.softcap * bent, 1 - bent * bent

    def with_sink(logs: torch.Tensor, heads: slice) -> torch.Tensor:
        if call.sink is None:
            return logs
        return torch.logaddexp(logs, call.sink[heads].double().unsqueeze(1).expand_as(logs))

    pairs: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {
        name: ([], []) for name in Errors._fields
    }

    def compare(**both: tuple[torch.Tensor, torch.Tensor]) -> None:
        for name, (found, truth) in both.items():
            pairs[name][0].append(found)
            pairs[name][1].append(truth)

    some = torch.linspace(0, case.tokens - 1, 64, device="cuda").long().unique()
    for head in (0, case.heads - 1):
        own = slice(head, head + 1)
        keys, values = k[head // group].double(), v[head // group].double()
        grads = dout[head, some].double()
        all_keys = torch.arange(case.tokens, device="cuda")
        visible = (all_keys >= begin[some]) & (all_keys < end[some])
        score, bend = scores(q[head, some].double(), keys)
        score = score.masked_fill(~visible, -torch.inf)
        true_lse = score.logsumexp(-1)
        weight = (score - with_sink(true_lse[None], own)[0].unsqueeze(1)).exp()
        true_out = weight @ values
        delta = (true_out * grads).sum(-1, keepdim=True)
        ds = weight * (grads @ values.mT - delta) * bend * case.scale
        compare(
            out=(out[head, some], true_out), lse=(lse[head, some], true_lse),
            dq=(dq[head, some], ds @ keys),
        )  # fmt: skip
    some = torch.linspace(0, case.tokens - 1, 32, device="cuda").long().unique()
    for key_head in {0, case.key_heads - 1}:
        own = slice(key_head * group, (key_head + 1) * group)
        visible = (some >= begin) & (some < end)
        queries, grads = q[own].double(), dout[own].double()
        score, bend = scores(queries, k[key_head, some].double())
        total = with_sink(lse[own].double(), own).unsqueeze(2)
        weight = (score - total).exp().masked_fill(~visible, 0)
        delta = (out[own].double() * grads).sum(-1, keepdim=True)
        ds = weight * (grads @ v[key_head, some].double().mT - delta) * bend * case.scale
        compare(
            dk=(dk[key_head, some], (ds.mT @ queries).sum(0)),
            dv=(dv[key_head, some], (weight.mT @ grads).sum(0)),
        )
    return Errors(**{name: off(*both) for name, both in pairs.items()})


# ---- Rows.


def yardstick() -> float:
    """TFLOP/s of torch.matmul."""
    a, b = normal(8192, 8192), normal(8192, 8192, seed=1)
    return 2 * 8192**3 / timed({"matmul": lambda: a @ b})["matmul"] / 1e9


def row_of(case: Case, compiler: Compiler) -> Row:
    call = Call(case)
    kernel = call.kernel()
    errors = errors_of(call)
    torch.cuda.empty_cache()
    right = errors.right(kernel)
    ways, said = ways_of(call, compiler)
    if "own kernel" in ways:
        with asking_first("hopper"):
            own = errors_of(call)
        right = right and own.right("hopper")
        errors = Errors(*(max(both) for both in zip(errors, own, strict=True)))
    speeds = speeds_of(call, ways)
    fixed = fixed_order(call) if has_own(call) else None
    bar, goal = case.bar, case.goal
    if case.of_sdpa and bar is not None and goal is not None:
        theirs = speeds.get("SDPA", Speed(math.nan, math.nan))
        bar, goal = (Speed(theirs.forward * m.forward, theirs.both * m.both) for m in (bar, goal))
    reached = ""
    if bar is not None and goal is not None and right:
        ours = speeds["ours"]
        reached = "goal" if ours.reaches(goal) else "bar" if ours.reaches(bar) else "bar missed"
    return {
        "case": case.name, "kernel": kernel, "right": right, "answer": str(errors),
        "errors": errors._asdict(), "pairs": call.pairs, "speeds": speeds, "said": said,
        "fixed order": fixed, "bar": bar, "goal": goal, "reached": reached,
    }  # fmt: skip


def failed(case: Case, error: Exception) -> Row:
    return {
        "case": case.name, "kernel": "", "right": False, "answer": reason_of(error),
        "speeds": {"ours": ""}, "said": {}, "fixed order": None, "bar": None, "goal": None,
        "reached": "",
    }  # fmt: skip


class Overhead(NamedTuple):
    """Microseconds of a tiny call."""

    host: float
    device: float


def overhead(calls: int = 200) -> Overhead:
    """128 tokens in three documents. The host's time is that of calls which nothing waits
    for, the device's that of a graph of them."""
    case = Case("tiny", (100, 20, 8), heads=2, key_heads=1, dim=64, value_dim=64)
    call = Call(case)

    def several(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                call.ours()

    host = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        several(calls)
        host.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several(20)
        graph.replay()
        device = statistics.median(once(graph.replay) for _ in range(9)) / 20 * 1e3
    except Exception:  # a kernel that no graph takes
        device = math.nan
    return Overhead(statistics.median(host), device)


def table(rows: list[Row], yardsticks: list[float], tiny: Overhead | None) -> str:
    lines = [
        "# Dense attention on a GPU",
        "",
        f"- date: {datetime.date.today()}, commit: {commit()}",
        f"- command: `make bench-gpu`, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
        f"- {versions()}",
        "- bfloat16, TFLOP/s of visible pairs, forward / both directions, medians taken in turns; "
        "answer: relative distance from double precision of some rows",
        "- yardstick, torch.matmul of 8192 x 8192 x 8192, before and after: "
        + ", ".join(f"{value:.0f}" for value in yardsticks)
        + " TFLOP/s",
    ]
    if tiny is not None:
        lines.append(
            f"- a tiny call, 128 tokens in three documents, forward: {tiny.host:.0f} us of the "
            f"host, {tiny.device:.1f} us of the device (bar: 30 us)"
        )
    lines += [
        "",
        "| case | answer | kernel | ours | own kernel | old path | flex, compiled | SDPA "
        "| fixed order | bar | goal | reached |",
        "| --- " * 12 + "|",
    ]
    for row in rows:
        cells = []
        for name in OTHERS:
            speed, said = row["speeds"].get(name), row["said"].get(name, "")
            cells.append(f"{speed}{', ' * bool(said)}{said}" if speed else said)
        fixed = row["fixed order"]
        cells.append("" if fixed is None else f"{fixed:.2f}x")
        marks = [str(row[name] or "") for name in ("bar", "goal")]
        answer = row["answer"] if row["right"] else f"WRONG: {row['answer']}"
        lines.append(
            f"| {row['case']} | {answer} | {row['kernel']} | {row['speeds']['ours']} | "
            + " | ".join([*cells, *marks])
            + f" | {row['reached']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=pathlib.Path, help="the folder to write the table to")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--against", default=",".join(OTHERS), help="only these others; none: -")
    parser.add_argument("--seconds", type=float, default=140, help="nothing is compiled near it")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/dense_gpu.py: there is no CUDA device here", file=sys.stderr)
        return 1
    compiler = Compiler(options.seconds)
    others = options.against.split(",")
    rows: list[Row] = []
    yardsticks = [yardstick()]
    tiny: Overhead | None = None

    def keep() -> None:  # whoever stops it keeps what there is
        if options.save:
            card = torch.cuda.get_device_name().replace("NVIDIA", "").strip().lower()
            name = f"dense-gpu_{card.replace(' ', '-')}_{datetime.date.today()}.md"
            write_whole(options.save / name, table(rows, yardsticks, tiny))

    for case in [*CASES, *more_cases()]:
        if options.only not in case.name:
            continue
        wanted = tuple(name for name in case.against if name in others)
        try:
            rows.append(row_of(case._replace(against=wanted), compiler))
        except Exception as error:  # the other rows go on
            rows.append(failed(case, error))
        torch.cuda.empty_cache()
        keep()
        if sys.stderr.isatty():
            print(f"\r{len(rows)} rows ", end="", file=sys.stderr, flush=True)
    tiny = overhead()
    yardsticks.append(yardstick())
    keep()
    if sys.stderr.isatty():
        print("\r" + " " * 20 + "\r", end="", file=sys.stderr)
    whole = {"rows": rows, "yardsticks": yardsticks, "tiny": tiny._asdict()}
    text = table(rows, yardsticks, tiny)
    print(json.dumps(whole, indent=2) + "\n" if options.json else text, end="")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
