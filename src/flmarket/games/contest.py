"""The users' game: R is shared in proportion to privacy budgets, and everybody minds her own cost.

*Linear costs*, STACK Algorithm 2, in O(n log n): with ν ascending, the k cheapest users take part, k the largest with
(k − 1)ν_k < ν_1 + … + ν_k (the slack falls in k, so this is a prefix), and with Σ their sum

    ρ_i = ((k − 1)R/Σ)·t_i,     payment R·t_i,     utility R·t_i²,     t_i = 1 − (k − 1)ν_i/Σ.

The printed condition has ≤ for <. It admits a user at equality, whose ρ is 0; she then counts as a participant with
infinite noise, and the server's utility collapses to λ/2 (docs/errata.md E16).

*Any other convex cost.* Given the total P, each user's best reply is known in closed form and her share of
P falls in P, from 1 at P = 0 to 0. So Σ shares = 1 has exactly one root, the unique equilibrium
(Szidarovszky & Okuguchi 1997). Best replies against the aggregate, with bisection on one number, converge always;
iterating best replies against each other need not when there are many users.

What would break it: one user alone has no best reply (any ρ > 0 earns all of R), so there must be two; and users who
collude, or who misstate ν if the server asks them for it.

What a privacy budget ρ costs a user of privacy value ν: linear, quadratic or exponential (STACK section III-A).

| name | c(ν, ρ) | ρ at which a total budget P leaves the user content |
| --- | --- | --- |
| linear | νρ | P − νP²/R |
| quadratic | νρ² | PR/(R + 2νP²) |
| exponential | e^{νρ} − 1 | P − ω(νP + log(ν²P²/R))/ν, ω Wright's omega |

The last column is the root of the first-order condition R(P − ρ)/P² = ∂c/∂ρ, zero where it would be negative: her best
reply, written against the total including herself. Divided by P it falls in P, which is what makes the equilibrium
unique; any convex family with c(ν, 0) = 0 would do.

The paper prints e^{νρ}, which charges 1 for an arbitrarily small ρ. With that entry fee the game may have no
equilibrium at all (docs/errata.md E17), so the cost here starts at 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import wrightomega

from flmarket.bids import FloatArray
from flmarket.registry import Registry


@dataclass(frozen=True)
class CostFamily:
    """A convex privacy cost with c(ν, 0) = 0."""

    name: str
    cost: Callable[[FloatArray, FloatArray], FloatArray]
    """c(ν, ρ)."""
    reply: Callable[[FloatArray, float, float], FloatArray]
    """The ρ that is optimal when all users together offer a total, at a reward; 0 for those who stay out."""
    break_even: Callable[[FloatArray, float], FloatArray]
    """The ρ that costs the whole reward: no user ever wants more."""


def _exponential_reply(value: FloatArray, total: float, reward: float) -> FloatArray:
    kept = wrightomega(value * total + np.log(value**2 * (total**2 / reward))) / value
    return np.asarray(np.maximum(total - kept, 0.0))


_FAMILIES = (
    CostFamily(
        "linear",  # Algorithm 2's case
        cost=lambda value, rho: value * rho,
        reply=lambda value, total, reward: np.maximum(total - value * total**2 / reward, 0.0),
        break_even=lambda value, reward: reward / value,
    ),
    CostFamily(
        "quadratic",  # the first bit of privacy is free, so everybody takes part
        cost=lambda value, rho: value * rho**2,
        reply=lambda value, total, reward: total * reward / (reward + 2.0 * value * total**2),
        break_even=lambda value, reward: np.sqrt(reward / value),
    ),
    CostFamily(
        "exponential",
        cost=lambda value, rho: np.expm1(value * rho),
        reply=_exponential_reply,
        break_even=lambda value, reward: np.asarray(np.log1p(reward) / value),
    ),
)
_registry: Registry[CostFamily] = Registry("cost")
family = _registry.get
families = _registry.names
for _family in _FAMILIES:
    _registry.register(_family.name, lambda made=_family: made)


def linear_shares(values: FloatArray) -> tuple[FloatArray, float]:
    """Algorithm 2 without the reward: each user's share t of R (0 for those who stay out), and the total ρ per R."""
    ascending = np.sort(values)
    sums = np.cumsum(ascending)
    others = np.arange(values.size)
    participants = int(np.count_nonzero(others * ascending < sums))
    total = sums[participants - 1]
    shares = np.maximum(1.0 - (participants - 1) * values / total, 0.0)
    shares[values > ascending[participants - 1]] = 0.0
    return shares, float((participants - 1) / total)


def equilibrium(family: CostFamily, values: FloatArray, reward: float) -> FloatArray:
    """ρ of every user at the unique Nash equilibrium; 0 for those who stay out."""
    if reward <= 0:
        return np.zeros(values.shape)
    if family.name == "linear":
        shares, per_reward = linear_shares(values)
        return shares * (per_reward * reward)
    # the replies' sum exceeds the total at low totals and falls short of it at high ones
    low = high = float(family.break_even(values.min(keepdims=True), reward)[0])

    def excess(log_total: float) -> float:
        total = float(np.exp(log_total))
        return float(np.sum(family.reply(values, total, reward)) / total - 1.0)

    while excess(np.log(low)) <= 0:
        low /= 4
    while excess(np.log(high)) >= 0:
        high *= 4
    total = float(np.exp(brentq(excess, np.log(low), np.log(high), xtol=1e-15, rtol=1e-15)))
    return family.reply(values, total, reward)
