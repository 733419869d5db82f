"""The users' game: R is shared in proportion to privacy budgets, and everybody minds her own cost.

*Linear costs*, STACK Algorithm 2, in O(n log n): with ν ascending, the k cheapest users take part, k the largest with
(k − 1)ν_k < ν_1 + … + ν_k (the slack falls in k, so this is a prefix), and with Σ their sum

    ρ_i = ((k − 1)R/Σ)·t_i,     payment R·t_i,     utility R·t_i²,     t_i = 1 − (k − 1)ν_i/Σ.

The printed condition has ≤ for <. It admits a user at equality, whose ρ is 0; she then counts as a participant with
infinite noise, and the server's utility collapses to λ/2 (docs/errata.md E16).

*Any other convex cost.* Given the total P, each user's best reply is known in closed form (`flmarket.games.costs`) and
her share of P falls in P, from 1 at P = 0 to 0. So Σ shares = 1 has exactly one root, the unique equilibrium
(Szidarovszky & Okuguchi 1997). Best replies against the aggregate, with bisection on one number, converge always;
iterating best replies against each other need not when there are many users.

What would break it: one user alone has no best reply (any ρ > 0 earns all of R), so there must be two; and users who
collude, or who misstate ν if the server asks them for it.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from flmarket.bids import FloatArray
from flmarket.games.costs import CostFamily

__all__ = ["equilibrium", "linear_shares"]


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
