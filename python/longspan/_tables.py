"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Lines whose columns stand under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    put = str.rjust if right else str.ljust
    return [
        "  ".join(put(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def html_table(
    caption: str,
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    marked: Iterable[int] = (),
) -> str:
    """A table under a caption, whose first column is names; `marked` rows are bold. Numbers
    stand at the right, and colours are those of the page."""
    bold = set(marked)
    head = "".join(f'<th style="text-align:left">{escape(title)}</th>' for title in titles)
    lines = [
        f'<table><caption style="text-align:left">{escape(caption)}</caption>',
        f"<thead><tr>{head}</tr></thead><tbody>",
    ]
    for index, row in enumerate(rows):
        weight = "font-weight:bold;" if index in bold else ""
        cells = "".join(
            f'<td style="{weight}text-align:{"right" if _is_amount(cell) else "left"}">'
            f"{escape(cell)}</td>"
            for cell in row
        )
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _is_amount(cell: str) -> bool:
    return cell[:1].isdigit() and "/" not in cell
