"""The journal in memory: for simulation, and the model that durable stores are tested against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import TypeVar

from flmarket.ledger.books import Books, Wanted
from flmarket.ledger.entry import GENESIS, OF_AWARDS, Entry, EntryKind, Line, sealed
from flmarket.ledger.errors import LedgerCorrupt
from flmarket.ledger.journal import BANK, ESCROW, Award, AwardState
from flmarket.ledger.lines import release_of
from flmarket.ledger.merkle import Head, tiles
from flmarket.ledger.replay import Replay
from flmarket.ledger.rules import Draft, Key
from flmarket.privacy import Cap, Event, PrivacyAccount

__all__ = ["MemoryLedger", "now_us"]

T = TypeVar("T")


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


class MemoryLedger(Books):
    """A ledger that ends with the process; for one thread. Entries are hashed when somebody asks for them."""

    def __init__(self, *, clock: Callable[[], int] = now_us) -> None:
        """`clock` gives the time of an entry in microseconds."""
        self._clock = clock
        self._journal: list[tuple[int, Line]] = []
        self._sealed: list[Entry] = []
        self._places: dict[Key, int] = {}
        self._nodes: dict[int, list[bytes]] = {0: []}
        self._lines: dict[Key, Line] = {}
        self._balances: dict[str, int] = {BANK: 0, ESCROW: 0}
        self._accounts: dict[str, PrivacyAccount] = {}

    def award(self, award_id: str) -> Award:
        """One award as it stands."""
        return self._draft().award(award_id)

    def awards(
        self, *, state: AwardState | None = None, owner: str | None = None, round_index: int | None = None
    ) -> Iterator[Award]:
        """All awards in the order they were made, or those that match."""
        draft = self._draft()
        found = (draft.award(line.ref) for _, line in tuple(self._journal) if line.kind is EntryKind.HOLD)
        return (
            award
            for award in found
            if state in (None, award.state)
            and owner in (None, award.owner)
            and round_index in (None, award.round_index)
        )

    def has_task(self, task: str) -> bool:
        """Whether any id of a deposit, fee, withdrawal or award begins with this name and a slash."""
        return any(ref.startswith(f"{task}/") for kind, ref in self._lines if kind is not EntryKind.CAP)

    def cap(self, owner: str) -> Cap | None:
        """An owner's registered cap; None without one."""
        return self._accounts[owner].cap if owner in self._accounts else None

    def privacy_spent(self, owner: str) -> float:
        """What an owner with a registered cap has spent of it, in its currency."""
        return self._accounts[owner].spent if owner in self._accounts else 0.0

    def privacy_accounts(self, owners: Iterable[str]) -> Mapping[str, PrivacyAccount]:
        """Of many owners at once: a copy of the account of each who registered a cap."""
        return {owner: copy(self._accounts[owner]) for owner in owners if owner in self._accounts}

    def balances(self) -> Mapping[str, int]:
        """All accounts ever used."""
        return dict(self._balances)

    def balance(self, account: str) -> int:
        """Micro-units in an account; an account never used holds 0."""
        return self._balances.get(account, 0)

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[Entry]:
        """The log, oldest first: entries `start` to before `stop`."""
        self._seal()
        return iter(self._sealed[start:stop])

    def verify(self, known: Head | None = None) -> Head:
        """Replay the whole log; raise LedgerCorrupt naming the first bad entry, or return the head."""
        replay = Replay().feed(self.entries())
        head = replay.finish(known)
        for account, amount in {**self._balances, **replay.balances}.items():
            if self._balances.get(account, 0) != replay.balances.get(account, 0):
                kept = self._balances.get(account, 0)
                raise LedgerCorrupt(f"balance of {account} is {kept}, the journal says {amount}")
        return head

    def _draft(self) -> Draft:
        return Draft(self._lines, self._balances, self._accounts, self._history)

    def _write(self, wanted: Wanted, change: Callable[[Draft], T]) -> T:
        draft = self._draft()
        result = change(draft)
        time_us = self._clock()
        self._journal += ((time_us, line) for line in draft.new)
        self._lines.update(draft.lines.new)
        self._balances.update(draft.balances.new)
        self._accounts.update(draft.accounts.new)
        return result

    def _history(self, owner: str) -> Iterator[Event]:
        lines = (line for _, line in self._journal)
        return (release_of(line).guarantee for line in lines if line.kind is EntryKind.RELEASE and line.owner == owner)

    def _award_entries(self, award_ids: Iterable[str]) -> Sequence[Entry]:
        self._seal()
        places = (self._places.get((kind, award_id)) for award_id in award_ids for kind in OF_AWARDS)
        return [self._sealed[seq] for seq in places if seq is not None]

    def _size(self) -> int:
        return len(self._journal)

    def _hashes(self, level: int, first: int, count: int) -> Sequence[bytes]:
        self._seal()
        return self._nodes[level][first : first + count]

    def _seal(self) -> None:
        """Hash the lines that came since somebody last asked."""
        size = len(self._sealed)
        last = self._sealed[-1].hash if self._sealed else GENESIS
        for seq in range(size, len(self._journal)):
            time_us, line = self._journal[seq]
            entry = sealed(line, seq, time_us, last)
            self._sealed.append(entry)
            self._places[line.kind, line.ref] = seq
            last = entry.hash
        new = [bytes.fromhex(entry.hash) for entry in self._sealed[size:]]
        self._nodes[0] += new
        for level, _, node in tiles(size, len(new), lambda lv, first, count: self._nodes[lv][first : first + count]):
            self._nodes.setdefault(level, []).append(node)
