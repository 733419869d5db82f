"""A buyer's tasks: post, watch, cancel, pay, download.

Posting goes in three steps, each durable: the task is written down (`funding`), its budget moves into escrow, it joins
the queue. What was cut off in between is cleared up by the worker at any time: the task is queued if its money arrived
and fails if not. The ledger decides which, so a slow posting that the worker gave up moves no money any more.
"""

import io
import json
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
from sqlalchemy import ColumnElement, and_, delete, func, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from flmarket.bids import FloatArray
from flmarket.broker.core import Broker, Party, require
from flmarket.broker.errors import Conflict, KeyReused, NotFound
from flmarket.broker.office.evaluations import check_set, keep_set
from flmarket.broker.office.listing import events_after, make_terms
from flmarket.broker.office.notices import announce_end
from flmarket.broker.office.operator import note
from flmarket.broker.office.pseudonyms import (
    buyers_award,
    buyers_data,
    buyers_receipt,
    buyers_text,
    owner_name,
    reputations,
    simulated_reputations,
)
from flmarket.broker.office.runs import run_of_task, runs_of_tasks
from flmarket.broker.office.statements import credits, dispute_state
from flmarket.broker.requests import FLOWER, TaskRequest, check_playable, check_visible, order_of, trust_of
from flmarket.broker.stamps import derived_id, new_id, now
from flmarket.broker.tables import (
    ACTIVE,
    DisputeRow,
    Event,
    PartyRow,
    Release,
    RoundRow,
    Slot,
    TaskRow,
    as_wire,
    how_many,
    vector,
)
from flmarket.client import wire
from flmarket.client.wire import ENDED
from flmarket.errors import MissingDependency
from flmarket.files import csv_text
from flmarket.learning import Model, to_named
from flmarket.ledger import AwardState, format_micros
from flmarket.ledger.entry import EntryKind, loss_of
from flmarket.ledger.store import entries
from flmarket.privacy import event_to_dict
from flmarket.report.formatting import finite_or_none
from flmarket.report.model_card import model_zip

ModelFormat = Literal["zip", "npz", "safetensors"]


@dataclass(frozen=True)
class ModelFile:
    """A trained model as a file."""

    name: str
    content: bytes
    media_type: str = "application/octet-stream"


def post_task(broker: Broker, party: Party, request: TaskRequest, *, key: str | None = None) -> wire.Task:
    """Check the order, take its budget into escrow and queue it; the same `key` posts the same order once."""
    require(party, "buyer")
    check_playable(broker.settings, request)
    check_visible("task.name", request.task.name)
    check_visible("broker.purpose", request.broker.purpose)
    check_set(broker, party, request)
    task_id = new_id("t") if key is None else _keyed_id(broker, party, key)
    spec = request.model_dump(mode="json")
    with broker.database.read() as session:
        known = session.get(TaskRow, task_id)
    if known is not None:  # the key came back
        if known.buyer_id != party.id or known.spec != spec:
            raise KeyReused("this idempotency key belongs to another order: use a new one")
        return _fund(broker, party, known) if known.state == "funding" else get_task(broker, party, task_id)
    simulation = broker.simulations.build(task_id, request)
    kind = simulation.kind()
    at = now()
    row = TaskRow(
        id=task_id,
        buyer_id=party.id,
        name=request.task.name,
        state="funding",
        spec=spec,
        rounds=request.task.rounds,
        escrow_micros=request.escrow_micros,
        perturbation=kind.announcement(0).perturbation,
        dimension=kind.dimension,
        features=simulation.data.features,
        tensors=[[name, list(shape)] for name, shape in kind.model.tensors.items()],
        dtype=np.dtype(getattr(kind.model, "dtype", np.float64)).name,
        classes=list(simulation.data.classes),
        baseline_accuracy=simulation.data.baseline_accuracy,
        created_at=at,
        deadline_at=at + 1000 * request.broker.deadline_seconds,
        next_at=at,
    )
    row.listing = make_terms(broker, row, request, party.name)
    # on Flower, places are taken by owners with a node, as they come
    sizes = () if request.broker.engine == FLOWER else tuple(simulation.partition.sizes.tolist())
    places = [Slot(task_id=task_id, slot=slot, records=records) for slot, records in enumerate(sizes)]
    try:
        with broker.database.write() as session:
            active = how_many(session, TaskRow.buyer_id == party.id, TaskRow.state.in_(ACTIVE))
            if active >= broker.settings.max_tasks_per_buyer:
                raise Conflict(f"a buyer has at most {broker.settings.max_tasks_per_buyer} tasks under way")
            keep_set(session, request)
            session.add(row)
            session.flush()
            session.add_all(places)
    except IntegrityError:
        if key is None:
            raise  # 80 random bits do not repeat
        return post_task(broker, party, request, key=key)  # the same request, twice at once: the other one was first
    return _fund(broker, party, row)


def _keyed_id(broker: Broker, party: Party, key: str) -> str:
    """The id that follows from the key; the next one if a posting under it was given up, which frees the key."""
    ids = (derived_id("t", party.id, key, *([str(attempt)] if attempt else [])) for attempt in count())
    return next(task_id for task_id in ids if not broker.books.is_dropped(task_id))


def _fund(broker: Broker, party: Party, row: TaskRow) -> wire.Task:
    """Take a task's budget into escrow and queue it; Conflict, and no task, if the buyer has less."""
    try:
        broker.books.fund(row.id, party.id, row.escrow_micros)
    except Conflict as refusal:
        if broker.books.drop(row.id, row.buyer_id):
            with broker.database.write() as session:
                found = session.get(TaskRow, row.id, with_for_update=True)
                if found is not None and found.state == "funding":
                    session.execute(delete(Slot).where(Slot.task_id == found.id))
                    session.delete(found)
                note(session, party, "task.post", row.id, outcome="refused", detail=str(refusal))
            raise
    _queue(broker, party, row.id, "task.post")
    return get_task(broker, party, row.id)


def recover_posting(broker: Broker, task_id: str) -> None:
    """What is left of a posting that was cut off: the task is queued if its money arrived, else it has failed."""
    with broker.database.read() as session:
        row = session.get(TaskRow, task_id)
    if row is None:  # refused meanwhile, for lack of money
        return
    if not broker.books.drop(task_id, row.buyer_id):
        _queue(broker, None, task_id, "task.recover")
        return
    with broker.database.write() as session:
        found = session.get(TaskRow, task_id, with_for_update=True)
        if found is not None and found.state == "funding":
            found.state, found.escrow_micros, found.finished_at = "failed", 0, now()
            found.error = "its budget was not taken into escrow"
            announce_end(session, found)
            note(session, None, "task.recover", task_id, outcome="dropped")


def _queue(broker: Broker, party: Party | None, task_id: str, action: str) -> None:
    """The task's money is in its account: let it be played."""
    with broker.database.write() as session:
        found = session.get_one(TaskRow, task_id, with_for_update=True)
        if found.state == "funding":
            found.state = "queued"
            note(session, party, action, task_id, detail=f"{found.escrow_micros} micro-units in escrow")
            session.add(Event(task_id=task_id, kind="queued", data={"rounds": found.rounds}, at=now()))
    broker.wake.set()


def list_tasks(
    broker: Broker, party: Party, *, limit: int = 50, before: str | None = None, search: str = ""
) -> wire.TaskPage:
    """One's own tasks, or the operator's view of all, newest first; or those whose name holds `search`."""
    require(party, "buyer", "operator")
    query = select(TaskRow).order_by(TaskRow.created_at.desc(), TaskRow.id.desc()).limit(limit + 1)
    if party.role == "buyer":
        query = query.where(TaskRow.buyer_id == party.id)
    if search:
        query = query.where(TaskRow.name.icontains(search, autoescape=True) | (TaskRow.id == search))
    with broker.database.read() as session:
        if before is not None:
            last = session.get(TaskRow, before)
            if last is None or (party.role == "buyer" and last.buyer_id != party.id):
                raise NotFound("task", before)
            query = query.where(tuple_(TaskRow.created_at, TaskRow.id) < (last.created_at, before))
        rows = session.scalars(query).all()
        runs = runs_of_tasks(broker, session, rows[:limit], whole=party.role == "operator")
    items = tuple(_view(broker, party, row, runs.get(row.id)) for row in rows[:limit])
    return wire.TaskPage(items, items[-1].id if len(rows) > limit else None)


def get_task(broker: Broker, party: Party, task_id: str) -> wire.Task:
    """A task of one's own, or any for the operator."""
    with broker.database.read() as session:
        row = own_task(session, party, task_id)
        run = run_of_task(broker, session, row, whole=party.role == "operator")
    return _view(broker, party, row, run)


def cancel_task(broker: Broker, party: Party, task_id: str) -> wire.Task:
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


def rounds(broker: Broker, party: Party, task_id: str, *, limit: int = 1000, start: int = 0) -> wire.RoundPage:
    """The rounds of a task, oldest first, from `start` on."""
    with broker.database.read() as session:
        own_task(session, party, task_id)
        query = select(RoundRow).where(RoundRow.task_id == task_id, RoundRow.index >= start).order_by(RoundRow.index)
        rows = session.scalars(query.limit(limit + 1)).all()
    found = tuple(as_wire(wire.Round, row) for row in rows[:limit])
    return wire.RoundPage(found, rows[limit].index if len(rows) > limit else None)


def round_detail(
    broker: Broker, party: Party, task_id: str, index: int, *, limit: int | None = None, start: int = 0
) -> wire.RoundDetail:
    """One round and its awards, or `limit` of them from `start` on. The operator sees owners as they are, a buyer by
    their names in this task; in the order of places, which says nothing of who they are."""
    with broker.database.read() as session:
        own_task(session, party, task_id)
        row = session.get(RoundRow, (task_id, index))
        if row is None:
            raise NotFound("round", str(index))
        sold: tuple[ColumnElement[bool], ...] = (Release.task_id == task_id, Release.index == index)
        query = select(Release, PartyRow.name, dispute_state).outerjoin(PartyRow, Release.party_id == PartyRow.id)
        query = query.outerjoin(DisputeRow, DisputeRow.award_id == Release.award_id)
        named = party.role == "operator"
        slots = session.scalars(select(Release.slot).where(*sold)).all()
        names = {slot: f"owner-{slot}" if named else owner_name(broker, task_id, slot) for slot in slots}
        order = sorted(slots, key=lambda slot: slot if named else names[slot])[start:][:limit]
        reached = start + len(order)
        shown = {slot: place for place, slot in enumerate(order)}
        if limit is not None:
            sold = *sold, Release.slot.in_(order)
        releases = sorted(session.execute(query.where(*sold)).all(), key=lambda found: shown[found[0].slot])
        # What each award buys, as the ledger has it; rows have one number.
        hold = and_(entries.c.ref == Release.award_id, entries.c.kind == EntryKind.HOLD.value)
        terms = session.execute(select(entries.c.ref, entries.c.detail).join(Release, hold).where(*sold))
        losses = {ref: event_to_dict(loss_of(json.loads(detail))) for ref, detail in terms}
        known = reputations(session, {one.party_id for one, _, _ in releases if one.party_id is not None})
        drawn = simulated_reputations(session, task_id, [one.slot for one, _, _ in releases if one.party_id is None])
    awards = [
        as_wire(
            wire.Award,
            one,
            epsilon=finite_or_none(one.epsilon),
            loss=losses.get(one.award_id, {}),
            slot=one.slot if named else None,
            owner=(name if named and name else names[one.slot]),
            reason=one.reason if named else "",  # it may quote her totals
            award_id=one.award_id if named else buyers_award(broker, one.award_id),
            dispute=dispute,
            reputation=drawn.get(one.slot) if one.party_id is None else known.get(one.party_id),
        )
        for one, name, dispute in releases
    ]
    return wire.RoundDetail(as_wire(wire.Round, row), tuple(awards), reached if reached < len(slots) else None)


def bill(broker: Broker, party: Party, task_id: str, *, lines: bool = True) -> wire.Bill:
    """What was paid for, round by round; or the sums alone."""
    frozen = Release.task_id == task_id, Release.state == AwardState.PENDING.value
    disputed = select(func.coalesce(func.sum(Release.price_micros), 0)).join(
        DisputeRow, DisputeRow.award_id == Release.award_id
    )
    with broker.database.read() as session:
        row = own_task(session, party, task_id)
        query = select(RoundRow).where(RoundRow.task_id == task_id).order_by(RoundRow.index)
        played = session.scalars(query).all() if lines else ()
        kept = int(session.scalar(disputed.where(*frozen)) or 0)
        extra = int(session.scalar(credits(DisputeRow.task_id == task_id, "refund")) or 0)
    listed = tuple(as_wire(wire.BillLine, one, deliveries=one.delivered) for one in played if one.closed_at)
    return as_wire(wire.Bill, row, task_id=task_id, lines=listed, disputed_micros=kept, credited_micros=extra)


def bill_lines(found: wire.Bill) -> list[tuple[str, str, int]]:
    """The bill's lines as they are written out, which add up to the deposit: what, how many updates, micro-units."""
    lines = [(f"round {one.index + 1}", f"{one.deliveries}", one.spent_micros) for one in found.lines]
    if found.disputed_micros:
        lines.append(("in escrow until a dispute is decided", "", found.disputed_micros))
    return [
        *lines,
        ("returned", "", found.refunded_micros),
        ("still in escrow", "", found.left_micros - found.disputed_micros),
    ]


def bill_csv(broker: Broker, party: Party, task_id: str) -> str:
    """The bill as a table: a line for each round and where the rest is, exact, which add up to the deposit."""
    found = bill(broker, party, task_id)
    lines = (*bill_lines(found), ("deposit", "", found.escrow_micros))
    amounts = ((what, updates, format_micros(micros)) for what, updates, micros in lines)
    return csv_text(("what", "updates", "amount"), amounts)


def receipts(
    broker: Broker, party: Party, task_id: str, index: int | None, *, limit: int | None = None, start: int = 0
) -> wire.ReceiptPage:
    """The ledger's receipts of a round, or of all rounds: sealed for the buyer; one's own for an owner; or `limit` of
    them from `start` on."""
    with broker.database.read() as session:
        query = select(Release).where(Release.task_id == task_id).order_by(Release.index, Release.slot)
        query = query.offset(start).limit(None if limit is None else limit + 1)
        if index is not None:
            query = query.where(Release.index == index)
        if party.role == "owner":
            query = query.where(Release.party_id == party.id)
        else:
            own_task(session, party, task_id)
        rows = session.scalars(query).all()
    if not rows and party.role == "owner":
        raise NotFound("receipt", f"{task_id}/{index}")
    found, sealed = rows[:limit], party.role == "buyer"
    known = broker.books.ledger.receipts(one.award_id for one in found)
    made = []
    for one in found:
        receipt = buyers_receipt(broker, known[one.award_id]) if sealed else known[one.award_id]
        named = buyers_award(broker, one.award_id) if sealed else one.award_id
        told = {"epsilon": finite_or_none(one.epsilon), "document": receipt.to_dict()}
        made.append(as_wire(wire.Receipt, one, award_id=named, **told))
    return wire.ReceiptPage(tuple(made), start + len(found) if len(rows) > len(found) else None)


def events(
    broker: Broker, party: Party, task_id: str, *, after: int | None = 0, limit: int = 200
) -> tuple[wire.Progress, ...]:
    """What happened in a task after the event `after`; the latest if that is None. Oldest first."""
    with broker.database.read() as session:
        own_task(session, party, task_id)
        found = events_after(session, task_id, after, limit)
    return tuple(as_wire(wire.Progress, one, data=buyers_data(broker, party, task_id, one.data)) for one in found)


def model(broker: Broker, party: Party, task_id: str, *, format: ModelFormat = "npz") -> ModelFile:
    """The trained model, for the buyer who paid for it and nobody else, once the task has ended."""
    require(party, "buyer")
    with broker.database.write() as session:
        row = own_task(session, party, task_id)
        if row.state not in ENDED or row.parameters is None:
            raise Conflict(f"task {task_id} is {row.state}: there is no finished model")
        note(session, party, "model.download", task_id, detail=format)
        if format != "zip":
            return model_file(row, vector(row.parameters), format)
        _ = row.checkpoint  # read while the session is there
        sold = list(session.scalars(select(Release.award_id).where(Release.task_id == task_id)))
    return _bundle(broker, party, row, sold)


def own_task(session: Session, party: Party, task_id: str) -> TaskRow:
    """The task if the party may see it, else NotFound."""
    row = session.get(TaskRow, task_id)
    if row is None or not (party.role == "operator" or row.buyer_id == party.id):
        raise NotFound("task", task_id)
    return row


def _view(broker: Broker, party: Party, row: TaskRow, run: wire.FlowerRun | None) -> wire.Task:
    error = row.error if party.role == "operator" else buyers_text(broker, row.error)
    examples = broker.simulations.test_examples(row.spec)
    return as_wire(wire.Task, row, request=row.spec, error=error, run=run, test_examples=examples)


# --- the model as a file ----------------------------------------------------------------------------------------------


def _bundle(broker: Broker, party: Party, task: TaskRow, sold: list[str]) -> ModelFile:
    """All that it takes to use the model, and what it cost, in one zip."""
    order = order_of(task.spec)
    spec = broker.simulations.build(task.id, order)
    kind = spec.kind(task.id)
    assert task.parameters is not None
    kind.parameters = vector(task.parameters)
    if task.checkpoint is not None:
        with np.load(io.BytesIO(task.checkpoint), allow_pickle=False) as saved:
            if "best" in saved:
                kind.best, kind.notes = saved["best"], json.loads(saved["notes"].tobytes())
    documents = [one.document for one in receipts(broker, party, task.id, None).items]
    content = model_zip(
        kind, spec.data, broker.books.ledger, trust_of(order),
        rounds_played=task.rounds_done, documents=documents, title=task.name,
        awards=[broker.books.ledger.award(one) for one in sold],
        names={"auction": order.auction_name, "aggregation": order.aggregation_name, "perturbation": task.perturbation},
    )  # fmt: skip
    return ModelFile(f"{task.id}.zip", content, "application/zip")


def model_file(task: TaskRow, parameters: FloatArray, format: ModelFormat) -> ModelFile:
    """The model's own named arrays, for NumPy or as safetensors; and what it is, in words."""
    # what is left of a model when only its arrays matter
    shapes = SimpleNamespace(tensors={name: tuple(shape) for name, shape in task.tensors}, dtype=task.dtype)
    arrays = to_named(cast(Model, shapes), parameters)
    about = {"task": task.id, "name": task.name, "classes": json.dumps(task.classes), "rounds": str(task.rounds_done)}
    if format == "npz":
        out = io.BytesIO()
        np.savez(out, allow_pickle=False, **{"about": np.array(json.dumps(about)), **arrays})
        return ModelFile(f"{task.id}.npz", out.getvalue())
    try:
        from safetensors.numpy import save
    except ImportError:
        raise MissingDependency("safetensors", "app") from None
    return ModelFile(f"{task.id}.safetensors", save(arrays, metadata=about))
