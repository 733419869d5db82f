"""A hostile server against the owner's guard: nothing about records before it is charged, nothing below the price."""

import sqlite3
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("flwr")

from hostile import FEATURES, LENGTH, RECORDS, Desk, TwoWorlds, call, delivered, order, refused, softmax, terms_of

from flmarket import privacy
from flmarket.bids import Kind, Valuations
from flmarket.engines.flower.messages import RELEASE, TRAIN, pack, unpack
from flmarket.learning import LocalTraining, Records, SoftmaxRegression, built, clipped_gradients, updates
from flmarket.ledger import Award, DurableAccount, MemoryLedger
from flmarket.market import Bid
from flmarket.market.owner import LARGEST_PARAMETER, Guard, _Stop
from flmarket.market.record import KEPT, Mask, OwnerJournal, close_records
from flmarket.privacy import ApproxDp, PureDp, RecordLevel, Uncapped, Unprotected, ZCdp

PLAIN = {"x": np.random.default_rng(0).normal(size=(RECORDS, FEATURES)), "y": np.arange(RECORDS) % 2}


@pytest.fixture(autouse=True)
def closed_records():
    yield
    close_records()


def with_record(feature):
    """The same records, but for one feature of the first."""
    x = PLAIN["x"].copy()
    x[0, 0] = feature
    return {"x": x, "y": PLAIN["y"]}


# 1. The guard as an oracle


def overflowing(threshold):
    """Parameters under which a score overflows exactly for records whose first feature is above a threshold."""
    return np.array([np.finfo(float).max / threshold, 0.0, 0.0, 0.0])


def test_a_spent_account_is_no_oracle_on_features(tmp_path):
    """Bisection on a feature by overflow: the answers are the same whatever the feature is, and cost nothing."""
    worlds = TwoWorlds(tmp_path, with_record(1.25), with_record(37.5), cap=PureDp(0.5))
    worlds.bid()
    worlds.bid(round_index=1)
    delivered(worlds.train())
    for threshold in np.geomspace(1.1, 1000, 60):
        worlds.train(round_index=1, records=1, parameters=overflowing(threshold))
        worlds.train(round_index=1, records=1, parameters=np.clip(overflowing(threshold), -1e9, 1e9))
    assert worlds.desks[0].releases == worlds.desks[1].releases == ["t/0/7"]


def test_an_open_account_is_no_oracle_either(tmp_path):
    """An order under which one owner's training overflows and the other's does not: both deliver, both pay."""
    small, huge = ({"x": np.full((RECORDS, FEATURES), size)} for size in (1.0, 1.7e308))
    worlds = TwoWorlds(tmp_path, small, huge)
    worlds.bid()
    with np.errstate(over="ignore"):
        first = delivered(worlds.train(parameters=np.full(LENGTH, LARGEST_PARAMETER)))
    assert np.abs(first).min() > 0, "noise was added"
    assert [desk.releases for desk in worlds.desks] == [["t/0/7"]] * 2


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_announced_classes_do_not_tell_which_records_she_holds(tmp_path, classes):
    """`classes = 1` used to say for free whether she holds a positive record."""
    worlds = TwoWorlds(tmp_path, {"y": np.zeros(RECORDS, dtype=int)}, {"y": np.arange(RECORDS) % 2})
    length = FEATURES + 1 if classes <= 2 else classes * (FEATURES + 1)
    worlds.bid(classes=classes, parameters=length)
    worlds.train(classes=classes, parameters=np.zeros(length))
    worlds.check_accounts()


def test_a_declared_number_of_classes_keeps_her_out_by_declaration(tmp_path):
    worlds = TwoWorlds(tmp_path, {"y": np.zeros(RECORDS, dtype=int)}, {"y": np.arange(RECORDS) % 2}, classes=2)
    assert refused(worlds.bid(classes=1), "abstains")
    assert unpack(Bid, worlds.bid()) is not None


class Closed:
    """Numbers that cannot be had, as those of a tensor that is part of a graph."""

    def __array__(self, *arguments, **options):
        raise RuntimeError("no numbers")


def fails(how):
    """A training function of the owner's own that fails if her first label is 1."""

    def compute(owner, wanted, parameters):
        if owner.y[0] == 0:
            return np.ones_like(parameters)
        if how == "raises":
            raise ValueError(f"cannot fit {owner.x[0].tolist()}")
        if how == "exits":
            sys.exit(3)
        if how == "hangs":
            time.sleep(60)
        return {
            "nan": np.full(LENGTH, np.nan), "inf": np.full(LENGTH, np.inf), "longer": np.zeros(LENGTH + 1),
            "square": np.zeros((2, 2)), "empty": np.zeros(0), "nothing": None, "words": "sorry",
            "huge": np.full(LENGTH, 1e308), "whole": [10**400] * LENGTH, "closed": Closed(),
        }[how]  # fmt: skip

    return compute


FAILURES = [
    "raises",
    "exits",
    "hangs",
    "nan",
    "inf",
    "longer",
    "square",
    "empty",
    "nothing",
    "words",
    "huge",
    "whole",
    "closed",
]


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_training_that_fails_on_some_records_shows_nothing(tmp_path, how):
    ones = {"y": np.ones(RECORDS, dtype=int)}
    worlds = TwoWorlds(tmp_path, {"y": np.zeros(RECORDS, dtype=int)}, ones, compute=fails(how), most_seconds=0.3)
    worlds.bid()
    delivered(worlds.train())
    worlds.check_accounts()
    answer = delivered(worlds.desks[1].release(order()))
    assert np.abs(answer).min() > 0, "noise around nothing, not nothing"
    assert worlds.desks[1].releases == ["t/0/7"], "what failed is charged all the same"


def test_a_machine_that_died_at_work_answers_with_noise_once_its_time_is_up(tmp_path):
    """Claimed and charged, then the power went: asked again, an update of nothing leaves, once and for all."""
    desk = Desk(tmp_path)
    desk.bid()

    def dies(*arguments):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "_trained", dies)
        with pytest.raises(KeyboardInterrupt):
            desk.train()
    assert desk.releases == ["t/0/7"]
    assert refused(desk.release(order()), "unreleased"), "it may still be at work"
    assert refused(desk.train(), "replay")
    close_records()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e12)  # its time is long up
        first = delivered(desk.release(order()))
    np.testing.assert_array_equal(delivered(desk.release(order())), first)
    assert desk.releases == ["t/0/7"]


def test_asking_again_while_training_runs_never_yields_two_vectors(tmp_path):
    """Late training after an answer of nothing: what was kept first stays what leaves."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(owner, wanted, parameters):
        begun.set()
        assert go_on.wait(20)
        return np.ones_like(parameters)

    desk, answers = Desk(tmp_path, compute=slow), []
    desk.bid()
    thread = threading.Thread(target=lambda: answers.append(delivered(desk.train())))
    thread.start()
    assert begun.wait(20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e12)  # its time is long up
        first = delivered(desk.release(order()))
    go_on.set()
    thread.join()
    np.testing.assert_array_equal(answers[0], first)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"learning_rate": 0.2}, "terms"),
        ({"records": 1}, "records"),
        ({"amount": 0.0005}, "epsilon"),
        ({"parameters": np.full(LENGTH, np.nan)}, "parameters"),
        ({"parameters": np.full(LENGTH, 1e10)}, "parameters"),
        ({"parameters": np.full(LENGTH, 1e10), "dtype": "float32"}, "parameters"),
        ({"parameters": np.full(LENGTH, np.inf), "dtype": "float32"}, "parameters"),
        ({"parameters": np.zeros(LENGTH - 1)}, "parameters"),
        ({"parameters": np.zeros((LENGTH, 1))}, "parameters"),
        ({"dtype": "float16"}, "error"),
        ({"dtype": "int64"}, "error"),
    ],
)
def test_training_terms_are_those_of_the_bid(tmp_path, changes, code):
    desk = Desk(tmp_path, least_records=5)
    desk.bid()
    assert refused(desk.train(**changes), code)
    assert desk.releases == []
    delivered(desk.train())


@pytest.mark.parametrize(
    "model", [softmax(steps=2), softmax(batch_size=1), softmax(l2=1.0), softmax(learning_rate=0.2), softmax(4), ""]
)
def test_what_is_trained_is_what_she_bid_for(tmp_path, model):
    """An order cannot name a model or its local work: only announcements can, and the first one stands."""
    trained = []

    def compute(owner, wanted, parameters):
        trained.append(owner.trains(call()).local)
        return np.zeros_like(parameters)

    desk = Desk(tmp_path, compute=compute)
    desk.bid()
    assert refused(desk.bid(model=model), "terms")
    content = pack(order(), np.zeros(LENGTH), escrow=desk.proof(order()))
    content["order"]["model"] = model
    assert refused(desk.send(TRAIN, content), "error")
    assert desk.releases == []
    delivered(desk.train())
    assert trained == [LocalTraining()]


HOSTILE_MODELS = {
    "a stranger's code": '{"classes":2,"features":3,"local":null,"name":"os:system","settings":{}}',
    "her own files": '{"classes":2,"features":3,"local":null,"name":"hostile:Desk","settings":{"folder":"/"}}',
    "not registered": softmax().replace("softmax", "transformer"),
    "too large": '{"classes":2,"features":3,"local":null,"name":"mlp","settings":{"hidden":[100000,100000]}}',
    "a very long text": softmax().replace("{}", '{"l2":' + "0" * 1900 + "}"),
    "longer than any": softmax() + " " * 3000,
    "deep": "[" * 1900,
    "no JSON": "softmax",
    "not canonical": softmax().replace(",", ", "),
    "for ever": softmax(steps=10_000).replace("10000", "10001"),
    "an odd setting": softmax().replace("{}", '{"shuffle":true}'),
    "another length": softmax(classes=3),
    "other features of the same length": softmax(7),
    "other classes of the same length": softmax(FEATURES, 2).replace('"classes":2', '"classes":1'),
    "nothing": "",
}


@pytest.mark.parametrize("what", HOSTILE_MODELS)
def test_a_hostile_model_is_not_built_and_not_bid_for(tmp_path, what):
    """Whatever its text says: no code that it names is run, no memory taken, no record touched, nothing on record."""
    text = HOSTILE_MODELS[what]
    parameters = 8 if "same length" in what and "features" in what else LENGTH
    worlds = TwoWorlds(tmp_path, with_record(1.0), with_record(1e300))
    answer = worlds.bid(model=text, parameters=parameters)
    assert refused(answer, "error" if len(text) > 2000 else "abstains")
    assert refused(worlds.train(parameters=np.zeros(parameters)), "no bid")
    assert worlds.desks[0].releases == []
    assert unpack(Bid, worlds.bid()) is not None, "and the round is not spoilt by it"


def test_a_model_by_its_path_is_trained_only_by_whom_allows_it(tmp_path):
    text = '{"classes":2,"features":3,"local":null,"name":"hostile:Tiny","settings":{}}'
    assert refused(Desk(tmp_path / "a").bid(model=text), "abstains")
    desk = Desk(tmp_path / "b", allow=("hostile:Tiny",))
    assert unpack(Bid, desk.bid(model=text)) is not None
    delivered(desk.train())
    assert refused(Desk(tmp_path / "c").bid(model=text), "abstains"), "though the code is here by now"


def test_planted_an_oracle_is_caught(tmp_path, monkeypatch):
    """The guard of before, which computed first and refused what was not finite without a charge."""
    honest = Guard.train

    def computes_first(self, wanted, parameters, escrow=None, compute=None):
        vector = compute()
        if not np.isfinite(vector).all():
            raise _Stop("training", "training did not yield finite numbers")
        return honest(self, wanted, parameters, escrow, lambda: vector)

    monkeypatch.setattr(Guard, "train", computes_first)
    zeros, ones = ({"y": np.full(RECORDS, label)} for label in (0, 1))
    worlds = TwoWorlds(tmp_path, zeros, ones, compute=fails("nan"))
    worlds.bid()
    with pytest.raises(AssertionError, match="depends on records"):
        worlds.train()


@pytest.mark.parametrize("data", [PLAIN, {"x": PLAIN["x"] * 1e200, "y": PLAIN["y"]}])
def test_answers_to_orders_can_leave_at_a_fixed_time(tmp_path, data):
    """With `answer_seconds`, quick and hanging training answer after the same time, up to the noise's own."""
    slow = {"compute": fails("hangs")} if data is not PLAIN else {}
    labels = {"y": np.ones(RECORDS, dtype=int)} if slow else {}
    desk = Desk(tmp_path, answer_seconds=0.6, **(data | labels), **slow)
    desk.bid()
    begun = time.monotonic()
    delivered(desk.train())
    assert 0.6 <= time.monotonic() - begun < 30  # and not the minute that one of them would take


# 2. One bad record in a record-level market


def test_one_record_moves_a_mean_of_clipped_gradients_by_its_share_only():
    """A record whose class the model lacks, or whose score overflows, is worth 0: not the whole mean."""
    rng, clip, m = np.random.default_rng(1), 0.7, 30
    for classes in (2, 4):
        model = SoftmaxRegression(5, classes)
        params = rng.normal(size=model.dimension)
        x, y = rng.normal(size=(m, 5)), rng.integers(classes, size=m)
        before = clipped_gradients(model, params, [Records(x, y)], clip)
        for feature, label in ((1e308, 0), (0.0, classes), (1e160, 1), (-1e308, classes + 5), (np.nan, 0), (np.inf, 1)):
            other, labels = x.copy(), y.copy()
            other[3], labels[3] = feature, label
            with np.errstate(all="ignore"):
                after = clipped_gradients(model, params, [Records(other, labels)], clip)
            assert np.linalg.norm(after - before) <= 2 * clip / m * (1 + 1e-9)


REWARD = terms_of("reward", rounds=4)


def test_in_the_reward_game_the_guard_clips_every_record_itself(tmp_path):
    """Noise there is for a record's share, so a training function of somebody's own is not asked."""
    asked = []

    def unclipped(owner, wanted, parameters):
        asked.append(wanted)
        return np.full(LENGTH, 1e6)

    desk = Desk(tmp_path, compute=unclipped, cap=RecordLevel(ZCdp(10.0)), value=1.0, privacy_budget=1.0)
    assert unpack(Bid, desk.bid(**REWARD)) is not None
    vector = delivered(desk.train(**REWARD))
    assert not asked
    assert np.abs(vector).max() < 100


@pytest.mark.parametrize("where", [1.0, -1.0])
def test_a_penalty_does_not_carry_one_record_past_the_noise(tmp_path, where):
    """Announced so large that its sum with the mean rounds to whole numbers: one record decided which, for all to see.

    The mean's first number is 0.55 or 0.5 in the two worlds, and half of a number's last bit is 0.5 there.
    """
    clip_share, trials, wins = 1 / RECORDS, 40, 0
    terms = terms_of("reward", rounds=1, model=softmax(l2=2.0**23))
    start = np.array([where * 2.0**29, 0.0, 0.0, 0.0])
    x = np.zeros((RECORDS, FEATURES))
    x[:, 0] = 1e6 * where
    labels = {"in": np.arange(RECORDS) >= 11, "out": np.arange(RECORDS) >= 10}  # of the first class: in the mean
    desks = {
        world: Desk(tmp_path / world, cap=RecordLevel(ZCdp(1e9)), value=1.0, privacy_budget=1.0, x=x, y=y.astype(int))
        for world, y in labels.items()
    }
    rng = np.random.default_rng(3)
    for trial in range(trials):
        world, task = ["in", "out"][rng.integers(2)], f"t{trial}"
        assert unpack(Bid, desks[world].bid(task=task, **terms)) is not None
        vector = delivered(desks[world].train(task=task, parameters=start, **terms))
        seen = where * vector[0] - 2.0**52
        wins += (seen > 0.5) == (world == "in")
        assert np.linalg.norm(vector) < 1.0 + 50 * clip_share, "longer than clip and noise can make it"
    allowed = stats.norm.cdf(np.sqrt(2 * 0.5) / 2)  # of ρ = 0.5
    assert stats.binom.sf(wins - 1, trials, allowed) > 1e-6, f"{wins} of {trials} guesses right"


# 3. The price


def test_a_release_below_her_own_valuation_is_refused(tmp_path):
    """An order at price 0 was delivered at ε = 1 though her cost was 100."""
    desk = Desk(tmp_path, privacy_budget=1.0, cap=PureDp(10.0), valuation=_linear(2.5))
    desk.bid()
    for price in (0, 1, 99_999_998):
        assert refused(desk.train(amount=1.0, price_micros=price, held=False), "price")
    assert desk.releases == []
    delivered(desk.train(amount=1.0, price_micros=100_000_000))


def test_a_price_is_for_what_is_asked_not_for_what_was_bid(tmp_path):
    """Half the ε and half the records cost a quarter; rounding down by a micro-unit is accepted, no more."""
    desk = Desk(tmp_path, privacy_budget=1.0, cap=PureDp(10.0), valuation=_linear(1 / 6))
    desk.bid()
    quarter = 20 * 10**6 // 3 // 4  # linear: v = 2·rate·ε a record
    assert refused(desk.train(records=10, price_micros=quarter - 2, held=False), "price")
    delivered(desk.train(records=10, price_micros=quarter))


@pytest.mark.parametrize("market", ["sampling", "joint", "reward"])
def test_the_price_covers_the_cost_of_taking_part_in_other_markets(tmp_path, market):
    terms = terms_of(market)
    asks = {"sampling": 3.0, "joint": 3.0, "reward": 3.0 * 0.5}[market]
    cap = Uncapped() if market == "sampling" else ApproxDp(50.0, 1e-5)
    cap = RecordLevel(cap) if market == "reward" else cap
    desk = Desk(tmp_path, cap=cap, value=3.0, privacy_budget=1.0, allow_raw=market == "sampling")
    assert unpack(Bid, desk.bid(**terms)) is not None
    assert refused(desk.train(price_micros=int(asks * 1e6) - 2, held=False, **terms), "price")
    delivered(desk.train(price_micros=int(asks * 1e6), **terms))


def _linear(rate):
    return Valuations([int(Kind.LINEAR)], [rate])


def test_noise_that_holds_for_ideal_numbers_only_is_refused(tmp_path, monkeypatch):
    """A registered perturbation that does not say that it is sound in finite precision."""
    monkeypatch.setattr(privacy.LaplaceL1, "sound", False)
    desk = Desk(tmp_path)
    desk.bid()
    assert refused(desk.train(), "unsound")
    assert desk.releases == []


def test_no_proof_of_escrow_no_release(tmp_path):
    desk = Desk(tmp_path)
    desk.bid()
    assert refused(desk.send(TRAIN, pack(order(), np.zeros(LENGTH))), "escrow")
    assert desk.releases == []


def forged(desk):
    """Proofs that are true of something else than this order's price in the ledger that she knows."""
    good = order()
    other = MemoryLedger()
    other.deposit("d", "buyer", 10**9)
    other.hold(Award(good.award, 0, "buyer", "owner-7", 1.0, good.price_micros))
    ours = desk.ledger
    ours.deposit("more", "buyer", 10**9)
    ours.hold(Award("t/0/8", 0, "buyer", "owner-8", 1.0, good.price_micros))
    ours.hold(Award("t/1/7", 0, "buyer", "owner-7", 1.0, good.price_micros))
    yield "another ledger", other.hold_receipts([good.award], None)[good.award]
    yield "another award", ours.hold_receipts(["t/1/7"], {"t/1/7": desk.seen["t", 0]})["t/1/7"]
    yield "another owner", ours.hold_receipts(["t/0/8"], {"t/0/8": desk.seen["t", 0]})["t/0/8"]
    cheap = MemoryLedger()
    cheap.deposit("d", "buyer", 10**9)
    cheap.hold(Award(good.award, 0, "buyer", "owner-7", 1.0, good.price_micros - 1))
    yield "less money", cheap.hold_receipts([good.award], None)[good.award]
    stolen = MemoryLedger()
    stolen.deposit("d", "buyer", 10**9)
    stolen.hold(Award(good.award, 0, "buyer", "mallory", 1.0, good.price_micros))
    yield "for somebody else", stolen.hold_receipts([good.award], None)[good.award]


def test_forged_proofs_of_escrow_are_refused(tmp_path):
    desk = Desk(tmp_path)
    desk.ledger.deposit("before", "buyer", 1)
    desk.bid()
    assert desk.seen["t", 0] is not None
    for what, proof in forged(desk):
        answer = desk.send(TRAIN, pack(order(), np.zeros(LENGTH), escrow=proof))
        assert refused(answer, "escrow"), what
    assert desk.releases == []
    delivered(desk.train())


def test_a_ledger_that_was_rewritten_since_the_last_round_is_refused(tmp_path):
    desk = Desk(tmp_path)
    desk.bid()
    delivered(desk.train())
    fresh = MemoryLedger()  # the broker shows another past
    fresh.deposit("d", "buyer", 10**9)
    desk.bid(round_index=1)
    wanted = order(round_index=1)
    fresh.hold(Award(wanted.award, 1, "buyer", "owner-7", 1.0, wanted.price_micros))
    proof = fresh.hold_receipts([wanted.award], None)[wanted.award]
    assert refused(desk.send(TRAIN, pack(wanted, np.zeros(LENGTH), escrow=proof)), "escrow")
    delivered(desk.train(round_index=1))


# 4. Releases without noise


RAW = terms_of("sampling")


@pytest.mark.parametrize("cap", [PureDp(0.01), PureDp(1e15), ZCdp(5.0), ApproxDp(8.0, 1e-6)])
def test_a_raw_update_fits_under_no_cap(tmp_path, cap):
    """An exact record left under a cap of 0.01 and the account showed 0."""
    desk = Desk(tmp_path, cap=cap, allow_raw=True, value=1.0)
    assert refused(desk.bid(**RAW), "abstains")
    assert desk.train(**RAW) is not None
    assert desk.releases == []


def test_a_raw_update_is_refused_even_after_a_bid_made_without_a_cap(tmp_path):
    """She set a cap after she had bid: the account decides."""
    Desk(tmp_path, cap=Uncapped(), allow_raw=True, value=1.0).bid(**RAW)
    close_records()
    with DurableAccount.open(tmp_path / "owner-7.account.sqlite") as account:
        account.change_cap(PureDp(1.0))
    desk = Desk(tmp_path, cap=PureDp(1.0), allow_raw=True, value=1.0)
    assert refused(desk.train(price_micros=10**6, **RAW), "cap")


def raw_update(owner):
    """What she trains from zeros, by the model that was announced; all of her records at once, so nothing is drawn."""
    return updates(built(softmax()), np.zeros(LENGTH), [owner.records(RECORDS)], [np.random.default_rng(0)])[0] * 0.1


def test_raw_updates_are_listed_and_unbounded(tmp_path):
    desk = Desk(tmp_path, cap=Uncapped(), allow_raw=True, value=1.0)
    desk.bid(**RAW)
    vector = delivered(desk.train(price_micros=10**6, **RAW))
    np.testing.assert_allclose(vector, raw_update(desk.owner))
    with desk.account as account:
        (release,) = account.releases()
        assert release.guarantee == Unprotected()
        assert account.spent == float("inf")
        with pytest.raises(Exception, match="no cap"):
            account.change_cap(PureDp(1e6))


# 5. Numbers of other lengths


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("clip", [1.0, 1e45])
def test_the_length_of_numbers_follows_the_question_and_is_no_second_release(tmp_path, clip):
    """Asked in single precision she answers in it; asked for it again, the same release, in double or not at all."""
    small, huge = ({"x": np.full((RECORDS, FEATURES), size)} for size in (1.0, 1e300))
    worlds = TwoWorlds(tmp_path, small, huge)
    worlds.bid(clip=clip)
    short = delivered(worlds.train(dtype="float32"))
    whole = delivered(worlds.release(order()))
    assert (whole != short).any(), "she keeps what her noise gave"
    np.testing.assert_array_equal(whole.astype(np.float32), short.astype(np.float32))
    assert refused(worlds.train(), "replay")
    assert refused(worlds.train(dtype="float32"), "replay")
    assert [desk.releases for desk in worlds.desks] == [["t/0/7"]] * 2


# 6. Files of the last version


def test_a_journal_of_the_version_before_opens_and_its_claims_stand(tmp_path):
    path = tmp_path / "owner-7.journal.sqlite"
    old = sqlite3.connect(path)
    old.executescript(
        "create table offers (task text, round integer, body text not null, primary key (task, round));"
        "create table releases (id text primary key, task text not null, terms text not null, vector blob);"
        "insert into offers values ('t', 0, '{}');"
        "insert into releases values ('t/0/7', 't', 'terms', null);"
        "pragma user_version = 1;"
    )
    old.close()
    journal = OwnerJournal(path)
    assert journal.claimed("t/0/7")
    assert journal.offer("t", 0) is None, "offers for fewer terms are made again"
    journal.close()
    desk = Desk(tmp_path)
    desk.bid()
    assert refused(desk.train(), "replay")
    assert refused(desk.release(order()), "unreleased")


def test_a_vector_that_is_kept_no_longer_is_not_made_up(tmp_path):
    """Of a task's releases the last eight are kept; an older one is refused, not answered by other numbers."""
    desk = Desk(tmp_path, cap=PureDp(100.0), most_seconds=0.01)
    orders = [order(round_index=index) for index in range(KEPT + 2)]
    first = []
    for one in orders:
        desk.bid(round_index=one.round_index)
        first.append(delivered(desk.train(one)))
    for place, one in enumerate(orders):
        if place < 2:
            assert refused(desk.release(one), "unreleased")
        else:
            np.testing.assert_array_equal(delivered(desk.release(one)), first[place])
    assert len(desk.releases) == KEPT + 2


def test_an_offer_of_the_version_before_is_made_again_and_what_was_released_stays(tmp_path):
    """Its announcement had other terms; the release's own are the order's, which are kept as text."""
    path = tmp_path / "owner-7.journal.sqlite"
    OwnerJournal(path).close()
    old = sqlite3.connect(path)
    old.execute('insert into offers values (\'t\', 1, \'{"call": {"steps": 1}, "bid": {"least_epsilon": 0.1}}\')')
    old.execute("insert into releases values ('t/0/7', 't', 'terms', ?, 0)", (np.ones(LENGTH).tobytes(),))
    old.execute("pragma user_version = 2")
    old.commit()
    old.close()
    desk = Desk(tmp_path)
    for index in (0, 1):
        assert unpack(Bid, desk.bid(round_index=index)) is not None
    assert refused(desk.train(), "replay")
    delivered(desk.train(round_index=1))


def test_a_journal_without_masks_gets_a_place_for_them_and_its_offers_stand(tmp_path):
    path = tmp_path / "owner-7.journal.sqlite"
    Desk(tmp_path).bid()
    close_records()
    old = sqlite3.connect(path)
    old.executescript("drop table masks; pragma user_version = 3;")
    old.close()
    journal = OwnerJournal(path)
    assert journal.offer("t", 0) is not None
    assert journal.mask("t/0/7") is None
    assert journal.keep_mask(order(), None, Mask(b"state"))
    assert not journal.keep_mask(order(), None, Mask(b"another")), "one beginning"
    assert not journal.keep_mask(order(), Mask(b"older"), Mask(b"another")), "one next state"
    assert journal.keep_mask(order(), Mask(b"state"), Mask(b"next", b"masked"))
    assert journal.mask("t/0/7") == Mask(b"next", b"masked")
    journal.close()


def test_everything_is_refused_that_is_no_order_of_hers(tmp_path):
    """Whatever comes for a release that was never begun: no vector."""
    desk = Desk(tmp_path)
    desk.bid()
    for wanted in (order(), replace(order(), loss=PureDp(0.1)), order(round_index=1), order(owner=8)):
        assert set(desk.send(RELEASE, pack(wanted)).content) == {"refusal"}
