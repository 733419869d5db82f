"""The rules of the books, once for every store: what a call adds to the journal, or why it is refused.

A `Draft` is one call under way. It reads the books through the mappings it is given, which are the call's own (what the
store read for it, or a `Layer` over what outlives it), writes there what comes after, and collects the new lines; the
store then commits all of it or drops it all. Stores that keep the books in a database check the same invariants again
there, in other words (`migrations`).
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Generic, TypeVar, overload

from flmarket.errors import InvalidInput, PrivacyBudgetExhausted, SettlementError
from flmarket.ledger.entry import (
    RESOLUTIONS,
    EntryKind,
    Line,
    award_of,
    canonical,
    fits,
    limit_of,
    loss_terms,
    pico,
    release_detail,
    release_of,
)
from flmarket.ledger.journal import (
    BANK,
    ESCROW,
    FEES,
    MAX_MICROS,
    NOTHING,
    Award,
    AwardState,
    Frozen,
    IdReused,
    Release,
    Resolution,
    dispute_of,
    format_micros,
)
from flmarket.privacy import ApproxDp, Cap, Event, PrivacyAccount, PureDp, RecordLevel, Unprotected, ZCdp, event_to_dict

RESERVED = (BANK, ESCROW, FEES)
LARGEST_CAP = 1e6  # so that totals in 10⁻¹² fit a 64-bit integer
LONGEST_NAME, LONGEST_REASON = 200, 500
# what callers name: one id is used once, whatever for (a cap's id is the ledger's own)
_NAMED = frozenset({EntryKind.DEPOSIT, EntryKind.WITHDRAWAL, EntryKind.FEE, EntryKind.HOLD})
_ENDINGS = tuple(RESOLUTIONS.values())

Key = tuple[EntryKind, str]
K = TypeVar("K")
V = TypeVar("V")


class Layer(Generic[K, V]):
    """What a draft writes (`new`) over the books as they were, which stay so."""

    __slots__ = ("_books", "new")

    def __init__(self, books: Mapping[K, V]) -> None:
        self._books = books
        self.new: dict[K, V] = {}

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    def get(self, key: K, default: V | None = None) -> V | None:
        """The value, the draft's own if it has one."""
        found = self.new.get(key)
        return self._books.get(key, default) if found is None else found

    def __contains__(self, key: K) -> bool:
        return key in self.new or key in self._books

    def __setitem__(self, key: K, value: V) -> None:
        self.new[key] = value


class Draft:
    """One call under way: new lines over the books as they were."""

    def __init__(
        self,
        lines: dict[Key, Line] | Layer[Key, Line],
        balances: dict[str, int] | Layer[str, int],
        accounts: dict[str, PrivacyAccount] | Layer[str, PrivacyAccount],
        history: Callable[[str], Iterable[Event]],
    ) -> None:
        """`accounts` holds the owners with a registered cap; `history` gives all stored releases of an owner."""
        self.new: list[Line] = []
        self.lines, self.balances, self.accounts = lines, balances, accounts
        self._history = history

    def deposit(self, id: str, account: str, amount_micros: int) -> None:
        """Outside → party."""
        self._once(
            Line(EntryKind.DEPOSIT, checked_name("id", id), BANK, checked_party("account", account), amount_micros)
        )

    def withdraw(self, id: str, account: str, amount_micros: int) -> None:
        """Party, or the broker's fees → outside."""
        source = account if account == FEES else checked_party("account", account)
        self._once(Line(EntryKind.WITHDRAWAL, checked_name("id", id), source, BANK, amount_micros))

    def fee(self, id: str, account: str, amount_micros: int) -> None:
        """Party → broker."""
        self._once(Line(EntryKind.FEE, checked_name("id", id), checked_party("account", account), FEES, amount_micros))

    def hold(self, award: Award) -> Award:
        """Buyer → escrow."""
        if (EntryKind.HOLD, award.id) in self.lines:
            known = self.award(award.id)
            if replace(known, state=award.state, reason=award.reason) != award:
                raise IdReused(f"award {award.id} exists with other terms")
            return known
        if award.state is not AwardState.PENDING:
            raise SettlementError(f"award {award.id} is {award.state}: only a pending award can be held")
        index = award.round_index
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 2**62:
            raise InvalidInput("round_index", index, "a whole number of at least 0")
        buyer, owner, id = (
            checked_party("buyer", award.buyer),
            checked_party("owner", award.owner),
            checked_name("award id", award.id),
        )
        detail = canonical(loss_terms(award.loss))
        self._move(Line(EntryKind.HOLD, id, buyer, ESCROW, award.price_micros, owner, index, detail=detail))
        return replace(award, reason="")

    def resolve(self, resolution: Resolution) -> Award:
        """Escrow → owner or buyer, after recording the release if there is one."""
        state, release = resolution.state, resolution.release
        if state not in RESOLUTIONS:
            raise InvalidInput("state", state, "posted, voided or expired")
        award = self.award(resolution.award_id)
        if release is not None:
            if release.award_id != award.id:
                raise InvalidInput("release", release.award_id, f"the release for award {award.id}")
            self._give(award, release)
        if award.state is state:
            return award
        if award.state is not AwardState.PENDING:
            raise SettlementError(f"award {award.id} is already {award.state}, it cannot be {state}")
        if self._is_frozen(award):
            raise Frozen(f"award {award.id} is in dispute: until that is decided it cannot be {state}")
        sold = state is AwardState.POSTED and award.loss != NOTHING and award.owner in self.accounts
        if sold and (EntryKind.RELEASE, award.id) not in self.lines:
            if isinstance(award.loss, Unprotected):  # there is nothing to record that her cap could hold
                raise PrivacyBudgetExhausted(f"award {award.id}: without noise, and {award.owner} has a registered cap")
            raise SettlementError(f"award {award.id}: {award.owner} has a registered cap, record her release first")
        payee = award.owner if state is AwardState.POSTED else award.buyer
        reason = resolution.reason and _readable(resolution.reason)
        detail = canonical({"reason": reason}) if reason else "{}"
        price, kind = award.price_micros, RESOLUTIONS[state]
        self._move(Line(kind, award.id, ESCROW, payee, price, award.owner, None, None, None, detail))
        return award.ended(state, reason)

    def freeze(self, award_id: str) -> Award:
        """Nothing → escrow, under the id of the award's dispute: from here on only `decide` ends the award."""
        award = self.award(award_id)
        if award.state is not AwardState.PENDING:
            raise SettlementError(f"award {award.id} is {award.state}: what is not in escrow cannot be frozen")
        self.hold(Award(dispute_of(award.id), award.round_index, award.buyer, award.owner, NOTHING, 0))
        return award

    def decide(self, resolution: Resolution) -> Award:
        """End an award's dispute, and the award with it."""
        known = self.award(dispute_of(resolution.award_id))
        if known.state is AwardState.PENDING:
            self.resolve(Resolution(known.id, AwardState.VOIDED, "decided"))
        return self.resolve(resolution)

    def _is_frozen(self, award: Award) -> bool:
        dispute = dispute_of(award.id)
        return (EntryKind.HOLD, dispute) in self.lines and self.award(dispute).state is AwardState.PENDING

    def release(self, release: Release) -> None:
        """Charge the owner's registered cap and record what she gave away."""
        self._give(self.award(release.award_id), release)

    def register_cap(self, owner: str, cap: Cap) -> None:
        """Record a cap, new or changed; all releases so far must fit it."""
        known = self.accounts.get(checked_party("owner", owner))
        if known is not None and known.cap == cap:
            return
        if not isinstance(cap, PureDp | ZCdp | ApproxDp | RecordLevel) or not 0 < limit_of(cap) <= LARGEST_CAP:
            raise InvalidInput("cap", cap, f"PureDp, ZCdp or ApproxDp above 0 and up to {LARGEST_CAP:g}")
        account = PrivacyAccount(cap)
        new = (line for line in self.new if line.kind is EntryKind.RELEASE and line.owner == owner)
        for event in chain(self._history(owner), (release_of(line).guarantee for line in new)):
            try:
                account.compose(event)
            except PrivacyBudgetExhausted:
                raise PrivacyBudgetExhausted(f"{owner} has released more than {cap} already") from None
        self.accounts[owner] = account
        number = next(n for n in range(1, 10**6) if (EntryKind.CAP, f"{owner}/{n}") not in self.lines)
        detail = canonical({"cap": event_to_dict(cap)})
        spent, limit = _totals(account)
        self._add(
            Line(EntryKind.CAP, f"{owner}/{number}", owner=owner, spent_pico=spent, limit_pico=limit, detail=detail)
        )

    def award(self, award_id: str) -> Award:
        """One award as it stands, this draft included."""
        return award_in(self.lines, award_id)

    def _give(self, award: Award, release: Release) -> None:
        id, owner = award.id, award.owner
        mechanism = checked_name("mechanism", release.mechanism)
        detail = release_detail(mechanism, release.guarantee)
        known = self.lines.get((EntryKind.RELEASE, id))
        if known is not None:
            if known.detail != detail:
                raise IdReused(f"award {id} has another release on record")
            return
        if award.state is AwardState.POSTED:
            raise SettlementError(f"award {id} is posted already: its release belongs before the payment")
        if not fits(release, award.loss):
            raise SettlementError(f"award {id} is for {award.loss}, the release gives away {release.guarantee}")
        account = self.accounts.get(owner)
        if account is not None:
            account = copy(account)
            try:
                account.compose(release.guarantee)
            except InvalidInput:  # noise under a cap in ε: it fits as little as what is too much
                why = f"{owner}'s registered cap {account.cap} cannot hold {release.guarantee}"
                raise PrivacyBudgetExhausted(f"award {id}: {why}") from None
            self.accounts[owner] = account
        spent, limit = _totals(account)
        self._add(Line(EntryKind.RELEASE, id, None, None, 0, owner, None, spent, limit, detail))

    def _once(self, line: Line) -> None:
        known = self.lines.get((line.kind, line.ref))
        if known is None:
            self._move(line)
        elif known != line:
            raise IdReused(f"{line.kind} {line.ref} exists with other terms")

    def _move(self, line: Line) -> None:
        amount, debit, credit = line.amount_micros, line.debit, line.credit
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 <= amount <= MAX_MICROS:
            raise InvalidInput("amount_micros", amount, f"a whole number from 0 to {MAX_MICROS}")
        assert debit is not None
        assert credit is not None
        left, gained = self.balances.get(debit, 0) - amount, self.balances.get(credit, 0) + amount
        if left < 0 and debit != BANK:
            holds, needs = format_micros(left + amount), format_micros(amount)
            raise SettlementError(f"{debit} holds {holds}, {line.kind} {line.ref} needs {needs}")
        if gained > MAX_MICROS or left < -MAX_MICROS:
            raise SettlementError(f"{line.kind} {line.ref} would bring an account past {format_micros(MAX_MICROS)}")
        self.balances[debit], self.balances[credit] = left, gained
        self._add(line)

    def _add(self, line: Line) -> None:
        if line.kind in _NAMED:
            for kind in _NAMED:
                if (kind, line.ref) in self.lines:
                    raise IdReused(f"{line.kind} {line.ref}: this id is a {kind}'s already")
        self.lines[line.kind, line.ref] = line
        self.new.append(line)


def award_in(lines: dict[Key, Line] | Layer[Key, Line], award_id: str) -> Award:
    """One award as it stands by these lines."""
    held = lines.get((EntryKind.HOLD, award_id))
    if held is None:
        raise SettlementError(f"there is no award {award_id}")
    for kind in _ENDINGS:
        ended = lines.get((kind, award_id))
        if ended is not None:
            return award_of(held, ended)
    return award_of(held, None)


def checked_name(field: str, value: object) -> str:
    """An id or an account's name: printable, not empty, not endless."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= LONGEST_NAME:
        raise InvalidInput(field, value, f"1 to {LONGEST_NAME} printable characters")
    return value


def checked_party(field: str, account: object) -> str:
    """The account of a buyer or an owner: none of the ledger's own."""
    name = checked_name(field, account)
    if name in RESERVED:
        raise InvalidInput(field, name, "the account of a buyer or an owner")
    return name


def _totals(account: PrivacyAccount | None) -> tuple[int, int] | tuple[None, None]:
    return (None, None) if account is None else pico(account)


def _readable(reason: str) -> str:
    """A reason often quotes somebody's error: it is shortened and cleaned, never a ground to refuse the resolution."""
    text = reason if reason.isprintable() else "".join(c if c.isprintable() else " " for c in reason)
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
