"""What the report page shows, as plain rows of text: all arithmetic happens here, none in the template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flmarket.ledger import AwardState, format_micros
from flmarket.report.formatting import count, epsilon, money, money_decimals, percent, rate, significant

if TYPE_CHECKING:
    from flmarket.market import MarketResult, OwnerStatement, RoundRecord

__all__ = ["Card", "Table", "cards", "default_story", "example_round", "owner_rows", "settings"]

_MAX_EXAMPLE_ROWS = 16
_STATES = {
    AwardState.POSTED: "paid",
    AwardState.VOIDED: "voided",
    AwardState.EXPIRED: "expired",
    AwardState.PENDING: "open",
    None: "lost",
}


@dataclass(frozen=True)
class Card:
    """A headline figure; ε says in its label whether it is per round or total."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Table:
    """A table that one kind of market adds to the page; cells are text, the first of a row is its name."""

    key: str
    title: str
    lead: str
    columns: tuple[tuple[str, str], ...]  # heading, and the small print under it
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0

    @property
    def first(self) -> tuple[tuple[str, ...], ...]:
        """What is shown at once; the page folds the rest away."""
        return self.rows[:20]


def default_story(result: MarketResult, summary: dict[str, Any]) -> str:
    """The run in three sentences, for when nobody wrote a better story."""
    places = money_decimals([summary["budget_micros"]])
    paid, budget = money(summary["spent_micros"], places), money(summary["budget_micros"], places)
    auction = (
        f"In each of {count(summary['rounds'], 'round')}, up to {count(result.task.bidders_per_round, 'data owner')} "
        f"named a price for a privacy-protected model update on {result.data_set}, "
        f"and the auction {result.mechanism} chose whom to buy from."
    )
    learned = (
        f"The model reached an accuracy of {rate(summary['final_accuracy'])}, "
        f"where always guessing the larger class gives {rate(summary['baseline_accuracy'])}."
    )
    money_line = (
        f"It cost {paid} of a budget of {budget}, paid to {count(summary['owners_paid'], 'owner')}, "
        f"and no owner gave up more than ε = {epsilon(summary['epsilon_total_max'])} in total."
    )
    return " ".join((auction, learned, money_line))


def cards(result: MarketResult, summary: dict[str, Any]) -> tuple[Card, ...]:
    """Five figures a buyer and an owner ask for first."""
    places = money_decimals([summary["budget_micros"]])
    budget = money(summary["budget_micros"], places)
    bounds = [bound for bound in summary["error_bound"] if bound is not None]
    undelivered = summary["awards"]["voided"] + summary["awards"]["expired"]
    most = max(result.owners, key=lambda owner: owner.epsilon_total, default=None)
    cap = "no cap set" if most is None or not np.isfinite(most.epsilon_cap) else f"her cap: {epsilon(most.epsilon_cap)}"
    invalid = summary["invalid_rounds"]
    return (
        Card(
            "Final accuracy",
            rate(summary["final_accuracy"]),
            f"{rate(summary['baseline_accuracy'])} by always guessing the larger class",
        ),
        Card(
            "Paid to owners",
            money(summary["spent_micros"], places),
            f"{percent(summary['fraction_of_budget_used'])} of the budget of {budget}",
        ),
        Card(
            "Owners paid",
            f"{summary['owners_paid']:,}",
            f"of {summary['owners']:,}; {count(summary['awards']['posted'], 'update')} bought, "
            f"{undelivered:,} not delivered",
        ),
        Card(
            "Largest ε, total",
            epsilon(summary["epsilon_total_max"]),
            f"{cap}; at most {epsilon(summary['epsilon_per_round_max'])} per round",
        ),
        Card(
            "Error bound",
            significant(float(np.median(bounds))) if bounds else "∞",
            f"median of {count(len(bounds), 'round')}; {invalid:,} delivered nothing"
            if invalid
            else f"median of {count(len(bounds), 'round')}; all delivered",
        ),
    )


def example_round(result: MarketResult) -> dict[str, Any]:
    """The round whose spending is the median of the rounds that delivered, bidder by bidder."""
    ranked = sorted((record.spent_micros, place) for place, record in enumerate(result.rounds) if record.valid)
    place = ranked[(len(ranked) - 1) // 2][1] if ranked else 0
    record = result.rounds[place]
    places = money_decimals([int(record.price_micros.max(initial=0))])
    # winners first, the dearest at the top; losers after them in the order of the bids
    order = np.lexsort((np.arange(len(record.bidders)), -record.price_micros, -(record.epsilon > 0).astype(int)))
    rows = [_bidder(record, int(i), places) for i in order[:_MAX_EXAMPLE_ROWS]]
    won, delivered = int((record.epsilon > 0).sum()), int(record.delivered.sum())
    held = int(record.price_micros[record.epsilon > 0].sum())
    if not delivered:
        bound = "nobody delivered, so the model did not change"
    else:
        bound = f"the aggregate's error bound was {significant(record.error_bound)}"
    text = (
        f"{count(len(record.bidders), 'owner')} bid and {won:,} won. {money(held, places)} went into escrow; "
        f"{delivered:,} delivered and were paid {money(record.spent_micros, places)}. "
        f"Of the round's budget of {money(record.budget_micros, places)}, "
        f"{money(record.budget_micros - record.spent_micros, places)} stayed with the buyer, and {bound}."
    )
    return {
        "number": place + 1,
        "of": len(result.rounds),
        "text": text,
        "rows": rows,
        "left_out": len(record.bidders) - len(rows),
        "total": money(record.spent_micros, places),
        "median": bool(ranked),
    }


def _bidder(record: RoundRecord, i: int, places: int) -> dict[str, Any]:
    state, weight, price = record.state[i], float(record.weights[i]), int(record.price_micros[i])
    won = state is not None
    return {
        "owner": int(record.bidders[i]),
        "records": f"{record.data_size[i]:,.0f}",
        "epsilon": epsilon(float(record.epsilon[i])) if won else "–",
        "price": money(price, places) if won else "–",
        "exact": format_micros(price),
        "state": _STATES[state],
        "reason": record.reason[i],
        "weight": rate(weight) if weight else "–",
        "share": round(100 * min(1.0, weight), 2),
    }


def owner_rows(result: MarketResult) -> list[dict[str, Any]]:
    """Statements, the best paid first."""
    places = money_decimals(owner.paid_micros for owner in result.owners)
    ranked = sorted(result.owners, key=lambda owner: (-owner.paid_micros, owner.owner))
    return [_owner(owner, places) for owner in ranked]


def _owner(owner: OwnerStatement, places: int) -> dict[str, Any]:
    capped = bool(np.isfinite(owner.epsilon_cap))
    used = owner.epsilon_total / owner.epsilon_cap if capped and owner.epsilon_cap > 0 else 0.0
    return {
        "owner": owner.owner,
        "records": f"{owner.data_size:,}",
        "bids": f"{owner.bids:,}",
        "releases": f"{owner.releases:,}",
        "refusals": f"{owner.refusals:,}",
        "epsilon": epsilon(owner.epsilon_total),
        "cap": epsilon(owner.epsilon_cap) if capped else "no cap",
        "capped": capped,
        "used": round(100 * min(1.0, used), 2),
        "over": capped and owner.epsilon_total > owner.epsilon_cap * (1 + 1e-9),
        "paid": money(owner.paid_micros, places),
        "exact": format_micros(owner.paid_micros),
    }


def settings(result: MarketResult) -> list[tuple[str, str]]:
    """What determines the run, in the order a reader would type it."""
    task = result.task
    if task.budget_micros is not None:
        budget = f"{format_micros(task.budget_micros)} per round"
    else:
        budget = f"{task.budget_factor:g} × the bidders' full costs as drawn, per round"
    return [
        ("data set", result.data_set),
        ("auction", result.mechanism),
        ("aggregation", result.aggregation),
        ("perturbation", result.perturbation),
        ("rounds", f"{task.rounds:,}"),
        ("bidders", f"{task.bidders_per_round:,} per round"),
        ("budget", budget),
        ("learning rate", f"{task.learning_rate:g}"),
        ("seed", str(result.seed)),
    ]
