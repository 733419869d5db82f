"""One owner reports something else, all others stay: thousands of such trials in one call of the mechanism.

A row of a batch of trials is a profile and the one owner in it who may lie. Trying a report rewrites her column and
runs all rows at once. Her utility is counted with the truth: the true valuation, and of the records only those she
offered (she sells d' ≤ d of them). An award that takes more privacy than she truly allows, or records that she does
not have, is worth −∞ to her; asking for it without getting it costs nothing.

For a mechanism that draws random numbers, row k sees the same draws whatever is reported (the generator is reseeded for
every report), so that truth and lie are compared on common random numbers; utilities are means over several draws.

Mechanisms that say what each owner may choose from: then every lie is judged at once.

A mechanism may offer `menus(bids, budget) -> (epsilon (items,), payment (rows, n, items))`: what each owner can get by
any report whatsoever, beside nothing for nothing. If that is so, her regret is what the best item of her menu is truly
worth minus what truth got her: exact, no search. Whether it *is* so cannot be taken on the mechanism's word. Every
report that the audit does try (`truthfulness`) must lead to something that is on the menu shown to the truthful owner,
at the price it has there; if one does not, the menu counts for nothing and the search is made in full.

What this would miss: a mechanism whose menus are right on all profiles and lies tried, and wrong on others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from flmarket import auctions, populations
from flmarket.bids import Auction, BidProfile, FloatArray, IntArray, Outcome
from flmarket.errors import InvalidInput

MAX_PROFILES = 1_000_000


@dataclass(frozen=True)
class Sample:
    """Profiles of shape (profiles, n) with a budget each.

    The profiles and budgets that a mechanism is audited on: random ones of a population, and crafted ones with ties.

    A budget is a factor times the sum of the profile's full costs v(ε̄, d), the factor uniform on a range, as in
    FL-Market 2022. Random profiles almost surely have no ties, and rules are often broken exactly there; hence the
    crafted ones. Breaks if a population's full costs are all zero: there is then no scale for a budget.
    """

    bids: BidProfile
    budget: FloatArray

    def __len__(self) -> int:
        return len(self.budget)

    def __getitem__(self, index: slice | IntArray) -> Sample:
        return Sample(self.bids[index], self.budget[index])


def draw(
    population: str | BidProfile, profiles: int, owners: int | None, budget_factor: tuple[float, float], rng: Generator
) -> Sample:
    """Random profiles of a named population; given profiles are taken as they are, repeated up to `profiles`."""
    if isinstance(profiles, bool) or not isinstance(profiles, int | np.integer) or not 1 <= profiles <= MAX_PROFILES:
        raise InvalidInput("profiles", profiles, f"a whole number from 1 to {MAX_PROFILES:,}")
    low, high = budget_factor
    if not 0 <= low <= high < np.inf:
        raise InvalidInput("budget_factor", budget_factor, "two finite numbers 0 ≤ low ≤ high")
    if isinstance(population, BidProfile):
        given = population.flat
        bids = given[np.arange(profiles) % given.shape[0]]
    else:
        bids = populations.get(population).sample(rng, profiles, owners)
    return Sample(bids, rng.uniform(low, high, profiles) * bids.full_cost.sum(axis=-1))


def crafted_ties(sample: Sample, rng: Generator) -> Sample:
    """The same profiles with ties: twins, all alike, equal unit costs, a budget of exactly all costs, a budget of 0."""
    rows, n = sample.bids.shape
    source = np.tile(np.arange(n), (rows, 1))
    size_from = source.copy()
    mode = np.arange(rows) % 5
    first = rng.integers(0, n, rows)
    second = (first + rng.integers(1, max(n, 2), rows)) % n
    twins = np.isin(mode, (0, 3, 4))
    source[twins, second[twins]] = size_from[twins, second[twins]] = first[twins]
    alike = mode == 1
    source[alike] = size_from[alike] = first[alike, None]
    # the same value per record and the same ε̄, each with her own number of records
    source[mode == 2] = first[mode == 2, None]

    at, bids = (np.arange(rows)[:, None], source), sample.bids
    tied = BidProfile(bids.valuations[at], bids.privacy_budget[at], bids.data_size[np.arange(rows)[:, None], size_from])
    budget = np.select([mode == 3, mode == 4], [tied.full_cost.sum(axis=-1), 0.0], sample.budget)
    return Sample(tied, budget)


_ROUNDING = 1e-12


def times(told: BidProfile, *, value: ArrayLike = 1.0, privacy_budget: Any = 1.0, data_size: Any = 1.0) -> BidProfile:
    """The same report with value, privacy budget and data size multiplied."""
    return BidProfile(told.valuations.scaled(value), told.privacy_budget * privacy_budget, told.data_size * data_size)


def merged(where: NDArray[np.bool_], one: BidProfile, other: BidProfile) -> BidProfile:
    """Of two reports, (rows,), the one where that is so and else the other; nothing is checked again."""
    rows = np.arange(len(where))
    both = other[np.stack([rows, rows], axis=-1)].with_reports(np.zeros_like(rows), one)
    return both[rows, np.where(where, 0, 1)]


@dataclass(frozen=True)
class Awards:
    """What the reporting owner of each row gets (of the first draw), and what that is truly worth (mean of draws)."""

    epsilon: FloatArray
    payment: FloatArray
    participation: FloatArray
    utility: FloatArray

    @property
    def wins(self) -> NDArray[np.bool_]:
        """Whether she sells anything."""
        return np.asarray((self.epsilon > 0) & (self.participation > 0))


def admitted(mechanism: Auction | str, seed: int) -> Auction:
    """The mechanism to look at, a registered one by its name; and a look at the seed."""
    auction = auctions.get(mechanism) if isinstance(mechanism, str) else mechanism
    if isinstance(auction, type) or not callable(getattr(auction, "run", None)):
        raise InvalidInput("mechanism", mechanism, "an object with run(bids, budget, rng=None)")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidInput("seed", seed, "a whole number of at least 0")
    return auction


def called(mechanism: Auction, population: str | BidProfile) -> tuple[str, str]:
    """The names of both in a report."""
    name = str(getattr(mechanism, "name", type(mechanism).__name__))
    return name, population if isinstance(population, str) else "given profiles"


def draws_lots(mechanism: Auction, few: Sample, *seeds: tuple[int, ...] | int) -> bool:
    """Whether two runs from these two seeds differ."""
    one, two = (run_checked(mechanism, few.bids, few.budget, np.random.default_rng(seed)) for seed in seeds)
    return not (np.array_equal(one.epsilon, two.epsilon) and np.array_equal(one.payment, two.payment))


def geometric(low: FloatArray, high: FloatArray) -> FloatArray:
    """The point between two in their logarithms; halfway to one that is 0."""
    return np.where(np.minimum(low, high) > 0, np.sqrt(low * high), 0.5 * (low + high))


def bisected(
    fits: Callable[[FloatArray], NDArray[np.bool_]],
    low: FloatArray,
    high: FloatArray,
    steps: int,
    between: Callable[[FloatArray, FloatArray], FloatArray] = lambda low, high: 0.5 * (low + high),
) -> tuple[FloatArray, FloatArray]:
    """Where it stops to fit on the way from `low`, where it does, to `high`: the last point found on either side."""
    for _ in range(steps):
        middle = between(low, high)
        good = fits(middle)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return low, high


def standard_error(values: FloatArray) -> float:
    """Of a mean; 0 of one value alone."""
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0


def run_checked(mechanism: Auction, bids: BidProfile, budget: FloatArray, rng: Generator) -> Outcome:
    """Run somebody's mechanism and see that it answered for every owner."""
    outcome = mechanism.run(bids, budget, rng=rng)
    if not isinstance(outcome, Outcome):
        raise InvalidInput("outcome of run()", type(outcome).__name__, "a flmarket.Outcome")
    if outcome.epsilon.shape != bids.shape:
        raise InvalidInput("outcome of run()", outcome.epsilon.shape, f"the shape of the bids, {bids.shape}")
    return outcome


class Trials:
    """A batch of (profile, owner) pairs against one mechanism."""

    def __init__(
        self,
        mechanism: Auction,
        bids: BidProfile,
        budget: FloatArray,
        owner: IntArray,
        *,
        seed: tuple[int, ...] = (0,),
        draws: int = 1,
    ) -> None:
        """`bids` has shape (rows, n): one row per pair; `owner` says who may lie in each row.

        What these owners report is a profile of shape (rows,), like their `truth`.
        """
        self.mechanism, self.bids, self.budget, self.owner = mechanism, bids, budget, owner
        self.seed, self.draws = seed, draws
        self.rows = np.arange(len(owner))
        at = (self.rows, owner)
        self.truth = bids[at]
        self.own, self.cost = self.truth.valuations, self.truth.full_cost
        self.true_privacy, self.true_size = self.truth.privacy_budget, self.truth.data_size
        self.honest = self.run(self.truth)

    def profile(self, reports: BidProfile) -> BidProfile:
        """The whole profiles as the mechanism sees them under these reports."""
        return self.bids.with_reports(self.owner, reports)

    def run(self, reports: BidProfile, *, stream: int = 0) -> Awards:
        """Award and true utility under these reports; another `stream` gives independent draws."""
        seen, at = self.profile(reports), (self.rows, self.owner)
        total: FloatArray = np.zeros(len(self.rows))
        first: tuple[FloatArray, FloatArray, FloatArray] | None = None
        for draw in range(self.draws):
            rng = np.random.default_rng((*self.seed, stream, draw))
            outcome = run_checked(self.mechanism, seen, self.budget, rng)
            award = outcome.epsilon[at], outcome.payment[at], outcome.participation[at]
            records = reports.data_size if outcome.records is None else outcome.records[at]
            total = total + self.utility(*award, records=records)
            first = first or award
        assert first is not None
        return Awards(*first, utility=total / self.draws)

    def utility(
        self, epsilon: FloatArray, payment: FloatArray, participation: FloatArray, *, records: FloatArray
    ) -> FloatArray:
        """Payment minus the true cost of what is sold; −∞ where more is taken than there is."""
        sold = np.minimum(records, self.true_size)
        worth = payment - participation * sold * self.own.per_record(epsilon)
        taken = (epsilon > 0) & (participation > 0)
        too_much = (epsilon > self.true_privacy * (1 + _ROUNDING)) | (records > self.true_size * (1 + _ROUNDING))
        return np.where(taken & too_much, -np.inf, worth)


_EXACT = 1e-12
_CHUNK_ITEMS = 5_000_000


@runtime_checkable
class ShowsMenus(Auction, Protocol):
    """A mechanism whose outcome for an owner is a choice from a list that her own report cannot move."""

    def menus(self, bids: BidProfile, budget: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Privacy losses, (items,) and rising, and what each is paid for, (rows, n, items)."""


class NotOnTheMenu(Exception):
    """Somebody got, or could have got, what her menu does not say: it is none."""


@dataclass(frozen=True)
class Menus:
    """The menus of the lying owners of a batch of trials: `epsilon` (items,), `payment` (rows, items)."""

    epsilon: FloatArray
    payment: FloatArray

    @classmethod
    def of(cls, mechanism: ShowsMenus, sample: Sample, profile: IntArray, owner: IntArray) -> Menus:
        """Shown to these owners when everybody tells the truth; `profile` rises."""
        first, last = int(profile[0]), int(profile[-1])
        part = sample[first : last + 1]
        epsilon, payment = mechanism.menus(part.bids, part.budget)
        return cls(epsilon, payment[profile - first, owner])

    def best(self, trials: Trials) -> FloatArray:
        """The most that any choice from her menu is truly worth to the owner of each row; nothing is worth 0."""
        own = trials.own.reshape((len(trials.rows), 1))
        cost = trials.true_size[:, None] * own.per_record(self.epsilon)
        allowed = self.epsilon <= trials.true_privacy[:, None]
        return np.asarray(np.where(allowed, self.payment - cost, 0.0).max(axis=-1, initial=0.0))

    def lists(self, trials: Trials, awards: Awards) -> NDArray[np.bool_]:
        """Whether each award is on the menu (or worth −∞ to her, so that nobody cares)."""
        item = np.minimum(self.epsilon.searchsorted(awards.epsilon * (1 - _EXACT)), self.epsilon.size - 1)
        price = self.payment[trials.rows, item]
        same = np.abs(awards.payment - price) <= _EXACT * price
        listed = (np.abs(self.epsilon[item] - awards.epsilon) <= _EXACT * awards.epsilon) & same
        nothing = (awards.epsilon == 0) & (awards.payment == 0)
        return np.asarray(nothing | (listed & (awards.participation == 1)) | np.isneginf(awards.utility))


def rows_at_once(mechanism: ShowsMenus, sample: Sample) -> int:
    """How many profiles to ask for at a time, so that their menus fit in memory."""
    one = sample[:1]
    return max(1, _CHUNK_ITEMS // max(mechanism.menus(one.bids, one.budget)[1].size, 1))
