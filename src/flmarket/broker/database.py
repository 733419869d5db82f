"""Connections and transactions: short reads, short writes, the same on SQLite and PostgreSQL.

SQLite has one writer. A transaction that reads first and writes later can find that somebody wrote in between, and
fails at once, whatever the timeout; so a writing transaction says so when it begins (BEGIN IMMEDIATE) and waits its
turn. For the same reason nobody may call the ledger, which has its own connection, inside `write`.

A process may lose its right to write while it is not looking (`holders`). Inside `fenced`, every writing transaction of
this thread, the ledger's included, begins with a check of that right, which then holds until the transaction ends.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.orm import Session

from flmarket.files import keep_private
from flmarket.ledger.journal import LedgerUnavailable

_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_SECONDS = 30
_FAULTS = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError, exc.PendingRollbackError, LedgerUnavailable)

Check = Callable[[Connection], None]
_fence: ContextVar[Check | None] = ContextVar("flmarket_fence", default=None)


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


def respect_fence(engine: Engine) -> None:
    """Let an engine's writing transactions be checked; the ledger's are marked `flmarket_write`."""
    event.listen(engine, "begin", _check_fence)


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
            self.engine = create_engine(url, connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False})
            event.listen(self.engine, "connect", _sqlite_settings)
            event.listen(self.engine, "begin", _sqlite_begin)
        else:
            self.engine = create_engine(url, pool_size=10, max_overflow=20, pool_pre_ping=True)
        respect_fence(self.engine)
        # what a transaction reads is of one moment; SQLite has no other way
        self._reader = (
            self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        )
        self._writer: Engine = self.engine.execution_options(writes=True)
        # SQLite lets a waiting writer sleep and try again, and the unlucky starve; within a process they queue here.
        self._turn: AbstractContextManager[object] = threading.Lock() if self.is_sqlite else nullcontext()

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
        with Session(self._reader, expire_on_commit=False, autoflush=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that is committed whole at the end, or not at all."""
        with self._turn, Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()


def _check_fence(connection: Connection) -> None:
    check, options = _fence.get(), connection.get_execution_options()
    if check is not None and (options.get("writes") or options.get("flmarket_write")):
        check(connection)


def _sqlite_settings(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun below, not by the driver
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={_BUSY_SECONDS * 1000}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
