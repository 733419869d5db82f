"""SAMP Theorem 2: the participation that minimises E[1/q] within a budget, in closed form.

    min Σ f_k/q_k   s.t.   Σ f_k φ_k q_k ≤ B̄,   q non-increasing,   0 < q ≤ 1.

With φ non-decreasing (ironed if need be) the optimality conditions read q = min(1, κ/√φ). The printed three cases are
the three places where κ can lie; with A_m = Σ_{k≤m} f_k φ_k, S_m = Σ_{k>m} f_k √φ_k and H(m) = A_m + √φ_{m+1}·S_m:

1. B̄ ≤ H(0): everybody below 1, κ = B̄/S_0;
2. between: the m cheapest at 1, m the number of H's below B̄, κ = (B̄ − A_m)/S_m;
3. B̄ ≥ Eφ: everybody at 1, and money is left.

The paper's continuous H(x) lacks the factor √φ(x) (docs/errata.md E4); this is the discrete one, also in the continuum,
where sums run over cost nodes. The objective comes from the convergence bound (1/R)(Σ s_n/q_n + β) with s_n unknown to
the server and bounded: the worst case scales the sum and does not move the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flmarket.bids import FloatArray

__all__ = ["Theorem2", "solve"]


@dataclass(frozen=True, eq=False)
class Theorem2:
    """The optimal q over cost nodes: the printed case, how many nodes are served surely, and κ (∞ in case 3)."""

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
