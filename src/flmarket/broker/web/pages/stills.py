"""A chart as a still picture, for readers whose browser runs no scripts: the numbers of the table below it, to scale.

With scripts the same table is drawn by app.js, and the style sheet hides this one. Points are in a box of 1000 × 1000
that is stretched to the place there is; labels are text beside it, which is not stretched.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flmarket.broker.web.pages.rendering import Chart

_SIZE = 1000


@dataclass(frozen=True)
class Line:
    """One column: its points in the box, or its bars as (x, y, width, height)."""

    colour: str
    draw: str
    points: str = ""
    bars: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True)
class Still:
    """The lines, and what the edges of the box stand for."""

    lines: tuple[Line, ...]
    left: float
    right: float
    low: float
    high: float


def still(chart: "Chart") -> Still | None:
    """The picture; None if there is nothing to see."""
    rows = [row for row in chart.rows if row[0] is not None]
    values = [y for row in rows for y in row[1:] if y is not None and math.isfinite(y)]
    log = chart.options.get("scale") == "log" and bool(values) and min(values) > 0
    if not values or len(rows) < 2:
        return None
    left, right = (float(row[0] or 0.0) for row in (rows[0], rows[-1]))
    low = min(values) if log or "floor" not in chart.options else min(*values, float(chart.options["floor"]))
    high = max(values)

    def across(x: float | None) -> int:
        return round(_SIZE * (float(x or 0.0) - left) / ((right - left) or 1.0))

    def up(y: float) -> int:
        share = math.log(y / low) / (math.log(high / low) or 1.0) if log else (y - low) / ((high - low) or 1.0)
        return round(_SIZE * (1 - share))

    lines = []
    for i, column in enumerate(chart.columns[1:], 1):
        known = [(across(row[0]), up(y)) for row in rows if (y := row[i]) is not None and math.isfinite(y)]
        if column.draw == "bars":
            half = max(1, round(0.36 * _SIZE / len(rows)))
            bars = tuple((x - half, y, 2 * half, _SIZE - y) for x, y in known)
            lines.append(Line(column.colour, "bars", bars=bars))
        else:
            lines.append(Line(column.colour, column.draw, " ".join(f"{x},{y}" for x, y in known)))
    return Still(tuple(lines), left, right, low, high)
