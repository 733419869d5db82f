"""The charts of a market run: inline SVG, each with a sentence that says what to see, computed from the data.

Over rounds: accuracy, spending, error bound and the privacy bought. Over owners: what each gave up in privacy, and what
she earned for the records she sold.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import InvalidInput
from flmarket.ledger import MICROS, AwardState
from flmarket.report.drawing import HEIGHT, LIGHT, end_labels, inline_svg, label, log_scale, panel, styled, thousands
from flmarket.report.formatting import count, epsilon, money, money_decimals, percent, rate, significant

if TYPE_CHECKING:
    from flmarket.market import MarketResult

P = ParamSpec("P")
Drawing = tuple[str, str, Callable[P, tuple[Any, str]]]  # key, title, and what makes figure and caption
LOST = ""  # the state of a bid that won nothing


@dataclass(frozen=True)
class Tally:
    """All bids of all rounds. `position` counts rounds from 0 in the order they are listed.

    A run's bids as flat columns, one entry a bid, so that every figure in the report is one expression over them.
    """

    rounds: int
    position: IntArray
    owner: IntArray
    epsilon: FloatArray
    price_micros: IntArray
    weight: FloatArray
    state: NDArray[np.str_]

    @classmethod
    def of(cls, result: "MarketResult") -> "Tally":
        """Flatten a result; a run without a single round has nothing to report."""
        records = result.rounds
        if not records:
            raise InvalidInput("rounds", 0, "a result with at least one finished round")
        sizes = [len(record.bidders) for record in records]
        states = [str(state) if state is not None else LOST for record in records for state in record.state]
        return cls(
            rounds=len(records),
            position=np.repeat(np.arange(len(records), dtype=np.int64), sizes),
            owner=np.concatenate([record.bidders for record in records]).astype(np.int64),
            epsilon=np.concatenate([record.loss for record in records]).astype(np.float64),
            price_micros=np.concatenate([record.price_micros for record in records]).astype(np.int64),
            weight=np.concatenate([record.weights for record in records]).astype(np.float64),
            state=np.array(states, dtype="U8"),
        )

    @cached_property
    def posted(self) -> NDArray[np.bool_]:
        """Bids that delivered and were paid."""
        return np.asarray(self.state == AwardState.POSTED.value)

    @cached_property
    def returned(self) -> NDArray[np.bool_]:
        """Awards whose price went from escrow back to the buyer."""
        return np.isin(self.state, (AwardState.VOIDED.value, AwardState.EXPIRED.value))

    @cached_property
    def awarded(self) -> NDArray[np.bool_]:
        """Bids that won, whatever became of them."""
        return np.asarray((self.epsilon > 0) | (self.state != LOST))

    def states(self, state: AwardState) -> int:
        """How many awards ended in a state."""
        return int((self.state == state.value).sum())

    def per_round(self, values: IntArray, where: NDArray[np.bool_]) -> IntArray:
        """Exact sums by round of some of the bids."""
        totals = np.zeros(self.rounds, dtype=np.int64)
        np.add.at(totals, self.position[where], values[where])
        return totals


def symbol(result: "MarketResult") -> str:
    """What privacy losses are counted in."""
    return "ρ" if result.currency == "rho" else "ε"


_MAX_POINTS = 1_000  # a line drawn finer than the screen only makes the file larger
_MAX_BARS = 60


def accuracy(result: "MarketResult", tally: Tally) -> tuple[Any, str]:
    """Test accuracy after each round, with always guessing the larger class for scale."""
    measured = np.array([record.metrics.get("accuracy", np.nan) for record in result.rounds], dtype=float)
    base, shown = result.baseline_accuracy, np.isfinite(measured)
    known, rounds = measured[shown], np.flatnonzero(shown) + 1
    if not known.size:
        return _empty("Accuracy was not measured in this run.")
    low, high = min(float(known.min()), base), max(float(known.max()), base)
    margin = max(0.08 * (high - low), 0.01)
    first, last, best = float(known[0]), float(known[-1]), float(known.max())
    unit, limits = "share of test examples classified correctly", (max(0.0, low - margin), min(1.02, high + margin))
    line, guess = (rate(last), "blue", rounds, known), (f"larger class\n{rate(base)}", "slate", base)
    figure, _ = over_rounds(unit, tally.rounds, [line], [guess], limits=limits, right=78, gap=30.0)
    verb = "rose" if last > first else "fell" if last < first else "stayed"
    move = f"{verb} from {rate(first)} to {rate(last)}" if last != first else f"stayed at {rate(last)}"
    peak = f", with a best of {rate(best)} in round {int(rounds[known.argmax()])}" if best > last + 0.005 else ""
    return figure, f"Accuracy {move}{peak}; always guessing the larger class gives {rate(base)}."


def spending(result: "MarketResult", tally: Tally) -> tuple[Any, str]:
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
    names = [("budget", "ink", float(bars[2][-1])), ("paid", "blue", float(bars[0][-1]) / 2)]
    if back.any():
        names.append(("returned", "rust", float(bars[0][-1] + bars[1][-1] / 2)))
    top = max(float(bars[2].max()), float((bars[0] + bars[1]).max()), 1e-6) * 1.08
    figure, axes = over_rounds(
        unit, tally.rounds, limits=(0, top), names=names, left=money_margin(float(bars[2].max(initial=0)))
    )
    axes.bar(middle, bars[0], width, color=LIGHT["blue"])
    axes.bar(middle, bars[1], width, bottom=bars[0], color=LIGHT["rust"])
    axes.stairs(bars[2], np.append(starts, tally.rounds) + 0.5, color=LIGHT["ink"], linewidth=1.4, baseline=None)
    thousands(axes.yaxis)
    axes.set_xlim(0.5, tally.rounds + 0.5)
    total, spent, returned = int(budget.sum()), int(paid.sum()), int(back.sum())
    places = money_decimals([total])
    kept = total - spent - returned
    lost = f", {money(returned, places)} was awarded but not delivered and went back" if returned else ""
    rest = f"{money(kept, places)} was never awarded"
    return figure, f"{money(spent, places)} of {money(total, places)} was paid{lost}, and {rest}."


def error_bound(result: "MarketResult", tally: Tally) -> tuple[Any, str]:
    """The error bound of each round on a log scale; rounds in which nobody delivered have none and are marked."""
    bound = np.array([record.error_bound for record in result.rounds], dtype=float)
    usable = np.isfinite(bound) & (bound > 0)
    if not usable.any():
        return _empty("No round delivered anything, so there is no error bound.")
    rounds = np.arange(1, tally.rounds + 1)
    low, high, median = (float(f(bound[usable])) for f in (np.min, np.max, np.median))
    unit, limits = "error bound of the aggregate, log scale", (low / 1.6, high * 1.35)
    line = ("", "blue", rounds, np.where(usable, bound, np.nan))
    middle = (f"median {significant(median)}", "slate", median)
    figure, axes = over_rounds(unit, tally.rounds, [line], [middle], limits=limits, right=82, log=True, dotted=True)
    missing = rounds[~np.isfinite(bound)]
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


def epsilon_awarded(result: "MarketResult", tally: Tally) -> tuple[Any, str]:
    """Smallest, median and largest privacy loss among each round's winners."""
    sold = tally.epsilon > 0
    if not sold.any():
        return _empty("Nobody was awarded anything in this run.")
    position, values = tally.position[sold], tally.epsilon[sold]
    order = np.lexsort((values, position))
    present, starts = np.unique(position[order], return_index=True)
    groups = np.split(values[order], starts[1:])
    lines = np.full((3, tally.rounds), np.nan)
    lines[:, present] = np.array([(group[0], np.median(group), group[-1]) for group in groups]).T
    smallest, _, largest = lines[:, present[-1]].tolist()
    rounds = np.arange(1, tally.rounds + 1)
    unit, limits = f"{symbol(result)} of one release, per round", (0, float(values.max()) * 1.08)
    line = ("median", "teal", rounds, lines[1])
    names = [("smallest", "muted", smallest), ("largest", "muted", largest)]
    figure, axes = over_rounds(unit, tally.rounds, [line], limits=limits, right=56, names=names)
    axes.fill_between(*thin(rounds, lines[0], lines[2]), color=LIGHT["teal"], alpha=0.18, linewidth=0)
    median = epsilon(float(np.median(values)))
    span = f"from {epsilon(float(values.min()))} to {epsilon(float(values.max()))}"
    return (
        figure,
        f"Half of all awards bought {symbol(result)} of at most {median} per round; single awards ran {span}.",
    )


Level = tuple[str, str, float]  # what stands at the right end, its colour, the height


def over_rounds(
    unit: str,
    rounds: int,
    lines: Sequence[tuple[str, str, NDArray[Any], NDArray[Any]]] = (),
    flats: Sequence[Level] = (),
    *,
    limits: tuple[float, float] | None = None,
    names: Sequence[Level] = (),
    log: bool = False,
    dotted: bool = False,
    left: float = 44,
    right: float = 66,
    gap: float = 14.0,
) -> tuple[Any, Any]:
    """Lines over rounds, (name, colour, rounds, heights) each, and dashed levels; names stand where they end."""
    figure, axes = panel(unit, "round", left=left, right=right)
    round_axis(axes, rounds)
    if log and limits is not None:
        log_scale(axes, *limits)
    elif limits is not None:
        axes.set_ylim(*limits)
    for _, color, level in flats:
        axes.axhline(level, color=LIGHT[color], linewidth=1.2, dashes=(4, 3))
    ends = [*flats, *names]
    for name, color, place, heights in lines:
        x, y = thin(place, heights)
        size = 3.2 if len(x) <= 120 else 0.8
        style = {"linewidth": 1.6, "marker": "o", "markersize": size} if dotted else {"linewidth": 2.0}
        axes.plot(x, y, color=LIGHT[color], clip_on=not dotted, **style)
        last = np.flatnonzero(np.isfinite(heights))[-1:]  # thinning may have left it out
        if not dotted:
            axes.plot(place[last], heights[last], color=LIGHT[color], marker="o", markersize=5, clip_on=False)
        ends += [(name, color, float(height)) for height in heights[last]]
    end_labels(axes, [(name, color, float(rounds), height) for name, color, height in ends if name], gap=gap)
    return figure, axes


def dots(axes: Any, x: FloatArray, y: FloatArray, color: str) -> None:
    """A dot for each owner."""
    axes.plot(x, y, linestyle="", marker="o", markersize=5, color=LIGHT[color], alpha=0.6, markeredgewidth=0)


def round_axis(axes: Any, rounds: int) -> None:
    """Rounds from the first to the last, in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(1 if rounds > 1 else 0.5, max(rounds, 1.5))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def money_margin(largest: float) -> float:
    """Points that the labels of an axis of amounts need at the left."""
    return 28 + 6.5 * len(f"{largest:,.0f}")


def evenly(number: int, most: int) -> IntArray:
    """Places among so many, evenly spaced, first and last included; all where they are not more than `most`."""
    return np.linspace(0, number - 1, min(number, most)).round().astype(np.int64)


def thin(x: NDArray[Any], *lines: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Evenly spaced points once there are more than a screen can show."""
    keep = evenly(len(x), _MAX_POINTS)
    return x[keep], *(line[keep] for line in lines)


def _empty(message: str) -> tuple[Any, str]:
    figure, axes = panel("", "")
    axes.set_axis_off()
    axes.text(0.5, 0.5, "nothing to draw", ha="center", color=LIGHT["muted"], transform=axes.transAxes)
    return figure, message


_MAX_DRAWN = 400
_MAX_OWNER_BARS = 80
_FAR = 4.0  # caps more than this many times the largest loss would flatten the bars


def privacy(result: "MarketResult", tally: Tally) -> tuple[Any, str]:
    """Total privacy loss of each owner, largest first, under her own cap."""
    total = np.array([owner.loss_total for owner in result.owners], dtype=float)
    cap = np.array([owner.loss_cap for owner in result.owners], dtype=float)
    largest = float(total.max(initial=0.0))
    if largest <= 0 or np.isinf(largest):
        alone = "No owner gave up any privacy in this run."
        return _empty("Updates left without noise: whoever sold any has no bound." if largest else alone)
    figure, axes = panel(f"{symbol(result)}, total over the run", "owners, from most to least", right=58)
    order = np.argsort(-total, kind="stable")
    order = order[evenly(len(order), _MAX_DRAWN)]
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
    return figure, _privacy_caption(total, cap, symbol(result))


def _bars(axes: Any, heights: np.ndarray, color: str, **options: Any) -> None:
    """Bars, or one filled outline where there are too many to see gaps between."""
    if len(heights) > _MAX_OWNER_BARS:
        axes.stairs(heights, np.arange(len(heights) + 1) - 0.5, fill=True, color=LIGHT[color], **options)
    else:
        axes.bar(np.arange(len(heights)), heights, 0.76, color=LIGHT[color], **options)


def _privacy_caption(total: np.ndarray, cap: np.ndarray, loss: str) -> str:
    most = int(total.argmax())
    start = f"The most that any owner gave up is {loss} = {epsilon(float(total[most]))} in total"
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


def pay(result: "MarketResult", tally: Tally) -> tuple[Any, str]:
    """Each owner's pay against the records she sold; a record sold in two rounds counts twice."""
    from matplotlib.ticker import MaxNLocator

    sold = np.array([owner.data_size * owner.releases for owner in result.owners], dtype=float)
    paid = np.array([owner.paid_micros for owner in result.owners], dtype=float) / MICROS
    active = (sold > 0) & (paid > 0)
    if not active.any():
        return _empty("No owner was paid in this run.")
    figure, axes = panel("paid, currency units", "records × releases", right=20)
    order = np.flatnonzero(active)
    order = order[evenly(len(order), _MAX_DRAWN)]
    dots(axes, sold[order], paid[order], "plum")
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


_CHARTS: "tuple[Drawing[[MarketResult, Tally]], ...]" = (
    ("accuracy", "Accuracy", accuracy),
    ("spending", "Spending per round", spending),
    ("error-bound", "Error bound per round", error_bound),
    ("epsilon-awarded", "Privacy bought per round", epsilon_awarded),
    ("epsilon-owners", "Privacy lost per owner, total", privacy),
    ("pay", "Pay and records sold", pay),
)


@dataclass(frozen=True)
class Chart:
    """A drawing and its caption. The SVG takes its colours from CSS variables and its font from the page."""

    key: str
    title: str
    caption: str
    svg: str


def market_charts(result: "MarketResult") -> tuple[Chart, ...]:
    """All charts of a run, the same bytes for the same result."""
    return drawn(_CHARTS, result, Tally.of(result))


def drawn(drawings: Iterable[Drawing[P]], *args: P.args, **kwargs: P.kwargs) -> tuple[Chart, ...]:
    """Charts by key, title and the function that draws each."""
    charts = []
    for key, title, draw in drawings:
        with styled(key):
            figure, caption = draw(*args, **kwargs)
            charts.append(Chart(key, title, caption, inline_svg(figure, f"chart-{key}", title, caption)))
    return tuple(charts)
