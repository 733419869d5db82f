"""Attacks that need more than one lie: an owner who comes back, an owner with several names, a buyer who splits a task.

* `returning`: 20 rounds, the same owners, budgets fixed before bids. One owner holds back: she shades her asks (always,
  or in the first rounds only), stays away at first or every other round, offers less ε. Rounds are linked, if at all,
  by lifetime caps that everybody has, by unspent money carried on, or by a mechanism that learns (`after`). Under caps
  three remedies are measured too, and what they cost the buyer: a ceiling on the price of a record and unit of ε, a
  number of rounds announced, with an even part of her cap the most that anybody sells in one, and inviting half of the
  owners each round, by lot.
* `sybil`: one owner bids under k names. Either they share her records, which then lose what each name sells; or each
  name holds all her records and 1/k of her ε̄, and the records lose the sum (sequential composition).
* `split-task`: the buyer spends B in k auctions instead of one. An owner who has sold ε₁ offers ε̄ − ε₁ after it, at
  what that adds to her cost, v(ε₁ + ε) − v(ε₁): losses add up. The noise of several releases averages out: what the
  buyer holds is worth one release at √Σε², which is less than Σε.

What holds, whatever the mechanism: in rounds that are not linked, an owner's total is a sum of terms each of which
depends on one round's reports only; so where no lie pays in one round, none pays in twenty. The same is true of a
mechanism that learns from the others' past alone. Everything else here is measured, over a finite family of strategies:
a gain is a gain, finding none is evidence only.

Gains are over the owner's full cost v(ε̄, d), a round. Of the family the best *one* strategy for all owners is chosen on
half of the profiles and measured on the other half, so that its mean is not the winner's luck; `hindsight` is what each
owner would have gained by the best for her, known afterwards (left out where the mechanism draws lots, since it is then
mostly luck). A mechanism that takes ε̄ for public is attacked by owners who do not misstate theirs. What would break
this: others who react. They tell the truth throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from flmarket.auctions.posted import PostedAuction
from flmarket.audit.auditor import private_fields
from flmarket.audit.trials import Sample, ShowsMenus, admitted, called, draw, draws_lots, run_checked, standard_error
from flmarket.audit.yardsticks import optimal_bound
from flmarket.bids import Auction, BidProfile, FloatArray, Guarantees, Kind, Outcome, Valuations
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.files import jsonable

AttackName = Literal["returning", "sybil", "split-task"]
ATTACKS: tuple[AttackName, ...] = ("returning", "sybil", "split-task")
ROUNDS = 20
PROFILES = 40
CAP_ROUNDS = 5.0  # a lifetime cap, in multiples of what an owner offers a round
_TOLERANCE = 1e-9
_SURE = 4.0  # standard errors
_POINTS = 33  # of the tables that say what more ε adds to a cost
_MENUS = 200  # menus whose prices are searched for arbitrage
_CEILING = 0.9  # the share of owners to whom a ceiling would pay the cost of all they have
_INVITED = 0.5


@runtime_checkable
class Learns(Protocol):
    """A mechanism that is another one after a round."""

    def after(self, bids: BidProfile, outcome: Outcome) -> Auction:
        """What is used in the next round, for profiles of shape (rows, n) that stay in their rows."""


@dataclass(frozen=True)
class Gain:
    """What attackers gain over the truth in one setting; means over profiles, and their standard error."""

    setting: str
    strategy: str  # the best one for all
    mean: float
    standard_error: float
    hindsight: float | None
    gaining: float | None  # share of owners with a strategy that gains, in hindsight
    strategies: int
    bound: float | None = None  # the buyer's error bound if all are honest, the harmonic mean over rounds
    spent: float | None = None  # and the share of her money that it took

    @property
    def pays(self) -> bool:
        """Whether anybody was found to gain, beyond rounding and luck."""
        sure = self.mean > _SURE * self.standard_error + _TOLERANCE
        return bool(sure or (self.gaining or 0.0) > 0)


@dataclass(frozen=True)
class Split:
    """What a buyer gets who splits: mean error bounds where somebody sold both ways, and the empty shares."""

    setting: str
    whole: float
    pieces: float
    ratio: float  # mean of pieces / whole
    standard_error: float
    spent_whole: float  # of the budget
    spent_pieces: float
    precision_price: float  # money for a unit of Σ d·ε² in pieces, over that in one
    empty_whole: float
    empty_pieces: float

    @property
    def pays(self) -> bool:
        """Whether splitting gives the buyer a lower error bound, or fills rounds that were empty."""
        return bool(self.ratio < 1 - _SURE * self.standard_error - _TOLERANCE)


@dataclass(frozen=True)
class Attack:
    """One attack on one mechanism."""

    attack: AttackName
    mechanism: str
    population: str
    profiles: int
    owners: int
    seed: int
    gains: tuple[Gain, ...] = ()
    splits: tuple[Split, ...] = ()
    arbitrage: float | None = (
        None  # the least price of two pieces over that of one, on the menus shown; below 1 it pays
    )
    refused: str = ""  # why the mechanism could not be attacked
    holds: str = ""  # what is known without measuring

    @property
    def pays(self) -> bool:
        """Whether the attack was found to pay in any setting."""
        return any(gain.pays for gain in self.gains) or any(split.pays for split in self.splits)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        plain: dict[str, Any] = jsonable(asdict(self) | {"pays": self.pays})
        return plain


def attack(
    name: str,
    mechanism: Auction | str,
    population: str | BidProfile = "flm22-iid",
    profiles: int = PROFILES,
    owners: int | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
    progress: Callable[[float, str], None] | None = None,
) -> Attack:
    """Attack a mechanism in one of `ATTACKS`; `population` is a name or your own profiles."""
    auction, seed = admitted(mechanism, seed), int(seed)
    if name not in ATTACKS:
        raise InvalidInput("attack", name, f"one of {', '.join(ATTACKS)}")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= 1_000:
        raise InvalidInput("rounds", rounds, "a whole number from 1 to 1,000")
    sample = draw(population, profiles, owners, (0.1, 2.0), np.random.default_rng((seed, 120)))
    base = Attack(name, *called(auction, population), len(sample), sample.bids.n, seed)
    note = progress or (lambda share, text: None)
    try:
        if name == "split-task":
            splits = _split_task(auction, sample, seed, note)
            arbitrage = _cheapest_pieces(auction, sample) if isinstance(auction, ShowsMenus) else None
            return replace(base, splits=splits, arbitrage=arbitrage)
        if name == "sybil":
            return replace(base, gains=_sybil(auction, sample, seed, note))
        gains = _returning(auction, sample, rounds, seed, note)
        promise = str(getattr(getattr(auction, "guarantees", None), "truthful", ""))
        proof = "rounds that are not linked: nothing can be gained, as no lie pays in one round"
        holds = proof if promise == "exact" and not isinstance(auction, Learns) else ""
        return replace(base, gains=gains, holds=holds)
    except FlmarketError as error:
        return replace(base, refused=str(error))


def _judged(
    setting: str, names: Sequence[str], utility: FloatArray, sample: Sample, *, lots: bool, rounds: int = 1
) -> Gain:
    """`utility` has shape (strategies, profiles, n), the truth first."""
    cost = np.maximum(sample.bids.full_cost, 1e-300) * rounds
    gain = (utility[1:] - utility[0]) / cost
    gain = np.where(np.abs(gain) > _TOLERANCE, gain, 0.0)
    by_profile = gain.mean(axis=-1)
    half = max(1, by_profile.shape[1] // 2)
    best = int(by_profile[:, :half].mean(axis=-1).argmax())
    rest = by_profile[best, half:] if by_profile.shape[1] > 1 else by_profile[best]
    most = np.maximum(gain.max(axis=0), 0.0)
    hindsight, share = (None, None) if lots else (float(most.mean()), float((most > 0).mean()))
    return Gain(setting, names[best + 1], float(rest.mean()), standard_error(rest), hindsight, share, len(names) - 1)


# ---- an owner who comes back ----


@dataclass(frozen=True)
class Plan:
    """How an owner bids over the rounds: asks times `value` in the first `until`, ε̄ times `privacy`, from `start` on,
    in every `period`-th round."""

    value: float = 1.0
    until: int = 1_000
    privacy: float = 1.0
    start: int = 0
    period: int = 1

    def __str__(self) -> str:
        parts = []
        if self.value != 1:
            parts.append(f"asks × {self.value:.3g}" + (f" in the first {self.until}" if self.until < 1_000 else ""))
        if self.privacy != 1:
            parts.append(f"ε̄ × {self.privacy:.3g}")
        if self.start:
            parts.append(f"skips {self.start}")
        if self.period > 1:
            parts.append(f"one round in {self.period}")
        return ", ".join(parts) or "truth"


def _plans(rounds: int, seed: int, *, private: bool) -> list[Plan]:
    """The family; `private` where she may offer less ε than she has."""
    early = sorted({1, max(1, rounds // 4), 1_000})
    plans = [Plan()]
    plans += [Plan(value=value, until=until) for value in (0.5, 0.8, 1.25, 1.5, 2.0, 4.0) for until in early]
    plans += [Plan(start=start) for start in sorted({1, 2, rounds // 4, rounds // 2, 3 * rounds // 4} - {0})]
    plans += [Plan(privacy=privacy) for privacy in (0.9, 0.75, 0.5, 0.25, 0.1) if private]
    plans += [Plan(period=period) for period in (2, 3, 4) if period <= rounds]
    rng = np.random.default_rng((seed, 121))
    for _ in range(16):
        value, privacy = float(np.exp(rng.normal(0.2, 0.4))), float(rng.uniform(0.15, 1.0)) if private else 1.0
        start, period = int(rng.integers(0, max(rounds // 2, 1))), int(rng.integers(1, 3))
        plans.append(Plan(value, int(rng.choice(early)), privacy, start, period))
    return plans


@dataclass(frozen=True)
class Rules:
    """What links the rounds, and what is done about it."""

    cap: float = math.inf  # everybody's lifetime cap, in multiples of her ε̄
    carry: bool = False  # what a round leaves is added to the next one's budget
    ceiling: float | None = None  # nobody is paid more for a record and unit of ε
    rationed: bool = False  # an even part of her cap is the most that anybody sells in one round
    invited: float = 1.0  # this share of the owners, by lot, is in a round


@dataclass(frozen=True)
class Around:
    """An auction around another one, whose name and promises it has."""

    auction: Auction

    @property
    def name(self) -> str:
        """Of the auction."""
        return self.auction.name

    @property
    def guarantees(self) -> Guarantees:
        """Of the auction."""
        return self.auction.guarantees

    @property
    def pays_losers(self) -> bool:
        """Whether the auction does, which a market has to know."""
        return bool(getattr(self.auction, "pays_losers", False))


@dataclass(frozen=True)
class Ceiling(Around):
    """An auction that pays at most `price` for a record and unit of ε: dearer bids are out, dearer payments are cut.

    Where a bid is one ask for everything, this is a reserve price and keeps the auction's promises. A menu is cut by
    itself (`PostedAuction.ceiling`), so that owners choose from what they really get.
    """

    price: float

    def run(self, bids: BidProfile, budget: ArrayLike, *, rng: np.random.Generator | None = None) -> Outcome:
        """Clear, and see to it that the ceiling holds."""
        fits = bids.full_cost <= self.price * bids.privacy_budget * bids.data_size
        seen = BidProfile(bids.valuations, bids.privacy_budget * fits, bids.data_size * fits)
        found = self.auction.run(seen, budget, rng=rng)
        payment = np.minimum(found.payment, self.price * found.epsilon * bids.data_size)
        sells = payment >= bids.cost(found.epsilon)
        return replace(found, epsilon=np.where(sells, found.epsilon, 0.0), payment=np.where(sells, payment, 0.0))


def at_most(auction: Auction, price: float) -> Auction:
    """The auction with a ceiling on what it pays for a record and unit of ε."""
    return replace(auction, ceiling=price) if isinstance(auction, PostedAuction) else Ceiling(auction, price)


def _returning(
    auction: Auction, sample: Sample, rounds: int, seed: int, note: Callable[[float, str], None]
) -> tuple[Gain, ...]:
    plans = _plans(rounds, seed, private="privacy_budget" in private_fields(auction))
    lots = draws_lots(auction, sample[:20], 0, 1)
    bids, total = sample.bids, sample.bids.full_cost.sum(axis=-1)
    # the calendar of budgets, drawn before anybody bids
    varied = np.random.default_rng((seed, 122)).uniform(0.1, 2.0, (rounds, len(sample))) * total
    even = np.broadcast_to(varied.mean(axis=0), varied.shape)
    records = bids.privacy_budget * bids.data_size
    ceiling = float(np.quantile(bids.full_cost[records > 0] / records[records > 0], _CEILING))
    settings = (
        ("rounds not linked", varied, Rules()),
        ("lifetime caps, budgets vary", varied, Rules(CAP_ROUNDS)),
        ("lifetime caps, even calendar", even, Rules(CAP_ROUNDS)),
        ("unspent money carried on", varied, Rules(carry=True)),
        ("caps, a price ceiling", varied, Rules(CAP_ROUNDS, ceiling=ceiling)),
        ("caps, rounds announced", varied, Rules(CAP_ROUNDS, rationed=True)),
        ("caps, half invited by lot", varied, Rules(CAP_ROUNDS, invited=_INVITED)),
    )
    found = []
    for at, (setting, calendar, rules) in enumerate(settings):
        utility, bound, spent = [], math.nan, math.nan
        # lots fall alike for every strategy; where there are none, all are played at once
        groups = [[plan] for plan in plans] if lots else [plans]
        for step, group in enumerate(groups):
            note((at + step / len(groups)) / len(settings), setting)
            played, honest = play(auction, bids, calendar, group, rules, seed)
            if step == 0:
                bound, spent = honest
            utility.append(played)
        names = [str(plan) for plan in plans]
        gain = _judged(setting, names, np.concatenate(utility), sample, lots=lots, rounds=rounds)
        found.append(replace(gain, bound=bound, spent=spent))
    return tuple(found)


def play(
    auction: Auction, bids: BidProfile, calendar: FloatArray, plans: Sequence[Plan], rules: Rules, seed: int = 0
) -> tuple[FloatArray, tuple[float, float]]:
    """Utilities over all rounds, (plans, profiles, n), where each owner in turn follows the plan and all others are
    honest; and of the first plan, the buyer's error bound and share of money spent.

    `calendar` has shape (rounds, profiles). Who has nothing to sell is not there.
    """
    profiles, n = bids.shape
    one = profiles * n
    profile, owner = (np.tile(x, len(plans)) for x in np.divmod(np.arange(one), n))
    many, rows = bids[profile], np.arange(one * len(plans))
    her = (rows, owner)
    value, until, privacy, start, period = (
        np.repeat(np.array(column), one)
        for column in zip(*((p.value, p.until, p.privacy, p.start, p.period) for p in plans), strict=True)
    )
    most = many.privacy_budget * (rules.cap / len(calendar) if rules.rationed else 1.0)
    left, total = rules.cap * many.privacy_budget, np.zeros(rows.size)
    now = auction if rules.ceiling is None else at_most(auction, rules.ceiling)
    purse, precision, spent = np.zeros(rows.size), 0.0, 0.0
    for index, budget in enumerate(calendar):
        offered = many.privacy_budget.copy()
        offered[her] *= privacy * ((index >= start) & ((index - start) % period == 0))
        offered = np.minimum(offered, most) if rules.rationed else np.minimum(offered, left)
        offered = np.where(offered > 1e-9 * many.privacy_budget, offered, 0.0)
        if rules.invited < 1:
            drawn = np.random.default_rng((seed, 126, index)).random((profiles, n)).argsort(axis=-1)
            offered *= (drawn < max(1, round(rules.invited * n)))[profile]
        rate = many.valuations.rate.copy()
        rate[her] *= np.where(index < until, value, 1.0)
        asks = Valuations(many.valuations.kind, rate, grid=many.valuations.grid, values=many.valuations.values)
        seen = BidProfile(asks, offered, np.where(offered > 0, many.data_size, 0.0))
        money = budget[profile] + purse
        outcome = run_checked(now, seen, money, np.random.default_rng((seed, 123, index)))
        gain = np.where(outcome.epsilon > 0, outcome.payment - outcome.participation * many.cost_of(outcome), 0.0)
        total += gain[her]
        released = outcome.epsilon * (outcome.participation > 0)
        left = np.maximum(left - released, 0.0)
        precision += float((1.0 / optimal_bound(released[:one:n], bids.data_size)).mean()) / len(calendar)
        spent += float((outcome.spent[:one:n]).sum() / calendar.sum())
        if rules.carry:
            purse = np.maximum(money - outcome.spent, 0.0)
        if isinstance(now, Learns):
            now = now.after(seen, outcome)
    bound = 1.0 / precision if precision > 0 else math.inf
    return total.reshape(len(plans), profiles, n), (bound, spent)


# ---- several names ----


@dataclass(frozen=True)
class Names:
    """k names that share her records (`first` of them under her own) or, as copies, her ε̄; asks times `value`."""

    count: int = 1
    first: float = 1.0
    copies: bool = False
    value: float = 1.0

    def __str__(self) -> str:
        if self.count == 1:
            return "truth"
        what = (
            "all records and a share of ε̄ each" if self.copies else f"{self.first:.0%} of the records under the first"
        )
        return f"{self.count} names, {what}" + (f", asks of the others × {self.value:g}" if self.value != 1 else "")


_ASKS = (1.0, 0.7, 1.3, 3.0)
_SHARES = ((2, 0.5), (2, 0.9), (2, 0.1), (3, 1 / 3), (5, 0.2))
_FAMILIES = {
    "records shared out": [Names(count, first, False, value) for count, first in _SHARES for value in _ASKS],
    "copies that share ε̄": [Names(count, 1.0, True, value) for count in (2, 3, 5) for value in _ASKS],
}


def _sybil(auction: Auction, sample: Sample, seed: int, note: Callable[[float, str], None]) -> tuple[Gain, ...]:
    found, lots, honest = [], draws_lots(auction, sample[:20], 0, 1), bid_under(auction, sample, Names(), seed=seed)
    for at, (setting, family) in enumerate(_FAMILIES.items()):
        utility = [honest]
        for step, names in enumerate(family):
            note((at + step / len(family)) / len(_FAMILIES), str(names))
            utility.append(bid_under(auction, sample, names, seed=seed))
        found.append(_judged(setting, ["truth", *map(str, family)], np.array(utility), sample, lots=lots))
    return tuple(found)


def bid_under(auction: Auction, sample: Sample, names: Names, *, seed: int = 0) -> FloatArray:
    """Her utility, (profiles, n), where each owner in turn bids under these names and all others are honest."""
    profiles, n = sample.bids.shape
    profile, owner = np.divmod(np.arange(profiles * n), n)
    many = sample.bids[profile]
    her = (np.arange(profiles * n), owner)
    own, cap, size = many.valuations[her], many.privacy_budget[her], many.data_size[her]
    others = names.count - 1
    parts = np.array([names.first, *[(1 - names.first) / max(others, 1)] * others])
    sizes = np.repeat(size[:, None], names.count, axis=1) if names.copies else size[:, None] * parts
    each = cap / names.count if names.copies else cap
    seen = many.with_reports(owner, BidProfile(own, each, sizes[:, 0]))
    if others:
        column = own.reshape((len(size), 1)).broadcast_to((len(size), others)).scaled(names.value)
        seen = BidProfile(
            Valuations.concatenate([seen.valuations, column]),
            np.concatenate([seen.privacy_budget, np.repeat(each[:, None], others, axis=1)], axis=1),
            np.concatenate([seen.data_size, sizes[:, 1:]], axis=1),
        )
    outcome = run_checked(auction, seen, sample.budget[profile], np.random.default_rng((seed, 124)))
    mine = (her[0], np.stack([owner, *(np.full(len(owner), n + k) for k in range(others))]))  # (names, rows)
    epsilon, share = outcome.epsilon[mine], outcome.participation[mine]
    if names.copies:  # the records lose the sum
        cost = size * own.per_record((epsilon * share).sum(axis=0))
    else:
        sold = sizes.T if outcome.records is None else outcome.records[mine]
        cost = (share * sold * own.per_record(epsilon)).sum(axis=0)
    return np.asarray(outcome.payment[mine].sum(axis=0) - cost).reshape(profiles, n)


# ---- a buyer who splits ----


def _split_task(auction: Auction, sample: Sample, seed: int, note: Callable[[float, str], None]) -> tuple[Split, ...]:
    ways = (
        ("two halves", (0.5, 0.5)),
        ("1/4 and 3/4", (0.25, 0.75)),
        ("3/4 and 1/4", (0.75, 0.25)),
        ("four", (0.25,) * 4),
    )
    whole, spent = buy(auction, sample, (1.0,), seed=seed)
    one = optimal_bound(whole, sample.bids.data_size)
    found = []
    for step, (setting, shares) in enumerate(ways):
        note(step / len(ways), setting)
        pieces, paid = buy(auction, sample, shares, seed=seed)
        more = optimal_bound(pieces, sample.bids.data_size)
        both = np.isfinite(one) & np.isfinite(more)
        ratio = more[both] / one[both]
        precision = [(sample.bids.data_size * np.square(epsilon)).sum() for epsilon in (whole, pieces)]
        price = (paid.sum() / precision[1]) / (spent.sum() / precision[0]) if min(precision) > 0 else float("nan")
        money = np.maximum(sample.budget, 1e-300)
        bounds = (_mean(one[both]), _mean(more[both]), _mean(ratio), standard_error(ratio))
        used = (_mean(spent / money), _mean(paid / money), float(price))
        empty = (float(1 - np.isfinite(one).mean()), float(1 - np.isfinite(more).mean()))
        found.append(Split(setting, *bounds, *used, *empty))
    return tuple(found)


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if values.size else float("nan")


def buy(auction: Auction, sample: Sample, shares: Sequence[float], *, seed: int = 0) -> tuple[FloatArray, FloatArray]:
    """Spend the budgets in these shares, one auction after the other: √Σε² of every owner, and all money paid."""
    bids, sold = sample.bids, np.zeros(sample.bids.shape)
    squares, paid = np.zeros(bids.shape), np.zeros(len(sample))
    for index, share in enumerate(shares):
        left = np.maximum(bids.privacy_budget - sold, 0.0)
        left = np.where(left > 1e-9 * bids.privacy_budget, left, 0.0)
        seen = BidProfile(marginal(bids.valuations, sold, left), left, bids.data_size)
        outcome = run_checked(auction, seen, share * sample.budget, np.random.default_rng((seed, 125, index)))
        released = outcome.epsilon * (outcome.participation > 0)
        sold, squares, paid = sold + released, squares + np.square(released), paid + outcome.spent
    return np.sqrt(squares), paid


def marginal(valuations: Valuations, sold: FloatArray, left: FloatArray) -> Valuations:
    """What more ε adds to the value of what is lost already: the same family where nothing is, else a table."""
    if not sold.any():
        return valuations
    grid = left[..., None] * np.linspace(0.0, 1.0, _POINTS)
    lifted = valuations.reshape((*sold.shape, 1))
    values = np.maximum.accumulate(lifted.per_record(sold[..., None] + grid) - lifted.per_record(sold[..., None]), -1)
    some = sold > 0
    if valuations.grid is not None:  # tables stay tables: all of one length
        return Valuations(np.full(sold.shape, int(Kind.TABULATED)), np.ones(sold.shape), grid=grid, values=values)
    kind, rate = np.where(some, int(Kind.TABULATED), valuations.kind), np.where(some, 1.0, valuations.rate)
    return Valuations(kind, rate, grid=grid * some[..., None], values=values * some[..., None])


def _cheapest_pieces(auction: ShowsMenus, sample: Sample) -> float:
    few = sample[: max(1, _MENUS // sample.bids.n)]
    epsilon, payment = auction.menus(few.bids, few.budget)
    return cheapest_pieces(epsilon, payment.reshape(-1, epsilon.size))


def cheapest_pieces(epsilon: FloatArray, price: FloatArray) -> float:
    """The least of (p(a) + p(b)) / p(ε) over menus, (menus, items), and a² + b² ≥ ε²: below 1, pieces are cheaper.

    Releases at a and b averaged by their precision are as good as one at √(a² + b²) (Li, Li, Miklau, Suciu 2013 call
    prices without such pairs arbitrage-free): prices must be subadditive in ε².
    """
    least = math.inf
    for item in range(1, epsilon.size):
        rest = np.sqrt(np.maximum(epsilon[item] ** 2 - np.square(epsilon[:item]), 0.0))
        other = np.minimum(epsilon.searchsorted(rest * (1 - 1e-12)), item)
        pieces = (price[:, :item] + price[:, other]).min(axis=-1)
        known = price[:, item] > 0
        if known.any():
            least = min(least, float((pieces[known] / price[known, item]).min()))
    return least


__all__ = ["ATTACKS", "Attack", "Gain", "Learns", "Names", "Plan", "Split", "attack", "bid_under", "buy", "play"]
