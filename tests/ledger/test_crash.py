"""Crashes between any two statements, or after a commit whose answer is lost: nothing half done, nothing done twice.

A state machine drives a durable ledger and, as its model, one in memory with the same calls. A call may be
made to die at any statement of its transaction, at its commit, or right after; the connection is then dropped, the
database opened anew, and the caller repeats her call, as callers do.
"""

import contextlib
import itertools
from pathlib import Path

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlalchemy import event

from flmarket.errors import FlmarketError
from flmarket.ledger import ESCROW, Award, AwardState, LedgerUnavailable, MemoryLedger, Release, Resolution, SqlLedger
from flmarket.privacy import PureDp, ZCdp


class Crash(BaseException):
    """The process dies here. Not an Exception, so that no handler brings it back."""


class Doomed:
    """Makes a ledger's engine die at its n-th statement or commit; `after` lets the commit through first."""

    def __init__(self, book, steps, after=False):
        self.book, self.left, self.after = book, steps, after
        event.listen(book.engine, "before_cursor_execute", self.statement)
        event.listen(book.engine, "commit", self.commit)

    def statement(self, *_):
        self.step()

    def commit(self, connection):
        if self.after:
            connection.connection.dbapi_connection.commit()
            raise Crash
        self.step()

    def step(self):
        if self.left == 0:
            raise Crash
        self.left -= 1

    def survive(self):
        """It got through after all."""
        event.remove(self.book.engine, "before_cursor_execute", self.statement)
        event.remove(self.book.engine, "commit", self.commit)


def outcome(call):
    """What a call returns, or the class of its refusal."""
    try:
        return call()
    except FlmarketError as error:
        return type(error)


IDS = st.integers(0, 5)
# where a call dies: nowhere, at one of its first statements or its commit, or once it is committed
DOOMS = st.none() | st.tuples(st.integers(0, 8), st.just(False)) | st.just((1000, True))
GUARANTEES = st.sampled_from([PureDp(0.25), PureDp(0.5), PureDp(1.0)])


class Crashing(RuleBasedStateMachine):
    """One durable ledger and its model; what differs after a crash and a retry is a bug."""

    crashes = 0

    def __init__(self):
        super().__init__()
        self.url = self.make_url()
        self.model = MemoryLedger(clock=lambda: 1)
        self.book = SqlLedger(self.url, clock=lambda: 1)

    def teardown(self):
        self.book.verify()
        self.book.close()

    def both(self, doom, call):
        """Do it in both; after a crash open again and repeat."""
        expected = outcome(lambda: call(self.model))
        doomed = None if doom is None else Doomed(self.book, *doom)
        try:
            found = outcome(lambda: call(self.book))
            if doomed:
                doomed.survive()
        except Crash:
            Crashing.crashes += 1
            self.book.engine.dispose(close=True)
            self.book = SqlLedger(self.url, clock=lambda: 1)
            self.book.verify()  # whole or not at all, before anybody repairs anything
            found = outcome(lambda: call(self.book))
        assert found == expected

    @rule(doom=DOOMS, number=IDS, amount=st.integers(0, 1000))
    def deposit(self, doom, number, amount):
        self.both(doom, lambda book: book.deposit(f"d{number}", "buyer", amount))

    @rule(doom=DOOMS, number=IDS, account=st.sampled_from(["buyer", "owner-0", "owner-1"]), amount=st.integers(0, 300))
    def withdraw(self, doom, number, account, amount):
        self.both(doom, lambda book: book.withdraw(f"w{number}", account, amount))

    @rule(doom=DOOMS, number=IDS, amount=st.integers(0, 50))
    def fee(self, doom, number, amount):
        self.both(doom, lambda book: book.charge_fee(f"f{number}", "buyer", amount))

    @rule(doom=DOOMS, numbers=st.lists(IDS, min_size=1, max_size=4), price=st.integers(0, 300))
    def hold(self, doom, numbers, price):
        awards = [Award(f"a{n}", 0, "buyer", f"owner-{n % 3}", 1.0, price) for n in numbers]
        self.both(doom, lambda book: book.hold_many(awards))

    @rule(doom=DOOMS, number=IDS, guarantee=GUARANTEES)
    def release(self, doom, number, guarantee):
        self.both(doom, lambda book: book.release(Release(f"a{number}", "m", guarantee)))

    @rule(doom=DOOMS, number=st.integers(0, 2), cap=st.sampled_from([PureDp(1.0), PureDp(1.5), ZCdp(0.5)]))
    def register_cap(self, doom, number, cap):
        self.both(doom, lambda book: book.register_cap(f"owner-{number}", cap))

    @rule(
        doom=DOOMS,
        numbers=st.lists(IDS, min_size=1, max_size=4),
        state=st.sampled_from(list(AwardState)),
        guarantee=st.none() | GUARANTEES,
    )
    def resolve(self, doom, numbers, state, guarantee):
        batch = [
            Resolution(f"a{n}", state, "x", guarantee and Release(f"a{n}", "m", guarantee))
            for n in dict.fromkeys(numbers)
        ]
        self.both(doom, lambda book: book.resolve_many(batch))

    @invariant()
    def books_are_the_same(self):
        assert self.book.head() == self.model.head()
        assert dict(self.book.balances()) == dict(self.model.balances())
        assert list(self.book.awards()) == list(self.model.awards())

    @invariant()
    def money_is_conserved_and_paid_once(self):
        balances = self.book.balances()
        awards = list(self.book.awards())
        assert sum(balances.values()) == 0
        assert balances[ESCROW] == sum(a.price_micros for a in awards if a.state is AwardState.PENDING)
        for owner in ("owner-0", "owner-1", "owner-2"):
            paid = sum(a.price_micros for a in awards if a.owner == owner and a.state is AwardState.POSTED)
            taken = sum(t.amount_micros for t in self.book.transfers() if t.debit == owner)
            assert balances.get(owner, 0) == paid - taken

    @invariant()
    def caps_hold(self):
        for owner in ("owner-0", "owner-1", "owner-2"):
            given = [release.guarantee.epsilon for release in self.book.releases(owner)]
            cap = self.book.cap(owner)
            if isinstance(cap, PureDp):
                assert sum(given) <= cap.epsilon + 1e-9
            elif isinstance(cap, ZCdp):
                assert sum(epsilon**2 / 2 for epsilon in given) <= cap.rho + 1e-9


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_crashes_at_random(kind, tmp_path, request):
    from hypothesis.stateful import run_state_machine_as_test

    numbers = itertools.count()
    if kind == "sqlite":
        Crashing.make_url = lambda self: f"sqlite:///{tmp_path}/{next(numbers)}.db"
    else:
        make = request.getfixturevalue("postgres")
        Crashing.make_url = lambda self: make()
    examples = settings(max_examples=8, stateful_step_count=20, deadline=None, derandomize=True)
    Crashing.crashes = 0
    run_state_machine_as_test(Crashing, settings=examples)
    assert Crashing.crashes >= 20


def settle(book):
    """A round: money in, a cap, awards, a mixed settlement."""
    book.deposit("d", "buyer", 1000)
    book.register_cap("owner-1", PureDp(2.0))
    book.hold_many([Award(f"a{i}", 0, "buyer", f"owner-{i}", 1.0, 100) for i in range(4)])
    book.resolve_many(
        [
            Resolution("a0", AwardState.POSTED, release=Release("a0", "m", PureDp(1.0))),
            Resolution("a1", AwardState.POSTED, release=Release("a1", "m", PureDp(1.0))),
            Resolution("a2", AwardState.VOIDED, "bad update"),
            Resolution("a3", AwardState.EXPIRED),
        ]
    )


def test_a_crash_at_every_single_step_of_a_round(url, postgres):
    """Exhaustive: die at step 0, 1, 2, … until a run gets through; each time resume by repeating the round."""
    model = MemoryLedger(clock=lambda: 1)
    settle(model)
    for step in itertools.count():
        if url.startswith("sqlite"):
            for file in Path(url.removeprefix("sqlite:///")).parent.iterdir():
                file.unlink()
        else:
            postgres()
        book = SqlLedger(url, clock=lambda: 1)
        doomed = Doomed(book, step)
        try:
            settle(book)
            doomed.survive()
            died = False
        except Crash:
            died = True
            book.engine.dispose()
            book = SqlLedger(url, clock=lambda: 1)
            book.verify()
            assert book.balance("owner-0") in (0, 100)
            settle(book)
        assert book.verify() == model.head()
        assert dict(book.balances()) == dict(model.balances())
        book.close()
        if not died:
            break
    assert step > 20


def test_an_answer_that_was_lost(url):
    """The commit happened, the caller does not know: repeating it changes nothing."""
    model = MemoryLedger(clock=lambda: 1)
    settle(model)
    calls = [
        lambda book: book.deposit("d", "buyer", 1000),
        lambda book: book.register_cap("owner-1", PureDp(2.0)),
        lambda book: book.hold_many([Award(f"a{i}", 0, "buyer", f"owner-{i}", 1.0, 100) for i in range(4)]),
    ]
    for call in calls:
        book = SqlLedger(url, clock=lambda: 1)
        Doomed(book, 1000, after=True)
        with contextlib.suppress(Crash):
            call(book)
        book.engine.dispose()
        with SqlLedger(url, clock=lambda: 1) as again:
            size = again.head().size
            call(again)
            assert again.head().size == size
    with SqlLedger(url, clock=lambda: 1) as book:
        settle(book)
        assert book.verify() == model.head()


def test_a_killed_connection_is_an_error_once_and_then_forgotten(postgres):
    """The server ends the ledger's connection at each statement of a settlement; the repeated call settles it."""
    url = postgres()
    model = MemoryLedger(clock=lambda: 1)
    settle(model)
    with SqlLedger(url, clock=lambda: 1) as book:
        failures = 0
        for step in itertools.count():
            left = [step]

            def cut(connection, cursor, statement, *rest, left=left):
                if left[0] == 0:
                    with psycopg.connect(cursor.connection.info.dsn, autocommit=True) as other:
                        other.execute("SELECT pg_terminate_backend(%s, 5000)", [cursor.connection.info.backend_pid])
                left[0] -= 1

            event.listen(book.engine, "before_cursor_execute", cut)
            try:
                settle(book)
            except LedgerUnavailable:
                failures += 1
            finally:
                event.remove(book.engine, "before_cursor_execute", cut)
            book.verify()
            if left[0] >= 0:
                break
        assert failures > 10
        settle(book)
        assert book.verify() == model.head()


def test_killed_processes_leave_whole_books(url, tmp_path):
    """Real processes settling one award a transaction, killed by -9 at random moments."""
    import os
    import signal
    import subprocess
    import sys
    import time

    script = tmp_path / "work.py"
    script.write_text(
        "import sys\n"
        "from flmarket.ledger import Award, SqlLedger\n"
        "book = SqlLedger(sys.argv[1])\n"
        "print('up', flush=True)\n"
        "for i in range(10**6):\n"
        "    book.hold(Award(f'a{i}', i, 'buyer', 'owner-1', 1.0, 1))\n"
        "    book.post(f'a{i}')\n"
        "    print(i, flush=True)\n"
    )
    with SqlLedger(url) as book:
        book.deposit("d", "buyer", 10**6)
    for run in range(2):
        worker = subprocess.Popen([sys.executable, script, url], stdout=subprocess.PIPE, text=True)
        told = worker.stdout.readline()
        assert told == "up\n"
        for _ in range(3 + run):
            told = worker.stdout.readline()
        time.sleep(0.003 * run)
        os.kill(worker.pid, signal.SIGKILL)
        rest = worker.communicate()[0].split()
        acknowledged = int(rest[-1] if rest else told)
        with SqlLedger(url) as book:
            book.verify()
            awards = list(book.awards())
            paid = [award for award in awards if award.state is AwardState.POSTED]
            assert len(paid) >= acknowledged + 1  # what was acknowledged is there
            assert len(paid) >= len(awards) - 1  # at most the one under way is open
            assert book.balance("owner-1") == len(paid)
