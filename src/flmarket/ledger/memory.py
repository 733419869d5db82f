"""What a ledger is, whatever stores it; and one in memory, for simulation and as the model for durable stores."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

from flmarket.errors import InvalidInput, SettlementError
from flmarket.ledger.entry import GENESIS, OF_AWARDS, Entry, EntryKind, Line, release_of, sealed, transfer_of
from flmarket.ledger.journal import BANK, ESCROW, Award, AwardState, Release, Resolution, Transfer, dispute_of, now_us
from flmarket.ledger.merkle import Head, Tree, tiles
from flmarket.ledger.receipt import HoldReceipt, Receipt, make_hold_receipts, make_receipt
from flmarket.ledger.replay import Replay
from flmarket.ledger.rules import Draft, Key, Layer, award_in
from flmarket.privacy import Cap, Event, PrivacyAccount

EXPIRY = "deadline passed"

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What a call needs to see: lines about these ids, and these accounts; `privacy` of these owners if so.

    The parties of the awards among the ids are always included.
    """

    refs: Iterable[str] = ()
    accounts: Iterable[str] = ()
    owners: Iterable[str] = ()
    privacy: bool = False


class Ledger(ABC):
    """What the market needs of a ledger; every store passes the same tests.

    Calls become drafts (`rules`), and the log answers questions. A store says how a draft is loaded and committed
    (`_write`), and how entries and hashes are read.
    """

    def deposit(self, id: str, account: str, amount_micros: int) -> None:
        """Bring money in from outside."""
        self._write(Wanted([id], [account]), lambda draft: draft.deposit(id, account, amount_micros))

    def withdraw(self, id: str, account: str, amount_micros: int) -> None:
        """Pay money out to the outside."""
        self._write(Wanted([id], [account]), lambda draft: draft.withdraw(id, account, amount_micros))

    def charge_fee(self, id: str, account: str, amount_micros: int) -> None:
        """Move a fee from a party to the broker."""
        self._write(Wanted([id], [account]), lambda draft: draft.fee(id, account, amount_micros))

    def hold(self, award: Award) -> Award:
        """Put an award's price from the buyer's account into escrow."""
        return self.hold_many((award,))[0]

    def hold_many(self, awards: Iterable[Award]) -> tuple[Award, ...]:
        """Hold all of a round's awards or none."""
        batch = tuple(awards)
        wanted = Wanted([award.id for award in batch], {award.buyer for award in batch})
        return self._write(wanted, lambda draft: tuple(draft.hold(award) for award in batch))

    def post(self, award_id: str) -> Award:
        """Delivery verified: pay the owner."""
        return self.resolve_many((Resolution(award_id, AwardState.POSTED),))[0]

    def void(self, award_id: str, reason: str) -> Award:
        """No delivery, or a bad one: return the price to the buyer."""
        return self.resolve_many((Resolution(award_id, AwardState.VOIDED, reason),))[0]

    def expire(self, award_id: str) -> Award:
        """The deadline passed: return the price to the buyer."""
        return self.resolve_many((Resolution(award_id, AwardState.EXPIRED, EXPIRY),))[0]

    def resolve_many(self, resolutions: Iterable[Resolution]) -> tuple[Award, ...]:
        """Record releases and resolve awards, all of them or none: how a round settles."""
        batch = tuple(resolutions)
        refs = [ref for one in batch for ref in (one.award_id, dispute_of(one.award_id))]
        return self._write(Wanted(refs, privacy=True), lambda draft: tuple(draft.resolve(one) for one in batch))

    def freeze(self, award_id: str) -> Award:
        """Somebody disputes a pending award: its price stays in escrow until `decide`; others are not touched."""
        return self._write(Wanted([award_id, dispute_of(award_id)]), lambda draft: draft.freeze(award_id))

    def decide(self, resolution: Resolution) -> Award:
        """The dispute is decided: it ends, and the frozen award is resolved, both or neither."""
        refs = [resolution.award_id, dispute_of(resolution.award_id)]
        return self._write(Wanted(refs, privacy=True), lambda draft: draft.decide(resolution))

    def register_cap(self, owner: str, cap: Cap) -> None:
        """Set the most privacy that an owner sells over her lifetime; counts what she released before, too."""
        self._write(Wanted(owners=[owner], privacy=True), lambda draft: draft.register_cap(owner, cap))

    def release(self, release: Release) -> None:
        """Record what an owner gave away for an award; refused past her registered cap."""
        self._write(Wanted([release.award_id], privacy=True), lambda draft: draft.release(release))

    def cap(self, owner: str) -> Cap | None:
        """An owner's registered cap; None without one."""
        account = self.privacy_accounts([owner]).get(owner)
        return None if account is None else account.cap

    def privacy_spent(self, owner: str) -> float:
        """What an owner with a registered cap has spent of it, in its currency."""
        account = self.privacy_accounts([owner]).get(owner)
        return 0.0 if account is None else account.spent

    def balance(self, account: str) -> int:
        """Micro-units in an account; an account never used holds 0."""
        return self.balances([account]).get(account, 0)

    def releases(self, owner: str | None = None) -> Iterator[Release]:
        """All releases, or one owner's, in the order they were recorded."""
        lines = (entry.line for entry in self.entries())
        return (release_of(line) for line in lines if line.kind is EntryKind.RELEASE and owner in (None, line.owner))

    def transfers(self) -> Iterator[Transfer]:
        """All movements of money, oldest first."""
        return filter(None, (transfer_of(entry.line) for entry in self.entries()))

    def head(self, size: int | None = None) -> Head:
        """What commits to the first `size` entries (default all): publish it, and the past cannot change unseen."""
        return self._tree(size).head()

    def receipt(self, award_id: str, size: int | None = None) -> Receipt:
        """All entries of an award with proofs that they are in the log of `size` entries; can be checked without it."""
        return self.receipts([award_id], size)[award_id]

    def receipts(self, award_ids: Iterable[str], size: int | None = None) -> dict[str, Receipt]:
        """The receipts of many awards, each as `receipt` makes it, for little more than one."""
        found: dict[str, list[Entry]] = {award_id: [] for award_id in award_ids}
        tree = self._tree(size)
        for entry in self._award_entries(found):
            found[entry.line.ref].append(entry)
        if missing := next((award_id for award_id, entries in found.items() if not entries), None):
            raise SettlementError(f"there is no award {missing}")
        return {award_id: make_receipt(award_id, entries, tree) for award_id, entries in found.items()}

    def hold_receipts(
        self, award_ids: Iterable[str], since: Head | Mapping[str, Head] | None = None
    ) -> dict[str, HoldReceipt]:
        """For each of these awards, all pending, a proof that its price is in escrow (`receipt.HoldReceipt`).

        `since` is the head that the owners have seen, or by award the one that its owner has seen, if any.
        """
        tree, ids = self._tree(None), list(award_ids)
        return make_hold_receipts(ids, self._award_entries(ids), tree, since)

    def consistency(self, old_size: int, size: int | None = None) -> tuple[str, ...]:
        """Proof that the log of `size` entries (default all) begins with the log of `old_size` (`merkle`)."""
        return tuple(step.hex() for step in self._tree(size).consistency(old_size))

    @abstractmethod
    def award(self, award_id: str) -> Award:
        """One award as it stands."""

    @abstractmethod
    def awards(
        self, *, state: AwardState | None = None, owner: str | None = None, round_index: int | None = None
    ) -> Iterator[Award]:
        """All awards in the order they were made, or those that match."""

    @abstractmethod
    def privacy_accounts(self, owners: Iterable[str]) -> Mapping[str, PrivacyAccount]:
        """Of many owners at once: a copy of the account of each who registered a cap."""

    @abstractmethod
    def verify(self, known: Head | None = None) -> Head:
        """Replay the whole log; raise LedgerCorrupt naming the first bad entry, or return the head.

        With `known`, an earlier head: also check that the log still begins with what that head committed to.
        """

    @abstractmethod
    def has_task(self, task: str) -> bool:
        """Whether any id of a deposit, fee, withdrawal or award begins with this name and a slash."""

    @abstractmethod
    def balances(self, accounts: Iterable[str] | None = None) -> Mapping[str, int]:
        """All accounts ever used, or those of some that were."""

    @abstractmethod
    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[Entry]:
        """The log, oldest first: entries `start` to before `stop`."""

    @abstractmethod
    def _write(self, wanted: Wanted, change: Callable[[Draft], T]) -> T:
        """Make a draft that sees what is wanted, apply the change, commit it whole."""

    @abstractmethod
    def _award_entries(self, award_ids: Iterable[str]) -> Sequence[Entry]:
        """Holds, releases and resolutions of these awards, those there are."""

    @abstractmethod
    def _size(self) -> int:
        """How many entries there are."""

    @abstractmethod
    def _hashes(self, level: int, first: int, count: int) -> Sequence[bytes]:
        """Hashes of complete nodes of the tree, as `merkle.Tree` asks for them."""

    def _tree(self, size: int | None) -> Tree:
        entries = self._size()
        if size is None:
            size = entries
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= entries:
            raise InvalidInput("size", size, f"a whole number from 0 to {entries}")
        return Tree(size, self._hashes)


def hold_receipt(ledger: Ledger, award_id: str, since: Head | None = None) -> HoldReceipt:
    """The receipt for one pending award, from the head that its owner has seen on."""
    return ledger.hold_receipts([award_id], since)[award_id]


hold_receipts = Ledger.hold_receipts  # of a round's pending awards: far cheaper than one by one


class MemoryLedger(Ledger):
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
        return award_in(self._lines, award_id)

    def awards(
        self, *, state: AwardState | None = None, owner: str | None = None, round_index: int | None = None
    ) -> Iterator[Award]:
        """All awards in the order they were made, or those that match."""
        found = (award_in(self._lines, line.ref) for _, line in tuple(self._journal) if line.kind is EntryKind.HOLD)
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

    def privacy_accounts(self, owners: Iterable[str]) -> Mapping[str, PrivacyAccount]:
        """Of many owners at once: a copy of the account of each who registered a cap."""
        return {owner: copy(self._accounts[owner]) for owner in owners if owner in self._accounts}

    def balances(self, accounts: Iterable[str] | None = None) -> Mapping[str, int]:
        """All accounts ever used, or those of some that were."""
        known = self._balances
        return dict(known) if accounts is None else {name: known[name] for name in accounts if name in known}

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[Entry]:
        """The log, oldest first: entries `start` to before `stop`."""
        self._seal()
        return iter(self._sealed[start:stop])

    def verify(self, known: Head | None = None) -> Head:
        """Replay the whole log; raise LedgerCorrupt naming the first bad entry, or return the head."""
        return Replay().feed(self.entries()).finish(known, self._balances)

    def _write(self, wanted: Wanted, change: Callable[[Draft], T]) -> T:
        lines, balances, accounts = Layer(self._lines), Layer(self._balances), Layer(self._accounts)
        draft = Draft(lines, balances, accounts, self._history)
        result = change(draft)
        time_us = self._clock()
        self._journal += ((time_us, line) for line in draft.new)
        self._lines.update(lines.new)
        self._balances.update(balances.new)
        self._accounts.update(accounts.new)
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
