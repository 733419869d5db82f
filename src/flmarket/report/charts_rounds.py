"""Charts over rounds: accuracy, spending, error bound and the privacy bought. Each returns a figure and its caption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flmarket.ledger import MICROS
from flmarket.report.drawing import HEIGHT, label, log_ticks, panel, spread, thousands
from flmarket.report.formatting import count, epsilon, money, money_decimals, rate, significant
from flmarket.report.tally import Tally
from flmarket.report.theme import LIGHT

if TYPE_CHECKING:
    from flmarket.market import MarketResult

__all__ = [
    "accuracy",
    "end_labels",
    "epsilon_awarded",
    "error_bound",
    "money_margin",
    "round_axis",
    "spending",
    "thin",
]

_MAX_POINTS = 1_000  # a line drawn finer than the screen only makes the file larger
_MAX_BARS = 60


def accuracy(result: MarketResult, tally: Tally) -> tuple[Any, str]:
    """Test accuracy after each round, with always guessing the larger class for scale."""
    measured = np.array([record.metrics.get("accuracy", np.nan) for record in result.rounds], dtype=float)
    base = result.baseline_accuracy
    figure, axes = panel("share of test examples classified correctly", "round", right=78)
    shown = np.isfinite(measured)
    known = measured[shown]
    if not known.size:
        return _empty(figure, axes, "Accuracy was not measured in this run.")
    rounds = np.arange(1, tally.rounds + 1)
    low, high = min(float(known.min()), base), max(float(known.max()), base)
    margin = max(0.08 * (high - low), 0.01)
    axes.set_ylim(max(0.0, low - margin), min(1.02, high + margin))
    axes.axhline(base, color=LIGHT["slate"], linewidth=1.2, dashes=(4, 3))
    x, y = thin(rounds[shown], known)
    axes.plot(x, y, color=LIGHT["blue"], linewidth=2, marker="o" if len(x) == 1 else "", markersize=5)
    axes.plot(x[-1:], y[-1:], color=LIGHT["blue"], marker="o", markersize=5, clip_on=False)
    round_axis(axes, tally.rounds)
    low, high = axes.get_ylim()
    end, guess = spread([float(y[-1]), base], 0.17 * (high - low), low, high)
    label(axes, tally.rounds, end, rate(float(y[-1])), "blue", dx=8, va="center", weight="bold")
    label(axes, tally.rounds, guess, f"larger class\n{rate(base)}", "slate", dx=8, va="center", linespacing=1.3)
    first, last = float(known[0]), float(known[-1])
    verb = "rose" if last > first else "fell" if last < first else "stayed"
    move = f"{verb} from {rate(first)} to {rate(last)}" if last != first else f"stayed at {rate(last)}"
    best = float(known.max())
    peak = f", with a best of {rate(best)} in round {int(rounds[shown][known.argmax()])}" if best > last + 0.005 else ""
    return figure, f"Accuracy {move}{peak}; always guessing the larger class gives {rate(base)}."


def spending(result: MarketResult, tally: Tally) -> tuple[Any, str]:
    """What was paid and what came back from escrow, under each round's budget."""
    budget = np.array([record.budget_micros for record in result.rounds], dtype=np.int64)
    paid = tally.per_round(tally.price_micros, tally.posted)
    back = tally.per_round(tally.price_micros, tally.returned)
    size = -(-tally.rounds // _MAX_BARS)  # rounds to a bar, so that thousands of rounds stay legible
    starts = np.arange(0, tally.rounds, size)
    # a mean, not a sum: the last bar may cover fewer rounds
    covered = np.diff(np.append(starts, tally.rounds))
    bars = [np.add.reduceat(values, starts) / covered / MICROS for values in (paid, back, budget)]
    middle, width = starts + (covered + 1) / 2, covered * 0.78
    unit = "currency units" if size == 1 else f"currency units, mean of {size} rounds"
    figure, axes = panel(unit, "round", left=money_margin(float(bars[2].max(initial=0))), right=66)
    axes.bar(middle, bars[0], width, color=LIGHT["blue"])
    axes.bar(middle, bars[1], width, bottom=bars[0], color=LIGHT["rust"])
    edges = np.append(starts, tally.rounds) + 0.5
    axes.stairs(bars[2], edges, color=LIGHT["ink"], linewidth=1.4, baseline=None)
    top = max(float(bars[2].max()), float((bars[0] + bars[1]).max()), 1e-6) * 1.08
    axes.set_ylim(0, top)
    thousands(axes.yaxis)
    marks = [("budget", "ink", float(bars[2][-1])), ("paid", "blue", float(bars[0][-1]) / 2)]
    if back.any():
        marks.append(("returned", "rust", float(bars[0][-1] + bars[1][-1] / 2)))
    end_labels(axes, float(edges[-1]), marks, top * 0.075, 0.0, top)
    round_axis(axes, tally.rounds)
    axes.set_xlim(0.5, tally.rounds + 0.5)
    total, spent, returned = int(budget.sum()), int(paid.sum()), int(back.sum())
    places = money_decimals([total])
    kept = total - spent - returned
    lost = f", {money(returned, places)} was awarded but not delivered and went back" if returned else ""
    rest = f"{money(kept, places)} was never awarded"
    return figure, f"{money(spent, places)} of {money(total, places)} was paid{lost}, and {rest}."


def error_bound(result: MarketResult, tally: Tally) -> tuple[Any, str]:
    """The error bound of each round on a log scale; rounds in which nobody delivered have none and are marked."""
    bound = np.array([record.error_bound for record in result.rounds], dtype=float)
    usable = np.isfinite(bound) & (bound > 0)
    figure, axes = panel("error bound of the aggregate, log scale", "round", right=82)
    if not usable.any():
        return _empty(figure, axes, "No round delivered anything, so there is no error bound.")
    rounds = np.arange(1, tally.rounds + 1)
    low, high = float(bound[usable].min()), float(bound[usable].max())
    axes.set_yscale("log")
    axes.set_ylim(low / 1.6, high * 1.35)
    log_ticks(axes.yaxis, low / 1.6, high * 1.35)
    median = float(np.median(bound[usable]))
    axes.axhline(median, color=LIGHT["slate"], linewidth=1.2, dashes=(4, 3))
    x, y = thin(rounds, np.where(usable, bound, np.nan))
    axes.plot(
        x, y, color=LIGHT["blue"], linewidth=1.6, marker="o", markersize=3.2 if len(x) <= 120 else 0.8, clip_on=False
    )
    missing = rounds[~np.isfinite(bound)]
    round_axis(axes, tally.rounds)
    label(axes, tally.rounds + 0.5, median, f"median {significant(median)}", "slate", dx=6, va="center")
    note = ""
    if missing.size:
        marked = thin(missing, missing)[0]
        axes.plot(
            marked, np.full(len(marked), 0.03), color=LIGHT["rust"], marker="x", linestyle="", markersize=6,
            transform=axes.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
        figure.text(1, 1 - 4 / HEIGHT, "× nobody delivered", ha="right", va="top", color=LIGHT["rust"])
        note = f"; in {count(int(missing.size), 'round')} nobody delivered"
    caption = f"Lower is better: the bound lay between {significant(low)} and {significant(high)}, "
    return figure, f"{caption}with a median of {significant(median)}{note}."


def epsilon_awarded(result: MarketResult, tally: Tally) -> tuple[Any, str]:
    """Smallest, median and largest privacy loss among each round's winners."""
    figure, axes = panel("ε of one release, per round", "round", right=56)
    sold = tally.epsilon > 0
    if not sold.any():
        return _empty(figure, axes, "Nobody was awarded anything in this run.")
    position, values = tally.position[sold], tally.epsilon[sold]
    order = np.lexsort((values, position))
    present, starts = np.unique(position[order], return_index=True)
    groups = np.split(values[order], starts[1:])
    lines = np.full((3, tally.rounds), np.nan)
    lines[:, present] = np.array([(group[0], np.median(group), group[-1]) for group in groups]).T
    rounds = np.arange(1, tally.rounds + 1)
    x, low, middle, high = thin(rounds, *lines)
    axes.fill_between(x, low, high, color=LIGHT["teal"], alpha=0.18, linewidth=0)
    axes.plot(x, middle, color=LIGHT["teal"], linewidth=2, marker="o" if len(x) == 1 else "")
    top = float(values.max()) * 1.08
    axes.set_ylim(0, top)
    round_axis(axes, tally.rounds)
    ends = lines[:, present[-1]]
    marks = [("smallest", "muted", ends[0]), ("median", "teal", ends[1]), ("largest", "muted", ends[2])]
    end_labels(axes, float(tally.rounds), marks, top * 0.075, 0.0, top)
    median = epsilon(float(np.median(values)))
    span = f"from {epsilon(float(values.min()))} to {epsilon(float(values.max()))}"
    return figure, f"Half of all awards bought ε of at most {median} per round; single awards ran {span}."


def end_labels(axes: Any, x: float, marks: list[tuple[str, str, float]], gap: float, low: float, high: float) -> None:
    """Names at the right end of lines, (text, colour, height) each, at least a gap apart."""
    placed = spread([y for _, _, y in marks], gap, low, high)
    for (text, color, _), y in zip(marks, placed, strict=True):
        label(axes, x, y, text, color, dx=6, va="center")


def round_axis(axes: Any, rounds: int) -> None:
    """Rounds from the first to the last, in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(1 if rounds > 1 else 0.5, max(rounds, 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def money_margin(largest: float) -> float:
    """Points that the labels of an axis of amounts need at the left."""
    return 28 + 6.5 * len(f"{largest:,.0f}")


def thin(x: NDArray[Any], *lines: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Evenly spaced points, first and last included, once there are more than a screen can show."""
    if len(x) <= _MAX_POINTS:
        return x, *lines
    keep = np.linspace(0, len(x) - 1, _MAX_POINTS).round().astype(int)
    return x[keep], *(line[keep] for line in lines)


def _empty(figure: Any, axes: Any, message: str) -> tuple[Any, str]:
    axes.set_axis_off()
    axes.text(0.5, 0.5, "nothing to draw", ha="center", color=LIGHT["muted"], transform=axes.transAxes)
    return figure, message
