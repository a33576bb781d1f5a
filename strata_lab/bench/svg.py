"""Column charts as plain SVG text: no library, no script, colours from CSS variables of the page around them.

Only what the reports need: columns with whiskers, an optional ghost column (a ceiling), a value on top, two lines of
label below. It knows nothing of what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

COLUMN_WIDTH = 64
TARGET_WIDTH, MIN_PITCH, MAX_PITCH = 1080, 104, 150  # columns share the target, within these distances
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 62  # room for axis, edge, values and labels, in pixels
PLOT_HEIGHT = 280
MAX_TICKS = 5


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        label, sublabel: the two lines below it.
        value: its height; None draws only the labels and "-".
        low, high: ends of the whisker, or None for no whisker.
        ghost: height of a dashed outline behind it, or None.
        detail: shown when the pointer rests on it.
        kind: "measured", "lost" (hatched: does not count) or "claim" (grey: somebody else's word).
    """

    label: str
    sublabel: str
    value: float | None
    low: float | None = None
    high: float | None = None
    ghost: float | None = None
    detail: str = ""
    kind: Literal["measured", "lost", "claim"] = "measured"


# Referred to by the style sheet; once per page.
HATCH = (
    '<svg width="0" height="0" aria-hidden="true"><defs><pattern id="hatch" width="7" height="7" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="hatch-ground" width="7" height="7"/>'
    '<rect class="hatch-line" width="3" height="7"/></pattern></defs></svg>'
)


def nice_ticks(top: float) -> list[float]:
    """Round axis values from 0 to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / (MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def number(value: float) -> str:
    """Three significant digits, no exponent; a whole number as it is, and what rounds to 100 as 100 is shown."""
    if value >= 99.95 or float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def columns(title: str, unit: str, data: Sequence[Column]) -> str:
    """An `<svg>` element; `title` is read to those who do not see it."""
    tops = [v for c in data for v in (c.value, c.high, c.ghost) if v is not None]
    ticks = nice_ticks(max(tops, default=1.0))
    pitch = min(MAX_PITCH, max(MIN_PITCH, TARGET_WIDTH // max(1, len(data))))
    width = LEFT + RIGHT + len(data) * pitch
    height = TOP + PLOT_HEIGHT + BOTTOM

    def y(value: float) -> float:
        return round(TOP + PLOT_HEIGHT * (1 - value / ticks[-1]), 1)

    parts = [
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(title)}">',
        f'<text class="unit" x="4" y="14">{escape(unit)}</text>',
    ]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4}">{tick:g}</text>')
    for i, column in enumerate(data):
        parts.append(_column(column, LEFT + (i + 0.5) * pitch - COLUMN_WIDTH / 2, y))
    return "\n".join([*parts, "</svg>"])


def _column(c: Column, x: float, y: Callable[[float], float]) -> str:
    middle, base = x + COLUMN_WIDTH / 2, y(0)
    parts = ["<g>"]
    if c.detail:
        parts.append(f"<title>{escape(c.detail)}</title>")
    if c.ghost is not None:
        parts.append(
            f'<path class="ghost" d="M{x - 5} {base}V{y(c.ghost)}H{x + COLUMN_WIDTH + 5}V{base}"/>'
            f'<text class="ceiling" x="{x + COLUMN_WIDTH + 9}" y="{y(c.ghost) + 4}">{number(c.ghost)}</text>'
        )
    if c.value is not None:
        top = y(c.value)
        radius = min(4, base - top)
        corners = f"q0 -{radius} {radius} -{radius}h{COLUMN_WIDTH - 2 * radius}q{radius} 0 {radius} {radius}"
        parts.append(f'<path class="column {c.kind}" d="M{x} {base}V{top + radius}{corners}V{base}z"/>')
    if c.low is not None and c.high is not None and c.high > c.low:
        parts.append(
            f'<path class="whisker" d="M{middle - 7} {y(c.high)}h14M{middle} {y(c.high)}V{y(c.low)}M{middle - 7} '
            f'{y(c.low)}h14"/>'
        )
    above = max(v for v in (c.value or 0.0, c.high or 0.0))
    text = "-" if c.value is None else number(c.value)
    parts.append(f'<text class="value" x="{middle}" y="{y(above) - 7}">{text}</text>')
    parts.append(f'<text class="label" x="{middle}" y="{base + 19}">{escape(c.label)}</text>')
    parts.append(f'<text class="sublabel" x="{middle}" y="{base + 37}">{escape(c.sublabel)}</text></g>')
    return "".join(parts)
