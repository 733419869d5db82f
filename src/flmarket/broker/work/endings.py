"""How rounds and tasks end, the same for every engine.

A round that has been awarded is played to its end, whatever its buyer or the clock says meanwhile: owners may have
delivered. One that has not is undone when its task ends. Which of the two follows from what is stored, so it is the
same whether or not a crash came in between; and what is written about a round that is undone is what the ledger says.

A task ends in three steps: what is still held of its round goes back to it, everything left goes back to the buyer,
its rows are written in one transaction. The first two may be repeated, the last happens once. The price of an award in
dispute stays in escrow beyond that, until the operator decides (`office.disputes`).
"""

from sqlalchemy.orm import Session, undefer

from flmarket.broker.core import Broker
from flmarket.broker.office.notices import announce_end
from flmarket.broker.office.operator import note
from flmarket.broker.requests import order_of
from flmarket.broker.stamps import now
from flmarket.broker.tables import Event, RoundRow, TaskRow
from flmarket.broker.work.round_rows import AWARDED, void_round
from flmarket.client.wire import ENDED
from flmarket.ledger import Award, AwardState, Resolution
from flmarket.market import award_id, kinds, resolve_each

INTERNAL = "an internal error; the operator's log has the details"
_GIVEN_UP = "the round was given up"


def begin(session: Session, task: TaskRow) -> None:
    """A queued task is running from its worker's first look at it."""
    if task.state == "queued":
        task.state, task.started_at = "running", now()
        session.add(Event(task_id=task.id, kind="running", data={"rounds": task.rounds}, at=now()))


def ending(session: Session, task: TaskRow) -> str | None:
    """The state that the task ends in if it is time; None while there is a round to be played."""
    row = session.get(RoundRow, (task.id, task.rounds_done))
    if row is not None and row.state == AWARDED:
        return None
    if task.rounds_done >= task.rounds:
        return "finished"
    if task.rounds_done and kinds.of(order_of(task.spec).kind).side.lasting:  # what was awarded is for all rounds
        return None
    if task.cancel_requested:
        return "cancelled"
    return "expired" if task.deadline_at < now() else None


def open_awards(broker: Broker, task_id: str) -> dict[int, Award]:
    """The awards of the task's round under way by owner, as the ledger has them."""
    with broker.database.read() as session:
        index = session.get_one(TaskRow, task_id).rounds_done
        lasting = kinds.of(order_of(session.get_one(TaskRow, task_id).spec).kind).side.lasting
        first = 0 if lasting else index
        row = session.get(RoundRow, (task_id, first), options=[undefer(RoundRow.opened)])
        bidders = row.opened["bidders"] if row is not None and row.opened is not None else []
    return broker.books.round_awards({owner: award_id(task_id, first, owner) for owner in bidders})


def end_task(broker: Broker, task_id: str, state: str, error: str = "") -> None:
    """Undo the round under way, give the rest of the escrow back and close the task; repeating it changes nothing."""
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
    if task.state in ENDED:
        return
    awards = open_awards(broker, task_id)
    pending = [owner for owner, award in awards.items() if award.state is AwardState.PENDING]
    voids = [Resolution(awards[owner].id, AwardState.VOIDED, _GIVEN_UP) for owner in pending]
    awards |= dict(zip(pending, resolve_each(broker.books.ledger, voids), strict=True))
    refunded = broker.books.refund(task_id, task.buyer_id)
    with broker.database.write() as session:
        task = session.get_one(TaskRow, task_id, with_for_update=True)
        if task.state in ENDED:
            return
        void = void_round(session, task, awards)
        task.state, task.error, task.finished_at = state, error[:2000], now()
        task.refunded_micros += refunded  # beside what decided disputes gave back
        session.add(Event(task_id=task_id, kind=state, data={"refunded_micros": refunded, "error": error}, at=now()))
        announce_end(session, task)
        note(session, None, f"task.{state}", task_id, outcome="failed" if error else "ok", detail=error)
    if void is not None:
        row, ended = void
        broker.metrics.count_round(row, ended, lasting=kinds.of(order_of(task.spec).kind).side.lasting)
