"""Continuous distributions of a client's private cost: uniform and truncated exponential, and what others must offer.

Each knows its density (or probability mass), its distribution function and its inverse, how to draw, and its virtual
cost φ(c) = c + F(c)/f(c), ironed where that is not monotone (`flmarket.sampling.virtual`). Costs are positive and
bounded: the payments of SAMP Theorem 1 pay rents up to the highest possible cost, so an unbounded cost has no budget.

Both families here are regular; `flmarket.sampling.tabulated` has those that need not be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from flmarket.bids import FloatArray
from flmarket.privacy.events import checked_number
from flmarket.sampling.checks import checked_bounds

__all__ = ["Continuous", "CostDistribution", "TruncatedExponential", "Uniform"]


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

    def sample(
        self: CostDistribution, rng: np.random.Generator, size: int | tuple[int, ...] | None = None
    ) -> FloatArray:
        """Draw costs by inversion."""
        return self.ppf(rng.random(size))

    def virtual_cost(self: CostDistribution, cost: ArrayLike, *, ironed: bool = True) -> FloatArray:
        """φ(c) = c + F(c)/f(c); `ironed` repairs it where it falls, and changes nothing otherwise."""
        from flmarket.sampling.nodes import CostNodes, raw_virtual_cost

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
    def of_mean(cls, mean: float, minimum: float, maximum: float) -> TruncatedExponential:
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
