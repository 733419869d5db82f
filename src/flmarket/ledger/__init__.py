"""The ledger: money in integer micro-units, moved by double entry, held in escrow until delivery.

`MemoryLedger` ends with the process. `SqlLedger(url)` keeps the same books in SQLite or PostgreSQL (it needs the extra
`store`, and is imported when asked for). `DurableAccount` is an owner's own record of the privacy she gave away, in a
file beside her data.
"""

from typing import TYPE_CHECKING, Any

from flmarket.errors import needed
from flmarket.ledger.entry import Entry, EntryKind
from flmarket.ledger.journal import (
    BANK,
    ESCROW,
    FEES,
    MICROS,
    Award,
    AwardState,
    Frozen,
    HoldNotProven,
    IdReused,
    LedgerCorrupt,
    LedgerUnavailable,
    Release,
    ReplayRefused,
    Resolution,
    Transfer,
    dispute_of,
    format_micros,
    payments_to_micros,
    to_micros,
)
from flmarket.ledger.memory import EXPIRY, Ledger, MemoryLedger, hold_receipt, hold_receipts
from flmarket.ledger.merkle import Head
from flmarket.ledger.owner_account import DurableAccount
from flmarket.ledger.receipt import HoldReceipt, Receipt, SealedReceipt, read_receipts

if TYPE_CHECKING:
    from flmarket.ledger.sql import SqlLedger

__all__ = [
    "BANK",
    "ESCROW",
    "EXPIRY",
    "FEES",
    "MICROS",
    "Award",
    "AwardState",
    "DurableAccount",
    "Entry",
    "EntryKind",
    "Frozen",
    "Head",
    "HoldNotProven",
    "HoldReceipt",
    "IdReused",
    "Ledger",
    "LedgerCorrupt",
    "LedgerUnavailable",
    "MemoryLedger",
    "Receipt",
    "Release",
    "ReplayRefused",
    "Resolution",
    "SealedReceipt",
    "SqlLedger",
    "Transfer",
    "dispute_of",
    "format_micros",
    "hold_receipt",
    "hold_receipts",
    "payments_to_micros",
    "read_receipts",
    "to_micros",
]


def __getattr__(name: str) -> Any:
    """`SqlLedger` on demand, because it needs SQLAlchemy."""
    if name == "SqlLedger":
        with needed("store"):
            from flmarket.ledger.sql import SqlLedger
        return SqlLedger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
