"""The report of a market that samples clients: one page, a summary and a table, for whoever paid or took part.

Its charts: loss and its bound, who is asked how often, what she gets, what it costs.
"""

from collections import Counter
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flmarket.bids import FloatArray
from flmarket.files import Name, csv_text, write_files
from flmarket.ledger import MICROS, format_micros
from flmarket.report.charts import Chart, Drawing, dots, drawn, evenly, money_margin, over_rounds
from flmarket.report.drawing import LIGHT, label, panel, thousands
from flmarket.report.formatting import count, finite_or_none, money, money_decimals, percent, significant
from flmarket.report.html import Check, heading, render, said, strict_json
from flmarket.trust import sampled_words

if TYPE_CHECKING:
    from flmarket.market.kinds.sampling import SampledClient as Client
    from flmarket.market.kinds.sampling import SampledResult as Run

_MAX_DRAWN = 2_000


def sampled_charts(run: "Run") -> tuple[Chart, ...]:
    """All charts, the same bytes for the same run."""
    drawings: tuple[Drawing[[Run]], ...] = (
        ("loss", "Training loss", _loss),
        ("bound", "Loss beside the convergence bound", _bound),
        ("participation", "Participation by cost", _participation),
        ("payment", "Pay by cost", _payment),
        ("spending", "Spending per round", _spending),
        ("taken", "Who took part", _taken),
    )
    return drawn(drawings, run)


def _loss(run: "Run") -> tuple[Any, str]:
    loss = np.array([run.initial_loss, *(record.loss for record in run.rounds)])
    first, last, least = (significant(float(value)) for value in (loss[0], loss[-1], loss.min()))
    unit, line = "penalised cross-entropy, all training records", (last, "blue", np.arange(len(loss)), loss)
    figure, axes = over_rounds(unit, len(run.rounds), [line], right=58)
    axes.set_xlim(0, len(run.rounds))
    return figure, f"The loss went from {first} to {last}; the least was {least}."


def _bound(run: "Run") -> tuple[Any, str]:
    rounds = np.arange(1, len(run.rounds) + 1)
    loss, bound = (np.array([getattr(r, name) for r in run.rounds]) for name in ("loss", "bound"))
    lines = [("loss", "blue", rounds, loss)]
    lines += [("bound", "rust", rounds, bound)] if np.isfinite(bound).all() else []
    heights = np.concatenate([values for *_, values in lines])
    limits = float(heights.min()) / 1.6, float(heights.max()) * 1.6
    figure, _ = over_rounds("log scale", len(rounds), lines, limits=limits, right=58, log=True)
    if len(lines) == 1:
        why = "a hard cap is set" if run.hard_cap_micros is not None else "a client is never asked"
        return figure, f"No bound can be given: {why}."
    far = f"The bound on the loss above its minimum is {significant(float(bound[-1]))} after the last round"
    if run.bound_applies:
        return figure, f"{far}: it holds in expectation, and is for comparing schemes rather than predicting the loss."
    return figure, f"{far}. It is for the theory's learning rate; this run used another, which it does not cover."


def _by_cost(run: "Run") -> "tuple[FloatArray, list[Client]]":
    ranked = sorted(run.clients, key=lambda client: (client.cost, client.client))
    ranked = [ranked[i] for i in evenly(len(ranked), _MAX_DRAWN)]
    return np.array([client.cost for client in ranked]), ranked


def _participation(run: "Run") -> tuple[Any, str]:
    cost, ranked = _by_cost(run)
    q = np.array([client.participation for client in ranked])
    figure, axes = panel("q, probability of taking part in a round", "cost of taking part once")
    dots(axes, cost, q, "teal")
    axes.set_ylim(0, 1.05)
    sure = int((q >= 1 - 1e-12).sum())
    text = f"q runs from {significant(float(q.min()))} to {significant(float(q.max()))}"
    return figure, f"{text}, {significant(float(q.mean()))} on average; {count(sure, 'client')} always take part."


def _payment(run: "Run") -> tuple[Any, str]:
    cost, ranked = _by_cost(run)
    pay = np.array([client.payment_micros / MICROS for client in ranked])
    figure, axes = panel(
        "r, paid for taking part once", "cost of taking part once", left=money_margin(float(pay.max()))
    )
    axes.plot(cost, cost, color=LIGHT["slate"], linewidth=1.2, dashes=(4, 3))
    dots(axes, cost, pay, "plum")
    axes.set_ylim(0, float(max(pay.max(), cost.max())) * 1.08)
    thousands(axes.yaxis)
    label(axes, float(cost[-1]), float(cost[-1]), "her cost", "slate", dx=-4, dy=-14, ha="right")
    rent = float(np.mean(pay - cost))
    return figure, f"Above the dashed line is what is left to a client: {significant(rent)} each time on average."


def _spending(run: "Run") -> tuple[Any, str]:
    spent = np.array([record.spent_micros for record in run.rounds]) / MICROS
    limits = [("expected", "slate", run.expected_micros / MICROS)]
    if run.budget_micros is not None:
        limits.append(("budget", "ink", run.budget_micros / MICROS))
    if run.hard_cap_micros is not None:
        limits.append(("cap", "rust", run.hard_cap_micros / MICROS))
    top = max(float(spent.max()), *(value for _, _, value in limits)) * 1.1 or 1.0
    line, left = ("", "blue", np.arange(1, len(spent) + 1), spent), money_margin(top)
    figure, axes = over_rounds("currency units", len(spent), [line], limits, limits=(0, top), left=left, dotted=True)
    thousands(axes.yaxis)
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


def _taken(run: "Run") -> tuple[Any, str]:
    _, ranked = _by_cost(run)
    rounds = len(run.rounds)
    expected = np.array([client.participation for client in ranked]) * rounds
    taken = np.array([client.rounds for client in ranked])
    figure, axes = panel("rounds in which she took part", "rounds expected, q × rounds")
    line = np.linspace(0, rounds, 101)
    band = 2 * np.sqrt(line * (1 - line / rounds))
    axes.fill_between(line, line - band, line + band, color=LIGHT["slate"], alpha=0.16, linewidth=0)
    dots(axes, expected, taken, "teal")
    axes.set_xlim(0, rounds * 1.03)
    axes.set_ylim(0, rounds * 1.06)
    never = sum(client.rounds == 0 for client in run.clients)
    away = sum(record.turned_away.size for record in run.rounds)
    turned = f" {count(away, 'time')} a client who was drawn was turned away at the cap." if away else ""
    return figure, f"The band is two standard deviations. {count(never, 'client')} never took part.{turned}"


def write_sampled(run: "Run", out_dir: Name, *, command: str | None = None) -> Path:
    """Write report.html, summary.json and clients.csv, whole or not at all; returns the path of the page."""
    page = render(
        "sampled.html.j2",
        trust=sampled_words(run.trust),
        title=heading(run.name),
        command=command,
        run=run,
        mean_participants=float(np.mean([record.participants.size for record in run.rounds])),
        mean_q=float(np.mean([client.participation for client in run.clients])),
        charts=sampled_charts(run),
        checks=check_sampled(run),
        clients=sorted(run.clients, key=lambda client: (-client.paid_micros, client.client)),
        places=money_decimals(client.paid_micros for client in run.clients),
    )
    names = ("client", "cost", "participation", "payment_micros", "rounds", "paid_micros", "utility")
    values = (attrgetter(*names)(client) for client in run.clients)
    table = csv_text(names, ((f"{v:.9g}" if isinstance(v, float) else str(v) for v in row) for row in values))
    files = {"summary.json": strict_json(summarize_sampled(run)), "clients.csv": table, "report.html": page}
    return write_files(out_dir, files) / "report.html"


def summarize_sampled(run: "Run") -> dict[str, Any]:
    """The run in numbers, ready for strict JSON; what is infinite or unknown is None."""
    q = np.array([client.participation for client in run.clients])
    return {
        "schema": 1,
        "task": run.name,
        "mechanism": "sampling",
        "scheme": run.scheme,
        "data_set": run.data_set,
        "seed": run.seed,
        "rounds": len(run.rounds),
        "loss": [record.loss for record in run.rounds],
        "initial_loss": run.initial_loss,
        "bound": [finite_or_none(record.bound) for record in run.rounds],
        "bound_applies": run.bound_applies,
        "accuracy": [record.accuracy for record in run.rounds],
        "final_accuracy": run.rounds[-1].accuracy,
        "baseline_accuracy": run.baseline_accuracy,
        "spent_micros": run.spent_micros,
        "spent_per_round_micros": [record.spent_micros for record in run.rounds],
        "expected_per_round_micros": run.expected_micros,
        "budget_per_round_micros": run.budget_micros,
        "hard_cap_micros": run.hard_cap_micros,
        "clients": len(run.clients),
        "clients_paid": sum(client.paid_micros > 0 for client in run.clients),
        "average_participation": float(q.mean()),
        "mean_inverse_participation": finite_or_none(float(np.mean(1 / q))) if q.min() > 0 else None,
        "participants": [int(record.participants.size) for record in run.rounds],
        "turned_away": int(sum(record.turned_away.size for record in run.rounds)),
        "guarantees": {check.key: check.holds for check in check_sampled(run)},
    } | said(sampled_words(run.trust))


def check_sampled(run: "Run") -> tuple[Check, ...]:
    """Every rule that a run can prove or disprove by itself, from its rounds and clients alone."""
    below = sum(client.payment_micros < int(client.cost * MICROS) for client in run.clients)
    checked = f"{count(len(run.clients), 'client')} checked, {below:,} paid below cost."
    checks = [_paid_as_promised(run), Check("rational", "Nobody is paid less than her cost", not below, checked)]
    if run.scheme != "prior-independent":  # there each client has a schedule of her own
        ranked = sorted(run.clients, key=lambda client: client.cost)
        rises = any(after.participation > before.participation * (1 + 1e-9) for before, after in pairwise(ranked))
        detail = "Truthfulness needs this (SAMP Theorem 1); whether payments fit is for flmarket audit."
        checks.append(Check("monotone", "A higher cost never means a higher chance", not rises, detail))
    budget = run.budget_micros
    if budget is not None and run.scheme in ("complete", "prior-independent"):
        # the others keep it over the distribution of costs; each payment was rounded to a micro-unit
        expected = sum(client.participation * client.payment_micros for client in run.clients)
        holds = expected <= budget * (1 + 1e-9) + len(run.clients)
        of = f"{format_micros(int(expected))} of {format_micros(budget)}"
        detail = f"Σ q·r = {of} for these clients; single rounds vary."
        checks.append(Check("expected_budget", "The expected bill of a round is within the budget", holds, detail))
    if run.hard_cap_micros is not None:
        most = max(record.spent_micros for record in run.rounds)
        detail = f"The dearest round cost {format_micros(most)} of {format_micros(run.hard_cap_micros)}."
        checks.append(Check("hard_cap", "No round costs more than the cap", most <= run.hard_cap_micros, detail))
    return tuple(checks)


def _paid_as_promised(run: "Run") -> Check:
    taken = Counter(client for record in run.rounds for client in record.participants.tolist())
    owed = sum(client.payment_micros * taken[client.client] for client in run.clients)
    each = all(
        (client.rounds, client.paid_micros) == (taken[client.client], client.payment_micros * taken[client.client])
        for client in run.clients
    )
    detail = f"Payments add up to {format_micros(owed)}, the rounds' bills to {format_micros(run.spent_micros)}."
    holds = each and owed == run.spent_micros
    return Check("paid_as_promised", "Whoever took part was paid her r, once for each time", holds, detail)
