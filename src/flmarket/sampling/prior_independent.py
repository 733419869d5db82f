"""SAMP Algorithm 1: sampling when the cost distribution is unknown, learned from truthful reports one client at a time.

The first ρN clients get one q̂ and are paid c_max. Then, for each next client, the distribution of all costs reported so
far is solved (Theorem 2, ironed) for what is left of the budget, and she is offered that schedule. When the budget
cannot bear the worst case of one more client, all the rest get q = B_left/(c_max · clients left). Every client sees
terms that do not depend on her own report: each step is truthful and rational, exactly.

Three repairs to what is printed:

- *Worst case.* Line 8 asks whether the budget covers a client of cost c_max. But q(c)r(c) = q(c)c + ∫_c q falls in c:
  the *cheapest* client is paid most. As printed the budget is overrun; `worst_case="printed"` shows it.
- *Unseen costs.* Maximum likelihood gives costs above the highest report no mass, hence q = 0, and 1/q has no meaning
  for such a client. One imaginary report of c_max (`pseudo_count`) keeps q positive; its price vanishes as 1/√N.
- *Regularity.* Empirical distributions rarely satisfy Assumption 5; ironing takes its place.

Costs are counted on a grid of `resolution` equal steps up to c_max, rounded up to the next grid point, so a client
costs O(resolution) vectorised work and N clients O(N · resolution), never O(N²). The grid coarsens the menu, which
worsens the objective by the order of the step relative to the cost; truthfulness, rationality and the budget do not
depend on it. If costs are known to come from a finite set, pass it as `grid` and the solution is that of Algorithm 1
exactly.

What would break it: clients must arrive in an order that does not depend on their costs (shuffle them), and report
once. As N grows the objective approaches the prior-based optimum only if the explored fraction ρ goes to 0 with N.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import EXACT, FloatArray, Guarantees
from flmarket.errors import InvalidInput, MechanismViolation, UnknownName
from flmarket.privacy.events import checked_number
from flmarket.sampling.distributions import (
    Empirical,
    TruncatedExponential,
    Uniform,
    checked_cost,
    checked_reports,
    checked_support,
    discrete_spend,
    pool,
)
from flmarket.sampling.mechanisms import (
    CompleteInformation,
    OptimalSampling,
    StepSchedule,
    UniformSampling,
    checked_sampling_budget,
    solve,
)

Phase = Literal["estimating", "updating", "uniform", "finished"]


@dataclass(frozen=True, eq=False)
class SampledClients:
    """The terms that clients ended up with, in their order."""

    participation: FloatArray
    payment: FloatArray

    @property
    def expected_payment(self) -> float:
        """Σ q·r over clients: what one round costs in expectation."""
        return float(self.participation @ self.payment)

    @property
    def objective(self) -> float:
        """The mean of 1/q; ∞ if somebody is never served."""
        return float(np.mean(1.0 / self.participation)) if self.participation.min() > 0 else float("inf")


class PriorIndependent:
    """Ask `offer()` for the next client's schedule, then tell `report(cost)`. `budget`: one round's, all n clients."""

    name = "prior-independent"
    guarantees = Guarantees(
        EXACT,
        EXACT,
        EXACT,
        "SAMP Algorithm 1, line 8 repaired",
        "the budget bounds Σ q·r for whatever costs are reported",
    )

    def __init__(
        self,
        budget: float,
        c_max: float,
        n: int,
        fraction: float = 0.05,
        initial_participation: float | None = None,
        *,
        resolution: int = 512,
        grid: ArrayLike | None = None,
        pseudo_count: float = 1.0,
        worst_case: Literal["cheapest", "printed"] = "cheapest",
    ) -> None:
        self.budget = checked_sampling_budget("budget", budget)
        self.c_max = checked_cost("c_max", c_max)
        self.n = int(checked_number("n", n, 1, 1e9))
        self.explored = max(1, int(checked_number("fraction", fraction, 0.0, 1.0) * self.n))
        uniform = min(1.0, self.budget / (self.n * self.c_max))
        first = uniform if initial_participation is None else initial_participation
        checked_number("initial_participation", first, 1e-15, 1.0)
        if self.explored * first * self.c_max > self.budget * (1 + 1e-12):
            accepted = f"at most {self.budget / self.explored / self.c_max:g}, or the first clients outspend the budget"
            raise InvalidInput("initial_participation", first, accepted)
        if worst_case not in ("cheapest", "printed"):
            raise InvalidInput("worst_case", worst_case, "'cheapest' or 'printed'")
        self._worst_case = worst_case
        if grid is None:
            steps = int(checked_number("resolution", resolution, 2, 1e6))
            self._grid: FloatArray = self.c_max * np.arange(1, steps + 1) / steps
        else:
            self._grid = checked_support(grid)
            if self._grid[-1] != self.c_max:
                raise InvalidInput("grid", float(self._grid[-1]), f"costs that end at c_max, {self.c_max:g}")
        self._counts = np.zeros(self._grid.size)
        self._counts[-1] = checked_number("pseudo_count", pseudo_count, 0.0, 1e9)
        self._listed = np.flatnonzero(self._counts)
        # what is left of the round's budget; negative (beyond rounding) only with the printed worst case
        self.remaining_budget = self.budget
        self.served = 0  # clients that have reported
        self.phase: Phase = "estimating"
        self._schedule = StepSchedule.constant(self.c_max, float(first))

    def offer(self) -> StepSchedule:
        """The schedule for the next client, fixed before she reports: ``q, r = mechanism.offer()``."""
        if self.phase == "finished":
            raise MechanismViolation(f"all {self.n} clients have been served")
        return self._schedule

    def report(self, cost: float) -> tuple[float, float]:
        """Take the next client's cost; returns her (q, r) and prepares the next schedule."""
        schedule = self.offer()
        c = float(checked_reports(cost, self.c_max))
        at = int(np.searchsorted(schedule.cost, c))
        q, r = float(schedule.participation[at]), float(schedule.payment[at])
        bin_ = int(np.searchsorted(self._grid, c))
        if self._counts[bin_] == 0:
            self._listed = np.insert(self._listed, np.searchsorted(self._listed, bin_), bin_)
        self._counts[bin_] += 1.0
        self.served += 1
        self.remaining_budget -= q * r
        self._prepare()
        return q, r

    def run(self, costs: ArrayLike) -> SampledClients:
        """Serve these clients one after the other, in their order."""
        reports = checked_reports(costs, self.c_max)
        if reports.ndim != 1 or self.served + reports.size > self.n:
            raise InvalidInput("costs", reports.shape, f"a vector of at most {self.n - self.served} costs")
        terms = np.array([self.report(cost) for cost in reports.tolist()]).reshape(-1, 2)
        return SampledClients(terms[:, 0], terms[:, 1])

    def _prepare(self) -> None:
        left = self.n - self.served
        if left == 0:
            self.phase = "finished"
        elif self.phase != "uniform" and self.served >= self.explored:
            self.phase = "updating"
            schedule = self._solve(left)
            if schedule is None:
                self.phase = "uniform"
                q = min(1.0, max(0.0, self.remaining_budget) / (self.c_max * left))
                schedule = StepSchedule.constant(self.c_max, q)
            self._schedule = schedule

    def _solve(self, left: int) -> StepSchedule | None:
        """Theorem 2 on the reports so far, for an equal share of what is left; None if the worst case exceeds it."""
        if self.remaining_budget <= 0:
            return None
        # in numbers of clients instead of probabilities: virtual costs do not change, the budget scales
        cost, counts = self._grid[self._listed], self._counts[self._listed]
        last, virtual, spend = pool(counts, discrete_spend(cost, counts))
        optimum = solve(virtual, spend, self.remaining_budget / left * float(counts.sum()))
        menu, participation = cost[last], optimum.participation
        if menu[-1] < self.c_max:  # pseudo_count = 0: as printed, unseen high costs are never served
            menu, participation = np.append(menu, self.c_max), np.append(participation, 0.0)
        schedule = StepSchedule.truthful(menu, participation)
        worst = schedule.largest_expected_payment
        if self._worst_case == "printed":
            worst = float(schedule.participation[-1] * schedule.payment[-1])
        return schedule if worst <= self.remaining_budget else None


PriorBased = OptimalSampling | UniformSampling | CompleteInformation

_KNOWN: dict[str, type[PriorBased]] = {
    "optimal": OptimalSampling,
    "uniform": UniformSampling,
    "complete": CompleteInformation,
}
SCHEMES = (*_KNOWN, "prior-independent")


@lru_cache(maxsize=64)  # each report is looked at by itself, and the schedule is the same for all
def known_scheme(
    name: str, distribution: Uniform | TruncatedExponential | Empirical, budget_per_client: float
) -> PriorBased:
    """One of the schemes that post the same schedule to everybody."""
    if name not in _KNOWN:
        raise UnknownName("scheme", name, f"one of {', '.join(SCHEMES)}")
    return _KNOWN[name].from_distribution(distribution, budget_per_client)


def terms(
    name: str,
    costs: ArrayLike,
    distribution: Uniform | TruncatedExponential,
    budget_per_client: float,
    *,
    fraction: float = 0.05,
    rng: np.random.Generator | None = None,
) -> SampledClients:
    """Everybody's (q, r) if all report these costs; `budget_per_client` is for one round, in expectation.

    The sampling schemes by name, and the terms (q, r) that each gives to clients with known costs.

    One place for what a market file, the audit and the experiments call a scheme. "complete" is told the costs and
    spends its budget on exactly these; "optimal" and "uniform" know the distribution; "prior-independent" knows c_max
    and learns the rest from the reports, client by client, as they come or in an order that `rng` draws (SAMP Algorithm
    1, line 10). What would break the last: clients in an order that depends on their costs.
    """
    reports = np.atleast_1d(checked_reports(costs, distribution.maximum))
    if name == "prior-independent":
        order = np.arange(reports.size) if rng is None else rng.permutation(reports.size)
        budget, place = budget_per_client * reports.size, np.argsort(order)
        served = PriorIndependent(budget, distribution.maximum, reports.size, fraction).run(reports[order])
        return SampledClients(served.participation[place], served.payment[place])
    told = Empirical(reports) if name == "complete" else distribution
    return SampledClients(*known_scheme(name, told, budget_per_client).offer(reports))
