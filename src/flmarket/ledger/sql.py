"""The journal in a database: SQLite by default, PostgreSQL by URL.

Each call is one transaction, and the writers go one after another, so that a call sees the books as it will leave them.
The rules are checked before writing (`rules`), and once more by the database itself: constraints and triggers hold for
every program that writes there (`migrations/sql`). A call whose answer was lost may be repeated with the same id.

Breaks if the database loses committed transactions: SQLite on a network file system, PostgreSQL with
`synchronous_commit` off.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, func, select

from flmarket.errors import ConfigError, InvalidInput
from flmarket.ledger import store
from flmarket.ledger.entry import (
    GENESIS,
    OF_AWARDS,
    RESOLUTIONS,
    ROW,
    Entry,
    EntryKind,
    Line,
    Row,
    award_of,
    cap_of,
    checked_row,
    line_of,
    release_of,
    row_hash,
    row_of,
)
from flmarket.ledger.journal import BANK, ESCROW, FEES, Award, AwardState, LedgerCorrupt, Release, now_us
from flmarket.ledger.memory import Ledger, Wanted
from flmarket.ledger.merkle import TILE, Head, tiles
from flmarket.ledger.replay import Replay
from flmarket.ledger.rules import Draft, Key, award_in
from flmarket.ledger.store import accounts, entries, nodes
from flmarket.privacy import Event, PrivacyAccount

CHUNK = 2000  # rows or ids at a time; SQLite takes at most 32,766 parameters
_FIELDS = ", ".join(ROW)
_SELECT = f"SELECT {_FIELDS} FROM {entries.name}"  # noqa: S608  # our own names
_RESOLVED = [kind.value for kind in RESOLUTIONS.values()]
TOGETHER = 100  # rows in one statement of SQLite, which sets every page that it changes aside once a statement
_HASH = ROW.index("hash") - len(ROW)
_LAST = select(func.max(entries.c.seq))  # put together once: that takes longer than the database takes to answer


def entry_of(row: Row) -> Entry:
    """A stored row as an entry."""
    return Entry(row[0], row[1], stored_line(row), row[2], row[3])


def stored_line(row: Row) -> Line:
    """What a stored row says, without its place in the log; what no writer of ours can have stored is corrupt."""
    try:
        checked_row(row)
    except InvalidInput as error:
        raise LedgerCorrupt(f"cannot be read: {error}", row[0] if isinstance(row[0], int) else None) from None
    return line_of(row)


def _rows(connection: Connection, query: str, *parameters: object) -> Sequence[Row]:
    """All rows as the driver gives them: to wrap every one costs as much as to read it."""
    return connection.exec_driver_sql(query, parameters).cursor.fetchall()


def _among(connection: Connection, columns: str, table: str, column: str, names: list[str]) -> tuple[str, object]:
    """A query of the rows that have one of these distinct names in a column, and the names as its one parameter.

    So the statement is the same for any number of names. In SQLite a cross join looks them up in the order given.
    """
    if connection.dialect.name == "postgresql":
        return f"SELECT {columns} FROM {table} WHERE {column} = ANY(%s)", names  # noqa: S608  # our own names
    query = f"SELECT {columns} FROM json_each(?) CROSS JOIN {table} WHERE {column} = value"  # noqa: S608
    return query, json.dumps(names, ensure_ascii=False)


def _mark(connection: Connection) -> str:
    return "%s" if connection.dialect.name == "postgresql" else "?"


def size(connection: Connection) -> int:
    """How many entries there are."""
    last = connection.execute(_LAST).scalar()
    return 0 if last is None else int(last) + 1


def rows_from(connection: Connection, start: int, stop: int | None = None) -> Sequence[Row]:
    """At most a chunk of the log, as it lies there."""
    end = "" if stop is None else f" AND seq < {int(stop)}"
    query = f"{_SELECT} WHERE seq >= {int(start)}{end} ORDER BY seq LIMIT {CHUNK}"
    try:
        return _rows(connection, query)
    except sqlite3.OperationalError:  # text that is none; whether that is so shows when it is read as it lies there
        with store.bad_text_readable(connection):
            return _rows(connection, query)


def rows_about(connection: Connection, refs: Iterable[str]) -> Iterator[Row]:
    """All entries with these ids."""
    for some in chunks(refs):
        yield from _rows(connection, *_among(connection, _FIELDS, entries.name, "ref", some))


def lines_about(connection: Connection, refs: Iterable[str]) -> dict[Key, Line]:
    """What they say."""
    return {(line.kind, line.ref): line for line in map(stored_line, rows_about(connection, refs))}


def owner_lines(
    connection: Connection, owners: Iterable[str], kinds: Sequence[EntryKind], start: int = 0
) -> Iterator[Entry]:
    """All entries of some kinds about these owners, oldest first for each."""
    mark = _mark(connection)
    for some in chunks(owners):
        query, named = _among(connection, _FIELDS, entries.name, "owner", some)
        query += f" AND kind IN ({', '.join(mark for _ in kinds)}) AND seq >= {mark} ORDER BY seq"
        yield from map(entry_of, _rows(connection, query, named, *(kind.value for kind in kinds), start))


def balances(connection: Connection, names: Iterable[str] | None = None) -> dict[str, int]:
    """Balances of these accounts, or all; those never used are left out."""
    if names is None:
        return dict(_rows(connection, f"SELECT name, balance FROM {accounts.name}"))  # noqa: S608  # our own name
    found: dict[str, int] = {}
    for some in chunks(names):
        found |= _rows(connection, *_among(connection, "name, balance", accounts.name, "name", some))
    return found


def awards_after(
    connection: Connection, seq: int, state: AwardState | None, owner: str | None, round_index: int | None
) -> list[tuple[int, Award]]:
    """At most a chunk of awards held after entry `seq`, each with the number of its hold."""
    held, ended = entries.alias("held"), entries.alias("ended")
    joined = held.outerjoin(ended, (ended.c.ref == held.c.ref) & ended.c.kind.in_(_RESOLVED))
    query = select(*(held.c[name] for name in ROW), ended.c.kind.label("end"), ended.c.detail.label("ending"))
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
        ending = None if row.end is None else Line(EntryKind(row.end), row.ref, detail=row.ending)
        found.append((row.seq, award_of(stored_line(tuple(row[: len(ROW)])), ending)))
    return found


def hashes(connection: Connection, level: int, first: int, count: int) -> list[bytes]:
    """Stored hashes of complete nodes of the tree, leaves included."""
    table, place = (
        (f"{nodes.name} WHERE level = {level:d} AND", "position") if level else (f"{entries.name} WHERE", "seq")
    )
    mark = _mark(connection)
    query = f"SELECT hash FROM {table} {place} BETWEEN {mark} AND {mark} ORDER BY {place}"  # noqa: S608  # our own names
    found = [bytes.fromhex(row[0]) for row in _rows(connection, query, first, first + count - 1)]
    if len(found) != count:
        raise LedgerCorrupt(f"hashes {first} to {first + count - 1} of level {level} of the tree are not all there")
    return found


def append(connection: Connection, lines: Sequence[Line], time_us: int) -> int:
    """Add lines to the log, hashed, with the nodes of the tree that they complete; returns the new size."""
    last = _rows(connection, f"SELECT seq, hash FROM {entries.name} ORDER BY seq DESC LIMIT 1")  # noqa: S608
    start, previous = (last[0][0] + 1, last[0][1]) if last else (0, GENESIS)
    values: list[object] = []  # all fields of all rows, one after another: thousands of tuples take longer
    leaves: list[bytes] = []
    made = {0: leaves}  # level of the tree → its new hashes
    for seq, line in enumerate(lines, start):
        row = row_of(line, seq, time_us, previous)
        hashed = row_hash(row)
        previous = hashed.hex()
        values += row
        values[_HASH] = previous
        leaves.append(hashed)
    _insert(connection, values)

    def fetch(level: int, first: int, count: int) -> list[bytes]:
        known = start >> level
        stored = hashes(connection, level, first, known - first) if first < known else []
        return stored + made[level][max(first - known, 0) : first + count - known]

    complete = []
    for level, position, node in tiles(start, len(lines), fetch):
        made.setdefault(level, []).append(node)
        complete.append((level, position, node.hex()))
    if complete:
        marks = ", ".join(3 * [_mark(connection)])
        connection.exec_driver_sql(f"INSERT INTO {nodes.name} (level, position, hash) VALUES ({marks})", complete)  # noqa: S608
    return start + len(lines)


def _insert(connection: Connection, values: list[object]) -> None:
    """In PostgreSQL all rows in one statement, a column at a time: its triggers settle balances once a statement."""
    into = f"INSERT INTO {entries.name} ({_FIELDS})"
    if connection.dialect.name == "postgresql":
        arrays = ", ".join(f"%s::{'bigint' if name in store.WHOLE else 'text'}[]" for name in ROW)
        columns = tuple(values[place :: len(ROW)] for place in range(len(ROW)))
        connection.exec_driver_sql(f"{into} SELECT * FROM unnest({arrays})", columns)  # noqa: S608  # our own names
    else:
        marks = f"({', '.join('?' for _ in ROW)})"
        rest = len(values) - len(values) % (TOGETHER * len(ROW))
        for count, first, end in ((TOGETHER, 0, rest), (1, rest, len(values))):
            step = count * len(ROW)
            groups = [tuple(values[at : at + step]) for at in range(first, end, step)]
            if groups:
                connection.exec_driver_sql(f"{into} VALUES {', '.join(count * [marks])}", groups)


def chunks(values: Iterable[str]) -> Iterator[list[str]]:
    """Distinct names, a chunk at a time; what cannot be stored cannot be found either, so it is left out."""
    named = list(values)
    try:
        storable = "".join(named).isprintable()
    except TypeError:  # not all are text
        storable = False
    if not storable:
        named = [value for value in named if isinstance(value, str) and value.isprintable()]
    distinct = list(dict.fromkeys(named))
    return (distinct[start : start + CHUNK] for start in range(0, len(distinct), CHUNK))


T = TypeVar("T")


class _Counted(NamedTuple):
    """An owner's privacy account by the first `size` entries, None without a registered cap.

    Kept from call to call, so that only her caps and releases since are read. What it holds is committed, whoever wrote
    it, and never changed: other threads may be counting from the same account.
    """

    size: int
    account: PrivacyAccount | None

    def later(self, size: int, given: Sequence[Event]) -> "_Counted":
        """The same after further releases, under the same cap."""
        account = self.account
        if account is not None and given:
            account = copy(account)
            for event in given:
                account.compose(event)
        return _Counted(size, account)


class SqlLedger(Ledger):
    """A durable ledger, safe for several threads and processes. Close it when done, or use it in a `with` statement.

    `SqlLedger("sqlite:///market.db")`, `SqlLedger("postgresql+psycopg://user:password@host/database")`. An empty
    database gets the tables; with `create=False` it is refused.
    """

    def __init__(
        self, url: str, *, create: bool = True, upgrade: bool = False, clock: Callable[[], int] = now_us
    ) -> None:
        """`upgrade` changes the tables of an older version; `clock` gives the time of an entry in microseconds."""
        if not create and not store.exists(url):
            raise ConfigError("database", url, "a ledger that exists")
        self.engine: Engine = store.open_engine(url)
        self._clock = clock
        self._counted: dict[str, _Counted] = {}
        try:
            self._open(create, upgrade)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def __enter__(self) -> "SqlLedger":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def award(self, award_id: str) -> Award:
        """One award as it stands."""
        with store.reading(self.engine) as connection:
            return award_in(lines_about(connection, [award_id]), award_id)

    def awards(
        self, *, state: AwardState | None = None, owner: str | None = None, round_index: int | None = None
    ) -> Iterator[Award]:
        """All awards in the order they were made, or those that match."""
        seq = -1
        while True:
            with store.reading(self.engine) as connection:
                found = awards_after(connection, seq, state, owner, round_index)
            yield from (award for _, award in found)
            if len(found) < CHUNK:
                return
            seq = found[-1][0]

    def releases(self, owner: str | None = None) -> Iterator[Release]:
        """All releases, or one owner's, in the order they were recorded."""
        if owner is None:
            return super().releases()
        with store.reading(self.engine) as connection:
            return iter([release_of(one.line) for one in owner_lines(connection, [owner], (EntryKind.RELEASE,))])

    def has_task(self, task: str) -> bool:
        """Whether any id of a deposit, fee, withdrawal or award begins with this name and a slash."""
        prefix = f"{task}/"
        if next(chunks([prefix]), None) is None:
            return False
        named = (entries.c.kind != EntryKind.CAP.value) & (func.substr(entries.c.ref, 1, len(prefix)) == prefix)
        with store.reading(self.engine) as connection:
            return connection.execute(select(entries.c.seq).where(named).limit(1)).first() is not None

    def privacy_accounts(self, owners: Iterable[str]) -> Mapping[str, PrivacyAccount]:
        """Of many owners at once: a copy of the account of each who registered a cap."""
        with store.reading(self.engine) as connection:
            return {owner: copy(account) for owner, account in self._accounts(connection, set(owners)).items()}

    def balances(self, accounts: Iterable[str] | None = None) -> Mapping[str, int]:
        """All accounts ever used, or those of some that were."""
        with store.reading(self.engine) as connection:
            return ({BANK: 0, ESCROW: 0} if accounts is None else {}) | balances(connection, accounts)

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[Entry]:
        """The log, oldest first: entries `start` to before `stop`."""
        while True:
            with store.reading(self.engine) as connection:
                found = rows_from(connection, start, stop)
            yield from map(entry_of, found)
            if len(found) < CHUNK:
                return
            start = found[-1][0] + 1

    def verify(self, known: Head | None = None) -> Head:
        """Replay the whole log; raise LedgerCorrupt naming the first bad entry, or return the head.

        Balances and inner nodes of the tree, which the database keeps beside the log, must be what the log makes them.
        """
        with store.reading(self.engine) as connection:
            replay, start, more = Replay(), 0, True
            while more:
                found = rows_from(connection, start)
                replay.feed_rows(found)
                more = len(found) == CHUNK
                start += len(found)
            with store.bad_text_readable(connection):
                head = replay.finish(known, balances(connection))
            _check_nodes(replay, connection)
        return head

    def _open(self, create: bool, upgrade: bool) -> None:
        with store.reading(self.engine) as connection:
            found = store.version(connection)
        if found == store.NEWEST or (found in store.WORKING and not upgrade):
            return
        if not (upgrade if found else create):
            fix = (
                f"version {store.NEWEST}, not {found}: flmarket ledger migrate" if found else "one that holds a ledger"
            )
            raise ConfigError("database", self.engine.url.render_as_string(), fix)
        store.migrate(self.engine)

    def _write(self, wanted: Wanted, change: Callable[[Draft], T]) -> T:
        with store.writing(self.engine) as connection:
            lines = lines_about(connection, wanted.refs)
            held = [line for line in lines.values() if line.kind is EntryKind.HOLD]
            owners = {*wanted.owners, *[line.owner for line in held if line.owner is not None]}
            buyers = {line.debit for line in held if line.debit is not None}
            parties = {BANK, ESCROW, FEES, *wanted.accounts, *owners, *buyers}
            counted = self._accounts(connection, owners) if wanted.privacy else {}
            for entry in owner_lines(connection, wanted.owners, (EntryKind.CAP,)):
                lines[EntryKind.CAP, entry.line.ref] = entry.line
            draft = Draft(
                lines,
                balances(connection, parties),
                counted,
                lambda owner: (
                    release_of(entry.line).guarantee for entry in owner_lines(connection, [owner], (EntryKind.RELEASE,))
                ),
            )
            result = change(draft)
            if not draft.new:
                return result
            end = append(connection, draft.new, self._clock())
        # only now that it is committed
        if wanted.privacy:
            self._counted |= {owner: _Counted(end, counted.get(owner)) for owner in owners}
        return result

    def _accounts(self, connection: Connection, owners: set[str]) -> dict[str, PrivacyAccount]:
        """The privacy accounts of the owners who registered a cap, as the log has them now."""
        end, found, unknown = size(connection), dict[str, _Counted](), set[str]()
        since: dict[int, list[str]] = {}
        for owner in owners:
            known = self._counted.get(owner)
            if known is None:
                unknown.add(owner)
                continue
            found[owner] = known
            if known.size < end:
                since.setdefault(known.size, []).append(owner)
        for start, group in since.items():
            given: dict[str, list[Event]] = {}
            for entry in owner_lines(connection, group, (EntryKind.CAP, EntryKind.RELEASE), start):
                if entry.line.kind is EntryKind.CAP:
                    unknown.add(str(entry.line.owner))
                else:
                    given.setdefault(str(entry.line.owner), []).append(release_of(entry.line).guarantee)
            found |= {owner: found[owner].later(end, given.get(owner, ())) for owner in group if owner not in unknown}
        caps = {str(entry.line.owner): entry for entry in owner_lines(connection, unknown, (EntryKind.CAP,))}
        all_given: dict[str, list[Event]] = {}
        for entry in owner_lines(connection, caps, (EntryKind.RELEASE,)):
            all_given.setdefault(str(entry.line.owner), []).append(release_of(entry.line).guarantee)
        for owner in unknown:
            counted = _Counted(0, PrivacyAccount(cap_of(caps[owner].line)) if owner in caps else None)
            found[owner] = counted.later(end, all_given.get(owner, ()))
        self._counted |= found
        return {owner: known.account for owner, known in found.items() if known.account is not None}

    def _award_entries(self, award_ids: Iterable[str]) -> Sequence[Entry]:
        with store.reading(self.engine) as connection:
            found = map(entry_of, rows_about(connection, award_ids))
            return [entry for entry in found if entry.line.kind in OF_AWARDS]

    def _size(self) -> int:
        with store.reading(self.engine) as connection:
            return size(connection)

    def _hashes(self, level: int, first: int, count: int) -> Sequence[bytes]:
        with store.reading(self.engine) as connection:
            return hashes(connection, level, first, count)


def _check_nodes(replay: Replay, connection: Connection) -> None:
    level, nodes = TILE, replay.nodes(TILE)
    while nodes:
        if hashes(connection, level, 0, len(nodes)) != nodes:
            raise LedgerCorrupt(f"a kept node of level {level} of the tree is not what the entries make it")
        level += TILE
        nodes = replay.nodes(level)
    kept = connection.execute(select(func.count()).select_from(store.nodes)).scalar_one()
    made = sum(len(replay.nodes(step)) for step in range(TILE, level, TILE))
    if kept != made:
        raise LedgerCorrupt(f"{kept} nodes of the tree are kept, the entries make {made}")
