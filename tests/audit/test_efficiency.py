"""The first best against an off-the-shelf solver, brute force and the figures of the design."""

from itertools import product

import numpy as np
import pytest
from scipy.optimize import minimize

from flmarket import STEP, BidProfile, Valuations, auctions
from flmarket.audit import audit, first_best
from flmarket.audit.yardsticks import affordable, optimal_bound


def test_single_minded_owners_against_all_subsets(rng):
    size = rng.integers(1, 1000, (12, 8)).astype(float)
    cost = rng.uniform(1, 1000, (12, 8))
    bids = BidProfile(Valuations(np.full((12, 8), int(STEP)), cost / size), 1.0, size)
    budget = rng.uniform(0.15, 0.9, 12) * cost.sum(-1)
    epsilon, bound = first_best(bids, budget)
    best = np.full(12, np.inf)
    for chosen in product((0.0, 1.0), repeat=8):
        subset = np.broadcast_to(chosen, (12, 8))
        fits = (cost * subset).sum(-1) <= budget
        best = np.where(fits, np.minimum(best, optimal_bound(subset, size)), best)
    assert (bids.cost(epsilon).sum(-1) <= budget * (1 + 1e-9)).all()
    assert (bound >= best * (1 - 1e-9)).all()
    assert bound.mean() <= 1.01 * best.mean()


def test_smooth_owners_against_slsqp(rng):
    bids = BidProfile.sample(rng, 6, 4, "flm22-iid")
    budget = rng.uniform(0.1, 0.8, 6) * bids.full_cost.sum(-1)
    epsilon, bound = first_best(bids, budget)
    np.testing.assert_allclose(bound, optimal_bound(epsilon, bids.data_size))
    for row in range(6):
        one, limit, cap = bids[row], budget[row], bids.privacy_budget[row]
        found = []
        for _ in range(12):
            start = cap * rng.uniform(0.02, 0.6, 4)
            result = minimize(
                lambda e, one=one: np.log(float(optimal_bound(np.maximum(e, 1e-6), one.data_size))),
                start,
                method="SLSQP",
                bounds=[(1e-6, c) for c in cap],
                constraints={
                    "type": "ineq",
                    "fun": lambda e, one=one, limit=limit: 1 - one.cost(np.maximum(e, 1e-6)).sum() / limit,
                },
            )
            if one.cost(np.maximum(result.x, 1e-6)).sum() <= limit * (1 + 1e-6):
                found.append(np.exp(result.fun))
        assert bound[row] <= min(found) * 1.01


def test_edges():
    bids = BidProfile(Valuations([0, 1, 2], [1.0, 1.0, 1.0]), [1.0, 1.0, 1.0], [5, 5, 5])
    epsilon, bound = first_best(bids, 1e9)
    np.testing.assert_array_equal(epsilon, bids.privacy_budget)
    assert np.isfinite(bound)
    epsilon, bound = first_best(bids, 0.0)
    assert not epsilon.any()
    assert bound == np.inf


def test_batches_keep_their_shape_and_tables_work(rng):
    table = np.cumsum(rng.random((2, 3, 4, 5)), axis=-1)
    bids = BidProfile(Valuations.tabulated(np.linspace(0.4, 2.0, 5), table), 2.0, rng.integers(1, 9, (2, 3, 4)))
    budget = 0.4 * bids.full_cost.sum(-1)
    epsilon, bound = first_best(bids, budget)
    assert epsilon.shape == (2, 3, 4)
    assert bound.shape == (2, 3)
    assert (bids.cost(epsilon).sum(-1) <= budget * (1 + 1e-9)).all()


def test_affordable_inverts_the_cost(rng):
    bids = BidProfile.sample(rng, 50, 8, "flm22-iid")
    wanted = bids.privacy_budget * rng.random(bids.shape)
    np.testing.assert_allclose(affordable(bids, bids.cost(wanted)), wanted, rtol=1e-9)


@pytest.mark.parametrize(("factor", "reference"), [(0.1, 4.23), (0.2, 2.91), (0.5, 1.78), (1.0, 1.12), (2.0, 1.12)])
def test_reference_values_are_reached(factor, reference):
    bids = BidProfile.sample(np.random.default_rng(0), 200, None, "flm22-iid")
    _, bound = first_best(bids, factor * bids.full_cost.sum(-1))
    assert bound.mean() <= reference * 1.01 + 3 * bound.std() / np.sqrt(200) * (factor >= 1)


def test_no_mechanism_within_budget_beats_it():
    report = audit("all-in-capped", profiles=30, owners=8)
    assert [row.budget_factor for row in report.efficiency] == [0.1, 0.2, 0.5, 1.0, 1.5, 2.0]
    for row in report.efficiency:
        assert row.ratio >= 1 - 1e-9
        assert 0 <= row.nobody_selected <= 1
    bids = BidProfile.sample(np.random.default_rng(3), 60, 8, "flm22-iid")
    budget = 0.4 * bids.full_cost.sum(-1)
    _, bound = first_best(bids, budget)
    for name in auctions.names():
        outcome = auctions.get(name).run(bids, budget, rng=np.random.default_rng(0))
        reached = optimal_bound(outcome.epsilon, bids.data_size)
        assert (bound <= reached * 1.02)[bids.cost(outcome.epsilon).sum(-1) <= budget].all()
