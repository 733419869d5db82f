"""The broker's use of the ledger: parties' money, tasks' escrow, and one round's awards in two steps.

Accounts: a party's is her id, a task's is its id, a simulated owner's is `<task>/owner-<place>`. Posting a task moves
its whole budget from the buyer's account to the task's, through the ledger's escrow; the rounds pay from there, and
the rest goes back the same way. All ids follow from the task's: a call repeated after a crash changes nothing.

`TaskLedger` stands between a task's market and the ledger. It collects a round's holds and hands them over in one
transaction; the round's ends are another, and there the ledger decides: an award that it has resolved already, or whose
release it refuses, ends as the ledger says, and the others are not touched by that. So a round can be played again from
its bids at any time: on the ledger, whatever was done already stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from flmarket.broker.errors import Conflict
from flmarket.errors import SettlementError
from flmarket.ledger import EXPIRY, Award, AwardState, Ledger, LedgerCorrupt, Release, Resolution, format_micros
from flmarket.market import resolve_each
from flmarket.privacy import Event, PureDp

__all__ = ["Books", "TaskLedger", "slot_account", "task_award"]


def slot_account(task_id: str, slot: int) -> str:
    """The account of a simulated owner."""
    return f"{task_id}/owner-{slot}"


def task_award(award: Award, task_id: str, account_of: Callable[[int], str]) -> tuple[int, Award]:
    """The owner's number, and a market's award as the broker books it: paid by the task, to the owner's own account."""
    owner = int(award.owner.removeprefix("owner-"))
    return owner, replace(award, buyer=task_id, owner=account_of(owner))


class Books:
    """What the broker does with the ledger, beyond one round."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @classmethod
    def open(cls, url: str) -> Books:
        """The ledger in this database."""
        from flmarket.broker.database import respect_fence
        from flmarket.ledger import SqlLedger

        ledger = SqlLedger(url)
        respect_fence(ledger.engine)
        return cls(ledger)

    def close(self) -> None:
        """Give the ledger's connections back."""
        close = getattr(self.ledger, "close", None)
        if callable(close):
            close()

    def fund(self, task_id: str, buyer: str, amount_micros: int) -> None:
        """The task's budget from the buyer to the task; Conflict, and nothing moved, if she has less or it was dropped.

        The ledger decides between this and `drop`: whoever comes first has the id.
        """
        award = Award(_escrow(task_id), 0, buyer, task_id, 0.0, amount_micros)
        try:
            self.ledger.hold(award)
        except SettlementError:
            if self._find(award.id) is not None:
                raise Conflict(f"the posting of task {task_id} took too long and was given up") from None
            available = self.ledger.balance(buyer)
            if available >= amount_micros:
                raise
            needs, has = format_micros(amount_micros), format_micros(available)
            raise Conflict(f"the task needs {needs} in escrow and your account holds {has}") from None
        self.ledger.post(award.id)

    def drop(self, task_id: str, buyer: str) -> bool:
        """Give a posting up unless its money is there already: then False, and it is in the task's account."""
        nothing = Award(_escrow(task_id), 0, buyer, task_id, 0.0, 0)
        with suppress(SettlementError):
            self.ledger.hold(nothing)
        known = self.ledger.award(nothing.id)
        if known.price_micros:
            self.ledger.post(known.id)
            return False
        if known.state is AwardState.PENDING:
            self.ledger.void(known.id, "the posting was given up")
        return True

    def is_dropped(self, task_id: str) -> bool:
        """Whether a posting was given up under this id."""
        known = self._find(_escrow(task_id))
        return known is not None and not known.price_micros

    def refund(self, task_id: str, buyer: str) -> int:
        """Everything left in the task's account back to the buyer; returns how much, also when repeated."""
        identifier = f"{task_id}/refund"
        known = self._find(identifier)
        if known is None:
            left = self.ledger.balance(task_id)
            if not left:
                return 0
            known = self.ledger.hold(Award(identifier, 0, task_id, buyer, 0.0, left))
        return self.ledger.post(known.id).price_micros

    def round_awards(self, award_ids: dict[int, str]) -> dict[int, Award]:
        """Those of these awards that were made, as they stand."""
        found = {owner: self._find(identifier) for owner, identifier in award_ids.items()}
        return {owner: award for owner, award in found.items() if award is not None}

    def _find(self, award_id: str) -> Award | None:
        try:
            return self.ledger.award(award_id)
        except LedgerCorrupt:
            raise
        except SettlementError:
            return None

    def privacy(self, party_id: str) -> tuple[float | None, float]:
        """An owner's registered cap, if any, and what she has spent of it: total ε."""
        return self.privacy_of([party_id])[party_id]

    def privacy_of(self, party_ids: Sequence[str]) -> dict[str, tuple[float | None, float]]:
        """The same of many owners at once."""
        accounts = self.ledger.privacy_accounts(party_ids)
        found: dict[str, tuple[float | None, float]] = dict.fromkeys(party_ids, (None, 0.0))
        for party_id, account in accounts.items():
            if isinstance(account.cap, PureDp):
                found[party_id] = (account.cap.epsilon, account.spent)
        return found


class TaskLedger:
    """The part of the ledger protocol that a task's market uses, with its names translated and its calls collected."""

    def __init__(
        self,
        ledger: Ledger,
        task_id: str,
        account_of: Callable[[int], str],
        *,
        available_micros: int,
        mechanism: str,
        guarantee: Callable[[float], Event],
    ) -> None:
        self._available = available_micros
        self._ledger, self._task_id, self._account_of = ledger, task_id, account_of
        self._mechanism, self._guarantee = mechanism, guarantee
        self._held: dict[str, Award] = {}
        self._resolved: dict[str, Award] = {}

    def flush_holds(self) -> None:
        """Put all of the round's awards into escrow, or none."""
        if self._held:
            self._ledger.hold_many(list(self._held.values()))

    def settle(self, *, delivered: Collection[str], released: Collection[str]) -> None:
        """End all of the round's awards on the ledger: delivered ones are paid, silent ones expire.

        `released` are those for which something left the owner's side, paid or not; that is charged to her account.
        """
        ends = []
        for award in map(self.award, self._held):
            end = Resolution(award.id, award.state, award.reason)
            if award.state is AwardState.PENDING:
                paid = award.id in delivered
                end = Resolution(award.id, *((AwardState.POSTED, "") if paid else (AwardState.EXPIRED, EXPIRY)))
            release = Release(award.id, self._mechanism, self._guarantee(award.epsilon))
            ends.append(replace(end, release=release if award.id in released else None))
        self._resolved |= {award.id: award for award in resolve_each(self._ledger, ends)}

    def deposit(self, id: str, account: str, amount_micros: int) -> None:
        """A round's budget is in the task's account since the task was posted: nothing to bring in."""
        if amount_micros > self._available:
            has, needs = format_micros(self._available), format_micros(amount_micros)
            raise SettlementError(f"{id}: {account} has {has} left of its escrow and the round needs {needs}")

    def hold(self, award: Award) -> Award:
        """Collect an award for `flush_holds`."""
        self._held[award.id] = task_award(award, self._task_id, self._account_of)[1]
        return award

    def hold_many(self, awards: list[Award]) -> tuple[Award, ...]:
        """Collect awards for `flush_holds`."""
        return tuple(self.hold(award) for award in awards)

    def post(self, award_id: str) -> Award:
        """Collect a payment for `settle`."""
        return self._resolve(award_id, AwardState.POSTED, "")

    def void(self, award_id: str, reason: str) -> Award:
        """Collect a void for `settle`."""
        return self._resolve(award_id, AwardState.VOIDED, reason)

    def expire(self, award_id: str) -> Award:
        """Collect an expiry for `settle`."""
        return self._resolve(award_id, AwardState.EXPIRED, EXPIRY)

    def resolve_many(self, resolutions: list[Resolution]) -> tuple[Award, ...]:
        """Collect resolutions for `settle`; afterwards, say how they ended."""
        return tuple(self._resolve(one.award_id, one.state, one.reason) for one in resolutions)

    def award(self, award_id: str) -> Award:
        """An award as this run of the round has it."""
        if award_id in self._resolved:
            return self._resolved[award_id]
        if award_id not in self._held:
            raise SettlementError(f"there is no award {award_id} in this round")
        return self._held[award_id]

    def balance(self, account: str) -> int:
        """The buyer's: what the rounds before this one left, whatever a cut-off run of this round holds already."""
        return self._available if account == "buyer" else self._ledger.balance(account)

    def _resolve(self, award_id: str, state: AwardState, reason: str) -> Award:
        award = self.award(award_id)
        if award.state is not AwardState.PENDING and award.state is not state:
            raise SettlementError(f"award {award_id} is already {award.state}, it cannot be {state}")
        self._resolved[award_id] = replace(award, state=state, reason=reason)
        return self._resolved[award_id]


def _escrow(task_id: str) -> str:
    return f"{task_id}/escrow"
