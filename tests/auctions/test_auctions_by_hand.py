"""Hand-worked examples, the edges, and what the papers' mechanisms really do."""

import numpy as np
import pytest

from flmarket import STEP, BidProfile, InvalidInput, Valuations, auctions
from flmarket.errors import UnknownName


def clients(cost, size, privacy=1.0):
    """Single-minded owners with these total costs and sizes."""
    return BidProfile(Valuations(STEP, np.asarray(cost, float) / np.asarray(size, float)), privacy, size)


def run(name, cost, size, budget, privacy=1.0):
    return auctions.get(name).run(clients(cost, size, privacy), budget)


def test_m1_by_hand():
    # unit costs 1, 2, 3, 4 for 1, 2, 1, 5 records. m=3: 3 ≤ 12/4; m=4: 4 > 12/9. Price min(12/4, 4) = 3 a record.
    outcome = run("m1", [1, 4, 3, 20], [1, 2, 1, 5], 12)
    np.testing.assert_allclose(outcome.payment, [3, 6, 3, 0])
    np.testing.assert_array_equal(outcome.winners, [True, True, True, False])


def test_m1_price_is_capped_by_the_first_loser():
    # two records at unit cost 1, one owner at 5: with B = 8, 8/2 = 4 a record; the loser's 5 does not bind
    np.testing.assert_allclose(run("m1", [1, 1, 5], [1, 1, 1], 8).payment, [4, 4, 0])
    # with B = 11 two owners win (5 > 11/3) at 11/2 = 5.5, capped by the loser's 5
    np.testing.assert_allclose(run("m1", [1, 1, 5], [1, 1, 1], 11).payment, [5, 5, 0])


def test_all_in_by_hand():
    # weights d·ε̄ = 2, 6, 4; unit values 1, 2, 2.5; B = 20: 2.5 ≥ 20/12? no. Two winners share 20/8 = 2.5 a unit.
    outcome = run("all-in", [2, 12, 10], [2, 3, 4], 20, privacy=[1.0, 2.0, 1.0])
    np.testing.assert_allclose(outcome.payment, [5, 15, 0])
    np.testing.assert_allclose(outcome.epsilon, [1, 2, 0])


def test_fairquery_by_hand():
    # costs 1, 2, 3, 10 and B = 9: k = 3 (3 ≤ 3), price min(9/3, 10) = 3, whatever the sizes
    np.testing.assert_allclose(run("fairquery", [1, 2, 3, 10], [9, 1, 5, 2], 9).payment, [3, 3, 3, 0])


def test_m2_by_hand():
    # densities 10, 2, 1; B = 5: greedy takes costs 1 and 4, then 6 does not fit.
    # Owner 1 has the most records, so she also wins alone unless others ahead of her hold 10 or more. Owner 2 has 8;
    # to stand behind owner 3 as well she would have to bid 10 > B: her critical bid is B = 5.
    outcome = run("m2", [1, 4, 6], [10, 8, 6], 5)
    np.testing.assert_array_equal(outcome.winners, [True, True, False])
    # owner 2: behind owner 1 she fits up to 5 − 1 = 4; owner 3's unit cost 1 would let her bid 8 otherwise
    np.testing.assert_allclose(outcome.payment, [5, 4, 0])
    assert outcome.spent > 5  # critical bids exceed the budget: erratum E8


def test_m2_takes_the_single_largest_owner_if_she_has_more():
    outcome = run("m2", [1, 9], [1, 8], 9)
    np.testing.assert_array_equal(outcome.winners, [False, True])
    np.testing.assert_allclose(outcome.payment, [0, 9])


def test_erratum_e3_all_in_pays_for_a_lie():
    """FL-Market prints All-in as truthful; a loser gains by underbidding and displacing a winner."""
    truth = run("all-in", [0.6, 0.65], [1, 1], 1.0)
    lie = run("all-in", [0.6, 0.5], [1, 1], 1.0)
    assert truth.payment[1] == 0
    assert lie.payment[1] - 0.65 == pytest.approx(0.35)
    # the papers' page's second example: sizes 5, 4, 2, unit values ~0, 1.0, 1.05
    truth = run("all-in", [1e-9, 4.0, 2.1], [5, 4, 2], 10.0)
    lie = run("all-in", [1e-9, 4.0, 1.8], [5, 4, 2], 10.0)
    assert truth.payment[2] == 0
    assert lie.payment[2] == pytest.approx(20 / 7)
    assert lie.payment[2] > 2.1
    # the capped price removes the gain in both
    assert run("all-in-capped", [0.6, 0.5], [1, 1], 1.0).payment[1] <= 0.65
    assert run("all-in-capped", [1e-9, 4.0, 1.8], [5, 4, 2], 10.0).payment[2] <= 2.1


def test_erratum_e8_m2_overspends():
    """JDP prints M2 as budget-balanced; it limits the sum of costs, not of payments."""
    outcome = run("m2", [1.0, 1.0], [1, 1], 2.0)
    np.testing.assert_allclose(outcome.payment, [1.0, 1.0])
    outcome = run("m2", [1.0, 1.0, 8.0], [4, 4, 4], 4.0)
    np.testing.assert_allclose(outcome.payment, [3.0, 3.0, 0.0])  # costs 2 of 4, pays 6
    bids = BidProfile.sample(np.random.default_rng(0), 2000, 8, "jdp")
    budget = bids.full_cost.sum(-1) * np.random.default_rng(1).uniform(0.1, 1.0, 2000)
    ratio = auctions.get("m2").run(bids, budget).spent / budget
    assert (ratio > 1).mean() > 0.8
    assert ratio.max() > 2


@pytest.mark.parametrize("name", ["all-in", "all-in-capped", "m1", "m2", "fairquery"])
class TestEdges:
    def test_zero_budget_buys_nothing(self, name):
        outcome = run(name, [1, 2], [1, 1], 0.0)
        assert not outcome.winners.any()
        assert outcome.spent == 0

    def test_one_owner_who_costs_the_whole_budget(self, name):
        outcome = run(name, [3.0], [7], 3.0)
        np.testing.assert_allclose(outcome.payment, [3.0])

    def test_nobody_affordable(self, name):
        assert not run(name, [5, 6], [1, 1], 4.0).winners.any()

    def test_equal_bids_go_to_the_lower_index(self, name):
        outcome = run(name, [1, 1, 1], [1, 1, 1], 2.0)
        np.testing.assert_array_equal(outcome.winners, [True, True, False])
        np.testing.assert_allclose(outcome.payment, [1, 1, 0])

    def test_owners_with_nothing_to_sell_never_win(self, name):
        bids = BidProfile(Valuations(STEP, 1.0), [1.0, 0.0, 1.0], [3, 3, 0])
        np.testing.assert_array_equal(auctions.get(name).run(bids, 100.0).winners, [True, False, False])
        nobody = BidProfile(Valuations(STEP, 1.0), [0.0, 0.0], [3, 3])
        assert not auctions.get(name).run(nobody, 100.0).winners.any()

    def test_free_owners_are_taken(self, name):
        outcome = run(name, [0.0, 1.0], [1, 1], 10.0)
        assert outcome.winners.all()

    def test_negative_or_undefined_budget_is_refused(self, name):
        for budget in (-1.0, float("nan"), float("inf"), "much", [1.0, 2.0]):
            with pytest.raises(InvalidInput, match="budget"):
                run(name, [1.0], [1], budget)


def test_registry():
    assert {"all-in", "m1", "m2", "fairquery"} <= set(auctions.names())
    with pytest.raises(UnknownName, match="did you mean 'all-in'"):
        auctions.get("allin")
