"""The worker: takes tasks from the queue in the database and plays them, one round's step at a time.

One process at a time holds the lease and works (`holders`); whatever it writes is refused once another has taken over.
All tasks take turns, so a long one does not hold up the others. What a worker knows beyond the database is only the
step that a round has reached; after a crash, or a fault of the database, that round is played again. Faults fail no
task: they are tried again, ever more slowly. Flower tasks are played elsewhere: the worker sees to it that a run is at
work on each (`flower.runs`). Audits, the reconciliation of the books and the outbox have threads beside it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from sqlalchemy import select, update

from flmarket.audit import audit
from flmarket.broker.core import Broker
from flmarket.broker.database import fenced, is_transient
from flmarket.broker.office.disputes import carry_out, unfinished
from flmarket.broker.office.operator import WORKER
from flmarket.broker.office.payouts import book, unbooked
from flmarket.broker.office.reconcile import RECONCILE, reconcile
from flmarket.broker.office.tasks import recover_posting
from flmarket.broker.requests import FLOWER, AuditRequest, order_of
from flmarket.broker.stamps import now
from flmarket.broker.tables import PLAYABLE, AuditJob, Check, TaskRow
from flmarket.broker.work.deliveries import Deliveries
from flmarket.broker.work.flower.runs import FlowerRuns, give_up
from flmarket.broker.work.holders import Beside, Held, Replaced
from flmarket.broker.work.rounds import INTERNAL, begin, end_task, ending, play_round
from flmarket.errors import FlmarketError
from flmarket.market import TooFewBids

log = logging.getLogger("flmarket.broker")

_STEPS = 5  # of a round, among which the task's seconds for a round are divided
_LONGEST_TURN = 3600.0  # seconds for which a turn keeps the lease
_FUNDING_MS = 10_000
_WAIT_FOR_BIDS_MS = 500
_CHECK_SECONDS, _CHECK_SHARE = 60.0, 0.05  # how often books are reconciled, and the most of a processor for it
_FIRST_REST, _LONGEST_REST = 0.1, 30.0  # seconds after a fault


class _Stopped(Exception):
    """The service ends; the audit goes back into the queue."""


class StandingCheck(Beside):
    """Reconciles the books now and then, and keeps what was found for the operator to see."""

    _due = 0.0

    def ensure_running(self) -> None:
        """Start the thread if it is time and it does not run."""
        if time.monotonic() >= self._due and not self.is_running():
            self._due = time.monotonic() + _CHECK_SECONDS
            self.start(self.run, "reconcile")

    def run(self) -> None:
        """Here and now."""
        began = time.monotonic()
        found = reconcile(self.broker.database.engine)
        with self.broker.database.write() as session:
            session.merge(Check(name=RECONCILE, at=now(), findings=[asdict(one) for one in found]))
        self._due = time.monotonic() + max(_CHECK_SECONDS, (time.monotonic() - began) / _CHECK_SHARE)
        for one in found:
            log.error("the books do not agree: %s %s: %s", one.rule, one.subject, one.message)


class AuditRuns(Beside):
    """Audits one after the other, with progress that can be read. The thread lives while there are some, and stops at
    its next sign of progress; what it leaves is begun again."""

    def ensure_running(self) -> None:
        """Start the thread if there is work and it does not run."""
        if self.is_running():
            return
        if self.failed:
            with fenced(self.check):
                self.requeue()
            self.failed = False
        if self._next() is not None:
            self.start(self.run_all, "audits")

    def requeue(self) -> None:
        """What a former worker had begun is begun again."""
        with self.broker.database.write() as session:
            session.execute(update(AuditJob).where(AuditJob.state == "running").values(state="queued", progress=0.0))

    def run_all(self) -> None:
        """Run all audits that wait, here and now."""
        while (audit_id := self._next()) is not None and not self.stop.is_set():
            self._run(audit_id)

    def _next(self) -> str | None:
        with self.broker.database.read() as session:
            waiting = select(AuditJob.id).where(AuditJob.state == "queued").order_by(AuditJob.created_at).limit(1)
            return session.scalar(waiting)

    def _run(self, audit_id: str) -> None:
        with self.broker.database.read() as session:
            request = AuditRequest.model_validate(session.get_one(AuditJob, audit_id).request)
        shown = -1.0

        def progress(share: float, text: str) -> None:
            nonlocal shown
            if self.stop.is_set():
                raise _Stopped
            if share - shown >= 0.05:
                shown = share
                self._update(audit_id, state="running", progress=share, note=text[:200])

        try:
            report = audit(request.auction, **request.model_dump(exclude={"auction"}), progress=progress)
            self._update(audit_id, state="done", progress=1.0, note="done", report=report.to_dict(), finished_at=now())
        except _Stopped:
            self._update(audit_id, state="queued", progress=0.0, note="waiting")
        except Replaced:
            raise
        except FlmarketError as error:
            self._update(audit_id, state="failed", note=str(error)[:200], finished_at=now())
        except Exception as error:
            if self.stop.is_set():
                return
            if is_transient(error):
                raise
            log.exception("audit %s failed unexpectedly", audit_id)
            self._update(audit_id, state="failed", note="an internal error", finished_at=now())

    def _update(self, audit_id: str, **values: object) -> None:
        with self.broker.database.write() as session:
            session.execute(update(AuditJob).where(AuditJob.id == audit_id).values(**values))


class Worker:
    """A thread that plays tasks, and others beside it; `step` does one turn and is all that tests need."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._rounds: dict[str, Iterator[str]] = {}
        self._faults: dict[str, tuple[int, float]] = {}  # how often in a row, and until when the task rests
        self._stop = threading.Event()
        self._lease = Held(broker.database, WORKER, broker.settings.lease_seconds)
        self._lease_until = 0.0
        self._at_work_since: float | None = None
        self._thread = threading.Thread(target=self._loop, name="flmarket-worker", daemon=True)
        self._renewal = threading.Thread(target=self._renew, name="flmarket-lease", daemon=True)
        self._audits = AuditRuns(broker, self._stop, self._lease.check)
        check, deliveries = (kind(broker, self._stop, self._lease.check) for kind in (StandingCheck, Deliveries))
        self._besides: tuple[Beside, ...] = self._audits, check, deliveries
        self._flower = FlowerRuns(broker)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()
        self._renewal.start()

    def stop(self) -> None:
        """Finish the step at hand, give the lease back and end."""
        self._stop.set()
        self.broker.wake.set()
        for thread in (self._thread, self._renewal):
            if thread.is_alive():
                thread.join()
        for beside in self._besides:
            beside.join()
        self._flower.join()
        try:
            self._lease.give_back()
        except Exception:  # it runs out by itself
            log.exception("the lease could not be given back")

    def step(self) -> bool:
        """One turn over all tasks that are due; whether anything was done."""
        self._at_work_since = time.monotonic()
        try:
            if self._has_lease():
                with fenced(self._lease.check):
                    return self._turn()
        except Replaced as replaced:
            log.warning("%s", replaced)
            self._lease_until = 0.0
        finally:
            self._at_work_since = None
        self._rounds.clear()  # somebody else may have played on
        self._faults.clear()
        return False

    def run_until_idle(self, seconds: float = 60.0) -> None:
        """Play everything that is due; for tests and for seeding."""
        until = time.monotonic() + seconds
        while self.step() or self._faults:
            if time.monotonic() > until:
                raise TimeoutError("tasks are still due")

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                busy = self.step()
                if self._lease_until:
                    for beside in self._besides:
                        beside.ensure_running()
            except Exception:  # the database may be away for a while; the queue is not lost
                log.exception("the worker's turn failed; it tries again")
                self._rounds.clear()
                busy = False
            if not busy:
                self.broker.wake.wait(self.broker.settings.worker_pause)
                self.broker.wake.clear()

    def _renew(self) -> None:
        """A turn may take longer than the lease, which would then go from process to process and nothing be finished.

        One that takes longer than any should is given up: another process may do better.
        """
        while not self._stop.wait(self._lease.seconds / 3):
            since = self._at_work_since
            if since is not None and time.monotonic() - since < _LONGEST_TURN:
                try:
                    self._lease.renew()
                except Exception:  # the database may be away for a while
                    log.warning("the lease could not be renewed", exc_info=True)

    def _turn(self) -> bool:
        with self.broker.database.read() as session:
            stuck = select(TaskRow.id).where(TaskRow.state == "funding", TaskRow.created_at < now() - _FUNDING_MS)
            query = select(TaskRow.id, TaskRow.spec).where(TaskRow.state.in_(PLAYABLE), TaskRow.next_at <= now())
            postings, before = session.scalars(stuck).all(), now() - _FUNDING_MS
            decisions, withdrawals = unfinished(session, before), unbooked(session, before)
            due = [(row.id, row.spec["broker"]["engine"]) for row in session.execute(query.order_by(TaskRow.next_at))]
        broker, finished = self.broker, 0
        finished += _finish("the posting of task", postings, partial(recover_posting, broker))
        finished += _finish("the decision of dispute", decisions, partial(carry_out, broker, None))
        finished += _finish("the withdrawal of payout", withdrawals, partial(book, broker, None))
        due = [one for one in due if self._faults.get(one[0], (0, 0.0))[1] <= time.monotonic()]  # those that rested
        for task_id, engine in due:
            if self._stop.is_set() or not self._has_lease():
                break
            if engine == FLOWER:
                self._flower.look(task_id)
            else:
                self._advance(task_id)
        return bool(due or finished)

    def _advance(self, task_id: str) -> None:
        """One step of a task's round, or all of them if nobody wants to watch; the task's end if it is time."""
        try:
            try:
                self._play(task_id)
            except Exception as error:
                self._rounds.pop(task_id, None)
                if isinstance(error, Replaced) or is_transient(error):
                    raise
                known = isinstance(error, FlmarketError)
                log.warning("task %s failed: %s", task_id, error if known else "unexpectedly", exc_info=not known)
                self._fail(task_id, str(error) if known else INTERNAL)
            self._faults.pop(task_id, None)
        except Replaced:
            raise
        except Exception as error:  # of the database, or of closing the task: it is still in the queue
            faults = 1 + self._faults.get(task_id, (0, 0.0))[0]
            rest = min(_LONGEST_REST, _FIRST_REST * 2 ** min(faults - 1, 20))
            self._faults[task_id] = faults, time.monotonic() + rest
            log.warning("task %s rests for %g s", task_id, rest, exc_info=None if is_transient(error) else error)

    def _fail(self, task_id: str, error: str) -> None:
        """End the task; deliveries of its round are paid if it can still be told what they were."""
        try:
            give_up(self.broker, task_id, error)
        except Exception as problem:
            if isinstance(problem, Replaced) or is_transient(problem):
                raise
            log.warning("task %s: what its round delivered cannot be told", task_id, exc_info=True)
            end_task(self.broker, task_id, "failed", error)

    def _play(self, task_id: str) -> None:
        broker = self.broker
        if self._ended(task_id):
            return
        with broker.database.read() as session:
            pause = int(1000 * order_of(session.get_one(TaskRow, task_id).spec).broker.round_seconds / _STEPS)
        playing = self._rounds.setdefault(task_id, play_round(broker, task_id))
        try:
            more = True
            while more:
                started = time.perf_counter()
                step = next(playing, None)
                more = step is not None
                broker.metrics.step_seconds.labels(step or "settled").observe(time.perf_counter() - started)
                if more and pause:
                    _postpone(broker, task_id, pause)
                    return
        except TooFewBids:
            del self._rounds[task_id]
            _postpone(broker, task_id, max(_WAIT_FOR_BIDS_MS, pause))
            return
        del self._rounds[task_id]
        self._ended(task_id)

    def _ended(self, task_id: str) -> bool:
        """Begin the task if it is new; end it if it is time."""
        with self.broker.database.read() as session:
            task = session.get_one(TaskRow, task_id)
            state = ending(session, task)
        if task.state == "queued":
            with self.broker.database.write() as session:
                begin(session, session.get_one(TaskRow, task_id, with_for_update=True))
        if state is None:
            return False
        self._rounds.pop(task_id, None)
        end_task(self.broker, task_id, state)
        return True

    def _has_lease(self) -> bool:
        seconds = self.broker.settings.lease_seconds
        if self._lease_until > time.monotonic() + seconds / 2:
            return True
        before, began = self._lease.token, time.monotonic()
        if not self._lease.take():
            self._lease_until = 0.0
            return False
        self._lease_until = began + seconds
        if self._lease.token != before:  # it was another's meanwhile, who may have played on
            self._rounds.clear()
            with fenced(self._lease.check):
                self._audits.requeue()
        return True


def _finish(what: str, begun: Sequence[str], finish: Callable[[str], None]) -> int:
    """What was begun by a service that was cut off; returns how many of it are done."""
    done = 0
    for identifier in begun:
        try:
            finish(identifier)
            done += 1
        except Replaced:
            raise
        except Exception:  # it is still there in the next turn, or was refused for good
            log.exception("%s %s could not be finished", what, identifier)
    return done


def _postpone(broker: Broker, task_id: str, milliseconds: int) -> None:
    with broker.database.write() as session:
        session.get_one(TaskRow, task_id).next_at = now() + milliseconds
