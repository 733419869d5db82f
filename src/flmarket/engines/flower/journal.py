"""What an owner's machine remembers besides her privacy account: offers made, releases begun, vectors released.

A SQLite file beside the account, because a deployed ClientApp lives for one message only. An offer stands once it is
made: asked again, she repeats it. A release is claimed before it is charged and before any record is touched; the claim
is unique, so of two requests at the same time one is refused. One vector is kept for it, the first, because handing out
the same bytes again gives nothing more away: that is how a buyer whose server crashed gets what the owner had already
paid for with privacy. Only the latest `KEPT` vectors of a task stay; what is dropped becomes an empty one, which is not
the same as none: a release that never got a vector can still be answered, one that was dropped cannot. Of each task's
ledger the largest head is kept that a proof of escrow has shown.

The file is safe against the end of the process at any moment. A power failure may cost its last rows, which costs no
privacy: without an offer an order is refused, and a charged award is known to the account, which is synchronised.

What would break it: restoring the file from a backup, which forgets claims. The account is a file of its own and
would then have to be restored to a *later* state, or not at all.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flmarket.files import keep_private
from flmarket.ledger import Head

__all__ = ["OwnerJournal"]

KEPT = 8
_VERSION = 2
# Version 1 had no heads and no deadlines, and its offers were for announcements with fewer terms: they are made again.
_SCHEMA = """
drop table if exists offers;
create table offers (task text, round integer, body text not null, primary key (task, round));
create table if not exists releases (id text primary key, task text not null, terms text not null, vector blob);
alter table releases add column until real not null default 0;
update releases set vector = x'' where vector is null;
create table heads (task text primary key, size integer not null, head text not null);
pragma user_version = 2;
"""


class OwnerJournal:
    """One owner's offers and releases, in one file. Every method is one transaction; safe for several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        keep_private(path)
        self._connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
        self._connection.execute("pragma synchronous = normal")
        if self._connection.execute("pragma user_version").fetchone()[0] < _VERSION:
            self._connection.execute("pragma journal_mode = wal")
            self._migrate()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def offer(self, task: str, round_index: int) -> str | None:
        """The offer made for a round, if any."""
        query = "select body from offers where task = ? and round = ?"
        with self._lock, self._connection as connection:
            row = connection.execute(query, (task, round_index)).fetchone()
        return None if row is None else str(row[0])

    def make_offer(self, task: str, round_index: int, body: str) -> str:
        """Record an offer and return the one that stands: the first."""
        with self._lock, self._connection as connection:
            connection.execute("insert or ignore into offers values (?, ?, ?)", (task, round_index, body))
        standing = self.offer(task, round_index)
        assert standing is not None
        return standing

    def claim(self, release: str, task: str, terms: str, seconds: float) -> bool:
        """Begin a release that takes so long at most; False if it was begun before, by whomever."""
        with self._lock, self._connection as connection:
            made = connection.execute(
                "insert or ignore into releases values (?, ?, ?, null, ?)",
                (release, task, terms, time.time() + seconds),
            ).rowcount
        return made == 1

    def claimed(self, release: str) -> bool:
        """Whether a release was begun."""
        with self._lock, self._connection as connection:
            return connection.execute("select 1 from releases where id = ?", (release,)).fetchone() is not None

    def given_up(self, release: str, terms: str) -> bool:
        """Whether a release was begun under these terms, and its time has passed without a vector."""
        query = "select 1 from releases where id = ? and terms = ? and vector is null and until < ?"
        with self._lock, self._connection as connection:
            return connection.execute(query, (release, terms, time.time())).fetchone() is not None

    def keep(self, release: str, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Keep what is about to leave, and return what may: the first that was kept. Vectors of earlier rounds go."""
        with self._lock, self._connection as connection:
            connection.execute(
                "update releases set vector = ? where id = ? and vector is null", (vector.tobytes(), release)
            )
            (kept,) = connection.execute("select vector from releases where id = ?", (release,)).fetchone()
            connection.execute(
                "update releases set vector = x'' where length(vector) > 0 and task = "
                "(select task from releases where id = ?1) and rowid not in (select rowid from releases where task = "
                "(select task from releases where id = ?1) and length(vector) > 0 order by rowid desc limit ?2)",
                (release, KEPT),
            )
        return np.frombuffer(kept, dtype=np.float64)

    def released(self, release: str, terms: str) -> NDArray[np.float64] | None:
        """The vector that left under exactly these terms, if it is still kept."""
        query = "select vector from releases where id = ? and terms = ?"
        with self._lock, self._connection as connection:
            row = connection.execute(query, (release, terms)).fetchone()
        return None if row is None or not row[0] else np.frombuffer(row[0], dtype=np.float64)

    def head(self, task: str) -> Head | None:
        """The largest head of a task's ledger that a proof has shown."""
        with self._lock, self._connection as connection:
            row = connection.execute("select head from heads where task = ?", (task,)).fetchone()
        return None if row is None else Head.from_dict(json.loads(row[0]))

    def saw(self, task: str, head: Head) -> None:
        """Remember a head that a proof has shown."""
        with self._lock, self._connection as connection:
            connection.execute(
                "insert into heads values (?, ?, ?) on conflict (task) do update set size = excluded.size, "
                "head = excluded.head where excluded.size > heads.size",
                (task, head.size, json.dumps(head.to_dict())),
            )

    def _migrate(self) -> None:
        """Bring the file to this version, whole or not at all, whoever else tries at the same time."""
        with self._lock:
            self._connection.isolation_level = None
            try:
                self._connection.execute("begin immediate")
                if self._connection.execute("pragma user_version").fetchone()[0] < _VERSION:
                    for statement in _SCHEMA.strip().split(";\n"):
                        self._connection.execute(statement)
                self._connection.execute("commit")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("rollback")
                raise
            finally:
                self._connection.isolation_level = "DEFERRED"
