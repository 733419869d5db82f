"""Connections and transactions: short reads, short writes, the same on SQLite and PostgreSQL.

SQLite has one writer. A transaction that reads first and writes later can find that somebody wrote in between, and
fails at once, whatever the timeout; so a writing transaction says so when it begins (BEGIN IMMEDIATE) and waits its
turn. For the same reason nobody may call the ledger, which has its own connection, inside `write`.

Waiting for the disk is most of a short write. Writers of a process that wait for their turn on SQLite therefore share a
transaction and its commit, each within a savepoint of its own (`_Together`); nobody is answered before the commit.

A process may lose its right to write while it is not looking (`holders`). Inside `fenced`, every writing transaction of
this thread, the ledger's included, begins with a check of that right, which then holds until the transaction ends.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, PoolProxiedConnection, create_engine, event, exc, make_url
from sqlalchemy.orm import Session

from flmarket.files import keep_private
from flmarket.ledger.journal import LedgerUnavailable
from flmarket.ledger.store import SQLITE_POOL

_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_SECONDS = 30
_MOST_TOGETHER = 64  # writers that share a commit
_WRITES = "flmarket_writes"  # said of a connection whose next transaction writes
_STATEMENTS = 512  # that a connection keeps prepared: more than there are
_FAULTS = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError, exc.PendingRollbackError, LedgerUnavailable)

Check = Callable[[Connection], None]
_fence: ContextVar[Check | None] = ContextVar("flmarket_fence", default=None)
_moment: ContextVar["tuple[Database, Session] | None"] = ContextVar("flmarket_moment", default=None)


def is_transient(error: BaseException) -> bool:
    """Whether the database is at fault (away, locked, cut off), and not what was asked of it: trying again may help."""
    return isinstance(error, _FAULTS) or (isinstance(error, exc.DBAPIError) and error.connection_invalidated)


@contextmanager
def fenced(check: Check | None) -> Iterator[None]:
    """Every writing transaction of this thread begins with `check`, which raises if the right to write is lost."""
    before = _fence.set(check)
    try:
        yield
    finally:
        _fence.reset(before)


def respect_fence(ledger: Engine) -> None:
    """Let a ledger's writing transactions be checked, which are marked `flmarket_write`."""

    def begun(connection: Connection) -> None:
        check = _fence.get()
        if check is not None and connection.get_execution_options().get("flmarket_write"):
            check(connection)

    event.listen(ledger, "begin", begun)


class Database:
    """The broker's tables behind one address."""

    def __init__(self, url: str) -> None:
        self.url = url
        address = make_url(url)
        self.is_sqlite = address.get_backend_name() == "sqlite"
        if self.is_sqlite:
            if address.database and address.database != ":memory:":
                Path(address.database).parent.mkdir(parents=True, exist_ok=True)
                keep_private(address.database)
            settings = {"timeout": _BUSY_SECONDS, "check_same_thread": False, "cached_statements": _STATEMENTS}
            self.engine = create_engine(url, connect_args=settings, **SQLITE_POOL)
            event.listen(self.engine, "connect", _sqlite_settings)
            _plain_steps(self.engine.dialect)
        else:
            self.engine = create_engine(url, pool_size=10, max_overflow=20, pool_pre_ping=True)
        # what a transaction reads is of one moment; SQLite has no other way
        self._reader = (
            self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        )
        self._together = _Together(self.engine) if self.is_sqlite else None

    def upgrade(self) -> None:
        """Bring the tables to this version of the broker."""
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        with self.engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that changes nothing, and sees the database as it was at one moment."""
        held = _moment.get()
        if held is not None and held[0] is self:
            yield held[1]
            return
        with Session(self._reader, expire_on_commit=False, autoflush=False) as session:
            yield session

    @contextmanager
    def ask(self) -> Iterator[Connection]:
        """`read` without a session, for what is looked up with every request."""
        held = _moment.get()
        if held is not None and held[0] is self:
            yield held[1].connection()
            return
        with self._reader.connect() as connection:
            yield connection

    @contextmanager
    def moment(self) -> Iterator[None]:
        """All reads of this thread inside are of one moment, in one transaction: for a page that is made of many. What
        is written inside they do not see."""
        with self.read() as session:
            before = _moment.set((self, session))
            try:
                yield
            finally:
                _moment.reset(before)

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that is committed whole at the end, or not at all."""
        if self._together is not None:
            with self._together.write() as session:
                yield session
        else:
            with Session(self.engine, expire_on_commit=False) as session, session.begin():
                _check_fence(session)
                yield session

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()


@dataclass
class _Shared:
    """A transaction that several writers share, until it is over: then `failure` says why it was undone, if it was."""

    connection: Connection
    members: int = 0
    worth: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None


class _Together:
    """Writers of one process on SQLite, one at a time; whoever is waiting when another is done goes on in the same
    transaction, and the last one commits it for all.

    SQLite lets a waiting writer sleep and try again, and the unlucky starve; here they queue. A writer that fails
    undoes her own savepoint, and the others stand. If that fails, or the commit does, all of them have failed: to each
    it is a fault of the database, like one in a transaction of her own. Do not take a lock inside `write` that somebody
    may hold while she calls it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn, self._count = threading.Lock(), threading.Lock()
        self._waiting = 0
        self._shared: _Shared | None = None

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One writer's part; returns once it is on the disk."""
        with self._count:
            self._waiting += 1
        try:
            self._turn.acquire()
        finally:
            with self._count:
                self._waiting -= 1
        shared = None
        try:
            try:
                shared = self._join()
                with self._part(shared) as session:
                    yield session
            finally:
                if shared is not None:
                    self._leave(shared)
                self._turn.release()
        finally:  # also for one who failed: what she saw of the others is so, or all of it failed
            while shared is not None and not shared.over.wait(1.0):
                with self._turn:  # whoever was waiting never came
                    self._leave(shared)
        if shared.failure is not None:
            raise exc.OperationalError("COMMIT", None, shared.failure)

    def _join(self) -> _Shared:
        if self._shared is not None:
            return self._shared
        connection = self._engine.connect()
        try:
            connection.connection.info[_WRITES] = True
            connection.begin()
        except BaseException:
            connection.close()
            raise
        self._shared = _Shared(connection)
        return self._shared

    @contextmanager
    def _part(self, shared: _Shared) -> Iterator[Session]:
        shared.members += 1
        with Session(shared.connection, expire_on_commit=False, join_transaction_mode="create_savepoint") as session:
            try:
                _check_fence(session)
                yield session
                session.flush()
            except BaseException:
                try:
                    session.rollback()
                except BaseException as error:
                    shared.failure = error
                raise
            try:
                session.commit()  # of the savepoint
            except BaseException as error:
                shared.failure = error
                raise
            shared.worth = True

    def _leave(self, shared: _Shared) -> None:
        """Ends the transaction, unless somebody is waiting who will."""
        if shared.over.is_set() or (self._waiting and shared.members < _MOST_TOGETHER and shared.failure is None):
            return
        self._shared = None
        with shared.connection as connection:
            try:
                if not connection.connection.dbapi_connection.in_transaction:  # type: ignore[union-attr]
                    raise shared.failure or RuntimeError("SQLite gave the transaction up")
                if shared.worth and shared.failure is None:
                    connection.commit()
            except BaseException as error:
                shared.failure = shared.failure or error
                connection.invalidate()  # whatever state it is in, nobody gets it
        shared.over.set()


def _check_fence(session: Session) -> None:
    check = _fence.get()
    if check is not None:
        check(session.connection())


def _sqlite_settings(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun below, not by the driver
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={_BUSY_SECONDS * 1000}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _plain_steps(dialect: Any) -> None:
    """Transactions and savepoints begin and end by plain statements. With an event for that SQLAlchemy would look for
    listeners at every step of every statement, and savepoints would be compiled anew each time."""

    def begin(connection: PoolProxiedConnection) -> None:
        writes = connection.info.pop(_WRITES, False)
        dialect.do_execute(connection.cursor(), "BEGIN IMMEDIATE" if writes else "BEGIN", ())

    def step(words: str, connection: Connection, name: str) -> None:
        try:
            dialect.do_execute(connection.connection.cursor(), f"{words} {name}", ())
        except sqlite3.Error as error:
            raise exc.OperationalError(words, None, error) from error

    dialect.do_begin, dialect.do_savepoint = begin, partial(step, "SAVEPOINT")
    dialect.do_release_savepoint, dialect.do_rollback_to_savepoint = (
        partial(step, "RELEASE"),
        partial(step, "ROLLBACK TO"),
    )
