"""A buyer's tasks: post, watch, cancel, pay, download.

Posting goes in three steps, each durable: the task is written down (`funding`), its budget moves into escrow, it joins
the queue. A crash in between is cleared up by the worker: the task is queued if its money arrived and dropped if not.
"""

from __future__ import annotations

from sqlalchemy import Select, delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from flmarket.broker.checkpoints import order_of, vector
from flmarket.broker.clock import iso, now
from flmarket.broker.core import Broker, Party, require
from flmarket.broker.engines import FLOWER, check_engine
from flmarket.broker.errors import Conflict, NotFound
from flmarket.broker.ids import derived_id, new_id
from flmarket.broker.model_files import ModelFormat, model_file
from flmarket.broker.models import Event, PartyRow, Release, RoundRow, Slot, TaskRow
from flmarket.broker.schemas import TaskRequest
from flmarket.broker.services.log import note
from flmarket.broker.services.states import ACTIVE, ENDED
from flmarket.broker.services.views import (
    AwardView,
    BillLine,
    BillView,
    EventView,
    ModelFile,
    ReceiptPage,
    ReceiptView,
    RoundDetail,
    RoundPage,
    RoundView,
    TaskPage,
    TaskView,
)
from flmarket.engines import SimulationRun
from flmarket.errors import InvalidInput
from flmarket.ledger import MemoryLedger

__all__ = [
    "bill",
    "cancel_task",
    "events",
    "get_task",
    "list_tasks",
    "model",
    "post_task",
    "receipts",
    "round_detail",
    "rounds",
    "view_round",
]


def post_task(broker: Broker, party: Party, request: TaskRequest, *, key: str | None = None) -> TaskView:
    """Check the order, take its budget into escrow and queue it; the same `key` posts it once."""
    require(party, "buyer")
    check_engine(broker.settings, request.engine)
    if request.engine == FLOWER and not request.owners.open:
        raise InvalidInput("owners.open", False, "true in a Flower task: its owners are registered ones")
    task_id = new_id("t") if key is None else derived_id("t", party.id, key)
    simulation = broker.simulations.build(task_id, request)
    run = SimulationRun(simulation, MemoryLedger())
    at = now()
    row = TaskRow(
        id=task_id,
        buyer_id=party.id,
        name=request.name,
        state="funding",
        spec=request.model_dump(mode="json"),
        rounds=request.rounds,
        rounds_done=0,
        escrow_micros=request.escrow_micros,
        spent_micros=0,
        refunded_micros=0,
        perturbation=simulation.perturbation.name,
        dimension=run.parameters.size,
        features=simulation.data.features,
        classes=list(simulation.data.classes),
        baseline_accuracy=run.baseline_accuracy(),
        created_at=at,
        deadline_at=at + 1000 * request.deadline_seconds,
        next_at=at,
        cancel_requested=False,
        error="",
    )
    # on Flower, places are taken by owners with a node, as they come
    sizes = () if request.engine == FLOWER else tuple(simulation.partition.sizes.tolist())
    places = [Slot(task_id=task_id, slot=slot, records=records) for slot, records in enumerate(sizes)]
    try:
        with broker.database.write() as session:
            active = select(func.count()).where(TaskRow.buyer_id == party.id, TaskRow.state.in_(ACTIVE))
            if (session.scalar(active) or 0) >= broker.settings.max_tasks_per_buyer:
                raise Conflict(f"a buyer has at most {broker.settings.max_tasks_per_buyer} tasks under way")
            session.add(row)
            session.flush()
            session.add_all(places)
    except IntegrityError:
        if key is None:
            raise  # 80 random bits do not repeat
    try:
        broker.books.fund(task_id, party.id, request.escrow_micros)
    except Conflict:
        with broker.database.write() as session:
            _drop(session, session.get_one(TaskRow, task_id))
            note(session, party, "task.post", task_id, outcome="refused", detail="not enough money")
        raise
    with broker.database.write() as session:
        found = session.get_one(TaskRow, task_id)
        if found.state == "funding":
            found.state = "queued"
            note(session, party, "task.post", task_id, detail=f"{request.escrow_micros} micro-units in escrow")
            session.add(Event(task_id=task_id, kind="queued", data={"rounds": request.rounds}, at=now()))
    broker.wake.set()
    return get_task(broker, party, task_id)


def list_tasks(broker: Broker, party: Party, *, limit: int = 50, before: str | None = None) -> TaskPage:
    """One's own tasks, or the operator's view of all, newest first."""
    require(party, "buyer", "operator")
    query = select(TaskRow).order_by(TaskRow.created_at.desc(), TaskRow.id.desc()).limit(limit + 1)
    if party.role == "buyer":
        query = query.where(TaskRow.buyer_id == party.id)
    with broker.database.read() as session:
        if before is not None:
            last = session.get(TaskRow, before)
            if last is None or (party.role == "buyer" and last.buyer_id != party.id):
                raise NotFound("task", before)
            query = query.where(
                (TaskRow.created_at < last.created_at)
                | ((TaskRow.created_at == last.created_at) & (TaskRow.id < before))
            )
        rows = session.scalars(query).all()
        items = tuple(_view(row) for row in rows[:limit])
    return TaskPage(items, items[-1].id if len(rows) > limit else None)


def get_task(broker: Broker, party: Party, task_id: str) -> TaskView:
    """A task of one's own, or any for the operator."""
    with broker.database.read() as session:
        return _view(own_task(session, party, task_id))


def cancel_task(broker: Broker, party: Party, task_id: str) -> TaskView:
    """Stop after the round that is being played; what is left of the escrow comes back."""
    require(party, "buyer", "operator")
    with broker.database.write() as session:
        row = own_task(session, party, task_id)
        if row.state in ENDED:
            raise Conflict(f"task {task_id} is {row.state} already")
        if not row.cancel_requested:
            row.cancel_requested, row.next_at = True, now()
            note(session, party, "task.cancel", task_id)
    broker.wake.set()
    return get_task(broker, party, task_id)


def rounds(broker: Broker, party: Party, task_id: str, *, limit: int = 1000, start: int = 0) -> RoundPage:
    """The rounds of a task from `start` on."""
    with broker.database.read() as session:
        own_task(session, party, task_id)
        query = select(RoundRow).where(RoundRow.task_id == task_id, RoundRow.index >= start).order_by(RoundRow.index)
        rows = session.scalars(query.limit(limit + 1)).all()
    return RoundPage(tuple(view_round(row) for row in rows[:limit]), rows[limit].index if len(rows) > limit else None)


def round_detail(broker: Broker, party: Party, task_id: str, index: int) -> RoundDetail:
    """One round and its awards. Owners are places here; a buyer does not learn who they are."""
    with broker.database.read() as session:
        own_task(session, party, task_id)
        row = session.get(RoundRow, (task_id, index))
        if row is None:
            raise NotFound("round", str(index))
        releases = session.execute(_releases_with_names(task_id, index)).all()
    named = party.role == "operator"
    awards = tuple(
        AwardView(
            one.slot,
            name if named and name else f"owner {one.slot}",
            one.epsilon,
            one.records,
            one.weight,
            one.price_micros,
            one.state,
            one.reason,
            one.award_id,
        )
        for one, name in releases
    )
    return RoundDetail(view_round(row), awards)


def bill(broker: Broker, party: Party, task_id: str) -> BillView:
    """What was paid for, round by round."""
    with broker.database.read() as session:
        row = own_task(session, party, task_id)
        played = session.scalars(select(RoundRow).where(RoundRow.task_id == task_id).order_by(RoundRow.index)).all()
    lines = tuple(
        BillLine(one.index, one.budget_micros, one.spent_micros, one.delivered) for one in played if one.closed_at
    )
    left = row.escrow_micros - row.spent_micros - row.refunded_micros
    return BillView(task_id, row.name, row.state, row.escrow_micros, row.spent_micros, row.refunded_micros, left, lines)


def receipts(broker: Broker, party: Party, task_id: str, index: int) -> ReceiptPage:
    """The ledger's receipts of a round: all for the buyer, one's own for an owner."""
    with broker.database.read() as session:
        query = select(Release).where(Release.task_id == task_id, Release.index == index).order_by(Release.slot)
        if party.role == "owner":
            query = query.where(Release.party_id == party.id)
        else:
            own_task(session, party, task_id)
        found = session.scalars(query).all()
    if not found and party.role == "owner":
        raise NotFound("receipt", f"{task_id}/{index}")
    return ReceiptPage(
        tuple(
            ReceiptView(
                one.award_id,
                one.state,
                one.epsilon,
                one.price_micros,
                broker.books.ledger.receipt(one.award_id).to_dict(),
            )
            for one in found
        )
    )


def events(broker: Broker, party: Party, task_id: str, *, after: int = 0, limit: int = 200) -> tuple[EventView, ...]:
    """What happened in a task after the event `after`."""
    with broker.database.read() as session:
        own_task(session, party, task_id)
        query = select(Event).where(Event.task_id == task_id, Event.id > after).order_by(Event.id).limit(limit)
        found = session.scalars(query).all()
    return tuple(EventView(one.id, one.kind, iso(one.at) or "", one.data) for one in found)


def model(broker: Broker, party: Party, task_id: str, *, format: ModelFormat = "npz") -> ModelFile:
    """The trained model, for the buyer who paid for it and nobody else, once the task has ended."""
    require(party, "buyer")
    with broker.database.write() as session:
        row = own_task(session, party, task_id)
        if row.state not in ENDED or row.parameters is None:
            raise Conflict(f"task {task_id} is {row.state}: there is no finished model")
        note(session, party, "model.download", task_id, detail=format)
        return model_file(row, vector(row.parameters), format)


def own_task(session: Session, party: Party, task_id: str) -> TaskRow:
    """The task if the party may see it, else NotFound."""
    row = session.get(TaskRow, task_id)
    if row is None or not (party.role == "operator" or row.buyer_id == party.id):
        raise NotFound("task", task_id)
    return row


def view_round(row: RoundRow) -> RoundView:
    """The row as a view."""
    return RoundView(
        row.index,
        row.state,
        row.bids,
        row.winners,
        row.delivered,
        row.budget_micros,
        row.spent_micros,
        row.error_bound,
        row.accuracy,
        row.balanced_accuracy,
        row.loss,
        iso(row.opened_at) or "",
        iso(row.closed_at),
    )


def _releases_with_names(task_id: str, index: int) -> Select[Release, str]:
    return (
        select(Release, PartyRow.name)
        .outerjoin(PartyRow, Release.party_id == PartyRow.id)
        .where(Release.task_id == task_id, Release.index == index)
        .order_by(Release.slot)
    )


def _view(row: TaskRow) -> TaskView:
    return TaskView(
        row.id,
        row.buyer_id,
        row.name,
        row.state,
        order_of(row),
        row.rounds,
        row.rounds_done,
        row.escrow_micros,
        row.spent_micros,
        row.refunded_micros,
        row.perturbation,
        row.dimension,
        row.baseline_accuracy,
        row.accuracy,
        row.error_bound,
        iso(row.created_at) or "",
        iso(row.started_at),
        iso(row.finished_at),
        iso(row.deadline_at) or "",
        row.error,
    )


def _drop(session: Session, row: TaskRow) -> None:
    session.execute(delete(Slot).where(Slot.task_id == row.id))
    session.delete(row)
