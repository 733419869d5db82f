"""Replaying a log from its first entry: the check behind `verify`, for any store and for exported files.

It trusts nothing but the entries. Each must be hashed rightly, follow its predecessor and make sense after it: money
that is there, awards that are held and open, privacy totals that the guarantees add up to. It shares no code with the
rules that wrote them, other than the privacy account. The first entry that fails is named.
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache

from flmarket.errors import FlmarketError, InvalidInput
from flmarket.ledger.entry import (
    GENESIS,
    ROW,
    Entry,
    EntryKind,
    Row,
    cap_of,
    checked_row,
    fits,
    line_of,
    loss_of,
    pico,
    row_hash,
)
from flmarket.ledger.journal import BANK, ESCROW, FEES, MAX_MICROS, NOTHING, LedgerCorrupt, Release, dispute_of
from flmarket.ledger.merkle import Head, Tree, node_hash
from flmarket.privacy import Event, PrivacyAccount, event_from_dict

_read = json.JSONDecoder().decode
_DEBIT, _CREDIT = ROW.index("debit"), ROW.index("credit")
_HOLD, _POSTED, _CAP = (kind.value for kind in (EntryKind.HOLD, EntryKind.POSTED, EntryKind.CAP))
# kind → the side that is fixed, and the account that stands there
_FIXED = {
    EntryKind.DEPOSIT.value: (_DEBIT, BANK),
    EntryKind.WITHDRAWAL.value: (_CREDIT, BANK),
    EntryKind.FEE.value: (_CREDIT, FEES),
    EntryKind.HOLD.value: (_CREDIT, ESCROW),
    EntryKind.POSTED.value: (_DEBIT, ESCROW),
    EntryKind.VOIDED.value: (_DEBIT, ESCROW),
    EntryKind.EXPIRED.value: (_DEBIT, ESCROW),
}


# Of terms that many entries share only the first is read.
@lru_cache(4096)
def _sold(detail: str) -> Event:
    return loss_of(_read(detail))


@lru_cache(4096)
def _given(detail: str) -> tuple[str, Event]:
    terms = _read(detail)
    return terms["mechanism"], event_from_dict(terms["guarantee"])


class Replay:
    """The books as the log so far makes them."""

    def __init__(self) -> None:
        self.balances: dict[str, int] = {}
        self.leaves: list[bytes] = []
        self._nodes: dict[int, list[bytes]] = {}
        self._last = GENESIS
        self._seen: dict[str, set[str]] = {kind.value: set() for kind in EntryKind}
        self._released = self._seen[EntryKind.RELEASE.value]
        self._held: dict[str, tuple[str, int, str | None, Event]] = {}  # buyer, price, owner, loss of awards still open
        self._unpaid: dict[str, tuple[str | None, Event]] = {}  # owner and loss of those that ended without a payment
        self._accounts: dict[str, PrivacyAccount] = {}
        self._events: dict[str, list[Event]] = {}

    def feed(self, entries: Iterable[Entry]) -> "Replay":
        """Check further entries, in order."""
        return self.feed_rows(entry.row() for entry in entries)

    def feed_rows(self, rows: Iterable[Row]) -> "Replay":
        """The same of entries as stores keep them."""
        leaves, last = self.leaves, self._last
        for row in rows:
            seq = row[0]
            try:
                checked_row(row)
            except InvalidInput as error:
                raise LedgerCorrupt(f"cannot be read: {error}", seq if isinstance(seq, int) else None) from None
            if seq != len(leaves):
                raise LedgerCorrupt(f"missing; number {seq} follows", len(leaves))
            if row[2] != last:
                raise LedgerCorrupt("does not name its predecessor's hash", seq)
            hashed = row_hash(row)
            last = hashed.hex()
            if row[3] != last:
                raise LedgerCorrupt("the content does not match the hash", seq)
            problem = self._problem(row)
            if problem:
                raise LedgerCorrupt(problem, seq)
            self._last = last
            leaves.append(hashed)
        return self

    def finish(self, known: Head | None = None, kept: Mapping[str, int] | None = None) -> Head:
        """The head of the whole log; with `known`, also check that the log begins as that earlier head says.

        `kept` are balances that somebody keeps beside the log: they must be what the log makes them.
        """
        pending = sum(price for _, price, *_ in self._held.values())
        if self.balances.get(ESCROW, 0) != pending:
            raise LedgerCorrupt(f"escrow holds {self.balances.get(ESCROW, 0)} for pending awards of {pending}")
        if known is not None:
            if known.size > len(self.leaves):
                raise LedgerCorrupt(f"missing: the known head is of {known.size} entries", len(self.leaves))
            if known != self.head(known.size):
                raise LedgerCorrupt(f"the first {known.size} entries are not those of the known head")
        stated = self.balances if kept is None else kept
        for account in sorted({*stated, *self.balances}):
            has, said = stated.get(account, 0), self.balances.get(account, 0)
            if has != said:
                raise LedgerCorrupt(f"the balance of {account} is kept as {has}, the entries say {said}")
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

    def _problem(self, row: Row) -> str:
        """Why an entry may not follow the ones before, or nothing."""
        kind, ref = row[4], row[5]
        seen = self._seen[kind]
        if ref in seen:
            return f"a second {kind} of {ref}"
        seen.add(ref)
        try:
            return self._money(row) if kind in _FIXED else self._privacy(row)
        except (FlmarketError, KeyError, TypeError, ValueError) as error:
            return f"cannot be read: {error}"

    def _money(self, row: Row) -> str:
        _, _, _, _, kind, ref, debit, credit, amount, owner, _, _, _, _ = row
        place, account = _FIXED[kind]
        if row[place] != account or not debit or not credit or debit == credit:
            return f"a {kind} from {debit} to {credit}"
        if not 0 <= amount <= MAX_MICROS:
            return f"an amount of {amount}"
        if kind == _HOLD:
            self._held[ref] = debit, amount, owner, _sold(row[13])
        elif account == ESCROW:
            problem = self._resolution(kind, ref, credit, amount, owner)
            if problem:
                return problem
        balances = self.balances
        left = balances[debit] = balances.get(debit, 0) - amount
        balances[credit] = balances.get(credit, 0) + amount
        return f"{debit} is overdrawn by {-left}" if left < 0 and debit != BANK else ""

    def _resolution(self, kind: str, ref: str, credit: str, amount: int, owner: str | None) -> str:
        held = self._held.pop(ref, None)
        if held is None:
            return f"award {ref} is not open"
        if dispute_of(ref) in self._held:
            return f"award {ref} is {kind} while it is in dispute"
        buyer, price, seller, loss = held
        if credit != (seller if kind == _POSTED else buyer) or amount != price or owner != seller:
            return f"award {ref} is {kind} on other terms than it was held"
        if kind != _POSTED:
            self._unpaid[ref] = seller, loss
        elif owner in self._accounts and ref not in self._released and loss != NOTHING:
            return f"award {ref} is paid without a release"
        return ""

    def _privacy(self, row: Row) -> str:
        _, _, _, _, kind, ref, debit, credit, amount, owner, _, spent, limit, detail = row
        if not owner or amount or debit is not None or credit is not None:
            return f"a {kind} that names no owner, or moves money"
        account = self._accounts.get(owner)
        if kind == _CAP:
            account = self._accounts[owner] = PrivacyAccount(cap_of(line_of(row)))
            for event in self._events.get(owner, ()):
                account.compose(event)
        else:
            *_, seller, loss = self._held.get(ref) or self._unpaid.get(ref) or (None, NOTHING)
            if seller != owner:
                return f"a release for award {ref}, which {owner} does not have or was paid for before"
            mechanism, event = _given(detail)
            if event != loss and not fits(Release(ref, mechanism, event), loss):
                return f"a release of {event} for award {ref}, which is for {loss}"
            self._events.setdefault(owner, []).append(event)
            if account is not None:
                account.compose(event)
        totals = (None, None) if account is None else pico(account)
        return "" if totals == (spent, limit) else f"states other totals of {owner} than {totals}"
