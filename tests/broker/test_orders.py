"""One set of settings: a market file is an order, within the broker's limits, and nothing it names is opened."""

import io
import math
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load as load_safetensors

from flmarket.broker.core import Broker
from flmarket.broker.office import market, tasks
from flmarket.broker.requests import TaskRequest, order_of
from flmarket.broker.settings import Settings
from flmarket.engines.config import MarketConfig
from flmarket.errors import InvalidInput, UnknownName

EXAMPLES = Path(__file__).parents[2] / "examples"
SECTIONS = ("data", "owners", "mechanism", "model", "training", "broker")


def ordered(**sections):
    return TaskRequest.model_validate({"task": {"budget_per_round": 1.0}, **sections})


def test_an_order_and_a_market_file_have_the_same_keys_and_defaults():
    order, file = ordered(), MarketConfig.parse({"task": {"budget_per_round": 1.0}})
    assert order.task.model_dump() == file.task.model_dump()
    for name in SECTIONS:
        assert getattr(order, name).model_dump() == getattr(file, name).model_dump()
    assert order.market_file("t").data == order.data
    assert order_of(order.model_dump(mode="json")) == order


def test_the_order_in_the_docs_is_accepted():
    page = (EXAMPLES.parent / "docs" / "broker.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    order = TaskRequest.model_validate(tomllib.loads(block))
    others = {"sampling", "reward", "joint", "market", "secure"}  # sections of other kinds and trust than the page's
    assert set(tomllib.loads(block)) == set(TaskRequest.model_fields) - others
    assert set(tomllib.loads(block)["broker"]) == set(type(order.broker).model_fields)


def test_the_default_market_can_be_played():
    assert MarketConfig.parse({"task": {"budget_per_round": 1.0}}).simulation().partition.owners == 60


def test_a_market_file_is_posted_as_it_is(small, joined, play):
    """Also one that says how a broker plays it, which `flmarket run` reads too."""
    text = (EXAMPLES / "breast-cancer.toml").read_text() + "\n[broker]\ndeadline_seconds = 600\n"
    values = tomllib.loads(text)
    assert MarketConfig.parse(values).broker.deadline_seconds == 600
    values["task"] |= {"rounds": 1, "budget_per_round": 100}
    values["task"].pop("budget_factor", None)
    buyer = joined(small, "buyer").party
    posted = tasks.post_task(small, buyer, TaskRequest.model_validate(values))
    assert posted.request["data"]["owners"] == values["data"]["owners"]
    play(small)
    assert tasks.get_task(small, buyer, posted.id).state == "finished"


@pytest.mark.parametrize("amount", [0.29, 1e-06, 1_000_000_000, 123_456_789.123456])
def test_budgets_are_exact(amount):
    assert ordered(task={"budget_per_round": amount}).budget_micros == round(amount * 10**6)
    assert f"{ordered(task={'budget_per_round': amount}).budget_micros / 10**6:.6f}" == f"{amount:.6f}"


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("task.budget_per_round", {"task": {}}),
        ("task.budget_per_round", {"task": {"budget_per_round": None}}),
        ("task.budget_per_round", {"task": {"budget_per_round": 0}}),
        ("task.budget_per_round", {"task": {"budget_per_round": 1e-7}}),
        ("task.budget_per_round", {"task": {"budget_per_round": 1.0000001}}),
        ("task.budget_per_round", {"task": {"budget_per_round": math.inf}}),
        ("task.budget_per_round", {"task": {"budget_per_round": True}}),
        ("task.budget_per_round", {"task": {"budget_per_round": "1"}}),
        ("task.budget_factor", {"task": {"budget_per_round": 1, "budget_factor": 0.5}}),
        ("task.rounds", {"task": {"budget_per_round": 1, "rounds": 1001}}),
        ("task.rounds", {"task": {"budget_per_round": 1, "rounds": True}}),
        ("data.train", {"data": {"train": "/etc/passwd"}}),
        ("data.owners", {"data": {"owners": 2001}}),
        ("owners.bids", {"owners": {"bids": "/etc/passwd"}}),
        ("owners.rate", {"owners": {"rate": [2.0, 1.0]}}),
        ("owners.rate.0", {"owners": {"rate": ["1", 2.0]}}),
        ("owners.dropout", {"owners": {"dropout": math.nan}}),
        ("owners.privacy_cap", {"owners": {"privacy_cap": math.nan}}),
        ("mechanism.auction", {"mechanism": {"auction": "evil:Thing"}}),
        ("mechanism.perturbation", {"mechanism": {"perturbation": "gaussian-zcdp"}}),
        ("mechanism.bound_dimension", {"mechanism": {"bound_dimension": 10**400}}),
        ("model", {"model": {"name": "mlp", "hidden": [10**6]}}),
        ("model", {"model": {"name": "mlp", "threads": 64}}),
        ("model", {"model": {"name": "mlp", "hidden": {"a": 1}}}),
        ("training.batch_size", {"training": {"batch_size": 10_001}}),
        ("broker.deadline_seconds", {"broker": {"deadline_seconds": 1}}),
        ("jdp", {"jdp": {}}),
    ],
)
def test_what_is_not_accepted_is_named(field, sections):
    with pytest.raises(ValidationError) as refused:
        ordered(**sections)
    assert [".".join(map(str, one["loc"])) for one in refused.value.errors()] == [field]


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("data.name", {"data": {"name": "evil:Thing"}}),
        ("data.name", {"data": {"name": "mnist"}}),
        ("model.name", {"model": {"name": "evil:Thing"}}),
        ("hidden", {"model": {"name": "mlp", "hidden": [0]}}),
        ("hidden", {"model": {"name": "mlp", "hidden": "many"}}),
        ("model", {"model": {"name": "mlp", "hidden": [1024, 1024]}}),
        ("settings of model softmax", {"model": {"colour": "blue"}}),
        ("optimizer", {"training": {"optimizer": "adam"}}),
    ],
)
def test_what_this_broker_does_not_play_is_refused_before_anything_is_imported(
    small, joined, tmp_path, field, sections
):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(InvalidInput) as refused:
            tasks.post_task(small, joined(small, "buyer").party, ordered(**sections))
    finally:
        sys.path.remove(str(tmp_path))
    assert refused.value.field == field
    assert "evil" not in sys.modules
    if field == "kind":
        assert "auction" in str(refused.value)


def test_a_network_is_sold_like_any_model(small, joined, play):
    buyer = joined(small, "buyer").party
    task = {"rounds": 1, "bidders_per_round": 4, "budget_per_round": 1000}
    request = ordered(task=task, data={"owners": 5}, model={"name": "mlp", "hidden": [3]})
    posted = tasks.post_task(small, buyer, request)
    play(small)
    safe = load_safetensors(tasks.model(small, buyer, posted.id, format="safetensors").content)
    with np.load(io.BytesIO(tasks.model(small, buyer, posted.id).content)) as file:
        plain = {name: file[name] for name in file.files if name != "about"}
    assert sorted(part.size for part in safe.values()) == sorted([3 * 30, 3, 2 * 3, 2])
    assert sum(part.size for part in safe.values()) == posted.dimension
    assert {part.dtype for part in safe.values()} == {np.dtype("float32")}
    assert plain.keys() == safe.keys()
    assert all(np.array_equal(plain[name], safe[name]) for name in safe)


def test_an_operator_may_offer_models_and_data_of_her_own(tmp_path, monkeypatch, joined):
    (tmp_path / "ours_for_sale.py").write_text(
        "import numpy as np\n"
        "from flmarket.learning import SoftmaxRegression\n"
        "def build(*, features, classes, local): return SoftmaxRegression(features, classes, l2=0.1, local=local)\n"
        "def load():\n"
        "    x = np.random.default_rng(0).normal(size=(80, 3)); y = (x[:, 0] > 0).astype(int)\n"
        "    return (x[:60], y[:60]), (x[60:], y[60:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    offered = {"models": ("ours_for_sale:build",), "data_sets": ("ours_for_sale:load",)}
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, **offered))
    sections = {"data": {"name": "ours_for_sale:load", "owners": 10}, "model": {"name": "ours_for_sale:build"}}
    posted = tasks.post_task(broker, joined(broker, "buyer").party, ordered(**sections))
    assert posted.dimension == 4
    assert "ours_for_sale:build" in market.catalogue(broker).models
    broker.close()
    with pytest.raises(UnknownName):
        Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/c.db", models=("ours_for_sale:nothing",)))
