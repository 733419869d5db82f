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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.auctions.single_minded import clear
from flmarket.bids import EXACT, NONE, BidProfile, Guarantees, Outcome

__all__ = ["GreedyKnapsack"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


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
    cost = np.where(size > 0, cost, np.inf)
    unit = np.divide(cost, size, out=np.full(cost.shape, np.inf), where=size > 0)
    order = np.argsort(unit, axis=-1, kind="stable")
    ordered = (np.take_along_axis(a, order, axis=-1) for a in (unit, cost, size))
    market = _SortedMarket(limit[:, 0], *ordered, index=order)
    row, position = market.winners()
    wins, payment = np.zeros(cost.shape, dtype=bool), np.zeros(cost.shape)
    owner = order[row, position]
    wins[row, owner] = True
    payment[row, owner] = market.critical_bids(row, position)
    return wins, payment


class _SortedMarket:
    """Owners of each row in ascending order of unit cost, with prefix sums that start at 0."""

    def __init__(
        self, limit: FloatArray, unit: FloatArray, cost: FloatArray, size: FloatArray, *, index: IntArray
    ) -> None:
        rows, self.n = unit.shape
        zero = np.zeros((rows, 1))
        self.limit, self.cost, self.size = limit, cost, size
        self.unit = np.concatenate([zero, unit, np.full((rows, 1), np.inf)], axis=-1)  # unit[k] of the k-th, k ≥ 1
        self.total_cost = np.concatenate([zero, np.cumsum(cost, axis=-1)], axis=-1)
        self.total_size = np.concatenate([zero, np.cumsum(size, axis=-1)], axis=-1)
        self.greedy_count = (self.total_cost[:, 1:] <= limit[:, None]).sum(axis=-1)
        affordable = np.where(cost <= limit[:, None], size, -1.0)
        self.largest_size = affordable.max(axis=-1)
        # among equally large owners the lowest index in the original order stands alone
        tied = np.where(affordable == self.largest_size[:, None], index, self.n)
        self.largest = tied.argmin(axis=-1)

    def winners(self) -> tuple[IntArray, IntArray]:
        """Rows and sorted positions of all winners."""
        rows = np.arange(self.limit.size)
        alone = self.total_size[rows, self.greedy_count] < self.largest_size
        wins = (np.arange(self.n) < self.greedy_count[:, None]) & ~alone[:, None]
        wins[rows[alone], self.largest[alone]] = True
        row, position = np.nonzero(wins)
        return row, position

    def critical_bids(self, row: IntArray, position: IntArray) -> FloatArray:
        """The highest bid with which each of these winners would still win, all else equal."""
        own_cost, own_size, limit = self.cost[row, position], self.size[row, position], self.limit[row]

        def ahead_cost(k: IntArray) -> FloatArray:  # cost of the first k others
            return np.where(k <= position, self.total_cost[row, k], self.total_cost[row, k + 1] - own_cost)

        def ahead_size(k: IntArray) -> FloatArray:
            return np.where(k <= position, self.total_size[row, k], self.total_size[row, k + 1] - own_size)

        def unit_of(k: IntArray) -> FloatArray:  # unit cost of the k-th other, k ≥ 1
            return self.unit[row, np.where(k <= position, k, k + 1)]

        def last_true(condition: Callable[[IntArray], NDArray[np.bool_]]) -> IntArray:
            """The largest k in 0..n-1 for which a condition holds that is true up to some k and false after."""
            low, high = np.zeros_like(position), np.full_like(position, self.n - 1)
            while (low < high).any():
                middle = (low + high + 1) // 2
                holds = condition(middle)
                low, high = np.where(holds, middle, low), np.where(holds, high, middle - 1)
            return low

        greedy_k = last_true(lambda k: own_size * unit_of(k) + ahead_cost(k) <= limit)
        by_greedy = np.minimum(own_size * unit_of(greedy_k + 1), limit - ahead_cost(greedy_k))

        is_largest = position == self.largest[row]
        target = self.largest_size[row]
        short = last_true(lambda k: own_size + ahead_size(np.maximum(k - 1, 0)) < target)  # others that do not suffice
        needed = np.where(own_size >= target, 0, short)
        ordinary = np.minimum(by_greedy, limit - ahead_cost(needed))

        fits = last_true(lambda k: ahead_cost(k) <= limit)
        behind = last_true(lambda k: ahead_size(np.maximum(k - 1, 0)) < target)  # may stand just before this other
        alone = np.where(ahead_size(fits) < target, limit, np.minimum(limit, own_size * unit_of(behind)))
        return np.maximum(np.where(is_largest, np.maximum(by_greedy, alone), ordinary), own_cost)
