"""What every registered auction must do, whatever it claims; and what those that claim EXACT must do besides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flmarket import EXACT, BidProfile, Outcome, Valuations, auctions

NAMES = auctions.names()
TOLERANCE = 1e-9


@st.composite
def profiles(draw):
    n = draw(st.integers(1, 7))
    number = st.floats(0.01, 100.0)
    kind = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    rate = draw(st.lists(number, min_size=n, max_size=n))
    privacy = draw(st.lists(st.floats(0.1, 5.0), min_size=n, max_size=n))
    size = draw(st.lists(st.integers(1, 1000), min_size=n, max_size=n))
    bids = BidProfile(Valuations(kind, rate), privacy, size)
    return bids, draw(st.floats(0.0, 2.0)) * float(bids.full_cost.sum())


def broken_rules(auction, bids, budget) -> set[str]:
    """The rules an outcome breaks; also run on planted cheats below."""
    outcome = auction.run(bids, budget)
    broken = set()
    if (outcome.spent > budget * (1 + TOLERANCE)).any():
        broken.add("budget")
    if (bids.utility(outcome) < -TOLERANCE * bids.full_cost).any():
        broken.add("rational")
    if (outcome.epsilon > bids.privacy_budget * (1 + TOLERANCE)).any():
        broken.add("privacy")
    if (outcome.payment[~outcome.winners] > 0).any():
        broken.add("losers paid")
    return broken


@pytest.mark.parametrize("name", NAMES)
@given(case=profiles())
def test_promises_hold(name, case):
    auction, (bids, budget) = auctions.get(name), case
    broken = broken_rules(auction, bids, budget)
    promised = {"privacy", "losers paid"}
    promised |= {"budget"} if auction.guarantees.budget_feasible is EXACT else set()
    promised |= {"rational"} if auction.guarantees.rational is EXACT else set()
    assert not broken & promised


@pytest.mark.parametrize("name", NAMES)
@given(case=profiles(), scale=st.sampled_from([1e-3, 0.5, 8.0, 1e3]))
def test_scale_of_money_does_not_matter(name, case, scale):
    bids, budget = case
    one = auctions.get(name).run(bids, budget)
    scaled = BidProfile(bids.valuations.scaled(scale), bids.privacy_budget, bids.data_size)
    two = auctions.get(name).run(scaled, budget * scale)
    if (one.winners == two.winners).all():  # a tie within rounding may fall either way
        np.testing.assert_allclose(two.payment, one.payment * scale, rtol=1e-6, atol=1e-9 * budget * scale)
    else:
        assert _near_tie(bids, budget)


@pytest.mark.parametrize("name", NAMES)
@given(case=profiles(), data=st.data())
def test_order_of_owners_does_not_matter(name, case, data):
    bids, budget = case
    if name == "posted-private" or _near_tie(bids, budget):
        return  # served as listed; and ties go to the lower index, which a permutation changes
    order = np.array(data.draw(st.permutations(range(bids.n))))
    one, two = auctions.get(name).run(bids, budget), auctions.get(name).run(bids[order], budget)
    np.testing.assert_allclose(two.payment, one.payment[order], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(two.epsilon, one.epsilon[order])


@pytest.mark.parametrize("name", NAMES)
@given(case=profiles(), owner=st.integers(0, 6), factor=st.floats(0.0, 3.0))
def test_exactly_truthful_means_no_lie_about_value_pays(name, case, owner, factor):
    auction, (bids, budget) = auctions.get(name), case
    if auction.guarantees.truthful is not EXACT:
        return
    owner %= bids.n
    lie = np.ones(bids.n)
    lie[owner] = factor
    report = BidProfile(bids.valuations.scaled(lie), bids.privacy_budget, bids.data_size)
    honest = bids.utility(auction.run(bids, budget))[owner]
    assert bids.utility(auction.run(report, budget))[owner] <= honest + TOLERANCE * (bids.full_cost[owner] + budget)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_the_auctions_one_by_one(name, rng):
    bids = BidProfile.sample(rng, 40, 9, "flm22-iid")
    budget = bids.full_cost.sum(-1) * rng.uniform(0.0, 2.0, 40)
    together = auctions.get(name).run(bids, budget)
    for i in range(40):
        alone = auctions.get(name).run(bids[i], budget[i])
        np.testing.assert_allclose(together.payment[i], alone.payment, rtol=1e-12)
        np.testing.assert_allclose(together.epsilon[i], alone.epsilon, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_deep_batches_keep_their_shape(name, rng):
    bids = BidProfile.sample(rng, (3, 4), 5, "jdp")
    outcome = auctions.get(name).run(bids, 1000.0)
    assert outcome.payment.shape == (3, 4, 5)


@pytest.mark.parametrize("name", NAMES)
def test_every_auction_says_where_its_claims_come_from(name):
    auction = auctions.get(name)
    assert auction.name == name
    assert auction.guarantees.source
    assert isinstance(auction, auctions.Auction)


def _near_tie(bids, budget):
    """Whether rounding could change who wins: equal sort keys, or a sum that meets the budget to the last digits."""
    cost, size = bids.full_cost, bids.data_size
    for key in (cost, cost / size, cost / (size * bids.privacy_budget), size):
        ordered = np.sort(key)
        if (np.diff(ordered) <= 1e-9 * ordered[1:]).any():
            return True
    for key, weight in (
        (cost, 1.0),
        (cost / size, size),
        (cost / (size * bids.privacy_budget), size * bids.privacy_budget),
    ):
        order = np.argsort(key)
        taken = np.cumsum(np.broadcast_to(weight, cost.shape)[order])
        if np.isclose(key[order] * taken, budget, rtol=1e-9).any():
            return True
    order = np.argsort(cost / size)
    sums = np.cumsum(cost[order])
    records = np.cumsum(size[order])
    return np.isclose(sums, budget, rtol=1e-9).any() or np.isin(size, records).any() or np.isclose(cost, budget).any()


class Cheat:
    """M1 with one rule broken."""

    name = "cheat"

    def __init__(self, how):
        self.how = how

    def run(self, bids, budget, *, rng=None):
        honest = auctions.get("m1").run(bids, budget)
        epsilon, payment = honest.epsilon.copy(), honest.payment.copy()
        if self.how == "budget":
            payment[honest.winners] += budget + 1
        elif self.how == "rational":
            payment[honest.winners] = 0.5 * bids.full_cost[honest.winners]
        elif self.how == "privacy":
            epsilon[honest.winners] *= 1.01
            payment *= 2
        elif self.how == "losers paid":
            payment[~honest.winners] = 0.01
        return Outcome(epsilon, payment)


@pytest.mark.parametrize("how", ["budget", "rational", "privacy", "losers paid"])
def test_the_checks_catch_a_planted_cheat(how, rng):
    bids = BidProfile.sample(rng, None, 8, "flm22-iid")
    assert how in broken_rules(Cheat(how), bids, 0.5 * float(bids.full_cost.sum()))
