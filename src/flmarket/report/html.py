"""The report of a run: one page that needs nothing else, for whoever paid, was paid, or wants to check.

What a run comes to: its numbers, and the rules of the market recomputed from what it left behind.

The page's words and digits are the template's. `check_guarantees` trusts nothing of the engine: each check starts from
the rounds' own arrays and the owners' statements and would show a broken rule. It sees one run only; whether a
mechanism is truthful or an owner's noise is real is for `audit`.
"""

import json
import math
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flmarket.errors import needed
from flmarket.files import Name, write_files
from flmarket.ledger import AwardState, format_micros
from flmarket.privacy import Uncapped, epsilon_of_rho
from flmarket.report.charts import LOST, Tally, market_charts, symbol
from flmarket.report.drawing import DARK, FONT_STACK, LIGHT, css_variables
from flmarket.report.formatting import count, epsilon, finite_or_none, money, money_decimals, percent, rate, significant
from flmarket.trust import OWNERS_HERE, TrustWords

if TYPE_CHECKING:
    from flmarket.market import MarketResult

# sums of floating-point privacy losses and weights may differ by rounding only
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Check:
    """One rule, whether it held in this run, and the numbers that show it."""

    key: str
    rule: str
    holds: bool
    detail: str


def check_guarantees(result: "MarketResult") -> tuple[Check, ...]:
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


def _within_budget(result: "MarketResult", tally: Tally) -> Check:
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


def _within_caps(result: "MarketResult", tally: Tally) -> Check:
    counted = _by_owner(tally.owner[tally.posted], tally.epsilon[tally.posted])
    if result.delta:  # releases compose to less than their sum, and to no less than the largest
        counted = {one: tally.epsilon[tally.posted & (tally.owner == one)].max() for one in counted}
    over, understated = [], []
    for owner in result.owners:
        # losses compose by adding up, where no δ says otherwise: a smaller total would leave a paid release out
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
            f"{count(len(capped), 'owner')} of {len(result.owners):,} set a cap on total {symbol(result)}; "
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


def _conserved(result: "MarketResult", tally: Tally) -> Check:
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


def _weights_earned(result: "MarketResult", tally: Tally) -> Check:
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


def summarize(result: "MarketResult") -> dict[str, Any]:
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
        "delta": result.delta,
        **_in_sums(result, total),
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


def _in_sums(result: "MarketResult", total: float) -> dict[str, Any]:
    """Of losses in sums, which are ρ, the ε at δ: the cap's, or the usual one of an account without a cap."""
    if result.trust == "local":
        return {}
    delta = result.delta or Uncapped().delta
    return {"epsilon_total_max": finite_or_none(float(epsilon_of_rho(total, delta=delta))), "delta": delta}


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


def example_round(result: "MarketResult") -> dict[str, Any]:
    """The round whose spending is the median of the rounds that delivered, and the order in which to list its bids."""
    ranked = sorted((record.spent_micros, place) for place, record in enumerate(result.rounds) if record.valid)
    place = ranked[(len(ranked) - 1) // 2][1] if ranked else 0
    record = result.rounds[place]
    # winners first, the dearest at the top; losers after them in the order of the bids
    order = np.lexsort((np.arange(len(record.bidders)), -record.price_micros, -(record.loss > 0).astype(int)))
    places = money_decimals([int(record.price_micros.max(initial=0))])
    return {"number": place + 1, "record": record, "order": order.tolist(), "places": places, "median": bool(ranked)}


def write_report(
    result: "MarketResult",
    out_dir: Name,
    *,
    story: str | None = None,
    command: str | None = None,
    tables: Sequence[Table] = (),
    trust: TrustWords = OWNERS_HERE,
) -> Path:
    """Write `report.html` and `summary.json`, whole or not at all; returns the path of the page.

    `tables` are what only this kind of market has to show, `trust` says where records and noise were.
    """
    summary = summarize(result)
    bounds = [bound for bound in summary["error_bound"] if bound is not None]
    most = max(result.owners, key=lambda owner: owner.loss_total, default=None)
    page = render(
        "report.html.j2",
        title=heading(result.task.name),
        story=story,
        command=command,
        result=result,
        summary=summary,
        symbol=symbol(result),
        places=money_decimals([result.budget_micros]),
        median_bound=float(np.median(bounds)) if bounds else np.inf,
        unbounded=len(result.rounds) - len(bounds),
        largest_cap=np.inf if most is None else most.loss_cap,
        charts=market_charts(result),
        example=example_round(result),
        owners=sorted(result.owners, key=lambda owner: (-owner.paid_micros, owner.owner)),
        owner_places=money_decimals(owner.paid_micros for owner in result.owners),
        tables=tables,
        checks=check_guarantees(result),
        trust=trust,
    )
    files = {"summary.json": strict_json(summary | said(trust)), "report.html": page}
    return write_files(out_dir, files) / "report.html"


def said(trust: TrustWords) -> dict[str, Any]:
    """What a summary says of trust: the model, whose data an ε is for, and the sentences."""
    return {"trust": trust.model, "unit": trust.protects, "words": asdict(trust)}


def heading(name: str) -> str:
    """A slug such as tumour-diagnosis as a heading; a name that is more than a slug is left as it is."""
    if not re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", name):
        return name
    spaced = re.sub("[-_]", " ", name)
    return spaced[0].upper() + spaced[1:]


def strict_json(value: Any) -> str:
    """JSON that every parser reads: an infinity or NaN that slipped through is an error here, not at the reader's."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def render(template: str, *, trust: TrustWords, **context: Any) -> str:
    """A page of ours, with its style inside; everything but our own SVG and style sheet is escaped.

    Every page says, under its story, where records and noise are and what is private (`trust`).
    """
    with needed("app", "jinja2"):
        import jinja2
    from flmarket import __version__

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flmarket.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for shown in (count, epsilon, format_micros, money, percent, rate, significant):
        environment.filters[shown.__name__] = shown
    environment.tests |= {"finite": math.isfinite, "picture": lambda name: str(name).endswith(".svg")}
    return environment.get_template(template).render(
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
        fonts=FONT_STACK,
        version=__version__,
        trust=trust,
        runtime=f"Python {platform.python_version()}, NumPy {np.__version__}",
        **context,
    )
