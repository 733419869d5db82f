"""What stays open of owners' records, and what a record promises that is not synchronised."""

import json
import os
import sqlite3
import stat
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

from hostile import call, order

from flmarket.errors import InvalidInput, PrivacyBudgetExhausted
from flmarket.ledger import Head, ReplayRefused
from flmarket.market import Bid, record
from flmarket.market.kind import release_id
from flmarket.market.record import (
    KEPT,
    Mask,
    MemoryJournal,
    MemoryRecord,
    Offer,
    OwnerJournal,
    close_records,
    open_record,
)
from flmarket.privacy import PrivacyAccount, PureDp


@pytest.fixture(autouse=True)
def closed_records():
    yield
    close_records()


@pytest.mark.parametrize("synchronised", [True, False])
def test_new_files_are_on_disk_before_their_names_and_the_names_before_anything_is_said(
    tmp_path, monkeypatch, synchronised
):
    waited, fsync = [], os.fsync

    def watched(handle):
        fsync(handle)
        named = sorted(one.name for one in (tmp_path / "o").glob("[!.]*"))
        waited.append(("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else os.fstat(handle).st_size > 0, named))

    monkeypatch.setattr(os, "fsync", watched)
    open_record(tmp_path / "o" / "owner-1", PureDp(1.0), synchronised=synchronised)
    account, journal = "owner-1.account.sqlite", "owner-1.journal.sqlite"
    # each content under no name of its own, then both names at once; SQLite's own files come later
    assert waited == [(True, []), (True, [journal]), ("folder", [account, journal])] * synchronised


def test_hundreds_of_records_stay_open(tmp_path):
    opened = [open_record(tmp_path / f"owner-{i}", PureDp(1.0), synchronised=False) for i in range(150)]
    assert record.room() >= 150  # the usual limit of 1,024 files is raised where the system lets it
    assert [open_record(tmp_path / f"owner-{i}", PureDp(1.0)) for i in range(150)] == opened


def test_room_is_made_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "room", lambda: 2)
    first = open_record(tmp_path / "a", PureDp(1.0))
    first.account.charge("t/0/0", "buyer", PureDp(0.25))
    open_record(tmp_path / "b", PureDp(1.0))
    assert first.account.spent == 0.25
    assert not first.account.would_exceed(PureDp(0.1))
    open_record(tmp_path / "c", PureDp(1.0))
    with pytest.raises(sqlite3.ProgrammingError):  # closed
        first.account.would_exceed(PureDp(0.1))
    assert open_record(tmp_path / "a", PureDp(1.0)).account.spent == 0.25


def test_real_owners_synchronise_and_simulated_ones_do_not(tmp_path):
    def levels(found):
        files = (found.account._connection, found.journal._connection)
        return [file.execute("pragma synchronous").fetchone()[0] for file in files]

    assert levels(open_record(tmp_path / "real", PureDp(1.0))) == [2, 1]  # full; normal, and full for a mask
    assert levels(open_record(tmp_path / "simulated", PureDp(1.0), synchronised=False)) == [0, 0]


# what a journal promises, in memory and on disk


def vector(number):
    return np.array([float(number), -1.0])


@pytest.fixture(params=["memory", "disk"])
def journal(request, tmp_path):
    if request.param == "memory":
        yield MemoryJournal()
        return
    made = OwnerJournal(tmp_path / "deep" / "er" / "her.journal.sqlite")
    yield made
    made.close()


def test_the_first_offer_the_first_claim_and_the_first_vector_stand(journal):
    one, two = order(), order(round_index=1)
    bid = Bid(owner=7, data_size=5, privacy_budget=0.5, kind=0, rate=1.0)
    first, other = Offer(call(), bid, None), Offer(call(), replace(bid, rate=2.0), Head(3, "0" * 64, "1" * 64))
    assert journal.offer("t", 0) is None
    assert journal.make_offer(first) == journal.make_offer(other) == journal.offer("t", 0) == first
    assert journal.offer("t", 1) is None
    assert journal.offer("u", 0) is None
    later = replace(other, call=call(round_index=1))
    assert journal.make_offer(later) == journal.offer("t", 1) == later
    assert not journal.claimed("t/0/7")
    assert journal.released(one) is None
    assert [journal.claim(one, 50.0), journal.claim(one, 50.0), journal.claim(two, 50.0)] == [True, False, True]
    assert [journal.claimed(name) for name in ("t/0/7", "t/1/7", "t/2/7")] == [True, True, False]
    assert journal.released(one) is None
    np.testing.assert_array_equal(journal.keep(one, vector(1)), vector(1))
    np.testing.assert_array_equal(journal.released(one), vector(1))
    assert journal.released(replace(one, price_micros=1)) is None
    assert journal.released(two) is None
    assert not journal.given_up(one)
    assert not journal.given_up(two)


def test_a_masks_state_follows_from_the_one_before(journal):
    one, first, second = order(), Mask(b"1"), Mask(b"2", b"sum")
    assert journal.mask("t/0/7") is None
    assert [journal.keep_mask(one, None, first), journal.keep_mask(one, None, second)] == [True, False]
    assert journal.mask("t/0/7") == first
    assert [journal.keep_mask(one, second, second), journal.keep_mask(one, first, second)] == [False, True]
    assert journal.mask("t/0/7") == second
    assert journal.mask("t/1/7") is None


def test_chains_are_stored_with_the_state_that_they_follow_from(journal):
    one, first, second = order(), Mask(b"1"), Mask(b"2")
    assert journal.chains(one.task) == b""
    assert journal.keep_mask(one, None, first, b"links")
    assert (journal.chains(one.task), journal.chains("another")) == (b"links", b"")
    assert not journal.keep_mask(one, None, second, b"of a state that does not stand")
    assert journal.keep_mask(one, first, second)
    assert journal.chains(one.task) == b"links"


def test_a_model_of_hers_that_somebody_replaced_is_never_unpickled(disk):
    disk.keep_own_model("t", 0, vector(1))
    (path,) = disk._own("t", 0).parent.glob("*.npy")
    np.save(path, np.array([object], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        disk.own_model("t", 0)


def test_a_model_of_hers_is_for_nobody_elses_eyes(disk):
    disk.keep_own_model("t", 0, vector(1))
    (path,) = disk._own("t", 0).parent.iterdir()
    assert path.stat().st_mode & 0o077 == 0


def test_her_own_model_of_this_round_and_the_last(journal):
    for index in range(4):
        assert journal.own_model("t", index) is None
        journal.keep_own_model("t", index, vector(index))
    journal.keep_own_model("a/b", 0, vector(9))
    kept = [journal.own_model("t", index) for index in range(4)]
    assert kept[0] is None
    assert kept[1] is None
    np.testing.assert_array_equal(kept[2:], [vector(2), vector(3)])
    np.testing.assert_array_equal(journal.own_model("a/b", 0), vector(9))


@pytest.fixture
def disk(tmp_path):
    made = OwnerJournal(tmp_path / "her.journal.sqlite")
    yield made
    made.close()


def test_on_disk_the_first_vector_is_the_one_that_may_leave(disk):
    disk.claim(order(), 50.0)
    disk.keep(order(), vector(1))
    np.testing.assert_array_equal(disk.keep(order(), vector(2)), vector(1))


def test_what_is_given_up(disk):
    """Begun, its time over, no vector; and under the same terms."""
    late, slow = order(), order(round_index=1)
    disk.claim(late, -1.0)
    disk.claim(slow, 50.0)
    assert disk.given_up(late)
    assert not disk.given_up(slow)
    assert not disk.given_up(replace(late, price_micros=1))
    assert not disk.given_up(order(round_index=2))
    disk.keep(late, vector(1))
    assert not disk.given_up(late)


def test_the_latest_vectors_and_masks_of_a_task_stay(disk):
    other = order(task="u")
    hers, others = (
        [order(round_index=index) for index in range(KEPT + 2)],
        [order(task="v", round_index=i) for i in (1, 2)],
    )
    for one in (other, *hers[:-1], *others, hers[-1]):
        disk.claim(one, -1.0)
        disk.keep(one, vector(one.round_index))
        disk.keep_mask(one, None, Mask(b"state", b"masked"))
    for index in range(KEPT + 2):
        one = order(round_index=index)
        assert (disk.released(one) is None) is (index < 2)
        assert disk.mask(release_id(one)) == Mask(b"state", b"" if index < 2 else b"masked")
        assert disk.claimed(release_id(one))
        assert not disk.given_up(one)  # dropped is not the same as never made
    for one in (other, *others):
        np.testing.assert_array_equal(disk.released(one), vector(one.round_index))
    assert disk.mask("u/0/7").masked == b"masked"


def test_terms_are_written_as_journals_of_before_have_them(disk):
    disk.claim(order(), 1.0)
    (text,) = disk._connection.execute("select terms from releases").fetchone()
    assert text == json.dumps(order().to_dict(), sort_keys=True)


def test_the_largest_head_of_each_task(disk):
    heads = {size: Head(size, f"{size}" * 64, "a" * 64) for size in (3, 5, 4)}
    assert disk.head("t") is None
    for head in heads.values():
        disk.saw("t", head)
    disk.saw("t", replace(heads[5], last="b" * 64))
    assert disk.head("t") == heads[5]
    assert disk.head("u") is None


def test_what_is_said_in_a_sum_is_on_disk_before_it_leaves(disk):
    levels = []
    disk._connection.set_trace_callback(levels.append)
    disk.keep_mask(order(), None, Mask(b"1"))
    disk._connection.set_trace_callback(None)
    statements = [text.split()[0].lower() for text in levels]
    assert levels[0] == "pragma synchronous = full"
    assert statements.index("commit") < len(levels) - 1
    assert levels[-1] == "pragma synchronous = normal"
    assert disk._connection.execute("pragma synchronous").fetchone() == (1,)
    assert disk._connection.execute("pragma journal_mode").fetchone() == ("wal",)


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "her.journal.sqlite"
    path.touch()  # an empty file, as an earlier version left it at a crash
    monkeypatch.setattr(record, "_MASKS", "create nonsense")
    with pytest.raises(sqlite3.OperationalError):
        OwnerJournal(path)
    monkeypatch.undo()
    with sqlite3.connect(path) as connection:
        assert connection.execute("select count(*) from sqlite_master").fetchone() == (0,)
        assert connection.execute("pragma user_version").fetchone() == (0,)
    connection.close()
    made = OwnerJournal(path)
    assert made._connection.execute("pragma user_version").fetchone() == (5,)
    assert made.claim(order(), 1.0)
    made.close()


def test_an_account_in_memory_counts_each_release_once():
    account = MemoryRecord(PrivacyAccount(PureDp(1.0))).account
    account.charge("a", "buyer", PureDp(0.75))
    assert (account.cap, account.released("a"), account.released("b")) == (PureDp(1.0), True, False)
    with pytest.raises(ReplayRefused):
        account.charge("a", "buyer", PureDp(0.1))
    with pytest.raises(PrivacyBudgetExhausted):
        account.charge("b", "buyer", PureDp(0.5))
    assert not account.released("b")
    assert account.books.spent == 0.75
    assert account.would_exceed(PureDp(0.15), 2)
    assert not account.would_exceed(PureDp(0.1), 2)
    assert account.affordable() == 0.25
    assert (account.affordable(releases=2, most=0.1), account.affordable(least=0.5)) == (0.1, 0.0)


def test_a_record_is_its_owners_and_a_replaced_file_is_opened_again(tmp_path):
    first = open_record(tmp_path / "her", PureDp(1.0))
    assert open_record(tmp_path / "her", PureDp(1.0)) is first
    with pytest.raises(InvalidInput, match="cap"):
        open_record(tmp_path / "her", PureDp(2.0))
    first.account.charge("a", "buyer", PureDp(0.5))
    close_records()
    for name in ("account", "journal"):
        before = open_record(tmp_path / "her", PureDp(1.0))
        path = tmp_path / f"her.{name}.sqlite"
        copied = path.with_suffix(".copy")
        copied.write_bytes(path.read_bytes())
        copied.replace(path)
        again = open_record(tmp_path / "her", PureDp(1.0))
        assert again is not before
        with pytest.raises(sqlite3.ProgrammingError):
            before.journal.claimed("x")
        assert open_record(tmp_path / "her", PureDp(1.0)) is again


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "room"),
    [
        (1024, 4096, 4096, 341),
        (1024, 1024, None, 85),
        (200, 200, None, 64),
        (10**6, 10**6, None, 10_000),
        (1024, 10**6, 120_000, 10_000),
        (120_000, 10**6, None, 10_000),
        (-1, -1, None, 10_000),
        (1024, -1, 120_000, 10_000),
    ],
)
def test_room_is_half_of_the_files_that_may_be_open(monkeypatch, soft, hard, wanted, room):
    """Six files a record, by hand: 4,096 / 12 = 341; no fewer than 64 and no more than 10,000."""
    import resource

    now = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.__setitem__(slice(None), limits))
    assert record.room.__wrapped__() == room
    assert now == [soft if wanted is None else wanted, hard]

    def refuse(*_):
        raise OSError

    now[:] = [soft, hard]
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert record.room.__wrapped__() == (10_000 if soft == -1 else min(10_000, max(64, soft // 12)))
