"""How tasks end: when it is time, and what is done with the rest of the escrow. The same for every engine."""

from __future__ import annotations

from sqlalchemy.orm import Session

from flmarket.broker.clock import now
from flmarket.broker.core import Broker
from flmarket.broker.models import Event, TaskRow
from flmarket.broker.services.log import note
from flmarket.broker.services.states import ENDED

__all__ = ["INTERNAL", "begin", "end_task", "ending"]

INTERNAL = "an internal error; the operator's log has the details"


def begin(session: Session, task: TaskRow) -> None:
    """A queued task is running from its worker's first look at it."""
    if task.state == "queued":
        task.state, task.started_at = "running", now()
        session.add(Event(task_id=task.id, kind="running", data={"rounds": task.rounds}, at=now()))


def ending(task: TaskRow) -> str | None:
    """The state that the task ends in if it is time, between rounds."""
    if task.rounds_done >= task.rounds:
        return "finished"
    if task.cancel_requested:
        return "cancelled"
    return "expired" if task.deadline_at < now() else None


def end_task(broker: Broker, task_id: str, state: str, error: str = "") -> None:
    """Give the rest of the escrow back and close the task; repeating it changes nothing."""
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
    if task.state in ENDED:
        return
    refunded = broker.books.refund(task_id, task.buyer_id)
    with broker.database.write() as session:
        task = session.get_one(TaskRow, task_id)
        task.state, task.refunded_micros, task.error, task.finished_at = state, refunded, error[:2000], now()
        session.add(Event(task_id=task_id, kind=state, data={"refunded_micros": refunded, "error": error}, at=now()))
        note(session, None, f"task.{state}", task_id, outcome="failed" if error else "ok", detail=error)
