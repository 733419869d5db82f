"""Distributions of a client's private cost: uniform, truncated exponential, histogram, discrete, empirical, your own.

Each knows its density (or probability mass), its distribution function and its inverse, how to draw, and its virtual
cost φ(c) = c + F(c)/f(c), ironed where that is not monotone (`iron`). Costs are positive and bounded: the payments of
SAMP Theorem 1 pay rents up to the highest possible cost, so an unbounded cost has no budget.

Uniform and truncated exponential costs are regular. Those given by tables need not be: a histogram's virtual cost drops
where its density jumps up, a discrete one's wherever a point has more mass than the points before it lead to expect.

A discrete virtual cost is defined on the support only; between two points the higher one's holds, because the
mechanisms serve a client of an unlisted cost as if she had the next listed one.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike
from scipy.optimize import brentq, isotonic_regression

from flmarket.bids import FloatArray, IntArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.privacy.events import checked_number

SMALLEST_COST, LARGEST_COST = 1e-12, 1e12


def checked_cost(name: str, value: float) -> float:
    """One positive cost within the limits of the library, or a typed error."""
    return checked_number(name, value, SMALLEST_COST, LARGEST_COST)


def checked_support(support: ArrayLike) -> FloatArray:
    """Strictly increasing positive costs, or a typed error."""
    array = checked_array("support", support, minimum=SMALLEST_COST)
    if array.ndim != 1 or (np.diff(array) <= 0).any() or array[-1] > LARGEST_COST:
        raise InvalidInput("support", support, f"a vector of strictly increasing costs up to {LARGEST_COST:g}")
    return array


def checked_masses(probabilities: ArrayLike, size: int) -> FloatArray:
    """Probabilities of `size` points that sum to 1, or a typed error. Rounding is divided out; below 1e-100 is none."""
    array = checked_array("probabilities", probabilities)
    if array.shape != (size,):
        raise InvalidInput("probabilities", array.shape, f"one probability for each of {size} costs")
    total = float(array.sum())
    if abs(total - 1.0) > 1e-6:
        raise InvalidInput("probabilities", total, "numbers that sum to 1")
    return np.where(array > 1e-100, array / total, 0.0)


def checked_bounds(minimum: float, maximum: float) -> None:
    """Refuse bounds that are not positive costs in ascending order."""
    checked_cost("minimum", minimum)
    checked_cost("maximum", maximum)
    if not minimum < maximum:
        raise InvalidInput("maximum", maximum, f"more than the minimum, {minimum:g}")


def checked_reports(cost: ArrayLike, maximum: float) -> FloatArray:
    """Reported costs as an array: positive, and no more than the highest cost the mechanism knows."""
    array = np.asarray(cost, dtype=np.float64)
    if not ((array > 0) & (array <= maximum)).all():
        outside = array[~((array > 0) & (array <= maximum))]
        raise InvalidInput("cost", float(outside.flat[0]), f"a positive cost of at most {maximum:g}")
    return array


def discrete_spend(cost: FloatArray, mass: FloatArray) -> FloatArray:
    """f_k φ_k at each support point: the expected payment is Σ spend·q. The mass need not sum to 1."""
    spend = mass * cost
    spend[1:] += (cost[1:] - cost[:-1]) * mass[:-1].cumsum()
    return spend


def pool(mass: FloatArray, spend: FloatArray) -> tuple[IntArray, FloatArray, FloatArray]:
    """The blocks of equal ironed virtual cost: index of each one's last point, its virtual cost, its spend.

    Points of no mass join the block of the next point that has some; those behind the last are in no block.
    """
    served = np.flatnonzero(mass)
    total = spend.cumsum()[served]
    virtual = (total - np.concatenate(([0.0], total[:-1]))) / mass[served] if served.size < mass.size else spend / mass
    if not (virtual[1:] > virtual[:-1]).all():
        pooled = isotonic_regression(virtual, weights=mass[served])
        last = pooled.blocks[1:] - 1
        served, total, virtual = served[last], total[last], pooled.x[last]
    spent = total.copy()
    spent[1:] -= total[:-1]
    return served, virtual, spent


def iron(mass: FloatArray, spend: FloatArray) -> FloatArray:
    """Ironed virtual costs, non-decreasing; ∞ behind the last point that has mass.

    Virtual costs: what a client of cost c costs the server, information rent included; ironed where not monotone.

    Let clients of cost c₁ < … < c_K have mass f_k and cumulative mass F_k. Under truthful payments (Theorem 1) raising
    q_k costs the server f_k φ_k = c_k f_k + (c_k − c_{k−1}) F_{k−1}: the client's own cost, and the rent of everybody
    cheaper. The sums telescope, Σ_{i≤k} f_i φ_i = c_k F_k, so φ is the slope of the curve (F, c·F). In the continuum φ
    = c + F/f.

    The optimal sampling of SAMP Theorem 2 takes φ to be non-decreasing ("regular", Assumption 5). Estimated
    distributions rarely are. `iron` replaces φ by the slope of the lower convex hull of that curve (Myerson 1981,
    section 6), computed by pooling adjacent violators: for every non-increasing q, E[φ q] ≥ E[φ̄ q], with equality
    where q is constant on the pooled blocks, and a q that depends on φ̄ alone is. The optimum over monotone q is
    therefore Theorem 2 with φ̄ for φ.

    What would break it: a mass of zero has an infinite virtual cost. Such a point is pooled with the next one that has
    mass; behind the last of those it is never served (φ̄ = ∞).
    """
    last, virtual, _ = pool(mass, spend)
    return np.asarray(np.append(virtual, np.inf)[np.searchsorted(last, np.arange(mass.size))])


class CostDistribution(Protocol):
    """What the mechanisms need to know about a continuous cost; bring your own if none here fits."""

    @property
    def minimum(self) -> float:
        """The lowest cost."""

    @property
    def maximum(self) -> float:
        """The highest cost."""

    @property
    def knots(self) -> FloatArray:
        """Costs at which the density jumps, both ends included."""

    def pdf(self, cost: ArrayLike) -> FloatArray:
        """The density; at a jump, the one to the right."""

    def cdf(self, cost: ArrayLike) -> FloatArray:
        """The probability of a cost of at most this."""

    def ppf(self, quantile: ArrayLike) -> FloatArray:
        """The inverse of `cdf`."""


class Continuous:
    """What follows from pdf, cdf and ppf."""

    @property
    def knots(self: CostDistribution) -> FloatArray:
        """Costs at which the density jumps: the ends only."""
        return np.array([self.minimum, self.maximum])

    def sample(self: CostDistribution, rng: Generator, size: int | tuple[int, ...] | None = None) -> FloatArray:
        """Draw costs by inversion."""
        return self.ppf(rng.random(size))

    def virtual_cost(self: CostDistribution, cost: ArrayLike, *, ironed: bool = True) -> FloatArray:
        """φ(c) = c + F(c)/f(c); `ironed` repairs it where it falls, and changes nothing otherwise."""
        from flmarket.sampling.mechanisms import CostNodes, raw_virtual_cost

        c = np.asarray(cost, dtype=np.float64)
        nodes = CostNodes.of(self) if ironed else None
        if nodes is None or nodes.regular:
            return raw_virtual_cost(self, c)
        return np.asarray(np.interp(c, nodes.cost, nodes.virtual))


@dataclass(frozen=True)
class Uniform(Continuous):
    """Every cost between two bounds is as likely; φ(c) = 2c − minimum."""

    minimum: float
    maximum: float

    def __post_init__(self) -> None:
        checked_bounds(self.minimum, self.maximum)

    @property
    def mean(self) -> float:
        """The expected cost."""
        return (self.minimum + self.maximum) / 2

    def pdf(self, cost: ArrayLike) -> FloatArray:
        """The density."""
        c = np.asarray(cost, dtype=np.float64)
        inside = (c >= self.minimum) & (c <= self.maximum)
        return np.where(inside, 1.0 / (self.maximum - self.minimum), 0.0)

    def cdf(self, cost: ArrayLike) -> FloatArray:
        """The distribution function."""
        c = np.asarray(cost, dtype=np.float64)
        return np.clip((c - self.minimum) / (self.maximum - self.minimum), 0.0, 1.0)

    def ppf(self, quantile: ArrayLike) -> FloatArray:
        """The inverse of `cdf`."""
        return self.minimum + np.asarray(quantile, dtype=np.float64) * (self.maximum - self.minimum)


@dataclass(frozen=True)
class TruncatedExponential(Continuous):
    """Density ∝ exp(−(c − minimum)/scale) up to the maximum; φ(c) = c + scale·(exp((c − minimum)/scale) − 1)."""

    minimum: float
    maximum: float
    scale: float

    def __post_init__(self) -> None:
        checked_bounds(self.minimum, self.maximum)
        width = self.maximum - self.minimum
        checked_number("scale", self.scale, width / 500, width * 1e6)

    @classmethod
    def of_mean(cls, mean: float, minimum: float, maximum: float) -> "TruncatedExponential":
        """The scale that gives this mean, which lies below the middle of the interval."""
        checked_bounds(minimum, maximum)
        width = maximum - minimum
        checked_number("mean", mean, minimum + width / 250, minimum + 0.4999 * width)
        log_scale = brentq(
            lambda s: cls(minimum, maximum, float(np.exp(s))).mean - mean, np.log(width / 499), np.log(width * 1e5)
        )
        return cls(minimum, maximum, float(np.exp(log_scale)))

    @property
    def mean(self) -> float:
        """The expected cost."""
        width = self.maximum - self.minimum
        return float(self.minimum + self.scale - width / np.expm1(width / self.scale))

    def pdf(self, cost: ArrayLike) -> FloatArray:
        """The density."""
        c = np.asarray(cost, dtype=np.float64)
        inside = (c >= self.minimum) & (c <= self.maximum)
        x = np.where(inside, c - self.minimum, 0.0) / self.scale
        return np.where(inside, np.exp(-x) / (self.scale * self._captured), 0.0)

    def cdf(self, cost: ArrayLike) -> FloatArray:
        """The distribution function."""
        c = np.clip(np.asarray(cost, dtype=np.float64), self.minimum, self.maximum)
        return np.asarray(-np.expm1(-(c - self.minimum) / self.scale) / self._captured)

    def ppf(self, quantile: ArrayLike) -> FloatArray:
        """The inverse of `cdf`."""
        u = np.asarray(quantile, dtype=np.float64)
        excess = -self.scale * np.log1p(-np.minimum(u * self._captured, 1.0 - 1e-16))
        return np.where(u >= 1.0, self.maximum, np.minimum(self.minimum + excess, self.maximum))

    @property
    def _captured(self) -> float:
        return float(-np.expm1(-(self.maximum - self.minimum) / self.scale))


@dataclass(frozen=True, eq=False)
class Histogram(Continuous):
    """A piecewise constant density: `probabilities[i]` between `edges[i]` and `edges[i + 1]`."""

    edges: FloatArray
    probabilities: FloatArray

    def __init__(self, edges: ArrayLike, probabilities: ArrayLike) -> None:
        points = checked_support(edges)
        if points.size < 2:
            raise InvalidInput("edges", edges, "at least two edges")
        object.__setattr__(self, "edges", points)
        object.__setattr__(self, "probabilities", checked_masses(probabilities, points.size - 1))

    @property
    def minimum(self) -> float:
        """The lowest cost."""
        return float(self.edges[0])

    @property
    def maximum(self) -> float:
        """The highest cost."""
        return float(self.edges[-1])

    @property
    def knots(self) -> FloatArray:
        """The edges."""
        return self.edges

    @property
    def mean(self) -> float:
        """The expected cost."""
        return float(self.probabilities @ (self.edges[1:] + self.edges[:-1]) / 2)

    def pdf(self, cost: ArrayLike) -> FloatArray:
        """The density; at an edge, that of the bin to the right."""
        c = np.asarray(cost, dtype=np.float64)
        bin_ = np.clip(np.searchsorted(self.edges, c, side="right") - 1, 0, self.probabilities.size - 1)
        inside = (c >= self.minimum) & (c <= self.maximum)
        return np.where(inside, (self.probabilities / np.diff(self.edges))[bin_], 0.0)

    def cdf(self, cost: ArrayLike) -> FloatArray:
        """The distribution function."""
        return np.asarray(np.interp(np.asarray(cost, dtype=np.float64), self.edges, self._cumulative))

    def ppf(self, quantile: ArrayLike) -> FloatArray:
        """The inverse of `cdf`."""
        return np.asarray(np.interp(np.asarray(quantile, dtype=np.float64), self._cumulative, self.edges))

    @property
    def _cumulative(self) -> FloatArray:
        cumulative = np.append(0.0, np.cumsum(self.probabilities))
        cumulative[-1] = 1.0
        return cumulative


@dataclass(frozen=True, eq=False)
class Discrete:
    """Finitely many possible costs, in ascending order, and their probabilities."""

    support: FloatArray
    probabilities: FloatArray

    def __init__(self, support: ArrayLike, probabilities: ArrayLike) -> None:
        points = checked_support(support)
        object.__setattr__(self, "support", points)
        object.__setattr__(self, "probabilities", checked_masses(probabilities, points.size))

    @property
    def minimum(self) -> float:
        """The lowest cost."""
        return float(self.support[0])

    @property
    def maximum(self) -> float:
        """The highest cost."""
        return float(self.support[-1])

    @property
    def mean(self) -> float:
        """The expected cost."""
        return float(self.support @ self.probabilities)

    def pdf(self, cost: ArrayLike) -> FloatArray:
        """The probability of exactly this cost."""
        c = np.asarray(cost, dtype=np.float64)
        at = np.minimum(np.searchsorted(self.support, c), self.support.size - 1)
        return np.where(self.support[at] == c, self.probabilities[at], 0.0)

    def cdf(self, cost: ArrayLike) -> FloatArray:
        """The probability of a cost of at most this."""
        return np.asarray(np.append(0.0, self._cumulative)[np.searchsorted(self.support, cost, side="right")])

    def ppf(self, quantile: ArrayLike) -> FloatArray:
        """The lowest cost whose cumulative probability reaches the quantile."""
        return np.asarray(self.support[np.searchsorted(self._cumulative, quantile)])

    def sample(self, rng: Generator, size: int | tuple[int, ...] | None = None) -> FloatArray:
        """Draw costs."""
        return self.ppf(rng.random(size))

    def virtual_cost(self, cost: ArrayLike, *, ironed: bool = True) -> FloatArray:
        """φ of the lowest listed cost that is not below; `ironed` repairs it where it falls."""
        c = checked_reports(cost, self.maximum)
        spend = discrete_spend(self.support, self.probabilities)
        if ironed:
            virtual = iron(self.probabilities, spend)
        else:
            virtual = np.divide(
                spend, self.probabilities, out=np.full(spend.shape, np.inf), where=self.probabilities > 0
            )
        return np.asarray(virtual[np.searchsorted(self.support, c)])

    @property
    def _cumulative(self) -> FloatArray:
        cumulative = np.cumsum(self.probabilities)
        cumulative[np.flatnonzero(self.probabilities)[-1] :] = 1.0
        return cumulative


class Empirical(Discrete):
    """The distribution of observed costs: the maximum-likelihood estimate, one point per distinct cost."""

    def __init__(self, samples: ArrayLike) -> None:
        observed = checked_array("samples", samples)
        support, counts = np.unique(observed, return_counts=True)
        super().__init__(support, counts / observed.size)
