"""The journal in a database: SQLite by default, PostgreSQL by URL.

Each call is one transaction, and the writers go one after another, so that a call sees the books as it will leave them.
The rules are checked before writing (`rules`), and once more by the database itself: constraints and triggers hold for
every program that writes there (`migrations/sql`). A call whose answer was lost may be repeated with the same id.

Breaks if the database loses committed transactions: SQLite on a network file system, PostgreSQL with
`synchronous_commit` off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from flmarket.errors import ConfigError, SettlementError
from flmarket.ledger import queries, store
from flmarket.ledger.books import Books, Wanted
from flmarket.ledger.entry import Entry, EntryKind
from flmarket.ledger.errors import LedgerCorrupt
from flmarket.ledger.journal import BANK, ESCROW, FEES, Award, AwardState, Release
from flmarket.ledger.lines import award_of, cap_of, release_of
from flmarket.ledger.memory import now_us
from flmarket.ledger.merkle import TILE, Head
from flmarket.ledger.replay import Replay
from flmarket.ledger.rules import Draft
from flmarket.privacy import Cap, PrivacyAccount

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

__all__ = ["SqlLedger"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Counted:
    """An owner's privacy account by the first `size` entries, under the cap of entry `cap_seq`.

    Kept from call to call, so that only her releases since are read. What it holds is committed, whoever wrote it.
    """

    cap_seq: int
    size: int
    account: PrivacyAccount


class SqlLedger(Books):
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

    def __enter__(self) -> SqlLedger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def award(self, award_id: str) -> Award:
        """One award as it stands."""
        lines = {entry.line.kind: entry.line for entry in self._award_entries([award_id])}
        if EntryKind.HOLD not in lines:
            raise SettlementError(f"there is no award {award_id}")
        ending = next((line for kind, line in lines.items() if kind not in (EntryKind.HOLD, EntryKind.RELEASE)), None)
        return award_of(lines[EntryKind.HOLD], ending)

    def awards(
        self, *, state: AwardState | None = None, owner: str | None = None, round_index: int | None = None
    ) -> Iterator[Award]:
        """All awards in the order they were made, or those that match."""
        seq = -1
        while True:
            with store.reading(self.engine) as connection:
                found = queries.awards_after(connection, seq, state, owner, round_index)
            yield from (award for _, award in found)
            if len(found) < queries.CHUNK:
                return
            seq = found[-1][0]

    def releases(self, owner: str | None = None) -> Iterator[Release]:
        """All releases, or one owner's, in the order they were recorded."""
        if owner is None:
            return super().releases()
        with store.reading(self.engine) as connection:
            return iter(_releases(connection, owner))

    def has_task(self, task: str) -> bool:
        """Whether any id of a deposit, fee, withdrawal or award begins with this name and a slash."""
        with store.reading(self.engine) as connection:
            return queries.has_task(connection, task)

    def cap(self, owner: str) -> Cap | None:
        """An owner's registered cap; None without one."""
        account = self._account(owner)
        return None if account is None else account.cap

    def privacy_spent(self, owner: str) -> float:
        """What an owner with a registered cap has spent of it, in its currency."""
        account = self._account(owner)
        return 0.0 if account is None else account.spent

    def privacy_accounts(self, owners: Iterable[str]) -> Mapping[str, PrivacyAccount]:
        """Of many owners at once: a copy of the account of each who registered a cap."""
        with store.reading(self.engine) as connection:
            return {owner: copy(known.account) for owner, known in self._accounts(connection, set(owners)).items()}

    def balances(self) -> Mapping[str, int]:
        """All accounts ever used."""
        with store.reading(self.engine) as connection:
            return {BANK: 0, ESCROW: 0} | queries.balances(connection)

    def balance(self, account: str) -> int:
        """Micro-units in an account; an account never used holds 0."""
        with store.reading(self.engine) as connection:
            return queries.balances(connection, [account]).get(account, 0)

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[Entry]:
        """The log, oldest first: entries `start` to before `stop`."""
        while True:
            with store.reading(self.engine) as connection:
                found = queries.entries_between(connection, start, stop)
            yield from found
            if len(found) < queries.CHUNK:
                return
            start = found[-1].seq + 1

    def verify(self, known: Head | None = None) -> Head:
        """Replay the whole log; raise LedgerCorrupt naming the first bad entry, or return the head.

        Balances and inner nodes of the tree, which the database keeps beside the log, must be what the log makes them.
        """
        with store.reading(self.engine) as connection, store.bad_text_readable(connection):
            replay, start, more = Replay(), 0, True
            while more:
                found = queries.entries_between(connection, start, None)
                replay.feed(found)
                more = len(found) == queries.CHUNK
                start += len(found)
            head = replay.finish(known)
            _check_balances(replay, queries.balances(connection))
            _check_nodes(replay, connection)
        return head

    def _open(self, create: bool, upgrade: bool) -> None:
        with store.reading(self.engine) as connection:
            found = store.version(connection)
        if found == store.NEWEST:
            return
        if not (upgrade if found else create):
            fix = (
                f"version {store.NEWEST}, not {found}: flmarket ledger migrate" if found else "one that holds a ledger"
            )
            raise ConfigError("database", self.engine.url.render_as_string(), fix)
        store.migrate(self.engine)

    def _write(self, wanted: Wanted, change: Callable[[Draft], T]) -> T:
        with store.writing(self.engine) as connection:
            lines = queries.lines_about(connection, wanted.refs)
            held = [line for line in lines.values() if line.kind is EntryKind.HOLD]
            owners = {*wanted.owners, *(str(line.owner) for line in held)}
            parties = {BANK, ESCROW, FEES, *wanted.accounts, *owners, *(str(line.debit) for line in held)}
            counted = self._accounts(connection, owners) if wanted.privacy else {}
            for entry in queries.owner_lines(connection, wanted.owners, EntryKind.CAP):
                lines[EntryKind.CAP, entry.line.ref] = entry.line
            draft = Draft(
                lines,
                queries.balances(connection, parties),
                {owner: known.account for owner, known in counted.items()},
                lambda owner: (release.guarantee for release in _releases(connection, owner)),
            )
            result = change(draft)
            if not draft.new:
                return result
            end = queries.append(connection, draft.new, self._clock())
        # only now that it is committed
        first = end - len(draft.new)
        caps = {line.owner: seq for seq, line in enumerate(draft.new, first) if line.kind is EntryKind.CAP}
        for owner, account in draft.accounts.new.items():
            self._counted[owner] = _Counted(caps[owner] if owner in caps else counted[owner].cap_seq, end, account)
        return result

    def _accounts(self, connection: Connection, owners: set[str]) -> dict[str, _Counted]:
        """The privacy accounts of the owners who registered a cap, as the log has them now."""
        caps = {str(entry.line.owner): entry for entry in queries.owner_lines(connection, owners, EntryKind.CAP)}
        end, found = queries.size(connection), dict[str, _Counted]()
        for owner, entry in caps.items():
            known = self._counted.get(owner)
            if known is None or known.cap_seq != entry.seq:
                known = _Counted(entry.seq, 0, PrivacyAccount(cap_of(entry.line)))
            # a copy: other threads may be counting from the same account
            found[owner] = replace(known, account=copy(known.account))
        for start in {known.size for known in found.values() if known.size < end}:
            group = [owner for owner, known in found.items() if known.size == start]
            for entry in queries.owner_lines(connection, group, EntryKind.RELEASE, start):
                found[str(entry.line.owner)].account.compose(release_of(entry.line).guarantee)
        self._counted |= (found := {owner: replace(known, size=end) for owner, known in found.items()})
        return found

    def _account(self, owner: str) -> PrivacyAccount | None:
        with store.reading(self.engine) as connection:
            known = self._accounts(connection, {owner}).get(owner)
        return None if known is None else known.account

    def _award_entries(self, award_ids: Iterable[str]) -> Sequence[Entry]:
        with store.reading(self.engine) as connection:
            return queries.award_entries(connection, award_ids)

    def _size(self) -> int:
        with store.reading(self.engine) as connection:
            return queries.size(connection)

    def _hashes(self, level: int, first: int, count: int) -> Sequence[bytes]:
        with store.reading(self.engine) as connection:
            return queries.hashes(connection, level, first, count)


def _releases(connection: Connection, owner: str) -> list[Release]:
    return [release_of(entry.line) for entry in queries.owner_lines(connection, [owner], EntryKind.RELEASE)]


def _check_balances(replay: Replay, kept: Mapping[str, int]) -> None:
    for account in sorted({*kept, *replay.balances}):
        if kept.get(account, 0) != replay.balances.get(account, 0):
            said = replay.balances.get(account, 0)
            raise LedgerCorrupt(f"the balance of {account} is kept as {kept.get(account, 0)}, the entries say {said}")


def _check_nodes(replay: Replay, connection: Connection) -> None:
    level, nodes = TILE, replay.nodes(TILE)
    while nodes:
        if queries.hashes(connection, level, 0, len(nodes)) != nodes:
            raise LedgerCorrupt(f"a kept node of level {level} of the tree is not what the entries make it")
        level += TILE
        nodes = replay.nodes(level)
    kept, made = queries.node_count(connection), sum(len(replay.nodes(step)) for step in range(TILE, level, TILE))
    if kept != made:
        raise LedgerCorrupt(f"{kept} nodes of the tree are kept, the entries make {made}")
