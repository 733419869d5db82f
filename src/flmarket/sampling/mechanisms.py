"""Client sampling with private costs when the cost distribution is known: the optimum and its two yardsticks.

N clients have private costs per participation, drawn independently from one distribution. Each round every client takes
part independently with probability q(c) and is paid r(c) when she does; `budget_per_client` is B̄ = B/(RN), the expected
payment per client and round.

| class | q(c) | r(c) | truthful |
| --- | --- | --- | --- |
| `OptimalSampling` | SAMP Theorem 2 on ironed virtual costs | Theorem 1 | yes |
| `UniformSampling` | min(1, B̄/c_max) | c_max | yes |
| `CompleteInformation` | Theorem 2 with the cost itself for φ | c, costs being known | no: the first best |

Expected spending is B̄ unless everybody already takes part surely. What would break it: costs that are not drawn from
the given distribution break the budget of `OptimalSampling` (not its truthfulness); costs that depend on the round or
on other clients break Theorem 1's setting altogether.
"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import APPROXIMATE, EXACT, NONE, FloatArray, Guarantees
from flmarket.privacy.events import checked_number
from flmarket.sampling.checks import checked_reports
from flmarket.sampling.distributions import CostDistribution
from flmarket.sampling.nodes import CostNodes
from flmarket.sampling.schedules import LinearSchedule, Schedule, StepSchedule
from flmarket.sampling.tabulated import Discrete
from flmarket.sampling.theorem2 import solve

__all__ = ["CompleteInformation", "OptimalSampling", "UniformSampling", "checked_sampling_budget"]


_IN_EXPECTATION = "the budget holds in expectation over participation and over costs from the given distribution"


def checked_sampling_budget(name: str, budget: float) -> float:
    """A positive budget within the limits of the library."""
    return checked_number(name, budget, 1e-15, 1e15)


class _KnownDistribution:
    """A mechanism over cost nodes: arrays over `support`, and an offer for any cost up to its end."""

    name: ClassVar[str]
    guarantees: ClassVar[Guarantees]

    def __init__(self, support: ArrayLike, probabilities: ArrayLike, budget_per_client: float) -> None:
        self._build(CostNodes.discrete(support, probabilities), budget_per_client)

    @classmethod
    def from_distribution(cls, distribution: Discrete | CostDistribution, budget_per_client: float) -> Self:
        """For any cost distribution; a continuous one is solved on a fine grid (`flmarket.sampling.nodes`)."""
        mechanism = cls.__new__(cls)
        mechanism._build(CostNodes.of(distribution), budget_per_client)
        return mechanism

    def _build(self, nodes: CostNodes, budget_per_client: float) -> None:
        self.budget_per_client = checked_sampling_budget("budget_per_client", budget_per_client)
        self.support: FloatArray = nodes.cost
        self.probabilities: FloatArray = nodes.mass
        self.participation, self.payment, self.expected_payment = self._decide(nodes)
        for array in (self.participation, self.payment):
            array.flags.writeable = False

    def _decide(self, nodes: CostNodes) -> tuple[FloatArray, FloatArray, float]:
        """Participation and payment over the nodes, and the expected payment per client and round."""
        raise NotImplementedError

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost; a typed error above the highest cost."""
        raise NotImplementedError

    @property
    def objective(self) -> float:
        """E[1/q], what sampling adds to the convergence bound per unit of s; ∞ if a likely cost is never served."""
        served = self.probabilities > 0
        if (self.participation[served] <= 0).any():
            return float("inf")
        return float(np.sum(self.probabilities[served] / self.participation[served]))

    @property
    def average_participation(self) -> float:
        """E[q]."""
        return float(self.probabilities @ self.participation)


class OptimalSampling(_KnownDistribution):
    """SAMP Theorem 2 with the payments of Theorem 1."""

    name = "optimal-sampling"
    guarantees = Guarantees(EXACT, EXACT, APPROXIMATE, "SAMP Theorems 1 and 2", _IN_EXPECTATION)

    case: int
    """Which of Theorem 2's budgets this is: 1 (nobody sure), 2 (the cheapest sure), 3 (everybody sure)."""
    threshold: float
    """ĉ: clients up to this cost take part surely; 0 in case 1."""
    virtual_cost: FloatArray
    """Ironed virtual costs over the support."""
    schedule: Schedule

    def _decide(self, nodes: CostNodes) -> tuple[FloatArray, FloatArray, float]:
        optimum = solve(nodes.virtual, nodes.spend, self.budget_per_client)
        kind = LinearSchedule if nodes.linear else StepSchedule
        schedule = kind.truthful(nodes.cost, optimum.participation)
        self.schedule, self.case, self.virtual_cost = schedule, optimum.case, nodes.virtual
        self.threshold = float(nodes.cost[optimum.certain - 1]) if optimum.certain else 0.0
        return optimum.participation, schedule.payment, float(nodes.spend @ optimum.participation)

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost; a typed error above the highest cost."""
        return self.schedule.offer(cost)


class UniformSampling(_KnownDistribution):
    """The same probability for everybody; truthful because nothing depends on the report."""

    name = "uniform-sampling"
    guarantees = Guarantees(EXACT, EXACT, APPROXIMATE, "SAMP section 6", "the budget holds over participation")

    def _decide(self, nodes: CostNodes) -> tuple[FloatArray, FloatArray, float]:
        highest = float(nodes.cost[-1])
        q = min(1.0, self.budget_per_client / highest)
        return np.full(nodes.cost.size, q), np.full(nodes.cost.size, highest), q * highest

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost; a typed error above the highest cost."""
        c = checked_reports(cost, float(self.support[-1]))
        return np.full(c.shape, self.participation[0]), np.full(c.shape, self.payment[0])


class CompleteInformation(_KnownDistribution):
    """The first best: costs are known and paid as they are. Not a mechanism for private costs."""

    name = "complete-information"
    guarantees = Guarantees(NONE, EXACT, APPROXIMATE, "SAMP section 6", "costs are known; " + _IN_EXPECTATION)

    def _decide(self, nodes: CostNodes) -> tuple[FloatArray, FloatArray, float]:
        spend = nodes.mass * nodes.cost
        optimum = solve(nodes.cost, spend, self.budget_per_client)
        self._level = optimum.level
        return optimum.participation, nodes.cost.copy(), float(spend @ optimum.participation)

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each known cost; a typed error above the highest cost."""
        c = checked_reports(cost, float(self.support[-1]))
        return np.minimum(1.0, self._level / np.sqrt(c)), c.copy()
