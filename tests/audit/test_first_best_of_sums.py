"""The first best where only a sum is seen: what must hold of it, and a problem small enough for a grid."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flmarket.audit.yardsticks import first_best, optimal_bound
from flmarket.bids import BidProfile, Valuations


def test_is_within_budget_attained_and_no_worse_than_the_local_one() -> None:
    bids = BidProfile.sample(np.random.default_rng(2), 20, 8, "flm22-iid")
    budget = 0.4 * bids.full_cost.sum(axis=-1)
    epsilon, bound = first_best(bids, budget, trust="secure-aggregation")
    assert (bids.cost(epsilon).sum(axis=-1) <= budget * (1 + 1e-9)).all()
    assert (epsilon <= bids.privacy_budget * (1 + 1e-12)).all()
    assert bound == pytest.approx(optimal_bound(epsilon, bids.data_size, "secure-aggregation"))
    # the most noise that one owner needs is never more than what all add by themselves
    assert (bound <= first_best(bids, budget)[1] * (1 + 1e-9)).all()


def test_a_grid_finds_nothing_better() -> None:
    rng = np.random.default_rng(4)
    for _ in range(2):
        kind, rate, most = rng.integers(0, 4, 3), rng.uniform(0.5, 1.5, 3), rng.uniform(0.5, 2, 3)
        bids = BidProfile(Valuations(kind, rate), most, [2.0, 3.0, 5.0])
        budget = 0.5 * bids.full_cost.sum()
        _, bound = first_best(bids, budget, trust="secure-aggregation")
        steps = np.array(list(itertools.product(np.linspace(0, 1, 19), repeat=3))) * most
        tiled = [np.broadcast_to(x, steps.shape) for x in (kind, rate, most, bids.data_size)]
        cost = BidProfile(Valuations(tiled[0], tiled[1]), tiled[2], tiled[3]).cost(steps).sum(axis=-1)
        within = cost <= budget
        values = optimal_bound(steps[within], tiled[3][within], "secure-aggregation")
        assert bound <= values.min() * (1 + 1e-3)
