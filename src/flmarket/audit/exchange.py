"""The last step of the first-best solver: pass money between owners wherever that lowers the error bound."""

from __future__ import annotations

import numpy as np

from flmarket.aggregation import OptAggr, error_bound
from flmarket.bids import BidProfile, FloatArray, Kind

__all__ = ["affordable", "exchange"]

_SHARES = (1.0, 0.3, 0.08)
_MAX_PAIRS = 120
_NOTHING = 1e-9  # of ε̄: too little to buy


def affordable(bids: BidProfile, money: FloatArray) -> FloatArray:
    """The largest ε ≤ ε̄ whose cost is within each owner's money, by family in closed form."""
    kind, cap = bids.valuations.kind, bids.privacy_budget
    slope = bids.valuations.rate * bids.data_size
    units = np.divide(np.maximum(money, 0.0), slope, out=np.full(cap.shape, np.inf), where=slope > 0)
    out = np.where(units >= 1, cap, 0.0)  # STEP
    for code in np.unique(kind).tolist():
        here = kind == code
        k = units[here]
        if code == Kind.LINEAR:
            most = 0.5 * k
        elif code == Kind.QUADRATIC:
            most = np.sqrt(k)
        elif code == Kind.SQRT:
            most = np.square(0.5 * k)
        elif code == Kind.EXPONENTIAL:
            most = np.log1p(k)
        elif code == Kind.TABULATED:
            most = _by_bisection(bids, money)[here]
        else:
            continue
        out[here] = np.minimum(most, cap[here])
    return np.where(out > _NOTHING * cap, out, 0.0)


def _by_bisection(bids: BidProfile, money: FloatArray) -> FloatArray:
    low, high = np.zeros(bids.shape), bids.privacy_budget.copy()
    for _ in range(50):
        middle = 0.5 * (low + high)
        fits = bids.cost(middle) <= money
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.where(bids.full_cost <= money, bids.privacy_budget, low)


def exchange(
    bids: BidProfile, limit: FloatArray, epsilon: FloatArray, bound: FloatArray, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """One pass over pairs (all, or a random choice in long profiles); a move is kept where it helps."""
    n = bids.n
    pairs = [(i, j) for i in range(-1, n) for j in range(n) if i != j]  # -1 is the purse: money not yet spent
    if len(pairs) > _MAX_PAIRS:
        pairs = [pairs[i] for i in rng.choice(len(pairs), _MAX_PAIRS, replace=False)]
    solver, cost = OptAggr(), bids.cost(epsilon)
    for giver, taker in pairs:
        for share in _SHARES:
            purse = np.maximum(limit - cost.sum(axis=-1), 0.0)
            offer = share * (purse if giver < 0 else cost[:, giver])
            changed = [taker] if giver < 0 else [giver, taker]
            money = cost[:, changed]
            if giver >= 0:
                money[:, 0] -= offer
            # the purse goes along: a taker who needs a lump may need all there is
            money[:, -1] += offer + (purse if giver >= 0 else 0.0)
            part = bids[:, changed]
            moved, new_cost = epsilon.copy(), cost.copy()
            moved[:, changed] = affordable(part, money)
            new_cost[:, changed] = part.cost(moved[:, changed])
            value = error_bound(solver.weights(moved, bids.data_size), moved, bids.data_size)
            # an exact inverse may round to a cost one digit over the money
            better = (value < bound * (1 - 1e-12)) & (new_cost.sum(axis=-1) <= limit * (1 + 1e-12))
            epsilon, cost = np.where(better[:, None], moved, epsilon), np.where(better[:, None], new_cost, cost)
            bound = np.where(better, value, bound)
    return epsilon, bound
