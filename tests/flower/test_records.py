"""ε of any one record behind a Flower app: the guard takes the steps itself, and the app's `train` is not asked."""

import logging

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flmarket.engines.flower import InProcessGrid
from flmarket.errors import InvalidInput
from flmarket.flower import Market, MarketStrategy, owner_guard
from flmarket.learning import LocalTraining
from flmarket.ledger import DurableAccount, MemoryLedger
from flmarket.market.record import close_records
from flmarket.privacy import ApproxDp, RecordLevel

torch = pytest.importorskip("torch")

RECORDS, FEATURES, CLASSES, CLIP = 30, 4, 3, 0.5
LOCAL = LocalTraining(steps=3, learning_rate=0.2, momentum=0.5)
OWNER = """
owner = 0
records = {records}
[bid]
rate = 0.0001
privacy_budget = {budget}
[cap]
epsilon = 1e7
delta = 1e-5
{unit}
"""


class Net(torch.nn.Module):
    """A frozen layer and a head, the only part that is sold."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(FEATURES, FEATURES, bias=False), torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def dealt(number):
    rng = np.random.default_rng(number)
    return rng.normal(size=(RECORDS + 2, FEATURES)), rng.integers(CLASSES, size=RECORDS + 2)


class Points(torch.utils.data.Dataset):
    def __init__(self, context):
        self.x, self.y = dealt(int(context.node_config["partition-id"]))

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return torch.tensor(self.x[i]), int(self.y[i])


@pytest.fixture
def stage(tmp_path):
    """`stage(...)` plays one round; returns the result, the ledger, accounts by owner, and calls of `train`."""

    def play(*, unit='unit = "record"', budget=1e6, nodes=2, records=RECORDS, guard=None, strategy=None):
        (tmp_path / "owner.toml").write_text(OWNER.format(unit=unit, budget=budget, records=records))
        asked = []
        app = ClientApp(mods=[owner_guard(tmp_path / "owner.toml", **(guard or {"model": Net, "records": Points}))])
        app.train()(lambda message, context: asked.append(message))
        torch.manual_seed(1)
        net, ledger = Net(), MemoryLedger()
        market = Market(budget_per_round=1e6, auction="all-in", clip=CLIP, ledger=ledger, aggregation="conventional")
        terms = {"release": ["head.*"], "unit": "record", "local": LOCAL} if strategy is None else strategy
        start = ArrayRecord(net.state_dict())
        result = MarketStrategy(FedAvg(), market=market, **terms).start(InProcessGrid(app, nodes), start, num_rounds=1)
        accounts = {}
        for i in range(nodes):
            place = tmp_path / "record" / f"owner-{i}.account.sqlite"
            if place.exists():
                with DurableAccount.open(place) as account:
                    accounts[i] = (account.cap, [one.guarantee for one in account.releases()])
        return result, ledger, accounts, asked, net

    yield play
    close_records()


def by_hand(net, x, y):
    """Where the announced steps end without noise, in NumPy."""
    hidden = np.tanh(x @ net.body.weight.detach().numpy().astype(float).T)
    weight, bias = (part.detach().numpy().astype(float) for part in (net.head.weight, net.head.bias))
    velocity = 0.0
    for _ in range(LOCAL.steps):
        scores = hidden @ weight.T + bias
        shares = np.exp(scores - scores.max(1, keepdims=True))
        slope = shares / shares.sum(1, keepdims=True) - np.eye(CLASSES)[y]
        rows = np.concatenate([np.einsum("ni,nj->nij", slope, hidden).reshape(len(y), -1), slope], axis=1)
        clipped = rows * np.minimum(1, CLIP / np.linalg.norm(rows, axis=1))[:, None]
        assert (np.linalg.norm(rows, axis=1) > CLIP).any(), "the clip does something"
        velocity = LOCAL.momentum * velocity + clipped.mean(0)
        weight = weight - LOCAL.learning_rate * velocity[: weight.size].reshape(weight.shape)
        bias = bias - LOCAL.learning_rate * velocity[weight.size :]
    return weight, bias


def test_the_guard_takes_the_announced_steps_and_nothing_else_is_asked(stage):
    result, ledger, accounts, asked, net = stage()
    ends = [by_hand(net, *(part[:RECORDS] for part in dealt(i))) for i in range(2)]
    for name, place in (("head.weight", 0), ("head.bias", 1)):
        mean = np.mean([end[place] for end in ends], axis=0)
        np.testing.assert_allclose(result.arrays[name].numpy(), mean, atol=2e-3)
        assert np.abs(mean - net.state_dict()[name].numpy()).max() > 0.02, "it moved by more than what is tolerated"
    np.testing.assert_array_equal(result.arrays["body.weight"].numpy(), net.state_dict()["body.weight"].numpy())
    assert not asked
    assert [award.loss for award in ledger.awards()] == [RecordLevel(ApproxDp(1e6, 1e-5))] * 2
    for cap, sold in accounts.values():
        assert cap == RecordLevel(ApproxDp(1e7, 1e-5))
        assert all(isinstance(one, RecordLevel) for one in sold)
        assert len(sold) == 1
    assert "any one record" in result.bill
    assert result.records[0].unit == "record"


def test_the_noise_is_what_was_sold(stage):
    """σ of a coordinate at ε = 1 by the calibration's own closed form, over many coordinates and two owners."""
    small, *_, net = stage(budget=1.0)
    expected = np.mean([by_hand(net, *(part[:RECORDS] for part in dealt(i)))[0] for i in range(2)], axis=0)
    found = small.arrays["head.weight"].numpy() - expected
    # three steps with momentum ½ move by 1.75, 1.5 and 1 times a step's noise; mean of two owners
    multiplier = 3.730632  # of the analytic Gaussian at (1, 1e-5), sensitivity 1
    sigma = (
        LOCAL.learning_rate * np.sqrt(1.75**2 + 1.5**2 + 1) * multiplier * np.sqrt(3) * 2 * CLIP / RECORDS / np.sqrt(2)
    )
    assert 0.45 * sigma < found.std() < 1.8 * sigma


@pytest.mark.parametrize("records", ["raises", "fewer", "outside"])
def test_records_that_cannot_be_had_are_an_update_of_nothing_charged_like_any_other(stage, records):
    def broken(context):
        if records == "raises":
            raise OSError("no disk")
        x, y = dealt(0)
        return (x[:3], y[:3]) if records == "fewer" else (x, y + 1000)

    result, ledger, accounts, _, net = stage(guard={"model": Net, "records": broken})
    moved = result.arrays["head.weight"].numpy() - net.state_dict()["head.weight"].numpy()
    assert 0 < np.abs(moved).max() < 2e-3
    assert {award.state.value for award in ledger.awards()} == {"posted"}
    assert [len(sold) for _, sold in accounts.values()] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"guard": {}}, "cannot be bounded from outside"),
        ({"unit": ""}, "account counts losses of the update"),
        ({"strategy": {}}, "account counts losses of the record"),
    ],
)
def test_who_sells_the_other_product_is_not_in_it_and_says_why(stage, caplog, changes, words):
    logger = logging.getLogger("flwr")
    before, propagates = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = True
    guard = changes.get("guard", {"model": Net, "records": Points})
    try:
        result, ledger, accounts, asked, _ = stage(**changes | {"guard": guard or {"owner_of": None}})
    finally:
        logger.setLevel(before)
        logger.propagate = propagates
    assert words in caplog.text
    assert not list(ledger.awards())
    assert not asked
    assert all(not sold for _, sold in accounts.values())
    assert result.spent_micros == 0


@pytest.mark.parametrize(
    "terms",
    [
        {"unit": "record"}, {"unit": "row", "local": LOCAL}, {"local": LOCAL},
        {"unit": "record", "local": LocalTraining(batch_size=8)},
        {"unit": "record", "local": LocalTraining(steps=5000)}, {"unit": "record", "local": LOCAL, "delta": 0.7},
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anybody_is_asked(terms):
    with pytest.raises(InvalidInput):
        MarketStrategy(FedAvg(), market=Market(budget_per_round=1.0), **terms)


def test_other_noise_and_half_a_guard_are_refused():
    with pytest.raises(InvalidInput, match="hide updates"):
        MarketStrategy(FedAvg(), market=Market(budget_per_round=1.0, perturbation="sphere"), unit="record", local=LOCAL)
    with pytest.raises(InvalidInput, match="both"):
        owner_guard(model=Net)
