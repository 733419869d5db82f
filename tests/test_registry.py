"""Names: three ways in, one way to look up, and nothing imported because a stranger spelled it out."""

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from flmarket import aggregation, auctions, privacy
from flmarket.aggregation import robust
from flmarket.errors import InvalidInput, UnknownName
from flmarket.learning import datasets, models
from flmarket.registry import Registry


@dataclass(frozen=True)
class Thing:
    """A thing.

    More about it.
    """

    size: int = 1


@pytest.fixture
def things():
    return Registry("thing", "flmarket_test.things", offers=("clip",))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, in the current folder."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write


def test_registration_in_python(things):
    things.register("one", Thing)
    assert things.get("one", size=3) == Thing(3)
    assert things.about("one") == "A thing."

    @things.register("two", about="Twice as much")
    def two(size=2):
        return Thing(2 * size)

    assert two(5) == Thing(10)  # the decorator leaves it as it was
    assert things.get("two") == Thing(4)
    assert things.about("two") == "Twice as much"
    assert things.names() == ("one", "two")
    for taken in ("one", "a:b", "", 3):
        with pytest.raises(InvalidInput):
            things.register(taken, Thing)


def test_an_unknown_name_is_told_the_known_ones(things):
    things.register("apple", Thing)
    for name in ("aple", "", None, 3, "apple:small", "no.such:Thing"):
        with pytest.raises(UnknownName, match="one of apple"):
            things.get(name)
    with pytest.raises(UnknownName, match="did you mean 'apple'"):
        things.about("aple")


def test_what_the_market_offers_may_be_left_but_a_typing_mistake_is_found(things):
    things.register("one", Thing)
    things.register("any", lambda **settings: Thing(len(settings)))
    assert things.get("one", clip=1.0, size=2) == Thing(2)
    assert things.get("any", clip=1.0, more=2) == Thing(2)
    with pytest.raises(InvalidInput, match=r"settings of thing one.*sise"):
        things.get("one", sise=2)


def test_variants(things):
    things.register("shirt", lambda size="m", colour="red": (size, colour), variants=True)
    assert things.get("shirt:xl", colour="blue") == ("xl", "blue")
    assert things.get(things.admit("shirt:s")) == ("s", "red")
    assert things.get("shirt") == ("m", "red")


def test_a_path_works_once_it_was_admitted_and_not_before(things, module):
    module("mine", '"""Mine."""\nclass Big:\n    """Big."""\n    size = 9\nready = Big()\n')
    with pytest.raises(UnknownName):
        things.get("mine:Big")
    assert "mine" not in sys.modules
    assert things.admit("mine:Big") == things.admit("mine:Big") == "mine:Big"
    assert things.get("mine:Big", clip=2.0).size == 9
    assert things.about("mine:Big") == "Big."
    assert things.get(things.admit("mine:ready")).size == 9
    assert "mine:Big" in things
    assert things.names() == (), "a path is for whoever gave it, not for catalogues"
    module("broken", "raise ImportError('not today')")
    for wrong, complaint in (
        ("mine:Small", "defines"),
        ("nowhere:X", "imported"),
        (":X", "imported"),
        ("broken:X", "today"),
    ):
        with pytest.raises(UnknownName, match=complaint):
            things.admit(wrong)


def test_names_from_strangers_import_nothing(module):
    """A perturbation in a Flower message, an auction in a broker's task, a data set in an order."""
    from pydantic import ValidationError

    from flmarket.broker.requests import ExploreRequest, TaskRequest

    module("evil", "raise SystemExit('imported')")
    for get in (privacy.get, auctions.get, aggregation.get, robust.get, datasets.load, models.get):
        with pytest.raises(UnknownName):
            get("evil:Thing")
    for key in ("auction", "aggregation", "perturbation"):
        with pytest.raises(ValidationError, match="one of"):
            TaskRequest(task={"budget_per_round": 1}, mechanism={key: "evil:Thing"})
    assert ExploreRequest
    assert "evil" not in sys.modules


def entry_points(folder, text):
    info = folder / "flmarket_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flmarket-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(text)


def test_entry_points_of_installed_packages(things, module, tmp_path, monkeypatch):
    module("plugin", 'class Plug:\n    """From a package."""\n    size = 4\n')
    entry_points(tmp_path, "[flmarket_test.things]\nplug = plugin:Plug\none = plugin:Plug\nbroken = plugin:Nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    things.register("one", Thing)
    assert things.names() == ("broken", "one", "plug")
    assert "plugin" not in sys.modules  # listed, not imported
    assert things.get("plug", clip=1.0).size == 4
    assert things.about("plug") == "From a package."
    assert things.get("one") == Thing(1)  # what is registered stays what it is
    with pytest.raises(InvalidInput, match="entry point"):
        things.get("broken")


def test_each_kind_has_its_group():
    groups = {registry._group for registry in (auctions._registry, aggregation._registry, privacy._REGISTRY)}
    groups |= {datasets._registry._group, models._group}
    assert groups == {f"flmarket.{kind}" for kind in ("auctions", "aggregations", "perturbations", "data", "models")}


@pytest.mark.parametrize("of", [auctions, aggregation, robust, privacy, datasets, models])
def test_everything_registered_has_a_line_for_catalogues(of):
    assert all(of.about(name) for name in of.names())


# --- what came in works in the commands -----------------------------------------------------------------------------

MINE = """
from dataclasses import dataclass

import numpy as np
import torch
from flmarket import EXACT, Guarantees, Outcome

@dataclass(frozen=True)
class Flat:
    name: str = "flat"
    guarantees: Guarantees = Guarantees(EXACT, EXACT, EXACT, source="made up", assumes="data sizes are not private")

    def run(self, bids, budget, *, rng=None):
        money = np.asarray(budget, dtype=float)[..., None]
        pay = money * bids.data_size / bids.data_size.sum(axis=-1, keepdims=True)
        sells = (bids.full_cost <= pay) & (bids.privacy_budget > 0) & (bids.data_size > 0)
        return Outcome(np.where(sells, bids.privacy_budget, 0.0), np.where(sells, pay, 0.0))

@dataclass(frozen=True)
class Heads:
    name: str = "heads"

    def weights(self, epsilon, data_size):
        sells = np.asarray(epsilon) > 0
        return sells / np.maximum(sells.sum(axis=-1, keepdims=True), 1)

def build(features, classes):
    return torch.nn.Sequential(torch.nn.Linear(features, 16), torch.nn.Tanh(), torch.nn.Linear(16, classes))

def xor():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(900, 2))
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    return (x[:600], y[:600]), (x[600:], y[600:])
"""

MARKET = """
[task]
rounds = 25
bidders_per_round = 6
budget_per_round = 1e7
learning_rate = 1.0
[data]
name = "mine:xor"
owners = 6
partition = "equal"
[model]
name = "mine:build"
[training]
local_steps = 30
batch_size = 16
local_learning_rate = 0.3
[owners]
privacy_budget = [1e6, 1e6]
[mechanism]
auction = "mine:Flat"
aggregation = "mine:Heads"
perturbation = "laplace-l1"
clip = 100.0
"""


def flmarket(*arguments, cwd):
    command = [sys.executable, "-P", "-m", "flmarket", *map(str, arguments)]  # as the installed script: no folder added
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def test_a_file_of_the_users_learns_xor_in_an_auction(tmp_path):
    """Auction, aggregation, model and data of the user's own, through the command."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "market.toml").write_text(MARKET)
    done = flmarket("run", "market.toml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["mechanism"], summary["aggregation"]) == ("flat", "heads")
    assert summary["accuracy"][-1] >= 0.95
    chosen = ("--auction", "mine:Flat", "--aggregation", "mine:Heads", "--profiles", 20)
    done = flmarket("compare", *chosen, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def market(**changes):
    from flmarket.engines.config import MarketConfig

    file = {
        "task": {"rounds": 2, "bidders_per_round": 12, "budget_per_round": 1e6},
        "data": {"name": "breast-cancer", "owners": 12, "sigma": 0.5, "minimum": 5},
        "owners": {"privacy_budget": [5.0, 10.0]},
    }
    return MarketConfig.parse(file | changes)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median"])
def test_robust_rules_enter_an_auction(rule):
    result = market(mechanism={"auction": "posted", "aggregation": rule}).simulation().run()
    assert result.aggregation == rule
    for record in result.rounds:
        assert record.valid
        assert record.weights.sum() == pytest.approx(1)
        assert rule != "krum" or (record.weights == 1).sum() == 1


def test_a_robust_rule_with_too_few_updates_makes_no_step_and_owners_are_paid():
    small = market(task={"rounds": 1, "bidders_per_round": 3, "budget_per_round": 1e6},
                   mechanism={"auction": "posted", "aggregation": "krum"})  # fmt: skip
    result = small.simulation().run()
    assert result.rounds[0].error_bound == np.inf
    assert result.spent_micros > 0
    np.testing.assert_array_equal(result.parameters, 0)


def test_a_rule_that_knows_nothing_of_clips_enters_an_auction(monkeypatch):
    monkeypatch.setattr(aggregation._registry, "_entries", dict(aggregation._registry._entries))

    @aggregation.register("heads")
    @dataclass(frozen=True)
    class Heads:
        """Everybody who sells counts the same."""

        name: str = "heads"

        def weights(self, epsilon, data_size):
            sells = np.asarray(epsilon) > 0
            return sells / np.maximum(sells.sum(axis=-1, keepdims=True), 1)

    assert market(mechanism={"aggregation": "heads"}).simulation().run().aggregation == "heads"


def test_the_market_file_takes_ones_own_table(tmp_path):
    from flmarket.engines.config import MarketConfig

    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{'x' if a > 0 else 'y'},{'good' if a > 0 else 'bad'}" for a in rng.normal(size=300)]
    (tmp_path / "train.csv").write_text("\n".join(["a,b,class", *rows]))
    text = '[task]\nrounds = 1\nbudget_per_round = 1e6\n[data]\ntrain = "train.csv"\nlabel = "class"\nowners = 5\n'
    (tmp_path / "market.toml").write_text(text + 'partition = "equal"\n[model]\nname = "mlp"\nhidden = [4]\n')
    spec = MarketConfig.load(tmp_path / "market.toml").simulation(base=tmp_path)
    assert spec.data.classes == ("bad", "good")
    assert spec.data.feature_names == ("a", "b=x", "b=y")
    assert dict(spec.model.tensors)["0.weight"] == (4, 3)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"data": {"test": "a.csv"}}, "train"),
        ({"data": {"train": "nowhere.csv", "label": "y"}}, "nowhere.csv"),
        ({"data": {"name": "breast-canser"}}, "did you mean"),
        ({"model": {"name": "mlp", "hiden": [3]}}, "hiden"),
        ({"model": {"name": "mnist-cnn"}}, "30 features"),
        ({"training": {"optimizer": "adam"}}, "optimizer"),  # not for softmax regression
        ({"mechanism": {"auction": "sampling"}, "model": {"name": "mlp"}}, "first_rate"),
    ],
)
def test_market_files_that_cannot_serve(changes, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        market(**changes).spec()
