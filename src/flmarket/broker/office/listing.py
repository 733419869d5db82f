"""A task as everybody may see it: terms that both sides can sign, and how far it has come.

The terms are one JSON document, written down when the task is posted and never changed; `terms_hash` is the SHA-256 of
its text, which an owner accepts with her bid. Tasks of older versions have none: theirs are worked out as they are
read, from what was posted. What a listing leaves out is the buyer's: accuracy, who sold what, the seed. Her name is in
it if she said so (`broker.named`).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from flmarket import auctions
from flmarket.broker.core import Broker, Party
from flmarket.broker.errors import NotFound
from flmarket.broker.office.reconcile import RECONCILE
from flmarket.broker.office.runs import run_of_task
from flmarket.broker.requests import TaskRequest, order_of, trust_of
from flmarket.broker.stamps import iso
from flmarket.broker.tables import (
    PLAYABLE,
    Check,
    EvaluationSet,
    Event,
    PartyRow,
    Release,
    RoundRow,
    Slot,
    TaskRow,
    as_wire,
    how_many,
)
from flmarket.client import wire
from flmarket.errors import FlmarketError
from flmarket.ledger import AwardState, format_micros
from flmarket.market import kinds
from flmarket.report.formatting import finite_or_none

_LAST = 20
_PUBLIC = ("round", "rounds", "bids", "budget_micros", "awards", "held_micros", "delivered", "spent_micros")
_LINES = {
    "sampling": "A client who is drawn is paid her posted price for taking part; no round costs more than its cap.",
    "reward": "One reward for all rounds, shared by how much privacy each gives up for it, paid after the last round.",
}
_KEPT = {"exact": "always", "approximate": "nearly", "none": "not promised"}


def make_terms(broker: Broker, task: TaskRow, order: TaskRequest, buyer: str) -> str:
    """The terms of a task, as text whose hash is signed."""
    trust, lasting, examples = trust_of(order), order.lasting, broker.simulations.test_examples(task.spec)
    mechanism: dict[str, Any] = {"kind": order.kind, "about": kinds.about(order.kind), "auction": order.auction_name}
    if order.auction_name:
        claims = auctions.get(order.auction_name).guarantees
        mechanism["guarantees"] = {
            "no lie pays": _KEPT[str(claims.truthful)], "nobody is paid below her cost": _KEPT[str(claims.rational)],
            "within the budget": _KEPT[str(claims.budget_feasible)], "assumes": claims.assumes, "source": claims.source,
        }  # fmt: skip
    whole = order.model_dump(mode="json", exclude={"seed"})
    measured = "" if examples is None else f", {examples:,} examples"
    tested = f"test part of {order.data.registered}, held by the buyer{measured}"
    if order.broker.evaluation:
        own = _own(broker, order)
        digest = "unknown" if own is None else own.sha256
        tested = f"{order.broker.evaluation}, the buyer’s own{measured}, SHA-256 {digest}"
    document = {
        "version": 1, "task": task.id, "name": task.name, "buyer": buyer if order.broker.named else None,
        "purpose": order.broker.purpose, "posted_at": iso(task.created_at), "deadline_at": iso(task.deadline_at),
        "data": {
            "set": order.data.registered, "numbers in a record": task.features, "labels": list(task.classes),
            "columns": _columns(broker, task, order),
            "unit": "one record: its numbers, scaled as the data set says, and one label",
        },
        "model": {"name": order.model.name, "parameters": task.dimension},
        "evaluation": {
            "metric": "accuracy: the share of test examples that are classified correctly",
            "set": tested,
        },
        "mechanism": mechanism | {"aggregation": order.aggregation_name},
        "price": _LINES.get(order.kind) or auctions.about(order.auction_name) or "as the kind of market says",
        "privacy": {
            "trust": trust.badge, "where": trust.where, "unit": trust.unit, "against": trust.against,
            "protects": trust.protects, "noise": task.perturbation or "none",
            "counted": "in total, over all rounds" if lasting else "per round; an owner’s releases add up",
            "cap": "an owner’s own lifetime cap on ε, over all tasks",
        },
        "money": {
            "currency": broker.currency, "escrow": format_micros(task.escrow_micros),
            "budget": format_micros(order.budget_micros), "for": "all rounds" if lasting else "a round",
            "paid": "after the last round, for checked updates" if lasting else "each round, for checked updates",
        },
        "rounds": task.rounds,
        "order": whole,
    }  # fmt: skip
    return json.dumps(document, ensure_ascii=False, sort_keys=True, indent=1)


def _columns(broker: Broker, task: TaskRow, order: TaskRequest) -> list[str]:
    """What a record consists of, with units where they are known."""
    try:
        data = broker.simulations.data_of_spec(task.spec)
    except FlmarketError:  # it is not offered any more
        return []
    names = data.feature_names if data.encoding is None else (*data.encoding.numbers, *data.encoding.categories)
    row = _own(broker, order) if order.broker.evaluation else None
    units = {} if row is None or row.schema is None else {one["name"]: one["unit"] for one in row.schema["columns"]}
    return [f"{name} ({units[name]})" if units.get(name) else name for name in names]


def _own(broker: Broker, order: TaskRequest) -> EvaluationSet | None:
    with broker.database.read() as session:
        return session.get(EvaluationSet, order.broker.evaluation)


def terms_hash(text: str) -> str:
    """What stands for the terms."""
    return hashlib.sha256(text.encode()).hexdigest()


def terms_of(broker: Broker, session: Session, task: TaskRow) -> str:
    """A task's terms, as written down or, of an older version's, as they follow from its order."""
    if task.listing is not None:
        return task.listing
    buyer = session.get_one(PartyRow, task.buyer_id).name
    return make_terms(broker, task, order_of(task.spec), buyer)


def listing(broker: Broker, party: Party | None, task_id: str) -> wire.Listing:
    """A task for everybody, signed in or not."""
    with broker.database.read() as session:
        row = _listed(session, task_id)
        text = terms_of(broker, session, row)
        check = session.get(Check, RECONCILE)
        sold, best, awards = _sold(broker, session, row)
        last = session.execute(
            select(RoundRow.winners, RoundRow.delivered)
            .where(RoundRow.task_id == task_id, RoundRow.closed_at.is_not(None))
            .order_by(RoundRow.index.desc())
            .limit(_LAST)
        ).all()
        return as_wire(
            wire.Listing,
            row,
            terms=json.loads(text),
            terms_hash=terms_hash(text),
            mine=party is not None and row.buyer_id == party.id,
            open=row.state in PLAYABLE and order_of(row.spec).broker.open and row.spec["kind"] == "auction",
            places_free=how_many(session, Slot.task_id == task_id, Slot.party_id.is_(None)),
            locked_micros=row.left_micros,
            rounds_looked_at=len(last),
            rounds_delivered=sum(1 for winners, delivered in last if delivered and delivered == winners),
            updates_awarded=sum(winners for winners, _ in last),
            updates_delivered=sum(delivered for _, delivered in last),
            epsilon_most_total=finite_or_none(best) if sold else 0.0,
            receipts=awards,
            reconciled_at=None if check is None else iso(check.at),
            agrees=check is not None and not check.findings,
            run=run_of_task(broker, session, row),
        )


def terms_text(broker: Broker, task_id: str) -> str:
    """The very text of a task's terms, whose SHA-256 an owner accepts."""
    with broker.database.read() as session:
        return terms_of(broker, session, _listed(session, task_id))


def public_task(broker: Broker, task_id: str) -> wire.Task:
    """A task with what the buyer alone may know taken out, for pages that everybody may see."""
    with broker.database.read() as session:
        row = _listed(session, task_id)
        run = run_of_task(broker, session, row)
        found = as_wire(wire.Task, row, request=row.spec, error="", run=run, test_examples=None)
    return replace(found, accuracy=None, error_bound=None, buyer_id="")


def public_events(broker: Broker, task_id: str, *, after: int | None, limit: int = 200) -> tuple[wire.Progress, ...]:
    """What happened in a task after an event (the latest if it is None), in counts and sums only; oldest first."""
    with broker.database.read() as session:
        _listed(session, task_id)
        found = events_after(session, task_id, after, limit)
    return tuple(as_wire(wire.Progress, one, data=_counts(one.data)) for one in found)


def events_after(session: Session, task_id: str, after: int | None, limit: int) -> Iterator[Event]:
    """A task's events after one of them, or the latest if that is None; oldest first."""
    query = select(Event).where(Event.task_id == task_id)
    if after is not None:
        return iter(session.scalars(query.where(Event.id > after).order_by(Event.id).limit(limit)).all())
    return reversed(session.scalars(query.order_by(Event.id.desc()).limit(limit)).all())


def _counts(data: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: data[name] for name in (*_PUBLIC, "refunded_micros") if name in data}
    return known | {"winners": data["winners"]} if isinstance(data.get("winners"), int) else known


def _sold(broker: Broker, session: Session, task: TaskRow) -> tuple[int, float, int]:
    """How many owners have sold, the most that one of them has given up here, added up, and how many awards there are.
    It looks at every award of the task, and changes only with its rounds, or when a dispute is decided."""

    def count() -> tuple[int, float, int]:
        posted = Release.state == AwardState.POSTED.value
        given = func.sum(case((posted, Release.epsilon), else_=0.0)).label("given")
        sums = select(given, func.count().label("awards"), func.count().filter(posted).label("sold"))
        each = sums.where(Release.task_id == task.id).group_by(Release.slot).subquery()
        sellers = func.count().filter(each.c.sold > 0)
        sold, most, awards = session.execute(select(sellers, func.max(each.c.given), func.sum(each.c.awards))).one()
        return int(sold), float(most or 0.0), int(awards or 0)

    return broker.settled.get((task.id, task.state, task.rounds_done, task.spent_micros), count)


def _listed(session: Session, task_id: str) -> TaskRow:
    row = session.get(TaskRow, task_id)
    if row is None or row.state == "funding":
        raise NotFound("task", task_id)
    return row
