"""Slow, dead, late and lying owners: the round ends on time, their awards come back, the rest settles."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message

from flmarket.engines.flower import FileStore, KindStrategy
from flmarket.engines.flower.messages import BID, TRAIN, Delivery, Refusal, pack, reply, unpack, unpack_vector
from flmarket.engines.flower.strategy import Roster
from flmarket.errors import SettlementError
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.market import Bid, owner_account
from flmarket.privacy import PureDp


def on_train(change):
    """Bids honestly; answers an order with what `change` makes of the honest answer."""

    def behaviour(message, honest):
        return honest() if message.metadata.message_type != TRAIN else change(message, honest)

    return behaviour


def with_vector(make):
    def change(message, honest):
        (answer,) = honest()
        return [reply(unpack(Delivery, answer), message, make(unpack_vector(answer)))]

    return on_train(change)


def raw_array(array):
    """A delivery whose array is put in as it is."""

    def change(message, honest):
        (answer,) = honest()
        answer.content["vector"] = ArrayRecord({"values": array})
        return [answer]

    return on_train(change)


def posing(array):
    """An array that is said to be of the type that is asked for."""
    return Array("float64", array.shape, "numpy.ndarray", Array(array).data)


def renamed(release):
    def change(message, honest):
        (answer,) = honest()
        return [reply(Delivery(release=release, owner=unpack(Delivery, answer).owner), message, unpack_vector(answer))]

    return on_train(change)


def strange(message, honest):
    (answer,) = honest()
    answer.content["delivery"]["surplus"] = 1
    return [answer]


LIES = {
    "wrong-shape": (with_vector(lambda v: v[:-1]), AwardState.VOIDED, "shape"),
    "too-many-numbers": (with_vector(lambda v: np.zeros(100_000)), AwardState.VOIDED, "bad update"),
    "matrix": (with_vector(lambda v: v[None]), AwardState.VOIDED, "shape"),
    "not-a-number": (with_vector(lambda v: v * np.nan), AwardState.VOIDED, "not finite"),
    "infinite": (with_vector(lambda v: np.full_like(v, np.inf)), AwardState.VOIDED, "not finite"),
    "huge": (with_vector(lambda v: np.full_like(v, 1e200)), AwardState.VOIDED, "longer than"),
    "too-long": (with_vector(lambda v: v * 100), AwardState.VOIDED, "longer than"),
    "float16": (raw_array(Array(np.zeros(31, dtype=np.float16))), AwardState.VOIDED, "a float array"),
    "whole": (raw_array(Array(np.zeros(31, dtype=np.int64))), AwardState.VOIDED, "a float array"),
    "not-what-it-says": (raw_array(posing(np.ones(31) * 1j)), AwardState.VOIDED, "what it says"),
    "bytes-turned": (raw_array(posing(np.ones(31, dtype=">f8"))), AwardState.VOIDED, "what it says"),
    "single-not-a-number": (raw_array(Array(np.full(31, np.nan, dtype=np.float32))), AwardState.VOIDED, "not finite"),
    "texts": (raw_array(Array("float64", (31,), "numpy.ndarray", b"nonsense")), AwardState.VOIDED, "readable"),
    "pickle": (raw_array(Array("float64", (1,), "pickle", b"cos\nsystem\n.")), AwardState.VOIDED, "pickle"),
    "another-award": (renamed("tumours/0/99"), AwardState.VOIDED, "another award's"),
    "earlier-award": (renamed("tumours/7/0"), AwardState.VOIDED, "another award's"),
    "odd-record": (on_train(strange), AwardState.VOIDED, "bad update"),
    "no-record": (on_train(lambda m, h: [Message(pack(Bid(
        owner=0, data_size=1, privacy_budget=1.0, kind=0, rate=1.0)), reply_to=m)]), AwardState.VOIDED, "neither"),
    "refuses": (on_train(lambda m, h: [reply(Refusal(owner=0, code="", reason=""), m)]), AwardState.VOIDED, "refused"),
    "crashes": (on_train(lambda m, h: [Message(Error(code=0, reason=""), reply_to=m)]), AwardState.EXPIRED, "deadline"),
    "silent": (on_train(lambda m, h: []), AwardState.EXPIRED, "deadline"),
}  # fmt: skip


def winner_of(spec):
    """An owner who wins in the first round when all is well."""
    first = spec.run().rounds[0]
    return int(first.bidders[np.flatnonzero(first.epsilon)[0]])


@pytest.mark.parametrize("lie", LIES)
def test_one_liar_is_not_paid_and_the_others_are(lie, market, stage):
    behaviour, state, reason = LIES[lie]
    spec = market(task={"rounds": 1}).simulation()
    liar = winner_of(spec)
    ready = stage(spec, train_seconds=0.5)
    ready.grid.behaviour[liar] = behaviour
    played = ready.play()
    awards = {award.owner: award for award in ready.ledger.awards()}
    lying = awards.pop(owner_account(liar))
    assert (lying.state, reason in lying.reason) == (state, True), lying.reason
    assert awards, "somebody else won, too"
    assert {award.state for award in awards.values()} == {AwardState.POSTED}
    assert ready.ledger.balance(owner_account(liar)) == 0
    assert ready.ledger.balance("escrow") == 0
    assert np.isfinite(played.kind.parameters).all()
    assert played.records[0].weights[played.records[0].bidders == liar] == 0
    ready.ledger.verify()


def test_honest_noise_is_never_too_long(market):
    """The largest of many releases stays far below the limit that voids an award."""
    spec = market(mechanism={"perturbation": "laplace-l1"}).simulation()
    kind, rng = spec.kind(), np.random.default_rng(0)
    order = kind.order(0, 0, loss=PureDp(0.01), price_micros=0, records=1, learning_rate=0.1)
    releases = spec.perturbation.privatize(np.zeros((5000, 31)), 0.01, rng)
    assert np.linalg.norm(releases, axis=1).max() < kind.largest_norm(order) / 10


def test_a_delivery_in_numbers_of_half_the_length_is_taken_as_what_it_is(market, stage):
    """Rounding is her own loss: what counts, is aggregated and is paid for are the numbers that came."""
    spec = market(task={"rounds": 1}).simulation()
    ready, came = stage(spec), {}

    def shorter(message, honest):
        (answer,) = honest()
        vector = unpack_vector(answer).astype(np.float32)
        answer.content["vector"] = ArrayRecord({"values": Array(vector)})
        came[unpack(Delivery, answer).owner] = vector.astype(np.float64)
        return [answer]

    ready.grid.behaviour = dict.fromkeys(range(5), on_train(shorter))
    played = ready.play()
    (record,) = played.records
    assert came
    assert {award.state for award in ready.ledger.awards()} == {AwardState.POSTED}
    step = sum(w * came[i] for i, w in zip(record.bidders.tolist(), record.weights, strict=True) if w)
    np.testing.assert_allclose(played.kind.parameters, -spec.task.learning_rate * step, rtol=1e-12)


def test_dead_and_slow_owners_do_not_hold_up_the_round(market, stage):
    spec = market(task={"rounds": 1}).simulation()
    ready = stage(spec, bid_seconds=0.4, train_seconds=0.4)
    ready.grid.behaviour = dict.fromkeys(range(5), lambda message, honest: [])
    played = ready.play()
    assert played.records[0].bidders.size == 0
    assert list(ready.ledger.awards()) == []


def test_a_late_answer_does_not_count(market, stage):
    """It comes after the deadline, in the next round, as an answer to a message that nobody waits for."""
    spec = market(task={"rounds": 2, "bidders_per_round": 5}).simulation()
    late = winner_of(spec)
    ready = stage(spec, train_seconds=0.3)
    kept = []

    def tardy(message, honest):
        if message.metadata.message_type == TRAIN:
            kept.extend(honest())
            return []
        if kept and message.metadata.message_type == BID:
            ready.grid._answers["late"] = kept.pop()
        return honest()

    ready.grid.behaviour[late] = tardy
    pull = ready.grid.pull_messages
    ready.grid.pull_messages = lambda ids: pull([*ids, "late"])
    ready.play()
    mine = [award for award in ready.ledger.awards() if award.owner == owner_account(late)]
    assert mine
    assert {award.state for award in mine} == {AwardState.EXPIRED}
    assert ready.ledger.balance(owner_account(late)) == 0


def test_an_answer_sent_twice_counts_once(market, stage):
    spec = market(task={"rounds": 1}).simulation()
    ready = stage(spec)
    pull = ready.grid.pull_messages
    ready.grid.pull_messages = lambda ids: [answer for answer in pull(ids) for _ in range(2)]
    played = ready.play()
    expected = spec.run().rounds[0]
    assert played.records[0].state == expected.state
    assert played.records[0].metrics == expected.metrics


def test_somebody_elses_delivery_does_not_pay_her(market, stage):
    """A winner answers with another node's reply: the award follows the node, not what the message says."""
    spec = market(task={"rounds": 1}).simulation()
    thief = winner_of(spec)
    ready = stage(spec)
    stolen = []

    def steal(message, honest):
        if message.metadata.message_type != TRAIN:
            return honest()
        return [reply(unpack(Delivery, stolen[0]), message, unpack_vector(stolen[0]))] if stolen else []

    winners = [int(o) for o in spec.run().rounds[0].bidders[spec.run().rounds[0].epsilon > 0]]
    for owner in winners:
        if owner != thief:
            ready.grid.behaviour[owner] = on_train(lambda m, h: [stolen.append(h()[0]), stolen[-1]][1:])
    ready.grid.behaviour[thief] = steal
    push = ready.grid.push_messages
    ready.grid.push_messages = lambda messages: push(  # she answers last
        sorted(messages, key=lambda m: m.metadata.dst_node_id == ready.grid.node(thief))
    )
    ready.play()
    awards = {award.owner: award for award in ready.ledger.awards()}
    assert awards[owner_account(thief)].state is AwardState.VOIDED
    assert "another award's" in awards[owner_account(thief)].reason


def test_two_nodes_cannot_both_be_one_owner(market, stage):
    spec = market(task={"rounds": 1, "bidders_per_round": 5}).simulation()
    ready = stage(spec)

    def impostor(message, honest):
        (answer,) = honest()
        bid = unpack(Bid, answer)
        return [answer] if bid is None else [Message(pack(Bid(**{**bid.__dict__, "owner": 1})), reply_to=message)]

    ready.grid.behaviour[0] = impostor
    played = ready.play()
    assert not set(played.records[0].bidders.tolist()) & {0, 1}
    assert played.records[0].valid


class TestRoster:
    def test_a_claim_stands_while_the_node_is_there(self):
        roster = Roster()
        assert roster.roll_call({10: 0, 11: 1}, [10, 11]) == {10: 0, 11: 1}
        assert roster.roll_call({12: 0, 11: 1}, [10, 11, 12]) == {11: 1}
        assert roster.roll_call({12: 0}, [11, 12]) == {12: 0}
        assert roster.node(1) == 11

    def test_known_nodes_only(self):
        roster = Roster({10: 0})
        assert roster.roll_call({10: 0, 11: 1}, [10, 11]) == {10: 0}
        assert roster.roll_call({10: 1}, [10]) == {}

    def test_a_node_speaks_for_one_owner(self):
        roster = Roster()
        roster.roll_call({10: 0}, [10])
        roster.roll_call({10: 5}, [10])
        assert (roster.owner(10), roster.node(0)) == (5, None)


def test_a_registered_cap_is_kept_even_if_the_owner_is_careless(market, stage):
    """Her own machine allows 4 in total; with the broker she registered less."""
    spec = market(task={"rounds": 1}).simulation()
    careless = winner_of(spec)
    ready = stage(spec)
    ready.ledger.register_cap(owner_account(careless), PureDp(1e-3))
    played = ready.play()
    (award,) = ready.ledger.awards(owner=owner_account(careless))
    assert award.state is AwardState.VOIDED
    assert "registered cap" in award.reason
    assert played.records[0].valid


@pytest.mark.parametrize(
    "lies",
    [
        ({"rate": float("nan")}, {"data-size": -3}, {"privacy-budget": "much"}, {"surplus": 1}),
        ({"rate": 1e308}, {"data-size": 2**62}, {"privacy-budget": 1e300}, {"kind": 99}),
        ({"kind": 5}, {"grid": [1.0, 0.5], "values": [1.0, 2.0]}, {"data-size": 0}, {"privacy-budget": 0.0}),
    ],
    ids=["types", "sizes", "nonsense"],
)
def test_a_mischievous_bid_is_left_out(market, stage, lies):
    spec = market(task={"rounds": 1, "bidders_per_round": 5}).simulation()
    ready = stage(spec)

    def bids(**changes):
        def behaviour(message, honest):
            (answer,) = honest()
            if message.metadata.message_type == BID:
                for key, value in changes.items():
                    answer.content["bid"][key] = value
            return [answer]

        return behaviour

    ready.grid.behaviour = {owner: bids(**lie) for owner, lie in enumerate(lies)}
    played = ready.play()
    assert played.records[0].bidders.tolist() == [4]


def test_two_servers_on_one_folder(market, tmp_path):
    first, second = (FileStore(tmp_path) for _ in range(2))
    first.lock()
    with pytest.raises(SettlementError, match="another server"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_start_is_what_plays_and_flowers_own_loop_asks_nobody(market, stage):
    """The round is the market's own: Flower's questions get no answer, so its loop can neither train nor pay."""
    from flwr.serverapp.strategy import Strategy

    spec = market().simulation()
    ready = stage(spec)
    strategy = KindStrategy(spec.kind(), MemoryLedger(), FileStore(ready.folder / "idle"), bid_seconds=5.0)
    before = strategy.kind.parameters
    Strategy.start(strategy, ready.grid, strategy._arrays(), num_rounds=3)
    assert ready.grid.seen == []
    assert (strategy.records, list(strategy.ledger.awards())) == ([], [])
    np.testing.assert_array_equal(strategy.kind.parameters, before)
    played, expected = ready.play(), spec.run()
    assert [r.state for r in played.records] == [r.state for r in expected.rounds]
    np.testing.assert_array_equal(played.kind.parameters, expected.parameters)
