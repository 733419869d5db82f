import dataclasses

import numpy as np
import pytest

from flmarket import STEP, BidProfile, InvalidInput, Outcome, Valuations, aggregation, auctions
from flmarket.errors import MechanismViolation, SettlementError
from flmarket.ledger import ESCROW, AwardState, MemoryLedger
from flmarket.market import Market, Task

BUDGET = 12_000_000


def market(auction=None, deposit=10 * BUDGET):
    ledger = MemoryLedger()
    ledger.deposit("start", "buyer", deposit)
    return Market(
        task="t",
        auction=auction or auctions.get("m1"),
        aggregation=aggregation.get("conventional"),
        ledger=ledger,
        dimension=2,
    )


def bids():
    # M1 by hand: the first three win at 3 a record (see test_auctions_by_hand)
    return BidProfile(Valuations(STEP, [1.0, 2.0, 3.0, 4.0]), 1.0, [1, 2, 1, 5])


def cleared(shop):
    return shop.clear(0, [7, 8, 9, 10], bids(), BUDGET)


def test_a_round_from_bids_to_settlement():
    shop = market()
    round_ = cleared(shop)
    assert shop.ledger.balance(ESCROW) == 12_000_000
    assert sorted(round_.awards) == [7, 8, 9]
    for owner, update in ((7, [1.0, 0.0]), (8, [0.0, 1.0]), (9, [1.0, 1.0])):
        assert shop.deliver(round_, owner, update)
    record, aggregate = shop.close(round_)
    np.testing.assert_allclose(aggregate, [0.5, 0.75])  # weights 1/4, 2/4, 1/4
    assert [shop.ledger.balance(f"owner-{i}") for i in (7, 8, 9, 10)] == [3_000_000, 6_000_000, 3_000_000, 0]
    assert record.spent_micros == 12_000_000
    assert record.state == (AwardState.POSTED,) * 3 + (None,)
    shop.ledger.verify()


def test_drop_outs_and_bad_updates_are_not_paid_and_do_not_hurt_others():
    shop = market()
    round_ = cleared(shop)
    shop.void(round_, 7, "owner refused")
    assert not shop.deliver(round_, 8, [np.nan, 1.0])
    assert shop.deliver(round_, 9, [2.0, 4.0])
    record, aggregate = shop.close(round_)
    np.testing.assert_allclose(aggregate, [2.0, 4.0])
    assert record.state == (AwardState.VOIDED, AwardState.VOIDED, AwardState.POSTED, None)
    assert "not finite" in record.reason[1]
    assert shop.ledger.balance("buyer") == 10 * BUDGET - 3_000_000
    assert record.delivered.tolist() == [False, False, True, False]


@pytest.mark.parametrize("update", [[1.0], [[1.0, 2.0]], [1.0, np.inf], "weights", None, [object(), 1.0]])
def test_every_kind_of_bad_update_is_voided(update):
    shop = market()
    round_ = cleared(shop)
    assert not shop.deliver(round_, 7, update)
    assert shop.ledger.award(round_.awards[7]).state is AwardState.VOIDED


def test_silence_expires_and_an_empty_round_trains_nothing():
    shop = market()
    record, aggregate = shop.close(cleared(shop))
    assert record.state[:3] == (AwardState.EXPIRED,) * 3
    np.testing.assert_array_equal(aggregate, [0, 0])
    assert record.error_bound == np.inf
    assert not record.valid
    assert record.spent_micros == 0
    assert shop.ledger.balance("buyer") == 10 * BUDGET


def test_nothing_happens_twice():
    shop = market()
    round_ = cleared(shop)
    shop.deliver(round_, 7, [1.0, 1.0])
    for again in (lambda: shop.deliver(round_, 7, [5.0, 5.0]), lambda: shop.void(round_, 7, "late")):
        with pytest.raises(SettlementError, match="already"):
            again()
    shop.void(round_, 8, "x")
    with pytest.raises(SettlementError, match="already"):
        shop.deliver(round_, 8, [1.0, 1.0])
    with pytest.raises(SettlementError, match="no award"):
        shop.deliver(round_, 10, [1.0, 1.0])  # a loser
    shop.close(round_)
    for late in (lambda: shop.close(round_), lambda: shop.deliver(round_, 9, [1.0, 1.0])):
        with pytest.raises(SettlementError):
            late()
    # clearing the same round again finds the resolved awards: no second hold
    assert shop.ledger.balance(ESCROW) == 0
    cleared(shop)
    assert shop.ledger.balance(ESCROW) == 0


class Rogue:
    name = "rogue"

    def __init__(self, epsilon, payment):
        self.outcome = Outcome(np.asarray(epsilon, float), np.asarray(payment, float))

    def run(self, bids, budget, *, rng=None):
        return self.outcome


@pytest.mark.parametrize(
    ("epsilon", "payment", "why"),
    [
        ([1, 1, 1, 1], [5, 5, 5, 5], "exceed the budget"),
        ([2, 0, 0, 0], [1, 0, 0, 0], "more privacy"),
        ([1, 0, 0, 0], [1, 1, 0, 0], "sell nothing"),
    ],
)
def test_a_rogue_mechanism_moves_no_money(epsilon, payment, why):
    shop = market(Rogue(epsilon, payment))
    with pytest.raises(MechanismViolation, match=why):
        cleared(shop)
    assert shop.ledger.balance("buyer") == 10 * BUDGET
    assert list(shop.ledger.awards()) == []


def test_m2_is_stopped_when_it_overspends():
    shop = market(auctions.get("m2"))
    with pytest.raises(MechanismViolation, match="exceed"):
        shop.clear(0, [0, 1, 2], BidProfile(Valuations(STEP, [0.25, 0.25, 2.0]), 1.0, [4, 4, 4]), 4_000_000)


def test_a_poor_buyer_awards_nothing():
    shop = market(deposit=BUDGET - 1)
    with pytest.raises(SettlementError, match="buyer holds"):
        cleared(shop)
    assert list(shop.ledger.awards()) == []


def test_bidders_are_distinct():
    with pytest.raises(InvalidInput, match="bidders"):
        market().clear(0, [7, 7, 9, 10], bids(), BUDGET)


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 0},
        {"rounds": 1.5},
        {"rounds": True},
        {"bidders_per_round": -1},
        {"budget_micros": None},
        {"budget_factor": 1.0},
        {"budget_micros": -5},
        {"budget_micros": None, "budget_factor": float("nan")},
        {"learning_rate": 0.0},
    ],
)
def test_tasks_are_checked(changes):
    task = Task(budget_micros=5)
    with pytest.raises(InvalidInput):
        dataclasses.replace(task, **changes)
