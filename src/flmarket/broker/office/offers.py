"""Tasks as owners see them, and owners' standing bids.

A registered owner who bids takes the next free place of the task, with the records that lie there; her bid counts in
every round until she replaces or withdraws it. She never bids more privacy than her lifetime cap leaves. Flower tasks
are not here: owners' own nodes bid in them.
"""

from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from sqlalchemy import BindParameter, Integer, bindparam, case, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, undefer

from flmarket import auctions
from flmarket.bids import BidProfile, Kind, Valuations
from flmarket.broker.core import Broker, Party, require
from flmarket.broker.errors import Conflict, NotFound
from flmarket.broker.office.listing import terms_hash, terms_of
from flmarket.broker.office.operator import note
from flmarket.broker.requests import FLOWER, BidRequest, TaskRequest, Valuation, public_terms
from flmarket.broker.stamps import now
from flmarket.broker.tables import PLAYABLE, Bid, Slot, TaskRow, as_wire
from flmarket.client import wire
from flmarket.errors import InvalidInput
from flmarket.ledger.entry import EntryKind, Line, cap_of
from flmarket.ledger.store import entries
from flmarket.privacy import unit_of


def list_offers(broker: Broker, party: Party, *, limit: int = 50, before: str | None = None) -> wire.OfferPage:
    """Tasks that registered owners can sell to, newest first."""
    require(party, "owner", "operator")
    query = select(TaskRow).where(TaskRow.state.in_(PLAYABLE)).order_by(TaskRow.id.desc()).limit(4 * limit + 1)
    if before is not None:
        query = query.where(TaskRow.id < before)
    with broker.database.read() as session:
        rows = session.scalars(query.options(undefer(TaskRow.listing))).all()
        found = [row for row in rows if _takes_bids(broker.order(row))]
        items = _views(broker, session, found[:limit], party)
    more = len(found) > limit or len(rows) > 4 * limit
    return wire.OfferPage(items, (items[-1].task_id if items else rows[-1].id) if more else None)


def my_offers(broker: Broker, party: Party, *, limit: int, task_id: str = "") -> tuple[tuple[wire.Offer, ...], bool]:
    """For an owner's desk: this task, those in which her bid stands, then the newest; and whether there are more."""
    require(party, "owner")
    asked = {"party": party.id, "task": task_id, "most": 4 * limit + 1}
    with broker.database.read() as session:
        rows = session.scalars(_MINE, asked).all()
        found = [row for row in rows if _takes_bids(broker.order(row))]
        return _views(broker, session, found[:limit], party), len(found) > limit or len(rows) > 4 * limit


def get_offer(broker: Broker, party: Party, task_id: str) -> wire.Offer:
    """One offer; also an ended one, if the owner has a place in it."""
    require(party, "owner", "operator")
    with broker.database.read() as session:
        return _views(broker, session, [_offer(broker, session, party, task_id)], party)[0]


def place_bid(broker: Broker, party: Party, task_id: str, request: BidRequest) -> wire.Bid:
    """Bid, or replace one's bid; the first one takes a place in the task."""
    require(party, "owner")
    if request.valuation.kind == "tabulated":
        valuations_of(request.valuation)  # a table that is no valuation is refused here
    for _ in range(3):  # again if somebody took the place in between (PostgreSQL)
        with suppress(IntegrityError), broker.database.write() as session:
            return _place(broker, session, party, task_id, request)
    raise Conflict("the task is busy, try again")


def withdraw_bid(broker: Broker, party: Party, task_id: str) -> wire.Bid:
    """Stay out of later rounds; the place is kept."""
    require(party, "owner")
    with broker.database.write() as session:
        bid = _bid(session, party, task_id)
        if bid.active:
            bid.active = False
            note(session, party, "bid.withdraw", task_id)
    return _view_bid(bid)


def my_bid(broker: Broker, party: Party, task_id: str) -> wire.Bid:
    """One's own standing bid."""
    require(party, "owner")
    with broker.database.read() as session:
        return _view_bid(_bid(session, party, task_id))


def as_profile(valuation: Valuation, privacy_budget: float, data_size: int) -> BidProfile:
    """One owner's bid as mechanisms read it."""
    return BidProfile(valuations_of(valuation), [privacy_budget], [float(data_size)])


def valuations_of(bid: Valuation | Bid) -> Valuations:
    """What a bid says a loss is worth, as mechanisms read it."""
    if bid.kind == "tabulated":
        return Valuations.tabulated([bid.grid or []], [bid.values or []])
    return Valuations([int(Kind[bid.kind.upper()])], [bid.rate or 0.0])


def _view_bid(bid: Bid | SimpleNamespace) -> wire.Bid:
    tables = {"grid": bid.grid, "values": bid.values}
    return as_wire(wire.Bid, bid, **{name: None if one is None else tuple(one) for name, one in tables.items()})


def _place(broker: Broker, session: Session, party: Party, task_id: str, request: BidRequest) -> wire.Bid:
    # prepared statements, straight to the connection: a thousand owners bid within a few seconds of a task's posting
    connection, hers = session.connection(), {"task": task_id, "party": party.id}
    found = connection.execute(_STANDING, hers).one_or_none()
    if found is None or (found.slot is None and not (found.state in PLAYABLE and _open_task(broker, session, task_id))):
        raise NotFound("offer", task_id)
    if not _open_task(broker, session, task_id):
        raise Conflict(f"bids for task {task_id} come from owners' own nodes: what owner.toml says is bid")
    if found.state not in PLAYABLE:
        raise Conflict(f"task {task_id} is {found.state}: it takes no more bids")
    if found.cap is None or unit_of(cap_of(Line(EntryKind.CAP, "", detail=found.cap))) != "update":
        raise Conflict("your cap is not one for whole updates, which this task buys: sell them as a party of their own")
    place = found if found.slot is not None else connection.execute(_CLAIM, hers).one_or_none()
    if place is None:
        raise Conflict(f"all places of task {task_id} are taken")
    size = place.records if request.data_size is None else request.data_size
    if size > place.records:
        raise InvalidInput("data_size", size, f"at most the {place.records} records of your place in this task")
    if request.terms is not None and request.terms != terms_hash(
        terms_of(broker, session, session.get_one(TaskRow, task_id))
    ):
        raise Conflict(f"these are not the terms of task {task_id}: read them again before you accept them")
    offered: dict[str, Any] = dict(request.valuation) | {
        "slot": place.slot,
        "privacy_budget": request.privacy_budget,
        "data_size": size,
        "placed_at": now(),
        "active": True,
        "terms": request.terms,
    }
    if found.slot is None or not connection.execute(_REPLACE, hers | offered).rowcount:
        connection.execute(_BID, {"task_id": task_id, "party_id": party.id} | offered)
    note(session, party, "bid.place", task_id)
    return _view_bid(SimpleNamespace(task_id=task_id, **offered))


# a task's state, and the caller's place in it and cap
_cap = select(entries.c.detail).where(entries.c.owner == bindparam("party"), entries.c.kind == EntryKind.CAP.value)
_STANDING = (
    select(
        TaskRow.state,
        Slot.slot,
        Slot.records,
        _cap.order_by(entries.c.seq.desc()).limit(1).scalar_subquery().label("cap"),
    )
    .outerjoin(Slot, (Slot.task_id == TaskRow.id) & (Slot.party_id == bindparam("party")))
    .where(TaskRow.id == bindparam("task"))
)
_FREE = select(Slot.slot).where(Slot.task_id == bindparam("task"), Slot.party_id.is_(None)).order_by(Slot.slot).limit(1)
# the first free place becomes hers
_CLAIM = (
    update(Slot)
    .where(Slot.task_id == bindparam("task"), Slot.slot == _FREE.with_for_update(skip_locked=True).scalar_subquery())
    .values(party_id=bindparam("party"))
    .returning(Slot.slot, Slot.records)
)
_BID = insert(Bid)
# those under way, as `my_offers` sorts them
_hers = (Bid.task_id == TaskRow.id) & (Bid.party_id == bindparam("party")) & Bid.active
_MINE = (
    select(TaskRow)
    .outerjoin(Bid, _hers)
    .where(TaskRow.state.in_(PLAYABLE))
    .order_by(case((TaskRow.id == bindparam("task"), 0), (Bid.task_id.is_not(None), 1), else_=2), TaskRow.id.desc())
    .limit(bindparam("most", type_=Integer))
    .options(undefer(TaskRow.listing))
)
# of some tasks: places that nobody has, and the caller's own places and bids
_these: BindParameter[Any] = bindparam("tasks", expanding=True)
_UNCLAIMED = (
    select(Slot.task_id, func.count()).where(Slot.task_id.in_(_these), Slot.party_id.is_(None)).group_by(Slot.task_id)
)
_PLACES = select(Slot).where(Slot.task_id.in_(_these), Slot.party_id == bindparam("party"))
_BIDS = select(Bid).where(Bid.task_id.in_(_these), Bid.party_id == bindparam("party"))
_REPLACE = update(Bid).where(Bid.task_id == bindparam("task"), Bid.party_id == bindparam("party"))


def _open_task(broker: Broker, session: Session, task_id: str) -> bool:
    """`_takes_bids`, remembered: an order does not change."""
    known = ("takes bids", task_id)
    return broker.settled.get(known, lambda: _takes_bids(broker.order(session.get_one(TaskRow, task_id))))


def _truthful(broker: Broker, auction: str) -> str:
    return broker.settled.get(("truthful", auction), lambda: str(auctions.get(auction).guarantees.truthful))


def _offer(broker: Broker, session: Session, party: Party, task_id: str) -> TaskRow:
    row = session.get(TaskRow, task_id)
    listed = row is not None and row.state in PLAYABLE and _takes_bids(broker.order(row))
    if row is None or not (listed or party.role == "operator" or _slot(session, party, task_id)):
        raise NotFound("offer", task_id)
    return row


def _slot(session: Session, party: Party, task_id: str) -> Slot | None:
    return session.scalars(select(Slot).where(Slot.task_id == task_id, Slot.party_id == party.id)).first()


def _takes_bids(order: TaskRequest) -> bool:
    """Whether registered owners bid here; on Flower their nodes do."""
    return order.kind == "auction" and order.broker.open and order.broker.engine != FLOWER


def _bid(session: Session, party: Party, task_id: str) -> Bid:
    bid = session.get(Bid, (task_id, party.id))
    if bid is None:
        raise NotFound("bid", task_id)
    return bid


def _views(broker: Broker, session: Session, rows: Sequence[TaskRow], party: Party) -> tuple[wire.Offer, ...]:
    """Offers as an owner sees them, in as few queries as one."""
    if not rows:
        return ()
    asked = {"tasks": [row.id for row in rows], "party": party.id}
    free: dict[str, int] = dict(session.execute(_UNCLAIMED, asked).all())
    slots = {slot.task_id: slot for slot in session.scalars(_PLACES, asked)}
    bids = {bid.task_id: _view_bid(bid) for bid in session.scalars(_BIDS, asked)}
    made = []
    for row in rows:
        order, slot = broker.order(row), slots.get(row.id)
        made.append(
            as_wire(
                wire.Offer,
                row,
                task_id=row.id,
                **public_terms(order),
                truthful=_truthful(broker, order.mechanism.auction),
                bidders_per_round=order.task.bidders_per_round,
                places_free=free.get(row.id, 0),
                slot=None if slot is None else slot.slot,
                records=None if slot is None else slot.records,
                bid=bids.get(row.id),
                terms_hash=terms_hash(terms_of(broker, session, row)),
            )
        )
    return tuple(made)
