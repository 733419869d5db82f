"""Horizontal bars in groups, for tables that one wants to see at a glance: PNG, SVG and the numbers as CSV."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from typing import Any

from flmarket.errors import InvalidInput
from flmarket.files import write_files
from flmarket.report.drawing import panel, png, standalone_svg, styled
from flmarket.report.formatting import significant
from flmarket.report.theme import LIGHT, SERIES

__all__ = ["Bar", "BarSet", "write_bars"]

_ROW, _GAP = 17.0, 12.0  # points


@dataclass(frozen=True)
class Bar:
    """A length in a group; `series` gives the colour and stands beside it."""

    group: str
    series: str
    value: float


@dataclass(frozen=True)
class BarSet:
    """Bars that share an axis, from the top in the order given."""

    title: str
    x_label: str
    bars: tuple[Bar, ...]

    def __post_init__(self) -> None:
        if not self.bars:
            raise InvalidInput("bars", (), "at least one bar")


def write_bars(bar_set: BarSet, out_dir: str | os.PathLike[str], stem: str) -> tuple[str, ...]:
    """Write stem.png, stem.svg and stem.csv; returns their names."""
    with styled(stem):
        picture = png(_draw(bar_set))
        drawing = standalone_svg(_draw(bar_set), "bars", bar_set.title)
    files: dict[str, str | bytes] = {f"{stem}.png": picture, f"{stem}.svg": drawing, f"{stem}.csv": _csv(bar_set)}
    write_files(out_dir, files)
    return tuple(files)


def _draw(bar_set: BarSet) -> Any:
    groups = list(dict.fromkeys(bar.group for bar in bar_set.bars))
    series = list(dict.fromkeys(bar.series for bar in bar_set.bars))
    height = 110 + len(bar_set.bars) * _ROW + len(groups) * _GAP
    left = 22 + 6.6 * max(len(group) for group in groups)
    right = 60 + 6.4 * max(len(name) for name in series)
    figure, axes = panel(
        "", bar_set.x_label, width=400 + left + right, height=height, left=left, right=right, top=44, head=24
    )
    figure.text(
        0, 1 - 4 / height, bar_set.title, va="top", color=LIGHT["ink"], weight="bold", size=13, parse_math=False
    )  # fmt: skip
    finite = [bar.value for bar in bar_set.bars if bar.value == bar.value]
    axes.set_xlim(min(0.0, *finite, 0.0), 1.04 * (max((*finite, 0.0)) or 1.0))
    axes.grid(visible=False)
    axes.set_yticks([])
    y = 0.0
    middle: dict[str, list[float]] = {}
    for place, bar in enumerate(bar_set.bars):
        if place and bar.group != bar_set.bars[place - 1].group:
            y += _GAP
        color = LIGHT[SERIES[series.index(bar.series) % len(SERIES)]]
        axes.barh(-y, bar.value, height=0.78 * _ROW, color=color, alpha=0.85)
        axes.text(
            1.01, -y, f"{significant(bar.value)}  {bar.series}", transform=axes.get_yaxis_transform(), va="center",
            color=color, size=10, parse_math=False,
        )  # fmt: skip
        middle.setdefault(bar.group, []).append(-y)
        y += _ROW
    axes.set_ylim(-y + _ROW / 2 - 4, _ROW / 2 + 4)
    for group, places in middle.items():
        axes.text(
            -0.015, sum(places) / len(places), group, transform=axes.get_yaxis_transform(), ha="right", va="center",
            color=LIGHT["ink"], parse_math=False,
        )  # fmt: skip
    return figure


def _csv(bar_set: BarSet) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("group", "series", "value"))
    writer.writerows((bar.group, bar.series, bar.value) for bar in bar_set.bars)
    return buffer.getvalue()
