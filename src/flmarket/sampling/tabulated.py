"""Distributions of a client's private cost given by tables: histogram, discrete, empirical.

None of them need be regular: a histogram's virtual cost drops where its density jumps up, a discrete one's wherever a
point has more mass than the points before it lead to expect. `virtual_cost` is ironed (`flmarket.sampling.virtual`).

A discrete virtual cost is defined on the support only; between two points the higher one's holds, because the
mechanisms serve a client of an unlisted cost as if she had the next listed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flmarket.bids import FloatArray, checked_array
from flmarket.errors import InvalidInput
from flmarket.sampling.checks import checked_masses, checked_reports, checked_support
from flmarket.sampling.distributions import Continuous
from flmarket.sampling.virtual import discrete_spend, iron

__all__ = ["Discrete", "Empirical", "Histogram"]


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

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...] | None = None) -> FloatArray:
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
