"""Whatever is changed behind the ledger's back, `verify` sees it and names the entry."""

import sqlite3

import pytest

from flmarket.errors import SettlementError
from flmarket.ledger import AwardState, LedgerCorrupt, MemoryLedger, Release, Resolution, SqlLedger
from flmarket.ledger.entry import ROW, Line, sealed
from flmarket.privacy import PureDp


def write_books(book, award):
    """Ids that differ in two characters, so that no flipped byte makes one of another."""
    book.deposit("d1", "buyer", 1000)
    book.register_cap("owner-1", PureDp(3.0))
    book.hold_many([award(id=f"a{i}{i}", price=10, owner=f"owner-{i}") for i in range(4)])
    book.resolve_many([Resolution("a11", AwardState.POSTED, release=Release("a11", "laplace-l1", PureDp(1.0)))])
    book.void("a22", "late")
    book.charge_fee("f1", "buyer", 5)
    book.withdraw("w1", "buyer", 5)


@pytest.fixture
def path(tmp_path, award):
    path = tmp_path / "market.db"
    with SqlLedger(f"sqlite:///{path}") as book:
        write_books(book, award)
    with sqlite3.connect(path) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("DROP INDEX ledger_entries_resolved_once")
    connection.close()
    return path


def verify(path):
    with SqlLedger(f"sqlite:///{path}") as book:
        return book.verify()


def flips(value):
    """The value with each of its bytes changed: in the lowest bit, and in the highest (no longer UTF-8)."""
    if isinstance(value, int):
        return [value ^ (1 << bit) for bit in range(0, 62, 6)]
    raw = value.encode()
    return [raw[:i] + bytes([raw[i] ^ bit]) + raw[i + 1 :] for i in range(len(raw)) for bit in (0x01, 0x80)]


def test_any_flipped_byte_of_any_entry_is_named(path):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    rows = connection.execute(f"SELECT {', '.join(ROW)} FROM ledger_entries ORDER BY seq").fetchall()
    tried = 0
    with SqlLedger(f"sqlite:///{path}") as book:
        book.verify()
        for row in rows:
            for column, value in zip(ROW, row, strict=True):
                if value is None:
                    changed = [1, b"x"] if column not in ("round_index", "spent_pico", "limit_pico") else [1]
                else:
                    # every byte; of the long hashes every eighth
                    changed = flips(value)[:: 8 if column in ("previous", "hash") else 1]
                    changed = changed[1:] if column == "seq" else changed  # its lowest bits would hit another entry
                for other in changed:
                    # CAST keeps the bytes as they are, valid text or not
                    place = "CAST(? AS TEXT)" if isinstance(other, bytes) else "?"
                    connection.execute("BEGIN")
                    connection.execute(f"UPDATE ledger_entries SET {column} = {place} WHERE seq = ?", (other, row[0]))
                    connection.execute("COMMIT")
                    with pytest.raises(LedgerCorrupt) as caught:
                        book.verify()
                    assert caught.value.seq == row[0], (column, value, other)
                    assert f"entry {row[0]}" in str(caught.value)
                    seq = other if column == "seq" else row[0]
                    connection.execute(f"UPDATE ledger_entries SET {column} = ? WHERE seq = ?", (value, seq))
                    tried += 1
        book.verify()
    connection.close()
    assert tried > 500


@pytest.mark.parametrize("seq", [0, 1, 5])
def test_a_removed_entry_is_named(path, seq):
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM ledger_entries WHERE seq = ?", (seq,))
    connection.close()
    with pytest.raises(LedgerCorrupt, match=f"entry {seq}: missing"):
        verify(path)


def test_a_cut_end_shows_in_the_balances_and_against_a_known_head(path):
    with SqlLedger(f"sqlite:///{path}") as book:
        head = book.verify()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM ledger_entries WHERE seq = ?", (head.size - 1,))
    connection.close()
    with SqlLedger(f"sqlite:///{path}") as book:
        with pytest.raises(LedgerCorrupt, match="balance"):
            book.verify()
        with pytest.raises(LedgerCorrupt, match=f"entry {head.size - 1}: missing"):
            book.verify(head)


def test_swapped_entries_are_named(path):
    with sqlite3.connect(path) as connection:
        for old, new in ((2, 100), (3, 2), (100, 3)):
            connection.execute("UPDATE ledger_entries SET seq = ? WHERE seq = ?", (new, old))
    connection.close()
    with pytest.raises(LedgerCorrupt, match="entry 2"):
        verify(path)


def test_a_changed_balance_is_named(path):
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE ledger_accounts SET balance = balance + 1 WHERE name = 'owner-1'")
    connection.close()
    with pytest.raises(LedgerCorrupt, match="owner-1 is kept as 11, the entries say 10"):
        verify(path)


def test_changed_inner_nodes_are_seen(tmp_path, award):
    url = f"sqlite:///{tmp_path}/market.db"
    with SqlLedger(url) as book:
        book.deposit("d1", "buyer", 10**6)
        book.hold_many([award(id=f"a{i}", price=1) for i in range(600)])
        book.verify()
        with book.engine.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER ledger_nodes_stay")
            connection.exec_driver_sql("DROP TRIGGER ledger_nodes_keep")
            connection.exec_driver_sql("UPDATE ledger_nodes SET hash = upper(hash) WHERE position = 1")
        book.verify()  # the same hash in other letters
        with book.engine.begin() as connection:
            flip = "UPDATE ledger_nodes SET hash = 'f' || substr(hash, 1, 63) WHERE position = 1"
            connection.exec_driver_sql(flip)
        with pytest.raises(LedgerCorrupt, match="node"):
            book.verify()
        with book.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM ledger_nodes WHERE position = 1")
        with pytest.raises(LedgerCorrupt, match="not all there"):
            book.verify()


def test_extra_nodes_are_seen(tmp_path, award):
    """A node that no entry makes: it would serve to prove what is not there, once the log grows that far."""
    for count, level, position in ((5, 8, 0), (300, 8, 1), (300, 16, 0), (300, 3, 7)):
        with SqlLedger(f"sqlite:///{tmp_path}/{count}-{level}-{position}.db") as book:
            book.deposit("d1", "buyer", 10**6)
            book.hold_many([award(id=f"a{i}", price=1) for i in range(count)])
            book.verify()
            with book.engine.begin() as connection:
                for (name,) in connection.exec_driver_sql(
                    "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'ledger_nodes'"
                ).fetchall():
                    connection.exec_driver_sql(f"DROP TRIGGER {name}")
                extra = f"INSERT INTO ledger_nodes VALUES ({level}, {position}, '{'0' * 64}')"
                connection.exec_driver_sql(extra)
            with pytest.raises(LedgerCorrupt, match="nodes of the tree are kept"):
                book.verify()


@pytest.fixture
def memory(award):
    book = MemoryLedger(clock=lambda: 1)
    write_books(book, award)
    return book


CAP, RELEASED = (
    '{"cap":{"kind":"pure-dp","epsilon":5.0}}',
    '{"guarantee":{"kind":"pure-dp","epsilon":1.0},"mechanism":"m"}',
)
LIES = {
    "money from nowhere": Line("deposit", "x", "owner-3", "owner-9", 5),
    "an overdraft": Line("withdrawal", "x", "owner-3", "bank", 5),
    "a negative amount": Line("deposit", "x", "bank", "owner-9", -5),
    "an unknown award": Line("posted", "x", "escrow", "owner-3", 5, "owner-3"),
    "another price": Line("posted", "a33", "escrow", "owner-3", 11, "owner-3"),
    "another payee": Line("posted", "a33", "escrow", "owner-9", 10, "owner-3"),
    "resolved again": Line("voided", "a11", "escrow", "buyer", 10, "owner-1"),
    "a second deposit of an id": Line("deposit", "d1", "bank", "buyer", 1000),
    "a release by another": Line(
        "release", "a33", owner="owner-9", detail='{"guarantee":{"kind":"pure-dp","epsilon":1.0},"mechanism":"m"}'
    ),
    "a release after payment": Line(
        "release", "a00", owner="owner-0", detail='{"guarantee":{"kind":"pure-dp","epsilon":1.0}}'
    ),
    "a release of more than was awarded": Line(
        "release", "a33", owner="owner-3", detail='{"guarantee":{"kind":"pure-dp","epsilon":1.1},"mechanism":"m"}'
    ),
    "a release of more under a delta": Line(
        "release",
        "a33",
        owner="owner-3",
        detail='{"guarantee":{"delta":1e-05,"epsilon":1.1,"kind":"approx-dp"},"mechanism":"m"}',
    ),
    "a release of more by zCDP": Line(
        "release", "a33", owner="owner-3", detail='{"guarantee":{"kind":"zcdp","rho":1.1},"mechanism":"gaussian-zcdp"}'
    ),
    "a release of hardly any noise": Line(
        "release",
        "a33",
        owner="owner-3",
        detail='{"guarantee":{"kind":"gaussian","noise_multiplier":0.7},"mechanism":"gaussian-l2"}',
    ),
    "a release for no award": Line(
        "release", "x", owner="owner-3", detail='{"guarantee":{"kind":"pure-dp","epsilon":1.0},"mechanism":"m"}'
    ),
    "a void of no award": Line("voided", "x", "escrow", "buyer", 5, "owner-3"),
    "an expiry to the owner": Line("expired", "a33", "escrow", "owner-3", 10, "owner-3"),
    "a broken cap": Line("cap", "x", owner="owner-3", spent_pico=0, limit_pico=1, detail="{}"),
    "a low total": Line(
        "cap", "x", owner="owner-1", spent_pico=0, limit_pico=5, detail='{"cap":{"kind":"pure-dp","epsilon":5.0}}'
    ),
    "money in a cap": Line("cap", "x", "bank", "buyer", 5, "owner-3"),
    "a cap of nobody": Line("cap", "x", spent_pico=0, limit_pico=5000000000010, detail=CAP),
    "a cap of no name": Line("cap", "x", owner="", spent_pico=0, limit_pico=5000000000010, detail=CAP),
    "a cap with a payer": Line("cap", "x", "bank", None, 0, "owner-3", None, 0, 5000000000010, CAP),
    "a cap with a payee": Line("cap", "x", None, "buyer", 0, "owner-3", None, 0, 5000000000010, CAP),
    "a cap with an amount": Line("cap", "x", None, None, 1, "owner-3", None, 0, 5000000000010, CAP),
    "a cap that states another limit": Line("cap", "x", owner="owner-3", spent_pico=0, limit_pico=1, detail=CAP),
    "a release that states totals without a cap": Line(
        "release", "a33", owner="owner-3", spent_pico=0, limit_pico=1, detail=RELEASED
    ),
    "money to where it came from": Line("hold", "x", "escrow", "escrow", 5, "owner-3", 0, detail='{"epsilon":"0.0"}'),
    "a deposit that somebody pays": Line("deposit", "x", "buyer", "owner-9", 0),
    "a withdrawal to somebody": Line("withdrawal", "x", "owner-1", "owner-9", 1),
    "money from no name": Line("withdrawal", "x", "", "bank", 0),
    "money to no name": Line("deposit", "x", "bank", "", 5),
    "money to nobody": Line("deposit", "x", "bank", None, 5),
    "more than there is room for": Line("deposit", "x", "bank", "owner-9", 2**62 + 1),
    "a payment for another owner": Line("posted", "a33", "escrow", "owner-3", 10, "owner-9"),
    "a hold that does not say for what": Line("hold", "x", "buyer", "escrow", 5, "owner-3", 0),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_well_hashed_lies_are_named(memory, lie):
    """An entry that is linked and hashed rightly, but may not follow the ones before."""

    from flmarket.ledger import EntryKind
    from flmarket.ledger.replay import Replay

    entries = list(memory.entries())
    last = entries[-1]
    forged = sealed(lie._replace(kind=EntryKind(lie.kind)), last.seq + 1, 1, last.hash)
    Replay().feed(entries).finish()
    with pytest.raises(LedgerCorrupt, match=f"entry {forged.seq}:"):
        Replay().feed([*entries, forged])


def test_truths_pass_the_same_way(memory):
    from flmarket.ledger import EntryKind
    from flmarket.ledger.replay import Replay

    entries = list(memory.entries())
    for kind, *terms in (
        ("cap", "owner-3/1", None, None, 0, "owner-3", None, 0, 5000000000010, CAP),
        ("release", "a33", None, None, 0, "owner-3", None, None, None, RELEASED),
        ("deposit", "x", "bank", "owner-9", 2**62),
        ("deposit", "x", "bank", "owner-9", 0),
        ("withdrawal", "x", "owner-1", "bank", 10),
    ):
        true = sealed(Line(EntryKind(kind), *terms), entries[-1].seq + 1, 1, entries[-1].hash)
        Replay().feed([*entries, true]).finish()


def test_escrow_is_what_open_awards_hold(memory):
    from flmarket.ledger.replay import Replay

    replay = Replay().feed(memory.entries())
    replay.finish()
    replay.balances["escrow"] += 1
    with pytest.raises(LedgerCorrupt, match="escrow holds"):
        replay.finish()


def test_a_release_after_the_payment_is_named(award):
    from flmarket.ledger import EntryKind
    from flmarket.ledger.replay import Replay

    book = MemoryLedger(clock=lambda: 1)
    book.deposit("d1", "buyer", 10)
    book.hold(award(price=10))
    book.post("t/0/1")
    entries = list(book.entries())
    late = Line(EntryKind.RELEASE, "t/0/1", owner="owner-1", detail=RELEASED)
    with pytest.raises(LedgerCorrupt, match="was paid for before"):
        Replay().feed([*entries, sealed(late, 3, 1, entries[-1].hash)])


def test_a_replay_goes_on_after_its_head_was_asked_for(award):
    """Also past 256 entries, where it keeps nodes of the tree."""
    from flmarket.ledger.replay import Replay

    book = MemoryLedger(clock=lambda: 1)
    book.deposit("d1", "buyer", 1000)
    book.hold_many([award(id=f"a{i}", price=1) for i in range(600)])
    entries, replay = list(book.entries()), Replay()
    assert replay.head() == book.head(0)
    for start, stop in ((0, 7), (7, 300), (300, 601)):
        replay.feed(entries[start:stop])
        assert replay.head() == book.head(stop)
    assert replay.finish(book.head(400)) == book.head()


def test_kept_balances_are_compared_both_ways(path, award):
    """One micro-unit in an account that no entry names, and none kept for one that they do."""
    book = MemoryLedger(clock=lambda: 1)
    book.deposit("d1", "buyer", 1)
    book.verify()
    for balances in ({"bank": -1}, {"bank": -1, "buyer": 1, "ghost": 1}, {"bank": -1, "buyer": 0}):
        book._balances = balances
        with pytest.raises(LedgerCorrupt, match="balance of"):
            book.verify()
    for sql, words in (
        ("INSERT INTO ledger_accounts VALUES ('ghost', 1, 0)", "ghost is kept as 1, the entries say 0"),
        ("UPDATE ledger_accounts SET balance = 0 WHERE name = 'ghost'", ""),
        ("DELETE FROM ledger_accounts WHERE name = 'owner-1'", "owner-1 is kept as 0, the entries say 10"),
    ):
        with sqlite3.connect(path) as connection:
            connection.execute(sql)
        connection.close()
        if words:
            with pytest.raises(LedgerCorrupt, match=words):
                verify(path)
        else:
            verify(path)


def test_an_unpaid_escrow_is_seen(memory):
    memory._balances["escrow"] += 1
    with pytest.raises(SettlementError, match="escrow"):
        memory.verify()


def test_paying_a_capped_owner_without_release_is_named(award):
    from flmarket.ledger import EntryKind
    from flmarket.ledger.replay import Replay

    book = MemoryLedger(clock=lambda: 1)
    book.deposit("d1", "buyer", 10)
    book.register_cap("owner-1", PureDp(1.0))
    book.hold(award(price=10))
    entries = list(book.entries())
    paid = Line(EntryKind.POSTED, "t/0/1", "escrow", "owner-1", 10, "owner-1")
    with pytest.raises(LedgerCorrupt, match="without a release"):
        Replay().feed([*entries, sealed(paid, 3, 1, entries[-1].hash)])
