"""The broker: two processes on one database, people who post, bid, cancel and change their minds, and what can fail.

Office, worker, stores, ledger and tables are the shipped ones, on SQLite; a request and a worker's turn are calls. A
process dies or gets an error at any statement, or is held up before any transaction for longer than its lease, while
the other takes over and plays on; then it wakes up and must notice. In the end both run undisturbed until every task
has ended, and the verdict is told by SQL alone (`watch.verdict`), beside the broker's own reconciliation.
"""

from __future__ import annotations

import contextvars
import random
import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from sqlalchemy import exc

from flmarket.broker import stamps
from flmarket.broker.core import Broker, Party
from flmarket.broker.database import is_transient
from flmarket.broker.office import offers, parties, statements, tasks
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.requests import BidRequest, TaskRequest
from flmarket.broker.settings import Settings
from flmarket.broker.tables import Role
from flmarket.broker.work.worker import Worker
from flmarket.errors import FlmarketError
from flmarket.learning import DataSet
from flmarket.ledger import SqlLedger
from flmarket.simulator import world
from flmarket.simulator.watch import ENDED, lasting_tasks, look, rows, verdict
from flmarket.simulator.world import Chance, Crash, Disk, Swarm, World, failing_engine

MONEY_MICROS = 10**13
LEASE_SECONDS = 15.0
_DATA = "flmarket.simulator.service:points"
_PEOPLE: tuple[Role, ...] = ("buyer", "buyer", "owner", "owner", "owner")
_PLACES = 4
_LONGEST_DEADLINE = 400.0
_TURN_SECONDS = 0.7
_Result = TypeVar("_Result")


def points() -> DataSet:
    """The data that tasks ask for."""
    return world.data_of(_PLACES)


def settings(file: Path) -> Settings:
    """Of every process."""
    return Settings(database_url=f"sqlite:///{file}", run_worker=False, data_sets=(_DATA,), lease_seconds=LEASE_SECONDS)


@lru_cache(maxsize=1)
def _template() -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """A database with some people in it, made once: the file, and their roles and ids."""
    folder = Path(tempfile.mkdtemp(prefix="flmarket-torture-"))
    vars(stamps)["secrets"] = SimpleNamespace(token_bytes=random.Random("people").randbytes)  # the same ids every time
    try:
        broker, people = Broker.open(settings(folder / "b.db")), list[tuple[str, str]]()
        for role in _PEOPLE:
            made = parties.create_party(broker, None, role=role, name=f"{role} {len(people)}")
            if role == "buyer":
                parties.deposit(broker, None, made.id, MONEY_MICROS)
            people.append((role, made.id))
        broker.close()
        with sqlite3.connect(folder / "b.db") as file:
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        file.close()
        return (folder / "b.db").read_bytes(), tuple(people)
    finally:
        vars(stamps)["secrets"] = secrets
        shutil.rmtree(folder)


class Process:
    """One service: it has a worker, and answers requests."""

    def __init__(self, world: ServiceWorld, number: int) -> None:
        self.world, self.number = world, number
        self.start()

    def start(self) -> None:
        """Open the database as a new process does."""
        self.disk = Disk(self.world.chance, "database crash", "database error")
        self.broker = Broker.open(settings(self.world.file))
        self.worker = Worker(self.broker)
        ledger = self.broker.books.ledger
        assert isinstance(ledger, SqlLedger)
        self._engines = (self.broker.database.engine, ledger.engine)
        for engine in self._engines:
            failing_engine(engine, self.disk)
            self._pauses(engine.dialect)

    def run(self, what: Callable[[], _Result]) -> _Result | None:
        """Something in this process, alone in its context; None if the process ends, or the database fails it."""
        before = len(self.world.chance.fired)
        try:
            return contextvars.Context().run(what)
        except Crash:
            self.world.tell(f"process {self.number}", f"the power fails ({self.world.why(before)})")
            self.end()
            self.start()
        except Exception as error:
            if not is_transient(error) and not isinstance(error, exc.DBAPIError):
                self.world.watch.broke("ends", f"process {self.number} ends by {type(error).__name__}: {error}")
            self.world.tell(f"process {self.number}", f"fails ({self.world.why(before)})")
        return None

    def end(self) -> None:
        """The process ends; nothing of it is left but the file."""
        self.disk.dead = self.disk.spared = True
        for engine in self._engines:
            engine.dispose()

    def _pauses(self, dialect: Any) -> None:
        """Before a transaction begins, this process may be held up while the other one plays."""
        execute = dialect.do_execute

        def do_execute(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
            if statement.startswith("BEGIN"):
                self.world.pause(self)
            execute(cursor, statement, parameters, context)

        dialect.do_execute = do_execute


class ServiceWorld(World):
    """Two processes, and people who use both."""

    def __init__(self, swarm: Swarm, folder: Path, chance: Chance) -> None:
        super().__init__(swarm, folder, chance)
        self.turns, self.file, self._paused = swarm.turns // 3, folder / "b.db", False
        self.processes: list[Process] = []
        content, people = _template()
        self.file.write_bytes(content)
        self.buyers = [Party(id, "buyer", id) for role, id in people if role == "buyer"]
        self.owners = [Party(id, "owner", id) for role, id in people if role == "owner"]
        self._unanswered: list[tuple[Party, dict[str, Any], str]] = []
        self._posted: dict[str, Party] = {}
        self._delivered: set[tuple[str, int, int]] = set()
        self._reader = sqlite3.connect(self.file, timeout=30, isolation_level=None)

    def _begin(self) -> None:
        self.processes = [Process(self, number) for number in range(2)]

    def pause(self, process: Process) -> None:
        """Hold a process up for longer than its lease, while the other takes over."""
        if self._paused or process.disk.dead or process.disk.spared or not self.chance.happens("worker paused"):
            return
        self._paused = True
        other = self.processes[1 - process.number]
        self.tell(f"process {process.number}", "is held up, for longer than its lease")
        self.clock.sleep(LEASE_SECONDS + 1)
        for _ in range(self.chance.stream("pause").randint(1, 6)):
            self._work(other)
        self.tell(f"process {process.number}", "wakes up")
        self._paused = False

    # a turn

    def _turn(self) -> None:
        chance = self.chance
        for _ in range(chance.stream("act").randint(0, 2)):
            self._person()
        self._work(chance.choice("who works", self.processes))
        if chance.happens("clock jump"):
            self.clock.sleep(chance.uniform("jump", 1.0, 60.0))
        self.clock.sleep(chance.uniform("pace", 0.0, _TURN_SECONDS))
        self._look()

    def _look(self) -> None:
        """The log, and the deliveries that count from here on."""
        look(self._reader, self.watch.books)
        self._delivered.update(rows(self._reader, 'SELECT task_id, "index", slot FROM broker_deliveries'))

    def _work(self, process: Process) -> None:
        done = process.run(process.worker.step)
        if done:
            said = dict(rows(self._reader, "SELECT state, count(*) FROM broker_tasks GROUP BY state"))
            self.tell(f"process {process.number}", f"works; tasks: {said}")

    def _person(self) -> None:
        chance, process = self.chance, self.chance.choice("which process", self.processes)
        again, self._unanswered = self._unanswered, []
        for buyer, order, key in again:
            self._post(process, buyer, order, key)
        if self.begun < self.swarm.tasks and chance.stream("act").random() < 0.5:
            self.begun += 1
            buyer = chance.choice("buyer", self.buyers)
            self._post(process, buyer, self._order(), f"key-{self.begun}")
        live = self._live()
        if live and chance.happens("cancelled"):
            task = chance.choice("task", live)
            self._ask(process, f"cancels {task}", lambda: tasks.cancel_task(process.broker, self._posted[task], task))
        if live:
            self._owner(process, chance.choice("task", live))
        if self._posted and chance.happens("posted twice"):
            self._unanswered.append((self.buyers[0], self._order(), f"key-{self.begun}"))

    def _live(self) -> list[str]:
        found = rows(self._reader, "SELECT id FROM broker_tasks WHERE finished_at IS NULL ORDER BY id")
        return [task for (task,) in found if task in self._posted]

    def _owner(self, process: Process, task: str) -> None:
        chance, broker = self.chance, process.broker
        owner = chance.choice("owner", self.owners)
        if chance.stream("bid").random() < 0.4:
            valuation = {"kind": "linear", "rate": chance.choice("rate", [0.001, 0.05])}
            bid = {"valuation": valuation, "privacy_budget": chance.choice("budget", [0.1, 0.5, 2.0])}
            asked = BidRequest.model_validate(bid)
            self._ask(process, f"{owner.id} bids for {task}", lambda: offers.place_bid(broker, owner, task, asked))
        if chance.happens("withdrawn"):
            self._ask(process, f"{owner.id} withdraws", lambda: offers.withdraw_bid(broker, owner, task))
        if chance.happens("cap changed"):
            cap = chance.choice("cap", [0.2, 1.0, 4.0])
            self._ask(process, f"{owner.id} sets a cap of {cap}", lambda: statements.set_cap(broker, owner, cap))

    def _post(self, process: Process, buyer: Party, order: dict[str, Any], key: str) -> None:
        made = self._ask(
            process, f"{buyer.id} posts {key}, {order['kind']}",
            lambda: tasks.post_task(process.broker, buyer, TaskRequest.model_validate(order), key=key),
        )  # fmt: skip
        if isinstance(made, FlmarketError):
            return
        if made is None:
            self._unanswered.append((buyer, order, key))
        else:
            self._posted[made.id] = buyer

    def _ask(self, process: Process, what: str, request: Callable[[], _Result]) -> _Result | FlmarketError | None:
        """A request: its answer, a refusal, or None if nobody knows what became of it."""

        def answered() -> _Result | FlmarketError:
            try:
                return request()
            except FlmarketError as refusal:
                if is_transient(refusal):
                    raise
                return refusal

        found = process.run(answered)
        said = "no answer" if found is None else type(found).__name__
        self.tell("people", f"{what} at process {process.number}: {said}")
        return found

    def _order(self) -> dict[str, Any]:
        draw = self.chance.stream("orders")
        kind, waits = draw.choice(world.KINDS), draw.random() < 0.15
        order: dict[str, Any] = {
            "kind": kind,
            "seed": draw.randint(0, 3),
            "task": {"name": "torture", "rounds": draw.randint(1, 3)},
            "data": {"name": _DATA, "owners": _PLACES, "partition": "equal"},
            "broker": {
                "round_seconds": draw.choice((0, 1.0, 4.0, 20.0)),
                "deadline_seconds": draw.choice((10, 60, 300)),
                "simulated": kind != "auction" or not waits,
                "minimum_bids": 4 if kind == "auction" and waits else 1,
            },
        }
        if kind == "reward":
            order["reward"] = {"reward": draw.choice((1.0, 5.0))}
        elif kind == "joint":
            order["joint"] = {"budget": 20.0, "costs": [1.0, 4.0], "epsilon": 20.0, "validation": 4}
            order["joint"] |= {"aggregation": "median"}
        elif kind == "sampling":
            order["task"] |= {"budget_per_round": 6.0}
            order["sampling"] = {"costs": [1.0, 4.0], "hard_cap": 12.0, "first_rate": 0.2}
        else:
            order["task"] |= {"budget_per_round": draw.choice((0.5, 20.0)), "bidders_per_round": draw.randint(1, 4)}
            order["owners"] = {"dropout": 0.1, "faulty": 0.1, "privacy_cap": draw.choice((1.0, 10.0))}
            order["mechanism"] = {"auction": "all-in-capped", "perturbation": draw.choice(("sphere", "laplace-l1"))}
        return order

    # the end

    def _settle(self) -> None:
        """Every task ends by its deadline, or as soon as its round is over."""
        for waiting in self._unanswered:
            self._post(self.processes[0], *waiting)
        until = self.clock.now + _LONGEST_DEADLINE
        while self.clock.now < until and self._active():
            for process in self.processes:
                self._work(process)
            self._look()
            self.clock.sleep(3.0)
        books = verdict(self._reader, broke=self.watch.broke, money_micros=MONEY_MICROS)
        lasting = lasting_tasks(self._reader)
        for task, index, slot in self._delivered:  # where awards run over all rounds, another one may have been missed
            ref = f"{task}/{index}/{slot}"
            end = books.ends.get(ref, "posted")
            if end != "posted" and books.holds[ref]["owner"] not in books.caps and task not in lasting:
                self.watch.broke("paid", f"the delivery for {ref} was stored, and the award is {end}")
        for found in reconcile(self.processes[0].broker.database.engine):
            self.watch.broke("bill", f"reconciliation: {found.rule} {found.subject}: {found.message}")
        self.processes[0].broker.books.ledger.verify()

    def _active(self) -> bool:
        states = {row[0] for row in rows(self._reader, "SELECT DISTINCT state FROM broker_tasks")}
        return not states <= set(ENDED)

    def _leave(self) -> None:
        for process in self.processes:
            process.end()
        self.rounds = len(rows(self._reader, "SELECT 1 FROM broker_rounds WHERE closed_at IS NOT NULL"))
        self._reader.close()
