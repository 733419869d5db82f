"""The migrations make exactly the tables that queries use, and take them away again."""

import sqlite3

import pytest
from sqlalchemy import inspect, text

from flmarket.errors import ConfigError, MissingDependency, SettlementError
from flmarket.ledger import AwardState, EntryKind, Release, Resolution, SqlLedger, store
from flmarket.ledger.entry import Line
from flmarket.ledger.sql import append
from flmarket.privacy import PureDp


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/new.db"
    else:
        url = request.getfixturevalue("postgres")(tables=False)
    engine = store.open_engine(url)
    yield engine
    engine.dispose()


def described(engine):
    """All tables: their constraints, indices and columns."""
    found = inspect(engine)
    tables = [name for name in sorted(found.get_table_names()) if name != store.VERSION_TABLE]
    return {
        name: (
            sorted((check["name"], check["sqltext"]) for check in found.get_check_constraints(name)),
            sorted((unique["name"], unique["column_names"]) for unique in found.get_unique_constraints(name)),
            sorted((index["name"], index["column_names"], index["unique"]) for index in found.get_indexes(name)),
            [(column["name"], str(column["type"]), column["nullable"]) for column in found.get_columns(name)],
        )
        for name in tables
    }


def test_up_equal_to_what_queries_use_and_down(engine):
    store.migrate(engine)
    with engine.connect() as connection:
        assert store.version(connection) == store.NEWEST
    migrated = described(engine)
    tables = {name: {column: kind for column, kind, _ in columns} for name, (*_, columns) in migrated.items()}
    assert tables == {
        one.name: {column.name: str(column.type.compile(engine.dialect)) for column in one.columns}
        for one in (store.entries, store.accounts, store.nodes)
    }
    store.migrate(engine)  # again: nothing to do
    store.migrate(engine, "base")
    assert described(engine) == {}
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            left = connection.execute(text("SELECT count(*) FROM pg_proc WHERE proname LIKE 'ledger%'")).scalar()
        else:
            left = connection.execute(text("SELECT count(*) FROM sqlite_master WHERE type = 'trigger'")).scalar()
        assert left == 0
    store.migrate(engine)
    assert described(engine) == migrated


def test_a_failed_migration_leaves_nothing(engine, monkeypatch):
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE ledger_nodes (x integer)")
    with pytest.raises(Exception, match="ledger_nodes"):
        store.migrate(engine)
    assert inspect(engine).get_table_names() == ["ledger_nodes"]


def test_another_version_is_not_touched(engine):
    url = engine.url.render_as_string(hide_password=False)
    SqlLedger(url).close()
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE {store.VERSION_TABLE} SET version_num = '0000'")
    with pytest.raises(ConfigError, match="version 0002, not 0000"):
        SqlLedger(url)


def guards(engine):
    """What guards the journal in SQLite, in the words in which it is kept there."""
    with engine.connect() as connection:
        kept = "SELECT name, sql FROM sqlite_master WHERE type IN ('trigger', 'index') AND sql IS NOT NULL"
        return dict(connection.execute(text(kept)).all())


def test_the_version_before_opens_with_its_rows_and_moves_up_and_down(engine, award):
    """Rows of version 0001 are read, added to and verified, before the step, after it, and after the way back."""
    url = engine.url.render_as_string(hide_password=False)
    store.migrate(engine, "0001")
    before = guards(engine) if engine.dialect.name == "sqlite" else {}
    with SqlLedger(url) as book:  # as it is, nothing is asked of anybody
        book.deposit("d1", "buyer", 1000)
        book.register_cap("owner-1", PureDp(9.0))
        book.hold_many([award(id=f"a{i}", price=1) for i in range(300)])
        book.void("a9", "late")
        old = book.verify()
    with engine.connect() as connection:
        assert store.version(connection) == "0001"
    with SqlLedger(url, upgrade=True) as book:
        assert book.verify(old) == old
        book.resolve_many([Resolution("a1", AwardState.POSTED, release=Release("a1", "m", PureDp(1.0)))])
        for state in (AwardState.POSTED, AwardState.EXPIRED):  # the same guards: by a program without our rules
            payee = "owner-1" if state is AwardState.POSTED else "buyer"
            line = Line(EntryKind(state.value), "a9", "escrow", payee, 1, "owner-1")
            with pytest.raises(SettlementError, match="resolved already"), store.writing(book.engine) as connection:
                append(connection, [line], 1)
        newer = book.verify(old)
    with engine.connect() as connection:
        assert store.version(connection) == store.NEWEST
    if engine.dialect.name == "sqlite":
        after = guards(engine)
        assert after.keys() == before.keys() - {"ledger_entries_resolve_once", "ledger_entries_pay_for_release"}
        assert after != before
        store.migrate(engine, "0001")
        assert guards(engine) == before
        with SqlLedger(url) as book:
            assert book.verify(newer) == newer


def test_readers_leave_the_write_lock_alone(tmp_path):
    with SqlLedger(f"sqlite:///{tmp_path}/new.db") as book:
        other = sqlite3.connect(tmp_path / "new.db", timeout=0, isolation_level=None)
        with store.reading(book.engine) as connection:
            store.version(connection)
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        with store.writing(book.engine), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()


def test_a_driver_that_is_not_there_is_named(monkeypatch):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")

    monkeypatch.setattr(store, "create_engine", missing)
    with pytest.raises(MissingDependency, match="psycopg"):
        store.open_engine("postgresql://u:p@127.0.0.1:1/x")


def test_what_is_no_ledger(tmp_path, engine):
    with pytest.raises(ConfigError, match="a ledger that exists"):
        SqlLedger(f"sqlite:///{tmp_path}/none.db", create=False)
    assert not (tmp_path / "none.db").exists()
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE other (x integer)")
    with pytest.raises(ConfigError, match="holds a ledger"):
        SqlLedger(engine.url.render_as_string(hide_password=False), create=False)
    server = store.open_engine("postgresql://u:p@127.0.0.1:1/x")  # nothing is asked of it
    assert server.url.drivername == "postgresql+psycopg"
    assert server.pool._pre_ping  # a connection that died in the pool is not a failed call
    assert store.exists("postgresql://u:p@127.0.0.1:1/x")
    assert store.exists(f"sqlite:///{tmp_path}/new.db") == (engine.dialect.name == "sqlite")
    assert not store.exists(f"sqlite:///{tmp_path}/none.db")
    for url in ("sqlite://", "sqlite:///:memory:", "mysql://x/y", "market.db", "", None):
        with pytest.raises(ConfigError, match="database"):
            SqlLedger(url)
