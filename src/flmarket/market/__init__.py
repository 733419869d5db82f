"""One round, three seams: the kind decides, owners answer, the books keep. See `round`."""

from flmarket.market import kinds
from flmarket.market.kind import (
    Announcement,
    Bad,
    Bid,
    Delivered,
    Delivery,
    MarketKind,
    MarketResult,
    Order,
    OwnerStatement,
    Refused,
    RoundPlan,
    RoundRecord,
    Silent,
    Task,
    award_id,
    owner_account,
)
from flmarket.market.kinds import AuctionSpec, JointSpec, RewardSpec, SamplingSpec
from flmarket.market.owner import Guard, Owner, OwnerSide, PrivacyCap
from flmarket.market.round import Owners, Rounds, TooFewBids, new_task, resolve_each
from flmarket.market.store import Checkpoint, FileStore, MemoryStore, RoundStore

__all__ = [
    "Announcement",
    "AuctionSpec",
    "Bad",
    "Bid",
    "Checkpoint",
    "Delivered",
    "Delivery",
    "FileStore",
    "Guard",
    "JointSpec",
    "MarketKind",
    "MarketResult",
    "MemoryStore",
    "Order",
    "Owner",
    "OwnerSide",
    "OwnerStatement",
    "Owners",
    "PrivacyCap",
    "Refused",
    "RewardSpec",
    "RoundPlan",
    "RoundRecord",
    "RoundStore",
    "Rounds",
    "SamplingSpec",
    "Silent",
    "Task",
    "TooFewBids",
    "award_id",
    "kinds",
    "new_task",
    "owner_account",
    "resolve_each",
]
