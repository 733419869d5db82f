"""m2-bf: buy as many records as the budget carries in *payments*; truthful, rational, within budget, and near-optimal.

The budget-feasible counterpart of M2 (which keeps only the sum of costs within budget), after Chen, Gravin and Lu, "On
the approximability of budget feasible mechanisms" (SODA 2011), the deterministic mechanism for knapsack: it buys at
least 1/(2+√2) ≈ 0.29 of the records that an omniscient buyer could get. Among owners of cost ≤ B let i* have the most
records d*, and let F be the best *fractional* purchase from the others within B.

* If F ≤ (1+√2)·d*, buy from i* alone and pay B.
* Otherwise buy by proportional share (M1's rule) from all of them.

Both choices are monotone in every bid, so critical bids make it truthful. M1's price is the critical bid within the
second case; an owner other than i* must in addition keep F above the threshold T = (1+√2)·d*. Where her own bid z
alone decides that, the critical z follows in closed form: F(z) = max over x in [0, 1] of d·x + F₋(B − z·x), with F₋
the value of the others, reaches T exactly at z = max over x of (B − F₋⁻¹(T − d·x))/x. Between kinks of F₋⁻¹ that is
monotone in x, so the maximum lies at a kink or at x = 1; the values at the kinks rise, then fall, so one bisection
finds the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.auctions.proportional import take_prefix
from flmarket.auctions.single_minded import SortedRows, clear
from flmarket.bids import EXACT, BidProfile, FloatArray, Guarantees, IntArray, Outcome

__all__ = ["APPROXIMATION", "BudgetFeasibleKnapsack"]


APPROXIMATION = 2.0 + np.sqrt(2.0)
_GUARANTEES = Guarantees(
    truthful=EXACT,
    rational=EXACT,
    budget_feasible=EXACT,
    source="Chen, Gravin, Lu, SODA 2011 (deterministic knapsack): at least 1/(2+√2) of the most records one could buy",
    assumes="single-minded owners whose privacy budget and data size are not private",
)


@dataclass(frozen=True)
class BudgetFeasibleKnapsack:
    """M2's aim within the budget: (2+√2)-approximate."""

    name: str = "m2-bf"
    guarantees: Guarantees = _GUARANTEES

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; deterministic, ties to the lower index."""
        return clear(_clear_rows, bids, bids.data_size * (bids.privacy_budget > 0), budget)


def _clear_rows(cost: FloatArray, size: FloatArray, budget: FloatArray) -> tuple[NDArray[np.bool_], FloatArray]:
    rows, n = cost.shape
    row, limit = np.arange(rows), budget[:, 0]
    size = np.where(cost <= budget, size, 0.0)  # whoever costs more than all the money is out
    star = size.argmax(axis=-1)
    target = (APPROXIMATION - 1.0) * size[row, star]

    others = size.copy()
    others[row, star] = 0.0
    rest = _Fractional(cost, others, limit)
    alone = (rest.value() <= target) & (size[row, star] > 0)

    unit = np.divide(cost, size, out=np.full(cost.shape, np.inf), where=size > 0)
    order = np.argsort(unit, axis=-1, kind="stable")
    taken, price = take_prefix(np.take_along_axis(unit, order, -1), np.take_along_axis(size, order, -1), budget)
    wins = np.empty((rows, n), dtype=bool)
    np.put_along_axis(wins, order, taken, axis=-1)
    wins &= ~alone[:, None]
    payment = np.where(wins, size * price, 0.0)
    ordinary = wins.copy()
    ordinary[row, star] = False
    who, owner = np.nonzero(ordinary)
    payment[who, owner] = np.minimum(payment[who, owner], rest.critical_bids(who, owner, target[who]))

    wins[row[alone], star[alone]] = True
    payment[row[alone], star[alone]] = limit[alone]
    return wins, np.where(wins, np.maximum(payment, cost), 0.0)  # rounding never takes a winner below her cost


class _Fractional:
    """The best fractional purchase within a limit: owners in ascending unit cost, the last one in part."""

    def __init__(self, cost: FloatArray, size: FloatArray, limit: FloatArray) -> None:
        counts = size > 0
        unit = np.divide(cost, size, out=np.full(cost.shape, np.inf), where=counts)
        order = np.argsort(unit, axis=-1, kind="stable")
        self.position = np.empty_like(order)
        np.put_along_axis(self.position, order, np.arange(cost.shape[-1]), axis=-1)
        cost = np.where(counts, cost, 0.0)
        self.rows = SortedRows(*(np.take_along_axis(a, order, axis=-1) for a in (unit, cost, size)))
        self.limit = limit

    def value(self) -> FloatArray:
        """The most records, in fractions, that the limit buys."""
        rows, row = self.rows, np.arange(len(self.limit))
        whole = (rows.total_cost <= self.limit[:, None]).sum(axis=-1) - 1
        spare, unit = self.limit - rows.total_cost[row, whole], rows.unit[row, whole + 1]
        part = np.divide(spare, unit, out=np.zeros_like(spare), where=np.isfinite(unit) & (unit > 0))
        return np.asarray(rows.total_size[row, whole] + part)

    def critical_bids(self, row: IntArray, owner: IntArray, target: FloatArray) -> FloatArray:
        """The highest bid of each owner at which the purchase is still worth `target`; ∞ if it is without her."""
        others, limit = self.rows.without(row, self.position[row, owner]), self.limit[row]
        size = others.own_size

        def cost_of(records: FloatArray) -> FloatArray:  # F₋⁻¹: what so many records of the others cost
            k = others.last(lambda j: others.size(j) <= records)
            part = np.maximum(records - others.size(k), 0.0)
            rate = np.where(part > 0, others.unit(k + 1), 0.0)
            return np.where(records <= 0, 0.0, others.cost(k) + part * rate)

        def at_kink(k: IntArray) -> FloatArray:  # x = (target − others' records)/size
            gap = target - others.size(k)
            nothing = np.full(gap.shape, -np.inf)
            return np.asarray(np.divide((limit - others.cost(k)) * size, gap, out=nothing, where=gap > 0))

        def rising(k: IntArray) -> NDArray[np.bool_]:
            return at_kink(k) >= at_kink(np.maximum(k - 1, 0))

        first = 1 + others.last(lambda k: others.size(k) < target - size, low=-1)  # from here on x ≤ 1
        best = others.last(lambda k: (others.size(k) < target) & ((k <= first) | rising(k)))
        kink = np.where((best >= first) & (others.size(best) < target), at_kink(best), -np.inf)
        critical = np.maximum(limit - cost_of(target - size), kink)
        return np.where(cost_of(target) <= limit, np.inf, critical)
