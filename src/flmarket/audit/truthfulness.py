"""Does anybody gain by misreporting? The best misreport found per owner, all others fixed, and how much it brings.

Regret is the utility of the best misreport found minus that of the truth, never below 0. It is a lower bound of the
true regret: a mechanism can be refuted here, not proved. The verdict looks at the fields of the bid that are private
under the mechanism's own assumption; the others are measured and shown as well.

Where a mechanism shows menus (`trials.Menus`), regret is known exactly, and only some profiles are searched in full: to
see that nothing which is not on the menu can be had. If something can, all are.

Certificates for learned mechanisms: how much regret a *new* profile has, with a stated probability.

Let R_1, …, R_m be the largest regret over cost of any owner in m held-out profiles, and R that of a new one. If all
m + 1 are exchangeable (independent draws of one population are), R is as likely to have any rank as any other, so

    P( R > r ) ≤ α      for r = the k-th smallest of R_1, …, R_m,   k = ⌈(m + 1)(1 − α)⌉,

and r = ∞ where k > m: fewer than 1/α − 1 profiles certify nothing (Vovk, Gammerman, Shafer 2005; split conformal
prediction). No law of regret is assumed. The probability is over the held-out profiles and the new one together.

Two things it does not say. **R is what the search finds**, a lower bound of the true regret: the certificate bounds
what *this* search would find in a new profile, not what the cleverest liar could. And it is about the population:
owners drawn otherwise, or profiles that were trained on, void it.

An `Example` is one lie in full: everybody's bids, the budget, both outcomes and what each is worth to the liar, to be
replayed. A replay runs the two auctions again, alone, and recomputes the utilities from the outcomes. For a mechanism
that draws random numbers it averages over `draws` generators seeded (seed, 0), (seed, 1), …, the same ones for truth
and lie.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flmarket import auctions
from flmarket.audit.search import DIMENSIONS, FIELDS, Hunt, Strength, random_joint, run_searches
from flmarket.audit.trials import Awards, Menus, NotOnTheMenu, Sample, ShowsMenus, Trials, rows_at_once, times
from flmarket.bids import Auction, BidProfile, FloatArray, IntArray, Kind, Valuations, slices
from flmarket.errors import InvalidInput

TOLERANCE = 1e-9  # of the owner's full cost; beside an allowance for rounding in sums as large as the budget
_ROUNDING = 64 * np.finfo(np.float64).eps
_CHUNK_ENTRIES = 200_000  # per call of the mechanism: large enough to be fast, small enough for the cache
_SIMPLER = 0.97
_SURE = 5.0  # standard errors by which a random gain must exceed 0 to count
_EVERY = 16  # where menus are shown, one profile in so many is searched in full, but no fewer than
_LEAST = 40
_SPOT = 8  # lies by every owner of all the others


@dataclass(frozen=True)
class Bid:
    """One owner's bid in plain numbers."""

    kind: str
    rate: float
    privacy_budget: float
    data_size: float
    full_cost: float
    grid: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Result:
    """What one report brings the owner."""

    epsilon: float
    payment: float
    participation: float
    utility: float
    others_epsilon: tuple[float, ...]
    others_payment: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """Her gain against the truth as one part of her report moves, the rest staying as in the lie."""

    field: str  # what is multiplied: "value", "privacy_budget", "data_size", or "all fields"
    factor: tuple[float, ...]
    gain: tuple[float, ...]  # −inf where she would sell what she does not have
    epsilon: tuple[float, ...]


@dataclass(frozen=True)
class Example:
    """The best lie found in an audit (with gain 0 if none paid), ready to be replayed."""

    mechanism: str
    bids: tuple[Bid, ...]
    budget: float
    owner: int
    dimension: str
    lie: Bid
    honest: Result
    lying: Result
    gain: float
    gain_over_cost: float
    seed: int = 0
    draws: int = 1
    curve: Curve | None = None

    @property
    def profile(self) -> BidProfile:
        """The true bids."""
        return bids_of(self.bids)

    @property
    def reported(self) -> BidProfile:
        """The bids with the lie in place of the truth."""
        changed = list(self.bids)
        changed[self.owner] = self.lie
        return bids_of(changed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def bids_of(bids: tuple[Bid, ...] | list[Bid]) -> BidProfile:
    """A profile of shape (n,) from plain bids."""
    parts = [
        Valuations([int(Kind[bid.kind.upper()])], [bid.rate], grid=[bid.grid], values=[bid.values])
        if bid.grid
        else Valuations([int(Kind[bid.kind.upper()])], [bid.rate])
        for bid in bids
    ]
    return BidProfile(
        Valuations.concatenate(parts), [bid.privacy_budget for bid in bids], [bid.data_size for bid in bids]
    )


def plain_bids(profile: BidProfile) -> tuple[Bid, ...]:
    """A profile of shape (n,) as plain bids."""
    table, cost = profile.valuations, profile.full_cost
    terms, made = (table.rate, profile.privacy_budget, profile.data_size, cost), []
    for i in range(profile.n):
        kind = Kind(int(table.kind[i]))
        points = (table.grid, table.values) if kind is Kind.TABULATED else (None, None)
        grid, values = (() if part is None else tuple(part[i].tolist()) for part in points)
        rate, limit, size, full_cost = (float(part[i]) for part in terms)
        made.append(Bid(kind.name.lower(), rate, limit, size, full_cost, grid, values))
    return tuple(made)


def describe(
    mechanism: Auction, name: str, bids: BidProfile, budget: float, owner: int, reports: BidProfile, dimension: str,
    *, seed: int, draws: int,
) -> Example:  # fmt: skip
    """Run truth and lie alone (bids of shape (1, n), reports of one row) and write everything down."""
    trials = Trials(mechanism, bids, np.array([budget]), np.array([owner]), seed=(seed,), draws=draws)
    lying = trials.run(reports)
    seen = trials.profile(reports)
    honest = _result(trials, trials.honest, bids)
    gain = float(lying.utility[0]) - _finite(trials.honest.utility[0])
    return Example(
        mechanism=name,
        bids=plain_bids(bids[0]),
        budget=float(budget),
        owner=owner,
        dimension=dimension,
        lie=plain_bids(seen[0])[owner],
        honest=honest,
        lying=_result(trials, lying, seen),
        gain=gain,
        gain_over_cost=gain / max(float(trials.cost[0]), 1e-300),
        seed=seed,
        draws=draws,
        curve=_curve(trials, reports, dimension),
    )


def _result(trials: Trials, awards: Awards, seen: BidProfile) -> Result:
    rng = np.random.default_rng((*trials.seed, 0, 0))
    outcome = trials.mechanism.run(seen, trials.budget, rng=rng)
    got = (awards.epsilon, awards.payment, awards.participation, awards.utility)
    epsilon, payment, share, utility = (float(part[0]) for part in got)
    others = (tuple(part[0].tolist()) for part in (outcome.epsilon, outcome.payment))
    return Result(epsilon, payment, share, utility, *others)


def _curve(trials: Trials, lie: BidProfile, dimension: str) -> Curve:
    """121 reports on both sides of the truth, reaching past the lie."""
    field = {"value_only": "value", "joint": "all fields"}.get(dimension, dimension)
    truth = trials.truth
    if field == "all fields":  # along the line (in logarithms) from the truth, 0, to the lie, 1, and half as far beyond
        position = np.linspace(-0.5, 1.5, 121)
        ratio = {
            "value": _ratio(lie.valuations.rate, truth.valuations.rate),
            "privacy_budget": _ratio(lie.privacy_budget, truth.privacy_budget),
            "data_size": _ratio(lie.data_size, truth.data_size),
        }
        points = [times(truth, **{name: base**t for name, base in ratio.items()}) for t in position]
    else:
        seen = trials.profile(lie).full_cost[0, trials.owner[0]]
        at = {
            "value": float(seen / max(float(trials.cost[0]), 1e-300)),
            "privacy_budget": float(_ratio(lie.privacy_budget, truth.privacy_budget)),
            "data_size": float(_ratio(lie.data_size, truth.data_size)),
        }[field]
        told, own = lie.valuations.kind[0], truth.valuations.kind[0]
        end = max(2.0, min(1.25 * at, 6.0))
        position = np.unique(np.concatenate([np.linspace(0.0, end, 121), [1.0, min(at, end)]]))
        same_shape = field != "value" or told == own != Kind.TABULATED
        points = [
            times(truth, **{field: t}) if same_shape or at == 0 else times(lie, value=t / at) for t in position.tolist()
        ]
    honest = _finite(trials.honest.utility[0])
    awards = [trials.run(report) for report in points]
    return Curve(
        field,
        tuple(position.tolist()),
        tuple(float(award.utility[0]) - honest for award in awards),
        tuple(float(award.epsilon[0]) for award in awards),
    )


def _finite(utility: float) -> float:
    """An honest owner asked for more than her cap takes no part: worth 0, and reported as a broken rule elsewhere."""
    return float(utility) if np.isfinite(utility) else 0.0


def _ratio(lie: FloatArray, truth: FloatArray) -> float:
    return float(lie[0] / truth[0]) if truth[0] > 0 and lie[0] > 0 else 1.0


def replay(example: Example, mechanism: Auction | None = None) -> Example:
    """Run both auctions again from the numbers alone; a mechanism that is not registered must be given."""
    chosen = auctions.get(example.mechanism) if mechanism is None else mechanism
    profile, lie = example.profile, example.lie
    return describe(
        chosen, example.mechanism, profile[None], example.budget, example.owner, bids_of([lie]), example.dimension,
        seed=example.seed, draws=example.draws,
    )  # fmt: skip


@dataclass(frozen=True)
class Regret:
    """Regret over owners and profiles for one kind of lie. Shares are of profiles, or of owners searched."""

    mean_regret_over_cost: float
    median_regret_over_cost: float
    max_regret_over_cost: float
    regret_over_payment: float  # all gains together over all honest payments together
    profiles_with_gain: float
    owners_with_gain: float


@dataclass(frozen=True)
class SearchLog:
    """Exactly what was searched."""

    strength: str
    profiles: int
    owners_per_profile: int
    misreports_per_owner: int
    misreports: int
    draws: int
    by_search: dict[str, dict[str, int]]  # kind of lie → search → misreports per owner
    by_menu: int = 0  # owners beyond these whose every lie was judged by the menu that she is shown


@dataclass(frozen=True)
class Truthfulness:
    """The verdict's figures (`judged` dimensions together), each dimension alone, the worst case and the search."""

    judged: tuple[str, ...]
    overall: Regret
    by_dimension: dict[str, Regret]
    worst: Example
    search: SearchLog
    profile_regret: tuple[float, ...] = ()  # the largest regret over cost in each profile that was searched


def judged_dimensions(private: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of lie open to an owner with these private fields."""
    single = tuple("value_only" if field == "value" else field for field in FIELDS if field in private)
    return (*single, "joint") if len(single) > 1 else single


@dataclass(frozen=True)
class LieSearch:
    """What is searched, how hard, for lies about what, and with which draws; `step` is told the share done."""

    mechanism: Auction
    name: str
    strength: Strength
    private: tuple[str, ...]
    seed: int
    draws: int
    step: Callable[[float], None] = lambda _: None

    def whom(self, sample: Sample) -> tuple[IntArray, IntArray]:
        """(profile, owner) of all who are searched."""
        rng = np.random.default_rng((self.seed, 101))
        rows, n = sample.bids.shape
        k = min(n, self.strength.owners_per_profile)
        some = np.tile(np.arange(n), (rows, 1)) if k == n else np.sort(rng.random((rows, n)).argpartition(k - 1)[:, :k])
        return np.repeat(np.arange(rows), k), some.ravel()

    def trials(self, sample: Sample, profile: IntArray, owner: IntArray, part: slice) -> Trials:
        """Some of them."""
        rows, seed = profile[part], (self.seed, part.start)
        return Trials(self.mechanism, sample.bids[rows], sample.budget[rows], owner[part], seed=seed, draws=self.draws)


def measure_truthfulness(search: LieSearch, sample: Sample) -> Truthfulness:
    """Search every owner of every profile (a random choice of owners where there are very many)."""
    mechanism = search.mechanism
    if not isinstance(mechanism, ShowsMenus) or search.draws > 1 or "data_size" in search.private:
        return _searched(search, sample)
    searched = np.arange(0, len(sample), min(_EVERY, -(-len(sample) // _LEAST)))
    others = sample[np.setdiff1d(np.arange(len(sample)), searched)] if len(searched) < len(sample) else None
    try:
        exact = 0 if others is None else _settled(search, mechanism, others)
        found = _searched(search, sample[searched], mechanism)
    except NotOnTheMenu:
        return _searched(search, sample)
    return replace(found, search=replace(found.search, by_menu=exact))


def _settled(search: LieSearch, shown: ShowsMenus, sample: Sample) -> int:
    """How many owners get the best of their menus by the truth, and by some lies nothing that is not on it: all."""
    profile, owner = search.whom(sample)
    each = len(owner) // len(sample)
    size = each * max(1, min(_CHUNK_ENTRIES // (each * sample.bids.n), rows_at_once(shown, sample)))
    for part in slices(len(owner), size):
        trials = search.trials(sample, profile, owner, part)
        menus = Menus.of(shown, sample, profile[part], owner[part])
        if (menus.best(trials) > trials.honest.utility + _tolerance(trials)).any():
            raise NotOnTheMenu
        hunt = Hunt(trials, np.random.default_rng((search.seed, 113, part.start)), search.private, menus)
        random_joint(hunt, _SPOT)
    return len(owner)


def _searched(search: LieSearch, sample: Sample, shown: ShowsMenus | None = None) -> Truthfulness:
    """Run every search; where menus are `shown`, see that everything anybody gets is on hers."""
    rows, n = sample.bids.shape
    profile, owner = search.whom(sample)
    k, private = len(owner) // rows, search.private
    joint = tuple(field for field in FIELDS if field in private) if len(private) > 1 else FIELDS

    size = max(1, _CHUNK_ENTRIES // n)
    parts: list[_Settled] = []
    for part in slices(len(owner), size):
        trials = search.trials(sample, profile, owner, part)
        menus = None if shown is None else Menus.of(shown, sample, profile[part], owner[part])
        hunt = Hunt(trials, np.random.default_rng((search.seed, 102, part.start)), joint, menus)
        run_searches(hunt, search.strength)
        parts.append(_settle(hunt))
        search.step(min(part.stop, len(owner)) / len(owner))

    gain = {name: np.concatenate([one.gain[name] for one in parts]) for name in DIMENSIONS}
    cost, payment, tolerance, sound = (
        np.concatenate([getattr(one, field) for one in parts])
        for field in ("cost", "payment", "tolerance", "comparable")
    )
    judged = judged_dimensions(private)
    overall = np.max([gain[dimension] for dimension in judged], axis=0)
    by_search: dict[str, dict[str, int]] = {}
    for (dimension, tried), number in sorted(parts[0].tried.items()):
        by_search.setdefault(dimension, {})[tried] = number
    each = sum(parts[0].tried.values())

    pick = _telling(overall, cost, payment, sound)
    row, who = int(profile[pick]), owner[pick : pick + 1]
    if overall.any():
        # judged goes from simple to joint: a lie about one thing that is almost as good makes the better example
        dimension = next(one for one in judged if gain[one][pick] >= _SIMPLER * overall[pick])
        reports = parts[pick // size].reports[dimension][pick % size : pick % size + 1]
    else:  # differences of a last digit are no lie worth showing: show the truth
        dimension = judged[0]
        reports = Trials(search.mechanism, sample.bids[row : row + 1], sample.budget[row : row + 1], who).truth
    worst = describe(
        search.mechanism, search.name, sample.bids[row : row + 1], float(sample.budget[row]), int(who[0]), reports,
        dimension, seed=search.seed, draws=search.draws,
    )  # fmt: skip
    return Truthfulness(
        judged,
        _regret(overall, cost, payment, tolerance, (rows, k)),
        {name: _regret(gain[name], cost, payment, tolerance, (rows, k)) for name in DIMENSIONS},
        worst,
        SearchLog(search.strength.name, rows, k, each, each * rows * k, search.draws, by_search),
        tuple(np.divide(overall, cost, out=np.zeros_like(cost), where=cost > 0).reshape(rows, k).max(axis=-1).tolist()),
    )


def _telling(overall: FloatArray, cost: FloatArray, payment: FloatArray, sound: NDArray[np.bool_]) -> int:
    """Whose example is shown: the largest gain over cost; where nothing gains, a winner's, to show what lying does."""
    if overall.any():
        return int(np.divide(overall, cost, out=np.zeros_like(overall), where=cost > 0).argmax())
    surplus = payment - cost
    winners = np.flatnonzero((surplus > 0) & (cost > 0) & sound)
    # paid about half as much again as her cost: room to lie, and a critical bid near enough to see
    return int(winners[np.abs(surplus[winners] / cost[winners] - 0.5).argmin()]) if winners.size else 0


@dataclass(frozen=True)
class _Settled:
    """What one chunk leaves behind."""

    gain: dict[str, FloatArray]
    reports: dict[str, BidProfile]
    cost: FloatArray
    payment: FloatArray
    comparable: NDArray[np.bool_]
    tolerance: FloatArray
    tried: Counter[tuple[str, str]]


def _tolerance(trials: Trials) -> FloatArray:
    return np.asarray(TOLERANCE * trials.cost + _ROUNDING * (trials.budget + trials.honest.payment))


def _settle(hunt: Hunt) -> _Settled:
    """Gains that count. Random ones are measured again on fresh draws, since the search picked the luckiest."""
    trials = hunt.trials
    tolerance, gain = _tolerance(trials), {}
    for dimension, best in hunt.best.items():
        gain[dimension] = np.where(best.gain > tolerance, best.gain, 0.0)
        if trials.draws > 1 and gain[dimension].any():
            fresh = np.array([
                trials.run(best.reports, stream=s).utility - trials.run(trials.truth, stream=s).utility
                for s in range(1, 5)
            ])  # fmt: skip
            with np.errstate(invalid="ignore"):  # a lie that oversells in one of the draws is worth −∞: not sure
                sure = fresh.mean(axis=0) > _SURE * fresh.std(axis=0, ddof=1) / np.sqrt(len(fresh)) + tolerance
            gain[dimension] = np.where(sure & (gain[dimension] > 0), fresh.mean(axis=0), 0.0)
    reports = {dimension: best.reports for dimension, best in hunt.best.items()}
    return _Settled(gain, reports, trials.cost, trials.honest.payment, hunt.comparable, tolerance, hunt.tried)


def _regret(
    gain: FloatArray, cost: FloatArray, payment: FloatArray, tolerance: FloatArray, shape: tuple[int, int]
) -> Regret:
    """Owners of no cost at all cannot be measured against it; their gains still count in the shares."""
    measured = cost > 0
    ratio = gain[measured] / cost[measured]
    gains = (gain > tolerance).reshape(shape)
    mean, median, most = (float(f(ratio)) if ratio.size else float("nan") for f in (np.mean, np.median, np.max))
    return Regret(
        mean,
        median,
        most,
        float(gain.sum() / payment.sum()) if payment.sum() > 0 else 0.0,
        float(gains.any(axis=-1).mean()),
        float(gains.mean()),
    )


@dataclass(frozen=True)
class Certificate:
    """Regret over cost of a new profile of `population` exceeds `regret` with probability at most `alpha`."""

    population: str
    search: str
    profiles: int
    alpha: float
    regret: float

    def __str__(self) -> str:
        if not math.isfinite(self.regret):
            return f"{self.profiles} profiles are too few to certify anything at {self.alpha:.0%}"
        return (
            f"in a new profile of {self.population}, {self.search} search finds regret above {self.regret:.3g} of cost "
            f"with probability at most {self.alpha:.0%}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For a weight file; no certificate (∞) is null."""
        values = asdict(self)
        return values | {"regret": self.regret if math.isfinite(self.regret) else None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Certificate:
        """The inverse of `to_dict`."""
        regret = values["regret"]
        known = {name: values[name] for name in ("population", "search", "profiles", "alpha")}
        return cls(**known, regret=math.inf if regret is None else float(regret))


def certify(regrets: FloatArray, *, population: str, search: str, alpha: float = 0.05) -> Certificate:
    """From the largest regret over cost of each held-out profile, shape (profiles,)."""
    if not 0 < alpha < 1:
        raise InvalidInput("alpha", alpha, "a probability between 0 and 1")
    scores = np.sort(np.asarray(regrets, dtype=np.float64).ravel())
    if not scores.size or np.isnan(scores).any():
        raise InvalidInput("regrets", regrets, "a number for every held-out profile, at least one")
    rank = math.ceil((scores.size + 1) * (1 - alpha) * (1 - 1e-12))
    bound = float(scores[rank - 1]) if rank <= scores.size else math.inf
    return Certificate(population, search, int(scores.size), float(alpha), bound)
