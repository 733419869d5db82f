"""One table for every cost distribution: where the mechanism's q is decided, and what each decision weighs.

A mechanism is a vector q over cost nodes. A discrete distribution has its support for nodes, and q between two of them
is that of the higher one. A continuous one has a grid, fine in cost and in quantile, and q is linear between nodes.
Either way two vectors say all that Theorem 2 needs:

    E[q(c)] = Σ mass·q,        E[q(c) r(c)] = Σ spend·q,

the second under Theorem 1's payments for that very q. Both are exact for the interpolated q, not approximations: with
W(c) = c·F(c), E[q r] = ∫q dW = q(c_max)W(c_max) − Σ_cells (change of q)·(mean of W over the cell), and the cell means
are Gauss–Legendre sums. Interpolation therefore costs optimality (second order in the cell width), never truthfulness,
rationality or the budget.

The virtual cost at a node is the formula φ(c) = c + F(c)/f(c) if that is monotone, and else the ironed cell averages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray
from flmarket.sampling.checks import checked_masses, checked_support
from flmarket.sampling.distributions import CostDistribution
from flmarket.sampling.tabulated import Discrete
from flmarket.sampling.virtual import discrete_spend, iron

__all__ = ["CostNodes", "raw_virtual_cost"]


_CELLS = 2048  # in cost, and again in quantile
_GAUSS_POINTS, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(6)


@dataclass(frozen=True, eq=False)
class CostNodes:
    """Nodes with their mass, spend and (ironed) virtual cost; `linear` says how q runs between nodes."""

    cost: FloatArray
    mass: FloatArray
    spend: FloatArray
    virtual: FloatArray
    linear: bool
    regular: bool

    @classmethod
    def discrete(cls, support: ArrayLike, probabilities: ArrayLike) -> CostNodes:
        """The support itself."""
        cost = checked_support(support)
        mass = checked_masses(probabilities, cost.size)
        spend = discrete_spend(cost, mass)
        virtual = iron(mass, spend)
        with np.errstate(divide="ignore", invalid="ignore"):
            regular = bool(np.array_equal(virtual, spend / mass))
        return cls(cost, mass, spend, virtual, linear=False, regular=regular)

    @classmethod
    def of(cls, distribution: Discrete | CostDistribution) -> CostNodes:
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
