"""What makes the audit fast changes nothing that it finds: menus against the whole search, reports against new bids."""

from dataclasses import replace

import numpy as np
import pytest

from flmarket import BidProfile, Outcome, Valuations, auctions
from flmarket.audit import truthfulness
from flmarket.audit.search import STRENGTHS, Hunt, run_searches
from flmarket.audit.trials import Menus, Trials, draw, merged
from flmarket.audit.truthfulness import LieSearch, measure_truthfulness

LOOK = replace(
    STRENGTHS["quick"], factors=(0.0, 0.9, 1.1), family_factors=(0.9,), reshapes=2, bisections=2, random_value=1,
    random_joint=3, refine_rounds=1,
)  # fmt: skip
PRIVATE = ("value", "privacy_budget")


class Rebuilt(Trials):
    """Bids made and checked anew for every report, as one would write it first."""

    def profile(self, reports):
        columns, told = (
            (bids.valuations.kind, bids.valuations.rate, bids.privacy_budget, bids.data_size)
            for bids in (self.bids, reports)
        )
        columns = [column.copy() for column in columns]
        grid, values = np.zeros((*self.bids.shape, 7)), np.zeros((*self.bids.shape, 7))
        for row, owner in enumerate(self.owner):
            for column, said in zip(columns, told, strict=True):
                column[row, owner] = said[row]
            if reports.valuations.grid is not None:
                grid[row, owner], values[row, owner] = reports.valuations.grid[row], reports.valuations.values[row]
        return BidProfile(Valuations(*columns[:2], grid=grid, values=values), *columns[2:])


@pytest.mark.parametrize("name", ["all-in", "m1", "m2", "m2-bf", "posted"])
def test_the_searches_find_the_same_bit_for_bit(name, rng):
    sample = draw("flm22-iid", 3, 4, (0.1, 2.0), rng)
    rows, owner = np.divmod(np.arange(12), 4)
    found = []
    for kind in (Trials, Rebuilt):
        trials = kind(auctions.get(name), sample.bids[rows], sample.budget[rows], owner)
        hunt = Hunt(trials, np.random.default_rng(0))
        run_searches(hunt, LOOK)
        found.append(hunt.best)
    for dimension, fast in found[0].items():
        slow = found[1][dimension]
        np.testing.assert_array_equal(fast.gain, slow.gain)
        np.testing.assert_array_equal(fast.reports.valuations.rate, slow.reports.valuations.rate)
        np.testing.assert_array_equal(fast.reports.privacy_budget, slow.reports.privacy_budget)


def test_an_owner_with_a_table_keeps_it_beside_a_reported_one(rng):
    bids = BidProfile(Valuations.tabulated([0.0, 1.0, 2.0], [[[0.0, 3.0, 4.0]] * 2]), 1.5, [[2.0, 3.0]])[[0, 0]]
    trials = Trials(auctions.get("posted"), bids, np.array([30.0, 30.0]), np.array([0, 1]))
    lie = Valuations.tabulated([[0.0, 0.5, 1.0, 2.0]] * 2, [[0.0, 1.0, 1.0, 9.0]] * 2)
    told = BidProfile(lie, trials.true_privacy, trials.true_size)
    seen = trials.profile(merged(np.array([True, False]), told, trials.truth))
    assert seen.valuations.per_record(np.full((2, 2), 0.5)).tolist() == [[1.0, 1.5], [1.5, 1.5]]
    assert seen.full_cost.tolist() == seen.cost(seen.privacy_budget).tolist()


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(truthfulness, "_LEAST", 5)


def measured(mechanism, sample):
    return measure_truthfulness(LieSearch(mechanism, "x", LOOK, PRIVATE, seed=3, draws=1), sample)


class Hidden:
    """The same auction to somebody who may not see its menus."""

    def __init__(self, auction):
        self.name, self.guarantees, self.run = auction.name, auction.guarantees, auction.run


def test_a_menu_is_what_each_owner_can_choose_from(rng):
    """Buying one item only: an owner to whom all but one ε is worthless gets that one at the menu's price."""
    posted, sample = auctions.get("posted"), draw("flm22-iid", 4, 5, (0.3, 1.5), rng)
    epsilon, payment = posted.menus(sample.bids, sample.budget)
    assert payment.shape == (4, 5, epsilon.size)
    # by brute force: a step valuation of no value sells up to her ε̄', whatever ε̄' she names
    for item in (0, 17, epsilon.size - 1):
        for owner in range(5):
            kind, rate = sample.bids.valuations.kind.copy(), sample.bids.valuations.rate.copy()
            cap = sample.bids.privacy_budget.copy()
            kind[:, owner], rate[:, owner], cap[:, owner] = 4, 0.0, epsilon[item]
            sold = posted.run(BidProfile(Valuations(kind, rate), cap, sample.bids.data_size), sample.budget)
            # prices never fall in ε and she takes the largest of equals
            assert (sold.epsilon[:, owner] == epsilon[item]).all()
            np.testing.assert_array_equal(sold.payment[:, owner], payment[:, owner, item])


def test_menus_settle_what_the_whole_search_finds(rng):
    posted, sample = auctions.get("posted"), draw("flm22-iid", 12, 5, (0.1, 2.0), rng)
    fast, slow = measured(posted, sample), measured(Hidden(posted), sample)
    assert fast.overall == slow.overall
    assert fast.overall.owners_with_gain == 0
    assert fast.search.by_menu + fast.search.profiles * 5 == slow.search.profiles * 5 == 60
    assert fast.search.by_menu == 40


class Moves(Hidden):
    """Shows posted's menus, but what one is paid rises with what one says (for a few of the auctions)."""

    def __init__(self, auction, share):
        super().__init__(auction)
        self.menus, self.honest, self.share = auction.menus, auction.run, share
        self.run = self.cheat

    def cheat(self, bids, budget, *, rng=None):
        sold = self.honest(bids, budget)
        rare = np.modf(np.asarray(budget) * 7919.0)[0] < self.share
        more = np.where(rare[:, None] & sold.winners, 0.05 * bids.cost_of(sold), 0.0)
        return Outcome(sold.epsilon, sold.payment + more)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_menu_that_is_none_is_caught_and_all_is_searched(share, rng):
    sample = draw("flm22-iid", 24, 4, (0.1, 2.0), rng)
    cheat = Moves(auctions.get("posted"), share)
    fast, slow = measured(cheat, sample), measured(Hidden(cheat), sample)
    assert fast == slow
    assert fast.search.by_menu == 0
    assert fast.overall.owners_with_gain > 0


def test_a_choice_that_is_not_the_best_of_the_menu_is_caught(rng):
    posted, sample = auctions.get("posted"), draw("flm22-iid", 24, 4, (0.1, 2.0), rng)

    class Stingy(Hidden):
        def __init__(self):
            super().__init__(posted)
            self.menus = posted.menus

    stingy = Stingy()
    # everybody who says a record is worth more than nothing is sent home
    stingy.run = lambda bids, budget, rng=None: Outcome(*(
        np.where(bids.full_cost > 0, 0.0, part)
        for part in (posted.run(bids, budget).epsilon, posted.run(bids, budget).payment)
    ))  # fmt: skip
    found = measured(stingy, sample)
    assert found.overall.profiles_with_gain > 0.5
    assert found.search.by_menu == 0


def test_what_is_and_is_not_on_a_menu():
    bids = BidProfile(Valuations([[4], [4], [4]], [[1.0], [1.0], [1.0]]), 1.0, np.full((3, 1), 2.0))
    trials = Trials(auctions.get("m1"), bids, np.full(3, 10.0), np.zeros(3, dtype=int))
    menus = Menus(np.array([0.5, 1.0, 2.0]), np.array([[1.0, 3.0, 9.0], [1.0, 1.5, 9.0], [10.0, 10.0, 10.0]]))
    assert menus.best(trials).tolist() == [1.0, 0.0, 8.0]  # a cost of 2; at ε = 2 she sells nothing
    assert menus.lists(trials, trials.honest).tolist() == [False, False, True]  # m1 pays all of 10 for ε = 1
