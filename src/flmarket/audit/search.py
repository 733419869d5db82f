"""Ways to look for a profitable lie. Each is independent of the others; none proves that there is no better one.

* `grid`: one field of the bid multiplied by fixed factors, down to 0 and up to 100 times the truth.
* `families`: the full cost about right, but another shape of valuation.
* `reshaped`: any non-decreasing valuation, as a table (steps, late and early rises, random ones).
* `ranks`: value reports just below and above what would tie with another owner, per owner, record or record × ε̄.
* `critical`: bisection to where the owner's allocation changes, nearest to the truth on either side, and bids a hair
  below and above that point. For a threshold mechanism that is all there is to find.
* `random`: random restarts over everything, single and joint.
* `refine`: random steps of shrinking length around the best lie so far (around the truth where none pays yet).

A gradient search belongs here once a mechanism offers one. A mechanism with a narrow bonus in an odd place (one special
number, say) can escape all of these: an audit refutes, it does not prove.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flmarket.audit.trials import Awards, Menus, NotOnTheMenu, Trials, bisected, geometric, merged, times
from flmarket.bids import BidProfile, FloatArray, IntArray, Valuations
from flmarket.errors import InvalidInput


@dataclass(frozen=True)
class Strength:
    """How much of each search to do; every number counts misreports per owner, or rounds of several.

    How hard to look: "quick" for every day, "strong" before believing a claim; `dataclasses.replace` makes others.
    """

    name: str
    factors: tuple[float, ...]
    family_factors: tuple[float, ...]
    reshapes: int
    bisections: int
    ranked_others: int
    random_value: int
    random_joint: int
    refine_rounds: int
    owners_per_profile: int
    draws: int  # for mechanisms that draw random numbers
    structure_profiles: int  # of the checks beside the search; 0 leaves efficiency out
    efficiency_profiles: int


def _around_one(least: float, count: int) -> tuple[float, ...]:
    """0, then factors ever denser towards 1 from both sides, `least` being the closest."""
    distance = np.geomspace(least, 4.6, count)
    return (0.0, *np.exp(-distance[::-1]).tolist(), *np.exp(distance).tolist())


STRENGTHS = {
    "quick": Strength(
        name="quick",
        factors=(0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 0.999, 1.001, 1.03, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0, 20.0),
        family_factors=(0.5, 0.9, 1.2),
        reshapes=6,
        bisections=14,
        ranked_others=0,
        random_value=4,
        random_joint=12,
        refine_rounds=5,
        owners_per_profile=16,
        draws=8,
        structure_profiles=200,
        efficiency_profiles=50,
    ),
    "strong": Strength(
        name="strong",
        factors=_around_one(1e-4, 20),
        family_factors=(0.3, 0.6, 0.8, 0.95, 1.0, 1.05, 1.3, 2.0),
        reshapes=24,
        bisections=32,
        ranked_others=9,
        random_value=60,
        random_joint=80,
        refine_rounds=20,
        owners_per_profile=100,
        draws=32,
        structure_profiles=1_000,
        efficiency_profiles=200,
    ),
}


# what a bid consists of, and the kinds of lie that are told apart: about one field, or about several at once
FIELDS = ("value", "privacy_budget", "data_size")
DIMENSIONS = ("value_only", "privacy_budget", "data_size", "joint")
KNOTS = 6  # points of a reshaped valuation, beside (0, 0)


@dataclass
class _Best:
    gain: FloatArray
    reports: BidProfile


class Hunt:
    """All searches against one batch of trials report here.

    Keeps the best misreport found for every owner, per kind of lie, and a count of everything that was tried.
    """

    def __init__(
        self,
        trials: Trials,
        rng: np.random.Generator,
        joint_fields: tuple[str, ...] = FIELDS,
        menus: Menus | None = None,
    ) -> None:
        """With `menus`, raises `NotOnTheMenu` as soon as a report about anything but her size gets what is on none."""
        self.trials, self.rng, self.joint_fields, self.menus = trials, rng, joint_fields, menus
        self.tried: Counter[tuple[str, str]] = Counter()
        rows = len(trials.rows)
        # an owner whose honest award breaks her own cap has no honest utility to compare with: that is no regret
        # but a broken rule, reported under rationality
        self.comparable = np.isfinite(trials.honest.utility)
        self._honest = np.where(self.comparable, trials.honest.utility, np.inf)
        self.best = {name: _Best(np.zeros(rows), trials.truth) for name in DIMENSIONS}

    def attempt(self, dimension: str, search: str, reports: BidProfile) -> Awards:
        """Try one report in every row."""
        awards = self.trials.run(reports)
        self.tried[dimension, search] += 1
        sizes = dimension == "data_size" or (dimension == "joint" and "data_size" in self.joint_fields)
        if self.menus is not None and not sizes and not self.menus.lists(self.trials, awards).all():
            raise NotOnTheMenu
        best, gain = self.best[dimension], awards.utility - self._honest
        better = gain > best.gain
        if better.any():
            best.gain[better] = gain[better]
            best.reports = merged(better, reports, best.reports)
        return awards


_DIMENSION = {"value": "value_only", "privacy_budget": "privacy_budget", "data_size": "data_size"}
_FAMILIES = 5  # the closed-form kinds
_KNOT_SHARES = np.array([0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0])
_HAIR = (1e-3, 1e-6, 1e-9)


def strength_of(search: str | Strength) -> Strength:
    """A strength of ours by its name, or anybody's."""
    strength = STRENGTHS.get(search) if isinstance(search, str) else search
    if strength is None:
        raise InvalidInput("search", search, f"one of {', '.join(STRENGTHS)}")
    return strength


def run_searches(hunt: Hunt, search: str | Strength) -> None:
    """Every search at the given strength."""
    strength = strength_of(search)
    for field in FIELDS:
        epsilon = _grid(hunt, field, strength.factors)
        if field == "value" or strength.ranked_others:
            _critical(hunt, field, strength, epsilon)
    for step in range(1, _FAMILIES):
        kind = (hunt.trials.own.kind.astype(np.int64) + step) % _FAMILIES
        for factor in strength.family_factors:
            hunt.attempt("value_only", "families", _family_report(hunt.trials, kind, factor))
    _reshaped(hunt, strength.reshapes)
    _ranks(hunt, strength.ranked_others)
    _random(hunt, strength)
    _joint_structured(hunt, strength)
    for dimension in hunt.best:
        _refine(hunt, dimension, strength.refine_rounds)


def _grid(hunt: Hunt, field: str, factors: tuple[float, ...]) -> FloatArray:
    """Privacy losses awarded as shares of the reported ε̄, shape (factors, rows)."""
    shares = np.empty((len(factors), len(hunt.trials.rows)))
    # nearest to the truth first: of equally good lies the smallest is kept, which makes the better example
    for index in np.argsort(np.abs(np.log(np.maximum(factors, 1e-9)))).tolist():
        reports = times(hunt.trials.truth, **{field: factors[index]})
        shares[index] = _share(hunt.attempt(_DIMENSION[field], "grid", reports).epsilon, reports)
    return shares


def _share(epsilon: FloatArray, reports: BidProfile) -> FloatArray:
    return np.divide(epsilon, reports.privacy_budget, out=np.zeros_like(epsilon), where=reports.privacy_budget > 0)


def _critical(hunt: Hunt, field: str, strength: Strength, shares: FloatArray) -> None:
    """Bisect between the truth's allocation and the nearest other one, below and above."""
    honest = _share(hunt.trials.honest.epsilon, hunt.trials.truth)
    factors = np.array(strength.factors)

    def same(factor: FloatArray) -> NDArray[np.bool_]:
        reports = times(hunt.trials.truth, **{field: factor})
        award = hunt.attempt(_DIMENSION[field], "critical", reports)
        return np.abs(_share(award.epsilon, reports) - honest) <= 1e-9

    for above in (False, True):
        side = np.flatnonzero(factors > 1) if above else np.flatnonzero(factors < 1)[::-1]
        changed = np.abs(shares[side] - honest) > 1e-9
        exists, nearest = changed.any(axis=0), changed.argmax(axis=0)
        far = np.where(exists, factors[side][nearest], 1.0)
        near = np.where(exists & (nearest > 0), factors[side][np.maximum(nearest - 1, 0)], 1.0)
        near, far = bisected(same, near, far, strength.bisections, geometric)
        for hair in _HAIR[: 3 if strength.ranked_others else 1]:
            for point in (near * (1 + hair), near * (1 - hair), far * (1 + hair), far * (1 - hair)):
                hunt.attempt(_DIMENSION[field], "critical", times(hunt.trials.truth, **{field: point}))


def _family_report(trials: Trials, kind: IntArray, factor: FloatArray | float) -> BidProfile:
    """Another family whose full cost is `factor` times the true one."""
    truth = trials.truth
    unit = Valuations(kind, 1.0).per_record(truth.privacy_budget)
    full = trials.own.per_record(truth.privacy_budget)
    rate = np.divide(full * factor, unit, out=np.zeros_like(full), where=unit > 0)
    return BidProfile(Valuations(kind, rate), truth.privacy_budget, truth.data_size)


def _reshaped(hunt: Hunt, count: int) -> None:
    trials, truth, rng, rows = hunt.trials, hunt.trials.truth, hunt.rng, len(hunt.trials.rows)
    grid = np.maximum(truth.privacy_budget, 1e-12)[:, None] * _KNOT_SHARES
    full = trials.own.per_record(truth.privacy_budget)
    for index in range(count):
        if index % 2 == 0:  # all the value in one step at a random knot, early or late
            step = rng.integers(1, KNOTS + 1, rows)
            shape = (np.arange(KNOTS + 1) >= step[:, None]).astype(np.float64)
            # keep it rising, so that the curve is a valuation and not a constant
            shape = 0.98 * shape + 0.02 * _KNOT_SHARES
        else:
            rise = rng.exponential(size=(rows, KNOTS)) ** 2
            shape = np.concatenate([np.zeros((rows, 1)), np.cumsum(rise, axis=-1) / rise.sum(-1, keepdims=True)], -1)
        factor = np.exp(rng.normal(0.0, 0.5, rows)) if index >= 2 else np.ones(rows)
        values = full[:, None] * np.maximum(shape * factor[:, None], 0.0)
        told = BidProfile(Valuations.tabulated(grid, values), truth.privacy_budget, truth.data_size)
        hunt.attempt("value_only", "reshaped", told)


def _ranks(hunt: Hunt, others: int) -> None:
    trials, bids = hunt.trials, hunt.trials.bids
    cost, at = bids.full_cost, (trials.rows, trials.owner)
    for shift in range(1, min(others, bids.n - 1) + 1):
        other = (trials.rows, (trials.owner + shift) % bids.n)
        for weight in (np.ones(bids.shape), bids.data_size, bids.data_size * bids.privacy_budget):
            target = np.divide(cost[other] * weight[at], weight[other], out=trials.cost.copy(), where=weight[other] > 0)
            factor = np.divide(target, trials.cost, out=np.ones_like(target), where=trials.cost > 0)
            for hair in (-1e-6, 1e-6):
                hunt.attempt("value_only", "ranks", times(trials.truth, value=factor * (1 + hair)))


def _random(hunt: Hunt, strength: Strength) -> None:
    rng, rows = hunt.rng, len(hunt.trials.rows)
    for _ in range(strength.random_value):
        kind = rng.integers(0, _FAMILIES, rows)
        own = rng.random(rows) < 0.5
        factor = np.exp(rng.normal(0.0, 0.8, rows))
        told = merged(own, times(hunt.trials.truth, value=factor), _family_report(hunt.trials, kind, factor))
        hunt.attempt("value_only", "random", told)
    random_joint(hunt, strength.random_joint)


def random_joint(hunt: Hunt, count: int) -> None:
    """Random reports of everything that is private."""
    rng, rows = hunt.rng, len(hunt.trials.rows)
    for _ in range(count):
        factor = np.exp(rng.normal(0.0, 0.6, rows))
        # more records or privacy than she has is worth −∞ if sold, so most draws understate
        privacy = np.exp(np.where(rng.random(rows) < 0.3, 1, -1) * np.abs(rng.normal(0.0, 0.5, rows)))
        size = np.exp(np.where(rng.random(rows) < 0.15, 1, -1) * np.abs(rng.normal(0.0, 0.5, rows)))
        hunt.attempt("joint", "random", _joint(hunt, factor, privacy, size))


def _joint_structured(hunt: Hunt, strength: Strength) -> None:
    """Sell less but keep the asked total, or understate several fields together."""
    for factor in strength.factors:
        if 0 < factor < 1:
            hunt.attempt("joint", "grid", _joint(hunt, 1 / factor, 1.0, factor))
            hunt.attempt("joint", "grid", _joint(hunt, factor, factor, factor))
            hunt.attempt("joint", "grid", _joint(hunt, 1 / factor, factor, 1.0))


def _joint(hunt: Hunt, value: FloatArray | float, privacy: FloatArray | float, size: FloatArray | float) -> BidProfile:
    wanted = {"value": value, "privacy_budget": privacy, "data_size": size}
    return times(hunt.trials.truth, **{field: wanted[field] for field in hunt.joint_fields})


def _refine(hunt: Hunt, dimension: str, rounds: int) -> None:
    single = tuple(field for field, name in _DIMENSION.items() if name == dimension)
    fields = hunt.joint_fields if dimension == "joint" else single
    if dimension == "joint":  # start from the best single lie where that is better than every joint one
        for name in fields:
            hunt.attempt("joint", "refine", hunt.best[_DIMENSION[name]].reports)
    for index in range(rounds):
        width = 0.5 * (1e-4 / 0.5) ** (index / max(rounds - 1, 1))
        step = {field: np.exp(hunt.rng.normal(0.0, width, len(hunt.trials.rows))) for field in fields}
        hunt.attempt(dimension, "refine", times(hunt.best[dimension].reports, **step))
