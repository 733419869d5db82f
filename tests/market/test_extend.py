"""docs/extend.md: whatever the page adds is played in memory, on Flower and in the broker, to the same end.

The page's own code, registered as it registers it; and its kind of market by its path, at owners who have files.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tomli_w import dumps as toml_text

from flmarket import aggregation, auctions, privacy
from flmarket.engines import MemoryOwners, play
from flmarket.engines.config import MarketConfig
from flmarket.errors import InvalidInput
from flmarket.learning import datasets, models
from flmarket.ledger import MemoryLedger, SqlLedger
from flmarket.market import FileStore, kinds
from flmarket.market.kind import kinds as kind_registry
from flmarket.market.record import close_records

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
RAFFLE = next(code for code in CODE if code.startswith('"""A raffle'))
BASE = {
    "seed": 5,
    "task": {"name": "t", "rounds": 2, "bidders_per_round": 6, "budget_per_round": 900.0},
    "data": {"name": "breast-cancer", "owners": 6, "partition": "equal"},
}
PARTS = {
    "auction": {"mechanism": {"auction": "even-price"}},
    "aggregation": {"mechanism": {"aggregation": "by-privacy"}},
    "perturbation": {"mechanism": {"perturbation": "laplace-l2"}},
    "model": {"model": {"name": "xor"}, "training": {"local_steps": 3, "batch_size": 16}},
    "data set": {"data": {"name": "xor", "owners": 6, "partition": "equal"}},
    "kind": {"kind": "raffle", "market": {"epsilon": 0.5, "price": 40.0}, "owners": {"privacy_cap": 0.75}},
}


@pytest.fixture(scope="module")
def page():
    """The page's names, its examples run once but for the audit, whose own tests are elsewhere."""
    pytest.importorskip("torch")
    registries = (auctions._registry, aggregation._registry, privacy._REGISTRY, datasets._registry, models)
    with pytest.MonkeyPatch.context() as patch:
        for registry in (*registries, kind_registry):
            patch.setattr(registry, "_entries", dict(registry._entries))
        module = ModuleType("extend_page")
        patch.setitem(sys.modules, "extend_page", module)
        for code in CODE:
            if "flmarket.audit" not in code and "simulate(" not in code:
                exec(compile(code, "extend.md", "exec"), vars(module))
        kinds.register("raffle", module.Raffle)
        yield module


def market(part):
    return BASE | PARTS[part]


@pytest.fixture(scope="module")
def alone(page):
    played = {}

    def find(part):
        if part not in played:
            played[part] = play(MarketConfig.parse(market(part)).spec(), ledger=MemoryLedger())[0]
        return played[part]

    return find


@pytest.mark.parametrize("part", PARTS)
def test_on_flower(part, alone, tmp_path):
    pytest.importorskip("flwr")
    from flmarket.engines.flower import simulate

    flower = simulate(MarketConfig.parse(market(part)), tmp_path)
    close_records()
    assert any(record.spent_micros for record in flower.records)
    np.testing.assert_array_equal(flower.parameters, alone(part).kind.parameters)
    assert [r.spent_micros for r in flower.records] == [r.spent_micros for r in alone(part).records]


@pytest.mark.parametrize("part", PARTS)
def test_in_the_broker(part, alone, tmp_path):
    pytest.importorskip("fastapi")
    from in_broker import played_in_broker

    from flmarket.broker.tables import vector

    offered = ("breast-cancer", "xor")
    with played_in_broker(tmp_path, market(part), data_sets=offered) as (_, row):
        assert row.spent_micros == sum(record.spent_micros for record in alone(part).records) > 0
        np.testing.assert_array_equal(vector(row.parameters), alone(part).kind.buyers_model)


def test_the_raffle_keeps_its_rules(alone):
    """Worked by hand: who is in the urn, how many are drawn, what they are paid, and that a cap ends it."""
    rounds = alone("kind")
    spec = rounds.kind.spec
    costs = spec.bids.cost(np.full(spec.bids.n, 0.5))
    in_urn = set(np.flatnonzero((costs <= 40.0) & (spec.bids.privacy_budget >= 0.5)).tolist())
    first, second = rounds.records
    assert set(first.bidders[first.delivered].tolist()) == in_urn  # 900 pay for 22 at 40 each
    assert set(first.price_micros[first.delivered].tolist()) == {40_000_000}
    assert set(first.epsilon[first.delivered].tolist()) == {0.5}
    # half of the lifetime's 0.75 is left, which is not the ε on offer: nobody sells twice
    assert in_urn
    assert not second.delivered.any()
    assert set(second.bidders.tolist()).isdisjoint(in_urn)


def test_settings_that_the_kind_lacks_are_a_mistake_in_the_file(page):
    for wrong in ({"epsilon": 0.5}, {"epsilon": 0.5, "price": 1.0, "colour": "red"}, {"epsilon": "much", "price": 1.0}):
        with pytest.raises(InvalidInput, match="market"):
            MarketConfig.parse(market("kind") | {"market": wrong}).spec()


def test_a_file_in_the_current_folder_is_a_kind(tmp_path, monkeypatch, capsys):
    """By its path in a market file: `flmarket run`, and owners who admit it in theirs; others stay out."""
    pytest.importorskip("flwr")
    from flmarket.cli.markets import run_market
    from flmarket.engines.flower import Deployment, InProcessGrid, KindStrategy, OwnerFile, client_app
    from flmarket.engines.flower.node import owner_of_node

    known = {name: entry for name, entry in kind_registry._entries.items() if name != "raffle"}
    monkeypatch.setattr(kind_registry, "_entries", known)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("a_raffle.py").write_text(RAFFLE)
    importlib.invalidate_caches()
    toml = toml_text(market("kind") | {"kind": "a_raffle:Raffle"})
    Path("market.toml").write_text(toml)
    run_market(Path("market.toml"), Path("out"), None, None, True)
    assert json.loads(capsys.readouterr().out)["mechanism"] == "raffle"

    deployment = Deployment(tmp_path / "deployed", toml)
    deployment.prepare()
    files = [deployment.owner_folder(i) / "owner.toml" for i in range(deployment.nodes)]
    assert OwnerFile.load(files[0]).kinds == ("a_raffle:Raffle",)
    grid = InProcessGrid(client_app(owner_of_node), deployment.nodes, lambda i: {"owner-file": str(files[i])})
    with SqlLedger(deployment.ledger_url) as ledger:
        strategy = KindStrategy(deployment.spec.kind(), ledger, FileStore(deployment.state / "server"))
        strategy.start(grid)
        ledger.verify()
    close_records()
    alone, _ = play(deployment.spec, ledger=MemoryLedger())
    assert [r.spent_micros for r in strategy.records] == [r.spent_micros for r in alone.records]
    assert strategy.records[0].spent_micros > 0

    call = deployment.spec.kind().announcement(0)
    del kind_registry._entries["raffle"]  # a machine that admits nothing by path
    assert MemoryOwners(deployment.spec).proposed(0, call) is None


def test_a_kind_or_noise_may_not_take_anothers_name(tmp_path, monkeypatch):
    """Messages carry names: one that means something else at an owner's would be another market."""
    for registry in (kind_registry, privacy._REGISTRY):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "impostor.py").write_text(
        "from flmarket.market.kinds import AuctionKind\nfrom flmarket.privacy import LaplaceL1\n"
        "class Mine(AuctionKind): pass\nclass Weak(LaplaceL1): pass\n"
    )
    for registry, name, taken in ((kind_registry, "Mine", "auction"), (privacy._REGISTRY, "Weak", "laplace-l1")):
        with pytest.raises(InvalidInput, match=taken):
            registry.admit(f"impostor:{name}")
        with pytest.raises(InvalidInput, match=taken):
            registry.admit(f"impostor:{name}")  # nor the second time
