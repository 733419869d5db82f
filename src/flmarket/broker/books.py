"""The broker's use of the ledger: parties' money, tasks' escrow, and one round's awards in two steps.

Accounts: a party's is her id, a task's is its id, a simulated owner's is `<task>/owner-<place>`. Posting a task moves
its whole budget from the buyer's account to the task's, through the ledger's escrow; the rounds pay from there, and
the rest goes back the same way. All ids follow from the task's: a call repeated after a crash changes nothing.

`TaskLedger` stands between a task's market and the ledger. It collects a round's holds, and later its resolutions with
the releases they pay for, and hands each lot over in one transaction (`hold_many`, `resolve_many`). So a crash leaves a
round's awards all held or none, all resolved or none; and since it judges an award's state by what this run of the
round did, a round can be played again from its beginning: on the ledger, whatever was done already stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from flmarket.broker.errors import Conflict
from flmarket.errors import SettlementError
from flmarket.ledger import Award, AwardState, Ledger, Release, Resolution, format_micros
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
        from flmarket.ledger import SqlLedger

        return cls(SqlLedger(url))

    def close(self) -> None:
        """Give the ledger's connections back."""
        close = getattr(self.ledger, "close", None)
        if callable(close):
            close()

    def fund(self, task_id: str, buyer: str, amount_micros: int) -> None:
        """The task's budget from the buyer to the task; Conflict, and nothing moved, if she has less."""
        award = Award(f"{task_id}/escrow", 0, buyer, task_id, 0.0, amount_micros)
        try:
            self.ledger.hold(award)
        except SettlementError:
            available = self.ledger.balance(buyer)
            if available >= amount_micros:
                raise
            needs, has = format_micros(amount_micros), format_micros(available)
            raise Conflict(f"the task needs {needs} in escrow and your account holds {has}") from None
        self.ledger.post(award.id)

    def is_funded(self, task_id: str) -> bool:
        """Whether the task's budget is in its account, which a crash may have prevented."""
        try:
            award = self.ledger.award(f"{task_id}/escrow")
        except SettlementError:
            return False
        if award.state is AwardState.PENDING:
            self.ledger.post(award.id)
        return award.state in (AwardState.PENDING, AwardState.POSTED)

    def refund(self, task_id: str, buyer: str) -> int:
        """Everything left in the task's account back to the buyer; returns how much, also when repeated."""
        identifier = f"{task_id}/refund"
        with suppress(SettlementError):
            return self.ledger.post(self.ledger.award(identifier).id).price_micros
        left = self.ledger.balance(task_id)
        if left:
            self.ledger.hold(Award(identifier, 0, task_id, buyer, 0.0, left))
            self.ledger.post(identifier)
        return left

    def void_pending(self, award_ids: list[str], reason: str) -> int:
        """Give up a round: what is still held goes back to the task; returns how many awards."""
        pending = []
        for identifier in award_ids:
            with suppress(SettlementError):
                if self.ledger.award(identifier).state is AwardState.PENDING:
                    pending.append(Resolution(identifier, AwardState.VOIDED, reason))
        if pending:
            self.ledger.resolve_many(pending)
        return len(pending)

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

    def flush_resolutions(self) -> None:
        """Record what was released and resolve all of the round's awards, or none."""
        if self._resolved:
            self._ledger.resolve_many([self._resolution(award) for award in self._resolved.values()])

    @property
    def award_ids(self) -> list[str]:
        """The round's awards."""
        return list(self._held)

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
        """Collect a payment for `flush_resolutions`."""
        return self._resolve(award_id, AwardState.POSTED, "")

    def void(self, award_id: str, reason: str) -> Award:
        """Collect a void for `flush_resolutions`."""
        return self._resolve(award_id, AwardState.VOIDED, reason)

    def expire(self, award_id: str) -> Award:
        """Collect an expiry for `flush_resolutions`."""
        return self._resolve(award_id, AwardState.EXPIRED, "deadline passed")

    def resolve_many(self, resolutions: list[Resolution]) -> tuple[Award, ...]:
        """Collect resolutions for `flush_resolutions`."""
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

    def _resolution(self, award: Award) -> Resolution:
        delivered = award.state is AwardState.POSTED or award.reason.startswith("bad update")
        release = Release(award.id, self._mechanism, self._guarantee(award.epsilon)) if delivered else None
        return Resolution(award.id, award.state, award.reason, release)
