"""The app that `flwr run` starts beside an owner's data, configured by her own machine.

A SuperNode's configuration names her `owner-file` (see `files`). A node without one but with a `partition-id`, as
Flower's simulation gives it, plays that owner of the run's market file on public data, with seeded noise unless the run
says `noise = "secure"`. So a run's configuration, which the server sends, never decides about noise where an owner
has data of her own.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context

from flmarket.engines.flower.client import client_app
from flmarket.errors import ConfigError
from flmarket.market import Owner

if TYPE_CHECKING:
    from flmarket.engines.memory import Spec


def owner_of_node(context: Context) -> Owner:
    """Whose machine this is."""
    if "owner-file" in context.node_config:
        return _own(Path(str(context.node_config["owner-file"])))
    if "partition-id" not in context.node_config:
        raise ConfigError("node configuration", sorted(context.node_config), "owner-file, the path of an owner.toml")
    from flmarket.engines.flower.files import located

    seeded = context.run_config.get("noise", "seeded") != "secure"
    market, number = located(run_setting(context, "market")), int(context.node_config["partition-id"])
    folder = Path(run_setting(context, "state")) / "owners"
    return market_of(market).owner(number, folder / f"owner-{number}", seeded=seeded)


@lru_cache(maxsize=8)
def market_of(path: Path) -> Spec:
    """The market that a file describes."""
    from flmarket.engines.config import MarketConfig

    return MarketConfig.load(path).spec(base=path.parent)


@lru_cache(maxsize=8)
def _own(path: Path) -> Owner:
    from flmarket.engines.flower.files import OwnerFile

    return OwnerFile.load(path).owner_at(path.parent)


def run_setting(context: Context, key: str) -> str:
    """A setting that the run must give."""
    value = str(context.run_config.get(key, ""))
    if not value:
        raise ConfigError("run configuration", sorted(context.run_config), f"{key} (docs/flower.md)")
    return value


app = client_app(owner_of_node)
