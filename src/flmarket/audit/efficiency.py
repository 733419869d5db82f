"""How good is what the buyer gets, against the first best of `first_best`, at fixed budget factors?

The measure is FL-Market's error bound with optimal weights (OptAggr). Profiles in which nobody sells have none: they
are counted, and left out of both means, so that the ratio compares like with like. A mechanism that overspends can
come out *below* the first best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flmarket.audit.first_best import first_best, optimal_bound
from flmarket.audit.profiles import Sample
from flmarket.audit.trials import run_checked
from flmarket.bids import Auction

__all__ = ["FACTORS", "Efficiency", "measure_efficiency"]

FACTORS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Efficiency:
    """Means at one budget factor, over profiles in which somebody sold."""

    budget_factor: float
    profiles: int
    error_bound: float
    first_best: float
    ratio: float  # error_bound / first_best
    nobody_selected: float
    budget_used: float


def measure_efficiency(mechanism: Auction, sample: Sample, *, seed: int) -> tuple[Efficiency, ...]:
    """The mechanism and the first best on the same profiles, whatever their own budgets."""
    bids, count = sample.bids, len(sample)
    total = bids.full_cost.sum(axis=-1)
    # all factors in one call: the solver's effort hardly depends on how many profiles it has
    budgets = np.outer(FACTORS, total)
    many = bids[np.tile(np.arange(count), len(FACTORS))]
    best = first_best(many, budgets.ravel(), rng=np.random.default_rng((seed, 108)))[1].reshape(budgets.shape)
    rows = []
    for factor, budget, least in zip(FACTORS, budgets, best, strict=True):
        outcome = run_checked(mechanism, bids, budget, np.random.default_rng((seed, 107)))
        reached = optimal_bound(outcome.epsilon, bids.data_size)
        valid = np.isfinite(reached)
        here, there = (float(x[valid].mean()) if valid.any() else float("nan") for x in (reached, least))
        used = np.divide(outcome.spent, budget, out=np.zeros(count), where=budget > 0)
        rows.append(Efficiency(factor, count, here, there, here / there, float(1 - valid.mean()), float(used.mean())))
    return tuple(rows)
