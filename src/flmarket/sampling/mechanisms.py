"""Client sampling when the cost distribution is known: the optimum, two yardsticks, and what sampling costs.

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

A posted schedule: report a cost c, take part with probability q(c), be paid r(c) each time you do.

SAMP Theorem 1: if q is non-increasing and r(c) = c + (1/q(c)) ∫_c^{c_max} q(z) dz, no report serves a client better
than her true cost, and nobody loses by taking part. Both schedules here apply that formula to the q they post, exactly:
the steps sum, the lines integrate in closed form. Truthfulness is thus a property of the object, whatever made its q.

Reports below the lowest node get the lowest node's terms. Where q = 0 nothing is ever paid, and r is the cost itself.
What would break it: a cost above the highest node, which is refused; and clients who choose their reports after seeing
terms that depend on each other's.

What sampling costs in accuracy: the convergence bound of FedAvg with independent participation (SAMP Proposition 1).

With L-smooth, μ-strongly convex losses, E local steps, gradient norms G_n, gradient variances σ_n², equal weights 1/N
and the rate η_r = 2/(max(8L, μE) + μr), after R rounds

    E[F(w_R)] − F* ≤ (1/R) (Σ s_n/q_n + β),     s_n = 8LE G_n² / (μ²N²),
    β = (2L/(μ²E)) D + (12L²/(μ²E)) Γ + (L·max(8L, μE)/(2μE)) ‖w₀ − w*‖²,   D = Σ(σ_n/N)² + 8E² ΣG_n²/N.

The paper prints 4L²/(μE) in the last term, which is this one when 8L ≥ μE and too small otherwise (it follows Li et
al., ICLR 2020, Theorem 1, with γ = max(8L/μ, E)). What would break it: a model that is not strongly convex, for example
a deep network, or softmax regression without an ℓ₂ penalty. The bound is for comparing mechanisms, it is far from
tight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import APPROXIMATE, EXACT, NONE, FloatArray, Guarantees, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy.events import checked_number
from flmarket.sampling.distributions import (
    CostDistribution,
    Discrete,
    checked_masses,
    checked_reports,
    checked_support,
    discrete_spend,
    iron,
)


class Posted(Protocol):
    """Anything that answers a reported cost with terms."""

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """The participation probability and the payment per participation for each reported cost."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Terms over listed costs. Unpacks into its two functions: ``q, r = schedule``."""

    cost: FloatArray
    participation: FloatArray
    payment: FloatArray

    @classmethod
    def truthful(cls, cost: FloatArray, participation: FloatArray) -> Self:
        """With the payments of Theorem 1 (for discrete costs, equation 16)."""
        payment = cost.copy()
        rent = cls._cells(np.diff(cost), participation)[::-1].cumsum()[::-1]
        payment[:-1] += rent / np.where(participation > 0, participation, 1.0)[:-1]
        return cls(cost, participation, payment)

    @staticmethod
    def _cells(width: FloatArray, participation: FloatArray) -> FloatArray:
        """∫q over each cell between costs."""
        raise NotImplementedError

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost."""
        raise NotImplementedError

    def participation_at(self, cost: ArrayLike) -> FloatArray:
        """q(c): the probability of taking part."""
        return self.offer(cost)[0]

    def payment_at(self, cost: ArrayLike) -> FloatArray:
        """r(c): the payment each time the client takes part."""
        return self.offer(cost)[1]

    def __iter__(self) -> Iterator[object]:
        yield self.participation_at
        yield self.payment_at


@dataclass(frozen=True, eq=False)
class StepSchedule(Schedule):
    """A menu: a report gets the terms of the lowest listed cost that is not below it."""

    @classmethod
    def constant(cls, maximum: float, participation: float) -> "StepSchedule":
        """The same q for everybody, paid the highest cost."""
        return cls(np.array([maximum]), np.array([participation]), np.array([maximum]))

    @staticmethod
    def _cells(width: FloatArray, participation: FloatArray) -> FloatArray:
        return width * participation[1:]

    @property
    def largest_expected_payment(self) -> float:
        """q·r of the cheapest client: q(c)c + ∫_c q falls in c, so nobody is paid more in expectation."""
        return float(self.participation[0] * self.payment[0])

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost."""
        at = np.searchsorted(self.cost, checked_reports(cost, float(self.cost[-1])))
        return np.asarray(self.participation[at]), np.asarray(self.payment[at])


@dataclass(frozen=True, eq=False)
class LinearSchedule(Schedule):
    """q is linear between listed costs."""

    @staticmethod
    def _cells(width: FloatArray, participation: FloatArray) -> FloatArray:
        return np.asarray(width * (participation[1:] + participation[:-1]) / 2)

    def offer(self, cost: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """(q, r) for each reported cost."""
        c = np.maximum(checked_reports(cost, float(self.cost[-1])), self.cost[0])
        right = np.maximum(np.searchsorted(self.cost, c), 1)
        q = np.interp(c, self.cost, self.participation)
        q_right, c_right = self.participation[right], self.cost[right]
        rent_right = q_right * (self.payment[right] - c_right)
        rent = rent_right + (c_right - c) * (q + q_right) / 2
        return np.asarray(q), np.asarray(c + rent / np.where(q > 0, q, 1.0))


def utility(posted: Posted, cost: ArrayLike, reported: ArrayLike | None = None) -> FloatArray:
    """Expected utility per round of reporting `reported` (default: the truth) at these true costs; broadcasts.

    Is it truthful, is it rational? The utility of any report at any true cost, for anything that posts terms.

    A client of cost c who reports c' takes part with probability q(c') and is paid r(c') each time: u = q(c')(r(c') −
    c) per round. Incentive compatibility: c' = c is best. Individual rationality: u ≥ 0 then. (SAMP section 2.)
    """
    true_cost = np.asarray(cost, dtype=np.float64)
    q, r = posted.offer(true_cost if reported is None else reported)
    return np.asarray(q * (r - true_cost))


def misreport_gains(posted: Posted, cost: ArrayLike, reported: ArrayLike) -> FloatArray:
    """The most that any of the reports gains over the truth, one number per true cost (vectors in, vector out)."""
    true_cost = np.atleast_1d(np.asarray(cost, dtype=np.float64))
    q, r = posted.offer(np.atleast_1d(np.asarray(reported, dtype=np.float64)))
    best = np.max(q * (r - true_cost[:, None]), axis=1)
    return np.asarray(best - utility(posted, true_cost))


_CELLS = 2048  # in cost, and again in quantile
_GAUSS_POINTS, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(6)


@dataclass(frozen=True, eq=False)
class CostNodes:
    """Nodes with their mass, spend and (ironed) virtual cost; `linear` says how q runs between nodes.

    One table for every cost distribution: where the mechanism's q is decided, and what each decision weighs.

    A mechanism is a vector q over cost nodes. A discrete distribution has its support for nodes, and q between two of
    them is that of the higher one. A continuous one has a grid, fine in cost and in quantile, and q is linear between
    nodes. Either way two vectors say all that Theorem 2 needs:

        E[q(c)] = Σ mass·q,        E[q(c) r(c)] = Σ spend·q,

    the second under Theorem 1's payments for that very q. Both are exact for the interpolated q, not approximations:
    with W(c) = c·F(c), E[q r] = ∫q dW = q(c_max)W(c_max) − Σ_cells (change of q)·(mean of W over the cell), and the
    cell means are Gauss–Legendre sums. Interpolation therefore costs optimality (second order in the cell width), never
    truthfulness, rationality or the budget.

    The virtual cost at a node is the formula φ(c) = c + F(c)/f(c) if that is monotone, and else the ironed cell
    averages.
    """

    cost: FloatArray
    mass: FloatArray
    spend: FloatArray
    virtual: FloatArray
    linear: bool
    regular: bool

    @classmethod
    def discrete(cls, support: ArrayLike, probabilities: ArrayLike) -> "CostNodes":
        """The support itself."""
        cost = checked_support(support)
        mass = checked_masses(probabilities, cost.size)
        spend = discrete_spend(cost, mass)
        virtual = iron(mass, spend)
        with np.errstate(divide="ignore", invalid="ignore"):
            regular = bool(np.array_equal(virtual, spend / mass))
        return cls(cost, mass, spend, virtual, linear=False, regular=regular)

    @classmethod
    def of(cls, distribution: Discrete | CostDistribution) -> "CostNodes":
        """The nodes of any distribution."""
        if isinstance(distribution, Discrete):
            return cls.discrete(distribution.support, distribution.probabilities)
        cost = _grid(distribution)
        half, middle = np.diff(cost)[:, None] / 2, (cost[1:, None] + cost[:-1, None]) / 2
        inside = middle + half * _GAUSS_POINTS
        below = distribution.cdf(inside)
        weights = _GAUSS_WEIGHTS / 2
        mass = np.diff(below @ weights, prepend=0.0, append=1.0)
        spend = np.diff((inside * below) @ weights, prepend=0.0, append=cost[-1])
        mass = np.maximum(mass, 0.0)  # differences of nearly equal numbers
        virtual = raw_virtual_cost(distribution, cost)
        regular = bool((virtual[1:] >= virtual[:-1] * (1 - 1e-9)).all())
        if not regular:
            virtual = iron(mass, spend)
        return cls(cost, mass, spend, np.maximum.accumulate(virtual), linear=True, regular=regular)


def raw_virtual_cost(distribution: CostDistribution, cost: FloatArray) -> FloatArray:
    """c + F(c)/f(c) as it stands; ∞ where there is no density."""
    density = distribution.pdf(cost)
    rent = np.divide(distribution.cdf(cost), density, out=np.full(cost.shape, np.inf), where=density > 0)
    return np.asarray(cost + rent)


def _grid(distribution: CostDistribution) -> FloatArray:
    low, high = distribution.minimum, distribution.maximum
    even = np.linspace(low, high, _CELLS + 1)
    likely = np.clip(distribution.ppf(np.linspace(0.0, 1.0, _CELLS + 1)), low, high)
    # two nodes at a jump of the density, lest q be smeared over two cells there
    jumps = distribution.knots[1:-1]
    cost = np.unique(np.concatenate([even, likely, jumps, jumps + 1e-7 * (high - low)]))
    apart = np.diff(cost) > 1e-9 * (high - low)
    # the ends stay; of points closer than that, the last stays
    return np.asarray(np.append(np.append(low, cost[:-1][apart][1:]), high))


@dataclass(frozen=True, eq=False)
class Theorem2:
    """The optimal q over cost nodes: the printed case, how many nodes are served surely, and κ (∞ in case 3).

    SAMP Theorem 2: the participation that minimises E[1/q] within a budget, in closed form.

        min Σ f_k/q_k   s.t.   Σ f_k φ_k q_k ≤ B̄,   q non-increasing,   0 < q ≤ 1.

    With φ non-decreasing (ironed if need be) the optimality conditions read q = min(1, κ/√φ). The printed three cases
    are the three places where κ can lie; with A_m = Σ_{k≤m} f_k φ_k, S_m = Σ_{k>m} f_k √φ_k and H(m) = A_m +
    √φ_{m+1}·S_m:

    1. B̄ ≤ H(0): everybody below 1, κ = B̄/S_0;
    2. between: the m cheapest at 1, m the number of H's below B̄, κ = (B̄ − A_m)/S_m;
    3. B̄ ≥ Eφ: everybody at 1, and money is left.

    The paper's continuous H(x) lacks the factor √φ(x) (docs/errata.md E4); this is the discrete one, also in the
    continuum, where sums run over cost nodes. The objective comes from the convergence bound (1/R)(Σ s_n/q_n + β) with
    s_n unknown to the server and bounded: the worst case scales the sum and does not move the optimum.
    """

    participation: FloatArray
    case: int
    certain: int
    level: float


def solve(virtual: FloatArray, spend: FloatArray, budget: float) -> Theorem2:
    """Optimal q for non-decreasing virtual costs; Σ spend·q is the expected payment. Nodes of φ = ∞ get q = 0."""
    total = float(spend.sum())
    if budget >= total:
        return Theorem2(np.ones(virtual.size), 3, virtual.size, np.inf)
    root = np.sqrt(virtual)
    tail = (spend / root)[::-1].cumsum()[::-1]  # S_m, m = 0 … K−1
    before = spend.cumsum() - spend  # A_m
    with np.errstate(invalid="ignore"):
        levels = before + root * tail  # H(m); not a number where φ = ∞, which compares as false
    certain = int(np.count_nonzero(levels < budget))
    if certain == virtual.size or not np.isfinite(root[certain]):  # the budget serves everyone who can be
        return Theorem2(np.isfinite(root).astype(np.float64), 3, certain, np.inf)
    level = (budget - before[certain]) / tail[certain]
    return Theorem2(np.minimum(1.0, level / root), 2 if certain else 1, certain, float(level))


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
        """For any cost distribution; a continuous one is solved on a fine grid (`flmarket.sampling.mechanisms`)."""
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


def convergence_bound(participation: ArrayLike, scale: ArrayLike, *, beta: float, rounds: int) -> float:
    """(1/R)(Σ s_n/q_n + β) for participation q_n and scales s_n (a number or one per client)."""
    q = checked_array("participation", participation)
    if q.max() > 1:
        raise InvalidInput("participation", float(q.max()), "probabilities")
    s = checked_array("scale", scale)
    checked_number("beta", beta, 0.0, 1e300)
    checked_number("rounds", rounds, 1, 1e12)
    if q.min() <= 0:
        return float("inf")
    return float((np.sum(s / q) + beta) / rounds)


@dataclass(frozen=True, eq=False, kw_only=True)
class FedAvgConstants:
    """The learning problem's constants; `gradient_norms` are the G_n."""

    smoothness: float
    strong_convexity: float
    local_steps: int
    gradient_norms: FloatArray
    gradient_deviations: FloatArray = field(default_factory=lambda: np.zeros(()))
    heterogeneity: float = 0.0
    initial_distance: float = 1.0

    def __post_init__(self) -> None:
        checked_number("strong_convexity", self.strong_convexity, 1e-12, 1e12)
        checked_number("smoothness", self.smoothness, self.strong_convexity, 1e12)
        checked_number("local_steps", self.local_steps, 1, 1e9)
        checked_number("heterogeneity", self.heterogeneity, 0.0, 1e12)
        checked_number("initial_distance", self.initial_distance, 0.0, 1e12)
        norms = np.atleast_1d(checked_array("gradient_norms", self.gradient_norms))
        deviations = checked_array("gradient_deviations", self.gradient_deviations)
        if deviations.shape not in ((), norms.shape):
            raise InvalidInput("gradient_deviations", deviations.shape, f"one number, or shape {norms.shape}")
        object.__setattr__(self, "gradient_norms", norms)
        object.__setattr__(self, "gradient_deviations", np.broadcast_to(deviations, norms.shape))

    @property
    def scale(self) -> FloatArray:
        """s_n, one per client."""
        factor = 8 * self.smoothness * self.local_steps / (self.strong_convexity * self.gradient_norms.size) ** 2
        return np.asarray(factor * self.gradient_norms**2)

    @property
    def beta(self) -> float:
        """The part of the bound that no sampling changes."""
        smooth, mu, steps, n = self.smoothness, self.strong_convexity, self.local_steps, self.gradient_norms.size
        noise = np.sum((self.gradient_deviations / n) ** 2) + 8 * steps**2 * np.mean(self.gradient_norms**2)
        start = smooth * max(8 * smooth, mu * steps) / (2 * mu * steps) * self.initial_distance**2
        return float(2 * smooth / (mu**2 * steps) * (noise + 6 * smooth * self.heterogeneity) + start)

    def learning_rate(self, round_index: int) -> float:
        """η_r of the bound, for r = 0, 1, ...; constant within a round."""
        smooth, mu = self.smoothness, self.strong_convexity
        return 2.0 / (max(8 * smooth, mu * self.local_steps) + mu * round_index)

    def bound(self, participation: ArrayLike, rounds: int) -> float:
        """The right-hand side of Proposition 1."""
        return convergence_bound(participation, self.scale, beta=self.beta, rounds=rounds)
