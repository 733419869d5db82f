"""Figures for papers and READMEs, each as PNG, SVG and the numbers behind it as CSV.

Curves with error bands and direct labels; and horizontal bars in groups, for tables that one wants to see at a glance.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.errors import InvalidInput
from flmarket.files import Name, csv_text, write_files
from flmarket.report.drawing import LIGHT, SERIES, end_labels, heading, log_scale, panel, pictures
from flmarket.report.formatting import significant

_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.8)), (0, (6, 2, 1.5, 2)))
_MARKERS = ("o", "s", "^", "D")
_MAX_MARKED = 30  # more points than this are a line, not measurements to tell apart


@dataclass(frozen=True)
class Curve:
    """A labelled line; `se` widens it to a band. Colour and dash are chosen by position unless given."""

    label: str
    x: tuple[float, ...]
    mean: tuple[float, ...]
    se: tuple[float, ...] | None = None
    color: int | None = None
    dash: int | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.mean), len(self.x if self.se is None else self.se)}
        if len(lengths) != 1 or not self.x:
            raise InvalidInput(f"curve {self.label!r}", sorted(lengths), "x, mean and se of one length, at least 1")


@dataclass(frozen=True)
class CurveSet:
    """Curves that share their axes."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        if not self.curves:
            raise InvalidInput("curves", (), "at least one curve")


def write_curves(curve_set: CurveSet, out_dir: Name, stem: str, *, log_y: bool = False) -> Path:
    """Write stem.png, stem.svg and stem.csv, whole or not at all; returns the path of the PNG."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", stem):
        raise InvalidInput("stem", stem, "a file name of letters, digits, '.', '_' and '-'")
    rows = (
        (curve.label, *values)
        for curve in curve_set.curves
        for values in zip(curve.x, curve.mean, curve.se or ("",) * len(curve.x), strict=True)
    )
    drawn = pictures(stem, "curves", curve_set.title, lambda: draw_curves(curve_set, log_y=log_y))
    files = drawn | {f"{stem}.csv": csv_text(("label", "x", "mean", "se"), rows)}
    return write_files(out_dir, files) / f"{stem}.png"


def draw_curves(curve_set: CurveSet, *, log_y: bool = False, titled: bool = True) -> Any:
    """The figure; call it inside `styled`."""
    curves = curve_set.curves
    right = 22 + 6.4 * max(len(curve.label) for curve in curves)
    height = max(340.0, 100 + 15 * len(curves))  # every label keeps a line of its own
    figure, axes = panel(
        curve_set.y_label, curve_set.x_label, width=480 + right, height=height, right=right, left=52,
        top=52 if titled else 32, head=24 if titled else 0,
    )  # fmt: skip
    if titled:
        heading(figure, height, curve_set.title)
    usable = _limits(axes, curves, log_y)
    ends = []
    for place, curve in enumerate(curves):
        cycle, shade = divmod(place if curve.color is None else curve.color, len(SERIES))
        color = SERIES[shade]
        dash = (cycle + (curve.dash or 0)) % len(_DASHES)  # past the last colour a new dash keeps lines apart
        ends.append((curve.label, color, *_line(axes, curve, color, dash, log_y)))
    if usable:
        end_labels(axes, ends, leader=True)
    return figure


def _limits(axes: Any, curves: tuple[Curve, ...], log_y: bool) -> bool:
    means = np.concatenate([np.asarray(curve.mean, dtype=float) for curve in curves])
    bands = [np.asarray(curve.se or (0.0,) * len(curve.x), dtype=float) for curve in curves]
    if not log_y:  # a band that reaches zero has no lower end on a log scale: there only the lines count
        means = np.concatenate([means - np.concatenate(bands), means + np.concatenate(bands)])
    means = means[np.isfinite(means) & ((means > 0) | (not log_y))]
    x = np.concatenate([np.asarray(curve.x, dtype=float) for curve in curves])
    factors = np.unique(x)
    if len(factors) <= 8:
        axes.set_xticks(factors, [f"{factor:g}" for factor in factors])
    pad = 0.02 * (np.ptp(x) or 1.0)
    axes.set_xlim(float(x.min()) - pad, float(x.max()) + pad)
    if not means.size:
        return False
    low, high = float(means.min()), float(means.max())
    if log_y:
        log_scale(axes, low / 1.25, high * 1.25)
    else:
        margin = 0.06 * (high - low) or 0.05 * (abs(high) or 1.0)
        axes.set_ylim(low - margin, high + margin)
    return True


def _line(axes: Any, curve: Curve, color: str, dash: int, log_y: bool) -> tuple[float, float]:
    """Draw one curve; returns where it ends."""
    x, mean = np.asarray(curve.x, dtype=float), np.asarray(curve.mean, dtype=float)
    mean = np.where(np.isfinite(mean) & ((mean > 0) | (not log_y)), mean, np.nan)
    if curve.se is not None:
        se = np.nan_to_num(np.asarray(curve.se, dtype=float), nan=0.0, posinf=0.0)
        lower = np.maximum(mean - se, axes.get_ylim()[0]) if log_y else mean - se
        axes.fill_between(x, lower, mean + se, color=LIGHT[color], alpha=0.16, linewidth=0)
    marker = _MARKERS[dash % len(_MARKERS)] if len(x) <= _MAX_MARKED else ""
    axes.plot(x, mean, color=LIGHT[color], linewidth=1.8, linestyle=_DASHES[dash], marker=marker, markersize=4.5)
    known = np.flatnonzero(np.isfinite(mean))
    return (float(x[known[-1]]), float(mean[known[-1]])) if known.size else (float(x[-1]), np.nan)


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


def write_bars(bar_set: BarSet, out_dir: Name, stem: str) -> tuple[str, ...]:
    """Write stem.png, stem.svg and stem.csv; returns their names."""
    table = csv_text(("group", "series", "value"), ((bar.group, bar.series, bar.value) for bar in bar_set.bars))
    files = pictures(stem, "bars", bar_set.title, lambda: _draw_bars(bar_set)) | {f"{stem}.csv": table}
    write_files(out_dir, files)
    return tuple(files)


def _draw_bars(bar_set: BarSet) -> Any:
    groups = list(dict.fromkeys(bar.group for bar in bar_set.bars))
    series = list(dict.fromkeys(bar.series for bar in bar_set.bars))
    height = 110 + len(bar_set.bars) * _ROW + len(groups) * _GAP
    left = 22 + 6.6 * max(len(group) for group in groups)
    right = 60 + 6.4 * max(len(name) for name in series)
    figure, axes = panel(
        "", bar_set.x_label, width=400 + left + right, height=height, left=left, right=right, top=44, head=24
    )
    heading(figure, height, bar_set.title)
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
