"""Replaying a log from its first entry: the check behind `verify`, for any store and for exported files.

It trusts nothing but the entries. Each must be hashed rightly, follow its predecessor and make sense after it: money
that is there, awards that are held and open, privacy totals that the guarantees add up to. It shares no code with the
rules that wrote them, other than the privacy account. The first entry that fails is named.
"""

from collections.abc import Iterable

from flmarket.errors import FlmarketError
from flmarket.ledger.entry import GENESIS, Entry, EntryKind, Line, cap_of, fits, loss_of, pico, release_of
from flmarket.ledger.journal import BANK, ESCROW, FEES, MAX_MICROS, NOTHING, LedgerCorrupt
from flmarket.ledger.merkle import Head, Tree, node_hash
from flmarket.privacy import Event, PrivacyAccount

# kind → the side that is fixed, and the account that stands there
_FIXED = {
    EntryKind.DEPOSIT: ("debit", BANK),
    EntryKind.WITHDRAWAL: ("credit", BANK),
    EntryKind.FEE: ("credit", FEES),
    EntryKind.HOLD: ("credit", ESCROW),
    EntryKind.POSTED: ("debit", ESCROW),
    EntryKind.VOIDED: ("debit", ESCROW),
    EntryKind.EXPIRED: ("debit", ESCROW),
}


class Replay:
    """The books as the log so far makes them."""

    def __init__(self) -> None:
        self.balances: dict[str, int] = {}
        self.leaves: list[bytes] = []
        self._nodes: dict[int, list[bytes]] = {}
        self._last = GENESIS
        self._seen: set[tuple[EntryKind, str]] = set()
        self._held: dict[str, Line] = {}  # awards still open
        self._owner: dict[str, str | None] = {}  # of every award
        self._loss: dict[str, Event] = {}
        self._posted: set[str] = set()
        self._accounts: dict[str, PrivacyAccount] = {}
        self._events: dict[str, list[Event]] = {}

    def feed(self, entries: Iterable[Entry]) -> "Replay":
        """Check further entries, in order."""
        for entry in entries:
            if entry.seq != len(self.leaves):
                raise LedgerCorrupt(f"missing; number {entry.seq} follows", len(self.leaves))
            if entry.previous != self._last:
                raise LedgerCorrupt("does not name its predecessor's hash", entry.seq)
            if entry.computed_hash() != entry.hash:
                raise LedgerCorrupt("the content does not match the hash", entry.seq)
            problem = self._problem(entry.line)
            if problem:
                raise LedgerCorrupt(problem, entry.seq)
            self._last = entry.hash
            self.leaves.append(bytes.fromhex(entry.hash))
        return self

    def finish(self, known: Head | None = None) -> Head:
        """The head of the whole log; with `known`, also check that the log begins as that earlier head says."""
        pending = sum(line.amount_micros for line in self._held.values())
        if self.balances.get(ESCROW, 0) != pending:
            raise LedgerCorrupt(f"escrow holds {self.balances.get(ESCROW, 0)} for pending awards of {pending}")
        if known is not None:
            if known.size > len(self.leaves):
                raise LedgerCorrupt(f"missing: the known head is of {known.size} entries", len(self.leaves))
            if known != self.head(known.size):
                raise LedgerCorrupt(f"the first {known.size} entries are not those of the known head")
        return self.head()

    def head(self, size: int | None = None) -> Head:
        """What commits to the first `size` entries."""
        size = len(self.leaves) if size is None else size
        last = self.leaves[size - 1].hex() if size else GENESIS
        return Head(
            size, last, Tree(size, lambda level, first, count: self.nodes(level)[first : first + count]).root().hex()
        )

    def nodes(self, level: int) -> list[bytes]:
        """All complete nodes of a level."""
        if level == 0:
            return self.leaves
        known = self._nodes.get(level)
        if known is None or len(known) != len(self.leaves) >> level:
            below = self.nodes(level - 1)
            known = [node_hash(left, right) for left, right in zip(below[::2], below[1::2], strict=False)]
            self._nodes[level] = known
        return known

    def _problem(self, line: Line) -> str:
        """Why a line may not follow the ones before, or nothing."""
        if (line.kind, line.ref) in self._seen:
            return f"a second {line.kind} of {line.ref}"
        self._seen.add((line.kind, line.ref))
        try:
            return self._money(line) if line.kind in _FIXED else self._privacy(line)
        except (FlmarketError, KeyError, TypeError, ValueError) as error:
            return f"cannot be read: {error}"

    def _money(self, line: Line) -> str:
        side, account = _FIXED[line.kind]
        debit, credit, amount = line.debit, line.credit, line.amount_micros
        if getattr(line, side) != account or not debit or not credit or debit == credit:
            return f"a {line.kind} from {debit} to {credit}"
        if not 0 <= amount <= MAX_MICROS:
            return f"an amount of {amount}"
        if line.kind is EntryKind.HOLD:
            self._loss[line.ref] = loss_of(line.terms)
            self._held[line.ref], self._owner[line.ref] = line, line.owner
        elif account == ESCROW:
            problem = self._resolution(line)
            if problem:
                return problem
        self.balances[debit] = self.balances.get(debit, 0) - amount
        self.balances[credit] = self.balances.get(credit, 0) + amount
        return f"{debit} is overdrawn by {-self.balances[debit]}" if self.balances[debit] < 0 and debit != BANK else ""

    def _resolution(self, line: Line) -> str:
        held = self._held.pop(line.ref, None)
        if held is None:
            return f"award {line.ref} is not open"
        payee = held.owner if line.kind is EntryKind.POSTED else held.debit
        if (line.credit, line.amount_micros, line.owner) != (payee, held.amount_micros, held.owner):
            return f"award {line.ref} is {line.kind} on other terms than it was held"
        if line.kind is EntryKind.POSTED:
            self._posted.add(line.ref)
            sold = self._loss[line.ref] != NOTHING and held.owner in self._accounts
            if sold and (EntryKind.RELEASE, line.ref) not in self._seen:
                return f"award {line.ref} is paid without a release"
        return ""

    def _privacy(self, line: Line) -> str:
        owner = line.owner
        if not owner or line.amount_micros or line.debit is not None or line.credit is not None:
            return f"a {line.kind} that names no owner, or moves money"
        if line.kind is EntryKind.CAP:
            account = PrivacyAccount(cap_of(line))
            for event in self._events.get(owner, ()):
                account.compose(event)
            self._accounts[owner] = account
        else:
            if self._owner.get(line.ref) != owner or line.ref in self._posted:
                return f"a release for award {line.ref}, which {owner} does not have or was paid for before"
            release = release_of(line)
            event = release.guarantee
            if not fits(release, self._loss[line.ref]):
                return f"a release of {event} for award {line.ref}, which is for {self._loss[line.ref]}"
            self._events.setdefault(owner, []).append(event)
            if owner in self._accounts:
                self._accounts[owner].compose(event)
        totals = pico(self._accounts[owner]) if owner in self._accounts else (None, None)
        return "" if totals == (line.spent_pico, line.limit_pico) else f"states other totals of {owner} than {totals}"
