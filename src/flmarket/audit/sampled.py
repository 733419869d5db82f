"""Does a sampling scheme keep its promises? Misreports by every client of many draws, her pay, and the spending.

A client of cost c who reports c' takes part with probability q(c') and is paid r(c') each time: u = q(c')(r(c') − c) a
round. In every draw each client tries every report of a grid, and the other clients' costs, against the terms that she
in particular is shown, at every step of an online scheme. For those it is also checked that what she gets is what was
posted before she spoke: terms that follow the report would hide from the grid.

Spending is Σ q·r over the clients of a draw, a round's expected bill. A scheme that claims its budget exactly must keep
it in every draw; one that claims it in expectation over costs must not exceed it by more than four standard errors of
the mean over draws. As everywhere, finding nothing is evidence, not proof.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flmarket.audit.auditor import ClaimVerdict, Verdict
from flmarket.audit.trials import standard_error
from flmarket.bids import FloatArray, Guarantee, Guarantees
from flmarket.errors import InvalidInput
from flmarket.sampling import CompleteInformation, Empirical, Posted, PriorIndependent, TruncatedExponential, Uniform
from flmarket.sampling.prior_independent import SCHEMES, known_scheme

Distribution = Uniform | TruncatedExponential
Scheme = str | Callable[..., Any]

COST_POPULATIONS: dict[str, Distribution] = {
    "uniform-costs": Uniform(0.5, 10.0),
    "exponential-costs": TruncatedExponential(0.5, 10.0, 2.0),
}
BUDGET_FACTORS = (0.25, 0.5, 1.0, 2.0)  # of the mean cost, per client and round
REPORTS = {"quick": 100, "strong": 1_000}
_GAIN = 1e-9  # of a client's cost: rounding


@dataclass(frozen=True)
class Lie:
    """The most profitable misreport found: a client's true cost, what she says, and her utility a round."""

    cost: float
    reported: float
    honest_utility: float
    lying_utility: float
    budget_factor: float

    @property
    def gain(self) -> float:
        """What the lie brings a round; at most rounding if nothing was found."""
        return self.lying_utility - self.honest_utility


@dataclass(frozen=True)
class SpendingRow:
    """Spending at one budget: mean and standard error over draws of Σ q·r over the budget, and the worst draw.

    `objective` is the mean of 1/q, what sampling adds to the convergence bound; `first_best` that of a broker who is
    told the costs.
    """

    budget_factor: float
    draws: int
    mean_ratio: float
    standard_error: float
    worst_ratio: float
    objective: float
    first_best: float


@dataclass(frozen=True)
class SamplingAudit:
    """What was found about one scheme; all of it in `to_dict` for strict JSON."""

    scheme: str
    population: str
    clients: int
    draws: int
    reports_per_client: int
    search: str
    seed: int
    worst: Lie
    clients_with_gain: float
    largest_gain_over_cost: float
    followed_the_report: int
    paid_below_cost: int
    lowest_utility: float
    spending: tuple[SpendingRow, ...]
    source: str
    assumes: str
    curve: tuple[tuple[float, float], ...] = field(repr=False)
    claims: tuple[ClaimVerdict, ...] = ()

    @property
    def contradicted(self) -> tuple[ClaimVerdict, ...]:
        """Claims that did not survive."""
        return tuple(claim for claim in self.claims if claim.verdict == "contradicted")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an infinite objective is None."""
        values = asdict(self) | {"contradicted": [claim.claim for claim in self.contradicted]}
        values["worst"]["gain"] = self.worst.gain
        for row in values["spending"]:
            row["objective"] = row["objective"] if math.isfinite(row["objective"]) else None
        return values


@dataclass(frozen=True)
class _Shown:
    """What one client was shown and got."""

    posted: Posted
    cost: float
    q: float
    r: float


class _Tally:
    """Running maxima over clients."""

    def __init__(self) -> None:
        self.worst: Lie | None = None
        self.worst_posted: Posted | None = None
        self.clients = self.gainers = self.below = self.followed = 0
        self.largest_gain_over_cost, self.lowest = 0.0, math.inf

    def look(self, shown: _Shown, reports: FloatArray, factor: float) -> None:
        q, r = shown.posted.offer(reports)
        utilities = q * (r - shown.cost)
        best = int(np.argmax(utilities))
        honest = shown.q * (shown.r - shown.cost)
        own_q, own_r = shown.posted.offer(np.array([shown.cost]))
        self.followed += not (np.isclose(own_q[0], shown.q, rtol=1e-9) and np.isclose(own_r[0], shown.r, rtol=1e-9))
        lie = Lie(shown.cost, float(reports[best]), honest, float(utilities[best]), factor)
        self.clients += 1
        self.gainers += lie.gain > _GAIN * shown.cost
        self.below += honest < -_GAIN * shown.cost
        self.lowest = min(self.lowest, honest)
        self.largest_gain_over_cost = max(self.largest_gain_over_cost, lie.gain / shown.cost)
        if self.worst is None or lie.gain > self.worst.gain:
            self.worst, self.worst_posted = lie, shown.posted


def audit_sampling(
    scheme: Scheme,
    population: str = "uniform-costs",
    draws: int = 500,
    *,
    clients: int = 50,
    search: str = "quick",
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> SamplingAudit:
    """Audit a scheme by name, or anybody's class.

    A class with a method `report` is online: it is made with (round's budget, highest cost, number of clients) and used
    as `PriorIndependent` is. Any other is called with (distribution, budget per client) and has `offer(cost)`.
    """
    if population not in COST_POPULATIONS:
        raise InvalidInput("population", population, f"one of {', '.join(COST_POPULATIONS)}")
    if search not in REPORTS:
        raise InvalidInput("search", search, f"one of {', '.join(REPORTS)}")
    if draws < 1 or clients < 2:
        raise InvalidInput("draws, clients", (draws, clients), "at least one draw of two clients")
    if isinstance(scheme, str) and scheme not in SCHEMES:
        raise InvalidInput("scheme", scheme, f"one of {', '.join(SCHEMES)}, or package.module:Class")
    made = PriorIndependent if scheme == "prior-independent" else scheme
    distribution, rng, tally = COST_POPULATIONS[population], np.random.default_rng(seed), _Tally()
    grid = np.linspace(distribution.minimum / 2, distribution.maximum, REPORTS[search])
    budgets = [factor * distribution.mean for factor in BUDGET_FACTORS]
    # the one schedule of a scheme that knows the distribution; None if it is online
    known: list[Posted | None] = [
        known_scheme(made, distribution, budget)
        if isinstance(made, str)
        else (None if hasattr(made, "report") else made(distribution, budget))
        for budget in budgets
    ]
    found: list[list[tuple[float, float, float]]] = [[] for _ in BUDGET_FACTORS]
    for draw in range(draws):
        at = draw % len(budgets)
        costs = distribution.sample(rng, clients)
        posted = known[at]
        shown = list(_shown(made, posted, costs, budgets[at], distribution.maximum))
        for one in shown:
            tally.look(one, np.concatenate([grid, costs]), BUDGET_FACTORS[at])
        found[at].append(_spending(shown, costs, budgets[at]))
        if progress is not None:
            progress((draw + 1) / draws, f"draw {draw + 1}")
    spending = tuple(_row(factor, each) for factor, each in zip(BUDGET_FACTORS, found, strict=True) if each)
    assert tally.worst is not None  # at least one draw was looked at; for the type checker
    assert tally.worst_posted is not None
    promising = known_scheme(made, distribution, 1.0) if isinstance(made, str) else made
    declared: Guarantees | None = getattr(promising, "guarantees", None)
    line = np.linspace(distribution.maximum / 100, distribution.maximum, 100)
    q, r = tally.worst_posted.offer(line)
    reports = grid.size + clients
    return SamplingAudit(
        scheme=scheme if isinstance(scheme, str) else getattr(scheme, "name", getattr(scheme, "__name__", "scheme")),
        population=population,
        clients=clients,
        draws=draws,
        reports_per_client=reports,
        search=search,
        seed=seed,
        worst=tally.worst,
        clients_with_gain=tally.gainers / tally.clients,
        largest_gain_over_cost=tally.largest_gain_over_cost,
        followed_the_report=tally.followed,
        paid_below_cost=tally.below,
        lowest_utility=tally.lowest,
        spending=spending,
        source="" if declared is None else declared.source,
        assumes="" if declared is None else declared.assumes,
        curve=tuple(zip(line.tolist(), (q * (r - tally.worst.cost)).tolist(), strict=True)),
        claims=tuple(_claims(declared, tally, tally.worst, reports, spending)),
    )


def _shown(made: Any, posted: Posted | None, costs: FloatArray, budget: float, c_max: float) -> Iterator[_Shown]:
    """Everybody is shown the same terms; online, each client what follows from those before her."""
    if posted is not None:
        for cost, q, r in zip(costs.tolist(), *(part.tolist() for part in posted.offer(costs)), strict=True):
            yield _Shown(posted, cost, q, r)
        return
    mechanism = made(budget * costs.size, c_max, costs.size)
    for cost in costs.tolist():
        yield _Shown(mechanism.offer(), cost, *mechanism.report(cost))


def _spending(shown: list[_Shown], costs: FloatArray, budget: float) -> tuple[float, float, float]:
    """Σ q·r over the round's budget, the mean of 1/q, and the same of a broker who is told these costs."""
    q, r = (np.array([getattr(one, name) for one in shown]) for name in "qr")
    best = CompleteInformation.from_distribution(Empirical(costs), budget).offer(costs)[0]
    objective = float(np.mean(1 / q)) if q.min() > 0 else math.inf
    return float(q @ r) / (budget * costs.size), objective, float(np.mean(1 / best))


def _row(factor: float, found: list[tuple[float, float, float]]) -> SpendingRow:
    ratio, objective, best = np.array(found).T
    mean, most = float(ratio.mean()), float(ratio.max())
    error = standard_error(ratio)
    return SpendingRow(factor, ratio.size, mean, error, most, float(objective.mean()), float(best.mean()))


def _claims(
    declared: Guarantees | None, tally: _Tally, lie: Lie, reports: int, spending: tuple[SpendingRow, ...]
) -> Iterator[ClaimVerdict]:
    truth = f"No lie paid off, in {reports:,} reports by each of {tally.clients:,} clients."
    if tally.gainers:
        truth = (
            f"{tally.gainers:,} of {tally.clients:,} clients gain by a lie: at cost {lie.cost:.4g} a report of "
            f"{lie.reported:.4g} brings {lie.lying_utility:.4g} instead of {lie.honest_utility:.4g} a round."
        )
    if tally.followed:
        truth += f" {tally.followed:,} clients did not get the terms that were posted before they spoke."
    pay = f"{tally.below:,} of {tally.clients:,} honest clients lose by taking part; least utility {tally.lowest:.3g}."
    mean, surest = max(row.mean_ratio for row in spending), max(row.worst_ratio for row in spending)
    money = f"A round's expected bill is {mean:.4f} of the budget on average, {surest:.4f} in the worst draw of costs."
    if declared is not None and declared.budget_feasible is Guarantee.EXACT:
        over = surest > 1 + 1e-9
    else:
        over = any(row.mean_ratio > 1 + 1e-9 + 4 * row.standard_error for row in spending)
    findings = (
        ("truthful", tally.gainers > 0 or tally.followed > 0, truth),
        ("rational", tally.below > 0, pay),
        ("budget_feasible", over, money),
    )
    for name, broken, evidence in findings:
        level = Guarantee.NONE if declared is None else Guarantee(getattr(declared, name))
        verdict: Verdict = "not claimed" if level is Guarantee.NONE else "contradicted" if broken else "holds"
        yield ClaimVerdict(name, str(level), verdict, evidence)
