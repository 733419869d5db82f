"""The ledger: money in integer micro-units, moved by double entry, held in escrow until delivery."""

from flmarket.ledger.journal import (
    BANK,
    ESCROW,
    Award,
    AwardState,
    Ledger,
    MemoryLedger,
    Transfer,
)
from flmarket.ledger.money import MICROS, format_micros, payments_to_micros, to_micros

__all__ = [
    "BANK",
    "ESCROW",
    "MICROS",
    "Award",
    "AwardState",
    "Ledger",
    "MemoryLedger",
    "Transfer",
    "format_micros",
    "payments_to_micros",
    "to_micros",
]
