"""What auctions of single-minded owners share: each sells everything for one number, or nothing.

A rule sees rows of (cost, weight) and a budget per row, and says who wins and what each is paid. Rows are independent,
so they are cleared in chunks that keep every temporary in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flmarket.bids import BidProfile, Outcome, checked_budget

__all__ = ["Rule", "clear"]

FloatArray = NDArray[np.float64]
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
