"""Properties that explain why a mechanism is truthful or not, and how it treats owners. None is a promise by itself.

* **monotone**: bidding less (the valuation multiplied by a factor below 1) never lowers the privacy loss awarded.
* **critical payment**: a winner is paid the highest bid with which she would still win, found by bisection. With
  monotonicity and unpaid losers, this *is* truthfulness in value for owners who sell everything or nothing (Myerson
  1981); asked only of mechanisms that award ε̄ or 0.
* **permutation equivariance**: reordering the owners reorders the outcome. Random profiles have no ties, which a rule
  must break somehow.
* **scale invariance**: all valuations and the budget times 1024 gives the same ε and 1024 times the payments.
* **envy, per record**: owner i envies j if selling her own d_i records on j's terms, at privacy loss ε_j for p_j/d_j a
  record, would be better for her at her own valuation than her own outcome: (d_i/d_j)·p_j − d_i·v_i(ε_j) > u_i. j's
  terms are only open to her if ε_j ≤ ε̄_i. The stricter **envy, whole contract** compares p_j − d_i·v_i(ε_j) with u_i,
  whatever the sizes; it means something only among owners of equal size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flmarket.audit.profiles import Sample
from flmarket.audit.trials import Trials, run_checked
from flmarket.bids import Auction, BidProfile, Outcome

__all__ = ["Structure", "envy", "measure_structure"]

FloatArray = NDArray[np.float64]
TOLERANCE = 1e-9
_SCALE = 1024.0
_AGREE = 1e-6
_LARGEST_FACTOR = 1e6


@dataclass(frozen=True)
class Structure:
    """Shares lie between 0 and 1; None means that the question does not apply."""

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
    return Structure(
        profiles=len(sample),
        monotone=_monotone(trials, rng),
        critical_payment=critical,
        always_winning=always,
        permutation_equivariant=None if randomised else _equivariant(mechanism, bids, budget, outcome, rng, seed),
        scale_invariant=_scale_invariant(mechanism, bids, budget, outcome, seed),
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


def _equivariant(
    mechanism: Auction, bids: BidProfile, budget: FloatArray, outcome: Outcome, rng: np.random.Generator, seed: int
) -> float:
    order = rng.random(bids.shape).argsort(axis=-1)
    at = (np.arange(len(budget))[:, None], order)
    moved = run_checked(mechanism, bids[at], budget, _rng(seed))
    return _same(moved, outcome.epsilon[at], outcome.payment[at], budget)


def _scale_invariant(mechanism: Auction, bids: BidProfile, budget: FloatArray, outcome: Outcome, seed: int) -> float:
    larger = BidProfile(bids.valuations.scaled(_SCALE), bids.privacy_budget, bids.data_size)
    scaled = run_checked(mechanism, larger, budget * _SCALE, _rng(seed))
    return _same(scaled, outcome.epsilon, outcome.payment * _SCALE, budget * _SCALE)


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
