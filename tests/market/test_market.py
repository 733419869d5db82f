"""The round by hand: four bidders, M1's prices, scripted answers; and the checks of mechanisms before money moves."""

import dataclasses

import numpy as np
import pytest

from flmarket import STEP, BidProfile, InvalidInput, Outcome, Valuations, aggregation, auctions, privacy
from flmarket.aggregation import robust
from flmarket.errors import MechanismViolation, SettlementError
from flmarket.learning import DataSet, Partition
from flmarket.ledger import ESCROW, AwardState, MemoryLedger
from flmarket.market import (
    AuctionSpec,
    Bad,
    Bid,
    Delivered,
    FileStore,
    MemoryStore,
    Refused,
    RoundPlan,
    Rounds,
    Silent,
    Task,
    TooFewBids,
)
from flmarket.market.kinds.auction import cleared
from flmarket.privacy import PureDp

BUDGET = 12_000_000
POSTED, VOIDED, EXPIRED = AwardState.POSTED, AwardState.VOIDED, AwardState.EXPIRED
# M1 by hand: the first three win at 3 a record (see test_auctions_by_hand)
RATES, SIZES = {7: 1.0, 8: 2.0, 9: 3.0, 10: 4.0}, {7: 1, 8: 2, 9: 1, 10: 5}
GOOD = {7: [1.0, 0.0], 8: [0.0, 1.0], 9: [1.0, 1.0]}


def bid(owner, **changes):
    given = {"data_size": SIZES[owner], "privacy_budget": 1.0, "kind": int(STEP), "rate": RATES[owner]}
    return Bid(owner=owner, **(given | changes))


def profile():
    return BidProfile(Valuations(STEP, list(RATES.values())), 1.0, list(SIZES.values()))


def spec(auction="m1", rounds=1, rule="conventional", **changes):
    """Two parameters, a rate of 1: the model is minus the sum of the steps."""
    data = DataSet("two", np.zeros((4, 1)), np.arange(4) % 2, np.zeros((2, 1)), np.arange(2), ("no", "yes"))
    return AuctionSpec(
        **{
            "task": Task(name="t", rounds=rounds, budget_micros=BUDGET, learning_rate=1.0),
            "data": data,
            "partition": Partition.from_owners(np.arange(4), 4),
            "bids": profile(),
            "auction": auctions.get(auction) if isinstance(auction, str) else auction,
            "aggregation": aggregation.get(rule) if isinstance(rule, str) else rule,
            "perturbation": privacy.get("laplace-l1"),
        }
        | changes
    )


class Script:
    """Owners who answer by a script: batches of answers to orders, and to being asked again."""

    def __init__(self, answers=(), released=(), bids=None):
        self.answers, self.again, self.asked = list(answers), list(released), []
        self.offers = {owner: bid(owner) for owner in RATES} if bids is None else bids

    def bids(self, call, accepts):
        return {owner: one for owner, one in self.offers.items() if accepts(one)}

    def train(self, call, orders, parameters, bids, prove):
        self.asked.append(("train", sorted(order.owner for order in orders)))
        yield from self.answers

    def replay(self, call, orders, parameters, bids):
        """They remember what they did."""

    def released(self, call, orders):
        self.asked.append(("released", sorted(order.owner for order in orders)))
        yield from self.again

    def state(self):
        return b""

    def restore(self, state):
        raise AssertionError("nothing was kept")


ALL = {owner: Delivered(vector) for owner, vector in GOOD.items()}


def market(owners, kind=None, deposit=10 * BUDGET, store=None, **options):
    ledger = MemoryLedger()
    ledger.deposit("start", "buyer", deposit)
    store = MemoryStore() if store is None else store
    return Rounds(kind or spec().kind(), owners, ledger, store, deposits=False, **options)


def pay(rounds):
    return [rounds.ledger.balance(f"owner-{i}") for i in RATES]


def test_a_round_from_bids_to_settlement():
    shop = market(Script([ALL]))
    (record,) = shop.play()
    np.testing.assert_allclose(shop.kind.parameters, [-0.5, -0.75])  # weights 1/4, 2/4, 1/4
    np.testing.assert_allclose(record.weights, [0.25, 0.5, 0.25, 0])
    assert pay(shop) == [3_000_000, 6_000_000, 3_000_000, 0]
    assert record.spent_micros == 12_000_000
    assert record.state == (POSTED,) * 3 + (None,)
    assert {release.award_id: release.guarantee for release in shop.ledger.releases()} == {
        f"t/0/{i}": PureDp(1.0) for i in (7, 8, 9)
    }
    assert shop.owners.asked == [("train", [7, 8, 9])]
    shop.ledger.verify()


def test_each_step_is_stored_before_the_next():
    shop = market(Script([{7: ALL[7]}, {8: ALL[8], 9: ALL[9]}]))
    steps = shop.steps(0)
    assert next(steps) == "open"
    assert shop.store.plan(0) is None
    assert next(steps) == "bids"
    plan = shop.store.plan(0)
    assert [(o.owner, o.loss, o.price_micros, o.records) for o in plan.orders] == [
        (7, PureDp(1.0), 3_000_000, 1),
        (8, PureDp(1.0), 6_000_000, 2),
        (9, PureDp(1.0), 3_000_000, 1),
    ]
    assert list(shop.ledger.awards()) == []
    assert next(steps) == "awards"
    assert shop.ledger.balance(ESCROW) == 12_000_000
    assert next(steps) == "updates"
    assert {owner: list(vector) for owner, vector in shop.store.deliveries(0).items()} == GOOD
    assert pay(shop) == [0, 0, 0, 0]
    assert next(steps) == "settled"
    assert shop.ledger.balance(ESCROW) == 0
    assert shop.store.checkpoint().next_round == 1
    assert list(steps) == []


def test_drop_outs_and_bad_updates_are_not_paid_and_do_not_hurt_others():
    answers = {7: Refused("price", "too cheap"), 8: Delivered([np.nan, 1.0]), 9: Delivered([2.0, 4.0])}
    shop = market(Script([answers]))
    (record,) = shop.play()
    np.testing.assert_allclose(shop.kind.parameters, [-2.0, -4.0])
    assert record.state == (VOIDED, VOIDED, POSTED, None)
    assert "too cheap" in record.reason[0]
    assert "not finite" in record.reason[1]
    assert shop.ledger.balance("buyer") == 10 * BUDGET - 3_000_000
    assert record.delivered.tolist() == [False, False, True, False]
    assert {release.award_id for release in shop.ledger.releases()} == {"t/0/8", "t/0/9"}, "what left, paid or not"


BAD = [
    [1.0],
    [[1.0, 2.0]], [1.0, np.inf], [np.nan, 0.0], "weights", None, [object(), 1.0], [10**400, 1.0], [1e30, 0.0], [],
]  # fmt: skip


@pytest.mark.parametrize("update", BAD, ids=range(len(BAD)))
def test_every_kind_of_bad_update_is_voided_and_counts_as_what_left(update):
    shop = market(Script([ALL | {7: Delivered(update)}]))
    (record,) = shop.play()
    assert record.state == (VOIDED, POSTED, POSTED, None)
    assert shop.ledger.award("t/0/7").reason.startswith("bad update")
    assert [release.award_id for release in shop.ledger.releases("owner-7")] == ["t/0/7"]
    assert pay(shop)[0] == 0


@pytest.mark.parametrize("script", [[], [{}], [dict.fromkeys(GOOD, Silent())]])
def test_silence_expires_and_an_empty_round_trains_nothing(script):
    shop = market(Script(script))
    (record,) = shop.play()
    assert record.state[:3] == (EXPIRED,) * 3
    np.testing.assert_array_equal(shop.kind.parameters, [0, 0])
    assert record.error_bound == np.inf
    assert not record.valid
    assert record.spent_micros == 0
    assert shop.ledger.balance("buyer") == 10 * BUDGET
    assert list(shop.ledger.releases()) == []


@pytest.mark.parametrize(
    ("first", "then", "state"),
    [
        (Delivered([1.0, 1.0]), Delivered([5.0, 5.0]), POSTED),
        (Delivered([1.0, 1.0]), Refused("late", "no"), POSTED),
        (Delivered([1.0, 1.0]), Bad("nonsense"), POSTED),
        (Refused("no", "no"), Delivered([5.0, 5.0]), VOIDED),
        (Bad("nonsense"), Delivered([5.0, 5.0]), VOIDED),
    ],
)
def test_an_answer_counts_once(first, then, state):
    shop = market(Script([{7: first}, {7: then}]))
    (record,) = shop.play()
    assert record.state == (state, EXPIRED, EXPIRED, None)
    np.testing.assert_array_equal(shop.kind.parameters, [-1.0, -1.0] if state is POSTED else [0.0, 0.0])
    assert pay(shop)[0] == (3_000_000 if state is POSTED else 0)


def test_nobody_is_heard_who_was_not_asked():
    shop = market(Script([ALL | {10: Delivered([9.0, 9.0]), 99: Delivered([9.0, 9.0]), -1: Bad("")}]))
    (record,) = shop.play()
    assert record.state == (POSTED,) * 3 + (None,)
    np.testing.assert_allclose(shop.kind.parameters, [-0.5, -0.75])
    assert [award.id for award in shop.ledger.awards()] == ["t/0/7", "t/0/8", "t/0/9"]


def test_nothing_happens_twice():
    """A driver that has lost its store plays the round again: the ledger's awards are resolved, and nobody is asked."""
    shop = market(Script([ALL]))
    shop.play()
    size = shop.ledger.head().size
    again = Rounds(spec().kind(), Script([ALL]), shop.ledger, MemoryStore(), deposits=False)
    (record,) = again.play()
    assert again.owners.asked == []
    assert record.state == (POSTED,) * 3 + (None,)
    assert (shop.ledger.head().size, shop.ledger.balance(ESCROW)) == (size, 0)
    assert shop.play() == shop.records[:1], "and with its store it knows that all is over"


def test_who_has_released_before_is_asked_for_that_once():
    """She says to a new order that she carried out an old one: a server died in between."""
    replay = Refused("replay", "released before", replayed=True)
    shop = market(Script([ALL | {7: replay, 8: replay}], released=[{7: ALL[7], 8: replay}]))
    (record,) = shop.play()
    assert shop.owners.asked == [("train", [7, 8, 9]), ("released", [7, 8])]
    assert record.state == (POSTED, VOIDED, POSTED, None)


def test_a_round_that_was_cut_off_asks_for_releases_first(tmp_path):
    store, first = FileStore(tmp_path), Script([{7: ALL[7]}])
    shop = market(first, store=store)
    steps = shop.steps(0)
    assert [next(steps) for _ in range(4)][-1] == "updates"
    second = Script([{9: ALL[9]}], released=[{8: ALL[8], 9: Refused("unreleased", "nothing yet")}])
    (record,) = Rounds(spec().kind(), second, shop.ledger, store, deposits=False).play()
    assert second.asked == [("released", [8, 9]), ("train", [9])]
    assert record.state == (POSTED,) * 3 + (None,)
    assert pay(shop) == [3_000_000, 6_000_000, 3_000_000, 0]


def test_a_registered_cap_ends_one_award_and_no_other():
    shop = market(Script([ALL]))
    shop.ledger.register_cap("owner-7", PureDp(0.5))
    shop.ledger.register_cap("owner-8", PureDp(1.0))
    (record,) = shop.play()
    assert record.state == (VOIDED, POSTED, POSTED, None)
    np.testing.assert_allclose(record.weights, [0, 2 / 3, 1 / 3, 0])
    assert shop.ledger.privacy_spent("owner-7") == 0


def test_too_few_bids_and_nothing_is_decided():
    shop = market(Script(bids={7: bid(7)}), minimum_bids=2)
    with pytest.raises(TooFewBids):
        shop.play()
    assert shop.store.plan(0) is None
    shop.owners.offers[8] = bid(8)
    shop.owners.offers[9] = bid(9, rate=np.nan)
    assert shop.play()[0].bidders.tolist() == [7, 8]


@pytest.mark.parametrize("bids", [{}, {10: bid(10)}])
def test_a_round_that_nobody_wins_or_bids_in(bids):
    """The dearest one alone asks for 4 times 5, of 12."""
    shop = market(Script(bids=bids))
    (record,) = shop.play()
    assert record.bidders.tolist() == list(bids)
    assert record.state == (None,) * len(bids)
    assert (record.spent_micros, record.error_bound) == (0, np.inf)
    assert shop.owners.asked == []
    np.testing.assert_array_equal(shop.kind.parameters, [0, 0])


def test_a_robust_rule_without_enough_updates_moves_nothing():
    shop = market(Script([{7: ALL[7]}]), spec(rule=robust.get("krum")).kind())
    (record,) = shop.play()
    assert record.state == (POSTED, EXPIRED, EXPIRED, None), "what was delivered is paid"
    np.testing.assert_array_equal(shop.kind.parameters, [0, 0])
    whole = market(Script([ALL]), spec(rule=robust.get("median")).kind())
    whole.play()
    np.testing.assert_allclose(whole.kind.parameters, [-1.0, -1.0])


class TestPlan:
    def test_bidders_are_drawn_once_each_among_those_who_bid(self):
        kind = spec(task=Task(name="t", bidders_per_round=3, budget_micros=BUDGET)).kind()
        offers = {owner: bid(owner) for owner in RATES}
        plans = [kind.plan(index, offers) for index in range(20)]
        drawn = [tuple(plan.memory["bidders"]) for plan in plans]
        assert all(len(set(one)) == 3 and set(one) <= set(RATES) for one in drawn)
        assert len(set(drawn)) > 1
        assert kind.plan(3, offers) == plans[3], "a function of state and bids"

    def test_ids_and_the_deposit_follow_from_task_and_round(self):
        plan = spec(rounds=5).kind().plan(4, {owner: bid(owner) for owner in RATES})
        assert (plan.deposit_id, plan.deposit_micros) == ("t/4/budget", BUDGET)
        assert [order.award for order in plan.orders] == ["t/4/7", "t/4/8", "t/4/9"]
        assert RoundPlan.from_dict(plan.to_dict()) == plan

    def test_a_factors_budget_is_of_drawn_costs_not_of_reports(self):
        task = Task(name="t", budget_factor=0.5)
        kind = spec(task=task).kind()
        plan = kind.plan(0, {owner: bid(owner + 7, rate=100.0) for owner in range(4)})
        assert plan.deposit_micros == 0.5 * (1 * 1 + 2 * 2 + 3 * 1 + 4 * 5) * 1_000_000

    @pytest.mark.parametrize(
        "changes",
        [
            {"rate": np.nan}, {"rate": 1e300}, {"kind": 99}, {"data_size": 0}, {"data_size": 10**12},
            {"privacy_budget": 0.0}, {"grid": (1.0, 0.5), "values": (1.0, 2.0)},
        ],
        ids=str,
    )  # fmt: skip
    def test_a_bid_that_cannot_be_computed_with_is_left_out(self, changes):
        kind = spec().kind()
        assert kind.accepts(bid(7))
        assert not kind.accepts(bid(7, **changes))


class Rogue:
    name = "rogue"

    def __init__(self, epsilon, payment, records=None, pays_losers=False):
        self.outcome = Outcome(np.asarray(epsilon, float), np.asarray(payment, float), records=records)
        self.pays_losers = pays_losers

    def run(self, bids, budget, *, rng=None):
        return self.outcome


ROGUES = [
    (([1, 1, 1, 1], [5, 5, 5, 5]), "exceed the budget"),
    (([2, 0, 0, 0], [1, 0, 0, 0]), "more privacy"),
    (([1, 0, 0, 0], [1, 1, 0, 0]), "sell nothing"),
    (([1, 0, 0, 0], [1, 0, 0, 0], [0.5, 0, 0, 0]), "less than one record"),
]


@pytest.mark.parametrize(("outcome", "why"), ROGUES)
def test_a_rogue_mechanism_moves_no_money(outcome, why):
    with pytest.raises(MechanismViolation, match=why):
        cleared(Rogue(*outcome), profile(), BUDGET)
    shop = market(Script([ALL]), spec(Rogue(*outcome)).kind())
    with pytest.raises(MechanismViolation, match=why):
        shop.play()
    assert shop.ledger.balance("buyer") == 10 * BUDGET
    assert list(shop.ledger.awards()) == []
    assert shop.store.plan(0) is None
    assert shop.owners.asked == []


def test_m2_is_stopped_when_it_overspends():
    with pytest.raises(MechanismViolation, match="exceed"):
        cleared(auctions.get("m2"), BidProfile(Valuations(STEP, [0.25, 0.25, 2.0]), 1.0, [4, 4, 4]), 4_000_000)


def test_what_is_cleared_is_whole_money_and_whole_records():
    found = cleared(auctions.get("m1"), profile(), BUDGET)
    assert found.price_micros.tolist() == [3_000_000, 6_000_000, 3_000_000, 0]
    assert found.winners.tolist() == [True, True, True, False]
    assert found.records.tolist() == [1, 2, 1, 5]
    parts = cleared(Rogue([1, 0, 0, 0], [1.0000009, 0, 0, 0], np.array([1.0, 0, 0, 0])), profile(), BUDGET)
    assert (parts.price_micros[0], parts.records[0]) == (1_000_000, 1)
    printed = cleared(Rogue([1, 0, 0, 0], [1, 1, 0, 0], pays_losers=True), profile(), BUDGET)
    assert printed.price_micros.tolist() == [1_000_000, 0, 0, 0], "as printed, but there is nothing to pay for"
    rounded = cleared(Rogue([1 + 1e-12, 0, 0, 0], [1, 0, 0, 0]), profile(), BUDGET)
    assert rounded.epsilon[0] == 1.0, "what was offered, not what rounding made of it"


def test_a_poor_buyer_awards_nothing():
    shop = market(Script([ALL]), deposit=BUDGET - 1)
    with pytest.raises(SettlementError, match="buyer holds"):
        shop.play()
    assert list(shop.ledger.awards()) == []
    assert shop.owners.asked == []


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
