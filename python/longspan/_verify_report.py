"""The page of `longspan verify --report`: one file that a browser shows without scripts and
without a network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

import torch

from longspan._C import __version__
from longspan._charts import error_bars
from longspan._measuring import Wishes
from longspan._verifying import ANSWERS, Verdict

_STYLE = """\
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #fff;
  max-width: 1040px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 36px 0 6px; padding-top: 14px; border-top: 1px solid #d8dee4; }
h3 { font-size: 0.95rem; margin: 18px 0 4px; color: #57606a; font-weight: 600; }
p { margin: 4px 0 10px; }
.lead, .why { color: #57606a; }
.why { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; min-width: 100%; }
th { text-align: left; font-weight: 600; color: #57606a; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid #eaeef2; vertical-align: top; }
td { overflow-wrap: anywhere; }
td.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.first { white-space: nowrap; overflow-wrap: normal; }
.right { color: #1a7f37; } .wrong { color: #cf222e; font-weight: 700; }
.refused, .notmade { color: #9a6700; }
.tag { white-space: nowrap; }
img { display: block; max-width: 100%; height: auto; margin: 6px 0; }
details { margin: 8px 0; } summary { cursor: pointer; color: #0550ae; }
a { color: #0550ae; text-decoration: none; }
@media (max-width: 600px) { body { padding: 14px 12px 40px; font-size: 14px; }
  th, td { padding-right: 8px; } td.first { white-space: normal; }
  .picture img { max-width: none; } }
"""

_HOW = """\
Each model has random weights (unless its own were asked for) and one row of packed documents.
<em>found</em> is the model over ranks against the model itself on each document alone, in float64
throughout; <em>allowed</em> is twice what the plain model in the same type is off by, or a few
roundings where that is less. <em>to plain</em> is how far logits and gradients are from the plain
model as it is. Errors are relative to the largest value of a tensor. A leak is a
token whose output moved although only other documents, or only later tokens, were changed."""


def page(verdicts: Sequence[Verdict], wishes: Wishes, seconds: float) -> str:
    """All verdicts, the wrong ones first."""
    counts = {word: sum(v.word == word for v in verdicts) for word in _WORDS}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    dtype = str(wishes.dtype).removeprefix("torch.")
    ordered = sorted(verdicts, key=lambda v: _WORDS.index(v.word))
    head = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>longspan verify: {escape(told)}</title>",
        f"<style>\n{_STYLE}</style></head><body>",
        f"<h1>longspan verify: {escape(told)}</h1>",
        f'<p class="lead">{wishes.tokens:,} tokens in {wishes.documents} documents over '
        f"{wishes.ranks} ranks, {escape(wishes.strategy)}, {escape(dtype)}; {seconds:.0f} s. "
        f"Longspan {escape(__version__)}, torch {escape(torch.__version__)}, transformers "
        f"{escape(_transformers())}.</p>",
        f'<p class="why">{_HOW}</p>',
    ]
    if len(verdicts) > 1:
        head.append(_summary(ordered))
    shown = [v for v in ordered if v.rows or len(verdicts) <= 3]
    body = [_section(v, opened=len(shown) <= 8) for v in shown]
    return "\n".join([*head, *body, "</body></html>", ""])


_WORDS = ("wrong", "right", "refused", "not made")


def _transformers() -> str:
    import transformers

    return str(transformers.__version__)


def _summary(verdicts: Sequence[Verdict]) -> str:
    titles = ("model", "", "loss", "worst gradient", "allowed", "to plain", "leaks", "bytes sent")
    rows = []
    for v in verdicts:
        name = escape(v.model)
        name = f'<a href="#{_anchor(v)}">{name}</a>' if v.rows else name
        cells = [f'<td class="first">{name}</td>', f"<td>{_tag(v.word)}</td>"]
        if v.rows:
            found = {row.what: row for row in v.rows}
            gradient = found["worst gradient"]
            leaks = sum(v.numbers["leaks"].values())
            values = (
                f"{v.numbers['loss']:.4f}",
                f"{v.numbers['gradient_error']:.1e}",
                gradient.allowed,
                f"{v.numbers['error_to_plain']:.1e}",
                str(leaks),
                found["bytes sent"].found,
            )
            cells += [f'<td class="n">{escape(value)}</td>' for value in values]
        else:
            cells.append(f'<td colspan="6" class="why">{escape(v.why)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _table(titles, rows)


def _section(v: Verdict, *, opened: bool) -> str:
    kind = f" ({escape(v.kind)})" if v.kind else ""
    parts = [
        f'<h2 id="{_anchor(v)}">{escape(v.model)}{kind}: {_tag(v.word)} in {v.seconds:.1f} s</h2>'
    ]
    if v.word != "right" and v.why:
        parts.append(f'<p class="why">{escape(v.why)}</p>')
    if v.proof:
        answers = (f"{a} {'holds' if v.proof.get(a) else 'not shown'}" for a in ANSWERS)
        parts.append(f"<p>Proof on a twin: {', '.join(answers)}.</p>")
    if v.rows:
        marks = {True: _tag("right", "holds"), False: _tag("wrong"), None: ""}
        rows = [
            f'<tr><td class="first">{escape(r.what)}</td><td>{escape(r.found)}</td>'
            f'<td>{escape(r.allowed)}</td><td class="n">{marks[r.holds]}</td></tr>'
            for r in v.rows
        ]
        parts.append(_table(("", "found", "allowed", ""), rows))
    drawn = []
    if v.layers:
        drawn.append("<h3>Errors of gradients by layer</h3>")
        bars = error_bars(v.layers, ("over ranks", "plain, same precision"))
        drawn.append(_image(bars, "errors by layer"))
    for title, svg in v.pictures.items():
        drawn.append(f"<h3>{escape(title)}</h3>")
        drawn.append(_image(svg, title))
    if drawn:
        state = " open" if opened else ""
        parts.append(f"<details{state}><summary>pictures</summary>{''.join(drawn)}</details>")
    return "\n".join(parts)


def _table(titles: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "\n".join(rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n{body}</table></div>'


def _tag(word: str, text: str | None = None) -> str:
    return f'<span class="tag {word.replace(" ", "")}">{escape(text or word)}</span>'


def _image(svg: str, title: str) -> str:
    """As an image of its own: names inside of one picture do not meet those of another."""
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
    return f'<div class="wide picture">{image}</div>'


def _anchor(v: Verdict) -> str:
    return "".join(c if c.isalnum() else "-" for c in v.model)
