"""A ledger's database: how to open it, SQLite or PostgreSQL, by URL, at the newest version.

`ledger_entries` is the log and the truth. `ledger_accounts` (balances, kept by triggers) and `ledger_nodes` (inner
hashes of the tree) follow from it, and `verify` recomputes both. The tables, with the constraints and triggers that
guard them, are in `migrations/sql`.

SQLite runs with a write-ahead log, a sync at every commit and a wait for other writers; a writing
transaction takes the write lock at its start (BEGIN IMMEDIATE), so that what it read cannot change before it writes. In
PostgreSQL a writing transaction locks the table of entries against other writers for the same reason.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Connection, Engine, Integer, Text, column, create_engine, event, inspect, table
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError

from flmarket.errors import ConfigError, FlmarketError, SettlementError, needed
from flmarket.files import keep_private
from flmarket.ledger.entry import ROW
from flmarket.ledger.journal import LedgerUnavailable

# What queries need to know of the tables: how they are made and guarded, the scripts in `migrations/sql` alone say.
WHOLE = ("seq", "time_us", "amount_micros", "round_index", "spent_pico", "limit_pico")
_Whole = BigInteger().with_variant(Integer, "sqlite")  # SQLite's INTEGER has 64 bits
entries = table("ledger_entries", *(column(name, _Whole if name in WHOLE else Text) for name in ROW))
accounts = table("ledger_accounts", column("name", Text), column("balance", _Whole), column("last_seq", _Whole))
nodes = table("ledger_nodes", column("level", Integer), column("position", _Whole), column("hash", Text))

VERSION_TABLE = "ledger_version"
NEWEST = "0002"  # the revision that this code is written for
WORKING = ("0001", NEWEST)  # those it works on: version 0001 has the same rules, and checks them more slowly
_WAIT_SECONDS = 30
# Opening a file costs as much as several short reads, so every thread of a service may keep one; the last used, whose
# pages and statements are at hand, is taken first.
SQLITE_POOL: dict[str, Any] = {"pool_size": 48, "pool_use_lifo": True}
_MIGRATION_LOCK = 0x464C4D41  # any fixed number: whoever migrates holds this advisory lock


def open_engine(url: str) -> Engine:
    """An engine for a ledger's database; `postgresql://` means psycopg."""
    target = _checked_url(url)
    with needed("store"):
        if target.get_backend_name() != "sqlite":
            return create_engine(target, pool_pre_ping=True)
        keep_private(str(target.database))
        engine = create_engine(target, connect_args={"timeout": _WAIT_SECONDS}, **SQLITE_POOL)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def exists(url: str) -> bool:
    """Whether there is anything at this address yet; a SQLite file is made by connecting to it."""
    target = _checked_url(url)
    return target.get_backend_name() != "sqlite" or Path(str(target.database)).exists()


def migrate(engine: Engine, revision: str = NEWEST) -> None:
    """Bring the schema to a revision ("base": drop it all), in one transaction; two processes may do so at once."""
    from alembic import command
    from alembic.config import Config

    with as_file(files("flmarket.ledger.migrations")) as folder, writing(engine, lock=False) as connection:
        config = Config()
        config.set_main_option("script_location", str(folder))
        config.attributes["connection"] = connection
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
        found = version(connection)
        if found != revision:
            down = revision == "base" or (found is not None and revision < found)
            (command.downgrade if down else command.upgrade)(config, revision)


def version(connection: Connection) -> str | None:
    """The revision that the schema is at; None if there is no ledger."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()  # noqa: S608
    return None if found is None else str(found)


@contextmanager
def writing(engine: Engine, *, lock: bool = True) -> Iterator[Connection]:
    """A transaction that no other writer overlaps; committed at the end, rolled back on any error."""
    with _translated(), engine.connect().execution_options(flmarket_write=True) as connection, connection.begin():
        if lock and engine.dialect.name == "postgresql":
            connection.exec_driver_sql("LOCK TABLE ledger_entries IN SHARE ROW EXCLUSIVE MODE")
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that sees one moment of the books, whatever others write meanwhile."""
    with _translated(), engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


@contextmanager
def bad_text_readable(connection: Connection) -> Iterator[None]:
    """Read damaged text as it lies in SQLite instead of failing on it, so that its entry can be named."""
    raw: Any = connection.connection.dbapi_connection
    if connection.dialect.name != "sqlite" or raw is None:
        yield
        return
    raw.text_factory = lambda value: value.decode("utf-8", "surrogateescape")
    try:
        yield
    finally:
        raw.text_factory = str


@contextmanager
def _translated() -> Iterator[None]:
    """The database's errors as ours: a broken rule is a refusal, everything else is the store failing."""
    try:
        yield
    except FlmarketError:
        raise
    except IntegrityError as error:
        raise SettlementError(f"the database refused the entry: {_first_line(error)}") from error
    except (DBAPIError, sqlite3.Error) as error:  # the latter where rows are read as the driver gives them
        raise LedgerUnavailable(f"the ledger's database failed: {_first_line(error)}") from error


def _first_line(error: DBAPIError | sqlite3.Error) -> str:
    said = error.orig if isinstance(error, DBAPIError) else error
    return str(said).strip().splitlines()[0] if str(said).strip() else type(said).__name__


def _checked_url(url: str) -> URL:
    accepted = "sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
    try:
        target = make_url(url)
        backend = target.get_backend_name()
    except (ArgumentError, NoSuchModuleError, AttributeError):
        raise ConfigError("database", url, accepted) from None
    if backend == "postgresql":
        return target.set(drivername="postgresql+psycopg") if "+" not in target.drivername else target
    if backend != "sqlite" or target.database in (None, "", ":memory:"):
        raise ConfigError(
            "database", target.render_as_string(hide_password=True), accepted + "; MemoryLedger() needs none"
        )
    return target


def _prepare_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions begin where _begin_sqlite says so
    # what a statement sets aside in case it fails is nothing to survive a crash: it stays in memory
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "temp_store = MEMORY"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("flmarket_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
