"""Is anybody paid less than her cost, asked for more than her cap, or the buyer charged more than the budget?

Judged on honest bids, on many random profiles and on crafted ones with ties. An `Outcome` states expected payments and
probabilities of taking part; the rules must hold for those, in every draw of a mechanism that draws random numbers.
"Realised" asks what happens in the round itself: an owner who takes part gets payment / participation and bears the
whole cost, and in the worst case everybody who may take part does.
"""

from dataclasses import dataclass

import numpy as np

from flmarket.audit.trials import Sample, Trials, run_checked
from flmarket.bids import Auction, BidProfile, FloatArray, Outcome

TOLERANCE = 1e-9
_CHUNK_ENTRIES = 2_000_000


@dataclass(frozen=True)
class Rationality:
    """Owners paid below cost. `worst` is the lowest utility over full cost, 0 if nobody loses."""

    violations: int
    crafted_violations: int  # of these, in crafted profiles
    owners_checked: int
    profiles_with_violation: float  # share of the random profiles
    worst: float
    mean_loss_over_cost: float
    realised_violations: int
    realised_worst: float
    over_cap: int  # owners awarded more than their privacy budget
    worst_over_cap: float  # awarded ε over ε̄, at most 1 if nobody


@dataclass(frozen=True)
class BudgetUse:
    """Profiles that cost more than the budget. Ratios are spending over budget."""

    violations: int
    crafted_violations: int
    profiles_checked: int
    profiles_over: float  # share of the random profiles
    worst_ratio: float
    mean_ratio: float
    realised_violations: int
    realised_worst_ratio: float


@dataclass
class Tally:
    """Everything counted so far, over chunks, draws, random and crafted profiles."""

    below_cost: int = 0
    realised_below_cost: int = 0
    owners: int = 0
    profiles: int = 0
    profiles_below_cost: int = 0
    loss: float = 0.0
    worst: float = 0.0
    realised_worst: float = 0.0
    over_cap: int = 0
    worst_over_cap: float = 0.0
    over_budget: int = 0
    realised_over_budget: int = 0
    worst_ratio: float = 0.0
    realised_worst_ratio: float = 0.0
    ratio: float = 0.0

    def add(self, bids: BidProfile, budget: FloatArray, outcome: Outcome) -> None:
        """Count one batch of outcomes."""
        cost, part, pay = bids.cost_of(outcome), outcome.participation, outcome.payment
        full = bids.full_cost
        slack = TOLERANCE * full
        utility = pay - part * cost
        realised = np.where(part > 0, np.divide(pay, part, out=np.zeros_like(pay), where=part > 0) - cost, 0.0)
        below = utility < -slack
        self.below_cost += int(below.sum())
        self.realised_below_cost += int((realised < -slack).sum())
        self.owners += pay.size
        self.profiles += len(budget)
        self.profiles_below_cost += int(below.any(axis=-1).sum())
        relative = np.divide(utility, full, out=np.minimum(utility, 0.0), where=full > 0)
        self.loss += float(np.maximum(-relative, 0.0).sum())
        self.worst = min(self.worst, float(relative.min()) if below.any() else 0.0)
        if (realised < -slack).any():
            real = np.divide(realised, full, out=np.minimum(realised, 0.0), where=full > 0)
            self.realised_worst = min(self.realised_worst, float(real.min()))

        cap = bids.privacy_budget
        share = np.divide(outcome.epsilon, cap, out=np.where(outcome.epsilon > 0, np.inf, 0.0), where=cap > 0)
        self.over_cap += int((share > 1 + TOLERANCE).sum())
        self.worst_over_cap = max(self.worst_over_cap, float(share.max()))

        spent = outcome.spent
        most = np.divide(pay, part, out=pay.copy(), where=part > 0).sum(axis=-1)
        self.over_budget += int((spent > budget * (1 + TOLERANCE)).sum())
        self.realised_over_budget += int((most > budget * (1 + TOLERANCE)).sum())
        self.worst_ratio = max(self.worst_ratio, float(_ratio(spent, budget).max()))
        self.realised_worst_ratio = max(self.realised_worst_ratio, float(_ratio(most, budget).max()))
        ratio = _ratio(spent, budget)
        self.ratio += float(ratio[np.isfinite(ratio)].sum())


def _ratio(spent: FloatArray, budget: FloatArray) -> FloatArray:
    return np.divide(spent, budget, out=np.where(spent > 0, np.inf, 0.0), where=budget > 0)


def check_rules(
    mechanism: Auction, sample: Sample, crafted: Sample, *, seed: int, draws: int
) -> tuple[Rationality, BudgetUse]:
    """Run the mechanism on honest bids and count."""
    plain, tied = (_count(mechanism, part, seed=seed, draws=draws) for part in (sample, crafted))
    rational = Rationality(
        violations=plain.below_cost + tied.below_cost,
        crafted_violations=tied.below_cost,
        owners_checked=plain.owners + tied.owners,
        profiles_with_violation=plain.profiles_below_cost / plain.profiles,
        worst=min(plain.worst, tied.worst),
        mean_loss_over_cost=plain.loss / plain.owners,
        realised_violations=plain.realised_below_cost + tied.realised_below_cost,
        realised_worst=min(plain.realised_worst, tied.realised_worst),
        over_cap=plain.over_cap + tied.over_cap,
        worst_over_cap=max(plain.worst_over_cap, tied.worst_over_cap),
    )
    budget = BudgetUse(
        violations=plain.over_budget + tied.over_budget,
        crafted_violations=tied.over_budget,
        profiles_checked=plain.profiles + tied.profiles,
        profiles_over=plain.over_budget / plain.profiles,
        worst_ratio=max(plain.worst_ratio, tied.worst_ratio),
        mean_ratio=plain.ratio / plain.profiles,
        realised_violations=plain.realised_over_budget + tied.realised_over_budget,
        realised_worst_ratio=max(plain.realised_worst_ratio, tied.realised_worst_ratio),
    )
    return rational, budget


def _count(mechanism: Auction, sample: Sample, *, seed: int, draws: int) -> Tally:
    tally, size = Tally(), max(1, _CHUNK_ENTRIES // sample.bids.n)
    for start in range(0, len(sample), size):
        part = sample[start : start + size]
        for draw in range(draws):
            rng = np.random.default_rng((seed, 103, start, draw))
            tally.add(part.bids, part.budget, run_checked(mechanism, part.bids, part.budget, rng))
    return tally


_SCALE = 1024.0
_AGREE = 1e-6
_LARGEST_FACTOR = 1e6


@dataclass(frozen=True)
class Structure:
    """Shares lie between 0 and 1; None means that the question does not apply.

    Properties that explain why a mechanism is truthful or not, and how it treats owners. None is a promise by itself.

    * **monotone**: bidding less (the valuation multiplied by a factor below 1) never lowers the privacy loss awarded.
    * **critical payment**: a winner is paid the highest bid with which she would still win, found by bisection. With
      monotonicity and unpaid losers, this *is* truthfulness in value for owners who sell everything or nothing (Myerson
      1981); asked only of mechanisms that award ε̄ or 0.
    * **permutation equivariance**: reordering the owners reorders the outcome. Random profiles have no ties, which a
      rule must break somehow.
    * **scale invariance**: all valuations and the budget times 1024 gives the same ε and 1024 times the payments.
    * **envy, per record**: owner i envies j if selling her own d_i records on j's terms, at privacy loss ε_j for
      p_j/d_j a record, would be better for her at her own valuation than her own outcome: (d_i/d_j)·p_j − d_i·v_i(ε_j)
      > u_i. j's terms are only open to her if ε_j ≤ ε̄_i. The stricter **envy, whole contract** compares p_j −
      d_i·v_i(ε_j) with u_i, whatever the sizes; it means something only among owners of equal size.
    """

    profiles: int
    monotone: float | None  # share of owners whom no tried lower bid made sell less
    critical_payment: float | None  # share of winners paid their critical bid
    always_winning: float | None  # share of winners with no critical bid: they win at any bid tried
    permutation_equivariant: float | None  # share of profiles
    scale_invariant: float | None  # share of profiles
    envy_per_record: float  # share of profiles in which somebody envies
    envy_whole_contract: float
    losers_paid: float  # share of profiles
    budget_used: float  # mean of spending / budget
    nobody_selected: float  # share of profiles
    all_or_nothing: bool  # every award is ε̄ or 0


def measure_structure(
    mechanism: Auction, sample: Sample, *, seed: int, randomised: bool, owners_per_profile: int = 4
) -> Structure:
    """Measure every property on these profiles; for lower bids and critical bids, on a few owners of each."""
    bids, budget = sample.bids, sample.budget
    outcome = run_checked(mechanism, bids, budget, _rng(seed))
    share = np.divide(outcome.epsilon, bids.privacy_budget, out=np.zeros(bids.shape), where=bids.privacy_budget > 0)
    whole = bool((np.minimum(np.abs(share), np.abs(share - 1)) <= TOLERANCE).all())
    full_participation = bool(np.isin(outcome.participation, (0.0, 1.0)).all())
    rng = np.random.default_rng((seed, 104))

    k = min(bids.n, owners_per_profile)
    owner = rng.random(bids.shape).argpartition(k - 1, axis=-1)[:, :k].ravel()
    row = np.repeat(np.arange(len(sample)), k)
    trials = Trials(mechanism, bids[row], budget[row], owner, seed=(seed, 105))
    critical, always = _critical(trials) if whole and full_participation and not randomised else (None, None)
    per_record, contract = envy(bids, outcome)
    monotone, reordered = _monotone(trials, rng), None
    if not randomised:
        at = (np.arange(len(budget))[:, None], rng.random(bids.shape).argsort(axis=-1))
        moved = run_checked(mechanism, bids[at], budget, _rng(seed))
        reordered = _same(moved, outcome.epsilon[at], outcome.payment[at], budget)
    larger = BidProfile(bids.valuations.scaled(_SCALE), bids.privacy_budget, bids.data_size)
    scaled = run_checked(mechanism, larger, budget * _SCALE, _rng(seed))
    return Structure(
        profiles=len(sample),
        monotone=monotone,
        critical_payment=critical,
        always_winning=always,
        permutation_equivariant=reordered,
        scale_invariant=_same(scaled, outcome.epsilon, outcome.payment * _SCALE, budget * _SCALE),
        envy_per_record=per_record,
        envy_whole_contract=contract,
        losers_paid=float(((outcome.payment > TOLERANCE * budget[:, None]) & ~outcome.winners).any(axis=-1).mean()),
        budget_used=float(np.divide(outcome.spent, budget, out=np.zeros(len(budget)), where=budget > 0).mean()),
        nobody_selected=float((~outcome.winners.any(axis=-1)).mean()),
        all_or_nothing=whole,
    )


def _rng(seed: int) -> np.random.Generator:
    """The same draws for every run that is compared."""
    return np.random.default_rng((seed, 106))


def _monotone(trials: Trials, rng: np.random.Generator) -> float:
    kept = np.ones(len(trials.rows), dtype=bool)
    for factor in (0.0, 0.5, 0.9, 0.99, rng.random(len(kept)), rng.random(len(kept))):
        award = trials.run(trials.truth.times(value=factor))
        kept &= award.epsilon >= trials.honest.epsilon * (1 - TOLERANCE)
    return float(kept.mean())


def _critical(trials: Trials) -> tuple[float | None, float | None]:
    wins = trials.honest.wins & (trials.cost > 0)
    if not wins.any():
        return None, None
    low, high = np.ones(len(wins)), np.full(len(wins), _LARGEST_FACTOR)
    unbounded = trials.run(trials.truth.times(value=high)).wins
    for _ in range(60):
        middle = np.sqrt(low * high)
        still = trials.run(trials.truth.times(value=middle)).wins
        low, high = np.where(still, middle, low), np.where(still, high, middle)
    asked = wins & ~unbounded
    agree = np.isclose(low * trials.cost, trials.honest.payment, rtol=_AGREE, atol=0)
    always = float((wins & unbounded).sum() / wins.sum())
    return (float(agree[asked].mean()) if asked.any() else None), always


def _same(one: Outcome, epsilon: FloatArray, payment: FloatArray, budget: FloatArray) -> float:
    slack = TOLERANCE * budget[:, None]
    same = np.isclose(one.epsilon, epsilon, rtol=1e-6, atol=1e-9)
    same &= np.abs(one.payment - payment) <= 1e-6 * np.abs(payment) + slack
    return float(same.all(axis=-1).mean())


def envy(bids: BidProfile, outcome: Outcome) -> tuple[float, float]:
    """Shares of profiles with envy; owners i along axis -2, the envied j along axis -1."""
    n, shape = bids.n, bids.shape
    utility = (outcome.payment - outcome.participation * bids.cost_of(outcome))[..., None]
    slack = (TOLERANCE * bids.full_cost)[..., None]
    per_record, contract = np.zeros(shape[0], dtype=bool), np.zeros(shape[0], dtype=bool)
    size = bids.data_size
    for j in range(n):
        theirs = outcome.epsilon[:, j : j + 1]
        open_to = (theirs <= bids.privacy_budget * (1 + TOLERANCE))[..., None]
        cost = (outcome.participation[:, j : j + 1] * bids.cost(np.broadcast_to(theirs, shape)))[..., None]
        pay = outcome.payment[:, j : j + 1, None]
        fair = np.divide(size, size[:, j : j + 1], out=np.zeros(shape), where=size[:, j : j + 1] > 0)[..., None] * pay
        per_record |= (open_to & (fair - cost > utility + slack)).any(axis=(-2, -1))
        contract |= (open_to & (pay - cost > utility + slack)).any(axis=(-2, -1))
    return float(per_record.mean()), float(contract.mean())
