"""Writers on SQLite who wait for one another share a commit: answered after it, each undone alone, all or none."""

import sqlite3
import threading
import time
from contextlib import suppress

import pytest
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, OperationalError

from flmarket.broker.database import fenced, is_transient
from flmarket.broker.tables import Fact

WRITERS = 6


@pytest.fixture
def crowd(small):
    """crowd(part) lets several write in one transaction: the first goes on once the others are waiting. Returns what
    each raised, and how many transactions it took; part(session, k) is writer k's."""

    def run(part, fence=lambda k: None):
        raised, commits = {}, []
        inside = threading.Event()
        event.listen(small.database.engine, "commit", lambda connection: commits.append(connection))

        def write(k):
            try:
                with fenced(fence(k)), small.database.write() as session:
                    if k == 0:
                        inside.set()
                        while small.database._together._waiting < WRITERS - 1:
                            time.sleep(0.001)
                    session.add(Fact(name=f"fact {k}", value="x"))
                    session.flush()
                    part(session, k)
                assert f"fact {k}" in on_disk(small), "told before it was on the disk"
            except Exception as error:
                raised[k] = error

        threads = [threading.Thread(target=write, args=(k,)) for k in range(WRITERS)]
        threads[0].start()
        assert inside.wait(10)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(10)
        return raised, len(commits)

    return run


def on_disk(broker):
    """What a connection of somebody else sees."""
    with sqlite3.connect(broker.database.engine.url.database) as other:
        return {name for (name,) in other.execute("select name from broker_facts where name like 'fact %'")}


def facts(*numbers):
    return {f"fact {k}" for k in numbers}


def test_they_share_a_commit_and_none_returns_before_it(small, crowd):
    def part(session, k):
        assert on_disk(small) == set(), "nothing is there before all is"

    assert crowd(part) == ({}, 1)
    assert on_disk(small) == facts(*range(WRITERS))


def test_one_who_fails_is_undone_alone(small, crowd):
    def part(session, k):
        if k in (0, 3):
            raise ValueError(k)

    raised, commits = crowd(part)
    assert (sorted(raised), commits) == ([0, 3], 1)
    assert on_disk(small) == facts(1, 2, 4, 5)


def test_one_whose_row_is_refused_is_undone_alone(small, crowd):
    def part(session, k):
        if k in (0, 3):
            session.add(Fact(name="fact 9", value=f"{k}"))
            session.add(Fact(name="fact 9", value="again"))
            session.flush()

    raised, commits = crowd(part)
    assert ({k: type(error) for k, error in raised.items()}, commits) == ({0: IntegrityError, 3: IntegrityError}, 1)
    assert on_disk(small) == facts(1, 2, 4, 5)


@pytest.mark.parametrize("broken", ["do_commit", "do_rollback_to_savepoint", "do_release_savepoint", "given up"])
def test_when_the_disk_fails_all_of_them_have_failed(small, crowd, monkeypatch, broken):
    def fail(*_):
        raise sqlite3.OperationalError("disk I/O error")

    def part(session, k):
        if k == WRITERS - 1:
            if broken == "given up":  # as SQLite itself does when the disk is full
                session.connection().connection.dbapi_connection.rollback()
                return
            monkeypatch.setattr(small.database.engine.dialect, broken, fail)
            if broken == "do_rollback_to_savepoint":
                raise ValueError(k)

    done = []
    raised, commits = crowd(lambda session, k: (done.append(k), part(session, len(done) - 1)))
    monkeypatch.undo()
    assert (sorted(raised), commits if broken != "do_commit" else 0) == (list(range(WRITERS)), 0)
    assert sum(is_transient(error) for error in raised.values()) >= WRITERS - 1
    assert on_disk(small) == set()
    with small.database.write() as session:
        session.add(Fact(name="fact 9", value="x"))
    assert on_disk(small) == facts(9)


def test_each_ones_right_to_write_is_checked(small, crowd):
    def fence(k):
        def check(connection):
            raise PermissionError(k)

        return check if k == 2 else None

    raised, commits = crowd(lambda session, k: None, fence)
    assert ([type(one) for one in raised.values()], list(raised), commits) == ([PermissionError], [2], 1)
    assert on_disk(small) == facts(0, 1, 3, 4, 5)


def test_a_crowd_that_does_not_wait_for_one_another(small):
    """Whoever comes when, everything is there in the end, and those who failed left nothing."""

    def write(k):
        for i in range(20):
            with suppress(ValueError), small.database.write() as session:
                session.add(Fact(name=f"fact {k}-{i}", value="x"))
                if (k + i) % 3 == 0:
                    raise ValueError

    threads = [threading.Thread(target=write, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert on_disk(small) == {f"fact {k}-{i}" for k in range(8) for i in range(20) if (k + i) % 3}
    assert small.database._together._shared is None
    with pytest.raises(OperationalError), small.database.write() as session:
        session.connection().exec_driver_sql("select * from nothing")
