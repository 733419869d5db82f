"""A double-entry journal with two-phase awards, in memory.

Every change is a transfer of a positive integer amount from one account to another, so money is neither made nor lost.
An award holds its price in escrow and is resolved exactly once: posted (paid to the owner), voided (back to the buyer)
or expired (back to the buyer after the deadline). Calls carry an id chosen by the caller; repeating a call with the
same content changes nothing, and with other content is an error. Each call either happens whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from flmarket.errors import InvalidInput, SettlementError
from flmarket.ledger.money import MAX_MICROS, format_micros

__all__ = ["BANK", "ESCROW", "Award", "AwardState", "Ledger", "MemoryLedger", "Transfer"]

BANK = "bank"  # where deposits come from: the outside world, the only account that may be negative
ESCROW = "escrow"


class AwardState(StrEnum):
    """Where an award stands; the last three are final."""

    PENDING = "pending"
    POSTED = "posted"
    VOIDED = "voided"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Transfer:
    """One line of the journal: `amount_micros` from the debited to the credited account."""

    id: str
    debit: str
    credit: str
    amount_micros: int


@dataclass(frozen=True)
class Award:
    """A promise to pay an owner for one release at a privacy loss, resolved once."""

    id: str
    round_index: int
    buyer: str
    owner: str
    epsilon: float
    price_micros: int
    state: AwardState = AwardState.PENDING
    reason: str = ""


class Ledger(Protocol):
    """What the market needs of a ledger; every store passes the same tests."""

    def deposit(self, id: str, account: str, amount_micros: int) -> None:
        """Bring money in from outside."""

    def hold(self, award: Award) -> Award:
        """Put an award's price from the buyer's account into escrow."""

    def post(self, award_id: str) -> Award:
        """Delivery verified: pay the owner."""

    def void(self, award_id: str, reason: str) -> Award:
        """No delivery, or a bad one: return the price to the buyer."""

    def expire(self, award_id: str) -> Award:
        """The deadline passed: return the price to the buyer."""

    def award(self, award_id: str) -> Award:
        """One award as it stands."""

    def awards(self) -> Iterator[Award]:
        """All awards in the order they were made."""

    def balance(self, account: str) -> int:
        """Micro-units in an account."""

    def verify(self) -> None:
        """Raise SettlementError unless every rule of this module holds."""


class MemoryLedger:
    """The journal in memory: for simulation, and the model that durable stores are tested against."""

    def __init__(self) -> None:
        self._journal: list[Transfer] = []
        self._by_id: dict[str, Transfer] = {}
        self._balances: dict[str, int] = {BANK: 0, ESCROW: 0}
        self._awards: dict[str, Award] = {}

    def deposit(self, id: str, account: str, amount_micros: int) -> None:
        """Bring money in from outside."""
        if account in (BANK, ESCROW):
            raise InvalidInput("account", account, "the account of a buyer or an owner")
        self._transfer(Transfer(id, BANK, account, amount_micros))

    def hold(self, award: Award) -> Award:
        """Put an award's price from the buyer's account into escrow."""
        known = self._awards.get(award.id)
        if known is not None:
            if replace(known, state=award.state, reason=award.reason) != award:
                raise SettlementError(f"award {award.id} exists with other terms")
            return known
        if award.state is not AwardState.PENDING:
            raise SettlementError(f"award {award.id} is {award.state}: only a pending award can be held")
        self._transfer(Transfer(f"{award.id}/hold", award.buyer, ESCROW, award.price_micros))
        self._awards[award.id] = award
        return award

    def post(self, award_id: str) -> Award:
        """Delivery verified: pay the owner."""
        return self._resolve(award_id, AwardState.POSTED, "")

    def void(self, award_id: str, reason: str) -> Award:
        """No delivery, or a bad one: return the price to the buyer."""
        return self._resolve(award_id, AwardState.VOIDED, reason)

    def expire(self, award_id: str) -> Award:
        """The deadline passed: return the price to the buyer."""
        return self._resolve(award_id, AwardState.EXPIRED, "deadline passed")

    def award(self, award_id: str) -> Award:
        """One award as it stands."""
        if award_id not in self._awards:
            raise SettlementError(f"there is no award {award_id}")
        return self._awards[award_id]

    def awards(self) -> Iterator[Award]:
        """All awards in the order they were made."""
        return iter(tuple(self._awards.values()))

    def transfers(self) -> Iterator[Transfer]:
        """The journal, oldest first."""
        return iter(tuple(self._journal))

    def balance(self, account: str) -> int:
        """Micro-units in an account; an account never used holds 0."""
        return self._balances.get(account, 0)

    def verify(self) -> None:
        """Recompute every balance from the journal and check the rules, or raise SettlementError."""
        balances: dict[str, int] = {BANK: 0, ESCROW: 0}
        for line in self._journal:
            balances[line.debit] = balances.get(line.debit, 0) - line.amount_micros
            balances[line.credit] = balances.get(line.credit, 0) + line.amount_micros
        pending = sum(a.price_micros for a in self._awards.values() if a.state is AwardState.PENDING)
        problems = [
            f"balance of {account} is {self._balances.get(account)}, the journal says {amount}"
            for account, amount in balances.items()
            if self._balances.get(account) != amount
        ]
        problems += [f"{a} is overdrawn by {-b}" for a, b in balances.items() if b < 0 and a != BANK]
        if sum(balances.values()) != 0:
            problems.append(f"debits and credits differ by {sum(balances.values())}")
        if balances[ESCROW] != pending:
            problems.append(f"escrow holds {balances[ESCROW]} for pending awards of {pending}")
        if problems:
            raise SettlementError("; ".join(problems))

    def _resolve(self, award_id: str, state: AwardState, reason: str) -> Award:
        award = self.award(award_id)
        if award.state is state:
            return award
        if award.state is not AwardState.PENDING:
            raise SettlementError(f"award {award_id} is already {award.state}, it cannot be {state}")
        payee = award.owner if state is AwardState.POSTED else award.buyer
        self._transfer(Transfer(f"{award_id}/{state}", ESCROW, payee, award.price_micros))
        self._awards[award_id] = resolved = replace(award, state=state, reason=reason)
        return resolved

    def _transfer(self, line: Transfer) -> None:
        known = self._by_id.get(line.id)
        if known == line:
            return
        if known is not None:
            raise SettlementError(f"transfer {line.id} exists with other terms")
        amount = line.amount_micros
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 <= amount <= MAX_MICROS:
            raise InvalidInput("amount_micros", amount, f"a whole number from 0 to {MAX_MICROS}")
        if line.debit == line.credit:
            raise SettlementError(f"transfer {line.id} is from {line.debit} to itself")
        available = self.balance(line.debit)
        if line.debit != BANK and available < amount:
            needed = format_micros(amount)
            raise SettlementError(f"{line.debit} holds {format_micros(available)}, transfer {line.id} needs {needed}")
        self._balances[line.debit] = available - amount
        self._balances[line.credit] = self.balance(line.credit) + amount
        self._by_id[line.id] = line
        self._journal.append(line)
