"""Yardsticks of efficiency: what a buyer could have who knew every cost, and what she can who must pay for not knowing.

The first best: what a buyer who knew every cost, and paid exactly that, could buy with the budget.

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

The second best: what a buyer can buy who must leave every owner the rent of her secret.

Owner i's cost is α_i·q_i with q_i = d_i·g_i(ε_i): her family g, ε̄ and data size are public, her rate α_i is drawn from
a known law F, independently of everybody else and of the budget. In any Bayesian incentive compatible, individually
rational mechanism her expected payment is at least E[φ(α_i)·q_i] with the virtual rate φ(α) = α + F/f (Myerson 1981),
and at least E[φ̄(α_i)·q_i] with φ ironed, whatever the mechanism. So with budget B on average over rates

    E[ERR]  ≥  max_{μ ≥ 0}  E_α [ min_ε { ERR(ε) + μ·(Σ_i φ̄(α_i)·q_i(ε_i) − B) } ],

and every μ that depends on public facts and B alone gives a lower bound (`bayesian_bound`). A budget that must hold in
every profile, dominant strategies, or families and ε̄ that are private too only make the buyer's life harder, so the
bound stands for those mechanisms as well. It counts a round in which nobody sells as infinitely bad.

`second_best` is an estimate and no bound: per profile, the first best of a buyer to whom everybody costs her virtual
rate. It spends B in every profile, which a mechanism does on average only; and it is found by a local solver.

**The inner minimum** is not convex in ε. In s = ε² the noise 8λ²/s is jointly convex with the weights λ, and costs are
replaced by their convex envelope in s, from below by tangents. Then with W = d/Σd and any ν, P

    min ≥ ν − 4P² − μB + Σ_i min_{s ≤ s̄, λ} { 8λ²/s + 8P·(λ − W_i)⁺ − ν·λ + μ·c_i(s) }

by weak duality, each term in closed form, with equality at the best ν and P (convexity). What would break the bound:
budgets computed from rates (reports or truth), or a law of rates that is not the owners'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray
from scipy.special import lambertw

from flmarket import populations
from flmarket.aggregation import OptAggr, SecureOpt, Trust, error_bound
from flmarket.audit.trials import Sample, bisected, run_checked
from flmarket.bids import Auction, BidProfile, FloatArray, IntArray, Kind, Valuations, checked_budget, slices
from flmarket.errors import InvalidInput
from flmarket.populations import Population
from flmarket.sampling.distributions import Uniform

_SHARES = (1.0, 0.3, 0.08)
_MAX_PAIRS = 120


def affordable(bids: BidProfile, money: FloatArray) -> FloatArray:
    """The largest ε ≤ ε̄ whose cost is within each owner's money, by family in closed form."""
    cap, slope = bids.privacy_budget, bids.valuations.rate * bids.data_size
    units = np.divide(np.maximum(money, 0.0), slope, out=np.full(cap.shape, np.inf), where=slope > 0)
    forms: Forms = {
        Kind.LINEAR: lambda k, _: 0.5 * k,
        Kind.QUADRATIC: lambda k, _: np.sqrt(k),
        Kind.SQRT: lambda k, _: np.square(0.5 * k),
        Kind.EXPONENTIAL: lambda k, _: np.log1p(k),
        Kind.TABULATED: lambda _, here: _by_bisection(bids, money)[here],
    }
    return _by_family(bids, forms, units, np.where(units >= 1, cap, 0.0))  # a STEP is bought whole or not


Forms = dict[Kind, Callable[[FloatArray, NDArray[np.bool_]], FloatArray]]


def _by_family(
    bids: BidProfile, forms: Forms, terms: FloatArray, out: FloatArray, some: NDArray[np.bool_] | None = None
) -> FloatArray:
    """ε ≤ ε̄ by each family's form of its owners' terms; as in `out` where it has none, or for others than `some`."""
    cap = bids.privacy_budget
    for kind, form in forms.items():
        here = bids.valuations.kind == kind if some is None else (bids.valuations.kind == kind) & some
        if here.any():
            out[here] = np.minimum(form(terms[here], here), cap[here])
    return np.where(out > _NOTHING * cap, out, 0.0)


def _by_bisection(bids: BidProfile, money: FloatArray) -> FloatArray:
    low, _ = bisected(lambda epsilon: bids.cost(epsilon) <= money, np.zeros(bids.shape), bids.privacy_budget, 50)
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
    limit, rows = checked_budget(budget, bids.shape[:-1]).reshape(-1), bids.flat
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

    def fits(share: FloatArray) -> NDArray[np.bool_]:
        return np.asarray(bids.cost(cap * share[:, None]).sum(axis=-1) <= limit)

    share, _ = bisected(fits, np.zeros(len(limit)), np.ones(len(limit)), 30)
    return cap * np.where(fits(np.ones(len(limit))), 1.0, share)[:, None]


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

    def bought(factor: FloatArray) -> FloatArray:
        return np.minimum(weights * np.exp(factor)[:, None], bids.privacy_budget)

    low, high = np.full(len(limit), -20.0), np.full(len(limit), 20.0)  # the factor's logarithm
    new = bought(bisected(lambda factor: bids.cost(bought(factor)).sum(axis=-1) <= limit, low, high, 48)[0])
    return np.where(new > _NOTHING * bids.privacy_budget, new, 0.0)


def _for_weights(bids: BidProfile, limit: FloatArray, epsilon: FloatArray) -> FloatArray:
    """The ε of least noise at the weights that these allow."""
    weights = OptAggr().weights(epsilon, bids.data_size)
    energy = np.where(epsilon > 0, 8.0 * weights * weights, 0.0)
    table = None
    if bids.valuations.grid is not None:
        table = np.stack([bids.cost(bids.privacy_budget * share) for share in _TABLE_SHARES], axis=-1)
    # the price of money, by bisection in its logarithm; at a price of almost 0 everybody sells in full

    def bought(price: FloatArray) -> FloatArray:
        return _respond(bids, energy, np.exp(price)[:, None], table)

    low, high = np.full(len(limit), -80.0), np.full(len(limit), 40.0)
    return bought(bisected(lambda price: bids.cost(bought(price)).sum(axis=-1) <= limit, high, low, 34)[0])


def _respond(bids: BidProfile, energy: FloatArray, price: FloatArray, table: FloatArray | None) -> FloatArray:
    """argmin over ε in [0, ε̄] of energy/ε² + price · cost(ε), by family in closed form."""
    cap, slope = bids.privacy_budget, price * bids.valuations.rate * bids.data_size
    ratio = np.divide(energy, slope, out=np.full(cap.shape, np.inf), where=slope > 0)

    def tabulated(_: FloatArray, here: NDArray[np.bool_]) -> FloatArray:
        """The best of evenly spaced privacy losses, whose costs `table` holds: a table need not be convex."""
        assert table is not None
        losses = np.maximum(cap, 1e-300)[..., None] * _TABLE_SHARES
        value = energy[..., None] / np.square(losses) + price[..., None] * table
        return np.asarray((cap * _TABLE_SHARES[value.argmin(axis=-1)])[here])

    forms: Forms = {
        Kind.LINEAR: lambda k, _: np.cbrt(k),
        Kind.QUADRATIC: lambda k, _: np.sqrt(np.sqrt(k)),
        Kind.SQRT: lambda k, _: (2.0 * k) ** 0.4,
        Kind.EXPONENTIAL: lambda k, _: 3.0 * lambertw(np.cbrt(2.0 * np.minimum(k, 1e60)) / 3.0).real,  # ε³e^ε = 2k
        Kind.TABULATED: tabulated,
    }
    # STEP: all or nothing, and those with weight have it all
    return _by_family(bids, forms, ratio, np.where(energy > 0, cap, 0.0), energy > 0)


_STEPS, _SECTIONS = 30, 32
_CHUNK = 200_000  # owners whose problems are solved side by side


class RateLaw(Protocol):
    """The law of everybody's rate; those of `flmarket.sampling.distributions` are."""

    def sample(self, rng: np.random.Generator, size: tuple[int, ...]) -> FloatArray:
        """Independent rates."""

    def virtual_cost(self, cost: ArrayLike) -> FloatArray:
        """φ̄, ironed."""


def rate_law(population: str | BidProfile) -> RateLaw | None:
    """The law of rates in a named population, if it has one for all owners alike."""
    known = None if isinstance(population, BidProfile) else populations.get(population)
    return Uniform(*known.rate_range) if isinstance(known, Population) else None


def second_best(
    bids: BidProfile, budget: ArrayLike, law: RateLaw, *, rng: np.random.Generator | None = None
) -> tuple[FloatArray, FloatArray]:
    """Privacy losses of shape (..., n) and the error bound at virtual rates: an estimate, per profile."""
    virtual = Valuations(bids.valuations.kind, law.virtual_cost(_rates(bids)))
    return first_best(BidProfile(virtual, bids.privacy_budget, bids.data_size), budget, rng=rng)


def over_second_best(bound: ArrayLike, estimate: ArrayLike) -> float | None:
    """The mean error bound over the mean of `second_best` on the same profiles, those in which somebody sold."""
    reached, yardstick = np.asarray(bound), np.asarray(estimate)
    sold = np.isfinite(reached)
    return float(reached[sold].mean() / yardstick[sold].mean()) if sold.any() else None


def _rates(bids: BidProfile) -> FloatArray:
    if bids.valuations.grid is not None:
        raise InvalidInput(
            "valuations", "tabulated", "families with a rate: linear, quadratic, sqrt, exponential, step"
        )
    return bids.valuations.rate


def bayesian_bound(
    bids: BidProfile, budget: ArrayLike, law: RateLaw, *, rng: np.random.Generator, draws: int = 16
) -> FloatArray:
    """For each profile a number whose mean over rates is a lower bound of any truthful mechanism's mean ERR.

    `budget` must not depend on rates. The price of money μ of a profile is the best one for `draws` other rates of the
    same owners, so that it depends on public facts only; more draws make the bound a little tighter.
    """
    limit, rows = checked_budget(budget, bids.shape[:-1]).reshape(-1), bids.flat
    _rates(rows)
    found = np.empty(len(limit))
    for part in slices(len(limit), _CHUNK // (bids.n * draws)):
        some, money = rows[part], limit[part]
        drawn = law.virtual_cost(law.sample(rng, (len(money), draws, bids.n)))
        mine = law.virtual_cost(some.valuations.rate)[:, None]
        owners = Envelope.of(some)
        price = best_price(owners, drawn, np.full(draws, 1.0 / draws), money)
        found[part] = least(owners, mine, price)[:, 0] - price * money
    return found.reshape(bids.shape[:-1])


@dataclass(frozen=True)
class Envelope:
    """Of each owner, (R, 1, n): W, the largest s, and from below the cost of s per unit of rate."""

    share: FloatArray
    most: FloatArray
    slope: FloatArray  # (J, R, 1, n), rising
    knot: FloatArray  # (J, R, 1, n): each slope holds up to its knot; the last one is `most`

    @classmethod
    def of(cls, bids: BidProfile) -> Envelope:
        """The convex envelope of d·g(√s) on [0, ε̄²], by tangents."""
        kind, cap, size = bids.valuations.kind, bids.privacy_budget, bids.data_size
        unit = BidProfile(Valuations(kind, np.ones(kind.shape)), cap, size)
        # e^√s − 1 is concave up to ε = 1 and its envelope a chord up to the ε where 2(1 − e^−ε) = ε; all others are
        # concave or straight, and their envelope the chord to the end
        touch = np.where(kind == Kind.EXPONENTIAL, np.minimum(cap, 1.5936242600400401), cap)
        tangents = 1 + int(np.ceil(8.0 * (cap - touch).max()))
        points = touch + (cap - touch) * np.linspace(0.0, 1.0, tangents)[:, None, None]
        value = np.stack([unit.cost(point) for point in points])
        s = np.square(points)
        slope = value / s
        curved = (kind == Kind.EXPONENTIAL) & (cap > touch)
        slope = np.where(curved, size * np.exp(points) / (2 * points), slope)
        slope[0] = value[0] / s[0]
        level = value - slope * s  # of each tangent at s = 0
        rise = np.diff(slope, axis=0)
        crossing = np.divide(-np.diff(level, axis=0), rise, out=s[1:].copy(), where=rise > 0)
        knot = np.concatenate([np.where(rise > 0, crossing, s[:-1]), s[-1:]])
        expand = (..., None, slice(None))
        share = size / size.sum(axis=-1, keepdims=True)
        return cls(share[expand], np.square(cap)[expand], slope[expand], knot[expand])

    def cost(self, s: FloatArray) -> FloatArray:
        """Per unit of rate."""
        before = np.concatenate([np.zeros((1, *self.knot.shape[1:])), self.knot[:-1]])
        return np.asarray((self.slope * np.clip(s - before, 0.0, self.knot - before)).sum(axis=0))


def least(owners: Envelope, virtual: FloatArray, price: FloatArray) -> FloatArray:
    """min_ε ERR + μ·Σ φ̄·q from below, (R, M); `virtual` is φ̄, (R, M, n).

    What is weighed above W depends on a = ν − 8P alone, what is weighed below it on ν alone. So a is found first, where
    the two sums Σ(λ − W)⁺ at a and Σ(W − λ)⁺ at ν = a + 8·Σ(λ − W)⁺ meet; then, as the first sum may jump there, P.
    """
    shape = virtual.shape[:-1]
    dear = price[:, None, None] * virtual
    top = 16.0 / owners.most.min(axis=-1) + np.sqrt(32.0 * (dear * owners.slope[-1]).max(axis=-1))

    def above(a: FloatArray) -> FloatArray:
        return np.asarray(np.maximum(_weight(owners, dear, a) - owners.share, 0.0).sum(axis=-1))

    def below(nu: FloatArray) -> FloatArray:
        return np.asarray(np.maximum(owners.share - _weight(owners, dear, nu), 0.0).sum(axis=-1))

    def enough(a: FloatArray) -> NDArray[np.bool_]:
        spare = above(a)
        return spare >= below(a + 8.0 * spare)

    a, _ = bisected(enough, np.broadcast_to(top, shape), np.zeros(shape), _STEPS)
    p, _ = bisected(lambda p: p >= below(a + 8.0 * p), np.ones(shape), np.zeros(shape), _STEPS)
    nu = a + 8.0 * p
    s = _sold(owners, dear, nu, a)
    weight = np.maximum(np.minimum(nu[..., None] * s / 16.0, owners.share), a[..., None] * s / 16.0)
    over = np.maximum(weight - owners.share, 0.0)
    noise = np.divide(8.0 * weight**2, s, out=np.zeros_like(s), where=s > 0)
    each = noise + 8.0 * p[..., None] * over - nu[..., None] * weight + dear * owners.cost(s)
    return np.asarray(nu - 4.0 * p**2 + each.sum(axis=-1))


def _sold(owners: Envelope, dear: FloatArray, nu: FloatArray, a: FloatArray) -> FloatArray:
    """Each owner's s at the multipliers ν and a = ν − 8P.

    At the best λ the noise falls in s at the rate 8W²/s², but at least a²/32 and at most ν²/32; she sells up to where
    that is what s costs.
    """
    most, least_ = np.square(nu[..., None]) / 32.0, np.square(a[..., None]) / 32.0
    s = np.zeros(np.broadcast_shapes(dear.shape, most.shape))
    for slope, knot in zip(owners.slope, owners.knot, strict=True):
        cost = dear * slope
        wanted = owners.share * np.sqrt(8.0 / np.maximum(cost, 1e-300))
        s = np.maximum(s, np.where(cost > most, 0.0, np.where(cost < least_, knot, np.minimum(knot, wanted))))
    return s


def _weight(owners: Envelope, dear: FloatArray, slope: FloatArray) -> FloatArray:
    """λ where nothing pulls it towards W: at ν if it is below W, at a if it is above."""
    return slope[..., None] * _sold(owners, dear, slope, slope) / 16.0


def best_price(owners: Envelope, virtual: FloatArray, chance: FloatArray, budget: FloatArray) -> FloatArray:
    """The μ of each row that gives the largest bound for the rates `virtual` (R, M, n), of these chances (M,).

    The bound is concave in μ, so a golden section in its logarithm finds it. Nothing costs anything where μ = 0.
    """
    ratio, scale = (np.sqrt(5.0) - 1.0) / 2.0, 1.0 / np.maximum(budget, 1e-300)

    def bound(price: FloatArray) -> FloatArray:
        return np.asarray((least(owners, virtual, price) * chance).sum(axis=-1) - price * budget)

    low, high = np.full(len(budget), -30.0), np.full(len(budget), 15.0)
    for _ in range(_SECTIONS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        better = bound(scale * np.exp(left)) < bound(scale * np.exp(right))
        low, high = np.where(better, left, low), np.where(better, high, right)
    price = scale * np.exp(0.5 * (low + high))
    return np.where(bound(price) >= bound(np.zeros(len(budget))), price, 0.0)


FACTORS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Efficiency:
    """Means at one budget factor, over profiles in which somebody sold."""

    budget_factor: float
    profiles: int
    error_bound: float
    first_best: float
    ratio: float  # error_bound / first_best
    second_best: float | None  # the estimate; None where nobody knows the law of rates
    nobody_selected: float
    budget_used: float


def measure_efficiency(
    mechanism: Auction, sample: Sample, *, seed: int, law: RateLaw | None = None, trust: Trust = "local"
) -> tuple[Efficiency, ...]:
    """The mechanism, the first best and the second on the same profiles, whatever their own budgets.

    How good is what the buyer gets, at fixed budget factors, against a buyer who knows every cost, and against one who
    knows the `law` of rates only?

    The measure is FL-Market's error bound with optimal weights, in the given model of trust (the second best has one in
    the local model only). Profiles in which nobody sells have none: they are counted, and left out of both means, so
    that the ratio compares like with like. A mechanism that overspends can come out *below* the first best.
    """
    bids, count = sample.bids, len(sample)
    total = bids.full_cost.sum(axis=-1)
    # all factors in one call: the solver's effort hardly depends on how many profiles it has
    budgets = np.outer(FACTORS, total)
    many = bids[np.tile(np.arange(count), len(FACTORS))]
    rng = np.random.default_rng((seed, 108))
    best = first_best(many, budgets.ravel(), rng=rng, trust=trust)[1].reshape(budgets.shape)
    law = law if trust == "local" else None
    second = best if law is None else second_best(many, budgets.ravel(), law, rng=rng)[1].reshape(budgets.shape)
    rows = []
    for factor, budget, *yardsticks in zip(FACTORS, budgets, best, second, strict=True):
        outcome = run_checked(mechanism, bids, budget, np.random.default_rng((seed, 107)))
        reached = optimal_bound(outcome.epsilon, bids.data_size, trust)
        valid = np.isfinite(reached)
        figures = (float(x[valid].mean()) if valid.any() else float("nan") for x in (reached, *yardsticks))
        here, there, known = figures
        used = np.divide(outcome.spent, budget, out=np.zeros(count), where=budget > 0)
        estimate = None if law is None else known
        shares = float(1 - valid.mean()), float(used.mean())
        rows.append(Efficiency(factor, count, here, there, here / there, estimate, *shares))
    return tuple(rows)
