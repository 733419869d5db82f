"""Cut off anywhere, go on: the same rounds, the same payments, nobody paid twice. On SQLite and PostgreSQL."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest
from power_cuts import PowerCut, cut, swap
from sqlalchemy import update

from flmarket.broker.books import Books
from flmarket.broker.core import Broker
from flmarket.broker.office import ledger, offers, parties, statements, tasks
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import now
from flmarket.broker.tables import Lease, TaskRow
from flmarket.broker.work import rounds, worker
from flmarket.broker.work.rounds import SqlStore
from flmarket.broker.work.worker import Worker
from flmarket.ledger import ESCROW, SqlLedger

POINTS = [
    (rounds, "open_round"),
    (SqlStore, "save_plan"),
    (SqlLedger, "hold_many"),
    (rounds, "award_round"),
    (SqlStore, "save_deliveries"),
    (rounds, "add_event"),
    (SqlLedger, "resolve_many"),
    (SqlStore, "save_round"),
    (Books, "refund"),
]
SKIP = {"refund": 0, "add_event": 8}  # of five events a round, the one for its deliveries


def other_prices(plan):
    """A stored plan that is not the one by which awards were held."""

    def changed(self, index):
        found = plan(self, index)
        orders = (
            () if found is None else tuple(replace(one, price_micros=one.price_micros // 3) for one in found.orders)
        )
        return None if found is None else replace(found, orders=orders)

    return changed


def books_of(broker, buyer, owner, task_id):
    awards = [award for award in broker.books.ledger.awards() if award.id.startswith(task_id)]
    return (
        [(a.id.partition("/")[2], a.state, a.price_micros, a.epsilon, a.reason) for a in awards],
        tasks.get_task(broker, buyer, task_id).state,
        [one.accuracy for one in tasks.rounds(broker, buyer, task_id).items],
        broker.books.ledger.balance(owner.id),
        broker.books.ledger.privacy_spent(owner.id),
    )


def market(broker, joined, order, cheap_bid):
    buyer, owner = joined(broker, "buyer").party, joined(broker, "owner").party
    request = order(bidders_per_round=12, owners={"dropout": 0.2, "faulty": 0.1})
    task = tasks.post_task(broker, buyer, request)
    offers.place_bid(broker, owner, task.id, cheap_bid(0.7))
    return buyer, owner, task.id


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, joined, order, cheap_bid):
    """What the market ends with when nothing happens."""
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path_factory.mktemp('calm')}/b.db", run_worker=False))
    buyer, owner, task_id = market(broker, joined, order, cheap_bid)
    Worker(broker).run_until_idle()
    result = books_of(broker, buyer, owner, task_id)
    broker.close()
    return result


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("where", "name"), POINTS, ids=[name for _, name in POINTS])
def test_power_cut_at_every_step(small, joined, order, cheap_bid, monkeypatch, undisturbed, where, name, after):
    """In the second round, before and after each thing that is written."""
    buyer, owner, task_id = market(small, joined, order, cheap_bid)
    with monkeypatch.context() as patch:
        cut(patch, where, name, after=after, skip=SKIP.get(name, 1))
        with pytest.raises(PowerCut):
            Worker(small).run_until_idle()
    again = Broker.open(small.settings)  # another process, as far as the database can tell
    with again.database.write() as session:
        session.execute(update(Lease).values(expires_at=0))
        session.execute(update(TaskRow).values(next_at=0))
    Worker(again).run_until_idle()
    assert books_of(again, buyer, owner, task_id) == undisturbed
    done = tasks.bill(again, buyer, task_id)
    assert done.left_micros == 0
    assert again.books.ledger.balance(ESCROW) == again.books.ledger.balance(task_id) == 0
    assert statements.statement(again, owner).earned_micros == again.books.ledger.balance(owner.id)
    again.books.ledger.verify()
    again.close()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_power_cut_while_posting(broker, joined, order, monkeypatch, after):
    buyer = joined(broker, "buyer").party
    before = parties.account(broker, buyer).balance_micros
    with monkeypatch.context() as patch:
        cut(patch, Books, "fund", after=after, skip=0)
        with pytest.raises(PowerCut):
            tasks.post_task(broker, buyer, order())
    with broker.database.write() as session:
        session.execute(update(TaskRow).values(created_at=now() - 60_000))
    Worker(broker).run_until_idle()
    (found,) = tasks.list_tasks(broker, buyer).items
    assert found.state == ("finished" if after else "failed")
    spent = found.spent_micros
    assert parties.account(broker, buyer).balance_micros == before - spent
    assert (spent > 0) == after


def test_a_round_that_cannot_be_repeated_is_given_up_and_nothing_is_lost(small, joined, order, monkeypatch):
    """If the awards on record are not those of the repetition, the round is void and the rest is refunded."""
    buyer, desk = joined(small, "buyer").party, joined(small, "operator").party
    before = parties.account(small, buyer).balance_micros
    task = tasks.post_task(small, buyer, order())
    with monkeypatch.context() as patch:
        cut(patch, rounds, "award_round", after=False, skip=1)
        with pytest.raises(PowerCut):
            Worker(small).run_until_idle()
    swap(monkeypatch, SqlStore, "plan", other_prices(SqlStore.plan))
    with small.database.write() as session:
        session.execute(update(Lease).values(expires_at=0))
    Worker(small).run_until_idle()
    done = tasks.get_task(small, buyer, task.id)
    assert done.state == "failed"
    assert "other terms" in done.error
    assert ledger.verify(small, desk).ok
    assert small.books.ledger.balance(ESCROW) == 0
    assert parties.account(small, buyer).balance_micros == before - done.spent_micros


def test_one_worker_at_a_time(small, joined, order):
    buyer = joined(small, "buyer").party
    task = tasks.post_task(small, buyer, order())
    first, second = Worker(small), Worker(small)
    assert first.step()
    assert not second.step()
    done = tasks.get_task(small, buyer, task.id).rounds_done
    assert done == 1
    first.stop()  # gives the lease back
    assert second.step()
    with small.database.write() as session:
        session.execute(update(Lease).values(holder=f"{socket.gethostname()}:999999999:dead"))
    second._lease_until = 0.0
    assert Worker(small)._has_lease()  # a holder that is gone is not waited for


def test_a_turn_longer_than_the_lease_keeps_it_and_a_lapsed_one_stays_lapsed(broker, monkeypatch):
    quick = replace(broker, settings=broker.settings.model_copy(update={"lease_seconds": 0.4}))
    busy, rival = Worker(quick), Worker(quick)
    inside, go_on, fences = threading.Event(), threading.Event(), []

    def long_turn():
        inside.set()
        go_on.wait(20)
        with broker.database.write():  # raises if the lease is lost
            fences.append(True)
        return False

    monkeypatch.setattr(busy, "_turn", long_turn)
    busy.start()
    assert inside.wait(20)
    for _ in range(6):
        time.sleep(0.2)
        assert not rival._has_lease()
    go_on.set()
    busy.stop()
    assert fences
    # without renewal it is another's after its time, and renewing does not bring it back
    assert busy._lease.take()
    time.sleep(0.5)
    assert rival._has_lease()
    busy._lease.renew()
    assert not busy._lease.take()


def test_an_unexpected_error_fails_the_task_without_telling_strangers_why(small, joined, order, monkeypatch, caplog):
    buyer = joined(small, "buyer").party
    task = tasks.post_task(small, buyer, order())

    def broken(*_):
        raise RuntimeError("inner secret")

    swap(monkeypatch, SqlStore, "save_plan", broken)
    Worker(small).run_until_idle()
    done = tasks.get_task(small, buyer, task.id)
    assert (done.state, done.refunded_micros) == ("failed", done.escrow_micros)
    assert "inner secret" not in done.error
    assert "inner secret" in caplog.text
    assert worker.log.name in {record.name for record in caplog.records}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(url, port):
    code = "from flmarket.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--db", url, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for _ in range(600):
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                return process
        except httpx.TransportError:
            pass
        assert process.poll() is None, "the service ended"
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the service did not become ready")


@pytest.mark.slow
def test_kill_9_and_restart(url, joined, order, cheap_bid):
    """A real process, killed twice in the middle of its work; then every rule still holds."""
    broker = Broker.open(Settings(database_url=url, run_worker=False))
    buyer, owner, desk = (joined(broker, role) for role in ("buyer", "owner", "operator"))
    before = parties.account(broker, buyer.party).balance_micros
    changes = {"rounds": 20, "bidders_per_round": 12, "owners": {"dropout": 0.2, "faulty": 0.1}}
    task = tasks.post_task(broker, buyer.party, order(**changes))
    offers.place_bid(broker, owner.party, task.id, cheap_bid(0.2))
    seen = 0
    for _ in range(2):
        process = start(url, port := free_port())
        while tasks.get_task(broker, buyer.party, task.id).rounds_done <= seen:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen = tasks.get_task(broker, buyer.party, task.id).rounds_done
        assert ledger.verify(broker, desk.party).ok
    process = start(url, port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", headers=buyer.headers, timeout=60) as http:
            while (found := http.get(f"/tasks/{task.id}").json())["state"] in ("queued", "running"):
                time.sleep(0.05)
    finally:
        process.terminate()
        process.wait()
    assert (found["state"], found["rounds_done"]) == ("finished", 20)
    assert ledger.verify(broker, desk.party).ok
    awards = [award for award in broker.books.ledger.awards() if award.round_index or award.epsilon]
    assert len({award.id for award in awards}) == len(awards)
    assert parties.account(broker, buyer.party).balance_micros == before - found["spent_micros"]
    assert statements.statement(broker, owner.party).earned_micros == broker.books.ledger.balance(owner.party.id)
    # the same market without any disturbance pays the same
    calm = tasks.post_task(broker, buyer.party, order(**changes))
    offers.place_bid(broker, owner.party, calm.id, cheap_bid(0.2))
    Worker(broker).run_until_idle(120)
    assert tasks.get_task(broker, buyer.party, calm.id).spent_micros == found["spent_micros"]
    broker.close()
