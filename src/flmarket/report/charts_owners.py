"""Charts over owners: what each gave up in privacy, and what she earned for the records she sold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flmarket.ledger import MICROS
from flmarket.report.drawing import label, panel, thousands
from flmarket.report.formatting import count, epsilon, percent, significant
from flmarket.report.tally import Tally
from flmarket.report.theme import LIGHT

if TYPE_CHECKING:
    from flmarket.market import MarketResult

__all__ = ["pay", "privacy"]

_MAX_DRAWN = 400
_MAX_BARS = 80
_FAR = 4.0  # caps more than this many times the largest loss would flatten the bars


def privacy(result: MarketResult, tally: Tally) -> tuple[Any, str]:
    """Total privacy loss of each owner, largest first, under her own cap."""
    total = np.array([owner.epsilon_total for owner in result.owners], dtype=float)
    cap = np.array([owner.epsilon_cap for owner in result.owners], dtype=float)
    figure, axes = panel("ε, total over the run", "owners, from most to least", right=58)
    largest = float(total.max(initial=0.0))
    if largest <= 0:
        axes.set_axis_off()
        return figure, "No owner gave up any privacy in this run."
    order = np.argsort(-total, kind="stable")
    if len(order) > _MAX_DRAWN:
        order = order[np.linspace(0, len(order) - 1, _MAX_DRAWN).round().astype(int)]
    shown, limit = total[order], cap[order]
    over = shown > limit * (1 + 1e-9)
    _bars(axes, np.where(over, 0.0, shown), "teal")
    if over.any():
        _bars(axes, np.where(over, shown, 0.0), "bad")
    near = np.isfinite(limit) & (limit <= _FAR * largest)
    top = max(largest, float(limit[near].max(initial=0.0))) * 1.08
    if near.any():
        _bars(axes, np.where(near, limit, 0.0), "slate", alpha=0.24, zorder=0.9)
        height = max(float(limit[near][-1]) * 0.9, float(shown[-1]) + 0.12 * top)
        label(axes, len(order) - 0.5, height, "her cap", "slate", dx=6, va="center")
    label(axes, len(order) - 0.5, float(shown[-1]) / 2, "lost", "teal", dx=6, va="center")
    axes.set_ylim(0, top)
    axes.set_xlim(-0.5, len(order) - 0.5)
    axes.set_xticks([])
    return figure, _privacy_caption(total, cap)


def _bars(axes: Any, heights: np.ndarray, color: str, **options: Any) -> None:
    """Bars, or one filled outline where there are too many to see gaps between."""
    if len(heights) > _MAX_BARS:
        axes.stairs(heights, np.arange(len(heights) + 1) - 0.5, fill=True, color=LIGHT[color], **options)
    else:
        axes.bar(np.arange(len(heights)), heights, 0.76, color=LIGHT[color], **options)


def _privacy_caption(total: np.ndarray, cap: np.ndarray) -> str:
    most = int(total.argmax())
    start = f"The most that any owner gave up is ε = {epsilon(float(total[most]))} in total"
    capped = np.isfinite(cap)
    if not capped.any():
        return f"{start}; no owner set a cap."
    above = int((total > cap * (1 + 1e-9)).sum())
    if above:
        return f"{start}; {count(above, 'owner')} went above a cap."
    near = int((total[capped] >= 0.9 * cap[capped]).sum())
    free = int((~capped).sum())
    without = f", and {count(free, 'owner')} set no cap" if free else ""
    close = f"{count(near, 'owner')} used at least 90 % of a cap" if near else "nobody used 90 % of a cap"
    return f"{start}; {close}, nobody passed one{without}."


def pay(result: MarketResult, tally: Tally) -> tuple[Any, str]:
    """Each owner's pay against the records she sold; a record sold in two rounds counts twice."""
    from matplotlib.ticker import MaxNLocator

    sold = np.array([owner.data_size * owner.releases for owner in result.owners], dtype=float)
    paid = np.array([owner.paid_micros for owner in result.owners], dtype=float) / MICROS
    figure, axes = panel("paid, currency units", "records × releases", right=20)
    active = (sold > 0) & (paid > 0)
    if not active.any():
        axes.set_axis_off()
        return figure, "No owner was paid in this run."
    order = np.flatnonzero(active)
    if len(order) > _MAX_DRAWN:
        order = order[np.linspace(0, len(order) - 1, _MAX_DRAWN).round().astype(int)]
    axes.plot(
        sold[order], paid[order], linestyle="", marker="o", markersize=6, color=LIGHT["plum"], alpha=0.55,
        markeredgewidth=0,
    )  # fmt: skip
    axes.set_xlim(0, float(sold[active].max()) * 1.05)
    axes.set_ylim(0, float(paid[active].max()) * 1.12)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    per_thousand = float(np.median(paid[active] / sold[active])) * 1_000
    tenth = max(1, round(0.1 * int(active.sum())))
    top_share = float(np.sort(paid[active])[-tenth:].sum() / paid[active].sum())
    caption = (
        f"The median paid owner earned {significant(per_thousand)} per 1,000 records sold; "
        f"the best-paid tenth took {percent(top_share)} of all pay"
    )
    idle = int((~active).sum())
    return figure, f"{caption}, and {count(idle, 'owner')} sold nothing." if idle else f"{caption}."
