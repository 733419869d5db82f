"""The guard in pieces, without anything that carries messages: every limit at its last accepted value and past it."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

pytest.importorskip("flwr")

from hostile import FEATURES, LENGTH, NUMBER, RECORDS, call, loss, make_owner, order, terms_of

from flmarket.bids import Valuations
from flmarket.errors import ConfigError, InvalidInput, PrivacyBudgetExhausted, SumVoid, Tampered
from flmarket.learning import Purpose, SoftmaxRegression
from flmarket.ledger import Award, Head, MemoryLedger, ReplayRefused
from flmarket.market import Refused, kinds
from flmarket.market.owner import (
    LARGEST_PARAMETER,
    Guard,
    OwnerSide,
    PrivacyCap,
    Streams,
    Work,
    _Stop,
    drops_out,
    guarded,
    spoilt,
)
from flmarket.market.record import MemoryRecord
from flmarket.privacy import (
    ApproxDp,
    ExponentialRelease,
    GaussianRelease,
    PrivacyAccount,
    PureDp,
    RecordLevel,
    SecureNoise,
    SimulationNoise,
    Uncapped,
    Unprotected,
    ZCdp,
)


@pytest.fixture
def guard(tmp_path):
    """Makes guards of simulated owners in memory, who have bid for the usual announcement."""

    def make(announced=None, **changes):
        owner = make_owner(tmp_path, **({"simulation_seed": 5} | changes))
        made = Guard(owner, MemoryRecord(PrivacyAccount(owner.cap)))
        if announced is not False:
            made.bid(announced or call())
        return made

    return make


def code(answer):
    found = guarded(answer)
    return found.code if isinstance(found, Refused) else None


def test_caps_are_what_accounts_take():
    assert PrivacyCap().cap == PureDp(1e9)
    assert PrivacyCap(2.0).cap == PureDp(2.0)
    assert PrivacyCap(1e-9).cap == PureDp(1e-9)
    assert PrivacyCap(2.0, 1e-6).cap == PrivacyCap(2.0, 1e-6).gaussian == ApproxDp(2.0, 1e-6)
    assert PrivacyCap().gaussian == ZCdp(1e9)
    assert PrivacyCap(delta=1e-6).gaussian == ZCdp(1e9)
    assert PrivacyCap(2.0, 1e-6).records == RecordLevel(ApproxDp(2.0, 1e-6))
    with pytest.raises(ConfigError, match="δ above 0"):
        assert PrivacyCap(2.0).gaussian
    for epsilon, delta in ((0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -1e-9), (1.0, 1.0), (1.0, math.nan)):
        with pytest.raises(InvalidInput, match="privacy cap"):
            PrivacyCap(epsilon, delta)


def test_who_is_no_owner(tmp_path):
    x, y = np.zeros((4, FEATURES)), np.zeros(4, dtype=int)
    owner = make_owner(tmp_path, x=np.zeros((4, 2, 2)), y=y)
    assert (owner.data_size, owner.simulated) == (4, False)
    nothing = {"x": np.empty((0, FEATURES)), "y": y[:0]}
    assert make_owner(tmp_path, holds=1, **nothing).data_size == 1
    for changes, field in (
        ({"x": np.zeros(4), "y": y}, "data"),
        ({"x": x, "y": y[:3]}, "data"),
        ({"x": x, "y": y[:, None]}, "data"),
        ({"x": np.where(np.eye(4, FEATURES) > 0, np.nan, x), "y": y}, "data"),
        ({"x": np.full((4, FEATURES), np.inf), "y": y}, "data"),
        ({"holds": 0, **nothing}, "holds"),
        ({"holds": 4}, "holds"),
        ({"valuation": Valuations([1, 1], [1.0, 1.0])}, "valuation"),
    ):
        with pytest.raises(InvalidInput, match=field):
            make_owner(tmp_path, **changes)


def test_a_proposal_is_by_configuration_and_each_condition_counts(tmp_path):
    sampling = {"announced": call(**terms_of("sampling")), "value": 1.0, "allow_raw": True, "cap": Uncapped()}
    summed = call(trust="secure-aggregation", perturbation="distributed-gaussian")
    takes_part = [
        {}, {"least_records": RECORDS}, {"classes": 2}, {"classes": 1}, {"least_epsilon": 0.5},
        {"trust": ("local", "secure-aggregation")}, sampling, {"cap": ApproxDp(4.0, 1e-5)},
        {"announced": summed, "trust": ("secure-aggregation",), "cap": ApproxDp(4.0, 1e-5)},
        {"x": np.zeros((4, 1, FEATURES)), "y": np.zeros(4, dtype=int)},
    ]  # fmt: skip
    stays_out = [
        {"least_records": RECORDS + 1}, {"classes": 3}, {"least_epsilon": 0.5000001}, {"trust": ()},
        {"trust": ("secure-aggregation",)}, {"announced": call(features=FEATURES + 1, parameters=LENGTH + 1)},
        {"announced": call(parameters=LENGTH + 1)}, {"announced": call(model="")}, {"announced": summed},
        {"announced": call(model="nonsense")}, {"announced": summed, "trust": ("secure-aggregation",)},
        {"announced": summed, "cap": ApproxDp(4.0, 1e-5)}, {"cap": RecordLevel(ApproxDp(4.0, 1e-5))},
        sampling | {"value": None}, sampling | {"allow_raw": False}, sampling | {"cap": PureDp(1.0)},
        {"x": np.zeros((4, 2, FEATURES)), "y": np.zeros(4, dtype=int)},
    ]  # fmt: skip
    for wanted, cases in ((True, takes_part), (False, stays_out)):
        for case in cases:
            changes = dict(case)
            announced = changes.pop("announced", call())
            bid = make_owner(tmp_path, **changes).proposal(announced)
            assert (bid is not None) is wanted, case
    usual = make_owner(tmp_path, least_records=3, least_epsilon=0.2).proposal(call())
    assert (usual.owner, usual.data_size, usual.privacy_budget, usual.rate) == (NUMBER, RECORDS, 0.5, 1.0)
    assert (usual.least_budget, usual.least_records, usual.unit, usual.grid) == (0.2, 3, "update", ())
    table = Valuations.tabulated(np.array([[0.1, 1.0]]), np.array([[0.5, 2.0]]))
    tabled = make_owner(tmp_path, valuation=table).proposal(call())
    assert (tabled.grid, tabled.values) == ((0.0, 0.1, 1.0), (0.0, 0.5, 2.0))


def test_she_trains_what_fits_the_announcement(tmp_path):
    mine = SoftmaxRegression(FEATURES, 2)
    assert make_owner(tmp_path, model=mine).trains(call()) is mine
    assert make_owner(tmp_path, trainer=lambda _: mine).trains(call(model="")) is mine
    assert make_owner(tmp_path, trainer=lambda _: None).trains(call()).tensors == mine.tensors
    assert make_owner(tmp_path, trainer=lambda _: None).trains(call(model="")) is None
    other = SoftmaxRegression(FEATURES, 2)
    assert make_owner(tmp_path, model=mine, trainer=lambda _: other).trains(call()) is mine
    # as many parameters, and yet another model: 1 feature and 4 classes instead of 7 and 1
    for features, classes, fit in ((3, 4, True), (7, 2, False), (3, 3, False)):
        announced = call(features=features, classes=classes, parameters=16)
        assert (make_owner(tmp_path, model=SoftmaxRegression(3, 4)).trains(announced) is not None) is fit


@pytest.mark.parametrize("change", ["at the limit", "past it"])
def test_every_limit_of_an_order(guard, change):
    """Amount, records, parameters, rate and price, at the last value that is accepted and at the next."""
    at, start = change == "at the limit", np.zeros(LENGTH)
    step = 0 if at else 1
    edges = {
        "epsilon": [{"amount": edge if at else math.nextafter(edge, way)} for edge, way in ((0.5, 1), (0.2, 0))],
        "records": [{"records": RECORDS + step}, {"records": 3 - step}],
        "terms": [{"learning_rate": 0.1 if at else math.nextafter(0.1, 1)}],
        # 2·α·ε of each of 20 records, and a micro-unit for rounding
        "price": [{"price_micros": 19_999_999 - step}],
    }
    for refusal, cases in edges.items():
        for case in cases:
            hers = guard(least_epsilon=0.2, least_records=3)
            found = code(partial(hers.admit, order(**case), start))
            assert found == (None if at else refusal), case
            assert hers.account.books.releases == int(at)
    for value in (LARGEST_PARAMETER, -LARGEST_PARAMETER):
        hers, far = guard(), start.copy()
        far[-1] = value * (1 if at else 1 + 1e-15)
        assert code(partial(hers.admit, order(), far)) == (None if at else "parameters")
    hers = guard(least_price=25.0)
    assert code(partial(hers.admit, order(price_micros=24_999_999 - step), start)) == (None if at else "price")


def test_what_an_order_must_not_be(guard):
    start = np.zeros(LENGTH)
    hers = guard()
    assert code(partial(hers.admit, order(), start, None, "{} ")) == "terms"
    assert code(partial(hers.admit, order(), start[:-1])) == "parameters"
    for bad in (math.nan, math.inf):
        assert code(partial(hers.admit, order(), np.full(LENGTH, bad))) == "parameters"
    assert code(partial(hers.train, order(owner=8), start)) == "stranger"
    assert code(partial(hers.ordered, order(amount=0.6))) == "epsilon"
    assert hers.ordered(order()) == call()
    assert code(partial(hers.release, order())) == "unreleased"
    assert hers.account.books.releases == 0
    first = hers.train(order(), start, None, None, call().settings)
    np.testing.assert_array_equal(hers.release(order()), first)
    assert guarded(partial(hers.train, order(), start)).replayed
    assert hers.account.books.releases == 1
    # of two at once one wins the claim, and the other is not charged
    second = guard()
    second.journal.claimed = lambda release: False
    second.journal.claim = lambda order, seconds: False
    assert guarded(partial(second.admit, order(), start)).replayed
    assert second.account.books.releases == 0
    assert code(partial(guard().admit, order(records=1, price_micros=10**7), start)) is None  # one record is enough
    # what was claimed is refused by name, before prices and escrow are looked at
    again = guard()
    again.admit(order(), start)
    assert guarded(partial(again.admit, order(price_micros=0), start)).replayed
    # what she cannot train any more
    third = guard()
    object.__setattr__(third.owner, "model", SoftmaxRegression(FEATURES + 1, 2))
    assert code(partial(third.admit, order(), start)) == "model"


def test_rounds_of_an_order_that_was_bid_for_once(guard):
    announced = call(**terms_of("sampling"))
    hers = guard(announced, value=1.0, allow_raw=True, cap=Uncapped())
    for index, found in ((-1, "round"), (0, None), (4, None), (5, "round")):
        wanted = order(market="sampling", round_index=index, price_micros=10**8)
        assert code(partial(hers.ordered, wanted)) == found, index
    wanted = order(market="sampling", price_micros=10**8)
    object.__setattr__(hers.owner, "allow_raw", False)
    assert code(partial(hers.admit, wanted, np.zeros(LENGTH))) == "raw"
    object.__setattr__(hers.owner, "allow_raw", True)
    vector = hers.train(wanted, np.zeros(LENGTH))
    assert hers.account.books.spent == math.inf
    np.testing.assert_array_equal(hers.release(wanted), vector)
    # the bid itself needs both: leave for raw updates, and an account without a cap
    for changes, wanted in (({}, 0.5), ({"allow_raw": False}, 0.0), ({"cap": PureDp(2.0)}, 0.0)):
        other = guard(False, **({"value": 1.0, "allow_raw": True, "cap": Uncapped()} | changes))
        assert other._left(announced, make_owner(other.owner.record).proposal(call())) == wanted


def test_a_bid_is_cut_to_what_is_left_and_then_there_is_none(guard):
    hers = guard(False, cap=PureDp(0.75), least_epsilon=0.25)
    bids = []
    for index in range(3):
        answer = guarded(partial(hers.bid, call(round_index=index)))
        if isinstance(answer, Refused):
            assert answer.code == "exhausted"
            continue
        bids.append(answer[0].privacy_budget)
        hers.train(order(amount=bids[-1], round_index=index), np.zeros(LENGTH))
    assert bids == [0.5, 0.25]
    assert code(partial(hers.bid, call(round_index=9, market="gift"))) == "abstains"
    assert code(partial(hers.bid, call(round_index=0, clip=2.0))) == "terms"
    assert hers.bid(call(round_index=0))[0].privacy_budget == 0.5


def test_the_head_that_she_goes_by(guard):
    hers, book = guard(False), MemoryLedger()
    assert hers.bid(call(round_index=1), book.head())[1] is None  # an empty log commits to nothing
    book.deposit("d", "buyer", 10)
    assert hers.bid(call(round_index=2), book.head())[1] == book.head()
    assert hers.bid(call(round_index=3))[1] is None
    proven = Head(7, "0" * 64, "1" * 64)
    hers.journal.head = lambda task: proven
    assert hers.bid(call(round_index=4), book.head())[1] == proven


def test_escrow_is_proven_to_real_owners_and_the_head_is_kept(guard, tmp_path):
    hers, seen = guard(simulation_seed=None), []
    hers.journal.saw = lambda task, head: seen.append((task, head))
    assert code(partial(hers.admit, order(), np.zeros(LENGTH))) == "escrow"
    book = MemoryLedger()
    book.deposit("d", "buyer", 10**9)
    for award, account in (("t/0/7", "owner-8"), ("t/1/7", "owner-7")):
        book.hold(Award(award, 0, "buyer", account, 0.5, 20_000_000))
        proof = book.hold_receipts([award])[award]
        assert code(partial(hers.admit, order(), np.zeros(LENGTH), proof)) == "escrow"
    assert not seen
    named = guard(simulation_seed=None, account="owner-8")
    proof = book.hold_receipts(["t/0/7"])["t/0/7"]
    assert named.admit(order(), np.zeros(LENGTH), proof).order == order()
    assert hers.account.books.releases == 0
    # shares in sums leave masked only, unless nobody is protected by it
    for seed, found in ((None, "masking"), (5, "no bid")):
        shared = replace(order(round_index=3), share="{}")
        assert code(partial(guard(simulation_seed=seed).train, shared, np.zeros(LENGTH))) == found
        assert code(partial(guard(simulation_seed=seed).release, shared)) == (
            "masking" if seed is None else "unreleased"
        )


def test_what_died_at_work_is_answered_by_noise_if_it_was_charged(guard):
    for given_up, charged, model, found in (
        (True, True, None, None), (False, True, None, "unreleased"), (True, False, None, "unreleased"),
        (True, True, SoftmaxRegression(FEATURES + 1, 2), "unreleased"),
    ):  # fmt: skip
        hers = guard()
        hers.journal.given_up = lambda order, answer=given_up: answer
        if charged:
            hers.account.charge("t/0/7", "buyer", PureDp(0.5))
        object.__setattr__(hers.owner, "model", model)
        answer = guarded(partial(hers.release, order()))
        assert (answer.code if isinstance(answer, Refused) else None) == found
        if found is None:
            noise = SimulationNoise(hers.owner.stream(order(), Purpose.NOISE))
            expected = noise.add_laplace(np.zeros((LENGTH,)), scale=np.asarray(2 / 0.5 * (1 + 1e-12)), sensitivity=2.0)
            np.testing.assert_allclose(answer, expected, rtol=1e-6)


def test_what_was_kept_leaves_and_nothing_in_its_place(guard):
    hers = guard()
    kept = hers.train(order(), np.zeros(LENGTH))
    hers.journal.given_up = lambda order: True
    hers.owner.noise(order())
    hers._private = lambda work, vector: pytest.fail("made again")
    np.testing.assert_array_equal(hers.release(order()), kept)


def test_what_trains_with_noise_of_its_own_is_kept_and_returned(guard, monkeypatch):
    hers = guard()
    work = hers.admit(order(), np.zeros(LENGTH))
    monkeypatch.setattr(type(kinds.of("auction").side), "noises_itself", lambda side, call: True)
    hers._private = lambda work, vector: pytest.fail("noise was added twice")
    left = hers.finish(work, np.full(LENGTH, 0.25))
    np.testing.assert_array_equal(left, np.full(LENGTH, 0.25))
    np.testing.assert_array_equal(hers.release(order()), left)


def test_what_trains_with_noise_of_its_own_and_fails_leaves_noise_all_the_same(guard, monkeypatch):
    hers, asked = guard(), []
    work = hers.admit(order(), np.zeros(LENGTH))
    monkeypatch.setattr(type(kinds.of("auction").side), "noises_itself", lambda side, call: True)
    hers._private = lambda work, vector: asked.append(vector) or np.ones(LENGTH)
    assert set(hers.finish(work, np.full(LENGTH, np.nan))) == {1.0}
    np.testing.assert_array_equal(asked, [np.zeros(LENGTH)])


def test_a_share_that_was_made_is_the_same_once_more(guard):
    hers, shared = guard(), replace(order(), share="{}")
    hers.journal.released = lambda order: np.arange(LENGTH)
    np.testing.assert_array_equal(hers.train(shared, np.zeros(LENGTH), masked=True), np.arange(LENGTH))
    assert hers.account.books.releases == 0


def test_a_share_in_a_sum_is_kept_to_the_last_bit(guard, monkeypatch):
    """What leaves alone is rounded to the length that its model travels in; a share is whole numbers."""
    monkeypatch.setattr("flmarket.market.owner.on_wire", lambda vector, model: vector + 0.5)
    hers = guard()
    work = hers.admit(order(), np.zeros(LENGTH))
    hers._private = lambda work, vector: np.ones(LENGTH)
    assert set(hers.finish(work, np.zeros(LENGTH))) == {1.5}
    assert set(hers.finish(replace(work, order=replace(work.order, share="{}")), np.zeros(LENGTH))) == {1.0}


def test_a_training_has_so_long_and_fails_in_silence(guard, tmp_path):
    assert guard(most_seconds=7.0)._work_seconds == 7.0
    assert guard(most_seconds=7.0, answer_seconds=4.0)._work_seconds == 2.0
    hers = guard()
    work = hers.admit(order(), np.zeros(LENGTH))

    def stops():
        raise SystemExit(3)

    assert hers._trained(work, stops) is None
    assert hers._trained(work, lambda: 1 / 0) is None
    assert hers._trained(work, lambda: 5) == 5
    assert hers._trained(work, None).shape == (LENGTH,)
    real = guard(simulation_seed=None, most_seconds=0.05)
    assert real._trained(work, lambda: 5) == 5
    assert real._trained(work, stops) is None
    import threading

    assert real._trained(work, threading.Event().wait) is None
    assert isinstance(real.owner.noise(order()), SecureNoise)
    assert isinstance(hers.owner.noise(order()), SimulationNoise)
    draws = [real.owner.stream(order(), Purpose.NOISE).random() for _ in range(2)]
    assert draws[0] != draws[1]


def test_streams_are_everybodys_own(guard, tmp_path):
    owners = [make_owner(tmp_path, simulation_seed=5, number=number) for number in range(3)]
    works = [Work(one, call(), order(owner=one.number), np.zeros(LENGTH), None, None) for one in owners]
    found = Streams(works)
    assert len(found) == 3
    draws = [one.stream(order(), Purpose.BATCHES).random() for one in owners]
    assert [found[i].random() for i in range(3)] == draws
    assert [one.random() for one in found[1:]] == draws[1:]
    assert len(set(draws)) == 3


def test_words_of_refusals_are_the_guards_own():
    def raises(error):
        def answer():
            raise error

        return guarded(answer)

    for error, found, replayed in (
        (_Stop("x", "y"), "x", False), (_Stop("replay", "y"), "replay", True),
        (PrivacyBudgetExhausted("s"), "cap", False), (SumVoid("s"), "masking", False),
        (Tampered(1, "s", "t"), "masking", False), (ReplayRefused("s"), "replay", True),
        (ValueError("her secret"), "error", False),
    ):  # fmt: skip
        answer = raises(error)
        assert (answer.code, answer.replayed) == (found, replayed)
        assert "secret" not in answer.reason
    assert guarded(lambda: 5) == 5


def test_failures_on_purpose_come_as_often_as_they_were_asked_for(tmp_path):
    orders = [order(round_index=index) for index in range(200)]
    vector, start = np.ones(LENGTH), np.zeros(LENGTH)
    for dropout, faulty in ((0.0, 0.0), (1.0, 0.0), (0.3, 0.0), (0.0, 1.0), (0.3, 0.2), (0.0, 0.2)):
        owner = make_owner(tmp_path, simulation_seed=5, dropout=dropout, faulty=faulty)
        gone = [drops_out(owner, one) for one in orders]
        bad = [np.isnan(spoilt(owner, one, vector, start)).all() for one in orders]
        assert abs(np.mean(gone) - dropout) < 0.1
        assert abs(np.mean([b and not g for b, g in zip(bad, gone, strict=True)]) - faulty) < 0.1
        assert all(isinstance(found, bool) for found in gone)
        assert faulty or not any(bad)

    class Doubling:
        def upload(self, sent, parameters, rng):
            return 2 * sent + parameters + 0 * rng.random()

    liar = make_owner(tmp_path, simulation_seed=5, adversary=Doubling())
    np.testing.assert_array_equal(spoilt(liar, orders[0], vector, start + 1), np.full(LENGTH, 3.0))


def test_an_auctions_currency_is_pure_epsilon():
    side = OwnerSide()
    assert side.amount(PureDp(0.25)) == 0.25
    for other in (ZCdp(0.1), ApproxDp(0.1, 1e-9), GaussianRelease(1.0), ExponentialRelease(0.1), Unprotected()):
        with pytest.raises(InvalidInput, match="loss"):
            side.amount(other)
    announced = call()
    assert side.whole(announced, PureDp(1.0), 5) == (PureDp, 1)
    event, count = side.whole(announced, ApproxDp(1.0, 1e-5), 5)
    assert (event(0.5), count) == (PureDp(0.5), 1)
    assert side.given(order(), announced) == loss("auction", 0.5)
    assert (side.unit(announced), side.asks_once, side.lasting) == ("update", False, False)
    assert side.stays_out(value=None, allow_raw=False, cap=PureDp(1.0), trust=("local",)) == ""
    assert not side.trains_itself(announced)
    assert not side.noises_itself(announced)
    np.testing.assert_array_equal(side.nothing(np.ones(3)), np.zeros(3))
