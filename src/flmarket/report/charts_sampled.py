"""Charts of a market that samples clients: loss and its bound, who is asked how often, what she gets, what it costs.

A run is anything with the fields below (the sampling engine's result has them): reports do not import engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from flmarket.bids import FloatArray, IntArray
from flmarket.ledger import MICROS
from flmarket.report.charts import Chart
from flmarket.report.charts_rounds import end_labels, money_margin, round_axis, thin
from flmarket.report.drawing import inline_svg, label, log_ticks, panel, styled, thousands
from flmarket.report.formatting import count, money, money_decimals, percent, significant
from flmarket.report.theme import LIGHT

__all__ = ["Client", "Round", "Run", "sampled_charts"]

_MAX_DRAWN = 2_000


class Round(Protocol):
    """One round: who took part, who was turned away at a cap, the bill, the loss after it and its bound."""

    @property
    def participants(self) -> IntArray: ...  # noqa: D102
    @property
    def turned_away(self) -> IntArray: ...  # noqa: D102
    @property
    def spent_micros(self) -> int: ...  # noqa: D102
    @property
    def loss(self) -> float: ...  # noqa: D102
    @property
    def accuracy(self) -> float: ...  # noqa: D102
    @property
    def bound(self) -> float: ...  # noqa: D102


class Client(Protocol):
    """One client: her cost, her terms (q, r) and what came of them."""

    @property
    def client(self) -> int: ...  # noqa: D102
    @property
    def cost(self) -> float: ...  # noqa: D102
    @property
    def participation(self) -> float: ...  # noqa: D102
    @property
    def payment_micros(self) -> int: ...  # noqa: D102
    @property
    def rounds(self) -> int: ...  # noqa: D102
    @property
    def paid_micros(self) -> int: ...  # noqa: D102
    @property
    def utility(self) -> float: ...  # noqa: D102


class Run(Protocol):
    """A finished run; `expected_micros` is a round's expected bill without a cap, `budget_micros` a round's budget."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def scheme(self) -> str: ...  # noqa: D102
    @property
    def data_set(self) -> str: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def rounds(self) -> Sequence[Round]: ...  # noqa: D102
    @property
    def clients(self) -> Sequence[Client]: ...  # noqa: D102
    @property
    def expected_micros(self) -> float: ...  # noqa: D102
    @property
    def budget_micros(self) -> int | None: ...  # noqa: D102
    @property
    def hard_cap_micros(self) -> int | None: ...  # noqa: D102
    @property
    def bound_applies(self) -> bool: ...  # noqa: D102
    @property
    def initial_loss(self) -> float: ...  # noqa: D102
    @property
    def baseline_accuracy(self) -> float: ...  # noqa: D102
    @property
    def spent_micros(self) -> int: ...  # noqa: D102


def sampled_charts(run: Run) -> tuple[Chart, ...]:
    """All charts, the same bytes for the same run."""
    drawings: tuple[tuple[str, str, Callable[[Run], tuple[Any, str]]], ...] = (
        ("loss", "Training loss", _loss),
        ("bound", "Loss beside the convergence bound", _bound),
        ("participation", "Participation by cost", _participation),
        ("payment", "Pay by cost", _payment),
        ("spending", "Spending per round", _spending),
        ("taken", "Who took part", _taken),
    )
    charts = []
    for key, title, draw in drawings:
        with styled(key):
            figure, caption = draw(run)
            charts.append(Chart(key, title, caption, inline_svg(figure, f"chart-{key}", title, caption)))
    return tuple(charts)


def _loss(run: Run) -> tuple[Any, str]:
    loss = np.array([run.initial_loss, *(record.loss for record in run.rounds)])
    figure, axes = panel("penalised cross-entropy, all training records", "round", right=58)
    x, y = thin(np.arange(len(loss)), loss)
    axes.plot(x, y, color=LIGHT["blue"], linewidth=2)
    axes.plot(x[-1:], y[-1:], color=LIGHT["blue"], marker="o", markersize=5, clip_on=False)
    round_axis(axes, len(run.rounds))
    axes.set_xlim(0, len(run.rounds))
    label(axes, len(run.rounds), float(y[-1]), significant(float(y[-1])), "blue", dx=8, va="center", weight="bold")
    moved = f"went from {significant(float(loss[0]))} to {significant(float(loss[-1]))}"
    return figure, f"The loss {moved}; the least was {significant(float(loss.min()))}."


def _bound(run: Run) -> tuple[Any, str]:
    rounds = np.arange(1, len(run.rounds) + 1)
    loss, bound = (np.array([getattr(r, name) for r in run.rounds]) for name in ("loss", "bound"))
    figure, axes = panel("log scale", "round", right=58)
    lines = [("loss", "blue", loss)] + ([("bound", "rust", bound)] if np.isfinite(bound).all() else [])
    low, high = min(float(v.min()) for _, _, v in lines), max(float(v.max()) for _, _, v in lines)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.6, high * 1.6)
    log_ticks(axes.yaxis, low / 1.6, high * 1.6)
    for name, color, values in lines:
        x, y = thin(rounds, values)
        axes.plot(x, y, color=LIGHT[color], linewidth=2, marker="o" if len(x) == 1 else "")
        label(axes, float(x[-1]), float(y[-1]), name, color, dx=8, va="center")
    round_axis(axes, len(rounds))
    if len(lines) == 1:
        why = "a hard cap is set" if run.hard_cap_micros is not None else "a client is never asked"
        return figure, f"No bound can be given: {why}."
    far = f"The bound on the loss above its minimum is {significant(float(bound[-1]))} after the last round"
    if run.bound_applies:
        return figure, f"{far}: it holds in expectation, and is for comparing schemes rather than predicting the loss."
    return figure, f"{far}. It is for the theory's learning rate; this run used another, which it does not cover."


def _by_cost(run: Run) -> tuple[FloatArray, list[Client]]:
    ranked = sorted(run.clients, key=lambda client: (client.cost, client.client))
    if len(ranked) > _MAX_DRAWN:
        ranked = [ranked[i] for i in np.linspace(0, len(ranked) - 1, _MAX_DRAWN).round().astype(int)]
    return np.array([client.cost for client in ranked]), ranked


def _participation(run: Run) -> tuple[Any, str]:
    cost, ranked = _by_cost(run)
    q = np.array([client.participation for client in ranked])
    figure, axes = panel("q, probability of taking part in a round", "cost of taking part once")
    axes.plot(cost, q, linestyle="", marker="o", markersize=5, color=LIGHT["teal"], alpha=0.6, markeredgewidth=0)
    axes.set_ylim(0, 1.05)
    sure = int((q >= 1 - 1e-12).sum())
    text = f"q runs from {significant(float(q.min()))} to {significant(float(q.max()))}"
    return figure, f"{text}, {significant(float(q.mean()))} on average; {count(sure, 'client')} always take part."


def _payment(run: Run) -> tuple[Any, str]:
    cost, ranked = _by_cost(run)
    pay = np.array([client.payment_micros / MICROS for client in ranked])
    figure, axes = panel(
        "r, paid for taking part once", "cost of taking part once", left=money_margin(float(pay.max()))
    )
    axes.plot(cost, cost, color=LIGHT["slate"], linewidth=1.2, dashes=(4, 3))
    axes.plot(cost, pay, linestyle="", marker="o", markersize=5, color=LIGHT["plum"], alpha=0.6, markeredgewidth=0)
    axes.set_ylim(0, float(max(pay.max(), cost.max())) * 1.08)
    thousands(axes.yaxis)
    label(axes, float(cost[-1]), float(cost[-1]), "her cost", "slate", dx=-4, dy=-14, ha="right")
    rent = float(np.mean(pay - cost))
    return figure, f"Above the dashed line is what is left to a client: {significant(rent)} each time on average."


def _spending(run: Run) -> tuple[Any, str]:
    spent = np.array([record.spent_micros for record in run.rounds]) / MICROS
    limits = [("expected", "slate", run.expected_micros / MICROS)]
    if run.budget_micros is not None:
        limits.append(("budget", "ink", run.budget_micros / MICROS))
    if run.hard_cap_micros is not None:
        limits.append(("cap", "rust", run.hard_cap_micros / MICROS))
    top = max(float(spent.max()), *(value for _, _, value in limits)) * 1.1 or 1.0
    figure, axes = panel("currency units", "round", left=money_margin(top), right=66)
    x, y = thin(np.arange(1, len(spent) + 1), spent)
    axes.plot(x, y, color=LIGHT["blue"], linewidth=1.2, marker="o", markersize=3 if len(x) <= 120 else 0.8)
    for _, color, value in limits:
        axes.axhline(value, color=LIGHT[color], linewidth=1.2, dashes=(4, 3))
    axes.set_ylim(0, top)
    thousands(axes.yaxis)
    round_axis(axes, len(spent))
    end_labels(axes, float(len(spent)), limits, top * 0.075, 0.0, top)
    mean = int(np.mean([record.spent_micros for record in run.rounds]))
    places = money_decimals([int(run.expected_micros), mean])
    text = f"A round cost {money(mean, places)} on average; {money(int(run.expected_micros), places)} was expected"
    if run.budget_micros is None:
        return figure, f"{text}."
    over = int((spent > run.budget_micros / MICROS).sum())
    return figure, (
        f"{text}. The budget, in expectation over costs and draws, is {money(run.budget_micros, places)}; "
        f"{percent(over / len(spent))} of the rounds cost more."
    )


def _taken(run: Run) -> tuple[Any, str]:
    _, ranked = _by_cost(run)
    rounds = len(run.rounds)
    expected = np.array([client.participation for client in ranked]) * rounds
    taken = np.array([client.rounds for client in ranked])
    figure, axes = panel("rounds in which she took part", "rounds expected, q × rounds")
    line = np.linspace(0, rounds, 101)
    band = 2 * np.sqrt(line * (1 - line / rounds))
    axes.fill_between(line, line - band, line + band, color=LIGHT["slate"], alpha=0.16, linewidth=0)
    axes.plot(
        expected, taken, linestyle="", marker="o", markersize=5, color=LIGHT["teal"], alpha=0.6, markeredgewidth=0
    )
    axes.set_xlim(0, rounds * 1.03)
    axes.set_ylim(0, rounds * 1.06)
    never = sum(client.rounds == 0 for client in run.clients)
    away = sum(record.turned_away.size for record in run.rounds)
    turned = f" {count(away, 'time')} a client who was drawn was turned away at the cap." if away else ""
    return figure, f"The band is two standard deviations. {count(never, 'client')} never took part.{turned}"
