"""Whoever shares the machine with a broker or an owner cannot read their books."""

import os
import sqlite3
import stat
from contextlib import closing

import pytest

from flmarket.errors import FlmarketError
from flmarket.files import start_database
from flmarket.ledger import Award, DurableAccount, SqlLedger, store
from flmarket.market import Order
from flmarket.market.record import OwnerJournal
from flmarket.privacy import PureDp


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=lambda mask: f"umask {mask:03o}")
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def write_ledger(path):
    book = SqlLedger(f"sqlite:///{path}")
    book.deposit(f"d{book.head().size}", "buyer", 1000)
    book.hold(Award(f"a{book.head().size}", 0, "buyer", "owner-1", 1.0, 1))
    return book


def write_account(path):
    account = DurableAccount.open(path, PureDp(5.0))
    account.charge(f"a{len(list(account.releases()))}", "buyer", PureDp(1.0))
    return account


def write_journal(path):
    journal = OwnerJournal(path)
    order = Order(
        award="t/0/1", task="t", buyer="buyer", market="auction", round_index=0, owner=1, loss=PureDp(1.0),
        price_micros=1, records=1, learning_rate=0.1,
    )  # fmt: skip
    journal.claim(order, 1.0)
    return journal


HEADERS = ("journal_mode", "application_id", "user_version", "page_size", "encoding")
WRITERS = [write_ledger, write_account, write_journal]


@pytest.mark.parametrize("write", WRITERS)
def test_files_are_the_owners_alone(tmp_path, umask, write):
    open_ = write(tmp_path / "books.db")
    found = modes(tmp_path)
    assert set(found) == {"books.db", "books.db-wal", "books.db-shm"}
    assert set(found.values()) == {0o600}
    open_.close()


@pytest.mark.parametrize("write", WRITERS)
def test_wider_files_of_before_are_tightened(tmp_path, write):
    path = tmp_path / "books.db"
    write(path).close()
    # as an older version left it, with a write-ahead log that a crash kept
    crashed = sqlite3.connect(path)
    crashed.execute("PRAGMA journal_mode = WAL")
    crashed.execute("BEGIN IMMEDIATE")
    crashed.execute("ROLLBACK")
    for name in modes(tmp_path):
        (tmp_path / name).chmod(0o664)
    write(path).close()
    assert set(modes(tmp_path).values()) == {0o600}
    crashed.close()


def test_what_cannot_be_made_is_refused_as_before(tmp_path):
    with pytest.raises(FlmarketError):
        SqlLedger(f"sqlite:///{tmp_path}/no/such/folder/books.db")
    with pytest.raises(FlmarketError):
        DurableAccount.open(tmp_path / "no" / "account.db", PureDp(1.0))
    with pytest.raises(FlmarketError):
        SqlLedger(f"sqlite:///{tmp_path}/none.db", create=False)
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_made_whole_is_the_one_that_sqlite_makes(tmp_path, write):
    """The oracle is an empty file, which SQLite's own transactions fill."""
    (tmp_path / "other.db").touch()
    shapes = []
    for name in ("books.db", "other.db"):
        write(tmp_path / name).close()
        with closing(sqlite3.connect(tmp_path / name)) as file:
            assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            headers = [file.execute(f"PRAGMA {one}").fetchone() for one in HEADERS]
            shapes.append((headers, file.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()))
    assert shapes[0] == shapes[1]
    assert shapes[0][0][0] == ("wal",)


def test_a_new_ledger_has_its_write_ahead_log_before_anybody_opens_it(tmp_path):
    """Processes that open an empty one at the same time have nothing to change, which SQLite would not wait for."""
    store.open_engine(f"sqlite:///{tmp_path}/books.db").dispose()
    assert (tmp_path / "books.db").read_bytes()[18:20] == b"\2\2"


def test_a_log_without_its_file_is_not_read_into_a_new_one(tmp_path):
    path = tmp_path / "books.db"
    before = write_account(path)
    log = (tmp_path / "books.db-wal").read_bytes()
    before.close()
    path.unlink()
    (tmp_path / "books.db-wal").write_bytes(log)
    with DurableAccount.open(path, PureDp(7.0)) as account:
        assert (account.cap, list(account.releases())) == (PureDp(7.0), [])


def test_a_file_that_somebody_else_has_just_made_stays(tmp_path):
    path = tmp_path / "books.db"

    def image():
        write_account(path).close()
        return b"not this" * 4

    start_database(path, image, sync=True)
    with DurableAccount.open(path) as account:
        assert len(list(account.releases())) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["books.db"]
