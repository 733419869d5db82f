"""What a lie is worth, by hand; and the searches against brute force."""

import numpy as np
import pytest

from flmarket import LINEAR, STEP, BidProfile, Outcome, Valuations, auctions
from flmarket.audit import audit
from flmarket.audit.search import STRENGTHS, Hunt, run_searches
from flmarket.audit.trials import Sample, Trials, crafted_ties, draw, times
from flmarket.errors import InvalidInput


def clients(cost, size=1.0):
    cost = np.atleast_2d(np.asarray(cost, float))
    return BidProfile(Valuations(np.full(cost.shape, int(STEP)), cost / size), 1.0, np.broadcast_to(size, cost.shape))


class TakesAll:
    """Buys everything that is offered and pays 10 each; losers there are none."""

    name = "takes-all"

    def run(self, bids, budget, *, rng=None):
        return Outcome(bids.privacy_budget, np.full(bids.shape, 10.0))


def one_report(trials, *, rate=None, privacy=None, size=None):
    truth = trials.truth
    return BidProfile(
        trials.own if rate is None else Valuations(trials.own.kind, rate),
        truth.privacy_budget if privacy is None else privacy,
        truth.data_size if size is None else size,
    )


def linear_trials(mechanism):
    """One owner of two, 2·α·ε·d = 2·1·0.5·4 = 4 in full."""
    bids = BidProfile(Valuations([[LINEAR, LINEAR]], [[1.0, 1.0]]), 0.5, [[4.0, 4.0]])
    return Trials(mechanism, bids, np.array([100.0]), np.array([0]))


def test_utility_uses_the_truth():
    trials = linear_trials(TakesAll())
    assert trials.honest.utility == pytest.approx([10 - 4])
    # a lower price asked changes nothing about the true cost
    assert trials.run(one_report(trials, rate=0.1)).utility == pytest.approx([6])
    # half the records are sold: half the cost; half the privacy too
    assert trials.run(one_report(trials, size=2.0)).utility == pytest.approx([10 - 2])
    assert trials.run(one_report(trials, privacy=0.25)).utility == pytest.approx([10 - 2])
    # she cannot deliver what she does not have
    assert trials.run(one_report(trials, size=5.0)).utility == [-np.inf]
    assert trials.run(one_report(trials, privacy=0.6)).utility == [-np.inf]


def test_asking_too_much_and_losing_costs_nothing():
    class TakesNone:
        name = "takes-none"

        def run(self, bids, budget, *, rng=None):
            return Outcome(np.zeros(bids.shape), np.full(bids.shape, 1.0))

    trials = linear_trials(TakesNone())
    assert trials.run(one_report(trials, size=50.0, privacy=9.0)).utility == pytest.approx([1.0])


def test_others_are_untouched_and_tables_mix_with_families(rng):
    bids = BidProfile.sample(rng, 7, 5, "flm22-iid")
    owner = rng.integers(0, 5, 7)
    trials = Trials(auctions.get("m1"), bids, bids.full_cost.sum(-1), owner)
    grid = np.tile([0.0, 0.5, 1.0, 2.0], (7, 1))
    values = np.tile([0.0, 1.0, 1.5, 4.0], (7, 1))
    told = Valuations.tabulated(grid, values).scaled(2.0)
    seen = trials.profile(BidProfile(told, trials.true_privacy, trials.true_size))
    at = (np.arange(7), owner)
    np.testing.assert_allclose(seen.valuations.per_record(np.full((7, 5), 0.75))[at], 2.0 * 1.25)
    others = np.ones((7, 5), bool)
    others[at] = False
    np.testing.assert_array_equal(seen.full_cost[others], bids.full_cost[others])


def test_erratum_e3_is_found_exactly():
    """All-in, V = (0.6, 0.65), B = 1: the second displaces the first by any bid below 0.5 and is paid 1."""
    report = audit("all-in", clients([0.6, 0.65]), budget_factor=(0.8, 0.8), private=["value"])
    assert report.truthful.overall.max_regret_over_cost == pytest.approx((1 - 0.65) / 0.65)
    assert report.worst.owner == 1
    assert report.worst.lie.full_cost < 0.6


def test_quick_and_strong_find_what_brute_force_finds(rng):
    """On small auctions a dense sweep of bids finds the best lie about value; so must the searches."""
    sample = draw("jdp", 40, 4, (0.2, 0.9), rng)
    auction = auctions.get("all-in")
    rows, n = sample.bids.shape
    owner = np.tile(np.arange(n), rows)
    bids, budget = sample.bids[np.repeat(np.arange(rows), n)], np.repeat(sample.budget, n)
    trials = Trials(auction, bids, budget, owner)
    best = np.zeros(len(owner))
    for factor in np.geomspace(1e-3, 1e3, 600):
        gain = trials.run(times(trials.truth, value=factor)).utility - trials.honest.utility
        best = np.maximum(best, gain)
    assert (best > 0).any()
    for name in ("quick", "strong"):
        hunt = Hunt(trials, np.random.default_rng(0))
        run_searches(hunt, name)
        assert (hunt.best["value_only"].gain >= best - 1e-9).all()
        assert sum(hunt.tried.values()) >= (500 if name == "strong" else 100)


def test_a_narrow_window_is_found_by_bisection():
    """A mechanism that pays a bonus for bids just below the critical one: a thousandth wide, next to the threshold."""

    class Window:
        name = "window"

        def run(self, bids, budget, *, rng=None):
            price = np.asarray(budget)[..., None] / 3
            wins = bids.full_cost <= price
            bonus = np.where(bids.full_cost > 0.999 * price, 0.01 * price, 0.0)
            return Outcome(np.where(wins, bids.privacy_budget, 0.0), np.where(wins, price + bonus, 0.0))

    report = audit(Window(), "jdp", profiles=20, owners=5, private=["value"], search="quick")
    assert report.truthful.overall.profiles_with_gain > 0.9


def test_ties_are_ties(rng):
    sample = draw("flm22-iid", 50, 6, (0.1, 2.0), rng)
    tied = crafted_ties(sample, rng)
    unit = tied.bids.valuations.per_record(tied.bids.privacy_budget)
    ordered = np.sort(unit, axis=-1)
    assert (np.diff(ordered, axis=-1) == 0).any(axis=-1).all()
    assert (tied.budget == 0).any()
    assert isinstance(tied, Sample)


def test_strengths_are_checked():
    assert set(STRENGTHS) == {"quick", "strong"}
    with pytest.raises(InvalidInput, match="quick, strong"):
        run_searches(Hunt(linear_trials(TakesAll()), np.random.default_rng(0)), "deep")
