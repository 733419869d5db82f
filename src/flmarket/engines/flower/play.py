"""A market described by a file or a spec, played through Flower on this machine: in this process, or on Ray.

The same apps, messages, guard and strategy as in a deployment; what is simulated is the network, and the owners' noise,
which is the seeded one unless `secure_noise` is set. With seeded noise a run equals the simulation engine's, award for
award and parameter for parameter.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flmarket.engines.config import MarketConfig
from flmarket.engines.flower.auction import AuctionMarket
from flmarket.engines.flower.client import client_app
from flmarket.engines.flower.inprocess import InProcessGrid
from flmarket.engines.flower.joint import JointMarket
from flmarket.engines.flower.kinds import MarketKind
from flmarket.engines.flower.owner import Owner
from flmarket.engines.flower.ray_runtime import QUIET, play_on_ray
from flmarket.engines.flower.reward import RewardMarket
from flmarket.engines.flower.sampling import SamplingMarket, posted_terms
from flmarket.engines.flower.store import RoundStore
from flmarket.engines.flower.strategy import MarketStrategy
from flmarket.engines.jdp import JdpTraining
from flmarket.engines.sampled import SampledTraining
from flmarket.engines.simulation import Simulation
from flmarket.engines.stackelberg import StackelbergTraining
from flmarket.errors import ConfigError
from flmarket.learning import SoftmaxRegression
from flmarket.ledger import Ledger, MemoryLedger
from flmarket.market import RoundRecord

__all__ = ["QUIET", "Dealer", "FlowerRun", "market_kind", "market_spec", "simulate", "store_spec"]

FloatArray = NDArray[np.float64]
Spec = Simulation | StackelbergTraining | SampledTraining | JdpTraining


@dataclass(frozen=True, eq=False)
class FlowerRun:
    """What a run leaves behind. `seconds` holds the time of each round that this call played, by step."""

    records: tuple[RoundRecord, ...]
    parameters: FloatArray
    ledger: Ledger
    seconds: tuple[dict[str, float], ...]


def market_spec(config: MarketConfig, *, data_dir: Path | None = None, base: Path = Path()) -> Spec:
    """The market that a file describes; `base` is the file's folder."""
    if config.is_stackelberg:
        return config.stackelberg_training(data_dir=data_dir, base=base)
    if config.is_jdp:
        return config.jdp_training(data_dir=data_dir, base=base)
    if config.is_sampling:
        return config.sampled_training(data_dir=data_dir, base=base)
    return config.simulation(data_dir=data_dir, base=base)


def market_kind(spec: Spec, config: MarketConfig | None = None) -> MarketKind:
    """The spec as a market that Flower's strategy plays; with its file, sampling terms follow the costs reported."""
    if isinstance(spec, Simulation):
        plain = replace(spec.local, epochs=None, momentum=0.0, optimizer="sgd")
        softmax = SoftmaxRegression(spec.data.features, spec.data.n_classes, local=plain)
        if spec.local != plain or spec.model not in (None, softmax):
            raise ConfigError("model", spec.model, "softmax regression by plain descent in auctions over Flower")
        return AuctionMarket(spec)
    if isinstance(spec, StackelbergTraining):
        return RewardMarket(spec)
    if isinstance(spec, JdpTraining):
        return JointMarket(spec)
    if config is None or config.task.budget_per_round is None:
        return SamplingMarket(spec)
    budget = config.task.budget_per_round / spec.partition.owners
    return SamplingMarket(spec, posted_terms(config.sampling, budget))


@dataclass(frozen=True)
class Dealer:
    """Deals owners out of a stored spec by their node's `partition-id`. Small, so that it travels with the app."""

    spec_file: Path
    records: Path
    secure_noise: bool = False

    def __call__(self, context: Context) -> Owner:
        """The owner of this node."""
        return _dealt(self, int(context.node_config["partition-id"]))


@lru_cache(maxsize=256)
def _dealt(dealer: Dealer, number: int) -> Owner:
    return Owner.dealt(_stored_spec(dealer.spec_file), number, dealer.records, seeded=not dealer.secure_noise)


def store_spec(spec: Spec, folder: Path) -> Path:
    """Write a spec where a `Dealer` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.pickle"
    if isinstance(spec, SampledTraining):  # a function of the round, which orders carry and pickles do not
        spec = replace(spec, learning_rate=None)
    path.write_bytes(pickle.dumps(spec))
    _stored_spec.cache_clear()
    _dealt.cache_clear()
    return path


@lru_cache(maxsize=4)
def _stored_spec(path: Path) -> Spec:
    # written by `simulate` of this process or its parent, in a folder of the user's choice
    spec: Spec = pickle.loads(path.read_bytes())  # noqa: S301
    return spec


def simulate(
    market: MarketConfig | Spec,
    folder: Path,
    *,
    ledger: Ledger | None = None,
    backend: Literal["in-process", "ray"] = "in-process",
    secure_noise: bool = False,
    progress: Callable[[RoundRecord], None] | None = None,
    bid_seconds: float = 60.0,
    train_seconds: float = 600.0,
    **strategy: Any,
) -> FlowerRun:
    """Play a market; `folder` gets the owners' records and the server's state, and a run there goes on if cut off."""
    config = market if isinstance(market, MarketConfig) else None
    spec = market_spec(market) if isinstance(market, MarketConfig) else market
    books = MemoryLedger() if ledger is None else ledger
    spec_file = store_spec(spec, folder)
    store = RoundStore(folder / "server", synchronised=False)
    played = MarketStrategy(
        market_kind(spec, config), books, store, nodes=spec.partition.owners, progress=progress,
        bid_seconds=bid_seconds, train_seconds=train_seconds, **strategy,
    )  # fmt: skip
    app = client_app(Dealer(spec_file, folder / "owners", secure_noise), faults=True)
    if backend == "in-process":
        played.start(InProcessGrid(app, spec.partition.owners))
    else:
        play_on_ray(played, app, spec.partition.owners)
    books.verify()
    return FlowerRun(tuple(played.records), played.kind.parameters, books, tuple(played.timings))
