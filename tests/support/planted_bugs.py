"""Bugs that were made before, here or elsewhere, each as a patch; the simulator must find every one of them.

python tests/support/planted_bugs.py          how long each takes to be found, from a fresh seed
"""

import sys
import time
from contextlib import contextmanager
from dataclasses import replace

from flmarket.broker import books as broker_books
from flmarket.broker import database
from flmarket.broker.tables import RoundRow
from flmarket.broker.work import rounds, worker
from flmarket.ledger import AwardState, DurableAccount, ReplayRefused, Resolution
from flmarket.ledger.entry import RESOLUTIONS, Line, canonical, event_to_dict
from flmarket.ledger.journal import ESCROW
from flmarket.ledger.rules import Draft
from flmarket.market import kind, owner, record, round
from flmarket.market.kind import Delivered, Refused
from flmarket.market.store import Checkpoint

BUGS = {}


def bug(world, *rules):
    """Register a function that returns patches as (object, name, value); `rules` are those that it may break."""

    def add(make):
        BUGS[make.__name__.replace("_", " ")] = world, rules, make
        return make

    return add


@contextmanager
def planted(name):
    """The bug is there, for a while."""
    before = []
    try:
        for where, what, new in BUGS[name][2]():
            before.append((where, what, getattr(where, what)))
            setattr(where, what, new)
        yield
    finally:
        for where, what, old in reversed(before):
            setattr(where, what, old)


@bug("nodes", "touched")
def compute_before_charge():
    admit = owner.Guard.admit

    def admits(self, order, *rest, **more):
        self.owner.records(order.records)
        return admit(self, order, *rest, **more)

    return [(owner.Guard, "admit", admits)]


@bug("service", "paid")
def end_before_resume():
    """A round that was awarded and cut off is ended by the clock or the buyer instead of being played on."""
    ending = rounds.ending

    def ends(session, task):
        row = session.get(RoundRow, (task.id, task.rounds_done))
        state = None if row is None else row.state
        if row is not None and state == rounds.AWARDED:
            row.state = "bids"
        try:
            return ending(session, task)
        finally:
            if row is not None:
                row.state = state

    return [(worker, "ending", ends)]


@bug("nodes", "ends", "once", "bill", "charged", "paid", "escrow", "home", "money")
def missing_task_in_an_id():
    def award_id(task, round_index, number):
        return f"t/{round_index}/{number}"

    return [(kind, "award_id", award_id), (owner, "award_id", award_id)]


@bug("service", "bill", "once", "ends", "escrow", "paid", "money")
def unfenced_lease():
    return [(broker_books, "respect_fence", lambda engine: None), (database, "_check_fence", lambda session: None)]


@bug("nodes", "charged")
def bad_update_not_charged():
    def resolution(award, state, reason="", release=None):
        return Resolution(award, state, reason, None if state is AwardState.VOIDED else release)

    return [(round, "Resolution", resolution)]


@bug("nodes", "once", "money")
def double_pay_on_resume():
    """Every order that was delivered is paid when its round closes, whatever the ledger says of it."""

    def resolutions(self, plan, updates, awards):
        return [
            Resolution(order.award, AwardState.POSTED, "", self.left(order))
            if order.owner in updates
            else Resolution(order.award, AwardState.EXPIRED, "deadline passed")
            for order in plan.orders
            if awards[order.owner].state in (AwardState.PENDING, AwardState.POSTED)
        ]

    resolve = Draft.resolve

    def pays(self, resolution):
        award = self.award(resolution.award_id)
        if award.state is AwardState.POSTED and resolution.state is AwardState.POSTED:
            self._move(Line(RESOLUTIONS[award.state], award.id, ESCROW, award.owner, award.price_micros, award.owner))
            return award
        return resolve(self, resolution)

    return [(kind.MarketKind, "resolutions", resolutions), (Draft, "resolve", pays)]


@bug("service", "bill", "escrow", "money")
def escrow_not_refunded_on_cancel():
    return [(broker_books.Books, "refund", lambda self, task_id, buyer: 0)]


@bug("nodes", "one", "paid")
def release_not_stored_before_answer():
    def keep(self, order, vector):
        return vector

    return [(record.OwnerJournal, "keep", keep)]


@bug("nodes", "cap")
def cap_checked_after_release():
    def charge(self, award_id, buyer, guarantee):
        with self._writing():
            if self.released(award_id):
                raise ReplayRefused(award_id)
            self._connection.execute(
                "INSERT INTO releases (time_us, award_id, buyer, guarantee) VALUES (?, ?, ?, ?)",
                (0, award_id, buyer, canonical(event_to_dict(guarantee))),
            )

    return [(DurableAccount, "charge", charge)]


@bug("nodes", "bill", "escrow")
def record_written_before_settle():
    def close(self, plan):
        market = self.kind
        ends = {one.award_id: one for one in market.resolutions(plan, self.updates, self.awards)}
        said = {
            number: replace(award, state=ends[award.id].state) if award.id in ends else award
            for number, award in self.awards.items()
        }
        written = market.close(plan, self.updates, said)
        self.store.save_round(written, Checkpoint(plan.index + 1, market.parameters, (), market.notes))
        round.resolve_each(self.ledger, list(ends.values()))
        self.plan, self.awards, self.updates = None, {}, {}
        return written

    return [(round.Rounds, "_close", close)]


@bug("nodes", "sold")
def escrow_not_checked():
    return [(owner.Guard, "_check_escrow", lambda self, *rest: None)]


@bug("nodes", "one", "touched", "once")
def replay_carried_out():
    charge = DurableAccount.charge

    def charges(self, award_id, buyer, guarantee):
        if not self.released(award_id):
            charge(self, award_id, buyer, guarantee)

    return [
        (record.OwnerJournal, "claimed", lambda self, release: False),
        (record.OwnerJournal, "claim", _claims),
        (DurableAccount, "charge", charges),
    ]


def _claims(self, order, seconds):
    with self._lock, self._connection as connection:
        connection.execute("delete from releases where id = ?", (kind.release_id(order),))
        connection.execute(
            "insert into releases values (?, ?, ?, null, ?)",
            (kind.release_id(order), order.task, record._terms(order), time.time() + seconds),
        )
    return True


@bug("nodes", "paid")
def paid_for_a_refusal():
    """Control flow that hangs on words: whatever says "released before" counts as delivered."""
    receive = round.Rounds._receive

    def receives(self, plan, waiting, answers, *, voids, final=False):
        def read():
            for batch in answers:
                yield {
                    number: Delivered(self.kind.parameters * 0.0)
                    if isinstance(answer, Refused) and "released" in answer.why
                    else answer
                    for number, answer in batch.items()
                }

        return receive(self, plan, waiting, read(), voids=voids, final=final)

    return [(round.Rounds, "_receive", receives)]


def first_seed(name, *, seconds=300.0, start=0):
    """The first seed that finds it, which rule it broke, and how long that took."""
    from flmarket.simulator import run_seed

    world, rules, _ = BUGS[name]
    began = time.process_time()
    for seed in range(start, 10**9):
        with planted(name):
            found = run_seed(seed, world=world)
        if found.broken and found.broken[0][0] in rules:
            return seed, found.broken[0], time.process_time() - began
        if found.broken:
            print(name, seed, "other rule", found.broken[0])
        if time.process_time() - began > seconds:
            return None, None, time.process_time() - began


if __name__ == "__main__":
    for one in sys.argv[1:] or BUGS:
        seed, broken, took = first_seed(one)
        print(f"{one}: seed {seed}, {took:.1f} s, {broken}", flush=True)
