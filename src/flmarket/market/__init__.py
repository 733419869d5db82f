"""The market: tasks, rounds and awards, from bids to settlement. No I/O; engines drive it."""

from flmarket.market.market import Market, Round, award_id, new_task, owner_account, resolve_each
from flmarket.market.task import MarketResult, OwnerStatement, RoundRecord, Task

__all__ = [
    "Market",
    "MarketResult",
    "OwnerStatement",
    "Round",
    "RoundRecord",
    "Task",
    "award_id",
    "new_task",
    "owner_account",
    "resolve_each",
]
