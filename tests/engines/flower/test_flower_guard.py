"""The owner's guard: what passes, and that everything else is refused with nothing released."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from hostile import LENGTH, Desk, call, order, refused, softmax
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flmarket.engines.flower import InProcessGrid
from flmarket.engines.flower.messages import (
    BID,
    RELEASE,
    TRAIN,
    Delivery,
    Refusal,
    numbers,
    pack,
    reply,
    unpack,
    unpack_vector,
    vector_record,
)
from flmarket.errors import InvalidInput
from flmarket.ledger import DurableAccount
from flmarket.market import Announcement, Bid, Order
from flmarket.market.record import close_records
from flmarket.privacy import (
    ApproxDp,
    ExponentialRelease,
    GaussianRelease,
    PureDp,
    RecordLevel,
    Unprotected,
    ZCdp,
    event_to_dict,
)

CALL, ORDER = call(), order()


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path, simulation_seed=1)


def test_an_award_that_was_bid_for_is_released_once_and_charged(desk):
    assert unpack(Bid, desk.bid()).privacy_budget == 0.5
    answer = desk.train()
    assert unpack(Delivery, answer) == Delivery(release="t/0/7", owner=7)
    assert unpack_vector(answer).shape == (LENGTH,)
    assert desk.releases == ["t/0/7"]


ALL_ROUNDS = {"market": "reward", "loss": RecordLevel(ZCdp(0.1))}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"amount": 0.5000001}, "epsilon"),
        ({"amount": 0.0}, "epsilon"),
        ({"amount": 1e18}, "epsilon"),
        ({"loss": ZCdp(0.1)}, "terms"),
        ({"loss": ApproxDp(0.1, 1e-9)}, "terms"),
        ({"loss": GaussianRelease(1e9)}, "terms"),
        ({"loss": ExponentialRelease(0.1)}, "terms"),
        ({"loss": Unprotected()}, "terms"),
        ({"records": 21}, "records"),
        ({"records": 0}, "records"),
        ({"owner": 8, "award": "t/0/8"}, "stranger"),
        ({"award": "t/1/7"}, "award"),
        ({"award": "another"}, "award"),
        ({"lasting": True}, "award"),
        (ALL_ROUNDS | {"lasting": False}, "award"),
        ({"round_index": 1, "award": "t/1/7"}, "no bid"),
        ({"round_index": 1, "award": "t/0/7"}, "award"),
        ({"round_index": 1, "award": "t/0/7", "lasting": True}, "award"),
        ({"task": "u", "award": "u/0/7"}, "no bid"),
        ({"buyer": "somebody else"}, "terms"),
        ({"market": "sampling"}, "terms"),
        (ALL_ROUNDS, "terms"),
        ({"market": "joint"}, "terms"),
        ({"market": "gift"}, "market"),
        ({"market": "os:system"}, "market"),
        ({"learning_rate": 0.1000001}, "terms"),
        ({"learning_rate": float("inf")}, "terms"),
    ],
)
def test_orders_that_are_not_the_award_are_refused(desk, changes, code):
    desk.bid()
    assert refused(desk.train(**changes), code)
    assert desk.releases == []
    assert unpack(Delivery, desk.train()) is not None, "the honest order still works"


@pytest.mark.parametrize(
    "loss",
    [
        *(
            f'{{"kind": "pure-dp", "epsilon": {number}}}'
            for number in ("Infinity", "NaN", "-1", "true", '"0.5"', "[0.5]")
        ),
        '{"kind": "pure-dp", "epsilon": 0.5, "delta": 0.1}',
        '{"kind": "uncapped", "delta": 1e-6}',
        '{"kind": ["pure-dp"], "epsilon": 0.5}',
        "0.5",
        "[]",
        "",
        "[" * 1900,
        '{"kind": "pure-dp", "epsilon": 0.5}' + " " * 2000,
        0.5,
    ],
)
def test_a_loss_that_is_none_is_refused(desk, loss):
    desk.bid()
    content = pack(ORDER, np.zeros(LENGTH))
    content["order"]["loss"] = loss
    assert refused(desk.send(TRAIN, content), "error")
    assert desk.releases == []


def test_a_second_release_is_refused_whatever_the_terms(desk):
    desk.bid()
    first = unpack_vector(desk.train())
    assert refused(desk.train(), "replay")
    assert refused(desk.train(amount=0.1), "replay")
    assert refused(desk.train(parameters=np.ones(LENGTH)), "replay")
    assert desk.releases == ["t/0/7"]
    again = desk.send(RELEASE, pack(ORDER))
    np.testing.assert_array_equal(unpack_vector(again), first)
    assert desk.releases == ["t/0/7"], "the same bytes again cost nothing"


def test_what_was_released_is_repeated_under_the_same_terms_only(desk):
    desk.bid()
    assert refused(desk.send(RELEASE, pack(ORDER)), "unreleased")
    desk.train()
    assert refused(desk.send(RELEASE, pack(replace(ORDER, loss=PureDp(0.4)))), "unreleased")
    assert refused(desk.send(RELEASE, pack(replace(ORDER, loss=ZCdp(0.5)))), "unreleased")
    assert refused(desk.send(RELEASE, pack(replace(ORDER, lasting=True))), "unreleased")
    assert refused(desk.send(RELEASE, pack(replace(ORDER, price_micros=0))), "unreleased")


def test_a_replayed_message_changes_nothing(desk):
    desk.bid()
    (node,) = desk.grid.get_node_ids()
    message = Message(pack(ORDER, np.zeros(LENGTH)), node, TRAIN)
    assert unpack(Delivery, desk.grid.send_and_receive([message])[0]) is not None
    assert refused(desk.grid.send_and_receive([message])[0], "replay")
    assert desk.releases == ["t/0/7"]


def test_ten_requests_at_once_yield_one_release(desk):
    desk.bid()
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: desk.train(), range(10)))
    assert sum(unpack(Delivery, answer) is not None for answer in answers) == 1
    assert desk.releases == ["t/0/7"]


def test_the_lifetime_cap_holds_over_rounds_buyers_and_restarts(tmp_path):
    sold = 0.0
    for index in range(8):
        close_records()  # a new process each time
        desk = Desk(tmp_path, simulation_seed=1)
        buyer, task = f"buyer-{index % 2}", f"task-{index % 2}"
        bid = unpack(Bid, desk.bid(round_index=index, buyer=buyer, task=task))
        if bid is None:
            assert refused(desk.bid(round_index=index, buyer=buyer, task=task), "exhausted")
            continue
        award = f"{task}/{index}/7"
        terms = {"round_index": index, "buyer": buyer, "task": task, "award": award, "amount": bid.privacy_budget}
        assert unpack(Delivery, desk.train(**terms)) is not None
        sold += bid.privacy_budget
    assert sold == pytest.approx(2.0)
    assert len(desk.releases) == 4


def test_an_offer_stands_but_the_account_decides(tmp_path):
    """She bid 0.5 twice while 0.5 was left; the second award is refused."""
    desk = Desk(tmp_path, simulation_seed=1, cap=PureDp(0.5))
    desk.bid(round_index=0)
    desk.bid(round_index=1)
    assert unpack(Delivery, desk.train()) is not None
    assert refused(desk.train(round_index=1, award="t/1/7"), "cap")
    assert desk.releases == ["t/0/7"]


def test_a_bid_is_repeated_and_not_raised(desk):
    assert unpack(Bid, desk.bid()) == unpack(Bid, desk.bid())
    first = call()
    others = {
        "clip": 3.0, "perturbation": "sphere", "rounds": 50, "features": 5, "classes": 3, "learning_rate": 9.0,
        "buyer": "another", "market": "reward", "parameters": 5, "settings": '{"delta": 0.1}',
        "model": softmax(steps=50, learning_rate=9.0), "trust": "secure-aggregation",
    }  # fmt: skip
    assert others.keys() == {field.name for field in fields(Announcement)} - {"task", "round_index"}
    for name, value in others.items():
        assert refused(desk.bid(replace(first, **{name: value})), "terms"), name
    for model in (softmax(batch_size=1), softmax(l2=1.0), ""):
        assert refused(desk.bid(replace(first, model=model)), "terms"), model
    assert unpack(Bid, desk.bid()) is not None, "the first one stands"


def test_nothing_else_that_training_returns_gets_out(tmp_path):
    """A training function that attaches the data itself: the reply has the private vector and nothing more."""
    desk = Desk(tmp_path, simulation_seed=1)
    app = desk.grid.app

    def leaky(message, context):
        content = pack(Delivery(release="raw", owner=7), np.zeros(LENGTH))
        content["data"] = ArrayRecord([desk.owner.x])
        content["loss"] = MetricRecord({"loss": 0.1})
        return Message(content, reply_to=message)

    guard = app._mods[-1]
    desk.bid()
    (node,) = desk.grid.get_node_ids()
    message = Message(pack(ORDER, np.zeros(LENGTH)), node, TRAIN)
    answer = guard(message, desk.grid.contexts[node], leaky)
    assert set(answer.content) == {"delivery", "vector"}
    assert np.abs(unpack_vector(answer)).min() > 0, "noise was added"


@pytest.mark.parametrize("kind", ["evaluate", "train.other", "query", "query.data"])
def test_other_messages_get_no_answer_with_content(desk, kind):
    desk.bid()
    answer = desk.send(kind, pack(ORDER, np.zeros(LENGTH)))
    assert answer.has_error() or refused(answer, "unknown")


def test_a_record_that_cannot_be_opened_means_refusal(desk):
    desk.bid()
    close_records()
    path = desk.owner.record.with_suffix(".account.sqlite")
    path.write_bytes(b"not a database, and long enough to look like one" * 100)
    assert refused(desk.train(), "error")


def test_a_cap_changed_behind_the_accounts_back_means_refusal(tmp_path):
    Desk(tmp_path, simulation_seed=1).bid()
    raised = Desk(tmp_path, simulation_seed=1, cap=PureDp(1000.0))
    assert refused(raised.train(), "error")


def test_noise_is_secure_unless_the_owner_is_simulated(tmp_path):
    """Equal owners with equal orders: seeded noise repeats, the other does not, and no message can choose."""
    seeded = [_released(tmp_path / f"seeded-{i}", simulation_seed=1) for i in range(2)]
    np.testing.assert_array_equal(*seeded)
    secure = [_released(tmp_path / f"secure-{i}") for i in range(2)]
    assert (secure[0] != secure[1]).all()


def _released(folder, **changes):
    desk = Desk(folder, **changes)
    desk.bid()
    return unpack_vector(desk.train())


def test_noise_has_the_scale_of_the_award(tmp_path):
    """300 secure releases at ε = 0.5 with clip 1: Laplace noise of scale 2·clip/ε = 4, mean absolute value 4."""
    owner = {"cap": PureDp(1e6)}
    desk = Desk(tmp_path, compute=lambda owner, order, parameters: np.zeros(LENGTH), **owner)
    vectors = []
    for index in range(75):
        desk.bid(round_index=index)
        vectors.append(unpack_vector(desk.train(round_index=index, award=f"t/{index}/7")))
    assert np.abs(np.array(vectors)).mean() == pytest.approx(4.0, rel=0.3)


losses = st.builds(PureDp, st.floats(0, 1e9)) | st.builds(ZCdp, st.floats(0, 1)) | st.just(Unprotected())
scalars = st.one_of(
    st.text(max_size=5),
    losses.map(lambda loss: json.dumps(event_to_dict(loss))),
    st.integers(-5, 2**62),
    st.floats(),
    st.booleans(),
    st.lists(st.floats(0, 1), max_size=2),
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(list(pack(ORDER)["order"])), scalars, min_size=1, max_size=3))
def test_any_changed_order_is_refused_or_within_the_bid(tmp_path_factory, changes):
    desk = Desk(tmp_path_factory.mktemp("owner"), simulation_seed=1)
    desk.bid()
    content = pack(ORDER, np.zeros(LENGTH))
    for key, value in changes.items():
        content["order"][key] = value
    answer = desk.send(TRAIN, content)
    if unpack(Refusal, answer) is not None:
        assert not answer.content.array_records
        return
    made = unpack(Order, Message(content, 1, TRAIN))
    assert made.loss.epsilon <= 0.5
    assert made.records <= 20
    assert desk.releases == ["t/0/7"]


def test_an_empty_message_is_refused(desk):
    assert refused(desk.send(BID, RecordDict()), "malformed")
    assert refused(desk.send(TRAIN, RecordDict({"order": ConfigRecord({})})), "error")
    assert refused(desk.send(RELEASE, RecordDict()), "malformed")


def test_a_machine_without_an_owner_refuses(tmp_path):
    from flmarket.engines.flower.node import app

    grid = InProcessGrid(app, 1)
    grid.contexts = {9: Context(run_id=1, node_id=9, node_config={}, state=RecordDict(), run_config={})}
    (answer,) = grid.send_and_receive([Message(pack(CALL), 9, BID)])
    assert refused(answer, "error")


def test_planted_cheat_is_caught(tmp_path, monkeypatch):
    """Were the guard to skip the charge, the checks of this file would see it."""
    monkeypatch.setattr(DurableAccount, "charge", lambda *a: None)
    desk = Desk(tmp_path, simulation_seed=1)
    desk.bid()
    assert unpack(Delivery, desk.train()) is not None
    assert desk.releases == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [0, 1, LENGTH, 1000])
def test_a_vector_travels_as_numpy_writes_it(dtype, length):
    values = np.random.default_rng(length).normal(size=length)
    (made,) = vector_record(values, dtype).values()
    theirs = Array(values.astype(dtype))
    assert (made.dtype, made.shape, made.stype, made.data) == (theirs.dtype, theirs.shape, theirs.stype, theirs.data)
    read = numbers("vector", made, LENGTH + 1000)
    assert read.dtype == np.float64
    assert read.flags.writeable
    np.testing.assert_array_equal(read, values.astype(dtype).astype(np.float64))


GOOD = Array(np.arange(3.0))


@pytest.mark.parametrize(
    "odd",
    [
        Array("float64", (3,), "numpy.ndarray", GOOD.data[:-8]),
        Array("float64", (2,), "numpy.ndarray", GOOD.data[:-8]),
        Array("float64", (3,), "numpy.ndarray", b""),
        Array("float64", (-1,), "numpy.ndarray", GOOD.data),
        Array("float64", (True,), "numpy.ndarray", GOOD.data),
        Array("float64", (), "numpy.ndarray", GOOD.data),
        Array("float64", (3,), "numpy.ndarray", GOOD.data + b"more"),
        Array("float64", (3,), "numpy.ndarray", Array(np.arange(3)).data),
        Array("float32", (3,), "numpy.ndarray", GOOD.data),
        Array("float64", (3,), "numpy.ndarray", Array(np.arange(3.0, dtype=">f8")).data),
        Array(np.ones((2, 2))),
    ],
)
def test_whatever_is_not_written_so_is_left_to_numpy(odd):
    """The oracle is NumPy's own reader, and the type that was said."""
    try:
        expected = odd.numpy()
    except (ValueError, EOFError):
        expected = None
    if expected is None or str(expected.dtype) != odd.dtype:
        with pytest.raises(InvalidInput):
            numbers("vector", odd, 100)
    else:
        np.testing.assert_array_equal(numbers("vector", odd, 100), expected)


def test_reply_holds_only_what_it_is_given(desk):
    message = Message(pack(CALL), 1, BID)
    answer = reply(Delivery(release="r", owner=1), message, np.zeros(2))
    assert set(answer.content) == {"delivery", "vector"}
