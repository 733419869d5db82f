"""The four kinds of market, one file each: the decision, the owner's side, and a run in the kind's own terms."""

from flmarket.market.kind import kinds
from flmarket.market.kinds.auction import AuctionKind, AuctionSpec
from flmarket.market.kinds.joint import JointKind, JointSpec
from flmarket.market.kinds.reward import RewardKind, RewardSpec
from flmarket.market.kinds.sampling import SamplingKind, SamplingSpec

__all__ = [
    "AuctionKind",
    "AuctionSpec",
    "JointKind",
    "JointSpec",
    "RewardKind",
    "RewardSpec",
    "SamplingKind",
    "SamplingSpec",
]

for _kind in (AuctionKind, JointKind, RewardKind, SamplingKind):
    kinds.register(_kind.name, _kind)
