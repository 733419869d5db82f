"""The rules of the market, recomputed from what a run left behind.

Nothing here trusts the engine: each check starts from the rounds' own arrays and the owners' statements and would show
a broken rule. It sees one run only; whether a mechanism is truthful or an owner's noise is real is for `audit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flmarket.ledger import AwardState, format_micros
from flmarket.report.formatting import count, epsilon, money, percent
from flmarket.report.tally import LOST, Tally

if TYPE_CHECKING:
    from flmarket.market import MarketResult

__all__ = ["Check", "check_guarantees"]

# sums of floating-point privacy losses and weights may differ by rounding only
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Check:
    """One rule, whether it held in this run, and the numbers that show it."""

    key: str
    rule: str
    holds: bool
    detail: str


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
        if paid_for > owner.epsilon_total * (1 + _ROUNDING) + _ROUNDING:
            understated.append(owner.owner)
        if max(owner.epsilon_total, paid_for) > owner.epsilon_cap * (1 + _ROUNDING):
            over.append(owner)
    capped = [o for o in result.owners if np.isfinite(o.epsilon_cap)]
    nearest = max((o.epsilon_total / o.epsilon_cap for o in capped if o.epsilon_cap > 0), default=0.0)
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
        worst = max(over, key=lambda o: o.epsilon_total - o.epsilon_cap)
        problems.append(
            f"{count(len(over), 'owner')} above the cap, worst owner {worst.owner}: "
            f"total ε {epsilon(worst.epsilon_total)} over {epsilon(worst.epsilon_cap)}"
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
