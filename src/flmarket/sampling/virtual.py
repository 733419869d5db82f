"""Virtual costs: what a client of cost c costs the server, information rent included; ironed where not monotone.

Let clients of cost c₁ < … < c_K have mass f_k and cumulative mass F_k. Under truthful payments (Theorem 1) raising q_k
costs the server f_k φ_k = c_k f_k + (c_k − c_{k−1}) F_{k−1}: the client's own cost, and the rent of everybody cheaper.
The sums telescope, Σ_{i≤k} f_i φ_i = c_k F_k, so φ is the slope of the curve (F, c·F). In the continuum φ = c + F/f.

The optimal sampling of SAMP Theorem 2 takes φ to be non-decreasing ("regular", Assumption 5). Estimated distributions
rarely are. `iron` replaces φ by the slope of the lower convex hull of that curve (Myerson 1981, section 6), computed by
pooling adjacent violators: for every non-increasing q, E[φ q] ≥ E[φ̄ q], with equality where q is constant on the pooled
blocks, and a q that depends on φ̄ alone is. The optimum over monotone q is therefore Theorem 2 with φ̄ for φ.

What would break it: a mass of zero has an infinite virtual cost. Such a point is pooled with the next one that has
mass; behind the last of those it is never served (φ̄ = ∞).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import isotonic_regression

from flmarket.bids import FloatArray, IntArray

__all__ = ["discrete_spend", "iron", "pool"]


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
    """Ironed virtual costs, non-decreasing; ∞ behind the last point that has mass."""
    last, virtual, _ = pool(mass, spend)
    return np.asarray(np.append(virtual, np.inf)[np.searchsorted(last, np.arange(mass.size))])
