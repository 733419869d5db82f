"""Attacks worked out by hand on two owners, and planted cheats that must be found."""

import math

import numpy as np
import pytest

from flmarket import EXACT, LINEAR, QUADRATIC, STEP, BidProfile, Guarantees, Outcome, Valuations, auctions
from flmarket.audit import attack
from flmarket.audit.attacks import Ceiling, Names, Plan, Rules, at_most, bid_under, buy, cheapest_pieces, marginal, play
from flmarket.audit.trials import Sample
from flmarket.errors import InvalidInput


def alone(auction, bids, calendar, plan, **rules):
    """Utilities where each owner in turn follows one plan."""
    return play(auction, bids, calendar, [plan], Rules(**rules))[0][0]


def clients(*cost):
    return BidProfile(Valuations([[STEP] * len(cost)], [cost]), 1.0, np.ones((1, len(cost))))


class LastAsk:
    """The first round pays everybody 5, every other what she asked the round before: a price that falls with an ask."""

    name = "last-ask"
    guarantees = Guarantees(EXACT, EXACT, EXACT, "tests", "privacy budget and data size are not private")

    def __init__(self, price=5.0):
        self.price = price

    def run(self, bids, budget, *, rng=None):
        price = np.broadcast_to(self.price, bids.shape)
        wins = (bids.full_cost <= price) & (bids.privacy_budget > 0)
        return Outcome(np.where(wins, bids.privacy_budget, 0.0), np.where(wins, price, 0.0))

    def after(self, bids, outcome):
        return LastAsk(bids.full_cost)


def test_a_price_that_falls_with_the_last_ask_is_found():
    """Costs 1 and 2. Truth: (5 − 1) + 0 and (5 − 2) + 0. Asking twice as much in round 1: one cost more in round 2."""
    bids, calendar = clients(1.0, 2.0), np.full((2, 1), 100.0)
    assert alone(LastAsk(), bids, calendar, Plan()).tolist() == [[4.0, 3.0]]
    assert alone(LastAsk(), bids, calendar, Plan(value=2.0, until=1)).tolist() == [[5.0, 5.0]]
    assert alone(LastAsk(), bids, calendar, Plan(value=2.0)).tolist() == [[5.0, 5.0]]
    assert alone(LastAsk(), bids, calendar, Plan(start=1)).tolist() == [
        [0.0, 0.0]
    ]  # who asks nothing is offered nothing
    found = attack("returning", LastAsk(40.0), clients(1.0, 2.0), rounds=4)
    assert found.gains[0].pays
    assert found.gains[0].mean == pytest.approx((4 - 1) * 3 / 4)  # asks × 4, three rounds of four
    assert not found.holds


def test_an_honest_mechanism_is_not_accused():
    found = attack("returning", "m1", "flm22-iid", profiles=3, owners=4, rounds=3)
    unlinked = found.gains[0]
    assert (unlinked.hindsight, unlinked.gaining, unlinked.pays) == (0.0, 0.0, False)
    assert found.holds


def test_lifetime_caps_make_it_pay_to_wait():
    """M1, two owners alike who can sell once: together they share the budget, alone the second gets all of it."""
    bids, calendar = clients(1.0, 1.0), np.full((2, 1), 6.0)
    m1 = auctions.get("m1")
    assert alone(m1, bids, calendar, Plan(), cap=1.0).tolist() == [[2.0, 2.0]]  # 6 / 2 − 1, then nothing is left
    assert alone(m1, bids, calendar, Plan(start=1), cap=1.0).tolist() == [[5.0, 5.0]]
    assert alone(m1, bids, calendar, Plan(), cap=math.inf).tolist() == [[4.0, 4.0]]


def test_unspent_money_that_is_carried_on():
    """Nobody sells for 0.5; in the second round 1.0 is there, and a price of 1 is a gain of nothing."""
    bids, calendar = clients(1.0, 3.0), np.array([[0.5], [1.5]])
    m1 = auctions.get("m1")
    assert alone(m1, bids, calendar, Plan()).tolist() == [[0.5, 0.0]]
    assert alone(m1, bids, calendar, Plan(), carry=True).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("name", ["posted", "cleared-menu", "all-in"])
def test_strategies_played_together_are_those_played_alone(name):
    rng = np.random.default_rng(3)
    bids, auction = BidProfile.sample(rng, 2, 4, "flm22-iid"), auctions.get(name)
    calendar = rng.uniform(0.2, 1.0, (4, 2)) * bids.full_cost.sum(axis=-1)
    plans = [Plan(), Plan(value=2.0, until=1), Plan(privacy=0.5, start=1), Plan(period=2)]
    for rules in (Rules(), Rules(cap=2.0), Rules(carry=True)):
        together, _ = play(auction, bids, calendar, plans, rules, 0)
        each = [alone(auction, bids, calendar, plan, cap=rules.cap, carry=rules.carry) for plan in plans]
        np.testing.assert_array_equal(together, each)


def test_remedies_against_waiting():
    """The two alike of M1, B = 6 in each of two rounds, who can sell once: waiting pays 5 instead of 2."""
    bids, calendar, m1, both = clients(1.0, 1.0), np.full((2, 1), 6.0), auctions.get("m1"), [Plan(), Plan(start=1)]
    caps, (bound, spent) = play(m1, bids, calendar, both, Rules(cap=1.0), 0)
    assert caps[:, 0].tolist() == [[2.0, 2.0], [5.0, 5.0]]
    assert (bound, spent) == (pytest.approx(2 * 8 * 0.5), 0.5)  # ERR = 8·(¼ + ¼) in one round, none in the other
    ceiling, (_, spent) = play(m1, bids, calendar, both, Rules(cap=1.0, ceiling=2.0), 0)
    assert ceiling[:, 0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert spent == pytest.approx(4 / 12)
    # half of the cap in each round: owners of one cost for any ε are paid for both, and waiting halves that
    rationed, _ = play(m1, bids, calendar, both, Rules(cap=1.0, rationed=True), 0)
    assert rationed[:, 0].tolist() == [[4.0, 4.0], [2.0, 2.0]]
    # one owner a round by lot, alike for all strategies: whoever is drawn has 6 to herself
    lots, _ = play(m1, bids, calendar, both, Rules(invited=0.5), 0)
    assert lots[0].sum() == 10.0
    assert (lots[1] <= lots[0]).all()


def test_a_ceiling_is_a_reserve_price():
    capped, money = at_most(auctions.get("m1"), 1.5), np.array([9.0])
    assert isinstance(capped, Ceiling)
    assert capped.run(clients(1.0, 2.0, 1.4), money).payment.tolist() == [[1.5, 0.0, 1.5]]
    menu = at_most(auctions.get("posted"), 1.5)
    bids = BidProfile.sample(np.random.default_rng(0), 50, 6, "flm22-iid")
    outcome = menu.run(bids, bids.full_cost.sum(axis=-1))
    assert (outcome.payment <= 1.5 * outcome.epsilon * bids.data_size * (1 + 1e-12)).all()
    assert outcome.winners.any()
    best = np.where(bids.privacy_budget[..., None] >= menu.menus(bids, bids.full_cost.sum(axis=-1))[0], 0.0, -np.inf)
    epsilon, price = menu.menus(bids, bids.full_cost.sum(axis=-1))
    worth = bids.valuations.reshape((*bids.shape, 1)).per_record(epsilon) * bids.data_size[..., None]
    most = np.maximum((price - worth + best).max(axis=-1), 0.0)  # her best choice of what she really gets
    np.testing.assert_allclose(bids.utility(outcome), most, atol=1e-9)


def test_two_names_are_paid_twice_by_the_head():
    """FairQuery, costs 1 and 1, B = 4: one name each is paid 2; two names of 1/2 each are paid 4/3 each."""
    sample = Sample(clients(1.0, 1.0), np.array([4.0]))
    fair = auctions.get("fairquery")
    assert bid_under(fair, sample, Names()).tolist() == [[1.0, 1.0]]
    assert bid_under(fair, sample, Names(2, 0.5)) == pytest.approx(np.full((1, 2), 8 / 3 - 1))
    # by the record, M1, two names are paid what one is
    assert bid_under(auctions.get("m1"), sample, Names(2, 0.5)).tolist() == [[1.0, 1.0]]


def test_copies_lose_the_sum():
    """Two copies at ε̄/2: the records lose ε̄, at a linear cost 2·1·1·ε of 2 in all; M1 pays 2 a record."""
    bids = BidProfile(Valuations([[LINEAR, LINEAR]], [[1.0, 1.0]]), 1.0, np.ones((1, 2)))
    m1, sample = auctions.get("m1"), Sample(bids, np.array([6.0]))
    assert bid_under(m1, sample, Names()).tolist() == [[1.0, 1.0]]
    # her copies ask 1 each and win before the other's 2: 3 records at min(6 / 3, ∞)
    assert bid_under(m1, sample, Names(2, 1.0, copies=True)).tolist() == [[4.0 - 2.0] * 2]


class PaysCost:
    """Sells each owner as much as her share of the budget covers and pays just that: no truthful one, but easy."""

    name = "pays-cost"
    guarantees = LastAsk.guarantees

    def run(self, bids, budget, *, rng=None):
        from flmarket.audit.yardsticks import affordable

        money = np.broadcast_to(np.asarray(budget)[..., None] / bids.n, bids.shape)
        epsilon = affordable(bids, money)
        return Outcome(epsilon, bids.cost(epsilon))


def one_owner(kind, rate):
    return BidProfile(Valuations([[kind]], [[rate]]), 2.0, np.ones((1, 1)))


def test_pieces_add_up_in_privacy_but_not_in_precision():
    linear = Sample(one_owner(LINEAR, 0.5), np.array([1.0]))  # ε costs ε
    whole, paid = buy(PaysCost(), linear, (1.0,))
    assert (whole.item(), paid.item()) == (1.0, 1.0)
    halves, paid = buy(PaysCost(), linear, (0.5, 0.5))
    assert halves.item() == pytest.approx(math.sqrt(0.5))  # two releases at ½
    assert paid.item() == pytest.approx(1.0)
    square = Sample(one_owner(QUADRATIC, 1.0), np.array([1.0]))  # ε costs ε²: √½, then what takes it to 1
    halves, paid = buy(PaysCost(), square, (0.5, 0.5))
    assert halves.item() == pytest.approx(math.sqrt(0.5 + (1 - math.sqrt(0.5)) ** 2), rel=1e-3)
    assert paid.item() == pytest.approx(1.0, rel=1e-3)
    found = attack("split-task", PaysCost(), one_owner(LINEAR, 0.5))
    assert found.splits[0].ratio > 1.3
    assert not found.pays


def test_more_privacy_is_charged_from_where_it_stands():
    bids = BidProfile(Valuations([[QUADRATIC, LINEAR]], [[3.0, 1.0]]), 2.0, np.ones((1, 2)))
    more = marginal(bids.valuations, np.array([[1.0, 0.0]]), np.array([[1.0, 2.0]]))
    assert more.per_record(np.array([[1.0, 1.0]])) == pytest.approx(np.array([[3 * (4 - 1), 2.0]]))


def test_prices_cubic_in_epsilon_are_cheaper_in_pieces():
    epsilon = np.geomspace(0.1, 10.0, 241)
    assert cheapest_pieces(epsilon, epsilon[None] ** 3) == pytest.approx(2 * 0.5**1.5, rel=0.02)  # both at ε/√2
    assert cheapest_pieces(epsilon, epsilon[None] ** 2) == pytest.approx(1.0, rel=0.04)
    assert cheapest_pieces(epsilon, epsilon[None]) >= 1.0


def test_a_buyer_who_gains_by_splitting_is_found():
    class Flat(PaysCost):
        """The same ε for any money: small purchases are a bargain."""

        def run(self, bids, budget, *, rng=None):
            epsilon = np.minimum(0.25, bids.privacy_budget)
            return Outcome(epsilon, np.broadcast_to(np.asarray(budget)[..., None] / bids.n, bids.shape))

    found = attack("split-task", Flat(), one_owner(LINEAR, 0.01)).splits
    assert found[0].ratio == pytest.approx(0.5)  # twice ε = ¼: half the error bound of one
    assert found[3].ratio == pytest.approx(0.25)
    assert found[0].pays


def test_names_are_checked():
    with pytest.raises(InvalidInput, match="returning, sybil, split-task"):
        attack("bribe", "m1")
    with pytest.raises(InvalidInput, match="rounds"):
        attack("returning", "m1", rounds=0)


def test_a_mechanism_for_ten_owners_says_so():
    class Ten(PaysCost):
        def run(self, bids, budget, *, rng=None):
            if bids.n != 2:
                raise InvalidInput("bids", bids.n, "2 owners")
            return super().run(bids, budget)

    found = attack("sybil", Ten(), clients(1.0, 1.0))
    assert "2 owners" in found.refused
    assert not found.pays
