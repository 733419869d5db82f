"""The ledger's log: searched, verified, and what everybody may know of it.

The operator sees all entries; a buyer or an owner those of her own account, a buyer also those of her tasks, where she
sees owners by their names in the task (`pseudonyms`), and can search for nothing else. The head commits to the whole
log and is for everybody: whoever keeps one can tell later whether the past was changed.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, func, literal, or_, select, union_all
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.office.operator import names_of, note
from flmarket.broker.office.pseudonyms import buyers_entry
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.stamps import iso
from flmarket.broker.tables import PartyRow, TaskRow
from flmarket.client import wire
from flmarket.errors import SettlementError
from flmarket.ledger.store import entries as log

_READ = 200_000  # entries that a search passes through inside the database
_LOOKED_AT = 4_000  # or that one looks through here
_NAMED = 200
_COLUMNS = tuple(
    log.c[name] for name in ("seq", "time_us", "kind", "ref", "debit", "credit", "amount_micros", "owner", "hash")
)


def head(broker: Broker) -> wire.LedgerHead:
    """How long the log is, and the root of the tree over it: keep it, and the past cannot change unseen."""
    found = broker.books.ledger.head()
    return wire.LedgerHead(found.size, found.last, found.root)


def verify(broker: Broker, party: Party) -> wire.LedgerCheck:
    """Replay the whole log, compare it with the broker's rows, and say what was found; the operator's."""
    require(party, "operator")
    try:
        found = broker.books.ledger.verify()
        wrong = reconcile(broker.database.engine)
        said = "every entry, balance and award follows from the log, and so does every bill and statement"
        if wrong:
            said = f"the log is sound, but {len(wrong)} bills or statements do not follow from it: {wrong[0].message}"
        check = wire.LedgerCheck(not wrong, said, found.size, found.root, wrong)
    except SettlementError as error:
        check = wire.LedgerCheck(False, str(error), 0, "")
    with broker.database.write() as session:
        note(session, party, "ledger.verify", outcome="ok" if check.ok else "corrupt", detail=check.message)
    return check


def entries(
    broker: Broker, party: Party, *, search: str | None = None, limit: int = 100, before: int | None = None
) -> wire.LedgerPage:
    """Entries that the party may see, newest first; `search` is part of an id, an account or a kind, for the operator
    also of a party's or a task's name.

    One call looks at so many entries before `before`; `next` goes on from there, also when none was found.
    """
    with broker.database.read() as session:
        size = session.scalar(select(func.max(log.c.seq) + 1)) or 0
        end = size if before is None else min(before, size)
        start = max(0, end - _READ)
        query = select(*_COLUMNS).where(log.c.seq >= start, log.c.seq < end).order_by(log.c.seq.desc())
        if party.role != "operator":
            query = query.where(_visible(session, party))
        # a buyer searches what she sees, where owners have names that no database knows: it is looked through here
        buys, own = party.role == "buyer", {party.id}
        most = _LOOKED_AT if search and buys else limit
        if buys:
            own |= set(session.scalars(select(TaskRow.id).where(TaskRow.buyer_id == party.id)))
        elif search:
            query = query.where(_matching(session, search, names=party.role == "operator"))
        rows = session.execute(query.limit(most)).all()
    views = (buyers_entry(broker, _view(row), own) if buys else _view(row) for row in rows)
    found = tuple(islice((one for one in views if not (search and buys) or _has(one, search)), limit))
    reached = found[-1].seq if len(found) >= limit else rows[-1].seq if len(rows) >= most else start
    return wire.LedgerPage(found, reached or None)


def _has(entry: wire.LedgerEntry, search: str) -> bool:
    texts = (entry.ref, entry.kind, entry.debit, entry.credit, entry.owner)
    return any(search.lower() in text.lower() for text in texts if text)


def _visible(session: Session, party: Party) -> ColumnElement[bool]:
    """Entries of the party's own account, and a buyer's of her tasks."""
    accounts = (log.c.debit, log.c.credit, log.c.owner)
    if party.role != "buyer":
        return or_(*(account == party.id for account in accounts))
    tasks = select(TaskRow.id).where(TaskRow.buyer_id == party.id)
    own = union_all(tasks, select(literal(party.id)))
    return or_(*(account.in_(own) for account in accounts), _task_of(session).in_(tasks))


def _task_of(session: Session) -> ColumnElement[str]:
    """What an entry's id begins with, up to a slash."""
    ref = log.c.ref + "/"
    sqlite = session.get_bind().dialect.name == "sqlite"
    return func.substr(ref, 1, (func.instr(ref, "/") if sqlite else func.strpos(ref, "/")) - 1)


def _matching(session: Session, search: str, *, names: bool) -> ColumnElement[bool]:
    texts = (log.c.ref, log.c.kind, log.c.debit, log.c.credit, log.c.owner)
    found = or_(*(text.icontains(search, autoescape=True) for text in texts))
    if not names:
        return found
    named = [
        one
        for table in (PartyRow, TaskRow)
        for one in session.scalars(select(table.id).where(table.name.icontains(search, autoescape=True)).limit(_NAMED))
    ]
    return found | or_(*(text.in_(named) for text in texts[2:]), _task_of(session).in_(named)) if named else found


def names_in(broker: Broker, party: Party, found: Iterable[wire.LedgerEntry]) -> dict[str, str]:
    """The names of tasks and parties that some entries speak of, as far as the party may know them."""
    ids = {text.partition("/")[0] for one in found for text in (one.ref, one.debit, one.credit, one.owner) if text}
    known = {party.id: party.name}
    if party.role == "owner":
        return known
    with broker.database.read() as session:
        if party.role == "operator":
            return known | names_of(session, ids)
        mine = select(TaskRow.id, TaskRow.name).where(TaskRow.id.in_(ids), TaskRow.buyer_id == party.id)
        return known | dict(session.execute(mine).all())


def _view(row: Any) -> wire.LedgerEntry:
    at = iso(row.time_us // 1000) or ""
    return wire.LedgerEntry(
        row.seq, at, row.kind, row.ref, row.debit, row.credit, row.amount_micros, row.owner, row.hash
    )
