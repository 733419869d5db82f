"""Audits in the background, one after the other, with progress that can be read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy import Connection, select, update

from flmarket.audit import audit
from flmarket.broker.core import Broker
from flmarket.broker.database import fenced, is_transient
from flmarket.broker.requests import AuditRequest
from flmarket.broker.stamps import now
from flmarket.broker.tables import AuditJob
from flmarket.broker.work.holders import Replaced
from flmarket.errors import FlmarketError

__all__ = ["AuditRuns"]

log = logging.getLogger("flmarket.broker")
_PATIENCE = 3.0  # seconds


class _Stopped(Exception):
    """The service ends; the audit goes back into the queue."""


class AuditRuns:
    """A thread that lives while there are audits to run; `check` says whether this process may still write."""

    def __init__(
        self, broker: Broker, stop: threading.Event, check: Callable[[Connection], None] | None = None
    ) -> None:
        self._broker, self._stop, self._check = broker, stop, check
        self._thread: threading.Thread | None = None
        self._cut_off = False

    def ensure_running(self) -> None:
        """Start the thread if there is work and it does not run."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._cut_off:
            with fenced(self._check):
                self.requeue()
            self._cut_off = False
        if self._next() is not None:
            self._thread = threading.Thread(target=self._work, name="flmarket-audits", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait a little for the thread, which stops at its next sign of progress; what it leaves is begun again."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def requeue(self) -> None:
        """What a former worker had begun is begun again."""
        with self._broker.database.write() as session:
            session.execute(update(AuditJob).where(AuditJob.state == "running").values(state="queued", progress=0.0))

    def run_all(self) -> None:
        """Run all audits that wait, here and now."""
        while (audit_id := self._next()) is not None and not self._stop.is_set():
            self._run(audit_id)

    def _work(self) -> None:
        try:
            with fenced(self._check):
                self.run_all()
        except Exception:
            self._cut_off = True
            if not self._stop.is_set():  # else the database was closed under it, as announced
                log.exception("the audit thread failed; what it was at is begun again")

    def _next(self) -> str | None:
        with self._broker.database.read() as session:
            waiting = select(AuditJob.id).where(AuditJob.state == "queued").order_by(AuditJob.created_at).limit(1)
            return session.scalar(waiting)

    def _run(self, audit_id: str) -> None:
        with self._broker.database.read() as session:
            request = AuditRequest.model_validate(session.get_one(AuditJob, audit_id).request)
        shown = -1.0

        def progress(share: float, text: str) -> None:
            nonlocal shown
            if self._stop.is_set():
                raise _Stopped
            if share - shown >= 0.05:
                shown = share
                self._update(audit_id, state="running", progress=share, note=text[:200])

        try:
            report = audit(
                request.auction,
                request.population,
                request.profiles,
                owners=request.owners,
                seed=request.seed,
                progress=progress,
            )
            self._update(audit_id, state="done", progress=1.0, note="done", report=report.to_dict(), finished_at=now())
        except _Stopped:
            self._update(audit_id, state="queued", progress=0.0, note="waiting")
        except Replaced:
            raise
        except FlmarketError as error:
            self._update(audit_id, state="failed", note=str(error)[:200], finished_at=now())
        except Exception as error:
            if self._stop.is_set():
                return
            if is_transient(error):
                raise
            log.exception("audit %s failed unexpectedly", audit_id)
            self._update(audit_id, state="failed", note="an internal error", finished_at=now())

    def _update(self, audit_id: str, **values: object) -> None:
        with self._broker.database.write() as session:
            session.execute(update(AuditJob).where(AuditJob.id == audit_id).values(**values))
