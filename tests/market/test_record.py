"""What stays open of owners' records, and what a record promises that is not synchronised."""

import sqlite3

import pytest

from flmarket.market import record
from flmarket.market.record import close_records, open_record
from flmarket.privacy import PureDp


@pytest.fixture(autouse=True)
def closed_records():
    yield
    close_records()


def test_hundreds_of_records_stay_open(tmp_path):
    opened = [open_record(tmp_path / f"owner-{i}", PureDp(1.0), synchronised=False) for i in range(150)]
    assert record.room() >= 150  # the usual limit of 1,024 files is raised where the system lets it
    assert [open_record(tmp_path / f"owner-{i}", PureDp(1.0)) for i in range(150)] == opened


def test_room_is_made_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "room", lambda: 2)
    first = open_record(tmp_path / "a", PureDp(1.0))
    first.account.charge("t/0/0", "buyer", PureDp(0.25))
    for name in ("b", "c"):
        open_record(tmp_path / name, PureDp(1.0))
    with pytest.raises(sqlite3.ProgrammingError):  # closed
        first.account.would_exceed(PureDp(0.1))
    assert open_record(tmp_path / "a", PureDp(1.0)).account.spent == 0.25


def test_real_owners_synchronise_and_simulated_ones_do_not(tmp_path):
    def level(found):
        return found.account._connection.execute("pragma synchronous").fetchone()[0]

    assert level(open_record(tmp_path / "real", PureDp(1.0))) == 2
    assert level(open_record(tmp_path / "simulated", PureDp(1.0), synchronised=False)) == 0
