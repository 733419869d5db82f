"""An auction as deployed, measured on held-out profiles while it trains: error bound, rounds without a sale, regret.

The lies tried are few and fixed: value, ε̄ and data size scaled alone, and commitments to sell a part for nothing asked.
This is a gauge for early stopping and model choice, not an audit; `flmarket audit` searches much harder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flmarket.aggregation import Aggregation, OptAggr, error_bound
from flmarket.bids import Auction, BidProfile, FloatArray, Valuations

__all__ = ["LIES", "VALUE_LIES", "Deployed", "measure"]

Lie = tuple[float, float, float]  # factors on value, ε̄ and data size
VALUE_LIES: tuple[Lie, ...] = tuple((v, 1.0, 1.0) for v in (0.0, 0.3, 0.7, 0.9, 1.1, 1.4, 2.0))
LIES: tuple[Lie, ...] = (
    *VALUE_LIES[1:],
    *((0.0, e, d) for e in (0.5, 0.75, 1.0) for d in (0.3, 0.5, 0.7, 0.85, 1.0)),
    *((1.0, 1.0, d) for d in (0.5, 0.75, 0.9)),
)


@dataclass(frozen=True)
class Deployed:
    """Means over held-out profiles; `empty` is the share of rounds in which nobody sells (left out of the bound)."""

    bound: float
    empty: float
    regret: float  # best of the lies tried, over full cost
    below_cost: float  # what payments fall short of cost, over full cost
    spent: float


def measure(
    auction: Auction,
    bids: BidProfile,
    budget: FloatArray,
    *,
    lies: Sequence[Lie] = LIES,
    liars: int = 100,
    draws: int = 1,
    rule: Aggregation | None = None,
    seed: int = 0,
) -> Deployed:
    """`bids` (profiles, n); lies are tried in the first `liars` profiles. The bound is OptAggr's, or that of `rule`."""
    outcome = auction.run(bids, budget, rng=np.random.default_rng(seed))
    weights = (OptAggr() if rule is None else rule).weights(outcome.epsilon, bids.data_size)
    bound = error_bound(weights, outcome.epsilon, bids.data_size)
    sold = bound[np.isfinite(bound)]
    utility, cost = bids.utility(outcome), np.maximum(bids.full_cost, 1e-300)
    below = float(np.mean(np.maximum(-utility, 0.0) / cost))
    regret = _regret(auction, bids[:liars], budget[:liars], lies, draws, seed)
    spent = float(np.mean(outcome.spent / np.maximum(budget, 1e-300)))
    return Deployed(float(sold.mean()) if sold.size else float("inf"), 1 - sold.size / bound.size, regret, below, spent)


def _regret(
    auction: Auction, bids: BidProfile, budget: FloatArray, lies: Sequence[Lie], draws: int, seed: int
) -> float:
    rows, n = bids.shape
    profile, owner = np.repeat(np.arange(rows), n), np.tile(np.arange(n), rows)
    many, money, at = bids[profile], budget[profile], (np.arange(rows * n), owner)
    own = many.valuations[at].reshape((rows * n,))

    def utility(value: float, privacy: float, size: float) -> FloatArray:
        rate, eps, records = many.valuations.rate.copy(), many.privacy_budget.copy(), many.data_size.copy()
        rate[at], eps[at], records[at] = rate[at] * value, eps[at] * privacy, records[at] * size
        told = many.valuations
        seen = BidProfile(Valuations(told.kind, rate, grid=told.grid, values=told.values), eps, records)
        total = np.zeros(rows * n)
        for draw in range(draws):
            outcome = auction.run(seen, money, rng=np.random.default_rng((seed, draw)))
            total += outcome.payment[at] - records[at] * own.per_record(outcome.epsilon[at])
        return total / draws

    honest = utility(1.0, 1.0, 1.0)
    best = np.max([utility(*lie) for lie in lies], axis=0)
    return float(np.mean(np.maximum(best - honest, 0.0) / np.maximum(many.full_cost[at], 1e-300)))
