"""The market over Flower: a strategy that buys, a guarded app that sells, in simulation and in deployments.

Names load when they are first used: an owner's app starts anew for every message, and should not wait for the server's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flmarket.engines.flower.auction import AuctionMarket
    from flmarket.engines.flower.client import client_app
    from flmarket.engines.flower.deployment import Deployment
    from flmarket.engines.flower.files import OwnerFile
    from flmarket.engines.flower.guard import OwnerGuard
    from flmarket.engines.flower.inprocess import InProcessGrid
    from flmarket.engines.flower.joint import JointMarket
    from flmarket.engines.flower.owner import Owner
    from flmarket.engines.flower.play import FlowerRun, simulate
    from flmarket.engines.flower.ray_runtime import RayFailed
    from flmarket.engines.flower.reward import RewardMarket
    from flmarket.engines.flower.sampling import SamplingMarket
    from flmarket.engines.flower.store import RoundStore
    from flmarket.engines.flower.strategy import MarketStrategy

__all__ = [
    "AuctionMarket",
    "Deployment",
    "FlowerRun",
    "InProcessGrid",
    "JointMarket",
    "MarketStrategy",
    "Owner",
    "OwnerFile",
    "OwnerGuard",
    "RayFailed",
    "RewardMarket",
    "RoundStore",
    "SamplingMarket",
    "client_app",
    "simulate",
]

_HOME = {
    "AuctionMarket": "auction",
    "Deployment": "deployment",
    "FlowerRun": "play",
    "InProcessGrid": "inprocess",
    "JointMarket": "joint",
    "MarketStrategy": "strategy",
    "Owner": "owner",
    "OwnerFile": "files",
    "OwnerGuard": "guard",
    "RayFailed": "ray_runtime",
    "RewardMarket": "reward",
    "RoundStore": "store",
    "SamplingMarket": "sampling",
    "client_app": "client",
    "simulate": "play",
}


def __getattr__(name: str) -> Any:
    """The public names, each from its module."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
