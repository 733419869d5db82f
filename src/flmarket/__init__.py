"""flmarket: markets in federated learning.

Buyers post a task and a budget; data owners bid what their privacy costs; a broker clears an auction; owners train
locally, clip and add noise at home; the broker aggregates; everyone is paid exactly once.

What is reachable through ``__all__`` here and in the packages is public; all else may change.
"""

from importlib import import_module
from types import ModuleType

from flmarket.bids import (
    APPROXIMATE,
    EXACT,
    EXPONENTIAL,
    LINEAR,
    NONE,
    QUADRATIC,
    SQRT,
    STEP,
    TABULATED,
    Auction,
    BidProfile,
    Guarantee,
    Guarantees,
    Kind,
    Outcome,
    Valuations,
)
from flmarket.errors import FlmarketError, InvalidInput

__version__ = "0.1.0"

_PACKAGES = frozenset(
    [
        "aggregation",
        "auctions",
        "audit",
        "engines",
        "games",
        "learning",
        "ledger",
        "market",
        "populations",
        "privacy",
        "report",
        "sampling",
    ]
)


def __getattr__(name: str) -> ModuleType:
    """`import flmarket` is enough: `flmarket.auctions` and its neighbours load when first used."""
    if name in _PACKAGES:
        return import_module(f"flmarket.{name}")
    raise AttributeError(f"module 'flmarket' has no attribute {name!r}")


__all__ = [
    "APPROXIMATE",
    "EXACT",
    "EXPONENTIAL",
    "LINEAR",
    "NONE",
    "QUADRATIC",
    "SQRT",
    "STEP",
    "TABULATED",
    "Auction",
    "BidProfile",
    "FlmarketError",
    "Guarantee",
    "Guarantees",
    "InvalidInput",
    "Kind",
    "Outcome",
    "Valuations",
    "__version__",
]
