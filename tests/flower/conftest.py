"""A small Flower app with a train function of its own, a normalisation layer, and metrics that nobody should see."""

import logging

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flmarket.engines.flower import InProcessGrid
from flmarket.flower import owner_guard
from flmarket.market.record import close_records

logging.getLogger("flwr").setLevel(logging.CRITICAL)

TARGET = np.linspace(-1.0, 1.0, 12).reshape(3, 4)
OWNER = """
owner = 0
records = {records}
[bid]
rate = 0.1
privacy_budget = {privacy_budget}
minimum_price = {minimum_price}
[cap]
epsilon = {cap}
"""


def record_of(**arrays):
    return ArrayRecord({name.replace("__", "."): Array(np.asarray(one)) for name, one in arrays.items()})


def start():
    return record_of(
        fc__weight=np.zeros((3, 4), np.float32), fc__bias=np.zeros(3, np.float32), bn__weight=np.ones(2, np.float32),
        bn__running_mean=np.zeros(2, np.float32), bn__num_batches_tracked=np.array(3), frozen=np.full(5, 7.0),
    )  # fmt: skip


def honest_train(message, context):
    """Half the way to a target; everything else is changed as well."""
    named = {name: one.numpy() for name, one in message.content["arrays"].items()}
    moved = named["fc.weight"] + message.content["config"]["lr"] * (TARGET - named["fc.weight"])
    after = {name: one + 1 for name, one in named.items()} | {"fc.weight": moved.astype(np.float32)}
    metrics = MetricRecord({"secret": 42.0, "num-examples": 3})
    answer = RecordDict(
        {"arrays": ArrayRecord({n: Array(np.asarray(o)) for n, o in after.items()}), "metrics": metrics}
    )
    return Message(answer, reply_to=message)


class Listening(InProcessGrid):
    """Keeps every message and its answer."""

    def __init__(self, app, nodes):
        super().__init__(app, nodes)
        self.seen = []

    def answer(self, message):
        content = dict(message.content)
        answers = super().answer(message)
        self.seen.append((message.metadata, content, answers))
        return answers


@pytest.fixture
def stage(tmp_path):
    """`stage(nodes, train)`: a grid of nodes with the guarded app; the owners' files are in tmp_path."""

    def make(nodes=4, train=honest_train, *, folder="owners", **changes):
        home = tmp_path / folder
        home.mkdir(exist_ok=True)
        usual = {"cap": 1000.0, "records": 50, "minimum_price": 0.0, "privacy_budget": 4.0}
        (home / "owner.toml").write_text(OWNER.format(**usual | changes))
        app = ClientApp(mods=[owner_guard(home / "owner.toml")])
        app.train()(train)
        app.evaluate()(train)
        return Listening(app, nodes)

    yield make
    close_records()
