"""Proportional share: buy the cheapest units at one price per unit. All-in, M1 and FairQuery are its settings.

Each owner is single-minded: she sells everything, v(ε̄, d) in all, or nothing. With weights w (what a unit is) and unit
values q_i = v_i/w_i in ascending order, an owner is taken if q_i ≤ B/(weight taken so far + w_i).

* `capped`: stop at the first owner who does not fit, and pay w_i · min(B/(weight taken), q of that owner). Truthful in
  v, rational, within budget.
* otherwise, as FL-Market prints All-in: pass over her, go on, and pay w_i · B/(weight taken). Rational and within
  budget; but a loser can underbid a winner, take her place, and still be paid more than her cost.

| name | unit (weight) | capped | source |
| --- | --- | --- | --- |
| all-in | privacy × records, d·ε̄ | no | FL-Market 2021 Alg. 4, 2022 Alg. 4 |
| all-in-capped | d·ε̄ | yes | the same with M1's rule |
| m1 | record, d | yes | Zhang et al. (JDP) Alg. 1 |
| fairquery | owner, 1 | yes | Ghosh and Roth 2011, Alg. 1 |

Ties go to the owner of the lower index. The assumption that breaks truthfulness: weights must not be private, since an
owner who may misstate d or ε̄ moves her own weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.auctions.single_minded import clear
from flmarket.bids import BidProfile, FloatArray, Guarantees, Outcome

__all__ = ["ProportionalShare", "take_prefix"]

Weight = Literal["privacy", "records", "owners"]


@dataclass(frozen=True)
class ProportionalShare:
    """One price per unit of `weight`, paid to the cheapest owners that the budget carries; see the module."""

    name: str
    weight: Weight
    capped: bool
    guarantees: Guarantees

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear one auction or a batch; deterministic."""
        return clear(self._clear_rows, bids, self._weights(bids), budget)

    def _clear_rows(
        self, cost: FloatArray, weight: FloatArray, budget: FloatArray
    ) -> tuple[NDArray[np.bool_], FloatArray]:
        # owners of no weight sort last, at an infinite unit value that no price reaches
        unit = np.divide(cost, weight, out=np.full(cost.shape, np.inf), where=weight > 0)
        order = np.argsort(unit, axis=-1, kind="stable")
        take = take_prefix if self.capped else _take_all_that_fit
        sorted_unit, sorted_weight = (np.take_along_axis(a, order, axis=-1) for a in (unit, weight))
        taken, price = take(sorted_unit, sorted_weight, budget)
        wins = np.empty(cost.shape, dtype=bool)
        np.put_along_axis(wins, order, taken, axis=-1)
        # weight · (cost / weight) may round below cost by one unit in the last place; a winner never loses by it
        return wins, np.where(wins, np.maximum(weight * price, cost), 0.0)

    def _weights(self, bids: BidProfile) -> FloatArray:
        sellable = bids.data_size * (bids.privacy_budget > 0)
        if self.weight == "records":
            return sellable
        if self.weight == "privacy":
            return bids.data_size * bids.privacy_budget
        return (sellable > 0).astype(np.float64)


def take_prefix(unit: FloatArray, weight: FloatArray, budget: FloatArray) -> tuple[NDArray[np.bool_], FloatArray]:
    """Winners up to the first who does not fit, and the price per unit, capped by her unit value."""
    rows, n = unit.shape
    total = np.cumsum(weight, axis=-1)
    share = np.divide(budget, total, out=np.zeros(total.shape), where=total > 0)
    count = (unit <= share).sum(axis=-1, keepdims=True)  # unit values grow and shares fall: a prefix
    first_loser = np.concatenate([unit, np.full((rows, 1), np.inf)], axis=-1)
    price = np.minimum(
        np.take_along_axis(share, np.maximum(count - 1, 0), axis=-1),
        np.take_along_axis(first_loser, count, axis=-1),
    )
    return np.arange(n) < count, price


def _take_all_that_fit(
    unit: FloatArray, weight: FloatArray, budget: FloatArray
) -> tuple[NDArray[np.bool_], FloatArray]:
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
