"""Is anybody paid less than her cost, asked for more than her cap, or the buyer charged more than the budget?

Judged on honest bids, on many random profiles and on crafted ones with ties. An `Outcome` states expected payments and
probabilities of taking part; the rules must hold for those, in every draw of a mechanism that draws random numbers.
"Realised" asks what happens in the round itself: an owner who takes part gets payment / participation and bears the
whole cost, and in the worst case everybody who may take part does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flmarket.audit.profiles import Sample
from flmarket.audit.trials import run_checked
from flmarket.bids import Auction, BidProfile, FloatArray, Outcome

__all__ = ["BudgetUse", "Rationality", "Tally", "check_rules"]

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
