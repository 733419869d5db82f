"""Tasks of which only sums are seen: asked for over the API, played by the worker, cut off and gone on with."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from in_broker import played_in_broker
from power_cuts import PowerCut, cut
from sqlalchemy import update

from flmarket.broker.core import Broker, Party
from flmarket.broker.office import parties, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.requests import TaskRequest, public_terms, trust_of
from flmarket.broker.settings import Settings
from flmarket.broker.tables import Lease, TaskRow, vector
from flmarket.broker.work.rounds import SqlStore
from flmarket.broker.work.worker import Worker
from flmarket.engines import play
from flmarket.engines.config import MarketConfig
from flmarket.errors import InvalidInput
from flmarket.ledger import AwardState, MemoryLedger
from flmarket.privacy import RecordLevel, ZCdp

COMMON = {
    "seed": 7, "trust": "secure-aggregation", "broker": {"open": False}, "secure": {"survivors": 0.7},
    "data": {"name": "breast-cancer", "owners": 6, "partition": "equal"},
    "owners": {"privacy_cap": 8.0, "privacy_cap_delta": 1e-5},
}  # fmt: skip
ORDERS = {
    "auction": {
        "task": {"name": "t", "rounds": 3, "bidders_per_round": 6, "budget_per_round": 5000.0},
        "owners": COMMON["owners"] | {"dropout": 0.25},  # round 0 is void, the others are not
        "mechanism": {"auction": "m1"},
    },
    "sampling": {
        "task": {"name": "t", "rounds": 3, "budget_per_round": 20.0},
        "sampling": {"costs": [1.0, 4.0], "hard_cap": 40.0, "first_rate": 0.2, "epsilon": 1.0},
    },
    "reward": {"task": {"name": "t", "rounds": 3, "learning_rate": 0.2}, "reward": {"reward": 5.0}},
    "joint": {
        "task": {"name": "t", "rounds": 3},
        "joint": {"budget": 100.0, "costs": [1.0, 4.0], "epsilon": 2.0, "validation": 50, "aggregation": "average"},
    },
}


def order_of(kind, **changes):
    return copy.deepcopy({"kind": kind, **COMMON, **ORDERS[kind]}) | changes


def ends(ledger, task="t"):
    """Awards and releases, without the task's own name."""
    awards = {a.id: a for a in ledger.awards() if a.id.startswith(f"{task}/") and a.id[len(task) + 1].isdigit()}
    told = [(i.removeprefix(task), a.state, a.price_micros, a.reason, str(a.loss)) for i, a in awards.items()]
    given = [(r.award_id.removeprefix(task), r.guarantee) for r in ledger.releases() if r.award_id in awards]
    return sorted(told), sorted(given, key=str)


def in_memory(kind, task):
    """The same market without a broker, under the task's own id: rotations follow from it."""
    file = {name: value for name, value in order_of(kind).items() if name != "broker"}
    file["task"] = file["task"] | {"name": task}
    ledger = MemoryLedger()
    rounds, _ = play(MarketConfig.parse(file).spec(), ledger=ledger)
    return rounds.kind.buyers_model, ends(ledger, task)


@pytest.mark.parametrize("kind", ORDERS)
def test_a_task_in_sums_is_the_market_in_sums(kind, tmp_path):
    with played_in_broker(tmp_path, order_of(kind)) as (broker, row):
        model, expected = in_memory(kind, row.id)
        np.testing.assert_array_equal(vector(row.parameters), model)
        found = ends(broker.books.ledger, row.id)
        assert found == expected
        assert any(state is AwardState.POSTED for _, state, *_ in found[0])
        losses = [one.loss if isinstance(one, RecordLevel) else one for _, one in found[1]]
        assert all(isinstance(one, ZCdp) for one in losses)
        assert all(isinstance(one, RecordLevel) == (kind == "reward") for _, one in found[1])


@pytest.mark.parametrize("kind", ["auction", "reward"])
@pytest.mark.parametrize(("name", "after"), [("save_plan", True), ("save_deliveries", True), ("save_round", False)])
def test_a_power_cut_in_the_second_round_ends_in_the_same_books(kind, name, after, tmp_path, monkeypatch):
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False))
    person = parties.create_party(broker, None, role="buyer", name="buyer")
    parties.deposit(broker, None, person.id, 10**15)
    task = tasks.post_task(broker, Party(person.id, "buyer", "buyer"), TaskRequest.model_validate(order_of(kind)))
    with monkeypatch.context() as patch:
        cut(patch, SqlStore, name, after=after, skip=1)
        with pytest.raises(PowerCut):
            Worker(broker).run_until_idle()
    broker.close()
    again = Broker.open(broker.settings)
    with again.database.write() as session:
        session.execute(update(Lease).values(expires_at=0))
        session.execute(update(TaskRow).values(next_at=0))
    Worker(again).run_until_idle()
    model, expected = in_memory(kind, task.id)
    assert ends(again.books.ledger, task.id) == expected
    with again.database.read() as session:
        np.testing.assert_array_equal(vector(session.get_one(TaskRow, task.id).parameters), model)
    again.books.ledger.verify()
    assert reconcile(again.database.engine) == ()
    again.close()


def test_registered_owners_take_no_part_and_are_told_why(tmp_path):
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False))
    person = parties.create_party(broker, None, role="buyer", name="buyer")
    parties.deposit(broker, None, person.id, 10**15)
    open_to_all = TaskRequest.model_validate(order_of("auction", broker={"open": True}))
    with pytest.raises(InvalidInput, match="no room for shared noise"):
        tasks.post_task(broker, Party(person.id, "buyer", "buyer"), open_to_all)
    broker.close()


@pytest.mark.parametrize("kind", ORDERS)
def test_what_is_said_of_it(kind):
    order = TaskRequest.model_validate(order_of(kind))
    assert public_terms(order)["trust"] == "secure-aggregation"
    assert TaskRequest.model_validate(order.model_dump(mode="json")).market_file("t").spec().kind().policy is not None
    words = trust_of(order)
    assert words.model == "secure-aggregation"
    assert "noised and summed by the broker" in words.update
    assert "sums" in words.against
    if kind == "auction":
        assert order.aggregation_name == "secure-opt"


def test_an_order_of_single_updates_can_be_read_back_from_where_it_is_stored():
    """With all defaults, those of sums included."""
    order = TaskRequest.model_validate({"task": {"name": "t", "budget_per_round": 5.0}})
    assert TaskRequest.model_validate(order.model_dump(mode="json")) == order


def test_a_joint_task_that_must_see_single_uploads_is_refused_when_it_is_posted(tmp_path):
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False))
    person = parties.create_party(broker, None, role="buyer", name="buyer")
    parties.deposit(broker, None, person.id, 10**15)
    order = order_of("joint", joint=ORDERS["joint"]["joint"] | {"aggregation": "leave-one-out"})
    with pytest.raises(InvalidInput, match="to see each"):
        tasks.post_task(broker, Party(person.id, "buyer", "buyer"), TaskRequest.model_validate(order))
    assert broker.books.ledger.balance(person.id) == 10**15
    broker.close()
