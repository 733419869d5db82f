"""The ledger's log: searched, verified, and what everybody may know of it.

The operator sees all entries; a buyer or an owner those of her own account, a buyer also those of her tasks, where she
sees owners by their names in the task (`pseudonyms`), and can search for nothing else. The head commits to the whole
log and is for everybody: whoever keeps one can tell later whether the past was changed.
"""

from collections.abc import Callable

from sqlalchemy import select

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.office.operator import note
from flmarket.broker.office.pseudonyms import buyers_entry
from flmarket.broker.office.reconcile import reconcile
from flmarket.broker.stamps import iso
from flmarket.broker.tables import TaskRow
from flmarket.client import wire
from flmarket.errors import SettlementError
from flmarket.ledger import Entry

_READ = 20_000


def head(broker: Broker) -> wire.LedgerHead:
    """How long the log is, and the root of the tree over it."""
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
    """Entries that the party may see, newest first; `search` is part of an id or an account.

    One call reads at most the 20,000 entries before `before`; `next` goes on from there, also when none was found.
    """
    seen = _sight(broker, party)
    size = broker.books.ledger.head().size
    end = size if before is None else min(before, size)
    start = max(0, end - _READ)
    found: list[wire.LedgerEntry] = []
    while end > start and len(found) < limit:
        first = max(start, end - 1000)
        for entry in reversed(list(broker.books.ledger.entries(first, end))):
            view = seen(entry) if len(found) < limit else None
            if view is not None and any((search or "") in text for text in (view.ref, view.kind, *_names(view))):
                found.append(view)
        end = first
    reached = found[-1].seq if len(found) >= limit else start
    return wire.LedgerPage(tuple(found), reached or None)


def _sight(broker: Broker, party: Party) -> Callable[[Entry], wire.LedgerEntry | None]:
    """An entry as the party may see it; None if she may not."""
    if party.role == "operator":
        return _view
    own = {party.id}
    if party.role == "buyer":
        with broker.database.read() as session:
            own.update(session.scalars(select(TaskRow.id).where(TaskRow.buyer_id == party.id)))

    def seen(entry: Entry) -> wire.LedgerEntry | None:
        view = _view(entry)
        hers = not own.isdisjoint(_names(view)) or (party.role == "buyer" and view.ref.partition("/")[0] in own)
        return None if not hers else buyers_entry(broker, view, own) if party.role == "buyer" else view

    return seen


def _names(entry: wire.LedgerEntry) -> tuple[str, ...]:
    return tuple(name for name in (entry.debit, entry.credit, entry.owner) if name)


def _view(entry: Entry) -> wire.LedgerEntry:
    at, line = iso(entry.time_us // 1000) or "", entry.line
    moved = (line.ref, line.debit, line.credit, line.amount_micros, line.owner)
    return wire.LedgerEntry(entry.seq, at, str(line.kind), *moved, entry.hash)
