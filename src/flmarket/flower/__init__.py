"""Sell and buy what any Flower app trains: a mod for the owners' ClientApp, a strategy around the buyer's own.

    app = ClientApp(mods=[owner_guard()])                                      # owner: train and model stay as they are
    strategy = MarketStrategy(FedAdam(), market=Market(budget_per_round=20.0)) # buyer: any Strategy inside

The names of this page are the public ones and follow semantic versioning. They load when they are first used: an
owner's app starts anew for every message, and should not wait for the buyer's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flmarket.flower.buyer import Market, MarketStrategy, Result
    from flmarket.flower.owner import owner_guard

__all__ = ["Market", "MarketStrategy", "Result", "owner_guard"]


def __getattr__(name: str) -> Any:
    """The public names, each from its module."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{'owner' if name == 'owner_guard' else 'buyer'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
