"""What auctions of single-minded owners share: each sells everything for one number, or nothing.

A rule sees rows of (cost, weight) and a budget per row, and says who wins and what each is paid. Rows are independent,
so they are cleared in chunks that keep every temporary in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import EXACT, NONE, BidProfile, FloatArray, Guarantees, IntArray, Outcome, checked_budget, slices

_CHUNK_ENTRIES = 60_000
Decision = tuple[NDArray[np.bool_], FloatArray]  # who wins, and what each is paid


class SingleMinded:
    """A rule over rows of costs and weights, (rows, n), with a budget for each row, (rows, 1)."""

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; deterministic, ties to the lower index."""
        n = bids.n
        limit = checked_budget(budget, bids.shape[:-1]).reshape(-1, 1)
        cost, weight = bids.full_cost.reshape(-1, n), self._weights(bids).reshape(-1, n)
        wins, payment = np.empty(cost.shape, dtype=bool), np.empty(cost.shape)
        for part in slices(len(cost), _CHUNK_ENTRIES // n):
            wins[part], payment[part] = self._clear(cost[part], weight[part], limit[part])
        wins, payment = wins.reshape(bids.shape), payment.reshape(bids.shape)
        return Outcome(np.where(wins, bids.privacy_budget, 0.0), payment)

    def _weights(self, bids: BidProfile) -> FloatArray:
        """What is bought, by default records; 0 of who sells none."""
        return bids.data_size * (bids.privacy_budget > 0)

    def _clear(self, cost: FloatArray, weight: FloatArray, budget: FloatArray) -> Decision:
        raise NotImplementedError


def by_unit_cost(cost: FloatArray, weight: FloatArray) -> tuple[FloatArray, IntArray]:
    """Costs per unit of weight, and the ascending order of each row; who has no weight comes last, at ∞."""
    unit = np.divide(cost, weight, out=np.full(cost.shape, np.inf), where=weight > 0)
    return unit, np.argsort(unit, axis=-1, kind="stable")


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

    def __init__(self, cost: FloatArray, size: FloatArray) -> None:
        unit, self.order = by_unit_cost(cost, size)
        unit, cost, size = (np.take_along_axis(a, self.order, axis=-1) for a in (unit, cost, size))
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


Weight = Literal["privacy", "records", "owners"]


@dataclass(frozen=True)
class ProportionalShare(SingleMinded):
    """One price per unit of `weight`, paid to the cheapest owners that the budget carries.

    All-in, M1 and FairQuery are its settings.

    Each owner is single-minded: she sells everything, v(ε̄, d) in all, or nothing. With weights w (what a unit is) and
    unit values q_i = v_i/w_i in ascending order, an owner is taken if q_i ≤ B/(weight taken so far + w_i).

    * `capped`: stop at the first owner who does not fit, and pay w_i · min(B/(weight taken), q of that owner). Truthful
      in v, rational, within budget.
    * otherwise, as FL-Market prints All-in: pass over her, go on, and pay w_i · B/(weight taken). Rational and within
      budget; but a loser can underbid a winner, take her place, and still be paid more than her cost.

    | name | unit (weight) | capped | source |
    | --- | --- | --- | --- |
    | all-in | privacy × records, d·ε̄ | no | FL-Market 2021 Alg. 4, 2022 Alg. 4 |
    | all-in-capped | d·ε̄ | yes | the same with M1's rule |
    | m1 | record, d | yes | Zhang et al. (JDP) Alg. 1 |
    | fairquery | owner, 1 | yes | Ghosh and Roth 2011, Alg. 1 |

    Ties go to the owner of the lower index. The assumption that breaks truthfulness: weights must not be private, since
    an owner who may misstate d or ε̄ moves her own weight.
    """

    name: str
    weight: Weight
    capped: bool
    guarantees: Guarantees

    def _clear(self, cost: FloatArray, weight: FloatArray, budget: FloatArray) -> Decision:
        wins, price = _shared(take_prefix if self.capped else _take_all_that_fit, cost, weight, budget)
        # weight · (cost / weight) may round below cost by one unit in the last place; a winner never loses by it
        return wins, np.where(wins, np.maximum(weight * price, cost), 0.0)

    def _weights(self, bids: BidProfile) -> FloatArray:
        if self.weight == "privacy":
            return bids.data_size * bids.privacy_budget
        records = super()._weights(bids)
        return records if self.weight == "records" else (records > 0).astype(np.float64)


def _shared(
    take: Callable[[FloatArray, FloatArray, FloatArray], Decision],
    cost: FloatArray,
    weight: FloatArray,
    budget: FloatArray,
) -> Decision:
    """Who is taken in ascending order of unit cost, and the price per unit; it reaches nobody who has no weight."""
    unit, order = by_unit_cost(cost, weight)
    sorted_unit, sorted_weight = (np.take_along_axis(a, order, axis=-1) for a in (unit, weight))
    taken, price = take(sorted_unit, sorted_weight, budget)
    wins = np.empty(cost.shape, dtype=bool)
    np.put_along_axis(wins, order, taken, axis=-1)
    return wins, price


def take_prefix(unit: FloatArray, weight: FloatArray, budget: FloatArray) -> Decision:
    """Winners up to the first who does not fit, and the price per unit, capped by her unit value."""
    rows, n = unit.shape
    total = np.cumsum(weight, axis=-1)
    share = np.divide(budget, total, out=np.zeros(total.shape), where=total > 0)
    count = (unit <= share).sum(axis=-1, keepdims=True)  # unit values grow and shares fall: a prefix
    first_loser = np.concatenate([unit, np.full((rows, 1), np.inf)], axis=-1)
    price = np.minimum(
        np.take_along_axis(share, np.maximum(count - 1, 0), axis=-1), np.take_along_axis(first_loser, count, axis=-1)
    )
    return np.arange(n) < count, price


def _take_all_that_fit(unit: FloatArray, weight: FloatArray, budget: FloatArray) -> Decision:
    """Winners when misfits are passed over, and the price per unit that spends the whole budget."""
    rows, n = unit.shape
    if rows < n:  # few long auctions: one step an owner, in plain floats
        taken = np.array([_fits(*row) for row in zip(unit.tolist(), weight.tolist(), budget[:, 0], strict=True)])
    else:  # many short ones: one step an owner, for all auctions at once
        taken, total = np.empty((rows, n), dtype=bool), np.zeros(rows)
        for k in range(n):
            candidate = total + weight[:, k]
            share = np.divide(budget[:, 0], candidate, out=np.zeros(rows), where=candidate > 0)
            taken[:, k] = unit[:, k] <= share
            total = np.where(taken[:, k], candidate, total)
    total = np.where(taken, weight, 0.0).sum(axis=-1, keepdims=True)
    return taken, np.divide(budget, total, out=np.zeros((rows, 1)), where=total > 0)


def _fits(unit: list[float], weight: list[float], budget: float) -> list[bool]:
    taken, total = [], 0.0
    for value, extra in zip(unit, weight, strict=True):
        fits = extra > 0 and value <= budget / (total + extra)
        total += extra if fits else 0.0
        taken.append(fits)
    return taken


_ASSUMES = "single-minded owners whose privacy budget and data size are not private"
_M2_SOURCE = "Zhang et al. (JDP) Alg. 2; Myerson 1981. The paper's budget balance fails: docs/errata.md E8"
_M2 = Guarantees(EXACT, EXACT, NONE, _M2_SOURCE, _ASSUMES)


@dataclass(frozen=True)
class GreedyKnapsack(SingleMinded):
    """M2 as published: truthful and rational, but within budget only in costs.

    M2: buy as many records as the sum of *costs* allows, pay critical bids (Zhang et al., JDP, Alg. 2).

    Greedy by d/c while Σc ≤ B, or the single affordable owner with the most records if she alone has more than the
    greedy set. The rule is monotone in each cost, so paying the critical bid (the highest winning bid) makes it
    truthful.

    Two departures from the printed algorithm, both needed for its claims (docs/errata.md, E7, E11): the payment is the
    *supremum* of the winning bids, and the greedy set is compared with the largest affordable owner rather than with
    the next one in line. It limits the sum of costs, not of payments: **it overspends the budget** (E8), as printed.

    The critical bid in closed form. Fix an owner with d records and take the others in ascending order of unit cost q =
    c/d, with prefix sums S_k of their costs and D_k of their records. At bid z she stands behind the k others with q_k
    ≤ z/d, and is in the greedy set iff S_k + z ≤ B. Both conditions are monotone in k, so the largest k with d·q_k +
    S_k ≤ B gives z₁ = min(d·q_{k+1}, B − S_k). She also needs the greedy set to beat the largest owner's d*: with K the
    least number with d + D_K ≥ d*, that is z ≤ B − S_K. The largest owner herself wins by either road: in the greedy
    set, or alone up to the bid at which the others ahead of her hold d* records. Each search is a bisection in the
    sorted order, so the whole auction is O(n log n).
    """

    name: str = "m2"
    guarantees: Guarantees = _M2

    def _clear(self, cost: FloatArray, weight: FloatArray, budget: FloatArray) -> Decision:
        rows, n = cost.shape
        market = SortedRows(np.where(weight > 0, cost, np.inf), weight)

        affordable = np.where(market.cost <= budget, market.size, -1.0)
        largest_size = affordable.max(axis=-1)
        # among equally large owners the lowest index in the original order stands alone
        largest = np.where(affordable == largest_size[:, None], market.order, n).argmin(axis=-1)
        greedy = (market.total_cost[:, 1:] <= budget).sum(axis=-1)
        alone = market.total_size[np.arange(rows), greedy] < largest_size
        taken = (np.arange(n) < greedy[:, None]) & ~alone[:, None]
        taken[alone, largest[alone]] = True

        row, position = np.nonzero(taken)
        others, at = market.without(row, position), (row, market.order[row, position])
        wins, payment = np.zeros(cost.shape, dtype=bool), np.zeros(cost.shape)
        wins[at] = True
        payment[at] = _critical_bids(others, budget[row, 0], largest_size[row], position == largest[row])
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


APPROXIMATION = 2.0 + np.sqrt(2.0)
_CGL = "Chen, Gravin, Lu, SODA 2011 (deterministic knapsack): at least 1/(2+√2) of the most records one could buy"
_M2_BF = Guarantees(EXACT, EXACT, EXACT, _CGL, _ASSUMES)


@dataclass(frozen=True)
class BudgetFeasibleKnapsack(SingleMinded):
    """M2's aim within the budget: (2+√2)-approximate.

    m2-bf: buy as many records as the budget carries in *payments*; truthful, rational, within budget, and near-optimal.

    The budget-feasible counterpart of M2 (which keeps only the sum of costs within budget), after Chen, Gravin and Lu,
    "On the approximability of budget feasible mechanisms" (SODA 2011), the deterministic mechanism for knapsack: it
    buys at least 1/(2+√2) ≈ 0.29 of the records that an omniscient buyer could get. Among owners of cost ≤ B let i*
    have the most records d*, and let F be the best *fractional* purchase from the others within B.

    * If F ≤ (1+√2)·d*, buy from i* alone and pay B.
    * Otherwise buy by proportional share (M1's rule) from all of them.

    Both choices are monotone in every bid, so critical bids make it truthful. M1's price is the critical bid within the
    second case; an owner other than i* must in addition keep F above the threshold T = (1+√2)·d*. Where her own bid z
    alone decides that, the critical z follows in closed form: F(z) = max over x in [0, 1] of d·x + F₋(B − z·x), with F₋
    the value of the others, reaches T exactly at z = max over x of (B − F₋⁻¹(T − d·x))/x. Between kinks of F₋⁻¹ that is
    monotone in x, so the maximum lies at a kink or at x = 1; the values at the kinks rise, then fall, so one bisection
    finds the best.
    """

    name: str = "m2-bf"
    guarantees: Guarantees = _M2_BF

    def _clear(self, cost: FloatArray, weight: FloatArray, budget: FloatArray) -> Decision:
        row, limit = np.arange(len(cost)), budget[:, 0]
        size = np.where(cost <= budget, weight, 0.0)  # whoever costs more than all the money is out
        star = size.argmax(axis=-1)
        target = (APPROXIMATION - 1.0) * size[row, star]

        others = size.copy()
        others[row, star] = 0.0
        rest = _Fractional(cost, others, limit)
        alone = (rest.value() <= target) & (size[row, star] > 0)

        wins, price = _shared(take_prefix, cost, size, budget)
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
        self.rows, self.limit = SortedRows(np.where(size > 0, cost, 0.0), size), limit
        self.position = np.argsort(self.rows.order, axis=-1)

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
