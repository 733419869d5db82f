"""The picture of an audit: what one owner gains or loses as her report moves away from the truth."""

from __future__ import annotations

from typing import Any

import numpy as np

from flmarket.audit import Curve, Example
from flmarket.report.drawing import inline_svg, label, panel, styled
from flmarket.report.formatting import percent
from flmarket.report.theme import LIGHT

__all__ = ["gain_chart"]

_KEY = "gain"
_WIDTH, _HEIGHT = 860.0, 300.0
_X_LABEL = {
    "value": "cost she reports, as a multiple of the true one",
    "privacy_budget": "privacy limit ε̄ she reports (this round), as a multiple of the true one",
    "data_size": "records she reports, as a multiple of the true number",
    "all fields": "from the truth (0) to the lie (1)",
}


def gain_chart(example: Example) -> tuple[str, str]:
    """The figure as SVG, and its caption."""
    curve = example.curve
    assert curve is not None
    cost = example.bids[example.owner].full_cost
    x = np.array(curve.factor)
    gain = np.array(curve.gain) / (cost if cost > 0 else 1.0)
    caption = _caption(curve, gain, example)
    with styled(_KEY):
        figure, axes = panel(
            "gain over honesty, as a share of her true cost",
            _X_LABEL[curve.field],
            width=_WIDTH,
            height=_HEIGHT,
            left=58,
        )
        _draw(axes, curve, x, gain, example)
        return inline_svg(figure, _KEY, "Gain against misreport", caption), caption


def _draw(axes: Any, curve: Curve, x: np.ndarray[Any, Any], gain: np.ndarray[Any, Any], example: Example) -> None:
    shown = np.where(np.isfinite(gain), gain, np.nan)
    known = shown[np.isfinite(shown)]
    low, high = min(0.0, float(known.min(initial=0.0))), max(0.0, float(known.max(initial=0.0)))
    low = max(low, -max(3.0 * high, 1.2))  # a deep loss needs no more room than it takes to see it
    if high - low < 0.05:
        low, high = low - 0.1, high + 0.1
    margin = 0.12 * (high - low)
    axes.set_ylim(low - margin, high + 1.8 * margin)
    axes.set_xlim(float(x[0]), float(x[-1]))
    # a jump is a jump: no line leads from one outcome to another
    broken_x, broken_y = _broken(x, shown, np.array(curve.epsilon))
    axes.axhline(0.0, color=LIGHT["slate"], linewidth=1.2, dashes=(4, 3))
    axes.fill_between(broken_x, 0.0, broken_y, where=broken_y > 0, color=LIGHT["bad"], alpha=0.14, linewidth=0)
    axes.plot(broken_x, broken_y, color=LIGHT["blue"], linewidth=2)
    axes.plot(broken_x, np.where(broken_y > 1e-12, broken_y, np.nan), color=LIGHT["bad"], linewidth=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:,.0f} %".replace("-", "−"))
    honest_x, lie_x = (0.0, 1.0) if curve.field == "all fields" else (1.0, _lie_position(curve.field, example))
    axes.plot([honest_x], [0.0], "o", color=LIGHT["ink"], markersize=7, clip_on=False)
    label(axes, honest_x, 0.0, "the truth", "ink", dx=9, dy=-7, va="top")
    if example.gain > 0 and x[0] <= lie_x <= x[-1]:
        height = example.gain_over_cost
        axes.plot([lie_x], [height], "o", color=LIGHT["bad"], markersize=7, clip_on=False)
        right = lie_x < 0.75 * x[-1] + 0.25 * x[0]
        label(
            axes, lie_x, height, f"the lie: +{percent(height)}", "bad", dx=2 if right else -2, dy=8,
            ha="left" if right else "right", va="bottom", weight="bold",
        )  # fmt: skip


def _lie_position(field: str, example: Example) -> float:
    truth, lie = example.bids[example.owner], example.lie
    told, true = {
        "value": (lie.full_cost, truth.full_cost),
        "privacy_budget": (lie.privacy_budget, truth.privacy_budget),
        "data_size": (lie.data_size, truth.data_size),
    }[field]
    return told / true if true > 0 else 1.0


def _broken(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], epsilon: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    cut = np.flatnonzero((epsilon[1:] > 0) != (epsilon[:-1] > 0)) + 1
    return np.insert(x, cut, x[cut]), np.insert(y, cut, np.nan)


def _caption(curve: Curve, gain: np.ndarray[Any, Any], example: Example) -> str:
    best = float(gain.max(initial=0.0))
    where = "Every point is an auction run again with all other bids unchanged. "
    gap = " The line stops where she would have to sell what she does not have." if np.isinf(gain).any() else ""
    if example.gain > 0:
        more = f"Above the dashed line she earns more than by telling the truth, up to {percent(best)} of her cost."
        return f"{where}{more}{gap}"
    return f"{where}The dashed line is what honesty earns; no report along this line brings more.{gap}"
