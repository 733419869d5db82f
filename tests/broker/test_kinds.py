"""Every kind of market as a task: posted, played, billed, proven and downloaded over the API; and its books."""

import copy
import io
import json

import numpy as np
import pytest
from power_cuts import swap
from sqlalchemy import update

from flmarket.broker.core import Party
from flmarket.broker.errors import Conflict
from flmarket.broker.office import explore, offers, parties, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.requests import ExploreRequest, TaskRequest
from flmarket.broker.tables import RoundRow, TaskRow
from flmarket.broker.work.rounds import SqlStore
from flmarket.broker.work.worker import Worker
from flmarket.client import BrokerClient
from flmarket.errors import InvalidInput
from flmarket.ledger import AwardState, SealedReceipt
from flmarket.market import kinds
from flmarket.privacy import GaussianRelease, PureDp, RecordLevel, Unprotected, event_from_dict
from flmarket.privacy.composition import zcdp_rho

DATA = {"name": "breast-cancer", "owners": 4, "partition": "equal"}
ORDERS = {
    "auction": {"task": {"name": "t", "rounds": 2, "bidders_per_round": 3, "budget_per_round": 1500.0}},
    "sampling": {
        "task": {"name": "t", "rounds": 2, "budget_per_round": 6.0},
        "sampling": {"costs": [1.0, 4.0], "hard_cap": 12.0, "first_rate": 0.2},
    },
    "reward": {"task": {"name": "t", "rounds": 2, "learning_rate": 0.2}, "reward": {"reward": 5.0}},
    "joint": {
        "task": {"name": "t", "rounds": 2},
        "joint": {"budget": 100.0, "costs": [1.0, 4.0], "epsilon": 20.0, "validation": 50, "aggregation": "median"},
    },
}
LOSSES = {"auction": PureDp, "sampling": Unprotected, "reward": RecordLevel, "joint": GaussianRelease}
ESCROW = {"auction": 3_000_000_000, "sampling": 24_000_000, "reward": 5_000_000, "joint": 100_000_000}
LASTING = ("joint", "reward")


def order_for(kind, **changes):
    return copy.deepcopy({"kind": kind, "seed": 7, "data": DATA, **ORDERS[kind]}) | changes


def strict(text):
    """JSON as its standard has it: no Infinity, no NaN."""

    def refuse(name):
        raise AssertionError(f"{name} in an answer")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("kind", ORDERS)
def test_a_task_of_every_kind_from_posting_to_bill(kind, small, http, joined, play):
    buyer, operator = joined(small, "buyer"), joined(small, "operator")

    def get(path, who=buyer):
        answer = http.get(f"/api/v1{path}", headers=who.headers)
        assert answer.status_code == 200, answer.text
        return strict(answer.text)

    with BrokerClient(str(http.base_url), buyer.key) as client:
        task = client.post_task(order_for(kind, model={"name": "softmax"}))
        assert task.escrow_micros == ESCROW[kind]
        play(small)
        done = client.task(task.id)
        assert (done.state, done.error, done.rounds_done) == ("finished", "", 2)
        bill = client.bill(task.id)
        assert bill.escrow_micros == bill.spent_micros + bill.refunded_micros
        assert bill.spent_micros == sum(line.spent_micros for line in bill.lines) > 0
        assert client.account().balance_micros == 1_000_000_000_000 - bill.spent_micros
        if kind in LASTING:
            assert [bool(line.spent_micros) for line in bill.lines] == [False, True]
        kinds_of_events = [event.kind for event in client.follow(task.id)]
        assert kinds_of_events.count("settled") == 2
        documents = client.receipts(task.id, 1)
        with np.load(io.BytesIO(client.model(task.id))) as model:
            arrays = {name: model[name] for name in model if name != "about"}
        assert sum(one.size for one in arrays.values()) == done.dimension
        assert all(np.isfinite(one).all() for one in arrays.values())

    for who in (buyer, operator):
        awards = get(f"/tasks/{task.id}/rounds/1", who)["awards"]
        assert len(awards) == len(documents) > 0
        assert {type(event_from_dict(one["loss"])) for one in awards} == {LOSSES[kind]}
        assert all((one["epsilon"] is None) == (kind == "sampling") for one in awards)
    for document, award in zip(documents, get(f"/tasks/{task.id}/rounds/1", operator)["awards"], strict=True):
        receipt = SealedReceipt.from_dict(document)
        receipt.check(small.books.ledger.head(receipt.head.size))
        assert (receipt.loss, receipt.price_micros) == (event_from_dict(award["loss"]), award["price_micros"])
    for path in ("/market", "/ledger", f"/tasks/{task.id}/rounds", f"/tasks/{task.id}/rounds/1/receipts", "/tasks"):
        get(path)
    told = get("/market")["tasks"][0]
    assert (told["kind"], told["budget_micros_total"], told["open"]) == (kind, ESCROW[kind], False)
    assert told["budget_micros_per_round"] == (None if kind in LASTING else ESCROW[kind] // 2)
    events = [event.data for event in tasks.events(small, buyer.party, task.id) if event.kind == "awards"]
    strict(json.dumps(events))
    assert {type(event_from_dict(one["loss"])) for data in events for one in data["winners"]} == {LOSSES[kind]}
    assert "flmarket_" in http.get("/metrics").text
    check = http.post("/api/v1/operator/ledger/verify", headers=operator.headers).json()
    assert (check["ok"], check["findings"]) == (True, [])


def test_the_catalogue_tells_the_kinds(small, http, joined):
    found = http.get("/api/v1/catalogue", headers=joined(small, "buyer").headers).json()["kinds"]
    assert [one["name"] for one in found] == list(kinds.names()) == sorted(ORDERS)
    assert {one["name"]: one["lasting"] for one in found} == {name: name in LASTING for name in ORDERS}
    assert all(len(one["about"]) > 40 for one in found)


@pytest.mark.parametrize("kind", sorted(set(ORDERS) - {"auction"}))
def test_other_kinds_are_not_for_registered_owners_nor_for_the_explorer(kind, small, joined):
    buyer, owner = joined(small, "buyer"), joined(small, "owner")
    order = TaskRequest.model_validate(order_for(kind))
    tasks.post_task(small, buyer.party, order)
    assert offers.list_offers(small, owner.party).items == ()
    with pytest.raises(InvalidInput, match="auction"):
        explore.explore(small, buyer.party, ExploreRequest(task=order, budgets_micros=[10**6]))


def test_what_a_buyer_cannot_pay_is_not_posted(small, joined):
    poor = parties.create_party(small, None, role="buyer", name="poor")
    for kind in ORDERS:
        with pytest.raises(Conflict, match="in escrow"):
            tasks.post_task(small, Party(poor.id, "buyer", "poor"), TaskRequest.model_validate(order_for(kind)))


@pytest.mark.parametrize("kind", LASTING)
def test_books_agree_at_every_step_and_a_false_bill_is_found(kind, small, joined):
    """Awards that run on are held for nothing that is over; what was paid after the last round is checked all the
    same, whichever row says something else."""
    buyer = joined(small, "buyer")
    task = tasks.post_task(small, buyer.party, TaskRequest.model_validate(order_for(kind)))
    worker, steps = Worker(small), 0
    while tasks.get_task(small, buyer.party, task.id).state not in ("finished", "failed"):
        worker.step()
        steps += 1
        assert reconcile(small.database.engine) == (), steps
        assert steps < 100
    worker.stop()
    assert tasks.get_task(small, buyer.party, task.id).rounds_done == 2
    for table, where in ((RoundRow, RoundRow.task_id == task.id), (TaskRow, TaskRow.id == task.id)):
        for more, found in ((1, {"bill"}), (-1, set())):
            with small.database.write() as session:
                session.execute(update(table).where(where).values(spent_micros=table.spent_micros + more))
            assert {one.rule for one in reconcile(small.database.engine)} == found


@pytest.mark.parametrize("after", [False, True], ids=["between rounds", "in a round"])
@pytest.mark.parametrize("kind", LASTING)
def test_a_task_that_fails_in_training_pays_whoever_delivered_so_far(kind, after, small, joined, monkeypatch):
    """Awards for all rounds, uploads of two have left: they are paid for and counted, and no escrow is left."""
    buyer, original, calls = joined(small, "buyer").party, SqlStore.save_plan, []

    def broken(self, plan, terms):
        calls.append(plan.index)
        if after or plan.index < 2:
            original(self, plan, terms)
        if plan.index == 2:
            raise RuntimeError("a bug")

    swap(monkeypatch, SqlStore, "save_plan", broken)
    order = order_for(kind)
    order["task"] |= {"rounds": 4}
    task = tasks.post_task(small, buyer, TaskRequest.model_validate(order))
    Worker(small).run_until_idle()
    done = tasks.get_task(small, buyer, task.id)
    assert (done.state, done.rounds_done, calls) == ("failed", 2, [0, 1, 2])
    awards = [one for one in small.books.ledger.awards() if one.id.startswith(f"{task.id}/0/")]
    assert awards
    assert {one.state for one in awards} == {AwardState.POSTED}
    assert done.spent_micros == sum(one.price_micros for one in awards)
    given = {one.award_id: one.guarantee for one in small.books.ledger.releases()}
    for one in awards:  # two of four rounds: half of the award's rho
        released, sold = given[one.id], one.loss
        if isinstance(sold, RecordLevel):
            released, sold = released.loss, sold.loss
        assert zcdp_rho(released) == pytest.approx(zcdp_rho(sold) / 2)
    assert small.books.ledger.balance("escrow") == small.books.ledger.balance(task.id) == 0
    assert sum(line.spent_micros for line in tasks.bill(small, buyer, task.id).lines) == done.spent_micros
    assert reconcile(small.database.engine) == ()


@pytest.mark.parametrize("kind", LASTING)
def test_a_buyer_who_cancels_in_training_gets_no_updates_for_nothing(kind, small, joined):
    """What was awarded is for all rounds: the task is played to its end, whatever its buyer or the clock says."""
    buyer = joined(small, "buyer").party
    order = order_for(kind)
    order["broker"] = {"round_seconds": 0.5}
    task_id = tasks.post_task(small, buyer, TaskRequest.model_validate(order)).id
    worker = Worker(small)
    while tasks.get_task(small, buyer, task_id).rounds_done < 1:
        with small.database.write() as session:
            session.execute(update(TaskRow).values(next_at=0))
        worker.step()
    tasks.cancel_task(small, buyer, task_id)
    with small.database.write() as session:
        session.execute(update(TaskRow).values(deadline_at=1))
    while tasks.get_task(small, buyer, task_id).state == "running":
        with small.database.write() as session:
            session.execute(update(TaskRow).values(next_at=0))
        worker.step()
    done = tasks.get_task(small, buyer, task_id)
    assert (done.state, done.rounds_done) == ("finished", 2)
    assert done.spent_micros > 0
    assert reconcile(small.database.engine) == ()
