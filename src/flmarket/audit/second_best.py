"""The second best: what a buyer can buy who must leave every owner the rent of her secret.

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

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from flmarket import populations
from flmarket.aggregation import Trust
from flmarket.audit.first_best import first_best, optimal_bound
from flmarket.audit.trials import Sample, flat, run_checked
from flmarket.bids import Auction, BidProfile, FloatArray, Kind, Valuations, checked_budget
from flmarket.errors import InvalidInput
from flmarket.populations import Population
from flmarket.sampling.distributions import Uniform

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
    limit, rows = checked_budget(budget, bids.shape[:-1]).reshape(-1), flat(bids)
    _rates(rows)
    found, step = np.empty(len(limit)), max(1, _CHUNK // (bids.n * draws))
    for start in range(0, len(limit), step):
        part = slice(start, start + step)
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

    low, high = np.zeros(shape), np.broadcast_to(top, shape)
    for _ in range(_STEPS):
        a = 0.5 * (low + high)
        spare = above(a)
        enough = spare >= below(a + 8.0 * spare)
        low, high = np.where(enough, low, a), np.where(enough, a, high)
    a, few, many = high, np.zeros(shape), np.ones(shape)
    for _ in range(_STEPS):
        p = 0.5 * (few + many)
        enough = p >= below(a + 8.0 * p)
        few, many = np.where(enough, few, p), np.where(enough, p, many)
    p, nu = many, a + 8.0 * many
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
