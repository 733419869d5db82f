"""Errors of the ledger that callers tell apart from a refused transfer, with exit codes of their own."""

from __future__ import annotations

from typing import Literal

from flmarket.errors import FlmarketError, SettlementError

__all__ = ["HoldNotProven", "IdReused", "LedgerCorrupt", "LedgerUnavailable", "ReplayRefused"]


class LedgerCorrupt(SettlementError):
    """The stored log is not what was written; `seq` is the first bad entry, None if the entries themselves are good."""

    exit_code = 9

    def __init__(self, message: str, seq: int | None = None) -> None:
        self.seq = seq
        super().__init__(message if seq is None else f"entry {seq}: {message}")


class HoldNotProven(SettlementError):
    """What was shown does not prove that a price is in escrow.

    `part` is what is wrong: "award" (another award, party, price or privacy loss), "entry", "inclusion", "head" (its
    last hash), or "consistency" (the log does not continue the one that was seen before).
    """

    exit_code = 9

    def __init__(self, part: Literal["award", "entry", "inclusion", "head", "consistency"], message: str) -> None:
        self.part = part
        super().__init__(message)


class IdReused(SettlementError):
    """An id that the ledger has with other content (another amount, party, price, privacy loss, kind of entry, task).

    Nothing was booked: a call repeated with the same content succeeds, one with other content never does.
    """


class ReplayRefused(SettlementError):
    """A release for an award that this owner has released for already; nothing more may leave."""

    exit_code = 10


class LedgerUnavailable(FlmarketError):
    """The database did not answer, or the connection broke. The call may have happened: repeat it with the same id."""

    exit_code = 11
