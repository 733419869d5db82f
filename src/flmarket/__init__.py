"""flmarket: markets in federated learning.

Buyers post a task and a budget; data owners bid what their privacy costs; a broker clears an auction; owners train
locally, clip and add noise at home; the broker aggregates; everyone is paid exactly once.

What is reachable through ``__all__`` here and in the packages is public; all else may change.
"""

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
