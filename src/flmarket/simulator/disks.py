"""Disks and databases that fail as real ones do: before a write, after it, in the middle; by an error or for good.

`Disk` is one machine's: once it has crashed, everything on it is dead until the machine starts again, whatever code
still runs. `FailingConnection` stands between an owner's files and SQLite, so a crash can come between any two
statements; `FailingStore` tears the files of a round; `FailingLedger` loses calls or their answers; `failing_engine`
does the same to every statement of a database that is reached through SQLAlchemy.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flmarket.bids import FloatArray
from flmarket.ledger import Ledger, LedgerUnavailable
from flmarket.market.store import _HEADER, FileStore
from flmarket.simulator.world import Chance, Crash

if TYPE_CHECKING:
    from sqlalchemy import Engine


class Disk:
    """Where one machine keeps things; `crash` and `error` name the faults that it has."""

    def __init__(self, chance: Chance, crash: str, error: str) -> None:
        self.chance, self.crash, self.error = chance, crash, error
        self.dead = self.spared = False

    def before(self, failure: Callable[[], Exception]) -> None:
        """Something is about to be read or written."""
        if self.dead:
            raise Crash
        if not self.spared and self.chance.happens(self.error):
            raise failure()
        self.cut()

    def cut(self) -> None:
        """A moment at which the power can fail."""
        if self.dead or (not self.spared and self.chance.happens(self.crash)):
            self.dead = True
            raise Crash


class FailingConnection:
    """A SQLite connection on such a disk; what was not committed when it died was never written."""

    def __init__(self, real: sqlite3.Connection, disk: Disk) -> None:
        self.real, self.disk = real, disk

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """One statement; a COMMIT may succeed and the power fail right after it."""
        self.disk.before(_disk_error)
        done = self.real.execute(statement, *values)
        if statement == "COMMIT":
            self.disk.cut()
        return done

    def __enter__(self) -> FailingConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.disk.dead:
            return
        if kind is not None:
            self.real.rollback()
            return
        if not self.real.in_transaction:
            return
        try:
            self.disk.before(_disk_error)
        except sqlite3.OperationalError:
            self.real.rollback()
            raise
        self.real.commit()
        self.disk.cut()

    @property
    def in_transaction(self) -> bool:
        """See SQLite; nothing is, on a machine that is gone."""
        return not self.disk.dead and self.real.in_transaction

    def close(self) -> None:
        """Close the file; what is not committed is gone."""
        self.real.close()


def _disk_error() -> Exception:
    return sqlite3.OperationalError("disk I/O error")


class FailingStore(FileStore):
    """A folder on such a disk: files are left half written, and records of the log cut off."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        super().__init__(folder, synchronised=False)
        self.disk = disk

    def _write(self, name: str, content: bytes, *, sync_folder: bool = True) -> None:
        self._tear(self.folder / f"{name}.part", content, mode="wb")
        super()._write(name, content, sync_folder=sync_folder)
        self.disk.cut()

    def _read(self, name: str) -> dict[str, Any] | None:
        self.disk.before(_no_room)
        return super()._read(name)

    def save_deliveries(self, index: int, vectors: Mapping[int, FloatArray]) -> None:
        """See `FileStore`."""
        first = min(vectors)
        body = np.ascontiguousarray(vectors[first]).tobytes()
        self._tear(self.folder / f"updates-{index:06d}.log", _HEADER.pack(first, len(body), 0) + body, mode="ab")
        super().save_deliveries(index, vectors)
        self.disk.cut()

    def tidy(self, next_round: int) -> None:
        """See `FileStore`."""
        self.disk.cut()
        super().tidy(next_round)

    def _tear(self, path: Path, content: bytes, *, mode: str) -> None:
        """Before a write: perhaps part of it lands, and that is all."""
        full, torn = self.disk.chance.happens("disk full"), self.disk.chance.happens("torn write")
        if full or torn:
            with path.open(mode) as handle:
                handle.write(content[: self.disk.chance.stream("torn").randrange(len(content))])
        if torn:
            self.disk.dead = True
            raise Crash
        if full:
            raise _no_room()
        self.disk.cut()


def _no_room() -> Exception:
    return OSError(errno.ENOSPC, "no space left on device")


class FailingLedger:
    """A ledger behind a connection that breaks: a call does not arrive, or its answer does not."""

    def __init__(self, real: Ledger, disk: Disk) -> None:
        self._real, self._disk = real, disk

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._disk.before(_unavailable)
            found = method(*args, **kwargs)
            self._disk.before(_unavailable)
            return found

        return call


def failing(real: Ledger, disk: Disk) -> Ledger:
    """The ledger as a program on such a machine has it."""
    return cast(Ledger, FailingLedger(real, disk))


def _unavailable() -> Exception:
    return LedgerUnavailable("the connection broke")


def failing_engine(engine: Engine, disk: Disk) -> None:
    """Every statement and every commit of an engine may fail, or the power with it."""
    dialect: Any = engine.dialect
    execute, commit = dialect.do_execute, dialect.do_commit

    def do_execute(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        disk.before(_disk_error)
        execute(cursor, statement, parameters, context)

    def do_commit(connection: Any) -> None:
        disk.before(_disk_error)
        commit(connection)
        disk.before(_disk_error)

    dialect.do_execute, dialect.do_commit = do_execute, do_commit
