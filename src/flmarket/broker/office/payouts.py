"""Money that leaves the market: what owners earned, and what buyers want back.

A payout is written down, withdrawn in the ledger under its own id, and handed to the operator's payout hook (setting
`payout_hook`, `package.module:name`), a function of one `wire.Payout`; in this order, each step durable, so that a
repetition goes on where the last one stopped and no money leaves the books twice. One that was cut off before it was
booked is booked by the worker: money that has left the books is always in the list. A hook must honour the id the same
way: it is called again if the service dies before it could note that the hook was done. Without a hook, or if that
fails, the payout waits until the operator says that it was sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.errors import Conflict
from flmarket.broker.office.notices import announce
from flmarket.broker.office.operator import note
from flmarket.broker.office.statements import plain
from flmarket.broker.requests import check_visible
from flmarket.broker.stamps import keyed_id, now
from flmarket.broker.tables import PartyRow, PayoutRow, as_wire, made_before, row_of
from flmarket.client import wire
from flmarket.errors import SettlementError
from flmarket.files import csv_text
from flmarket.ledger import format_micros
from flmarket.registry import imported

_HEADER = ("payout", "party", "name", "role", "iban", "amount", "currency", "state", "reference", "booked", "sent")


def pay_out(
    broker: Broker, party: Party, party_id: str, amount_micros: int, *, reference: str = "", key: str | None = None
) -> wire.Payout:
    """Withdraw money of a buyer or an owner and hand it to the hook; the same `key` pays once."""
    require(party, "operator")
    check_visible("reference", reference)
    payout_id = keyed_id("w", party.id, key)
    with broker.database.write() as session:
        row_of(session, PartyRow, party_id, "party")
        asked = {"party_id": party_id, "amount_micros": amount_micros}
        row = made_before(session, PayoutRow, payout_id, "payout, nothing was booked", **asked)
        if row is None:
            row = PayoutRow(id=payout_id, **asked, state="new", note="")
            row.reference, row.created_at, row.sent_at = reference, now(), None
            session.add(row)
    book(broker, party, payout_id)
    return _send(broker, party, payout_id)


def book(broker: Broker, party: Party | None, payout_id: str) -> None:
    """Withdraw what was written down, once; Conflict, and it is forgotten, if she has less."""
    found = _view(broker, payout_id)
    if found.state != "new":
        return
    try:
        broker.books.ledger.withdraw(payout_id, found.party_id, found.amount_micros)
    except SettlementError:
        with broker.database.write() as session:
            session.execute(delete(PayoutRow).where(PayoutRow.id == payout_id, PayoutRow.state == "new"))
            said = f"{found.amount_micros} micro-units"
            note(session, party, "payout", found.party_id, outcome="refused", detail=said)
        has, asked = format_micros(broker.books.ledger.balance(found.party_id)), format_micros(found.amount_micros)
        raise Conflict(f"{found.name} has {has}, less than {asked}") from None
    _become(broker, party, payout_id, "booked", f"{found.amount_micros} micro-units, {payout_id}")


def unbooked(session: Session, before: int) -> Sequence[str]:
    """Payouts that were written down before a time and are not booked: whoever asked for them was cut off."""
    cut_off = PayoutRow.state == "new", PayoutRow.created_at < before
    return session.scalars(select(PayoutRow.id).where(*cut_off)).all()


def get_payout(broker: Broker, party: Party, payout_id: str) -> wire.Payout:
    """One of them; the operator's."""
    require(party, "operator")
    return _view(broker, payout_id)


def mark_sent(broker: Broker, party: Party, payout_id: str) -> wire.Payout:
    """The operator says that the money has left."""
    require(party, "operator")
    found = _view(broker, payout_id)
    if found.state == "new":
        raise Conflict("this payout is not booked yet")
    if found.state != "sent":
        _become(broker, party, payout_id, "sent", "by hand")
    return _view(broker, payout_id)


def list_payouts(
    broker: Broker, party: Party, *, party_id: str | None = None, limit: int = 100, before: int | None = None
) -> wire.PayoutPage:
    """The operator's: money that left the market or is about to, newest first; of one party if she is named."""
    require(party, "operator")
    query = select(PayoutRow, PartyRow).join(PartyRow).order_by(PayoutRow.created_at.desc()).limit(limit + 1)
    if party_id is not None:
        query = query.where(PayoutRow.party_id == party_id)
    if before is not None:
        query = query.where(PayoutRow.created_at < before)
    with broker.database.read() as session:
        rows = session.execute(query).all()
        shown, more = rows[:limit], len(rows) > limit
        if more:  # the next page begins before a moment: whatever was made in one is on one page, however much it is
            moment = rows[limit][0].created_at
            of_one = query.where(PayoutRow.created_at == moment).limit(None)
            shown = [one for one in shown if one[0].created_at > moment] or session.execute(of_one).all()
    items = tuple(_wire(broker, row, who) for row, who in shown)
    return wire.PayoutPage(items, shown[-1][0].created_at if more else None)


def payouts_csv(broker: Broker, party: Party) -> str:
    """All payouts as a table for the bank; amounts exact."""
    return csv_text(
        _HEADER,
        (
            (
                one.id, one.party_id, plain(one.name), one.role, one.iban or "", format_micros(one.amount_micros),
                one.currency, one.state, plain(one.reference), one.created_at, one.sent_at or "",
            )
            for one in list_payouts(broker, party, limit=100_000).items
        ),
    )  # fmt: skip


def _send(broker: Broker, party: Party, payout_id: str) -> wire.Payout:
    found = _view(broker, payout_id)
    if found.state == "sent" or not broker.settings.payout_hook:
        return found
    hook: Callable[[wire.Payout], Any] = imported(broker.settings.payout_hook, "payout hook")
    try:
        hook(found)
    except Exception as error:  # the operator's own code: whatever it raises, the money is still to be sent
        _become(broker, party, payout_id, "failed", f"{type(error).__name__}: {error}"[:300])
    else:
        _become(broker, party, payout_id, "sent", "by the payout hook")
    return _view(broker, payout_id)


def _become(broker: Broker, party: Party | None, payout_id: str, state: str, why: str) -> None:
    with broker.database.write() as session:
        row = session.get_one(PayoutRow, payout_id, with_for_update=True)
        if row.state == "sent" or (state == "booked" and row.state != "new"):
            return  # somebody else was faster
        row.state, row.note = state, why
        row.sent_at = now() if state == "sent" else None
        if state == "sent":
            data = {"payout_id": row.id, "amount_micros": row.amount_micros, "reference": row.reference}
            announce(session, "payout", {row.party_id: data}, subject=row.id)
        note(session, party, f"payout.{state}", row.party_id, detail=why)


def _view(broker: Broker, payout_id: str) -> wire.Payout:
    with broker.database.read() as session:
        row = row_of(session, PayoutRow, payout_id, "payout")
        return _wire(broker, row, session.get_one(PartyRow, row.party_id))


def _wire(broker: Broker, row: PayoutRow, who: PartyRow) -> wire.Payout:
    return as_wire(wire.Payout, row, name=who.name, role=who.role, currency=broker.currency, iban=who.iban)
