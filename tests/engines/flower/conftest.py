"""A small market, and a grid whose nodes can be told to misbehave."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flmarket.engines.config import MarketConfig
from flmarket.engines.flower import FileStore, InProcessGrid, KindStrategy, client_app
from flmarket.engines.flower.play import Dealer, FailingGuard, store_spec
from flmarket.ledger import MemoryLedger
from flmarket.market.record import close_records

logging.getLogger("flwr").setLevel(logging.CRITICAL)


def small_market(**changes):
    """Five owners of breast-cancer records, three rounds; every section can be changed."""
    values = {
        "seed": 11,
        "task": {"name": "tumours", "rounds": 3, "bidders_per_round": 4, "budget_factor": 0.6, "learning_rate": 0.2},
        "data": {"name": "breast-cancer", "owners": 5, "sigma": 0.5, "minimum": 20},
        "owners": {"privacy_cap": 4.0},
        "mechanism": {"auction": "posted", "perturbation": "sphere"},
    }
    for section, change in changes.items():
        values[section] = values[section] | change if isinstance(change, dict) and section in values else change
    return MarketConfig.parse(values)


class MisbehavingGrid(InProcessGrid):
    """Nodes do what `behaviour[partition-id](message, honest)` says; `honest()` gives the honest answers."""

    def __init__(self, app, nodes):
        super().__init__(app, nodes)
        self.behaviour = {}
        self.seen = []

    def node(self, owner):
        return list(self.contexts)[owner]

    def answer(self, message):
        owner = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        honest = lambda: super(MisbehavingGrid, self).answer(message)  # noqa: E731
        answers = self.behaviour[owner](message, honest) if owner in self.behaviour else honest()
        self.seen.append((message, answers))
        return answers


class Stage:
    """A market ready to play: `play()` once, or again after a crash with the same files."""

    def __init__(self, spec, folder: Path, **options):
        self.spec, self.folder, self.options = spec, folder, {"bid_seconds": 5.0, "train_seconds": 5.0} | options
        self.dealer = Dealer(store_spec(spec, folder), folder / "owners")
        self.grid = MisbehavingGrid(client_app(self.dealer, guard=FailingGuard), spec.partition.owners)
        self.ledger = MemoryLedger()
        self.strategy = None

    def play(self, **changes):
        store = changes.pop("store", None) or FileStore(self.folder / "server")
        ledger = changes.pop("ledger", self.ledger)
        self.strategy = KindStrategy(self.spec.kind(), ledger, store, **(self.options | changes))
        self.strategy.start(self.grid)
        return self.strategy


@pytest.fixture(autouse=True)
def closed_records():
    yield
    close_records()


@pytest.fixture
def market():
    return small_market


@pytest.fixture
def stage(tmp_path):
    return lambda spec, name="stage", **options: Stage(spec, tmp_path / name, **options)
