"""Histories of real services that are killed, paused and cut off (`histories`), and the checker that judges them, on
histories in which somebody lied. Long runs: `make histories`."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from histories import checker
from histories.checker import Add, Final, Read
from histories.runs import books
from histories.services import connect
from hypothesis import given, settings
from hypothesis import strategies as st

_SUPPORT = Path(__file__).parents[1] / "support"


# --- the checker, on histories by hand --------------------------------------------------------------------------------


class History:
    """What happened at whole seconds, told in a line each."""

    def __init__(self):
        self.events, self._numbers = [], itertools.count()

    def add(self, what, start, end, kind="ok", *, value=None, who="A", attempts=None, **about):
        op = next(self._numbers)
        for attempt, (began, over, how) in enumerate(attempts or [(start, end, kind)]):
            same = {"op": op, "attempt": attempt}
            self.events.append({"type": "invoke", "at": began, "who": who, "what": what, "about": about, **same})
            if how is not None:
                self.events.append({"type": how, "at": over, "value": value, **same})

    def deposit(self, start, end, amount, kind="ok", *, balance=None, **more):
        value = None if balance is None else {"balance_micros": balance}
        self.add(
            "deposit", start, end, kind, value=value or {"balance_micros": amount}, party="B", amount=amount, **more
        )

    def read(self, start, end, balance):
        self.add("account", start, end, value={"balance_micros": balance}, party="B")

    def task(self, start, end, state, spent=0):
        value = {"id": "t", "state": state, "rounds_done": 0, "spent_micros": spent}
        self.add("task", start, end, value=value, party="B")

    def wrong(self, *entries, **tables):
        final = Final(entries=[(n, *entry) for n, entry in enumerate(entries)], **tables)
        return checker.check(self.events, final)


def paid_in(amount):
    return ("deposit", f"d{amount}", "bank", "B", amount)


def rules(found):
    return sorted({one.partition(":")[0] for one in found})


def test_an_honest_history_is_accepted():
    told = History()
    told.deposit(0, 2, 5, balance=5)
    told.deposit(1, 4, 7, balance=12)
    told.read(1, 3, 5)  # before the second, which was under way
    told.read(5, 6, 12)
    told.deposit(5, 9, 100, "unknown")
    told.read(10, 11, 112)  # it came later
    told.read(12, 13, 112)
    told.deposit(13, 14, 50, "unknown")  # never
    told.deposit(13, 14, 60, "fail")
    told.deposit(0, 0, 3, balance=115, attempts=[(13, 14, "unknown"), (15, 16, "fail"), (17, 18, "ok")])
    told.read(14, 15, 115)  # of the first attempt
    assert told.wrong(paid_in(5), paid_in(7), paid_in(100), paid_in(3)) == []


def test_a_double_deposit_is_found():
    told = History()
    told.deposit(0, 1, 5)
    told.read(2, 3, 10)
    assert rules(told.wrong(paid_in(5), paid_in(5))) == ["balance", "once"]


def test_a_retried_key_has_one_effect():
    told = History()
    told.deposit(0, 0, 5, attempts=[(0, 1, "unknown"), (2, 3, "ok")])
    assert rules(told.wrong(paid_in(5), paid_in(5))) == ["once"]
    assert told.wrong(paid_in(5)) == []


def test_a_lost_deposit_is_found():
    told = History()
    told.deposit(0, 1, 5)
    told.read(2, 3, 0)
    assert rules(told.wrong()) == ["balance", "once"]


def test_a_deposit_that_was_refused_or_that_nobody_made_is_found():
    told = History()
    told.deposit(0, 1, 5, "fail")
    assert rules(told.wrong(paid_in(5))) == ["once"]
    assert rules(History().wrong(paid_in(5))) == ["once"]


def test_a_stale_read_is_found():
    told = History()
    told.deposit(0, 1, 5)
    told.deposit(2, 3, 7, balance=12)
    told.read(4, 5, 5)
    assert rules(told.wrong(paid_in(5), paid_in(7))) == ["balance"]


def test_reads_that_go_back_are_found():
    """Each alone could be, while the deposit is under way; both in this order cannot."""
    told = History()
    told.deposit(0, 9, 5)
    told.read(1, 2, 5)
    told.read(3, 4, 0)
    assert rules(told.wrong(paid_in(5))) == ["balance"]


def test_a_read_of_a_future_write_is_found():
    told = History()
    told.read(0, 1, 5)
    told.deposit(2, 3, 5)
    assert rules(told.wrong(paid_in(5))) == ["balance"]


def test_a_log_in_another_order_than_time_is_found():
    told = History()
    told.deposit(0, 1, 5)
    told.deposit(2, 3, 7, balance=12)
    assert rules(told.wrong(paid_in(7), paid_in(5))) == ["order"]


def paid(*rounds, price=4):
    return [("posted", f"t/{n}/0", "escrow", "O", price) for n in rounds]


def statement(told, start, end, *rounds):
    releases = [{"award_id": f"t/{n}/0", "state": "posted"} for n in rounds]
    told.add("statement", start, end, value={"releases": releases, "earned_micros": 4 * len(rounds)}, party="O")


def money(told, start, end, balance):
    told.add("account", start, end, value={"balance_micros": balance}, party="O")


def bidding():
    told = History()
    told.events += [
        {"op": -1, "attempt": 0, "type": "invoke", "at": 0, "who": "O", "what": "bid",
         "about": {"party": "O", "task": "t", "value": 0.5}},
        {"op": -1, "attempt": 0, "type": "ok", "at": 1, "value": {}},
    ]  # fmt: skip
    return told


def test_payments_of_the_service_have_a_window():
    told = bidding()
    money(told, 2, 3, 0)
    money(told, 4, 5, 4)
    statement(told, 6, 7, 0, 1)
    money(told, 8, 9, 8)
    assert told.wrong(*paid(0, 1)) == []


def test_a_payment_that_was_told_of_and_did_not_arrive_is_found():
    told = bidding()
    statement(told, 2, 3, 0)
    money(told, 4, 5, 0)
    assert rules(told.wrong(*paid(0))) == ["balance"]


def test_a_payment_twice_is_found():
    told = bidding()
    money(told, 2, 3, 8)
    assert rules(told.wrong(*paid(0, 0))) == ["balance", "once"]
    assert rules(told.wrong(*paid(0))) == ["balance"]


def test_a_refund_is_there_once_the_task_is_said_to_have_ended():
    def told(after):
        made = History()
        made.deposit(0, 1, 50)
        posted = {"id": "t", "state": "queued", "rounds_done": 0, "spent_micros": 0}
        made.add("post", 2, 3, value=posted, party="B", name="x", amount=-20)
        made.read(4, 5, after[0])
        made.task(6, 7, "finished", 5)
        made.read(8, 9, after[1])
        entries = [paid_in(50), ("hold", "t/escrow", "B", "escrow", 20), ("posted", "t/refund", "escrow", "B", 15)]
        return made.wrong(*entries, tasks=[("t", "B", "x", "finished")])

    assert told([30, 45]) == told([45, 45]) == []
    assert rules(told([30, 30])) == rules(told([50, 45])) == ["balance"]


def test_a_task_that_begins_again_is_found():
    told = History()
    told.task(0, 1, "finished", 5)
    told.task(2, 3, "running", 5)
    assert rules(told.wrong()) == ["growing"]


@pytest.mark.parametrize(
    ("reads", "found"),
    [
        ([(0.2, 4, 5)], []),
        ([(0.1, 4, 5)], ["register"]),  # stale
        ([(0.3, 4, 5)], ["register"]),  # refused
        ([(0.1, 2, 3), (0.2, 2, 3)], []),  # while both were under way
        ([(0.2, 2, 2.5), (0.1, 2.6, 3)], ["register"]),  # and back
        ([(0.4, 1, 2)], ["register"]),  # before it was written
        ([(0.4, 9, 10), (0.2, 11, 12)], ["register"]),  # an unknown one came late, and the older one came back
    ],
)
def test_registers(reads, found):
    told = History()
    for value, start, end, kind in (
        (0.1, 0, 1, "ok"),
        (0.2, 1.5, 3, "ok"),
        (0.3, 1, 2, "fail"),
        (0.4, 6, 7, "unknown"),
    ):
        told.events += [
            {"op": value, "attempt": 0, "type": "invoke", "at": start, "who": "O", "what": "cap",
             "about": {"party": "O", "value": value}},
            {"op": value, "attempt": 0, "type": kind, "at": end, "value": {}},
        ]  # fmt: skip
    for value, start, end in reads:
        told.add("read cap", start, end, value={"value": value}, party="O")
    assert rules(told.wrong()) == found


# --- the search, against trying all orders ----------------------------------------------------------------------------


def _all_orders(adds, reads):
    """Wing and Gong by brute force."""
    ops = [*adds, *reads]

    def extend(left, now, done):
        if not any(one.end < math.inf for one in left):
            return True
        first = min(one.end for one in left)
        for one in left:
            if one.start > first or getattr(one, "after", None) not in (None, *done):
                continue
            if isinstance(one, Read) and (one.value != now or one.needs not in (None, *done)):
                continue
            if extend([other for other in left if other is not one], now + getattr(one, "amount", 0), {*done, one.id}):
                return True
        return False

    return extend(ops, 0, frozenset())


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_the_search_agrees_with_trying_all_orders(seed):
    rng = random.Random(seed)
    adds, reads = [], []
    for n in range(rng.randint(1, 4)):
        start = rng.uniform(0, 10)
        end = math.inf if rng.random() < 0.3 else start + rng.uniform(0, 6)
        after = f"a{n - 1}" if n and rng.random() < 0.3 else None
        if after is not None:
            start = adds[-1].start
            end = max(end, start)
        adds.append(Add(f"a{n}", rng.choice((1, 2, 3, -1)), start, end, after))
    for n in range(rng.randint(1, 3)):
        start = rng.uniform(0, 12)
        needs = rng.choice(adds).id if rng.random() < 0.2 else None
        reads.append(Read(f"r{n}", rng.randint(-1, 6), start, start + rng.uniform(0, 5), needs))
    assert (checker.linearizable(adds, reads) is None) == _all_orders(adds, reads)


# --- the books --------------------------------------------------------------------------------------------------------


def test_the_verdict_finds_what_is_planted(tmp_path):
    """Otherwise a clean verdict would mean nothing: the same checks on books that somebody changed."""
    from flmarket.broker.core import Broker, Party
    from flmarket.broker.office import parties, tasks
    from flmarket.broker.requests import TaskRequest
    from flmarket.broker.settings import Settings
    from flmarket.broker.work.worker import Worker

    at = f"sqlite:///{tmp_path}/b.db"
    broker = Broker.open(Settings(database_url=at, run_worker=False))
    made = parties.create_party(broker, None, role="buyer", name="B")
    parties.deposit(broker, None, made.id, 10**13)
    buyer = Party(made.id, made.role, made.name)
    order = {"task": {"name": "x", "rounds": 2, "bidders_per_round": 8, "budget_per_round": 100}}
    order["data"] = {"name": "breast-cancer", "owners": 12, "minimum": 5}
    tasks.post_task(broker, buyer, TaskRequest.model_validate(order))
    Worker(broker).run_until_idle()
    broker.close()
    assert books(at) == []
    lies = (
        "UPDATE broker_tasks SET spent_micros = spent_micros + 1",
        "UPDATE broker_tasks SET state = 'running'",
        "UPDATE broker_rounds SET closed_at = NULL",
        "UPDATE broker_releases SET state = 'voided'",
        "DELETE FROM broker_releases",
        "UPDATE ledger_accounts SET balance = balance + 1 WHERE name = 'escrow'",
        "DELETE FROM ledger_entries WHERE kind = 'posted' AND ref LIKE '%/0/%'",
        "UPDATE ledger_entries SET detail = replace(detail, '\"epsilon\":', '\"epsilon\":9') WHERE kind = 'release'",
    )
    clean = (tmp_path / "b.db").read_bytes()
    for lie in lies:
        (tmp_path / "b.db").write_bytes(clean)
        with closing(connect(at)) as connection:
            for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                connection.execute(f"DROP TRIGGER {trigger}")
            connection.execute(lie)
            connection.commit()
        assert books(at) != [], lie


# --- real services ----------------------------------------------------------------------------------------------------


def recorded(url, folder, *options):
    command = [sys.executable, "-m", "histories", "--url", url, *options]
    path = os.pathsep.join([str(_SUPPORT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_nobody_can_tell_that_services_were_killed_paused_and_cut_off(url, tmp_path):
    told = recorded(url, tmp_path, "--seconds", "8", "--seed", os.environ.get("FLMARKET_HISTORY_SEED", "7"))
    assert told["wrong"] == [], told
    assert told["ends"]["ok"] > 40
    assert sum(told["faults"].values()) >= 2
    assert sum(told["lost"].values()) > 5


@pytest.mark.slow
def test_a_service_that_ignores_idempotency_keys_is_found(tmp_path):
    told = recorded(
        f"sqlite:///{tmp_path}/broker.db", tmp_path, "--seconds", "5", "--share", "0.6", "--plant", "key ignored"
    )
    assert any(line.startswith("once: ") for line in told["wrong"]), told
