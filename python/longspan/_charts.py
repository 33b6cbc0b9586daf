"""Small charts: errors as bars and losses as a curve, as SVG that needs nothing else, and a
curve in characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_OURS, _PLAIN, _INK, _FAINT = "#2f6fb3", "#c9ced6", "#3a3f47", "#8a919c"
_FONT = 'font-family="sans-serif" font-size="12"'


def error_bars(rows: Sequence[tuple[str, float, float]], names: tuple[str, str]) -> str:
    """Pairs of errors on a scale of powers of ten: (label, one, other); 0 has no bar."""
    left, right, step = 12 + 8 * max((len(label) for label, _, _ in rows), default=4), 90, 30
    width, top = 760, 34
    positive = [e for _, one, other in rows for e in (one, other) if 0 < e < math.inf]
    low = math.floor(math.log10(min(positive))) - 1 if positive else -16
    high = math.ceil(math.log10(max(positive))) if positive else 0
    high = max(high, low + 2)
    height = top + step * len(rows) + 30

    def x(error: float) -> float:
        at = float(low) if error <= 0 else min(max(math.log10(error), low), high)
        return left + (width - left - right) * (at - low) / (high - low)

    parts = [_open(width, height, "errors by layer")]
    for colour, name, at in ((_OURS, names[0], left), (_PLAIN, names[1], left + 200)):
        parts.append(f'<rect x="{at}" y="8" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(at + 16, 18, name))
    every = max(1, (high - low) // 6)
    for power in range(low, high + 1, every):
        across = x(10.0**power)
        line = f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{top - 6}" y2="{height - 24}"'
        parts.append(f'{line} stroke="{_PLAIN}" stroke-width="0.6"/>')
        parts.append(_text(across, height - 8, f"1e{power}", "middle", _FAINT))
    for number, (label, one, other) in enumerate(rows):
        y = top + step * number
        parts.append(_text(left - 8, y + 15, label, "end"))
        for colour, error, down in ((_OURS, one, 2), (_PLAIN, other, 12)):
            wide = max(x(error) - left, 0.0) if error == error else width - left - right
            parts.append(
                f'<rect x="{left}" y="{y + down}" width="{wide:.1f}" height="9" fill="{colour}"/>'
            )
        parts.append(_text(max(x(one), x(other)) + 6, y + 15, f"{one:.0e}", colour=_FAINT))
    return "\n".join([*parts, "</svg>"])


def loss_curve(losses: Sequence[float], first: int, title: str) -> str:
    """Losses of steps `first`, `first` + 1, ..."""
    width, height, left, right, top, bottom = 760, 320, 56, 16, 36, 34
    finite = [loss for loss in losses if math.isfinite(loss)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    last = max(len(losses) - 1, 1)

    def place(number: int, loss: float) -> str:
        x = left + (width - left - right) * number / last
        y = top + (height - top - bottom) * (high - loss) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [_open(width, height, title), _text(left, 20, title)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + (height - top - bottom) * share
        line = f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'{line} stroke="{_PLAIN}" stroke-width="0.6"/>')
        parts.append(_text(left - 8, y + 4, f"{high - share * (high - low):.3g}", "end", _FAINT))
    for share in (0.0, 0.5, 1.0):
        number = round(share * (len(losses) - 1))
        x = left + (width - left - right) * number / last
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        parts.append(_text(x, height - 10, f"step {first + number}", anchor, _FAINT))
    points = " ".join(place(n, loss) for n, loss in enumerate(losses) if math.isfinite(loss))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_OURS}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>\n"])


def curve_in_text(losses: Sequence[float], width: int = 60, height: int = 10) -> str:
    """The same for a terminal: a column for each step, or for the mean of some."""
    if not losses:
        return ""
    columns = min(width, len(losses))
    means = []
    for column in range(columns):
        begin = column * len(losses) // columns
        part = losses[begin : max((column + 1) * len(losses) // columns, begin + 1)]
        means.append(sum(part) / len(part))
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    span = high - low or 1.0
    lines = []
    for row in range(height):
        level = high - span * row / max(height - 1, 1)
        cells = "".join(
            "*" if math.isfinite(m) and round((high - m) / span * (height - 1)) == row else " "
            for m in means
        )
        label = f"{level:8.4f}" if row in (0, height - 1) else " " * 8
        lines.append(f"{label} |{cells}".rstrip())
    return "\n".join(lines)


def _open(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{escape(title)}" {_FONT}>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = _INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'
