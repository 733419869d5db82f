"""Disputes: an owner or the buyer does not agree with one award, and the operator decides who gets its price.

Whether the price can still be kept back is the ledger's to say, at the moment of asking. While it is in escrow it is
frozen there (`Ledger.freeze`): neither the round nor a cancelled or ended task moves it, all other awards go on, and
only the operator's decision ends it, once, in one call with the dispute. An award that has ended stays as it is: if the
operator decides the other way, she credits the price from her own money, as a deposit under the dispute's id.

Opening writes the row first and freezes then: cut off in between, it is a dispute about whatever the award came to. A
decision is written down before anything is booked (`deciding`); every step after that can be repeated, by the operator
or by the worker, and leads to the same books.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Integer, Select, and_, bindparam, func, select, tuple_
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.errors import Conflict, NotFound
from flmarket.broker.office.notices import announce, announce_awards
from flmarket.broker.office.operator import note
from flmarket.broker.office.pseudonyms import buyers_award, owner_name
from flmarket.broker.requests import DecisionRequest, DisputeRequest, EventName, order_of
from flmarket.broker.stamps import derived_id, iso, now
from flmarket.broker.tables import DisputeRow, PartyRow, Release, Role, RoundRow, Slot, TaskRow, as_wire, how_many
from flmarket.client import wire
from flmarket.errors import PrivacyBudgetExhausted, SettlementError
from flmarket.ledger import Award, AwardState, Resolution, format_micros
from flmarket.ledger import Release as Given
from flmarket.ledger.entry import RESOLUTIONS, EntryKind
from flmarket.ledger.store import entries

_OPEN = ("open", "deciding")
_DECIDED = {"pay": AwardState.POSTED, "refund": AwardState.VOIDED}
_ENDS = [kind.value for kind in RESOLUTIONS.values()]


def open_dispute(broker: Broker, party: Party, request: DisputeRequest) -> wire.Dispute:
    """Dispute an award of one's own; its price is frozen if it is still in escrow. Repeating it changes nothing."""
    require(party, "buyer", "owner")
    with broker.database.read() as session:
        task, award_id = _award_of(broker, session, party, request.award_id)
    award = broker.books.find(award_id)
    if award is None or award.buyer != task.id or (party.role == "owner" and award.owner != party.id):
        raise NotFound("award", request.award_id)
    pending = award.state is AwardState.PENDING
    if pending and order_of(task.spec).lasting:
        raise Conflict("awards of this task run over all rounds: dispute them once they have ended")
    dispute_id = derived_id("dp", award_id)
    with broker.database.write() as session:
        session.get_one(PartyRow, party.id, with_for_update=True)  # she counts her disputes one after another
        row = session.get(DisputeRow, dispute_id)
        if row is None:
            ended, seconds = _release_of(session, award_id), broker.settings.dispute_seconds
            if not pending and ended is not None and ended.at + 1000 * seconds < now():
                days = f"{seconds / 86_400:.3g} days"
                raise Conflict(f"an award can be disputed within {days} after it has ended; these are over")
            most = broker.settings.max_disputes_per_party
            if how_many(session, DisputeRow.opened_by == party.id, DisputeRow.state.in_(_OPEN)) >= most:
                raise Conflict(f"a party has at most {most} open disputes: wait until one of yours is decided")
            row = _new(broker, session, party, task, award, request.reason)
        elif (row.opened_by, row.reason) != (party.id, request.reason):
            raise Conflict(f"there is a dispute about this award already, which is {row.state}: each award has one")
    if pending:
        with suppress(SettlementError):  # it has ended meanwhile: the ledger knows who came first
            broker.books.ledger.freeze(award_id)
    return get_dispute(broker, party, dispute_id)


def list_disputes(
    broker: Broker, party: Party, *, limit: int = 50, before: str | None = None, is_open: bool | None = None
) -> wire.DisputePage:
    """Those that concern one, or all for the operator, newest first; or only those that are open, or are not."""
    query, undecided = _lists(party.role, is_open)
    hers = {"party": party.id, "most": limit + 1}
    with broker.database.read() as session:
        if before is not None:
            one = select(DisputeRow).where(DisputeRow.id == before, _concerns(party.role))
            last = session.scalars(one, hers).one_or_none()
            if last is None:
                raise NotFound("dispute", before)
            query = query.where(tuple_(DisputeRow.opened_at, DisputeRow.id) < (last.opened_at, last.id))
        rows = session.execute(query, hers).all()
        if is_open is not False and before is None and len(rows) <= limit:  # all of them are here
            undone = sum(row[0].state in _OPEN for row in rows)
        else:
            undone = session.scalar(undecided, hers) or 0
    items = tuple(_view(broker, party, row) for row in rows[:limit])
    return wire.DisputePage(items, items[-1].id if len(rows) > limit else None, undone)


def get_dispute(broker: Broker, party: Party, dispute_id: str) -> wire.Dispute:
    """One dispute that concerns one."""
    with broker.database.read() as session:
        one = _shown(DisputeRow.id == dispute_id, _concerns(party.role))
        found = session.execute(one, {"party": party.id}).one_or_none()
    if found is None:
        raise NotFound("dispute", dispute_id)
    return _view(broker, party, found)


def decide(broker: Broker, party: Party, dispute_id: str, request: DecisionRequest) -> wire.Dispute:
    """The operator's: who gets the price, and why. Decided once; the same decision again changes nothing."""
    require(party, "operator")
    with broker.database.write() as session:
        row = session.get(DisputeRow, dispute_id, with_for_update=True)
        if row is None:
            raise NotFound("dispute", dispute_id)
        if row.state != "open" and (row.decision, row.note) != (request.decision, request.note):
            raise Conflict(f"this dispute is decided: {row.decision}")
        if _release_of(session, row.award_id) is None:
            raise Conflict("the award's round is still being played: decide when it is over")
        if row.state == "open":
            row.state, row.decision, row.note, row.decided_at = "deciding", request.decision, request.note, now()
    carry_out(broker, party, dispute_id)
    return get_dispute(broker, party, dispute_id)


def carry_out(broker: Broker, party: Party | None, dispute_id: str) -> None:
    """Book what was decided; repeating it changes nothing. Conflict, and the dispute is open again, if it cannot be."""
    with broker.database.read() as session:
        row = session.get_one(DisputeRow, dispute_id)
        given = and_(entries.c.ref == row.award_id, entries.c.kind == EntryKind.RELEASE.value)
        released = session.scalar(select(entries.c.seq).where(given)) is not None
    if row.state != "deciding":
        return
    books, state = broker.books, _DECIDED[row.decision]
    award, credited, returned = books.ledger.award(row.award_id), 0, False
    paid = award.state is AwardState.POSTED
    try:
        if award.state is AwardState.PENDING:
            # an owner with a cap is paid on record only: it is charged with what she was awarded for
            left = Given(award.id, "as-awarded", award.loss)
            owes = state is AwardState.POSTED and not released and books.ledger.cap(award.owner) is not None
            reason = f"dispute {row.id}: {row.note}"
            award = books.ledger.decide(Resolution(award.id, state, reason, left if owes else None))
        elif paid != (state is AwardState.POSTED):
            payee = row.buyer_id if paid else row.owner_id
            if payee is not None and row.price_micros:
                books.ledger.deposit(row.id, payee, row.price_micros)
                credited = row.price_micros
    except PrivacyBudgetExhausted:
        with broker.database.write() as session:
            again = session.get_one(DisputeRow, dispute_id, with_for_update=True)
            again.state, again.decision, again.note, again.decided_at = "open", "", "", None
        raise Conflict("her cap does not allow what she would be paid for: refund it, and settle outside") from None
    with broker.database.read() as session:
        sold = _release_of(session, row.award_id)
    if sold is not None and sold.state == AwardState.PENDING and award.state is not AwardState.POSTED:
        returned = books.give_back(award, row.buyer_id)
    with broker.database.write() as session:
        _write_down(broker, session, party, dispute_id, award, credited, returned)


def unfinished(session: Session, before: int) -> Sequence[str]:
    """Decisions that were written down before a time and are not booked: whoever did so was cut off."""
    cut_off = DisputeRow.state == "deciding", DisputeRow.decided_at < before
    return session.scalars(select(DisputeRow.id).where(*cut_off)).all()


def _award_of(broker: Broker, session: Session, party: Party, named: str) -> tuple[TaskRow, str]:
    """The task and the id of an award that a party names: a buyer by the owner's name in her task."""
    task_id, index, last = named.split("/")
    task = session.get(TaskRow, task_id)
    if task is None or (party.role == "buyer" and task.buyer_id != party.id):
        raise NotFound("award", named)
    if party.role == "owner":
        return task, named
    for slot in session.scalars(select(Slot.slot).where(Slot.task_id == task_id)):
        if owner_name(broker, task_id, slot) == last:
            return task, f"{task_id}/{index}/{slot}"
    raise NotFound("award", named)


def _release_of(session: Session, award_id: str) -> Release | None:
    return session.scalars(select(Release).where(Release.award_id == award_id)).first()


def _new(broker: Broker, session: Session, party: Party, task: TaskRow, award: Award, reason: str) -> DisputeRow:
    dispute_id, place = derived_id("dp", award.id), int(award.id.rpartition("/")[2])
    owner = award.owner if session.get(PartyRow, award.owner) is not None else None
    row = DisputeRow(id=dispute_id, award_id=award.id, task_id=task.id, index=award.round_index, slot=place)
    row.owner_id, row.buyer_id, row.opened_by, row.reason = owner, task.buyer_id, party.id, reason
    row.price_micros, row.state, row.opened_at = award.price_micros, "open", now()
    session.add(row)
    session.flush()
    _tell(broker, session, row, "dispute.opened")
    note(session, party, "dispute.open", task.id, detail=f"{award.id}, {dispute_id}")
    return row


def _write_down(
    broker: Broker, session: Session, party: Party | None, dispute_id: str, award: Award, credited: int, returned: bool
) -> None:
    """The dispute is decided, and bill and statement follow the ledger; once."""
    row = session.get_one(DisputeRow, dispute_id, with_for_update=True)
    if row.state != "deciding":
        return
    task = session.get_one(TaskRow, row.task_id, with_for_update=True)
    sold = _release_of(session, row.award_id)
    if sold is not None and sold.state == AwardState.PENDING:
        sold.state, sold.reason = award.state.value, award.reason
        if award.state is AwardState.POSTED:
            played = session.get_one(RoundRow, (row.task_id, sold.index))
            played.spent_micros, played.delivered = played.spent_micros + row.price_micros, played.delivered + 1
            task.spent_micros += row.price_micros
            announce_awards(session, "payment", task, sold.index, [award], state=AwardState.POSTED)
        elif returned:
            task.refunded_micros += row.price_micros
    row.state, row.credited_micros = "decided", credited
    _tell(broker, session, row, "dispute.decided")
    note(session, party, "dispute.decide", row.task_id, detail=f"{row.award_id}, {dispute_id}: {row.decision}")


def _tell(broker: Broker, session: Session, row: DisputeRow, event: EventName) -> None:
    """Both sides and the operators, each in the names that are hers to know; reasons stay with the operator."""
    data: dict[str, Any] = {
        "dispute_id": row.id, "task_id": row.task_id, "round": row.index, "price_micros": row.price_micros,
        "state": row.state, "opened_by": "buyer" if row.opened_by == row.buyer_id else "owner",
    }  # fmt: skip
    if event == "dispute.decided":
        data |= {"decision": row.decision, "note": row.note, "credited_micros": row.credited_micros}
    told: dict[str, dict[str, Any]] = {row.buyer_id: data | {"award_id": buyers_award(broker, row.award_id)}}
    desk = session.scalars(select(PartyRow.id).where(PartyRow.role == "operator", PartyRow.active))
    told |= {one: data | {"award_id": row.award_id} for one in (*desk, row.owner_id) if one is not None}
    announce(session, event, told, subject=row.id)


def _concerns(role: Role) -> ColumnElement[bool]:
    """Those that concern the `party` that the statement is executed with."""
    if role == "operator":
        return DisputeRow.id.is_not(None)
    return (DisputeRow.owner_id if role == "owner" else DisputeRow.buyer_id) == bindparam("party")


@cache
def _lists(role: Role, is_open: bool | None) -> tuple[Select[Any], Select[int]]:
    """A party's disputes, newest first, at `most` so many; and how many of hers are open."""
    hers, undecided = _concerns(role), DisputeRow.state.in_(_OPEN)
    shown = _shown(hers) if is_open is None else _shown(hers, undecided if is_open else ~undecided)
    newest = shown.order_by(DisputeRow.opened_at.desc(), DisputeRow.id.desc())
    return newest.limit(bindparam("most", type_=Integer)), select(func.count()).where(hers, undecided)


def _shown(*which: ColumnElement[bool]) -> Select[Any]:
    """Disputes with all that is told of them, in one query."""
    query = select(DisputeRow, TaskRow.name, PartyRow.name, entries.c.kind, Release.reason)
    ended = and_(entries.c.ref == DisputeRow.award_id, entries.c.kind.in_(_ENDS))
    query = query.join(TaskRow, TaskRow.id == DisputeRow.task_id).outerjoin(
        PartyRow, PartyRow.id == DisputeRow.owner_id
    )
    query = query.outerjoin(entries, ended).outerjoin(Release, Release.award_id == DisputeRow.award_id)
    return query.where(*which)


def _view(broker: Broker, party: Party, found: Sequence[Any]) -> wire.Dispute:
    """A dispute as a party may see it."""
    row, task_name, owner, end, why = found
    state, mine, buys = end or AwardState.PENDING.value, row.opened_by == party.id, party.role == "buyer"
    decided = row.state == "decided"
    return as_wire(
        wire.Dispute, row, task_name=task_name, mine=mine,
        award_id=buyers_award(broker, row.award_id) if buys else row.award_id,
        owner=owner_name(broker, row.task_id, row.slot) if buys else owner or "simulated",
        opened_by="buyer" if row.opened_by == row.buyer_id else "owner",
        reason=row.reason if mine or party.role == "operator" else "",
        award_state=state, award_reason="" if buys else why or "", words=_words(row, state, broker.currency),
        state="decided" if decided else "open", decision=row.decision if decided else "",
        note=row.note if decided else "", decided_at=iso(row.decided_at) if decided else None,
    )  # fmt: skip


def _words(row: DisputeRow, award_state: str, currency: str) -> str:
    """What has become of the price, and what a decision can still do about it."""
    price, paid = f"{format_micros(row.price_micros)} {currency}", award_state == AwardState.POSTED
    if row.state == "decided":
        whose = "the owner" if row.decision == "pay" else "the buyer"
        if row.credited_micros:
            return f"Decided for {whose}. The award stays as it had ended; the operator credited {price} to {whose}."
        return f"Decided for {whose}, who has {price}."
    if award_state == AwardState.PENDING:
        return f"{price} stays frozen in escrow until the operator decides who gets it."
    went, other = ("was paid to the owner", "buyer") if paid else ("went back to the buyer", "owner")
    return (
        f"{price} {went} before this was opened, so it is not frozen and stays there. If the decision is for the "
        f"{other}, the operator credits as much from her own money, on record."
    )
