"""What a privacy budget ρ costs a user of privacy value ν: linear, quadratic or exponential (STACK section III-A).

| name | c(ν, ρ) | ρ at which a total budget P leaves the user content |
| --- | --- | --- |
| linear | νρ | P − νP²/R |
| quadratic | νρ² | PR/(R + 2νP²) |
| exponential | e^{νρ} − 1 | P − ω(νP + log(ν²P²/R))/ν, ω Wright's omega |

The last column is the root of the first-order condition R(P − ρ)/P² = ∂c/∂ρ, zero where it would be negative: her best
reply, written against the total including herself. Divided by P it falls in P, which is what makes the equilibrium
unique (`flmarket.games.contest`); any convex family with c(ν, 0) = 0 would do.

The paper prints e^{νρ}, which charges 1 for an arbitrarily small ρ. With that entry fee the game may have no
equilibrium at all (docs/errata.md E17), so the cost here starts at 0.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from scipy.special import wrightomega

from flmarket.bids import FloatArray
from flmarket.registry import Registry

__all__ = ["CostFamily", "ExponentialCost", "LinearCost", "QuadraticCost", "families", "family"]


class CostFamily(Protocol):
    """A convex privacy cost with c(ν, 0) = 0."""

    @property
    def name(self) -> str:
        """The registered name."""

    def cost(self, value: FloatArray, rho: FloatArray) -> FloatArray:
        """c(ν, ρ)."""

    def reply(self, value: FloatArray, total: float, reward: float) -> FloatArray:
        """The ρ that is optimal when all users together offer `total`; 0 for those who stay out."""

    def break_even(self, value: FloatArray, reward: float) -> FloatArray:
        """The ρ that costs the whole reward: no user ever wants more."""


class LinearCost:
    """c = νρ: Algorithm 2's case."""

    name = "linear"

    def cost(self, value: FloatArray, rho: FloatArray) -> FloatArray:
        """c(ν, ρ)."""
        return value * rho

    def reply(self, value: FloatArray, total: float, reward: float) -> FloatArray:
        """The optimal ρ at this total."""
        return np.maximum(total - value * total**2 / reward, 0.0)

    def break_even(self, value: FloatArray, reward: float) -> FloatArray:
        """The ρ that costs the whole reward."""
        return reward / value


class QuadraticCost:
    """c = νρ²: the first bit of privacy is free, so everybody takes part."""

    name = "quadratic"

    def cost(self, value: FloatArray, rho: FloatArray) -> FloatArray:
        """c(ν, ρ)."""
        return value * rho**2

    def reply(self, value: FloatArray, total: float, reward: float) -> FloatArray:
        """The optimal ρ at this total."""
        return total * reward / (reward + 2.0 * value * total**2)

    def break_even(self, value: FloatArray, reward: float) -> FloatArray:
        """The ρ that costs the whole reward."""
        return np.sqrt(reward / value)


class ExponentialCost:
    """c = e^{νρ} − 1."""

    name = "exponential"

    def cost(self, value: FloatArray, rho: FloatArray) -> FloatArray:
        """c(ν, ρ)."""
        return np.expm1(value * rho)

    def reply(self, value: FloatArray, total: float, reward: float) -> FloatArray:
        """The optimal ρ at this total."""
        kept = wrightomega(value * total + np.log(value**2 * (total**2 / reward))) / value
        return np.asarray(np.maximum(total - kept, 0.0))

    def break_even(self, value: FloatArray, reward: float) -> FloatArray:
        """The ρ that costs the whole reward."""
        return np.asarray(np.log1p(reward) / value)


_registry: Registry[CostFamily] = Registry("cost")
family = _registry.get
families = _registry.names
for _factory in (LinearCost, QuadraticCost, ExponentialCost):
    _registry.register(_factory.name, _factory)
