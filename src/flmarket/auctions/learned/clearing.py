"""Clearing a menu: raise every price by one multiplier until the budget is spent, and cap it for each owner's sake.

Owner i is offered B·x·w_i·κ_i(ε) for a privacy loss ε, with a share w_i and a price curve κ_i ≤ 1 that the network
sets, and takes what she likes best. Her demand κ_i(x) never falls as the multiplier x grows, so the spending x·Σ_j
w_j κ_j(x) grows too, and there is a largest x at which the budget suffices. Each owner i gets her own,

    x_i = sup{ x : x·( Σ_j w_j κ_j(x) + c_i·w_i·(1 − κ_i(x)) ) ≤ 1 },      0 ≤ c_i ≤ 1:

the market is cleared as if she sold the share c_i of what she keeps back.

* **Within budget**, whatever the weights: the bracket is at least the true spending, so x_i ≤ x, the multiplier that
  clears the market; spending rises with x, hence Σ_i x_i w_i κ_i(x_i) ≤ x Σ_i w_i κ_i(x) ≤ 1.
* **Rational**: nothing at price 0 is on every menu.
* **Truthful** at c_i = 1 in valuation and ε̄ (up to the grid of sub-bids) if w and κ come from data sizes: then x_i
  does not depend on what she reports. At c_i < 1 she can gain by selling less, as anybody in a market can who is not
  small; the training's regret penalty decides how far c_i may fall.

κ_i(x) is a step function whose steps are the edges of the lower convex hull of her costs over κ. So x_i is found
exactly: sort all steps of all owners, and locate each owner's multiplier between two of them by bisection.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flmarket.auctions.single_minded import last_true
from flmarket.bids import FloatArray, IntArray

__all__ = ["clear_market", "demand_steps"]

_TINY = np.finfo(np.float64).tiny


def demand_steps(cost: FloatArray, price: FloatArray) -> tuple[FloatArray, IntArray]:
    """The multipliers at which an owner moves to a larger sub-bid, and that sub-bid; shapes (..., M).

    `cost` and `price` have shape (..., M+1), 0 at index 0. A step that is never taken has multiplier ∞.
    """
    items = cost.shape[-1] - 1
    index = np.arange(items + 1)
    at = np.zeros((*cost.shape[:-1], 1), dtype=np.int64)
    steps, targets = np.empty((*at.shape[:-1], items)), np.empty((*at.shape[:-1], items), dtype=np.int64)
    for step in range(items):
        more_price = price - np.take_along_axis(price, at, axis=-1)
        more_cost = cost - np.take_along_axis(cost, at, axis=-1)
        ahead = (index > at) & (more_price > 0)
        rate = np.divide(more_cost, more_price, out=np.full(cost.shape, np.inf), where=ahead)
        # of equally good edges the longest, so that an owner of no cost sells all at once
        best = items - rate[..., ::-1].argmin(axis=-1)[..., None]
        steps[..., step] = np.take_along_axis(rate, best, axis=-1)[..., 0]
        at = np.where(np.isfinite(steps[..., step : step + 1]), best, at)
        targets[..., step] = at[..., 0]
    return np.maximum.accumulate(steps, axis=-1), targets


def clear_market(
    share: FloatArray, price: FloatArray, cost: FloatArray, caution: FloatArray
) -> tuple[IntArray, FloatArray]:
    """(sub-bid, share of the budget paid) of every owner; arrays (rows, n) and (rows, n, M+1), cost over budget."""
    rows, n = share.shape
    with np.errstate(divide="ignore", over="ignore"):
        unit = cost / np.maximum(share, _TINY)[..., None]
    steps, targets = demand_steps(unit, np.where(share[..., None] > 0, price, 0.0))
    reached = np.take_along_axis(price, targets, axis=-1)
    demand = np.concatenate([np.zeros((rows, n, 1)), reached], axis=-1)  # κ after 0, 1, … of her steps
    rise = (share[..., None] * np.diff(demand, axis=-1)).reshape(rows, -1)

    flat = steps.reshape(rows, -1)
    order = np.argsort(flat, axis=-1, kind="stable")
    sorted_steps = np.take_along_axis(flat, order, axis=-1)
    count = flat.shape[-1]
    total = np.concatenate([np.zeros((rows, 1)), np.cumsum(np.take_along_axis(rise, order, axis=-1), axis=-1)], axis=-1)
    # steps at the same multiplier stand or fall together: positions are those of the last of equals
    last = np.broadcast_to(np.arange(count), flat.shape).copy()
    last[:, :-1][sorted_steps[:, :-1] == sorted_steps[:, 1:]] = count
    last = np.minimum.accumulate(last[:, ::-1], axis=-1)[:, ::-1]
    rank = np.empty_like(last)
    np.put_along_axis(rank, order, last, axis=-1)
    rank = rank.reshape(steps.shape)
    at_row = np.arange(rows)[:, None]

    def spending(k: IntArray) -> tuple[FloatArray, IntArray]:
        """Σ_j w_j κ_j + c_i w_i (1 − κ_i) after k steps, and how many of them are her own."""
        own = (rank < k[..., None]).sum(axis=-1)
        kept = 1.0 - np.take_along_axis(demand, own[..., None], axis=-1)[..., 0]
        return total[at_row, k] + caution * share * kept, own

    def whole(k: IntArray) -> IntArray:
        return np.where(k > 0, last[at_row, np.maximum(k - 1, 0)] + 1, 0)

    def affordable(k: IntArray) -> NDArray[np.bool_]:
        group = whole(k)
        multiplier = sorted_steps[at_row, np.maximum(group - 1, 0)]
        with np.errstate(invalid="ignore"):
            return np.asarray((group == 0) | (np.isfinite(multiplier) & (multiplier * spending(group)[0] <= 1.0)))

    k = whole(last_true(affordable, np.zeros((rows, n), dtype=np.int64), count))
    spent, own = spending(k)
    following = np.where(k < count, sorted_steps[at_row, np.minimum(k, count - 1)], np.inf)
    multiplier = np.minimum(following, 1.0 / np.maximum(spent, _TINY))
    item = np.where(own > 0, np.take_along_axis(targets, np.maximum(own - 1, 0)[..., None], axis=-1)[..., 0], 0)
    taken = np.take_along_axis(demand, own[..., None], axis=-1)[..., 0]
    paid = np.where(item > 0, np.where(np.isfinite(multiplier), multiplier, 0.0) * share * taken, 0.0)
    return item, paid
