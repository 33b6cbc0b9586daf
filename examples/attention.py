"""Every strategy of attention over four ranks, against the answer of one rank:
differences, bytes on the wire against the plan, and the balance of the work.

    make demo
    python examples/attention.py --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import torch

import longspan
from longspan import Group, Mask, Ownership, Packing, Strategy

RANKS = 4
HEADS, KEY_HEADS, DIM = 8, 2, 32
SHAPE = {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": DIM}
NAMES = ("out", "dq", "dk", "dv")

# Four documents with pads behind them, in slots that every layout can cut.
PACKING = Packing.of([61, 40, 90, 17], [64, 48, 96, 24]).with_tokens_multiple_of(2 * RANKS)
MASK = Mask.causal(PACKING)

STRATEGIES = {
    "ring": Strategy("ring"),
    "gathered": Strategy("gathered"),
    "needed": Strategy("needed"),
    "head_parallel": Strategy("head_parallel"),
    "head_parallel_ring (2)": Strategy("head_parallel_ring", head_ranks=2),
}


def ownerships() -> dict[str, Ownership]:
    tokens = PACKING.tokens
    return {
        "contiguous": Ownership.contiguous(tokens, RANKS),
        "head-tail": Ownership.head_tail(tokens, RANKS),
        "per-document-head-tail": Ownership.per_document_head_tail(PACKING, RANKS),
        "uneven": Ownership.of_sizes([tokens // 2, 0, 9, tokens - tokens // 2 - 9]),
    }


@dataclasses.dataclass
class Tensors:
    """Queries, keys and values of the whole stream, [T, H, D], and the gradient
    that comes back to the output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @staticmethod
    def random() -> Tensors:
        generator = torch.Generator().manual_seed(1)

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(PACKING.tokens, heads, DIM, generator=generator)

        return Tensors(draw(HEADS), draw(KEY_HEADS), draw(KEY_HEADS), draw(HEADS))


Answer = dict[str, torch.Tensor]


def answer_of_one_rank(given: Tensors, dtype: torch.dtype) -> Answer:
    q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in (given.q, given.k, given.v))
    out = longspan.attend(q, k, v, mask=MASK)
    out.backward(given.dout.to(dtype))
    return dict(zip(NAMES, (out.detach(), q.grad, k.grad, v.grad), strict=True))


@dataclasses.dataclass
class Share:
    """What one rank found: its part of the answer, and the bytes it sent."""

    answer: Answer
    forward: int
    backward: int


def answer_of_a_rank(group: Group, given: Tensors, owners: Ownership, strategy: Strategy) -> Share:
    tokens = owners.tokens_of(group.rank())
    q, k, v = (t[tokens].clone().requires_grad_() for t in (given.q, given.k, given.v))
    before = group.sent_bytes
    out = longspan.attend(q, k, v, mask=MASK, layout=owners, group=group, strategy=strategy)
    between = group.sent_bytes
    out.backward(given.dout[tokens])
    found = dict(zip(NAMES, (out.detach(), q.grad, k.grad, v.grad), strict=True))
    return Share(found, between - before, group.sent_bytes - between)


def joined(shares: list[Share], owners: Ownership, like: Answer) -> Answer:
    whole = {name: torch.empty(like[name].shape) for name in NAMES}
    for rank, share in enumerate(shares):
        for name in NAMES:
            whole[name][owners.tokens_of(rank)] = share.answer[name]
    return whole


def differences(found: Answer, exact: Answer) -> dict[str, float]:
    """The largest one of the output, and of the gradients."""
    off = {name: float((found[name].double() - exact[name]).abs().max()) for name in NAMES}
    return {"out": off["out"], "grads": max(off["dq"], off["dk"], off["dv"])}


def run(name: str, layout: str, given: Tensors, exact: Answer) -> dict[str, object]:
    strategy, owners = STRATEGIES[name], ownerships()[layout]
    shares = longspan.run_ranks(
        RANKS, lambda group: answer_of_a_rank(group, given, owners, strategy)
    )
    plans = [
        longspan.plan(owners, MASK, strategy=strategy, rank=rank, key_heads=KEY_HEADS)
        for rank in range(RANKS)
    ]
    # Heads divide evenly, so pairs of a rank's steps compare between ranks.
    pairs = [sum(step.pairs for step in plan.steps) for plan in plans]
    row: dict[str, object] = {
        "strategy": name,
        "layout": layout,
        **differences(joined(shares, owners, exact), exact),
        "balance": max(pairs) / (sum(pairs) / RANKS),
    }
    for direction in ("forward", "backward"):
        row[f"{direction}_sent"] = [getattr(share, direction) for share in shares]
        row[f"{direction}_planned"] = [
            plan.sent_bytes(direction, **SHAPE, bytes_per_element=4) for plan in plans
        ]
    return row


def what_is_off(row: dict, allowed: dict[str, float]) -> list[str]:
    off = [key for key in ("out", "grads") if not row[key] <= allowed[key]]  # NaN too
    off += [
        f"{key} bytes"
        for key in ("forward", "backward")
        if row[f"{key}_sent"] != row[f"{key}_planned"]
    ]
    return off


def print_table(rows: list[dict], plain: dict[str, float], allowed: dict[str, float]) -> None:
    print(
        f"Attention over {RANKS} ranks: {PACKING.tokens} tokens, {PACKING.real_tokens} of them "
        f"real in {PACKING.documents} documents,\n{HEADS} heads over {KEY_HEADS} key heads of "
        f"{DIM} channels, float32, against one rank in float64.\n"
    )
    head = ("strategy", "layout", "out", "gradients", "forward", "backward", "balance", "")
    form = "{:23}{:23}{:>9}{:>11}{:>10}{:>10}{:>9}  {}"
    print(f"{'':46}{'largest difference':>20}{'bytes sent':>20}")
    print(form.format(*head).rstrip())
    for row in rows:
        off = what_is_off(row, allowed)
        print(
            form.format(
                row["strategy"], row["layout"], f"{row['out']:.1e}", f"{row['grads']:.1e}",
                sum(row["forward_sent"]), sum(row["backward_sent"]), f"{row['balance']:.2f}",
                "off: " + ", ".join(off) if off else "ok",
            )
        )  # fmt: skip
    print(form.format("one rank, plain", "", f"{plain['out']:.1e}", f"{plain['grads']:.1e}", 0, 0,
                      "1.00", "").rstrip())  # fmt: skip
    print(
        "\nok: the differences are within twice those of one rank in float32, and every rank\n"
        "sent exactly the bytes that its plan says; their sum is shown. Balance: the most pairs\n"
        "of a rank over their mean. (2): teams of two ranks trade heads, keys go between teams."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    options = parser.parse_args()
    given = Tensors.random()
    exact = answer_of_one_rank(given, torch.float64)
    plain = differences(answer_of_one_rank(given, torch.float32), exact)
    allowed = {key: 2 * error for key, error in plain.items()}
    cases = [(name, layout) for name in STRATEGIES for layout in ownerships()]
    rows = []
    show = sys.stderr.isatty()
    for done, (name, layout) in enumerate(cases):
        if show:
            print(f"\r\x1b[K{done + 1}/{len(cases)} {name}, {layout}", end="", file=sys.stderr)
        rows.append(run(name, layout, given, exact))
    if show:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    wrong = sum(bool(what_is_off(row, allowed)) for row in rows)
    if options.json:
        for row in rows:
            row["off"] = what_is_off(row, allowed)
        answer = {"plain": plain, "allowed": allowed, "rows": rows, "wrong": wrong}
        print(json.dumps(answer, indent=1))
    else:
        print_table(rows, plain, allowed)
        right = len(rows) - wrong
        print(f"\n{right} of {len(rows)} give the answer of one rank.")
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
