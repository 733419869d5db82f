"""Any model in every kind of market, wherever it is played; and what only a network of the user's can learn.

"Without noise" is a perturbation of the user's that clips and adds nothing. It promises nothing and says so: releases
count as unbounded, and owners take it only if they have no cap. Brokers offer no such thing; there the ε is so large
(100,000 a round) that noise is of no account, and that is what owners are paid for.
"""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_markets import CASES, market
from tomli_w import dumps as toml_text
from xor_data import NETWORK, write_network, xor_data

from flmarket import privacy
from flmarket.cli.markets import run_market
from flmarket.engines import MemoryOwners, play
from flmarket.engines.config import MarketConfig
from flmarket.errors import InvalidInput
from flmarket.learning.travel import Bundle, read_raw
from flmarket.ledger import AwardState, MemoryLedger, SqlLedger
from flmarket.market import FileStore, MemoryStore, Rounds
from flmarket.market.record import close_records
from flmarket.privacy import Unprotected

torch = pytest.importorskip("torch")
PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
NO_NOISE = re.search(r"^```python\n(@dataclass\(frozen=True\)\nclass NoNoise.*?)^```", PAGE, re.M | re.S)[1]
XOR = {
    "seed": 1,
    "task": {"name": "xor", "rounds": 12, "bidders_per_round": 5, "budget_per_round": 1e5, "learning_rate": 1.0},
    "data": {"train": "points.csv", "label": "class", "owners": 5, "partition": "equal"},
    "mechanism": {"aggregation": "conventional", "perturbation": "my_noise:NoNoise", "clip": 100.0},
    "model": {"name": "my_xor_network:build"},
    "training": {"local_steps": 40, "batch_size": 16, "local_learning_rate": 0.5},
}


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A user's folder: her network, her noise, her data, her market file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(privacy._REGISTRY, "_entries", dict(privacy._REGISTRY._entries))
    for module in ("my_xor_network", "my_noise", "my_points"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    write_network(tmp_path)
    heading = "from dataclasses import dataclass\n\nimport numpy as np\nfrom flmarket import privacy\n\n\n"
    Path("my_noise.py").write_text(heading + NO_NOISE)
    Path("my_points.py").write_text("from xor_data import xor_data\n\n\ndef load():\n    return xor_data(600)\n")
    data = xor_data(720)
    rows = [f"{a:.17g},{b:.17g},c{y}" for (a, b), y in zip(data.x_train, data.y_train, strict=True)]
    Path("points.csv").write_text("\n".join(["first,second,class", *rows]) + "\n")
    Path("market.toml").write_text(toml_text(XOR))
    importlib.invalidate_caches()
    return tmp_path


@pytest.fixture
def run_file(tmp_path, capsys):
    """`flmarket run` with a market file, in this process; returns what `--json` prints."""

    def run(values):
        (tmp_path / "market.toml").write_text(toml_text(values))
        capsys.readouterr()
        run_market(tmp_path / "market.toml", tmp_path / "out", None, None, True)
        return json.loads(capsys.readouterr().out)

    return run


def test_xor_by_flmarket_run(at_home, run_file):
    """0.95 with a network of ten lines, where softmax regression guesses; and the report calls it unprotected."""
    assert len(NETWORK.splitlines()) <= 10
    found = run_file(XOR)
    assert found["final_accuracy"] >= 0.95
    assert found["epsilon_total_max"] is None
    assert found["epsilon_per_round_max"] is None
    assert "no privacy is claimed" in found["words"]["unit"]
    assert all(found["guarantees"].values())
    straight = {key: value for key, value in XOR.items() if key != "model"}
    assert run_file(straight)["final_accuracy"] < 0.7


DATASET = """\
import numpy as np
import torch
from xor_data import xor_data


class Points(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = torch.tensor(x), y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


def load():
    data = xor_data(300)
    return Points(data.x_train, data.y_train), Points(data.x_test, data.y_test)
"""


@pytest.mark.parametrize("form", ["csv", "parquet", "dataset"])
def test_own_data_in_any_form_and_its_model_used_on_raw_records(form, at_home, run_file, monkeypatch):
    """What `flmarket run` reports, again from the raw file and the zip alone, to 1e-6 in torch and 1e-12 in softmax."""
    data, shown = xor_data(300), {"first": 0, "second": 1}
    raw = {name: data.x_test[:, place] for name, place in shown.items()}
    section = {"owners": 5, "partition": "equal"}
    if form == "dataset":
        Path("my_set.py").write_text(DATASET)
        monkeypatch.delitem(sys.modules, "my_set", raising=False)
        importlib.invalidate_caches()
        section["name"], raw = "my_set:load", {"x0": raw["first"], "x1": raw["second"]}
    else:
        for name, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
            columns = {"class": [f"c{k}" for k in y]} | {column: x[:, k] * 1000 for column, k in shown.items()}
            if form == "csv":
                rows = zip(*columns.values(), strict=True)
                text = "\n".join([",".join(columns), *(f"{c},{float(a)!r},{float(b)!r}" for c, a, b in rows)])
                Path(f"{name}.csv").write_text(text + "\n")
            else:
                pa = pytest.importorskip("pyarrow")
                from pyarrow import parquet

                parquet.write_table(pa.table(columns), f"{name}.parquet")
        section |= {"train": f"train.{form}", "test": f"test.{form}", "label": "class"}
    few = XOR | {"data": section, "task": XOR["task"] | {"rounds": 3}}
    for market_file, close in ((few, 1e-6), ({k: v for k, v in few.items() if k != "model"}, 1e-12)):
        reported = run_file(market_file)
        bundle = Bundle.read(reported["model"], allow=["my_xor_network:build"])
        records = raw if form == "dataset" else read_raw(f"test.{form}")
        answers = bundle.predict(records)
        assert abs(np.mean(answers == data.y_test) - reported["final_accuracy"]) <= close


def test_xor_on_flower_and_what_the_books_say(at_home):
    pytest.importorskip("flwr")
    from flmarket.engines.flower import simulate

    ledger, spec = MemoryLedger(), MarketConfig.parse(XOR).spec(base=at_home)
    flower = simulate(spec, at_home / "flower", ledger=ledger)
    close_records()
    assert flower.records[-1].metrics["accuracy"] >= 0.95
    rounds, owners = play(spec, ledger=MemoryLedger())
    np.testing.assert_array_equal(flower.parameters, rounds.kind.parameters)
    posted = [award for award in ledger.awards() if award.state is AwardState.POSTED]
    assert posted
    assert all(award.loss == Unprotected() for award in posted)
    assert {release.guarantee for release in ledger.releases()} == {Unprotected()}
    assert {record.account.books.spent for record in owners.records.values()} == {float("inf")}


def test_updates_without_noise_leave_only_owners_who_let_them(at_home):
    """No cap holds them, and an owner who does not say `allow_raw` refuses them."""
    config = XOR | {"owners": {"privacy_cap": 1e6}}
    with pytest.raises(InvalidInput, match="privacy cap"):
        MarketConfig.parse(config).spec(base=at_home)
    spec = MarketConfig.parse(XOR | {"task": XOR["task"] | {"rounds": 1}}).spec(base=at_home)
    willing = type(spec).owner

    class Careful(type(spec)):
        def owner(self, number, *args, **kwargs):
            return replace(willing(self, number, *args, **kwargs), allow_raw=False)

    careful, ledger = Careful(**vars(spec)), MemoryLedger()
    Rounds(careful.kind(), MemoryOwners(careful), ledger, MemoryStore()).play()
    assert not list(ledger.releases())
    assert {award.state for award in ledger.awards()} == {AwardState.VOIDED}


def test_xor_as_a_broker_task(at_home, tmp_path_factory):
    """Where the operator's settings have the user's model and data; a very large ε, all of it sold."""
    pytest.importorskip("fastapi")
    from in_broker import played_in_broker

    changes = {
        "data": XOR["data"] | {"name": "my_points:load"},
        "owners": {"privacy_budget": [1e5, 1e5], "valuations": ["sqrt"]},
        "mechanism": XOR["mechanism"] | {"perturbation": "laplace-l1", "auction": "all-in-capped"},
    }
    changes["data"] = {key: value for key, value in changes["data"].items() if key not in ("train", "label")}
    task = XOR | changes | {"task": XOR["task"] | {"budget_per_round": 1e6}}
    names = {"models": ("my_xor_network:build",), "data_sets": ("my_points:load",)}
    with played_in_broker(at_home, task, **names) as (_, row):
        assert row.accuracy >= 0.95
    with (
        pytest.raises(InvalidInput, match=r"model\.name"),
        played_in_broker(tmp_path_factory.mktemp("other"), task, data_sets=names["data_sets"]),
    ):
        pass


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_every_kind_by_flmarket_run(kind, model, run_file, tmp_path):
    found = run_file(market(kind, model, task={"rounds": 2}))
    assert (tmp_path / "out" / "report.html").exists()
    assert found["final_accuracy"] is not None


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_every_kind_by_owners_who_have_files(kind, model, tmp_path):
    """The folders that `flmarket deploy local` writes, each played by what is in it, with secure noise."""
    pytest.importorskip("flwr")
    from flmarket.engines.flower import Deployment, InProcessGrid, KindStrategy, client_app
    from flmarket.engines.flower.node import owner_of_node

    changes = {"owners": {"dropout": 0.0, "faulty": 0.0}} if kind == "auction" else {}
    deployment = Deployment(tmp_path, toml_text(market(kind, model, task={"rounds": 2}, **changes)))
    deployment.prepare()
    files = [deployment.owner_folder(i) / "owner.toml" for i in range(deployment.nodes)]
    grid = InProcessGrid(client_app(owner_of_node), deployment.nodes, lambda i: {"owner-file": str(files[i])})
    with SqlLedger(deployment.ledger_url) as ledger:
        strategy = KindStrategy(deployment.spec.kind(), ledger, FileStore(deployment.state / "server"))
        strategy.start(grid)
        ledger.verify()
        ends = {(award.id, award.price_micros, award.state) for award in ledger.awards()}
    close_records()
    alone = MemoryLedger()
    play(deployment.spec, ledger=alone)  # its noise is another, its awards are not
    assert ends == {(award.id, award.price_micros, award.state) for award in alone.awards()}
    assert any(state is AwardState.POSTED for *_, state in ends)
