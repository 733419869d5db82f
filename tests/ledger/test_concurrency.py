"""Several writers at once: threads of one process, and processes."""

import subprocess
import sys
import threading

from flmarket.errors import FlmarketError
from flmarket.ledger import ESCROW, Award, AwardState, Release, Resolution, SqlLedger, sql, store
from flmarket.privacy import PureDp


def together(count, work):
    """Run `work(i)` in so many threads, started at one moment; returns what they returned or raised."""
    start, results = threading.Barrier(count), [None] * count

    def run(i):
        start.wait()
        try:
            results[i] = work(i)
        except FlmarketError as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_same_award_settled_by_many_is_paid_once(url):
    with SqlLedger(url) as book:
        book.deposit("d", "buyer", 100)
        book.hold(Award("a", 0, "buyer", "owner-1", 1.0, 40))
        done = together(6, lambda i: book.post("a"))
        assert all(award.state is AwardState.POSTED for award in done)
        assert (book.balance("owner-1"), book.balance(ESCROW)) == (40, 0)
        book.verify()


def test_post_and_void_race_and_one_wins(url):
    with SqlLedger(url) as book:
        book.deposit("d", "buyer", 1000)
        for number in range(5):
            name = f"a{number}"
            book.hold(Award(name, 0, "buyer", "owner-1", 1.0, 40))
            done = together(4, lambda i, name=name: book.post(name) if i % 2 else book.void(name, "late"))
            states = {one.state for one in done if isinstance(one, Award)}
            assert len(states) == 1
            assert sum(isinstance(one, FlmarketError) for one in done) == 2
        paid = sum(award.state is AwardState.POSTED for award in book.awards())
        assert book.balance("owner-1") == 40 * paid
        assert book.balance(ESCROW) == 0
        book.verify()


def test_the_last_coin_and_the_last_epsilon_go_once(url):
    with SqlLedger(url) as book, SqlLedger(url) as other:
        book.deposit("d", "buyer", 40)
        ledgers = (book, other)
        done = together(4, lambda i: ledgers[i % 2].hold(Award(f"a{i}", 0, "buyer", "owner-1", 1.0, 40)))
        assert sum(isinstance(one, Award) for one in done) == 1
        book.deposit("d2", "buyer", 40)
        book.register_cap("owner-2", PureDp(1.0))
        book.hold_many([Award(f"b{i}", 0, "buyer", "owner-2", 1.0, 10) for i in range(4)])

        def deliver(i):
            given = Release(f"b{i}", "m", PureDp(1.0))
            return ledgers[i % 2].resolve_many([Resolution(f"b{i}", AwardState.POSTED, release=given)])

        done = together(4, deliver)
        assert sum(isinstance(one, tuple) for one in done) == 1
        assert book.privacy_spent("owner-2") == other.privacy_spent("owner-2") == 1.0
        assert book.balance("owner-2") == 10
        book.verify()


def test_two_processes_settle_the_same_round(url, tmp_path):
    script = tmp_path / "settle.py"
    script.write_text(
        "import sys\n"
        "from flmarket.ledger import AwardState, Release, Resolution, SqlLedger\n"
        "from flmarket.privacy import PureDp\n"
        "book = SqlLedger(sys.argv[1])\n"
        "input()\n"
        "for i in range(25):\n"
        "    given = Release(f'a{i}', 'm', PureDp(1.0))\n"
        "    book.resolve_many([Resolution(f'a{i}', AwardState.POSTED, release=given)])\n"
    )
    with SqlLedger(url) as book:
        book.deposit("d", "buyer", 1000)
        book.hold_many([Award(f"a{i}", 0, "buyer", f"owner-{i}", 1.0, 10) for i in range(25)])
        workers = [subprocess.Popen([sys.executable, script, url], stdin=subprocess.PIPE, text=True) for _ in range(2)]
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        for worker in workers:
            worker.communicate()
            assert worker.returncode == 0
        book.verify()
        assert [book.balance(f"owner-{i}") for i in range(25)] == [10] * 25
        assert len(list(book.releases())) == 25
        assert book.balance("buyer") == 750


def test_two_processes_may_open_an_empty_database(tmp_path, postgres):
    for url in (f"sqlite:///{tmp_path}/new.db", postgres(tables=False)):

        def open_it(i, url=url):
            with SqlLedger(url) as book:
                book.deposit(f"d{i}", "buyer", 1)
                return True

        assert together(4, open_it) == [True] * 4
        with SqlLedger(url) as book:
            assert book.balance("buyer") == 4
            book.verify()


def test_an_older_look_at_the_books_counts_no_release_twice(tmp_path):
    """A reader that began before a release was written, and reads the owner's account after."""
    with SqlLedger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.deposit("d", "buyer", 10)
        ledger.register_cap("her", PureDp(10.0))
        ledger.hold(Award("a", 0, "buyer", "her", 1.0, 10))
        with store.reading(ledger.engine) as older:
            before = sql.size(older)
            ledger.resolve_many([Resolution("a", AwardState.POSTED, release=Release("a", "laplace-l1", PureDp(1.0)))])
            ledger._accounts(older, {"her"})
            assert sql.size(older) == before
        assert ledger.privacy_spent("her") == 1.0
