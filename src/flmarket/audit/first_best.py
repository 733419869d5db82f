"""The first best: what a buyer who knew every cost, and paid exactly that, could buy with the budget.

    minimise ERR(ε) = min_λ ERR(λ; ε, d)   subject to   Σ_i d_i·v_i(ε_i) ≤ B,  0 ≤ ε ≤ ε̄.

No mechanism that must leave owners an information rent reaches it, so it is a yardstick and not a target. The problem
is not convex (costs may be concave, and an owner left out is a corner), so this is a local solver with many starts; the
bound it returns is attained by the ε it returns, and the true optimum may be a little lower. Three steps, all profiles
at once:

1. starts: the cheapest k owners by seven orders, k = 1..n, all at the same share of their ε̄ that the budget allows;
   and everybody who fits in full, in the same orders;
2. descent from the best few: with the optimal weights λ fixed, ERR falls by minimising Σ λ_i²σ(ε_i) at cost B, which
   separates into owners with one multiplier (by bisection); then λ is made optimal again (FL-Market's OptAggr). Neither
   half step can increase ERR;
3. exchange: move money from one owner to another, or from the purse to her, if that lowers ERR.

Uses the papers' noise, σ(ε) = 8L²/ε², L = 1, one coordinate. Where only a sum is seen (`trust`), noise of that energy
is common to all (`flmarket.aggregation.rules`); step 2 is then: buy from everybody just the ε that her weight needs,
and all of these larger by one factor, as the budget allows.
"""

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray
from scipy.special import lambertw

from flmarket.aggregation import OptAggr, SecureOpt, Trust, error_bound
from flmarket.audit.trials import flat
from flmarket.bids import BidProfile, FloatArray, IntArray, Kind, checked_budget

_SHARES = (1.0, 0.3, 0.08)
_MAX_PAIRS = 120


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
    bids: BidProfile, limit: FloatArray, epsilon: FloatArray, bound: FloatArray, rng: Generator, trust: Trust = "local"
) -> tuple[FloatArray, FloatArray]:
    """One pass over pairs (all, or a random choice in long profiles); a move is kept where it helps.

    The last step of the first-best solver: pass money between owners wherever that lowers the error bound.
    """
    n = bids.n
    pairs = [(i, j) for i in range(-1, n) for j in range(n) if i != j]  # -1 is the purse: money not yet spent
    if len(pairs) > _MAX_PAIRS:
        pairs = [pairs[i] for i in rng.choice(len(pairs), _MAX_PAIRS, replace=False)]
    cost = bids.cost(epsilon)
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
            value = optimal_bound(moved, bids.data_size, trust)
            # an exact inverse may round to a cost one digit over the money
            better = (value < bound * (1 - 1e-12)) & (new_cost.sum(axis=-1) <= limit * (1 + 1e-12))
            epsilon, cost = np.where(better[:, None], moved, epsilon), np.where(better[:, None], new_cost, cost)
            bound = np.where(better, value, bound)
    return epsilon, bound


_KEPT, _DESCENTS, _POLISHED = 5, 6, 10
_NOTHING = 1e-9  # of ε̄: less than this is not bought, and its noise would not be a finite number
_TABLE_SHARES = np.arange(1, 49) / 48


_BEST: dict[Trust, OptAggr | SecureOpt] = {"local": OptAggr(), "secure-aggregation": SecureOpt()}


def optimal_bound(epsilon: FloatArray, data_size: FloatArray, trust: Trust = "local") -> FloatArray:
    """ERR with the best weights; infinite where nobody sells."""
    return error_bound(_BEST[trust].weights(epsilon, data_size), epsilon, data_size, trust=trust)


def first_best(
    bids: BidProfile, budget: ArrayLike, *, rng: Generator | None = None, trust: Trust = "local"
) -> tuple[FloatArray, FloatArray]:
    """Privacy losses of shape (..., n) and the error bound they reach; the rng picks pairs in long profiles."""
    limit, rows = checked_budget(budget, bids.shape[:-1]).reshape(-1), flat(bids)
    epsilon = rows.privacy_budget.copy()
    value = optimal_bound(epsilon, rows.data_size, trust)
    short = np.flatnonzero(rows.full_cost.sum(axis=-1) > limit)  # the others buy everything: ERR falls in every ε
    if short.size:
        epsilon[short], value[short] = _solve(rows[short], limit[short], rng or np.random.default_rng(0), trust)
    return epsilon.reshape(bids.shape), value.reshape(bids.shape[:-1])


def _solve(bids: BidProfile, limit: FloatArray, rng: Generator, trust: Trust) -> tuple[FloatArray, FloatArray]:
    starts, bounds = _starts(bids, limit, trust)
    kept, rows, n = starts.shape
    again = np.tile(np.arange(rows), kept)  # all starts of all profiles side by side
    tiled, limits, points, values = bids[again], limit[again], starts.reshape(-1, n), bounds.ravel()
    for _ in range(_DESCENTS):
        points, values = _descend(tiled, limits, points, values, trust)
    starts, bounds = points.reshape(starts.shape), values.reshape(kept, rows)
    epsilon, bound = starts[bounds.argmin(axis=0), np.arange(len(limit))], bounds.min(axis=0)
    for _ in range(2):
        epsilon, bound = exchange(bids, limit, epsilon, bound, rng, trust)
        for _ in range(_POLISHED):
            epsilon, bound = _descend(bids, limit, epsilon, bound, trust)
    return epsilon, bound


def _starts(bids: BidProfile, limit: FloatArray, trust: Trust) -> tuple[FloatArray, FloatArray]:
    """The best few starting points of each profile: (kept, profiles, n) and their bounds."""
    full, size, cap = bids.full_cost, bids.data_size, bids.privacy_budget
    weights = (size, size * cap, cap, cap * cap, size * cap * cap)
    keys = (*(full / np.maximum(weight, 1e-300) for weight in weights), full, -size)
    kept: list[FloatArray] = []
    bounds: list[FloatArray] = []
    counts = np.unique(np.linspace(1, bids.n, min(bids.n, 12)).round().astype(int))
    for key in keys:
        rank = key.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")
        for epsilon in (_that_fit(bids, limit, rank), *(_scaled(bids, limit, rank < k) for k in counts)):
            kept.append(epsilon)
            bounds.append(optimal_bound(epsilon, size, trust))
        if len(kept) > 4 * _KEPT:
            kept, bounds = _best_of(kept, bounds)
    kept, bounds = _best_of(kept, bounds)
    return np.array(kept), np.array(bounds)


def _best_of(kept: list[FloatArray], bounds: list[FloatArray]) -> tuple[list[FloatArray], list[FloatArray]]:
    values, points = np.array(bounds), np.array(kept)
    # a start equal to a better one is no second start
    order = values.argsort(axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    repeated = np.concatenate([np.zeros((1, values.shape[1]), bool), np.isclose(ordered[1:], ordered[:-1])], axis=0)
    again = np.argsort(repeated, axis=0, kind="stable")[:_KEPT]
    chosen = np.take_along_axis(order, again, axis=0)
    rows = np.arange(values.shape[1])
    return list(points[chosen, rows]), list(values[chosen, rows])


def _that_fit(bids: BidProfile, limit: FloatArray, rank: IntArray) -> FloatArray:
    """Everybody in full who still fits, cheapest first."""
    order = rank.argsort(axis=-1)
    left, taken = limit.copy(), np.zeros(bids.shape, dtype=bool)
    rows = np.arange(len(limit))
    for k in range(bids.n):
        who = order[:, k]
        fits = bids.full_cost[rows, who] <= left
        taken[rows, who] = fits
        left = left - np.where(fits, bids.full_cost[rows, who], 0.0)
    return np.where(taken, bids.privacy_budget, 0.0)


def _scaled(bids: BidProfile, limit: FloatArray, chosen: NDArray[np.bool_]) -> FloatArray:
    """The chosen owners at one common share of their ε̄, as large as the budget allows."""
    cap = np.where(chosen, bids.privacy_budget, 0.0)
    low, high = np.zeros(len(limit)), np.ones(len(limit))
    for _ in range(30):
        middle = np.where(low == 0, high * 0.5, 0.5 * (low + high))
        fits = bids.cost(cap * middle[:, None]).sum(axis=-1) <= limit
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    high = np.where(bids.cost(cap).sum(axis=-1) <= limit, 1.0, low)
    return cap * high[:, None]


def _descend(
    bids: BidProfile, limit: FloatArray, epsilon: FloatArray, bound: FloatArray, trust: Trust
) -> tuple[FloatArray, FloatArray]:
    """One step for ε at fixed weights, then new weights; kept where better (always, but for rounding)."""
    new = _for_weights(bids, limit, epsilon) if trust == "local" else _for_sum(bids, limit, epsilon)
    value = optimal_bound(new, bids.data_size, trust)
    better = (value < bound) & (bids.cost(new).sum(axis=-1) <= limit * (1 + 1e-12))
    return np.where(better[:, None], new, epsilon), np.where(better, value, bound)


def _for_sum(bids: BidProfile, limit: FloatArray, epsilon: FloatArray) -> FloatArray:
    """ε in proportion to the weights that these allow, all by one factor, as much as the budget buys."""
    weights = SecureOpt().weights(epsilon, bids.data_size) * (epsilon > 0)
    low, high = np.full(len(limit), -20.0), np.full(len(limit), 20.0)  # the factor's logarithm
    for _ in range(48):
        middle = 0.5 * (low + high)
        fits = bids.cost(np.minimum(weights * np.exp(middle)[:, None], bids.privacy_budget)).sum(axis=-1) <= limit
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    new = np.minimum(weights * np.exp(low)[:, None], bids.privacy_budget)
    return np.where(new > _NOTHING * bids.privacy_budget, new, 0.0)


def _for_weights(bids: BidProfile, limit: FloatArray, epsilon: FloatArray) -> FloatArray:
    """The ε of least noise at the weights that these allow."""
    weights = OptAggr().weights(epsilon, bids.data_size)
    energy = np.where(epsilon > 0, 8.0 * weights * weights, 0.0)
    table = None
    if bids.valuations.grid is not None:
        table = np.stack([bids.cost(bids.privacy_budget * share) for share in _TABLE_SHARES], axis=-1)
    # the price of money, by bisection in its logarithm; at a price of almost 0 everybody sells in full
    low, high = np.full(len(limit), -80.0), np.full(len(limit), 40.0)
    for _ in range(34):
        middle = 0.5 * (low + high)
        fits = bids.cost(_respond(bids, energy, np.exp(middle)[:, None], table)).sum(axis=-1) <= limit
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return _respond(bids, energy, np.exp(high)[:, None], table)


def _respond(bids: BidProfile, energy: FloatArray, price: FloatArray, table: FloatArray | None) -> FloatArray:
    """argmin over ε in [0, ε̄] of energy/ε² + price · cost(ε), by family in closed form."""
    kind, cap = bids.valuations.kind, bids.privacy_budget
    slope = price * bids.valuations.rate * bids.data_size
    ratio = np.divide(energy, slope, out=np.full(cap.shape, np.inf), where=slope > 0)
    out = np.where(energy > 0, cap, 0.0)  # STEP: all or nothing, and those with weight have it all
    for code in np.unique(kind).tolist():
        here = (kind == code) & (energy > 0)
        k = ratio[here]
        if code == Kind.LINEAR:
            best = np.cbrt(k)
        elif code == Kind.QUADRATIC:
            best = np.sqrt(np.sqrt(k))
        elif code == Kind.SQRT:
            best = (2.0 * k) ** 0.4
        elif code == Kind.EXPONENTIAL:  # ε³e^ε = 2k
            root = np.cbrt(2.0 * np.minimum(k, 1e60)) / 3.0
            best = 3.0 * lambertw(root).real
        elif code == Kind.TABULATED:
            assert table is not None
            # the best of evenly spaced privacy losses, whose costs `table` holds: a table need not be convex
            losses = np.maximum(cap, 1e-300)[..., None] * _TABLE_SHARES
            value = energy[..., None] / np.square(losses) + price[..., None] * table
            best = (cap * _TABLE_SHARES[value.argmin(axis=-1)])[here]
        else:
            continue
        out[here] = np.minimum(best, cap[here])
    return np.where(out > _NOTHING * cap, out, 0.0)
