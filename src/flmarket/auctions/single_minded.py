"""What auctions of single-minded owners share: each sells everything for one number, or nothing.

A rule sees rows of (cost, weight) and a budget per row, and says who wins and what each is paid. Rows are independent,
so they are cleared in chunks that keep every temporary in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import BidProfile, FloatArray, IntArray, Outcome, checked_budget

__all__ = ["OthersOf", "Rule", "SortedRows", "clear", "last_true"]

Rule = Callable[[FloatArray, FloatArray, FloatArray], tuple[NDArray[np.bool_], FloatArray]]

_CHUNK_ENTRIES = 60_000


def clear(rule: Rule, bids: BidProfile, weight: FloatArray, budget: ArrayLike) -> Outcome:
    """Apply a rule (cost, weight, budget of shape (rows, 1)) → (wins, payment) to every profile of a batch."""
    n = bids.n
    limit = checked_budget(budget, bids.shape[:-1]).reshape(-1, 1)
    cost, weight = bids.full_cost.reshape(-1, n), weight.reshape(-1, n)
    wins, payment = np.empty(cost.shape, dtype=bool), np.empty(cost.shape)
    rows = max(1, _CHUNK_ENTRIES // n)
    for start in range(0, len(cost), rows):
        part = slice(start, start + rows)
        wins[part], payment[part] = rule(cost[part], weight[part], limit[part])
    wins, payment = wins.reshape(bids.shape), payment.reshape(bids.shape)
    return Outcome(np.where(wins, bids.privacy_budget, 0.0), payment)


def last_true(
    condition: Callable[[IntArray], NDArray[np.bool_]], like: IntArray, high: int, *, low: int = 0
) -> IntArray:
    """The largest k in low..high for which a condition holds that is true up to some k and false after, elementwise.

    `low` itself is taken to hold. One bisection serves all entries of `like`'s shape.
    """
    lower, upper = np.full_like(like, low), np.full_like(like, high)
    while (lower < upper).any():
        middle = (lower + upper + 1) // 2
        holds = condition(middle)
        lower, upper = np.where(holds, middle, lower), np.where(holds, upper, middle - 1)
    return lower


class SortedRows:
    """Owners of each row in ascending order of unit cost, with prefix sums over the first k of them, k = 0..n."""

    def __init__(self, unit: FloatArray, cost: FloatArray, size: FloatArray) -> None:
        rows, self.n = unit.shape
        zero = np.zeros((rows, 1))
        self.size, self.cost = size, cost
        self.unit = np.concatenate([zero, unit, np.full((rows, 1), np.inf)], axis=-1)  # of the k-th, k ≥ 1
        self.total_cost = np.concatenate([zero, np.cumsum(cost, axis=-1)], axis=-1)
        self.total_size = np.concatenate([zero, np.cumsum(size, axis=-1)], axis=-1)

    def without(self, row: IntArray, position: IntArray) -> OthersOf:
        """The same order seen by the owner at each (row, position): everybody but herself."""
        return OthersOf(self, row, position)


class OthersOf:
    """Prefix sums over the first k *other* owners, for many owners at once."""

    def __init__(self, rows: SortedRows, row: IntArray, position: IntArray) -> None:
        self._rows, self._row, self._position = rows, row, position
        self.own_cost, self.own_size = rows.cost[row, position], rows.size[row, position]

    def cost(self, k: IntArray) -> FloatArray:
        """What the first k others cost."""
        total, row = self._rows.total_cost, self._row
        return np.where(k <= self._position, total[row, k], total[row, k + 1] - self.own_cost)

    def size(self, k: IntArray) -> FloatArray:
        """How many records the first k others have."""
        total, row = self._rows.total_size, self._row
        return np.where(k <= self._position, total[row, k], total[row, k + 1] - self.own_size)

    def unit(self, k: IntArray) -> FloatArray:
        """The unit cost of the k-th other, k ≥ 1; ∞ past the last."""
        return np.asarray(self._rows.unit[self._row, np.where(k <= self._position, k, k + 1)])

    def last(self, condition: Callable[[IntArray], NDArray[np.bool_]], *, low: int = 0) -> IntArray:
        """`last_true` over the numbers of others."""
        return last_true(condition, self._position, self._rows.n - 1, low=low)
