"""The market over Flower: a strategy that buys, a guarded app that sells, in simulation and in deployments.

Names load when they are first used: an owner's app starts anew for every message, and should not wait for the server's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flmarket.engines.flower.client import OwnerGuard, client_app
    from flmarket.engines.flower.deployment import Deployment
    from flmarket.engines.flower.files import OwnerFile
    from flmarket.engines.flower.play import FlowerRun, InProcessGrid, RayFailed, simulate
    from flmarket.engines.flower.strategy import GridOwners, KindStrategy
    from flmarket.market import FileStore, Owner

__all__ = [
    "Deployment",
    "FileStore",
    "FlowerRun",
    "GridOwners",
    "InProcessGrid",
    "KindStrategy",
    "Owner",
    "OwnerFile",
    "OwnerGuard",
    "RayFailed",
    "client_app",
    "simulate",
]

# what Flower and Ray are told, so that nothing is sent home
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

_HOME = {
    "Deployment": "deployment",
    "FlowerRun": "play",
    "GridOwners": "strategy",
    "InProcessGrid": "play",
    "KindStrategy": "strategy",
    "OwnerFile": "files",
    "OwnerGuard": "client",
    "RayFailed": "play",
    "client_app": "client",
    "simulate": "play",
}


def __getattr__(name: str) -> Any:
    """The public names, each from its module."""
    if name in ("FileStore", "Owner"):
        return getattr(import_module("flmarket.market"), name)
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
