"""The kinds of market, one file each: the decision, the owner's side, and a run in the kind's own terms.

The registry of kinds too: `register("mine", MyKind)`, an entry point in `flmarket.kinds`, or `package.module:MyKind`.
"""

from flmarket.market.kind import kinds as _kinds
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
    "about",
    "admit",
    "names",
    "of",
    "register",
]

for _kind in (AuctionKind, JointKind, RewardKind, SamplingKind):
    _kinds.register(_kind.name, _kind)
about, admit, names, of, register = _kinds.about, _kinds.admit, _kinds.names, _kinds.of, _kinds.register
