"""The database itself keeps the rules: SQL that breaks one fails, whoever sends it."""

import pytest
from sqlalchemy.exc import DBAPIError

from flmarket.errors import SettlementError
from flmarket.ledger import AwardState, EntryKind, LedgerUnavailable, Release, Resolution, SqlLedger, entry, store
from flmarket.ledger.entry import Line, sealed
from flmarket.ledger.rules import Draft
from flmarket.ledger.sql import append
from flmarket.privacy import PureDp

GIVEN = '{"guarantee":{"epsilon":1.0,"kind":"pure-dp"},"mechanism":"m"}'


def write_books(book, award):
    """Six awards: paid, voided, open; three are owner-3's, under a cap that is half spent."""
    book.deposit("d1", "buyer", 100)
    book.register_cap("owner-3", PureDp(2.0))
    book.hold_many([award(id=f"a{i}", price=10, owner=f"owner-{i}") for i in range(4)])
    book.hold_many([award(id="b3", price=10, owner="owner-3"), award(id="c3", price=10, owner="owner-3")])
    book.post("a0")
    book.void("a1", "late")
    book.resolve_many([Resolution("b3", AwardState.POSTED, release=Release("b3", "m", PureDp(1.0)))])


@pytest.fixture
def book(url, award):
    with SqlLedger(url) as book:
        write_books(book, award)
        yield book
        book.verify()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def guarded(request, tmp_path_factory, award):
    """The same books, once for all tests that cannot change them."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('guarded')}/market.db"
    else:
        url = request.getfixturevalue("postgres")(tables=False)
    with SqlLedger(url) as book:
        write_books(book, award)
        before = book.head()
        yield book
        assert book.verify() == before


def run(book, sql):
    with book.engine.begin() as connection:
        connection.exec_driver_sql(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE ledger_entries SET amount_micros = 7 WHERE seq = 0",
        "UPDATE ledger_entries SET detail = '{}' WHERE seq = 2",
        "DELETE FROM ledger_entries",
        "DELETE FROM ledger_entries WHERE seq = 9",
        "UPDATE ledger_accounts SET balance = balance + 1 WHERE name = 'owner-0'",
        "UPDATE ledger_accounts SET balance = balance - 1, last_seq = last_seq + 100 WHERE name = 'buyer'",
        "UPDATE ledger_accounts SET name = 'thief' WHERE name = 'owner-0'",
        "INSERT INTO ledger_accounts (name, balance, last_seq) VALUES ('thief', 5, -1)",
        "INSERT INTO ledger_accounts (name, balance, last_seq) VALUES ('thief', 0, 5)",
        "DELETE FROM ledger_accounts WHERE name = 'bank'",
        "DELETE FROM ledger_accounts",
    ],
)
def test_nothing_is_changed_or_taken_out(guarded, sql):
    with pytest.raises(DBAPIError, match=r"ledger|overdrawn"):
        run(guarded, sql)


def test_nodes_stay(book, award):
    book.hold_many([award(id=f"n{i}", price=0) for i in range(300)])
    for sql in ("UPDATE ledger_nodes SET hash = hash", "DELETE FROM ledger_nodes"):
        with pytest.raises(DBAPIError, match="only added to"):
            run(book, sql)


def test_replacing_is_no_way_around(book):
    if book.engine.dialect.name == "postgresql":
        statements = [
            "TRUNCATE ledger_entries",
            "TRUNCATE ledger_accounts",
            "TRUNCATE ledger_nodes",
            "INSERT INTO ledger_accounts (name, balance, last_seq) VALUES ('buyer', 0, -1)"
            " ON CONFLICT (name) DO UPDATE SET balance = 99",
        ]
    else:
        copied = "time_us, kind, ref, debit, credit, 7, owner, round_index, spent_pico, limit_pico, detail"
        statements = [
            "INSERT OR REPLACE INTO ledger_accounts (name, balance, last_seq) VALUES ('buyer', 0, -1)",
            f"INSERT OR REPLACE INTO ledger_entries SELECT seq, {copied}, previous, hash"
            " FROM ledger_entries WHERE seq = 0",
            # in the next place, with the id of an earlier entry
            f"INSERT OR REPLACE INTO ledger_entries SELECT (SELECT max(seq) + 1 FROM ledger_entries), {copied},"
            " (SELECT hash FROM ledger_entries ORDER BY seq DESC LIMIT 1), hash FROM ledger_entries WHERE seq = 0",
        ]
    for sql in statements:
        with pytest.raises(DBAPIError, match="ledger"):
            run(book, sql)


BAD_LINES = {
    "a second payment": Line(EntryKind.POSTED, "a0", "escrow", "owner-0", 10, "owner-0"),
    "void after payment": Line(EntryKind.VOIDED, "a0", "escrow", "buyer", 10, "owner-0"),
    "payment after void": Line(EntryKind.POSTED, "a1", "escrow", "owner-1", 10, "owner-1"),
    "payment of nothing held": Line(EntryKind.POSTED, "zz", "escrow", "owner-1", 10, "owner-1"),
    "a higher price": Line(EntryKind.POSTED, "a2", "escrow", "owner-2", 11, "owner-2"),
    "to somebody else": Line(EntryKind.POSTED, "a2", "escrow", "thief", 10, "owner-2"),
    "to somebody else as owner": Line(EntryKind.POSTED, "a2", "escrow", "thief", 10, "thief"),
    "void to the owner": Line(EntryKind.VOIDED, "a2", "escrow", "owner-2", 10, "owner-2"),
    "payment without release": Line(EntryKind.POSTED, "a3", "escrow", "owner-3", 10, "owner-3"),
    "an overdraft": Line(EntryKind.WITHDRAWAL, "w", "owner-0", "bank", 11),
    "a hold without money": Line(EntryKind.HOLD, "h", "owner-1", "escrow", 1, "owner-2", 0, detail='{"epsilon":"1.0"}'),
    "from escrow by withdrawal": Line(EntryKind.WITHDRAWAL, "w", "escrow", "bank", 10),
    "from escrow by fee": Line(EntryKind.FEE, "f", "escrow", "fees", 10),
    "from nowhere": Line(EntryKind.DEPOSIT, "d", "owner-0", "thief", 1),
    "a negative amount": Line(EntryKind.DEPOSIT, "d", "bank", "thief", -1),
    "to itself": Line(EntryKind.DEPOSIT, "d", "bank", "bank", 1),
    "one side only": Line(EntryKind.DEPOSIT, "d", "bank", None, 1),
    "a repeated deposit": Line(EntryKind.DEPOSIT, "d1", "bank", "buyer", 100),
    "an unknown kind": Line("gift", "g", "bank", "thief", 1),
    "above the cap": Line(
        EntryKind.RELEASE, "c3", owner="owner-3", spent_pico=3 * 10**12, limit_pico=2 * 10**12 + 4, detail=GIVEN
    ),
    "a raised limit": Line(
        EntryKind.RELEASE, "c3", owner="owner-3", spent_pico=3 * 10**12, limit_pico=9 * 10**12, detail=GIVEN
    ),
    "a forgotten cap": Line(EntryKind.RELEASE, "c3", owner="owner-3", detail=GIVEN),
    "a falling total": Line(
        EntryKind.RELEASE, "c3", owner="owner-3", spent_pico=1, limit_pico=2 * 10**12 + 4, detail=GIVEN
    ),
    "a second release": Line(
        EntryKind.RELEASE, "b3", owner="owner-3", spent_pico=2 * 10**12, limit_pico=2 * 10**12 + 4, detail=GIVEN
    ),
    "a release after payment": Line(EntryKind.RELEASE, "a0", owner="owner-0", detail=GIVEN),
    "a release of nothing held": Line(EntryKind.RELEASE, "zz", owner="owner-0", detail=GIVEN),
    "a release by another": Line(EntryKind.RELEASE, "a2", owner="owner-1", detail=GIVEN),
    "a cap below the total": Line(
        EntryKind.CAP, "owner-3/2", owner="owner-3", spent_pico=10**12, limit_pico=10, detail="{}"
    ),
    "a cap without a limit": Line(EntryKind.CAP, "owner-2/1", owner="owner-2"),
    "money in a release": Line(EntryKind.RELEASE, "a2", "escrow", "owner-2", 10, "owner-2", detail=GIVEN),
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_rightly_linked_and_hashed_entries_still_obey_the_rules(guarded, line, monkeypatch):
    """What a program with the ledger's own code, but without its rules, may try."""
    monkeypatch.setitem(entry._NAMES, "gift", "gift")
    before = guarded.head()
    with pytest.raises(SettlementError, match="refused"), store.writing(guarded.engine) as connection:
        append(connection, [line], 1)
    assert guarded.head() == before


def test_good_lines_pass_the_same_way(book):
    with store.writing(book.engine) as connection:
        append(connection, [Line(EntryKind.POSTED, "a2", "escrow", "owner-2", 10, "owner-2")], 1)
    assert book.balance("owner-2") == 10


def test_entries_follow_one_another(book):
    """Neither a gap, nor a place taken, nor a wrong predecessor."""
    line = Line(EntryKind.DEPOSIT, "d2", "bank", "buyer", 1)
    size, last = book.head().size, book.head().last
    for seq, previous in ((size + 1, last), (size - 1, last), (size, "0" * 64), (-1, last)):
        row = sealed(line, seq, 1, previous).to_dict()
        with pytest.raises(DBAPIError), book.engine.begin() as connection:
            connection.execute(store.entries.insert(), [row])
    row = sealed(line, size, 1, last).to_dict()
    with book.engine.begin() as connection:
        connection.execute(store.entries.insert(), [row])
    assert book.balance("buyer") == 100 - 6 * 10 + 10 + 1


def test_rules_that_python_forgot_are_kept_by_the_database(book, award, monkeypatch):
    """Planted bugs: no balance check, no state check. Nothing is paid."""
    monkeypatch.setattr(Draft, "_move", lambda self, line: self._add(line))
    with pytest.raises(SettlementError, match="refused"):
        book.hold(award(id="too much", price=1000))
    monkeypatch.undo()
    monkeypatch.setattr(Draft, "award", lambda self, id: award(id=id, price=10, owner=f"owner-{id[1:]}"))
    with pytest.raises(SettlementError, match="refused"):
        book.post("a0")
    assert book.balance("owner-0") == 10


def test_a_broken_database_is_not_a_refusal(url):
    with SqlLedger(url) as book:
        with book.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE ledger_accounts RENAME TO gone")
        with pytest.raises(LedgerUnavailable, match="database failed"):
            book.deposit("d1", "buyer", 1)
        with book.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE gone RENAME TO ledger_accounts")
        book.deposit("d1", "buyer", 1)
