"""The charts of a market run: inline SVG, each with a sentence that says what to see, computed from the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flmarket.report import charts_owners, charts_rounds
from flmarket.report.drawing import inline_svg, styled
from flmarket.report.tally import Tally

if TYPE_CHECKING:
    from flmarket.market import MarketResult

__all__ = ["Chart", "market_charts"]

Draw = Callable[["MarketResult", Tally], tuple[Any, str]]

_CHARTS: tuple[tuple[str, str, Draw], ...] = (
    ("accuracy", "Accuracy", charts_rounds.accuracy),
    ("spending", "Spending per round", charts_rounds.spending),
    ("error-bound", "Error bound per round", charts_rounds.error_bound),
    ("epsilon-awarded", "Privacy bought per round", charts_rounds.epsilon_awarded),
    ("epsilon-owners", "Privacy lost per owner, total", charts_owners.privacy),
    ("pay", "Pay and records sold", charts_owners.pay),
)


@dataclass(frozen=True)
class Chart:
    """A drawing and its caption. The SVG takes its colours from CSS variables and its font from the page."""

    key: str
    title: str
    caption: str
    svg: str


def market_charts(result: MarketResult) -> tuple[Chart, ...]:
    """All charts of a run, the same bytes for the same result."""
    tally = Tally.of(result)
    charts = []
    for key, title, draw in _CHARTS:
        with styled(key):
            figure, caption = draw(result, tally)
            charts.append(Chart(key, title, caption, inline_svg(figure, f"chart-{key}", title, caption)))
    return tuple(charts)
