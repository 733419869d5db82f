"""M2: buy as many records as the sum of *costs* allows, pay critical bids (Zhang et al., JDP, Alg. 2).

Greedy by d/c while Σc ≤ B, or the single affordable owner with the most records if she alone has more than the greedy
set. The rule is monotone in each cost, so paying the critical bid (the highest winning bid) makes it truthful.

Two departures from the printed algorithm, both needed for its claims (docs/errata.md, E7, E11): the payment is the
*supremum* of the winning bids, and the greedy set is compared with the largest affordable owner rather than with the
next one in line. It limits the sum of costs, not of payments: **it overspends the budget** (E8), as printed.

The critical bid in closed form. Fix an owner with d records and take the others in ascending order of unit cost
q = c/d, with prefix sums S_k of their costs and D_k of their records. At bid z she stands behind the k others with
q_k ≤ z/d, and is in the greedy set iff S_k + z ≤ B. Both conditions are monotone in k, so the largest k with
d·q_k + S_k ≤ B gives z₁ = min(d·q_{k+1}, B − S_k). She also needs the greedy set to beat the largest owner's d*: with
K the least number with d + D_K ≥ d*, that is z ≤ B − S_K. The largest owner herself wins by either road: in the greedy
set, or alone up to the bid at which the others ahead of her hold d* records. Each search is a bisection in the sorted
order, so the whole auction is O(n log n).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.auctions.single_minded import OthersOf, SortedRows, clear
from flmarket.bids import EXACT, NONE, BidProfile, FloatArray, Guarantees, Outcome

__all__ = ["GreedyKnapsack"]


_GUARANTEES = Guarantees(
    truthful=EXACT,
    rational=EXACT,
    budget_feasible=NONE,
    source="Zhang et al. (JDP) Alg. 2; Myerson 1981. The paper's budget balance fails: docs/errata.md E8",
    assumes="single-minded owners whose privacy budget and data size are not private",
)


@dataclass(frozen=True)
class GreedyKnapsack:
    """M2 as published: truthful and rational, but within budget only in costs."""

    name: str = "m2"
    guarantees: Guarantees = _GUARANTEES

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; deterministic, ties to the lower index."""
        return clear(_clear_rows, bids, bids.data_size * (bids.privacy_budget > 0), budget)


def _clear_rows(cost: FloatArray, size: FloatArray, limit: FloatArray) -> tuple[NDArray[np.bool_], FloatArray]:
    rows, n = cost.shape
    cost = np.where(size > 0, cost, np.inf)
    unit = np.divide(cost, size, out=np.full(cost.shape, np.inf), where=size > 0)
    order = np.argsort(unit, axis=-1, kind="stable")
    market = SortedRows(*(np.take_along_axis(a, order, axis=-1) for a in (unit, cost, size)))

    affordable = np.where(market.cost <= limit, market.size, -1.0)
    largest_size = affordable.max(axis=-1)
    # among equally large owners the lowest index in the original order stands alone
    largest = np.where(affordable == largest_size[:, None], order, n).argmin(axis=-1)
    greedy = (market.total_cost[:, 1:] <= limit).sum(axis=-1)
    alone = market.total_size[np.arange(rows), greedy] < largest_size
    taken = (np.arange(n) < greedy[:, None]) & ~alone[:, None]
    taken[alone, largest[alone]] = True

    row, position = np.nonzero(taken)
    bids = _critical_bids(market.without(row, position), limit[row, 0], largest_size[row], position == largest[row])
    wins, payment = np.zeros(cost.shape, dtype=bool), np.zeros(cost.shape)
    wins[row, order[row, position]] = True
    payment[row, order[row, position]] = bids
    return wins, payment


def _critical_bids(
    others: OthersOf, limit: FloatArray, target: FloatArray, is_largest: NDArray[np.bool_]
) -> FloatArray:
    """The highest bid with which each winner would still win, all else equal; `target` is the largest owner's size."""
    size = others.own_size
    behind = others.last(lambda k: size * others.unit(k) + others.cost(k) <= limit)
    by_greedy = np.minimum(size * others.unit(behind + 1), limit - others.cost(behind))

    needed = others.last(lambda k: size + others.size(np.maximum(k - 1, 0)) < target)  # others who make up for d*
    ordinary = np.minimum(by_greedy, limit - others.cost(np.where(size >= target, 0, needed)))

    fits = others.last(lambda k: others.cost(k) <= limit)
    before = others.last(lambda k: others.size(np.maximum(k - 1, 0)) < target)  # alone she must stand before this one
    alone = np.where(others.size(fits) < target, limit, np.minimum(limit, size * others.unit(before)))
    return np.maximum(np.where(is_largest, np.maximum(by_greedy, alone), ordinary), others.own_cost)
