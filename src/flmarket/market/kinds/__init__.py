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

for _kind, _line in (
    (AuctionKind, "Every round an auction picks whose private updates to buy, at which privacy loss and price."),
    (JointKind, "One auction chooses clients for all rounds, whose noisy uploads are combined robustly."),
    (RewardKind, "One reward for all rounds, shared by how much privacy each owner gives up for it."),
    (SamplingKind, "Every round clients are drawn and paid for taking part; updates come as they are, without noise."),
):
    _kinds.register(_kind.name, _kind, about=_line)
about, admit, names, of, register = _kinds.about, _kinds.admit, _kinds.names, _kinds.of, _kinds.register
