"""A chart as the pages know it: a table of numbers, and how each of its columns is drawn.

The browser draws the very table that readers can open below the chart, so the picture and its text alternative cannot
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Chart", "Column"]

Draw = Literal["line", "dashed", "step", "bars"]


@dataclass(frozen=True)
class Column:
    """One column. `short` names it beside a value under the pointer."""

    label: str
    short: str = ""
    colour: str = "blue"
    draw: Draw = "line"
    decimals: int = 3


@dataclass(frozen=True, kw_only=True)
class Chart:
    """`x` names the first column under the pointer; `options` are the data attributes that app.js reads."""

    title: str
    unit: str
    x: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[float | None]]
    reading: str = ""
    caption: str = ""
    options: dict[str, str] = field(default_factory=dict)
