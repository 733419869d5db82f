"""The owner's own record: it outlives everything, refuses replays, and never lets more out than the cap."""

import sqlite3
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flmarket.errors import ConfigError, InvalidInput, PrivacyBudgetExhausted
from flmarket.ledger import DurableAccount, ReplayRefused
from flmarket.ledger.owner_account import ChargedRelease
from flmarket.privacy import ApproxDp, GaussianRelease, PrivacyAccount, PureDp, ZCdp


@pytest.fixture
def path(tmp_path):
    return tmp_path / "account.db"


def test_it_outlives_runs_and_buyers(path):
    with DurableAccount.open(path, PureDp(1.0)) as account:
        account.charge("t/0/1", "alice", PureDp(0.4))
        assert account.spent == 0.4
    with DurableAccount.open(path) as account:
        assert account.cap == PureDp(1.0)
        assert account.spent == 0.4
        assert account.remaining == pytest.approx(0.6)
        account.charge("t/0/2", "bob", PureDp(0.6))
        assert account.affordable() == 0.0
        assert [(one.award_id, one.buyer, one.guarantee) for one in account.releases()] == [
            ("t/0/1", "alice", PureDp(0.4)),
            ("t/0/2", "bob", PureDp(0.6)),
        ]
        assert all(isinstance(one, ChargedRelease) and one.time_us > 0 for one in account.releases())


@pytest.mark.parametrize("cap", [ZCdp(1.0), ApproxDp(8.0, 1e-5)])
def test_what_is_taken_back_counts_no_more_and_is_not_released_again(path, cap):
    with DurableAccount.open(path, cap) as account:
        account.charge("t/0/1", "alice", ZCdp(0.2))
        once = account.spent
        account.charge("t/1/1", "alice", ZCdp(0.1))
        with DurableAccount.open(path) as other:  # another process of hers
            assert other.spent > once
            account.take_back("t/1/1")
            account.take_back("t/1/1")
            account.take_back("never/charged")
            assert account.spent == other.spent == once
        with pytest.raises(ReplayRefused):
            account.charge("t/1/1", "alice", ZCdp(0.1))
        assert [one.award_id for one in account.releases()] == ["t/0/1"]
    with DurableAccount.open(path) as account:
        assert account.spent == once


def test_what_others_write_between_two_charges_counts(path):
    """An account adds its own charges to what it has read already; what another connection did meanwhile is read."""
    books = PrivacyAccount(ZCdp(1.0))
    with DurableAccount.open(path, ZCdp(1.0)) as mine, DurableAccount.open(path) as hers:
        for turn, (account, rho) in enumerate([(mine, 0.1), (mine, 0.2), (hers, 0.3), (mine, 0.05), (hers, 0.04)]):
            account.charge(f"t/{turn}/1", "alice", ZCdp(rho))
            books.compose(ZCdp(rho))
            assert mine.spent == hers.spent == books.spent
        hers.take_back("t/1/1")
        books.take_back(ZCdp(0.2))
        mine.charge("t/5/1", "alice", ZCdp(0.2))
        books.compose(ZCdp(0.2))
        assert mine.spent == hers.spent == books.spent
        hers.change_cap(ZCdp(0.7))
        with pytest.raises(PrivacyBudgetExhausted):
            mine.charge("t/6/1", "alice", ZCdp(0.02))
        assert (mine.cap, mine.spent) == (hers.cap, books.spent) == (ZCdp(0.7), hers.spent)


def test_an_account_in_memory_takes_back_what_it_counted_and_nothing_else():
    for cap in (ZCdp(1.0), ApproxDp(8.0, 1e-5)):
        account = PrivacyAccount(cap)
        account.compose(ZCdp(0.2))
        before = account.state_dict()
        account.compose(ZCdp(0.1))
        account.take_back(ZCdp(0.1))
        assert account.state_dict() == before
        with pytest.raises(InvalidInput, match="counted before"):
            account.take_back(ZCdp(0.3))
        assert account.state_dict() == before
    with pytest.raises(InvalidInput):
        PrivacyAccount(PureDp(1.0)).take_back(ZCdp(0.1))


def test_refusals_record_nothing(path):
    with DurableAccount.open(path, PureDp(1.0)) as account:
        account.charge("a", "alice", PureDp(0.7))
        with pytest.raises(PrivacyBudgetExhausted, match="nothing was released"):
            account.charge("b", "alice", PureDp(0.4))
        for buyer, epsilon in (("alice", 0.7), ("alice", 0.1), ("bob", 0.1)):
            with pytest.raises(ReplayRefused, match="already"):
                account.charge("a", buyer, PureDp(epsilon))
        with pytest.raises(InvalidInput):
            account.charge("c", "alice", GaussianRelease(1.0))  # has no pure ε
        for award, buyer in (("", "alice"), ("c", ""), ("x" * 201, "alice"), ("c", None)):
            with pytest.raises(InvalidInput):
                account.charge(award, buyer, PureDp(0.1))
        assert len(list(account.releases())) == 1
        assert account.would_exceed(PureDp(0.31))
        assert not account.would_exceed(PureDp(0.3))
        assert account.released("a")
        assert not account.released("b")


def test_the_cap_is_the_files(path):
    DurableAccount.open(path, PureDp(1.0)).close()
    DurableAccount.open(path, PureDp(1.0)).close()
    with pytest.raises(InvalidInput, match="change_cap"):
        DurableAccount.open(path, PureDp(2.0))
    with DurableAccount.open(path) as account:
        account.charge("a", "alice", PureDp(0.8))
        with pytest.raises(PrivacyBudgetExhausted):
            account.change_cap(PureDp(0.5))
        account.change_cap(ApproxDp(3.0, 1e-6))
        account.charge("b", "alice", GaussianRelease(5.0))
    with DurableAccount.open(path, ApproxDp(3.0, 1e-6)) as account:
        assert len(list(account.releases())) == 2


def test_what_is_no_account(path, tmp_path):
    with pytest.raises(ConfigError, match="a cap to start one"):
        DurableAccount.open(path)
    with pytest.raises(InvalidInput, match="cap"):
        DurableAccount.open(path, 3.0)
    assert not path.exists()
    path.write_text("hello, this is no database at all" * 10)
    with pytest.raises(ConfigError, match="account"):
        DurableAccount.open(path, PureDp(1.0))
    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(ConfigError, match="account"):
        DurableAccount.open(other, PureDp(1.0))
    with pytest.raises(ConfigError, match="opened"):
        DurableAccount.open(tmp_path / "none" / "a.db", PureDp(1.0))


def test_files_of_others_and_of_other_versions_are_left_alone(path):
    """Each of the two numbers in the file's header, alone; and an empty file that says it is somebody else's."""
    DurableAccount.open(path, PureDp(1.0)).close()
    for sql, back in (
        ("application_id = 1", f"application_id = {0x464C4D41}"),
        ("user_version = 2", "user_version = 1"),
    ):
        for change, words in ((sql, "version 1"), (back, "")):
            connection = sqlite3.connect(path)
            connection.execute(f"PRAGMA {change}")
            connection.close()
            if words:
                for cap in (None, PureDp(1.0)):
                    with pytest.raises(ConfigError, match=words):
                        DurableAccount.open(path, cap)
            else:
                DurableAccount.open(path, PureDp(1.0)).close()
    for number, sql in enumerate(("application_id = 7", "user_version = 0")):
        empty = path.with_name(f"{number}.db")
        connection = sqlite3.connect(empty)
        connection.execute(f"PRAGMA {sql}")
        connection.close()
        with pytest.raises(ConfigError, match="version 1"):
            DurableAccount.open(empty, PureDp(1.0) if number == 0 else None)


def test_every_word_is_as_the_account_in_memory_says_it(path):
    with DurableAccount.open(path, ZCdp(1.0)) as account, DurableAccount.open(path) as reader:
        model = PrivacyAccount(ZCdp(1.0))
        for award, event in (("a", ZCdp(0.25)), ("b", PureDp(0.5))):
            account.charge(award, "alice", event)
            model.compose(event)
            for one in (account, reader):
                assert (one.spent, one.remaining, one.cap) == (model.spent, model.remaining, ZCdp(1.0))
                assert one.affordable(ZCdp, releases=3, least=0.1) == model.affordable(3, guarantee=ZCdp, least=0.1)
                assert one.affordable(ZCdp, most=0.2) == 0.2
                assert one.affordable(ZCdp, least=0.9) == 0.0
                assert one.would_exceed(ZCdp(0.3), 3)
                assert not one.would_exceed(ZCdp(0.3), 2)
        account.change_cap(ZCdp(0.5))
        assert reader.remaining == pytest.approx(0.125)
        with pytest.raises(PrivacyBudgetExhausted):
            reader.charge("c", "alice", ZCdp(0.2))
        (mode,) = account._connection.execute("PRAGMA journal_mode").fetchone()
        (level,) = account._connection.execute("PRAGMA synchronous").fetchone()
        assert (mode, level) == ("wal", 2)
    with DurableAccount.open(path, synchronised=False) as account:
        assert account._connection.execute("PRAGMA synchronous").fetchone() == (0,)
    with pytest.raises(sqlite3.ProgrammingError):  # closed
        account.released("a")


def test_records_are_only_added_to(path):
    with DurableAccount.open(path, PureDp(1.0)) as account:
        account.charge("a", "alice", PureDp(0.8))
    connection = sqlite3.connect(path)
    for sql in (
        "DELETE FROM releases",
        "UPDATE releases SET guarantee = '{}'",
        "DELETE FROM caps",
        "UPDATE caps SET cap = ''",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="only added to"):
            connection.execute(sql)
    connection.execute("DROP TRIGGER releases_stay")
    connection.execute("UPDATE releases SET guarantee = '{}'")
    connection.commit()
    connection.close()
    with DurableAccount.open(path) as account, pytest.raises(ConfigError, match="intact records"):
        account.charge("b", "alice", PureDp(0.1))  # fails closed


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.1, 0.2, 0.5, 1.0])), max_size=15))
def test_it_counts_like_the_account_in_memory(tmp_path_factory, charges):
    path = tmp_path_factory.mktemp("account") / "a.db"
    model, seen = PrivacyAccount(ZCdp(0.5)), set()
    for number, epsilon in charges:
        with DurableAccount.open(path, ZCdp(0.5)) as account:
            if number in seen:
                with pytest.raises(ReplayRefused):
                    account.charge(f"a{number}", "b", PureDp(epsilon))
            elif model.would_exceed(PureDp(epsilon)):
                with pytest.raises(PrivacyBudgetExhausted):
                    account.charge(f"a{number}", "b", PureDp(epsilon))
            else:
                model.compose(PureDp(epsilon))
                seen.add(number)
                account.charge(f"a{number}", "b", PureDp(epsilon))
            assert account.spent == model.spent
            assert account.affordable() == model.affordable()
            assert account.affordable(PureDp, releases=3) == model.affordable(3)


def test_many_writers_never_pass_the_cap(path):
    """Threads over one account and over several handles; of ten that would fit one by one, exactly ten get through."""
    handles = [DurableAccount.open(path, PureDp(1.0)) for _ in range(2)]
    granted, refused = [], []

    def work(i):
        for k in range(5):
            try:
                handles[i % 2].charge(f"a{i}-{k}", "b", PureDp(0.1))
                granted.append(i)
            except PrivacyBudgetExhausted:
                refused.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(granted), len(refused)) == (10, 10)
    assert handles[0].spent == handles[1].spent == pytest.approx(1.0)
    for handle in handles:
        handle.close()


def test_what_was_charged_survives_kill_9(path):
    """A release leaves only after `charge` returned; then it is on record, however the process ends."""
    script = (
        "import os, signal, sys\n"
        "from flmarket.ledger import DurableAccount\n"
        "from flmarket.privacy import PureDp\n"
        "account = DurableAccount.open(sys.argv[1], PureDp(1.0))\n"
        "account.charge(sys.argv[2], 'b', PureDp(0.4))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for number in range(2):
        done = subprocess.run([sys.executable, "-c", script, str(path), f"a{number}"], check=False)
        assert done.returncode == -9
    with DurableAccount.open(path) as account:
        assert account.spent == pytest.approx(0.8)
        with pytest.raises(ReplayRefused):
            account.charge("a1", "b", PureDp(0.1))


def test_a_crash_inside_a_charge_records_nothing(path, monkeypatch):
    with DurableAccount.open(path, PureDp(1.0)) as account:
        real = account._connection

        class Dying:
            def execute(self, sql, *rest):
                if sql == "COMMIT":
                    raise KeyboardInterrupt
                return real.execute(sql, *rest)

            def __getattr__(self, name):
                return getattr(real, name)

        monkeypatch.setattr(account, "_connection", Dying())
        with pytest.raises(KeyboardInterrupt):
            account.charge("a", "b", PureDp(0.4))
        monkeypatch.undo()
        assert account.spent == 0.0
        account.charge("a", "b", PureDp(0.4))
        assert account.spent == 0.4
