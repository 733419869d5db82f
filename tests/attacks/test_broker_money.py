"""Nobody's money is stranded, paid twice or booked for another: the broker cut off, raced and lied to. Red before the
fix, each of them; `test_histories` is the same at random and on real processes.
"""

import json
import os
import random
import sqlite3
import stat
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import httpx
import pytest
from brokers import MONEY
from histories.runs import books
from power_cuts import PowerCut, cut, swap
from sqlalchemy import create_engine, event, text, update
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.exc import DBAPIError, OperationalError

from flmarket.broker.app import create_app
from flmarket.broker.books import Books
from flmarket.broker.core import Broker
from flmarket.broker.errors import Conflict
from flmarket.broker.office import audits, ledger, offers, operator, parties, sessions, statements, tasks
from flmarket.broker.requests import AuditRequest
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import now
from flmarket.broker.tables import FlowerRun, Lease, TaskRow
from flmarket.broker.work import rounds
from flmarket.broker.work import worker as worker_module
from flmarket.broker.work.flower.tenancy import Replaced, Tenancy
from flmarket.broker.work.rounds import SqlStore
from flmarket.broker.work.worker import Worker
from flmarket.cli import main
from flmarket.ledger import AwardState, LedgerUnavailable, SqlLedger


class Market:
    """A buyer, an owner who bids, an operator."""

    def __init__(self, broker, joined, order, cheap_bid):
        self.broker, self.order, self.cheap_bid, self.opened = broker, order, cheap_bid, []
        self.buyer, self.owner = joined(broker, "buyer").party, joined(broker, "owner").party
        self.desk = joined(broker, "operator").party

    def post(self, **changes):
        values = {"bidders_per_round": 12, "owners": {"dropout": 0.2, "faulty": 0.1}, **changes}
        task = tasks.post_task(self.broker, self.buyer, self.order(**values))
        offers.place_bid(self.broker, self.owner, task.id, self.cheap_bid(0.7))
        return task.id

    def restart(self):
        """Another process, as far as the database can tell."""
        self.broker = Broker.open(self.broker.settings)
        self.opened.append(self.broker)
        with self.broker.database.write() as session:
            session.execute(update(Lease).values(expires_at=0))
            session.execute(update(TaskRow).values(next_at=0))

    def close(self):
        for one in self.opened:
            one.close()

    def play(self):
        worker = Worker(self.broker)
        worker.run_until_idle()
        worker.stop()

    def task(self, task_id):
        return tasks.get_task(self.broker, self.buyer, task_id)

    def check(self):
        """By the drivers alone, by the ledger, by the statement."""
        at = self.broker.settings.database_url
        assert books(at) == []
        kept = self.broker.books.ledger
        kept.verify()
        spent = sum(one.spent_micros for one in tasks.list_tasks(self.broker, self.buyer).items)
        assert kept.balance(self.buyer.id) == MONEY - spent
        assert statements.statement(self.broker, self.owner).earned_micros == kept.balance(self.owner.id)


@pytest.fixture
def market(small, joined, order, cheap_bid):
    made = Market(small, joined, order, cheap_bid)
    yield made
    made.close()


@pytest.fixture
def market_anywhere(broker, joined, order, cheap_bid):
    made = Market(broker, joined, order, cheap_bid)
    yield made
    made.close()


def stop_task(market, task_id, why):
    if why == "cancelled":
        tasks.cancel_task(market.broker, market.buyer, task_id)
    else:
        with market.broker.database.write() as session:
            session.execute(update(TaskRow).values(deadline_at=1))


# ---- a round that is cut off, of a task that should end

POINTS = [
    (SqlStore, "save_plan", 0),
    (SqlLedger, "hold_many", 1),
    (rounds, "award_round", 1),
    (SqlStore, "save_deliveries", 2),
    (rounds, "add_event", 2),  # of five a round, the one for its deliveries
    (SqlLedger, "resolve_many", 2),
    (SqlStore, "save_round", 2),
]


@pytest.mark.parametrize("why", ["cancelled", "expired"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("where", "name", "played"), POINTS, ids=[name for _, name, _ in POINTS])
def test_a_round_cut_off_before_its_task_ends_is_finished_or_undone(
    market, monkeypatch, where, name, played, after, why
):
    task_id = market.post()
    with monkeypatch.context() as patch:
        cut(patch, where, name, after=after, skip=8 if name == "add_event" else 1)
        with pytest.raises(PowerCut):
            Worker(market.broker).run_until_idle()
    stop_task(market, task_id, why)
    market.restart()
    market.play()
    done = market.task(task_id)
    assert done.state == why
    # awarded: played to its end; else undone
    assert done.rounds_done == (2 if played == 2 or (name, after) == ("never", True) else 1)
    market.check()


def test_the_same_on_the_other_database(market_anywhere, monkeypatch):
    market = market_anywhere
    for name, where in (("hold_many", SqlLedger), ("save_round", SqlStore)):
        task_id = market.post()
        with monkeypatch.context() as patch:
            cut(patch, where, name, after=name == "hold_many", skip=1)
            with pytest.raises(PowerCut):
                Worker(market.broker).run_until_idle()
        stop_task(market, task_id, "cancelled")
        market.restart()
        market.play()
        assert market.task(task_id).state == "cancelled"
    market.check()


def test_a_payment_before_a_failure_is_on_the_bill(market, monkeypatch):
    """The ledger has paid, the rows are not written, and the round cannot be played again."""
    task_id = market.post()
    with monkeypatch.context() as patch:
        cut(patch, SqlStore, "save_round", after=False, skip=1)
        with pytest.raises(PowerCut):
            Worker(market.broker).run_until_idle()
    market.restart()
    original = SqlStore.plan

    def other_prices(self, index):
        plan = original(self, index)
        orders = () if plan is None else tuple(replace(one, price_micros=one.price_micros // 3) for one in plan.orders)
        return None if plan is None else replace(plan, orders=orders)

    swap(monkeypatch, SqlStore, "plan", other_prices)
    market.play()
    done = market.task(task_id)
    assert done.state == "failed"
    assert (
        sum(line.spent_micros for line in tasks.bill(market.broker, market.buyer, task_id).lines) == done.spent_micros
    )
    assert {one.state for one in tasks.rounds(market.broker, market.buyer, task_id).items} == {"settled", "void"}
    market.check()


# ---- posting


def age(broker):
    with broker.database.write() as session:
        session.execute(update(TaskRow).where(TaskRow.state == "funding").values(created_at=now() - 60_000))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_posting_that_was_cut_off_is_cleared_up_by_a_worker_that_runs_already(market_anywhere, monkeypatch, after):
    market = market_anywhere
    worker = Worker(market.broker)
    worker.step()  # it has the lease, and keeps it
    with monkeypatch.context() as patch:
        cut(patch, Books, "fund", after=after, skip=0)
        with pytest.raises(PowerCut):
            tasks.post_task(market.broker, market.buyer, market.order())
    age(market.broker)
    worker.run_until_idle()
    (found,) = tasks.list_tasks(market.broker, market.buyer).items
    assert found.state == ("finished" if after else "failed")
    market.check()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_slow_posting_and_the_clear_up_agree(market_anywhere, monkeypatch, after):
    """The worker clears up while a slow posting is about to move the money, or has just moved it."""
    market, original = market_anywhere, Books.fund

    def slow(*arguments):
        if after:
            original(*arguments)
        age(market.broker)
        Worker(market.broker).run_until_idle()
        if not after:
            original(*arguments)

    with monkeypatch.context() as patch:
        swap(patch, Books, "fund", slow)
        if after:
            assert tasks.post_task(market.broker, market.buyer, market.order(), key="k").state == "finished"
        else:
            with pytest.raises(Conflict, match="given up"):
                tasks.post_task(market.broker, market.buyer, market.order(), key="k")
    market.restart()
    market.play()
    market.check()
    # whoever was refused may ask again
    assert tasks.post_task(market.broker, market.buyer, market.order(), key="k").state in ("queued", "finished")
    market.play()
    assert "finished" in {one.state for one in tasks.list_tasks(market.broker, market.buyer).items}
    market.check()


def test_a_key_belongs_to_one_order(market_anywhere):
    """The same key with an order that the buyer cannot pay lost the task and orphaned its money."""
    market = market_anywhere
    first = tasks.post_task(market.broker, market.buyer, market.order(), key="k")
    with pytest.raises(Conflict, match="another order"):
        tasks.post_task(market.broker, market.buyer, market.order(budget_per_round=MONEY / 10**6), key="k")
    with pytest.raises(Conflict, match="another order"):
        tasks.post_task(market.broker, market.buyer, market.order(rounds=2), key="k")
    assert tasks.post_task(market.broker, market.buyer, market.order(), key="k").id == first.id
    market.play()
    assert market.task(first.id).state == "finished"
    market.check()


def test_a_key_is_free_again_after_a_refusal(market):
    dear = market.order(budget_per_round=MONEY / 10**6)
    with pytest.raises(Conflict, match="in escrow"):
        tasks.post_task(market.broker, market.buyer, dear, key="k")
    assert tasks.list_tasks(market.broker, market.buyer).items == ()
    parties.deposit(market.broker, market.desk, market.buyer.id, 2 * MONEY)
    assert tasks.post_task(market.broker, market.buyer, dear, key="k").state == "queued"


def test_an_edited_form_is_another_task(market, serve):
    link = sessions.link_path(sessions.make_link(market.broker, market.buyer.id))
    with serve(create_app(broker=market.broker)) as address, httpx.Client(base_url=address, timeout=30) as http:
        http.get(link)
        page = http.get("/tasks/new").text
        hidden = {
            name: page.split(f'name="{name}" value="')[1].split('"')[0] for name in ("csrf_token", "idempotency_key")
        }
        form = {
            "name": "mine", "data": "breast-cancer", "owners": "12", "auction": "posted", "aggregation": "opt-aggr",
            "perturbation": "recommended", "budget": "10", "rounds": "1", "bidders": "8", "learning_rate": "0.2",
            "clip": "0.5", "round_seconds": "0", "deadline_days": "1", "seed": "0", **hidden,
        }  # fmt: skip
        first = http.post("/tasks/new", data=form)
        again = http.post("/tasks/new", data=form)
        edited = http.post("/tasks/new", data=form | {"budget": "20"})
    assert first.status_code == again.status_code == edited.status_code == 303
    assert first.headers["location"] == again.headers["location"] != edited.headers["location"]
    budgets = [one.escrow_micros for one in tasks.list_tasks(market.broker, market.buyer).items]
    assert sorted(budgets) == [10_000_000, 20_000_000]


# ---- keys of others


def test_a_deposit_belongs_to_its_operator_and_its_content(market_anywhere, joined):
    market = market_anywhere
    other, kept = joined(market.broker, "operator", "second").party, market.broker.books.ledger
    parties.deposit(market.broker, market.desk, market.buyer.id, 5, key="monday")
    parties.deposit(market.broker, other, market.buyer.id, 5, key="monday")
    parties.deposit(market.broker, other, market.buyer.id, 5, key="monday")
    assert kept.balance(market.buyer.id) == MONEY + 10
    with pytest.raises(Conflict, match="another deposit"):
        parties.deposit(market.broker, other, market.buyer.id, 6, key="monday")
    third = joined(market.broker, "buyer", "third").party
    with pytest.raises(Conflict, match="another deposit"):
        parties.deposit(market.broker, other, third.id, 5, key="monday")
    assert kept.balance(third.id) == MONEY


def test_an_audit_belongs_to_its_content(market):
    ask = AuditRequest
    audits.start_audit(market.broker, market.buyer, ask(auction="all-in", profiles=20), key="k")
    with pytest.raises(Conflict, match="another audit"):
        audits.start_audit(market.broker, market.buyer, ask(auction="all-in", profiles=21), key="k")


# ---- the database fails


class Faults:
    """Forty statements and commits that fail in this thread, before or after they took effect."""

    def __init__(self, patch, seed):
        self.left, self.rng, mine = 40, random.Random(seed), threading.get_ident()
        execute, commit = DefaultDialect.do_execute, DefaultDialect.do_commit

        def do_execute(dialect, *arguments, **named):
            if threading.get_ident() == mine and self.due():
                raise sqlite3.OperationalError("database is locked")
            return execute(dialect, *arguments, **named)

        def do_commit(dialect, *arguments, **named):
            late = threading.get_ident() == mine and self.due()
            commit(dialect, *arguments, **named)
            if late:
                raise sqlite3.OperationalError("disk I/O error")

        patch.setattr(DefaultDialect, "do_execute", do_execute)
        patch.setattr(DefaultDialect, "do_commit", do_commit)

    def due(self):
        hit = self.left > 0 and self.rng.random() < 0.04
        self.left -= hit
        return hit


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_the_database_fail_no_task(market, monkeypatch, seed):
    ids = [market.post() for _ in range(4)]
    monkeypatch.setattr(worker_module, "_FIRST_REST", 0.001, raising=False)
    with monkeypatch.context() as patch:
        faults, worker, idle = Faults(patch, seed), Worker(market.broker), False
        while not idle:
            with suppress(OperationalError, LedgerUnavailable):  # as the worker's own loop does
                worker.run_until_idle()
                idle = True
    assert faults.left < 30
    worker.stop()
    assert {market.task(task_id).state for task_id in ids} == {"finished"}
    calm = market.post()
    market.play()
    assert {market.task(task_id).spent_micros for task_id in ids} == {market.task(calm).spent_micros}
    market.check()


def test_connections_cut_by_the_server_fail_no_task(postgres, joined, order, cheap_bid, monkeypatch):
    """The server ends 25 of the worker's connections just before it speaks on them."""
    broker = Broker.open(Settings(database_url=postgres(tables=False), run_worker=False))
    market, killer = Market(broker, joined, order, cheap_bid), create_engine(broker.database.url)
    monkeypatch.setattr(worker_module, "_FIRST_REST", 0.001, raising=False)
    ids, worker, rng, done = [market.post() for _ in range(4)], Worker(broker), random.Random(1), []

    def cut_connection(connection, *_):
        if len(done) < 25 and rng.random() < 0.03:
            done.append(connection.connection.dbapi_connection.info.backend_pid)
            with killer.connect() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": done[-1]})

    engines = (broker.database.engine, broker.books.ledger.engine)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", cut_connection)
    idle = False
    while not idle:
        with suppress(DBAPIError, LedgerUnavailable):  # as the worker's own loop does
            worker.run_until_idle()
            idle = True
    for engine in engines:
        event.remove(engine, "before_cursor_execute", cut_connection)
    assert len(done) == 25
    assert [market.task(task_id).state for task_id in ids] == ["finished"] * 4
    market.check()
    killer.dispose()
    broker.close()


# ---- an owner who changes her cap


@pytest.mark.parametrize("crash", [False, True], ids=["", "and-a-crash"])
def test_a_cap_that_is_lowered_in_the_middle_voids_one_award(market_anywhere, monkeypatch, crash):
    """Between the last look at her cap and the payment; with a crash she raises it again before the round goes on."""
    market, original, calls = market_anywhere, SqlLedger.resolve_many, []
    task_id = market.post(owners={}, budget_per_round=2000)

    def lower_first(self, ends):
        ends = list(ends)
        mine = [one.award_id for one in ends if self.award(one.award_id).owner == market.owner.id]
        if mine and len(ends) > 3 and not calls:
            calls.append(mine[0])
            statements.set_cap(market.broker, market.owner, 1e-6)
        return original(self, ends)

    with monkeypatch.context() as patch:
        swap(patch, SqlLedger, "resolve_many", lower_first)
        if crash:
            cut(patch, SqlStore, "save_round", after=False, skip=0)
            with pytest.raises(PowerCut):
                market.play()
        else:
            market.play()
    if crash:
        statements.set_cap(market.broker, market.owner, 50.0)
        market.restart()
        market.play()
    assert market.task(task_id).state == "finished"
    (void,) = calls
    first = [one for one in market.broker.books.ledger.awards(round_index=0) if one.id.startswith(f"{task_id}/0/")]
    ends = {one.id: one.state for one in first}
    assert ends.pop(void) is AwardState.VOIDED
    assert len(ends) > 2
    assert set(ends.values()) == {AwardState.POSTED}
    market.check()


# ---- two workers


def test_of_two_workers_one_gets_the_lease(url):
    """Aligned as well as threads can be: both got it in most trials on PostgreSQL."""
    brokers = [Broker.open(Settings(database_url=url, run_worker=False)) for _ in range(2)]
    barrier, both = threading.Barrier(3), []
    results = [False, False]

    def contend(place):
        for _ in range(25):
            worker = Worker(brokers[place])
            barrier.wait()
            try:
                results[place] = worker._has_lease()
            except Exception:
                results[place] = False
            barrier.wait()

    threads = [threading.Thread(target=contend, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for trial in range(25):
        with brokers[0].database.write() as session:
            if trial % 2:
                session.execute(update(Lease).values(expires_at=0))
            else:
                session.execute(text("DELETE FROM broker_leases"))
        barrier.wait()
        barrier.wait()
        both.append(tuple(results))
    for thread in threads:
        thread.join()
    for one in brokers:
        one.close()
    assert {sum(pair) for pair in both} == {1}


def test_a_worker_that_was_replaced_writes_nothing_more(market_anywhere):
    """It stops in the middle of a round, another takes over; then it wakes up and believes that it has the lease."""
    market = market_anywhere
    task_id = market.post(round_seconds=0.005)
    old = Worker(market.broker)
    while "awards" not in {event.kind for event in tasks.events(market.broker, market.buyer, task_id)}:
        old.step()
        time.sleep(0.002)
    with market.broker.database.write() as session:
        session.execute(update(Lease).values(expires_at=0))
    new = Worker(market.broker)
    assert new._has_lease()
    assert old._lease_until > time.monotonic()
    before = market.broker.books.ledger.head(), tasks.events(market.broker, market.buyer, task_id)
    for _ in range(3):
        time.sleep(0.005)
        old._lease_until = time.monotonic() + 60  # it has slept through
        assert not old.step()
    assert before == (market.broker.books.ledger.head(), tasks.events(market.broker, market.buyer, task_id))
    until = time.monotonic() + 60
    while market.task(task_id).state != "finished" and time.monotonic() < until:
        new.step()
    assert market.task(task_id).state == "finished"
    market.check()


def test_a_worker_that_gets_the_lease_back_forgets_what_it_was_at(market):
    """It slept while another had the lease, played on and died: the round in its memory is an old one."""
    task_id = market.post(round_seconds=0.01)
    old = Worker(market.broker)
    until = time.monotonic() + 60
    while not old._rounds and time.monotonic() < until:
        old.step()
    assert old._rounds
    with market.broker.database.write() as session:  # another has come and gone
        session.execute(update(Lease).values(holder="", expires_at=0, token=Lease.token + 1))
    old._lease_until = time.monotonic()
    assert old._has_lease()
    assert not old._rounds
    while market.task(task_id).state != "finished" and time.monotonic() < until:
        old.step()
    market.check()


def test_of_two_runs_one_gets_the_task_and_the_other_moves_no_money(market_anywhere):
    """A Flower run that was replaced, and does not know, may write neither rows nor entries."""
    from flmarket.broker.database import fenced

    market = market_anywhere
    task_id, kept = market.post(), market.broker.books.ledger
    with market.broker.database.write() as session:
        session.add(FlowerRun(task_id=task_id, attempt=1))
    for _ in range(10):
        runs, barrier, got = (
            [Tenancy(market.broker, task_id, 1, patience=60.0) for _ in range(2)],
            threading.Barrier(2),
            [],
        )

        def take(run, barrier=barrier, got=got):
            barrier.wait()
            with suppress(Replaced):
                run.take()
                got.append(run)

        threads = [threading.Thread(target=take, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = got
        winner.end()
    old = Tenancy(market.broker, task_id, 1, patience=60.0)
    old.take()
    with old.renewing():
        kept.deposit("in-time", market.buyer.id, 1)
        with fenced(None), market.broker.database.write() as session:
            session.execute(update(FlowerRun).values(attempt=2, holder="another"))
        for write in (
            lambda: kept.deposit("late", market.buyer.id, 1),
            lambda: kept.void(f"{task_id}/escrow", "late"),
            lambda: parties.create_party(market.broker, None, role="buyer", name="late"),
        ):
            with pytest.raises(Replaced):
                write()
    assert kept.balance(market.buyer.id) == MONEY + 1 - market.task(task_id).escrow_micros


# ---- the books are compared


PLANTED = {
    "bill": [
        "UPDATE broker_tasks SET spent_micros = spent_micros - 1, refunded_micros = refunded_micros",
        "UPDATE broker_rounds SET spent_micros = spent_micros + 1 WHERE \"index\" = 1",
        "UPDATE broker_tasks SET refunded_micros = refunded_micros + 1",
    ],
    "funding": ["UPDATE broker_tasks SET escrow_micros = escrow_micros + 1"],
    "round": ["UPDATE broker_rounds SET closed_at = NULL WHERE \"index\" = 2"],
    "award": [
        "UPDATE broker_releases SET award_id = award_id || '0' WHERE \"index\" = 0",
        "DELETE FROM broker_releases WHERE \"index\" = 1",
    ],
    "statement": [
        "UPDATE broker_releases SET price_micros = price_micros + 1 WHERE \"index\" = 0",
        "UPDATE broker_releases SET state = 'expired' WHERE state = 'posted'",
        "UPDATE broker_releases SET party_id = NULL",
        "UPDATE broker_releases SET epsilon = epsilon * 0.5",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory, joined, order, cheap_bid):
    """A database with a task that was played to its end, as bytes: each lie is told in a copy."""
    folder = tmp_path_factory.mktemp("played")
    broker = Broker.open(Settings(database_url=f"sqlite:///{folder}/b.db", run_worker=False))
    market = Market(broker, joined, order, cheap_bid)
    market.post(owners={})
    market.play()
    broker.close()
    with sqlite3.connect(folder / "b.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (folder / "b.db").read_bytes()


@contextmanager
def copy_of(played, path, *statements):
    path.write_bytes(played)
    with sqlite3.connect(path) as connection:
        # the ledger has guards of its own, which a liar would take away first
        for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    broker = Broker.open(Settings(database_url=f"sqlite:///{path}", run_worker=False))
    yield broker
    broker.close()


def rules(broker):
    from flmarket.broker.office.reconcile import reconcile

    return {one.rule for one in reconcile(broker.database.engine)}


def test_a_sound_market_has_no_findings(played, tmp_path):
    with copy_of(played, tmp_path / "b.db") as broker:
        assert rules(broker) == set()


@pytest.mark.parametrize(("rule", "lie"), [(rule, lie) for rule, lies in PLANTED.items() for lie in lies])
def test_every_lie_in_the_rows_is_found(played, tmp_path, rule, lie):
    with copy_of(played, tmp_path / "b.db", lie) as broker:
        assert rule in rules(broker)


_HELD = "SELECT ref FROM ledger_entries WHERE kind = 'posted' AND ref LIKE '%/1/%' LIMIT 1"
LEDGER_LIES = {
    "escrow": [f"DELETE FROM ledger_entries WHERE kind = 'posted' AND ref IN ({_HELD})"],
    "bill": [f"DELETE FROM ledger_entries WHERE kind = 'posted' AND ref IN ({_HELD})"],
    "funding": ["UPDATE ledger_entries SET ref = 't_x/escrow', owner = 't_x' WHERE ref LIKE '%/escrow'"],
    "release": [
        "UPDATE ledger_entries SET detail = replace(detail, '\"epsilon\":', '\"epsilon\":9') WHERE kind = 'release'"
    ],
}


@pytest.mark.parametrize(("rule", "lies"), LEDGER_LIES.items())
def test_every_lie_in_the_ledger_is_found(played, tmp_path, rule, lies):
    with copy_of(played, tmp_path / "b.db", *lies) as broker:
        assert rule in rules(broker)


def test_money_that_is_left_with_an_ended_task_is_found(market):
    task_id = market.post()
    market.play()
    market.broker.books.ledger.deposit("late", task_id, 7)
    assert rules(market.broker) == {"escrow"}
    check = ledger.verify(market.broker, market.desk)
    assert not check.ok
    assert [one.rule for one in check.findings] == ["escrow"]


def test_the_operator_sees_what_the_standing_check_found(market, serve):
    task_id = market.post()
    market.play()
    worker = Worker(market.broker)
    _, check, _ = worker._besides
    assert worker._has_lease()
    check.run()
    view = operator.status(market.broker, market.desk)
    assert (view.reconciled_at is not None, view.findings) == (True, ())
    market.broker.books.ledger.deposit("late", task_id, 7)
    check.run()
    (finding,) = operator.status(market.broker, market.desk).findings
    assert (finding.rule, finding.subject) == ("escrow", task_id)
    link = sessions.link_path(sessions.make_link(market.broker, market.desk.id))
    with serve(create_app(broker=market.broker)) as address, httpx.Client(base_url=address, timeout=30) as http:
        http.get(link)
        assert "do not agree" in http.get("/operator").text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer asks click for names that click will rename
def test_the_command_says_what_does_not_agree(market, monkeypatch, capsys):
    def verify(*options):
        at = market.broker.settings.database_url
        monkeypatch.setattr(sys, "argv", ["flmarket", "ledger", "verify", "--db", at, *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    task_id = market.post()
    market.play()
    code, said = verify()
    assert (code, "bills and statements agree" in said) == (0, True)
    market.broker.books.ledger.deposit("late", task_id, 7)
    code, said = verify("--json")
    found = json.loads(said)
    assert (code, found["ok"], found["findings"][0]["rule"]) == (9, False, "escrow")


def test_a_task_under_way_is_no_finding(market):
    market.post(round_seconds=0.01)
    worker, seen = Worker(market.broker), 0
    while worker.step() or tasks.list_tasks(market.broker, market.buyer).items[0].state != "finished":
        assert rules(market.broker) == set()
        seen += 1
    assert seen > 10


@pytest.mark.parametrize("name", ["hold", "post"])
def test_a_refund_under_way_is_no_finding(market, monkeypatch, name):
    task_id = market.post()
    with monkeypatch.context() as patch:
        original = getattr(SqlLedger, name)

        def stop(self, what):
            result = original(self, what)
            if (what if name == "post" else what.id) == f"{task_id}/refund":
                raise PowerCut
            return result

        swap(patch, SqlLedger, name, stop)
        with pytest.raises(PowerCut):
            Worker(market.broker).run_until_idle()
    assert rules(market.broker) == set()
    market.restart()
    market.play()
    market.check()


# ---- files


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_new_database_is_its_owners_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/state/b.db", run_worker=False))
        parties.create_party(broker, None, role="buyer", name="B")
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
        broker.close()
    finally:
        os.umask(before)
    assert modes == {0o600}
