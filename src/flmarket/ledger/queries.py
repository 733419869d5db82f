"""The statements behind the durable ledger: each takes a connection inside a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, select

from flmarket.errors import InvalidInput
from flmarket.ledger.entry import GENESIS, OF_AWARDS, RESOLUTIONS, Entry, EntryKind, Line, sealed
from flmarket.ledger.errors import LedgerCorrupt
from flmarket.ledger.journal import Award, AwardState
from flmarket.ledger.lines import award_of
from flmarket.ledger.merkle import tiles
from flmarket.ledger.rules import Key
from flmarket.ledger.schema import accounts, entries, nodes

__all__ = [
    "append",
    "award_entries",
    "awards_after",
    "balances",
    "entries_between",
    "has_task",
    "hashes",
    "lines_about",
    "node_count",
    "owner_lines",
    "size",
]

CHUNK = 2000  # rows or ids at a time; SQLite takes at most 32,766 parameters
_NAMES = ("seq", "time_us", "previous", "hash", *Line.__slots__)
_WHOLE = ("seq", "time_us", "amount_micros", "round_index", "spent_pico", "limit_pico")
_COLUMNS = tuple(entries.c[name] for name in _NAMES)
_RESOLVED = [kind.value for kind in RESOLUTIONS.values()]


def entry_of(row: Row[Any]) -> Entry:
    """A stored row as an entry; what no writer of ours can have stored is corrupt."""
    try:
        return Entry.from_dict(row._asdict())
    except InvalidInput as error:
        raise LedgerCorrupt(f"cannot be read: {error}", row.seq if isinstance(row.seq, int) else None) from None


def size(connection: Connection) -> int:
    """How many entries there are."""
    last = connection.execute(select(func.max(entries.c.seq))).scalar()
    return 0 if last is None else int(last) + 1


def entries_between(connection: Connection, start: int, stop: int | None) -> Sequence[Entry]:
    """At most a chunk of the log."""
    query = select(*_COLUMNS).where(entries.c.seq >= start).order_by(entries.c.seq).limit(CHUNK)
    if stop is not None:
        query = query.where(entries.c.seq < stop)
    return [entry_of(row) for row in connection.execute(query)]


def award_entries(connection: Connection, award_ids: Iterable[str]) -> Sequence[Entry]:
    """Everything about these awards."""
    query = select(*_COLUMNS).where(entries.c.kind.in_([kind.value for kind in OF_AWARDS]))
    parts = (query.where(entries.c.ref.in_(some)) for some in chunks(award_ids))
    return [entry_of(row) for part in parts for row in connection.execute(part)]


def lines_about(connection: Connection, refs: Iterable[str]) -> dict[Key, Line]:
    """All lines with these ids."""
    found: dict[Key, Line] = {}
    for some in chunks(refs):
        for row in connection.execute(select(*_COLUMNS).where(entries.c.ref.in_(some))):
            line = entry_of(row).line
            found[line.kind, line.ref] = line
    return found


def has_task(connection: Connection, task: str) -> bool:
    """Whether any id but a cap's begins with this name and a slash."""
    prefix = f"{task}/"
    if next(chunks([prefix]), None) is None:
        return False
    named = (entries.c.kind != EntryKind.CAP.value) & (func.substr(entries.c.ref, 1, len(prefix)) == prefix)
    return connection.execute(select(entries.c.seq).where(named).limit(1)).first() is not None


def node_count(connection: Connection) -> int:
    """How many nodes of the tree are kept, leaves left out."""
    return int(connection.execute(select(func.count()).select_from(nodes)).scalar_one())


def owner_lines(connection: Connection, owners: Iterable[str], kind: EntryKind, start: int = 0) -> Iterator[Entry]:
    """All entries of a kind about these owners, oldest first for each."""
    for some in chunks(owners):
        condition = entries.c.owner.in_(some) & (entries.c.kind == kind.value) & (entries.c.seq >= start)
        yield from map(entry_of, connection.execute(select(*_COLUMNS).where(condition).order_by(entries.c.seq)))


def balances(connection: Connection, names: Iterable[str] | None = None) -> dict[str, int]:
    """Balances of these accounts, or all; those never used are left out."""
    query = select(accounts.c.name, accounts.c.balance)
    parts: Iterable[Select[Any]] = (
        [query] if names is None else (query.where(accounts.c.name.in_(c)) for c in chunks(names))
    )
    return {name: int(balance) for part in parts for name, balance in connection.execute(part)}


def awards_after(
    connection: Connection, seq: int, state: AwardState | None, owner: str | None, round_index: int | None
) -> list[tuple[int, Award]]:
    """At most a chunk of awards held after entry `seq`, each with the number of its hold."""
    held, ended = entries.alias("held"), entries.alias("ended")
    joined = held.outerjoin(ended, (ended.c.ref == held.c.ref) & ended.c.kind.in_(_RESOLVED))
    terms = ("ref", "debit", "credit", "amount_micros", "owner", "round_index", "detail")
    query = select(held.c.seq, *(held.c[name] for name in terms), ended.c.kind, ended.c.detail.label("ending"))
    query = query.select_from(joined).where(held.c.kind == EntryKind.HOLD.value, held.c.seq > seq)
    if state is AwardState.PENDING:
        query = query.where(ended.c.kind.is_(None))
    elif state is not None:
        query = query.where(ended.c.kind == state.value)
    if owner is not None:
        query = query.where(held.c.owner.in_(next(chunks([owner]), [])))
    if round_index is not None:
        query = query.where(held.c.round_index == round_index)
    found = []
    for row in connection.execute(query.order_by(held.c.seq).limit(CHUNK)):
        hold = Line(EntryKind.HOLD, *row[1:7], detail=row.detail)
        ending = None if row.kind is None else Line(EntryKind(row.kind), row.ref, detail=row.ending)
        found.append((row.seq, award_of(hold, ending)))
    return found


def hashes(connection: Connection, level: int, first: int, count: int) -> list[bytes]:
    """Stored hashes of complete nodes of the tree, leaves included."""
    if level == 0:
        place, column = entries.c.seq, entries.c.hash
        query = select(place, column).where(place >= first, place < first + count)
    else:
        place, column = nodes.c.position, nodes.c.hash
        query = select(place, column).where(nodes.c.level == level, place >= first, place < first + count)
    found = [bytes.fromhex(row[1]) for row in connection.execute(query.order_by(place))]
    if len(found) != count:
        raise LedgerCorrupt(f"hashes {first} to {first + count - 1} of level {level} of the tree are not all there")
    return found


def append(connection: Connection, lines: Sequence[Line], time_us: int) -> int:
    """Add lines to the log, hashed, with the nodes of the tree that they complete; returns the new size."""
    start = size(connection)
    last = connection.execute(select(entries.c.hash).where(entries.c.seq == start - 1)).scalar() if start else GENESIS
    rows, previous = [], str(last)
    for seq, line in enumerate(lines, start):
        entry = sealed(line, seq, time_us, previous)
        rows.append(entry.to_dict())
        previous = entry.hash
    _insert(connection, rows)
    for level, position, node in tiles(start, len(rows), lambda *run: hashes(connection, *run)):
        connection.execute(insert(nodes), {"level": level, "position": position, "hash": node.hex()})
    return start + len(rows)


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> None:
    """In PostgreSQL all rows in one statement, a column at a time: its triggers settle balances once a statement."""
    into = f"INSERT INTO {entries.name} ({', '.join(_NAMES)})"
    if connection.dialect.name == "postgresql":
        arrays = ", ".join(f"%s::{'bigint' if name in _WHOLE else 'text'}[]" for name in _NAMES)
        columns = tuple([row[name] for row in rows] for name in _NAMES)
        connection.exec_driver_sql(f"{into} SELECT * FROM unnest({arrays})", columns)  # noqa: S608  # our own names
    else:
        marks = ", ".join("?" for _ in _NAMES)
        values = [tuple(row[name] for name in _NAMES) for row in rows]
        connection.exec_driver_sql(f"{into} VALUES ({marks})", values)


def chunks(values: Iterable[str]) -> Iterator[list[str]]:
    """Distinct names, a chunk at a time; what cannot be stored cannot be found either, so it is left out."""
    distinct = list(dict.fromkeys(value for value in values if isinstance(value, str) and value.isprintable()))
    return (distinct[start : start + CHUNK] for start in range(0, len(distinct), CHUNK))
