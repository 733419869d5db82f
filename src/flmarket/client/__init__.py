"""A Python client of the broker's API: `BrokerClient(url, key)`, with `wire`, the values it returns.

Needs httpx and pydantic (`flmarket[client]`), and nothing of the broker.
"""

from flmarket.client.client import BrokerClient, BrokerRefused, BrokerUnreachable
from flmarket.client.wire import (
    Account,
    Audit,
    Bid,
    BidAdvice,
    Bill,
    BudgetPoint,
    Offer,
    Party,
    Privacy,
    Progress,
    Release,
    Round,
    Statement,
    Task,
)  # fmt: skip

__all__ = [
    "Account", "Audit", "Bid", "BidAdvice", "Bill", "BrokerClient", "BrokerRefused", "BrokerUnreachable", "BudgetPoint",
    "Offer", "Party", "Privacy", "Progress", "Release", "Round", "Statement", "Task",
]  # fmt: skip
