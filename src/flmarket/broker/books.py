"""The broker's use of the ledger: parties' money, tasks' escrow, and one round's awards in two steps.

Accounts: a party's is her id, a task's is its id, a simulated owner's is `<task>/owner-<place>`. Posting a task moves
its whole budget from the buyer's account to the task's, through the ledger's escrow; the rounds pay from there, and
the rest goes back the same way. All ids follow from the task's: a call repeated after a crash changes nothing.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from flmarket.broker.database import respect_fence
from flmarket.broker.errors import Conflict
from flmarket.errors import SettlementError
from flmarket.ledger import Award, AwardState, Ledger, LedgerCorrupt, SqlLedger, format_micros
from flmarket.ledger.entry import limit_of
from flmarket.privacy import Event, PureDp, RecordLevel, Unit, Unprotected, unit_of
from flmarket.privacy.composition import ApproxTotal

SHOWN_DELTA = 1e-5


def slot_account(task_id: str, slot: int) -> str:
    """The account of a simulated owner."""
    return f"{task_id}/owner-{slot}"


def is_simulated(account: str) -> bool:
    """Whether an account is a simulated owner's."""
    return "/owner-" in account


def shown_epsilon(loss: Event) -> float:
    """A loss as the ε that rows and pages show: pure, or at δ = 1e-5 for noise that has no pure one; ∞ for none."""
    if isinstance(loss, RecordLevel):
        loss = loss.loss
    if isinstance(loss, PureDp):
        return loss.epsilon
    return float("inf") if isinstance(loss, Unprotected) else ApproxTotal().plus(loss, 1).epsilon(SHOWN_DELTA)


class Books:
    """What the broker does with the ledger, beyond one round."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @classmethod
    def open(cls, url: str) -> Self:
        """The ledger in this database."""
        ledger = SqlLedger(url)
        respect_fence(ledger.engine)
        return cls(ledger)

    def close(self) -> None:
        """Give the ledger's connections back."""
        getattr(self.ledger, "close", lambda: None)()

    def fund(self, task_id: str, buyer: str, amount_micros: int) -> None:
        """The task's budget from the buyer to the task; Conflict, and nothing moved, if she has less or it was dropped.

        The ledger decides between this and `drop`: whoever comes first has the id.
        """
        award = Award(_escrow(task_id), 0, buyer, task_id, 0.0, amount_micros)
        try:
            self.ledger.hold(award)
        except SettlementError:
            if self.find(award.id) is not None:
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
        known = self.find(_escrow(task_id))
        return known is not None and not known.price_micros

    def refund(self, task_id: str, buyer: str) -> int:
        """Everything left in the task's account back to the buyer; returns how much, also when repeated."""
        identifier = f"{task_id}/refund"
        while True:
            known, left = self.find(identifier), self.ledger.balance(task_id)
            if known is None and not left:
                return 0
            try:
                known = known or self.ledger.hold(Award(identifier, 0, task_id, buyer, 0.0, left))
            except SettlementError:
                if self.find(identifier) is None and self.ledger.balance(task_id) == left:
                    raise
                continue  # a decided dispute took its share back meanwhile (`give_back`)
            return self.ledger.post(known.id).price_micros

    def give_back(self, award: Award, buyer: str) -> bool:
        """The price of one award that has come back to its task, on to the buyer, once; False, and nothing moved, if it
        went with all that was left of the task."""
        identifier = f"{award.id}/refund"
        if self.find(identifier) is None:
            try:
                self.ledger.hold(Award(identifier, award.round_index, award.buyer, buyer, 0.0, award.price_micros))
            except SettlementError:
                if self.find(f"{award.buyer}/refund") is None:
                    raise
                return False
        self.ledger.post(identifier)
        return True

    def round_awards(self, award_ids: dict[int, str]) -> dict[int, Award]:
        """Those of these awards that were made, as they stand."""
        found = {owner: self.find(identifier) for owner, identifier in award_ids.items()}
        return {owner: award for owner, award in found.items() if award is not None}

    def find(self, award_id: str) -> Award | None:
        """An award as it stands; None if it was never made."""
        try:
            return self.ledger.award(award_id)
        except LedgerCorrupt:
            raise
        except SettlementError:
            return None

    def privacy(self, party_id: str, unit: Unit | None = None) -> tuple[float | None, float]:
        """An owner's registered cap, if any, and what she has spent of it: total ε, at the cap's δ if it has one."""
        return self.privacy_of([party_id], unit)[party_id]

    def privacy_of(self, party_ids: Sequence[str], unit: Unit | None = None) -> dict[str, tuple[float | None, float]]:
        """The same of many owners at once; with a unit, a cap that counts the other one is none."""
        accounts = self.ledger.privacy_accounts(party_ids)
        found: dict[str, tuple[float | None, float]] = dict.fromkeys(party_ids, (None, 0.0))
        for party_id, account in accounts.items():
            if unit in (None, unit_of(account.cap)):
                found[party_id] = (limit_of(account.cap), account.spent)
        return found


def _escrow(task_id: str) -> str:
    return f"{task_id}/escrow"
