"""What the report page shows, as plain rows of text: all arithmetic happens here, none in the template.

Among it the rules of the market, recomputed from what a run left behind (`check_guarantees`). Nothing there trusts the
engine: each check starts from the rounds' own arrays and the owners' statements and would show a broken rule. It sees
one run only; whether a mechanism is truthful or an owner's noise is real is for `audit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flmarket.ledger import AwardState, format_micros
from flmarket.report.charts import LOST, Tally
from flmarket.report.formatting import count, epsilon, finite_or_none, money, money_decimals, percent, rate, significant

if TYPE_CHECKING:
    from flmarket.market import MarketResult, OwnerStatement, RoundRecord

__all__ = [
    "Card",
    "Check",
    "Table",
    "cards",
    "check_guarantees",
    "default_story",
    "example_round",
    "owner_rows",
    "settings",
    "summarize",
]

# sums of floating-point privacy losses and weights may differ by rounding only
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Check:
    """One rule, whether it held in this run, and the numbers that show it."""

    key: str
    rule: str
    holds: bool
    detail: str


def symbol(result: MarketResult) -> str:
    """What privacy losses are counted in."""
    return "ρ" if result.currency == "rho" else "ε"


def check_guarantees(result: MarketResult) -> tuple[Check, ...]:
    """Every rule that a result can prove or disprove by itself."""
    tally = Tally.of(result)
    return (
        _within_budget(result, tally),
        _resolved_once(tally),
        _within_caps(result, tally),
        _conserved(result, tally),
        _losers_unpaid(tally),
        _weights_earned(result, tally),
    )


def _within_budget(result: MarketResult, tally: Tally) -> Check:
    budget = np.array([record.budget_micros for record in result.rounds], dtype=np.int64)
    # promises count too: a round whose awards all deliver must still fit its budget
    promised = tally.per_round(tally.price_micros, tally.awarded)
    over = np.flatnonzero(promised > budget)
    paid, total = money(result.spent_micros), money(result.budget_micros)
    detail = f"{paid} paid of {total}; every one of {count(tally.rounds, 'round')} stayed within its own budget."
    if over.size:
        first = int(over[0])
        excess = money(int(promised[first] - budget[first]))
        detail = f"{count(over.size, 'round')} promised more than the budget, first round {first + 1}, by {excess}."
    return Check("within_budget", "Payments never exceed the budget", not over.size, detail)


def _resolved_once(tally: Tally) -> Check:
    counts = {state: tally.states(state) for state in AwardState}
    keys, seen = np.unique(np.stack([tally.position, tally.owner]), axis=1, return_counts=True)
    repeated, orphaned = int((seen > 1).sum()), int(((tally.epsilon > 0) & (tally.state == LOST)).sum())
    resolved = ", ".join(f"{n:,} {_WORDS[state]}" for state, n in counts.items() if state is not AwardState.PENDING)
    detail = f"{count(int(tally.awarded.sum()), 'award')}: {resolved}; none left open, no owner twice in a round."
    problems = [
        f"{count(counts[AwardState.PENDING], 'award')} still open" if counts[AwardState.PENDING] else "",
        f"{count(orphaned, 'winning bid')} without an award" if orphaned else "",
        f"{count(repeated, 'owner')} listed twice in one of {keys.shape[1]:,} bids" if repeated else "",
    ]
    broken = "; ".join(filter(None, problems))
    return Check("resolved_once", "Every award is resolved exactly once", not broken, broken or detail)


def _within_caps(result: MarketResult, tally: Tally) -> Check:
    counted = _by_owner(tally.owner[tally.posted], tally.epsilon[tally.posted])
    over, understated = [], []
    for owner in result.owners:
        # the statement carries no δ, so losses compose by adding up: a smaller total would leave a paid release out
        paid_for = counted.get(owner.owner, 0.0)
        if paid_for > owner.loss_total * (1 + _ROUNDING) + _ROUNDING:
            understated.append(owner.owner)
        if max(owner.loss_total, paid_for) > owner.loss_cap * (1 + _ROUNDING):
            over.append(owner)
    capped = [o for o in result.owners if np.isfinite(o.loss_cap)]
    nearest = max((o.loss_total / o.loss_cap for o in capped if o.loss_cap > 0), default=0.0)
    detail = (
        "No owner set a cap."
        if not capped
        else (
            f"{count(len(capped), 'owner')} of {len(result.owners):,} set a cap on total ε; "
            f"the closest reached {percent(nearest)} of hers."
        )
    )
    problems = []
    if over:
        worst = max(over, key=lambda o: o.loss_total - o.loss_cap)
        problems.append(
            f"{count(len(over), 'owner')} above the cap, worst owner {worst.owner}: "
            f"total {symbol(result)} {epsilon(worst.loss_total)} over {epsilon(worst.loss_cap)}"
        )
    if understated:
        problems.append(f"the statement of owner {understated[0]} leaves out paid releases")
    return Check("within_caps", "Nobody exceeds her own privacy cap", not problems, "; ".join(problems) or detail)


def _conserved(result: MarketResult, tally: Tally) -> Check:
    owed = _by_owner(tally.owner[tally.posted], tally.price_micros[tally.posted])
    stated = {owner.owner: owner.paid_micros for owner in result.owners}
    wrong = sorted(owner for owner in owed.keys() | stated.keys() if int(owed.get(owner, 0)) != stated.get(owner, 0))
    paid = result.spent_micros
    back = int(tally.price_micros[tally.returned].sum())
    detail = (
        f"{format_micros(result.budget_micros)} in = {format_micros(paid)} to owners + {format_micros(back)} back from "
        f"escrow + {format_micros(result.budget_micros - paid - back)} never awarded; the statements agree."
    )
    if len(stated) != len(result.owners):
        detail = "An owner has two statements."
    elif wrong:
        first = wrong[0]
        got, due = money(stated.get(first, 0)), money(int(owed.get(first, 0)))
        detail = f"{count(len(wrong), 'statement')} disagree with the rounds, first owner {first}: {got}, not {due}."
    holds = not wrong and len(stated) == len(result.owners)
    return Check("conserved", "Money is neither made nor lost", holds, detail)


def _losers_unpaid(tally: Tally) -> Check:
    wrong = int(((tally.price_micros < 0) | ((tally.epsilon <= 0) & (tally.price_micros != 0))).sum())
    lost = int((~tally.awarded).sum())
    detail = f"{count(lost, 'losing bid')}: no privacy sold, nothing charged."
    if wrong:
        detail = f"{count(wrong, 'bid')} carry a price without a sale, or a negative one."
    return Check("losers_unpaid", "Who sells nothing is paid nothing", not wrong, detail)


def _weights_earned(result: MarketResult, tally: Tally) -> Check:
    unearned = int(((tally.weight != 0) & ~tally.posted).sum())
    sums = np.array([float(record.weights.sum()) for record in result.rounds if record.valid])
    uneven = int((np.abs(sums - 1) > 1e-6).sum())
    detail = f"In {count(len(sums), 'round')} with deliveries the weights add up to 1, all on delivered updates."
    if unearned or uneven:
        detail = (
            f"{count(unearned, 'update')} weighed without delivery; "
            f"{count(uneven, 'round')} whose weights do not add up to 1."
        )
    return Check("weights_earned", "Only delivered updates train the model", not (unearned or uneven), detail)


def _by_owner(owner: np.ndarray, values: np.ndarray) -> dict[int, float]:
    identifiers, place = np.unique(owner, return_inverse=True)
    totals = np.zeros(len(identifiers), dtype=values.dtype)
    np.add.at(totals, place, values)  # unlike bincount this keeps integers exact
    return dict(zip(identifiers.tolist(), totals.tolist(), strict=True))


_WORDS = {
    AwardState.PENDING: "open",
    AwardState.POSTED: "paid",
    AwardState.VOIDED: "voided",
    AwardState.EXPIRED: "expired",
}


_SCHEMA = 1  # raised when a key changes its meaning


def summarize(result: MarketResult) -> dict[str, Any]:
    """Plain Python values only; what is infinite or was not measured is None.

    A run in numbers, ready for strict JSON: what scripts and later comparisons read.
    """
    tally = Tally.of(result)
    accuracy = [finite_or_none(record.metrics.get("accuracy", np.nan)) for record in result.rounds]
    spent, budget = result.spent_micros, result.budget_micros
    total = float(max((owner.loss_total for owner in result.owners), default=0.0))
    most = float(tally.epsilon.max(initial=0.0)) if np.isfinite(total) else total  # whatever was sold by its number
    return {
        "schema": _SCHEMA,
        "task": result.task.name,
        "mechanism": result.mechanism,
        "aggregation": result.aggregation,
        "perturbation": result.perturbation,
        "data_set": result.data_set,
        "seed": int(result.seed),
        "rounds": tally.rounds,
        "accuracy": accuracy,
        "final_accuracy": accuracy[-1],
        "baseline_accuracy": finite_or_none(result.baseline_accuracy),
        "spent_micros": int(spent),
        "budget_micros": int(budget),
        "fraction_of_budget_used": spent / budget if budget else 0.0,
        # what was awarded, delivered or not: an update voided on arrival has left its owner all the same
        f"{result.currency}_per_round_max": finite_or_none(most),
        f"{result.currency}_total_max": finite_or_none(total),
        "owners": len(result.owners),
        "owners_paid": sum(owner.paid_micros > 0 for owner in result.owners),
        "refusals": int(sum(owner.refusals for owner in result.owners)),
        "awards": {
            "posted": tally.states(AwardState.POSTED),
            "voided": tally.states(AwardState.VOIDED),
            "expired": tally.states(AwardState.EXPIRED),
        },
        "invalid_rounds": sum(not record.valid for record in result.rounds),
        "error_bound": [finite_or_none(record.error_bound) for record in result.rounds],
        "guarantees": {check.key: check.holds for check in check_guarantees(result)},
    }


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
        f"and no owner gave up more than {symbol(result)} = "
        f"{epsilon(summary[f'{result.currency}_total_max'])} in total."
    )
    return " ".join((auction, learned, money_line))


def cards(result: MarketResult, summary: dict[str, Any]) -> tuple[Card, ...]:
    """Five figures a buyer and an owner ask for first."""
    places = money_decimals([summary["budget_micros"]])
    budget = money(summary["budget_micros"], places)
    bounds = [bound for bound in summary["error_bound"] if bound is not None]
    undelivered = summary["awards"]["voided"] + summary["awards"]["expired"]
    most = max(result.owners, key=lambda owner: owner.loss_total, default=None)
    cap = "no cap set" if most is None or not np.isfinite(most.loss_cap) else f"her cap: {epsilon(most.loss_cap)}"
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
            epsilon(summary[f"{result.currency}_total_max"]),
            f"{cap}; at most {epsilon(summary[f'{result.currency}_per_round_max'])} per round",
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
    order = np.lexsort((np.arange(len(record.bidders)), -record.price_micros, -(record.loss > 0).astype(int)))
    rows = [_bidder(record, int(i), places) for i in order[:_MAX_EXAMPLE_ROWS]]
    won, delivered = int((record.loss > 0).sum()), int(record.delivered.sum())
    held = int(record.price_micros[record.loss > 0].sum())
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
        "epsilon": epsilon(float(record.loss[i])) if won else "–",
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
    capped = bool(np.isfinite(owner.loss_cap))
    used = owner.loss_total / owner.loss_cap if capped and owner.loss_cap > 0 else 0.0
    return {
        "owner": owner.owner,
        "records": f"{owner.data_size:,}",
        "bids": f"{owner.bids:,}",
        "releases": f"{owner.releases:,}",
        "refusals": f"{owner.refusals:,}",
        "epsilon": epsilon(owner.loss_total),
        "cap": epsilon(owner.loss_cap) if capped else "no cap",
        "capped": capped,
        "used": round(100 * min(1.0, used), 2),
        "over": capped and owner.loss_total > owner.loss_cap * (1 + 1e-9),
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
