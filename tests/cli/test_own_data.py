"""Data and networks of one's own through `run`, `deploy local` and a broker's task; what was bought is then used on raw
records by `flmarket model predict`, and scores what was reported."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tomli_w import dumps as toml_text
from typer.testing import CliRunner
from xor_data import write_network

from flmarket.broker.core import Broker, Party, Simulations
from flmarket.broker.office import parties, tasks
from flmarket.broker.requests import TaskRequest
from flmarket.broker.settings import Settings
from flmarket.broker.work.worker import Worker
from flmarket.cli.app import app
from flmarket.cli.flower import _market_text, _trust, _write_model
from flmarket.engines.flower import Deployment, FileStore, InProcessGrid, KindStrategy, client_app
from flmarket.engines.flower.node import owner_of_node
from flmarket.errors import ConfigError, FlmarketError, InvalidInput
from flmarket.learning import datasets, models
from flmarket.ledger import SqlLedger

pytest.importorskip("flwr")

OWNERS = {"valuations": ["linear"], "privacy_budget": [6.0, 8.0]}
TORCH_LOADER = """\
import numpy as np
import torch

def points(seed, count):
    x = np.random.default_rng(seed).uniform(-1, 1, size=(count, 2)).astype(np.float32)
    return x, (x[:, 0] * x[:, 1] > 0).astype(np.int64)

class Xor(torch.utils.data.Dataset):
    classes = ["differ", "agree"]
    def __init__(self, seed, count):
        self.x, self.y = points(seed, count)
    def __len__(self):
        return len(self.y)
    def __getitem__(self, i):
        return torch.tensor(self.x[i]), int(self.y[i])

def load():
    return Xor(0, 240), Xor(1, 71)
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user's folder: her modules are found there, and what she admits ends with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for registry in (models, datasets._registry):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    yield tmp_path
    for name in ("my_xor_network", "own_points"):
        sys.modules.pop(name, None)


def table(rows, seed):
    """Raw columns of wild scales, a category, and three classes by name."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(3, size=rows)
    return {
        "pressure": 1e5 + 300 * kind + rng.normal(size=rows) * 90,
        "site": np.array(["north", "south", "east"])[rng.integers(3, size=rows)],
        "share": rng.random(rows) * 1e-3,
        "grade": np.array(["g0", "g1", "g2"])[kind],
    }


def write(path: Path, columns):
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.table({name: column.tolist() for name, column in columns.items()}), path)
        return
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(columns)
        out.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def case(name, home):
    """Sections of a market file in `home`; what an operator lists, and calls the same; the raw test file, its label."""
    if name in ("csv", "parquet"):
        write(home / f"train.{name}", table(180, 0))
        write(home / f"test.{name}", table(71, 1))
        files = {"train": f"train.{name}", "test": f"test.{name}", "label": "grade"}
        (home / "clinics.toml").write_text(toml_text(files))
        return {"data": files}, {"data_sets": ("clinics.toml",)}, "clinics", home / f"test.{name}", "grade"
    network = write_network(home)
    (home / "own_points.py").write_text(TORCH_LOADER)
    import own_points

    raw = home / "raw.npz"
    x, y = own_points.points(1, 71)
    np.savez(raw, x=x, y=y)
    sections = {
        "model": {"name": network},
        "training": {"local_epochs": 2, "batch_size": 16, "local_learning_rate": 0.3},
    }
    if name == "torch":
        sections["data"] = {"name": "own_points:load"}
        return sections, {"data_sets": ("own_points:load",), "models": (network,)}, "own_points:load", raw, "y"
    x, y = own_points.points(0, 240)  # xor: the same points as arrays in files
    np.savez(home / "train.npz", x=x, y=y)
    files = {"train": "train.npz", "test": "raw.npz", "scaling": "standard"}
    (home / "square.toml").write_text(toml_text(files))
    return {**sections, "data": files}, {"data_sets": ("square.toml",), "models": (network,)}, "square", raw, "y"


def predicted(where, raw, label):
    """What the bought model scores on raw records."""
    pytest.importorskip("safetensors")
    told = CliRunner().invoke(
        app, ["model", "predict", str(where), str(raw), "--label", label, "--json", "--allow", "my_xor_network:build"]
    )
    assert told.exit_code == 0, told.output
    return json.loads(told.stdout)["accuracy"]


def by_run(market, **_):
    told = CliRunner().invoke(app, ["run", str(market), "--out", "out", "--json"])
    assert told.exit_code == 0, told.output
    return Path("out"), json.loads(told.stdout)["final_accuracy"]


def by_deployment(market, home, **_):
    """All that `deploy local` does, with its owners in this process instead of SuperNodes."""
    deployment = Deployment(home / "elsewhere" / "out", _market_text(market, None, None, None))
    deployment.prepare()
    files = [deployment.owner_folder(i) / "owner.toml" for i in range(deployment.nodes)]
    grid = InProcessGrid(client_app(owner_of_node), deployment.nodes, lambda i: {"owner-file": str(files[i])})
    with SqlLedger(deployment.ledger_url) as ledger:
        played = KindStrategy(deployment.spec.kind(), ledger, FileStore(deployment.state / "server"), bid_seconds=9.0)
        played.start(grid)
    return _write_model(deployment, _trust(deployment.spec)), played.records[-1].metrics["accuracy"]


@pytest.fixture
def opened(home):
    """A broker with an operator's settings, and a buyer with money."""
    made = []

    def make(offered):
        broker = Broker.open(Settings(database_url=f"sqlite:///{home}/broker.db", run_worker=False, **offered))
        made.append(broker)
        view = parties.create_party(broker, None, role="buyer", name="buyer")
        parties.deposit(broker, None, view.id, 10**12)
        return broker, Party(view.id, "buyer", view.name)

    yield make
    for broker in made:
        broker.close()


def by_broker(market, home, *, sections, offered, name, opened):
    """A remote buyer names what the operator lists; nothing of her own is opened."""
    broker, buyer = opened(offered)
    posted = tasks.post_task(broker, buyer, order(sections, name))
    worker = Worker(broker)
    worker.run_until_idle()
    worker.stop()
    done = tasks.get_task(broker, buyer, posted.id)
    assert (done.state, done.error) == ("finished", "")
    (home / "bought.zip").write_bytes(tasks.model(broker, buyer, posted.id, format="zip").content)
    return home / "bought.zip", tasks.get_task(broker, buyer, posted.id).accuracy


def order(sections, name):
    rest = {key: value for key, value in sections.items() if key != "data"}
    task = {"name": "bought", "rounds": 2, "bidders_per_round": 4, "budget_per_round": 50000.0}
    data = {"name": name, "owners": 4, "partition": "equal"}
    return TaskRequest.model_validate({"task": task, "data": data, "owners": OWNERS, "mechanism": ALL_IN, **rest})


ALL_IN = {"auction": "all-in"}


@pytest.mark.parametrize("way", [by_run, by_deployment, by_broker])
@pytest.mark.parametrize("what", ["csv", "parquet", "xor", "torch"])
def test_what_was_bought_scores_on_raw_records_what_was_reported(what, way, home, opened):
    if what in ("xor", "torch"):
        pytest.importorskip("torch")
    sections, offered, name, raw, label = case(what, home)
    market = home / "mine" / "market.toml"
    market.parent.mkdir()
    for file in [path for path in home.iterdir() if path.suffix in (".csv", ".parquet", ".npz")]:
        (market.parent / file.name).write_bytes(file.read_bytes())  # paths begin beside the market file
    whole = {
        **sections, "task": {"rounds": 2, "bidders_per_round": 4, "budget_factor": 1.0}, "owners": OWNERS,
        "mechanism": ALL_IN, "data": {**sections["data"], "owners": 4, "partition": "equal"},
    }  # fmt: skip
    market.write_text(toml_text(whole))
    given = {"sections": sections, "offered": offered, "name": name, "opened": opened} if way is by_broker else {}
    bought, reported = way(market, home=home, **given)
    tolerance = 1e-6 if "model" in sections else 1e-12
    assert abs(predicted(bought, raw, label) - reported) <= tolerance
    card = json.loads(CliRunner().invoke(app, ["model", "card", str(bought), "--json"]).stdout)
    assert card["accuracy"]["last"]["accuracy"] == pytest.approx(reported, abs=tolerance)
    assert ("own machines" in card["privacy"]["where"] or "own machine" in card["privacy"]["where"]) == (
        way is by_deployment
    )


# --- what a remote buyer may not name ---------------------------------------------------------------------------------


def test_a_remote_buyer_names_no_file_and_no_code_and_is_charged_nothing(home, opened):
    _, offered, name, *_ = case("csv", home)
    broker, buyer = opened(offered)
    before = broker.books.ledger.balance(buyer.id)
    for told in ("train.csv", "clinics.toml", f"{home}/clinics.toml", "../clinics", "own_points:load", "breast-cancer"):
        with pytest.raises(InvalidInput, match=r"data\.name.*clinics"):
            tasks.post_task(broker, buyer, order({}, told))
    for key, value in (("train", "/etc/passwd"), ("test", "test.csv"), ("label", "grade")):
        sent = order({}, name).model_dump(mode="json")
        sent["data"][key] = value
        with pytest.raises(ValueError, match="the operator offers"):
            TaskRequest.model_validate(sent)
    assert broker.books.ledger.balance(buyer.id) == before
    assert not list(broker.books.ledger.awards())
    assert "own_points" not in sys.modules


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train = 3", "train"),
        ('train = "train.csv"\nfolder = "/"', "folder"),
        ('train = "train.csv"\nowners = 3', "owners"),
        ('test = "train.csv"', "train"),
        ("train", "data.toml"),
    ],
)
def test_a_data_file_that_says_something_else_ends_the_start(home, text, key):
    (home / "data.toml").write_text(text)
    with pytest.raises(ConfigError, match=key):
        Simulations(Settings(data_sets=("data.toml",)))


def test_two_data_files_of_one_name_end_the_start(home):
    (home / "digits.toml").write_text('train = "a.csv"')
    with pytest.raises(FlmarketError, match="once"):
        Simulations(Settings(data_sets=("digits", "digits.toml")))
