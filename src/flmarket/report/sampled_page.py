"""The report of a market that samples clients: one page, a summary and a table, for whoever paid or took part."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flmarket.files import write_files
from flmarket.ledger import MICROS, format_micros
from flmarket.report.charts_sampled import Run, sampled_charts
from flmarket.report.formatting import count, finite_or_none, money, money_decimals, percent, rate, significant
from flmarket.report.guarantees import Check
from flmarket.report.html import heading, render, strict_json
from flmarket.report.view import Card
from flmarket.trust import RAW_HERE

__all__ = ["check_sampled", "summarize_sampled", "write_sampled"]

_TOP_CLIENTS, _MAX_CLIENTS = 20, 2_000
_KNOWS = {
    "optimal": "knows the distribution of costs and posts the terms that learn most within the budget",
    "uniform": "knows the highest cost only: everybody takes part with one probability and is paid that cost",
    "complete": "is told every cost and pays exactly that: what could be reached if nobody had a secret",
    "prior-independent": "knows the highest cost only and learns the rest from the reports, client by client",
}


def write_sampled(run: Run, out_dir: str | os.PathLike[str], *, command: str | None = None) -> Path:
    """Write report.html, summary.json and clients.csv, whole or not at all; returns the path of the page."""
    checks = check_sampled(run)
    clients = _rows(run)
    page = render(
        "sampled.html.j2",
        trust=RAW_HERE,
        title=heading(run.name),
        story=_story(run),
        command=command,
        cards=_cards(run),
        charts=sampled_charts(run),
        checks=checks,
        broken=sum(not check.holds for check in checks),
        top=clients[:_TOP_CLIENTS],
        rest=clients[:_MAX_CLIENTS] if len(clients) > _TOP_CLIENTS else [],
        client_count=len(clients),
        left_out=max(0, len(clients) - _MAX_CLIENTS),
        settings=_settings(run),
    )
    files = {"summary.json": strict_json(summarize_sampled(run)), "clients.csv": _csv(run), "report.html": page}
    return write_files(out_dir, files) / "report.html"


def summarize_sampled(run: Run) -> dict[str, Any]:
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
        "trust": asdict(RAW_HERE),
    }


def check_sampled(run: Run) -> tuple[Check, ...]:
    """Every rule that a run can prove or disprove by itself, from its rounds and clients alone."""
    checks = [_paid_as_promised(run), _rational(run)]
    if run.scheme != "prior-independent":  # there each client has a schedule of her own
        checks.append(_monotone(run))
    if run.budget_micros is not None and run.scheme in ("complete", "prior-independent"):
        checks.append(_expected_budget(run, run.budget_micros))  # the others keep it over the distribution of costs
    if run.hard_cap_micros is not None:
        most = max(record.spent_micros for record in run.rounds)
        detail = f"The dearest round cost {format_micros(most)} of {format_micros(run.hard_cap_micros)}."
        checks.append(Check("hard_cap", "No round costs more than the cap", most <= run.hard_cap_micros, detail))
    return tuple(checks)


def _paid_as_promised(run: Run) -> Check:
    taken = Counter(client for record in run.rounds for client in record.participants.tolist())
    owed = sum(client.payment_micros * taken[client.client] for client in run.clients)
    each = all(
        (client.rounds, client.paid_micros) == (taken[client.client], client.payment_micros * taken[client.client])
        for client in run.clients
    )
    detail = f"Payments add up to {format_micros(owed)}, the rounds' bills to {format_micros(run.spent_micros)}."
    holds = each and owed == run.spent_micros
    return Check("paid_as_promised", "Whoever took part was paid her r, once for each time", holds, detail)


def _rational(run: Run) -> Check:
    below = sum(client.payment_micros < int(client.cost * MICROS) for client in run.clients)
    detail = f"{count(len(run.clients), 'client')} checked, {below:,} paid below cost."
    return Check("rational", "Nobody is paid less than her cost", not below, detail)


def _monotone(run: Run) -> Check:
    ranked = sorted(run.clients, key=lambda client: client.cost)
    rises = sum(after.participation > before.participation * (1 + 1e-9) for before, after in pairwise(ranked))
    detail = "Truthfulness needs this (SAMP Theorem 1); whether payments fit is for flmarket audit."
    return Check("monotone", "A higher cost never means a higher chance", not rises, detail)


def _expected_budget(run: Run, budget: int) -> Check:
    expected = sum(client.participation * client.payment_micros for client in run.clients)
    detail = f"Σ q·r = {format_micros(int(expected))} of {format_micros(budget)} for these clients; single rounds vary."
    # each payment was rounded to a micro-unit
    holds = expected <= budget * (1 + 1e-9) + len(run.clients)
    return Check("expected_budget", "The expected bill of a round is within the budget", holds, detail)


def _story(run: Run) -> str:
    mean = float(np.mean([record.participants.size for record in run.rounds]))
    return (
        f"{count(len(run.clients), 'client')} of {run.data_set} each have a private cost of taking part. The broker "
        f"{_KNOWS.get(run.scheme, 'posts terms')}. In every round each client takes part with her own probability and "
        f"is paid when she does; {significant(mean)} did on average. Updates are weighted by one over that "
        f"probability, so the model moves, on average, as if everybody had taken part."
    )


def _cards(run: Run) -> tuple[Card, ...]:
    last, places = run.rounds[-1], money_decimals([run.spent_micros])
    budget = run.budget_micros
    used = f"{percent(run.spent_micros / (budget * len(run.rounds)))} of the budget" if budget else "no budget given"
    q = np.array([client.participation for client in run.clients])
    paid = sum(client.paid_micros > 0 for client in run.clients)
    return (
        Card("Final loss", significant(last.loss), f"{significant(run.initial_loss)} before training"),
        Card(
            "Final accuracy", rate(last.accuracy), f"{rate(run.baseline_accuracy)} by always guessing the larger class"
        ),
        Card("Paid to clients", money(run.spent_micros, places), used),
        Card("Clients paid", f"{paid:,}", f"of {len(run.clients):,}"),
        Card("Average q", significant(float(q.mean())), "probability of taking part in a round"),
    )


def _rows(run: Run) -> list[dict[str, str]]:
    places = money_decimals(client.paid_micros for client in run.clients)
    ranked = sorted(run.clients, key=lambda client: (-client.paid_micros, client.client))
    return [
        {
            "client": str(client.client),
            "cost": significant(client.cost, 4),
            "q": significant(client.participation),
            "r": money(client.payment_micros),
            "rounds": f"{client.rounds:,}",
            "expected": significant(client.participation * len(run.rounds)),
            "paid": money(client.paid_micros, places),
            "exact": format_micros(client.paid_micros),
            "kept": significant(client.utility, 4),
        }
        for client in ranked
    ]


def _settings(run: Run) -> list[tuple[str, str]]:
    budget, cap = run.budget_micros, run.hard_cap_micros
    return [
        ("data set", run.data_set),
        ("scheme", run.scheme),
        ("rounds", f"{len(run.rounds):,}"),
        ("clients", f"{len(run.clients):,}"),
        ("budget", "none" if budget is None else f"{format_micros(budget)} per round, in expectation"),
        ("hard cap", "none" if cap is None else f"{format_micros(cap)} per round"),
        ("seed", str(run.seed)),
    ]


def _csv(run: Run) -> str:
    lines = ["client,cost,participation,payment_micros,rounds,paid_micros,utility"]
    lines += [
        f"{c.client},{c.cost:.9g},{c.participation:.9g},{c.payment_micros},{c.rounds},{c.paid_micros},{c.utility:.9g}"
        for c in run.clients
    ]
    return "\n".join(lines) + "\n"
