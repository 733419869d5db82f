"""Mechanisms with a known truth, and cheats with one rule broken, for the auditor to find out."""

from types import SimpleNamespace

import numpy as np
import pytest

from flmarket import EXACT, Guarantees, Outcome, auctions

VALUE_ONLY = Guarantees(EXACT, EXACT, EXACT, "tests", "privacy budget and data size are not private")


class SecondPrice:
    """The cheapest owner (by full cost) sells everything for the second lowest cost, if the budget pays that."""

    name = "second-price"
    guarantees = VALUE_ONLY

    def run(self, bids, budget, *, rng=None):
        cost = bids.full_cost
        ordered = np.sort(cost, axis=-1)
        price = ordered[..., 1]
        wins = np.zeros(cost.shape, dtype=bool)
        np.put_along_axis(wins, cost.argmin(axis=-1)[..., None], True, axis=-1)
        wins &= (price <= np.asarray(budget))[..., None]
        return Outcome(np.where(wins, bids.privacy_budget, 0.0), np.where(wins, price[..., None], 0.0))


class KthPrice:
    """The k cheapest owners sell for the (k+1)-th lowest cost each, if the budget pays for k of those."""

    name = "kth-price"
    guarantees = VALUE_ONLY

    def __init__(self, k=3):
        self.k = k

    def run(self, bids, budget, *, rng=None):
        cost = bids.full_cost
        order = cost.argsort(axis=-1, kind="stable")
        price = np.take_along_axis(cost, order[..., self.k : self.k + 1], axis=-1)
        wins = np.zeros(cost.shape, dtype=bool)
        np.put_along_axis(wins, order[..., : self.k], True, axis=-1)
        wins &= self.k * price <= np.asarray(budget)[..., None]
        return Outcome(np.where(wins, bids.privacy_budget, 0.0), np.where(wins, price, 0.0))


class Cheat:
    """M1 with one rule broken."""

    guarantees = VALUE_ONLY

    def __init__(self, how):
        self.how, self.name = how, how

    def run(self, bids, budget, *, rng=None):
        honest = auctions.get("m1").run(bids, budget)
        epsilon, payment = honest.epsilon.copy(), honest.payment.copy()
        wins, cost, total = honest.winners, bids.full_cost, np.asarray(budget)
        if self.how == "pay-as-bid":
            payment = np.where(wins, cost, 0.0)
        elif self.how == "peeks":  # a little of owner 0's own bid finds its way into her price
            payment[..., 0] = np.where(wins[..., 0], 0.99 * payment[..., 0] + 0.01 * cost[..., 0], 0.0)
        elif self.how == "overspends":  # in about 1 of 1,000 profiles
            rare = np.modf(total * 7919.0)[0] < 0.001
            payment = np.where(wins & rare[..., None], payment + total[..., None], payment)
        elif self.how == "below cost at ties":
            tied = (cost[..., :, None] == cost[..., None, :]).sum(axis=-1) > 1
            payment = np.where(wins & tied, 0.9 * cost, payment)
        elif self.how == "over the cap":
            epsilon = epsilon * 1.01
            payment = payment * 3
        elif self.how == "pays losers":
            payment = np.where(wins, payment, 1e-3 * total[..., None])
        elif self.how == "favours the first":
            payment[..., 0] *= 1.01
        elif self.how == "takes from the cheapest":  # not monotone: whoever bids lowest is passed over
            lowest = cost == cost.min(axis=-1, keepdims=True)
            epsilon, payment = np.where(lowest, 0.0, epsilon), np.where(lowest, 0.0, payment)
        return Outcome(epsilon, payment)


class Lottery:
    """Each owner is offered a random price between 0 and B/n: truthful whatever is drawn."""

    name = "lottery"
    guarantees = VALUE_ONLY

    def __init__(self, lying_pays=False):
        self.lying_pays = lying_pays

    def run(self, bids, budget, *, rng=None):
        limit = (np.asarray(budget) / bids.n)[..., None]
        price = rng.random(bids.shape) * limit
        wins = bids.full_cost <= price
        pay = 0.5 * price + 0.5 * bids.full_cost if self.lying_pays else price
        return Outcome(np.where(wins, bids.privacy_budget, 0.0), np.where(wins, pay, 0.0))


class Coin:
    """Everybody takes part with probability one half and is paid B/n for it, whatever she bids (if that covers her)."""

    name = "coin"
    guarantees = Guarantees(EXACT, EXACT, EXACT, "tests", "privacy budget and data size are not private")

    def run(self, bids, budget, *, rng=None):
        price = np.broadcast_to((np.asarray(budget) / bids.n)[..., None], bids.shape)
        sells = bids.full_cost <= price
        half = np.where(sells, 0.5, 0.0)
        return Outcome(np.where(sells, bids.privacy_budget, 0.0), half * price, half)


@pytest.fixture(scope="session")
def made():
    return SimpleNamespace(SecondPrice=SecondPrice, KthPrice=KthPrice, Cheat=Cheat, Lottery=Lottery, Coin=Coin)
