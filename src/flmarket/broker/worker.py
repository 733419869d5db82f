"""The worker: takes tasks from the queue in the database and plays them, one round's step at a time.

One process at a time holds the lease and works; another takes over when it stops renewing, or at once if it can see
that the holder's process is gone. All tasks take turns, so a long one does not hold up the others. What a worker knows
beyond the database is only the step that a round has reached; after a crash that round is played again. Flower tasks
are played elsewhere: the worker sees to it that a run is at work on each (`flower.runs`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

from sqlalchemy import select

from flmarket.broker.audit_runs import AuditRuns
from flmarket.broker.checkpoints import order_of
from flmarket.broker.clock import now
from flmarket.broker.core import Broker
from flmarket.broker.endings import INTERNAL, begin, end_task, ending
from flmarket.broker.engines import FLOWER
from flmarket.broker.flower.runs import FlowerRuns
from flmarket.broker.holders import may_run, new_holder
from flmarket.broker.models import Lease, TaskRow
from flmarket.broker.rounds import NotEnoughBids, pending_awards, play_round
from flmarket.broker.services.log import note
from flmarket.broker.services.operator import WORKER
from flmarket.broker.services.states import PLAYABLE
from flmarket.errors import FlmarketError

__all__ = ["Worker"]

log = logging.getLogger("flmarket.broker")

_STEPS = 5  # of a round, among which the task's seconds for a round are divided
_FUNDING_MS = 10_000
_WAIT_FOR_BIDS_MS = 500


class Worker:
    """A thread that plays tasks, and one that runs audits; `step` does one turn and is all that tests need."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.holder = new_holder()
        self._rounds: dict[str, Iterator[str]] = {}
        self._stop = threading.Event()
        self._lease_until = 0.0
        self._thread = threading.Thread(target=self._loop, name="flmarket-worker", daemon=True)
        self._audits = AuditRuns(broker, self._stop)
        self._flower = FlowerRuns(broker)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the step at hand, give the lease back and end."""
        self._stop.set()
        self.broker.wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._audits.join()
        self._flower.join()
        with self.broker.database.write() as session:
            lease = session.get(Lease, WORKER)
            if lease is not None and lease.holder == self.holder:
                session.delete(lease)

    def step(self) -> bool:
        """One turn over all tasks that are due; whether anything was done."""
        if not self._has_lease():
            self._rounds.clear()  # somebody else may have played on
            return False
        with self.broker.database.read() as session:
            query = select(TaskRow.id, TaskRow.spec).where(TaskRow.state.in_(PLAYABLE), TaskRow.next_at <= now())
            due = [(row.id, row.spec.get("engine")) for row in session.execute(query.order_by(TaskRow.next_at))]
        for task_id, engine in due:
            if self._stop.is_set() or not self._has_lease():
                break
            if engine == FLOWER:
                self._flower.look(task_id)
            else:
                self._advance(task_id)
        return bool(due)

    def run_until_idle(self, seconds: float = 60.0) -> None:
        """Play everything that is due; for tests and for seeding."""
        until = time.monotonic() + seconds
        while self.step():
            if time.monotonic() > until:
                raise TimeoutError("tasks are still due")

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                busy = self.step()
                if self._lease_until:
                    self._audits.ensure_running()
            except Exception:  # the database may be away for a while; the queue is not lost
                log.exception("the worker's turn failed; it tries again")
                self._rounds.clear()
                busy = False
            if not busy:
                self.broker.wake.wait(self.broker.settings.worker_pause)
                self.broker.wake.clear()

    def _advance(self, task_id: str) -> None:
        """One step of a task's round, or all of them if nobody wants to watch."""
        broker = self.broker
        try:
            if task_id not in self._rounds and self._ended(task_id):
                return
            with broker.database.read() as session:
                pause = int(1000 * order_of(session.get_one(TaskRow, task_id)).round_seconds / _STEPS)
            playing = self._rounds.setdefault(task_id, play_round(broker, task_id))
            while True:
                started = time.perf_counter()
                finished = next(playing, None) is None
                broker.metrics.round_seconds.observe(time.perf_counter() - started)
                if finished:
                    del self._rounds[task_id]
                    break
                if pause:
                    _postpone(broker, task_id, pause)
                    break
            if finished:
                self._ended(task_id)
        except NotEnoughBids:
            self._rounds.pop(task_id, None)
            _postpone(broker, task_id, max(_WAIT_FOR_BIDS_MS, pause))
        except FlmarketError as error:
            self._rounds.pop(task_id, None)
            log.warning("task %s failed: %s", task_id, error)
            _fail(broker, task_id, str(error))
        except Exception:
            self._rounds.pop(task_id, None)
            log.exception("task %s failed unexpectedly", task_id)
            _fail(broker, task_id, INTERNAL)

    def _ended(self, task_id: str) -> bool:
        """End the task if it is time, between rounds."""
        with self.broker.database.write() as session:
            task = session.get_one(TaskRow, task_id)
            begin(session, task)
            state = ending(task)
        if state is None:
            return False
        end_task(self.broker, task_id, state)
        return True

    def _has_lease(self) -> bool:
        seconds = self.broker.settings.lease_seconds
        if self._lease_until > time.monotonic() + seconds / 2:
            return True
        fresh = not self._lease_until
        with self.broker.database.write() as session:
            lease, at = session.get(Lease, WORKER), now()
            if lease is not None and lease.holder != self.holder and lease.expires_at > at and may_run(lease.holder):
                self._lease_until = 0.0
                return False
            if lease is None:
                lease = Lease(name=WORKER, holder=self.holder, expires_at=0)
                session.add(lease)
            lease.holder, lease.expires_at = self.holder, at + int(1000 * seconds)
        self._lease_until = time.monotonic() + seconds
        if fresh:
            _clear_up(self.broker)
            self._audits.requeue()
        return True


def _fail(broker: Broker, task_id: str, error: str) -> None:
    try:
        broker.books.void_pending(pending_awards(broker, task_id), "the round was given up")
        end_task(broker, task_id, "failed", error)
    except Exception:  # e.g. the database is away; the task is still in the queue and comes round again
        log.exception("task %s could not be closed", task_id)


def _clear_up(broker: Broker) -> None:
    """Tasks whose posting was cut off: queued if their money arrived, else dropped from the queue."""
    with broker.database.read() as session:
        query = select(TaskRow.id).where(TaskRow.state == "funding", TaskRow.created_at < now() - _FUNDING_MS)
        stuck = session.scalars(query).all()
    for task_id in stuck:
        funded = broker.books.is_funded(task_id)
        with broker.database.write() as session:
            task = session.get_one(TaskRow, task_id)
            task.state, task.error = ("queued", "") if funded else ("failed", "its budget was not taken into escrow")
            task.escrow_micros = task.escrow_micros if funded else 0
            note(session, None, "task.recover", task_id, outcome="ok" if funded else "dropped")


def _postpone(broker: Broker, task_id: str, milliseconds: int) -> None:
    with broker.database.write() as session:
        session.get_one(TaskRow, task_id).next_at = now() + milliseconds
