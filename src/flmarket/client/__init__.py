"""A Python client of the broker's API: `BrokerClient(url, key)`. Needs httpx and nothing else of the broker."""

from flmarket.client.client import BrokerClient
from flmarket.client.errors import BrokerRefused, BrokerUnreachable
from flmarket.client.values import (
    Account,
    Audit,
    Bid,
    BidAdvice,
    Bill,
    BudgetPoint,
    Offer,
    Privacy,
    Progress,
    Release,
    Round,
    Statement,
    Task,
)

__all__ = [
    "Account",
    "Audit",
    "Bid",
    "BidAdvice",
    "Bill",
    "BrokerClient",
    "BrokerRefused",
    "BrokerUnreachable",
    "BudgetPoint",
    "Offer",
    "Privacy",
    "Progress",
    "Release",
    "Round",
    "Statement",
    "Task",
]
