"""Who is at work on a Flower task: one run at a time, known to the service and to the run by one row.

A run takes the task when it starts and renews its tenancy while it works. Every start carries the number of its
attempt; a run whose number is not the latest may write nothing more, neither rows nor money (`renewing`). So a run that
Flower started late, or one that was thought dead, does no harm. A run that makes no progress for much longer than its
deadlines allow stops renewing.

What would break it: clocks of service and run that differ by more than the lease.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker
from flmarket.broker.database import fenced
from flmarket.broker.office.runs import ENDED, WORKING
from flmarket.broker.stamps import now
from flmarket.broker.tables import PLAYABLE, FlowerRun, TaskRow
from flmarket.broker.work.holders import Replaced, may_run, new_holder

log = logging.getLogger("flmarket.broker")


def run_of(session: Session, task_id: str) -> FlowerRun:
    """The task's row, locked; a new one if it has none."""
    run = session.get(FlowerRun, task_id, with_for_update=True)
    if run is None:
        run = FlowerRun(task_id=task_id)
        session.add(run)
        session.flush()
    return run


def at_work(run: FlowerRun) -> bool:
    """Whether a run has the task now."""
    return run.state == WORKING and run.expires_at > now() and may_run(run.holder)


class Tenancy:
    """A run's hold on a task. `patience`: so many seconds without a `step` and it is given up."""

    def __init__(self, broker: Broker, task_id: str, attempt: int, *, patience: float) -> None:
        self.broker, self.task_id, self.attempt, self.patience = broker, task_id, attempt, patience
        self.holder = new_holder()
        self._stop = threading.Event()
        self._stepped = time.monotonic()

    def take(self) -> None:
        """Begin; Replaced if the task is not this run's to play."""
        with self.broker.database.write() as session:
            run, task = session.get(FlowerRun, self.task_id, with_for_update=True), session.get(TaskRow, self.task_id)
            if run is None or task is None or run.attempt != self.attempt or task.state not in PLAYABLE:
                raise Replaced(f"attempt {self.attempt} at task {self.task_id} is not the latest, or it has ended")
            if run.holder != self.holder and at_work(run):
                raise Replaced(f"{run.holder} is at work on task {self.task_id}")
            run.state, run.holder, run.error = WORKING, self.holder, ""
            run.expires_at = self._until()

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Keep it while the block runs, in which every write of this thread is refused once another run has it."""
        thread = threading.Thread(target=self._renew, name="flmarket-tenancy", daemon=True)
        thread.start()
        try:
            with fenced(self.check):
                yield
        finally:
            self._stop.set()
            thread.join()

    def step(self) -> None:
        """There is progress."""
        self._stepped = time.monotonic()

    def check(self, connection: Connection | Session) -> None:
        """Replaced unless the task is still this run's, until the transaction ends."""
        known = select(FlowerRun.attempt, FlowerRun.holder).where(FlowerRun.task_id == self.task_id)
        found = connection.execute(known.with_for_update(read=True)).one_or_none()
        if found is None or tuple(found) != (self.attempt, self.holder):
            raise Replaced(f"task {self.task_id} has another run")

    def saw(self, owners: list[int]) -> None:
        """Whose nodes are connected now, for people to see."""
        with self.broker.database.write() as session:
            run = session.get(FlowerRun, self.task_id, with_for_update=True)
            if run is not None and run.nodes != owners:
                run.nodes = owners

    def end(self, error: str = "") -> None:
        """Give the task back."""
        with self.broker.database.write() as session:
            run = session.get(FlowerRun, self.task_id, with_for_update=True)
            if run is not None and (run.attempt, run.holder) == (self.attempt, self.holder):
                run.state, run.holder, run.error = ENDED, "", error[:2000]

    def _renew(self) -> None:
        while not self._stop.wait(self.broker.settings.flower_lease_seconds / 4):
            if time.monotonic() - self._stepped > self.patience:
                log.error("task %s: no progress for %g s, its run gives up", self.task_id, self.patience)
                return
            try:
                with self.broker.database.write() as session:
                    session.get_one(FlowerRun, self.task_id, with_for_update=True).expires_at = self._until()
                    self.check(session)
            except Replaced as replaced:
                log.warning("%s", replaced)
                return
            except Exception:  # the database may be away for a while
                log.exception("task %s: its run could not renew", self.task_id)

    def _until(self) -> int:
        return now() + int(1000 * self.broker.settings.flower_lease_seconds)
