"""Any app behind the guard, any strategy behind the market: weights, optimisers, terms, money, crashes."""

import json
import logging
import threading
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, QFedAvg
from numpy.testing import assert_allclose, assert_array_equal

from flmarket.engines.flower import InProcessGrid
from flmarket.engines.flower.messages import Refusal, unpack
from flmarket.errors import FlmarketError, InvalidInput
from flmarket.flower import Market, MarketStrategy, owner_guard
from flmarket.flower.tensors import Tensors, twins
from flmarket.ledger import AwardState, DurableAccount, IdReused, MemoryLedger, SqlLedger

from .conftest import TARGET, honest_train, record_of, start

CONFIG = {"lr": 0.5}


def played(
    grid, inner=None, *, rounds=2, release=None, arrays=None, config=None, evaluate=None, timeout=3600, **market
):
    strategy = MarketStrategy(
        inner or FedAvg(), market=Market(**({"budget_per_round": 100.0} | market)), release=release
    )
    return strategy.start(
        grid, arrays or start(), rounds, timeout, train_config=ConfigRecord(dict(config or CONFIG)),
        evaluate_fn=evaluate,
    )  # fmt: skip


def accounts(tmp_path, folder="owners"):
    """What each owner's own disk says she sold."""
    found = {}
    for path in sorted((tmp_path / folder / "record").glob("owner-*.account.sqlite")):
        with DurableAccount.open(path) as account:
            found[int(path.name.split(".")[0].split("-")[1])] = len(list(account.releases()))
    return found


def updates(grid):
    """What was delivered, by round and node."""
    found = {}
    for metadata, _, answers in grid.seen:
        for answer in answers:
            if answer.has_content() and "update" in answer.content:
                parts = [one.numpy().ravel() for one in answer.content["update"].values()]
                found[int(metadata.group_id), metadata.dst_node_id - 1000] = np.concatenate(parts)
    return found


def test_an_app_is_sold_and_paid(stage, tmp_path):
    grid, told = stage(5), []
    url = f"sqlite:///{tmp_path / 'market.db'}"
    result = played(
        grid, rounds=3, ledger=url, evaluate=lambda i, a: told.append(i) or MetricRecord({"accuracy": i / 4})
    )
    assert told == [0, 1, 2, 3]
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
    assert result.evaluate_metrics_serverapp[2]["accuracy"] == 0.5
    assert [record.metrics["accuracy"] for record in result.records] == [0.25, 0.5, 0.75]
    paid = [award for award in result.awards if award.state is AwardState.POSTED]
    assert len(paid) >= 9
    assert sum(award.price_micros for award in paid) == result.spent_micros <= 300_000_000
    with SqlLedger(url, create=False) as ledger:
        head = ledger.verify()
        assert ledger.balances()["owner-3"] == sum(award.price_micros for award in paid if award.owner == "owner-3")
        for award in paid:
            assert result.receipts[award.id].check(ledger.head(result.receipts[award.id].head.size))[0] == award
    assert head.size
    assert all(str(award.round_index + 1) in result.bill for award in paid)
    sold = [award.owner for award in paid]
    assert accounts(tmp_path) == {number: sold.count(f"owner-{number}") for number in range(5)}


def test_averaging_reproduces_the_market_s_aggregation(stage):
    """FedAvg on the replies it is handed gives parameters + Σ weight · released update, recomputed here."""
    grid = stage(5, records=80)
    result = played(grid, rounds=1, release=["fc.*"])
    came, record = updates(grid), result.records[0]
    weighed = zip(record.bidders.tolist(), record.weights.tolist(), strict=True)
    step = sum(weight * came[0, owner] for owner, weight in weighed if weight)
    after = np.concatenate([result.arrays[name].numpy().ravel() for name in ("fc.weight", "fc.bias")])
    assert record.weights.sum() == pytest.approx(1.0)
    assert np.ptp(record.weights) > 0  # so that equal weights would be noticed
    assert_allclose(after, step, atol=1e-5)


def by_hand(inner, result, grid):
    """Where the same strategy ends if fed by hand: what was released, as plain replies with the market's weights."""
    came, arrays, tensors = updates(grid), start(), Tensors.chosen(start(), ["fc.*"])
    for record in result.records:
        asked, *_ = inner.configure_train(record.index + 1, arrays, ConfigRecord(dict(CONFIG)), grid)
        replies = []
        for owner, weight in zip(record.bidders.tolist(), record.weights.tolist(), strict=True):
            if not weight:
                continue
            named = tensors.named(tensors.flat(arrays) + came[record.index, owner])
            content = {"a": ArrayRecord({**dict(arrays), **named}), "m": MetricRecord({"num-examples": weight})}
            replies.append(Message(RecordDict(content), reply_to=asked))
        found, _ = inner.aggregate_train(record.index + 1, replies)
        arrays = ArrayRecord({**dict(arrays), **tensors.named(tensors.flat(found))})
    return tensors.flat(arrays)


@pytest.mark.parametrize("inner", [FedAdam, FedAvgM, FedMedian])
def test_other_strategies_do_what_they_do_on_plain_replies(stage, inner):
    grid = stage(4)
    result = played(grid, inner(), rounds=2, release=["fc.*"])
    ended = Tensors.chosen(start(), ["fc.*"]).flat(result.arrays)
    assert_allclose(ended, by_hand(inner(), result, grid), rtol=1e-4, atol=1e-5)


def test_statistics_are_never_sold_and_what_is_not_sold_stays(stage):
    grid = stage(3)
    result = played(grid)
    sold = {
        name for _, _, answers in grid.seen for a in answers if "update" in a.content for name in a.content["update"]
    }
    assert sold == {"fc.weight", "fc.bias", "bn.weight", "frozen"}
    before = start()
    for name in ("bn.running_mean", "bn.num_batches_tracked"):
        assert_array_equal(result.arrays[name].numpy(), before[name].numpy())
        assert result.arrays[name].dtype == before[name].dtype
    with pytest.raises(InvalidInput, match="not sold"):
        played(grid, release=["fc.*", "*.running_mean"])
    assert set(Tensors.chosen(before, ["bn.*"]).shapes) == {"bn.weight"}


def test_patterns_are_of_whole_names_and_else_of_what_follows_a_dot():
    arrays = record_of(
        m__fc__lora_A__weight=np.zeros((2, 3)), m__fc__weight=np.zeros(3), m__fc__bias=np.zeros(2),
        fc__bias=np.zeros(2), m__bn__running_var=np.zeros(2),
    )  # fmt: skip

    def sold(*patterns):
        return set(Tensors.chosen(arrays, patterns).shapes)

    assert sold("lora_*") == sold("*lora_*") == {"m.fc.lora_A.weight"}
    assert sold("fc.*") == {"fc.bias"}  # as a whole: then no other
    assert sold("fc.weight", "fc.bias") == {"m.fc.weight", "fc.bias"}
    assert list(Tensors.chosen(arrays, ["fc.bias", "lora_*"]).shapes) == ["m.fc.lora_A.weight", "fc.bias"]
    for wrong in ("ora_*", "bn.*", "running_var", "Lora_*"):
        with pytest.raises(InvalidInput, match="release"):
            sold(wrong)


def test_low_rank_adapters_are_sold_and_nothing_else(stage):
    """Those of a module that peft wrapped; their base stays as it is, whatever `train` does to it."""
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    wrapped = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    before = ArrayRecord(wrapped.state_dict())

    def train(message, context):
        wrapped.load_state_dict(message.content["arrays"].to_torch_state_dict())
        with torch.no_grad():
            for one in wrapped.state_dict().values():
                one += 0.1
        after = ArrayRecord(wrapped.state_dict())
        return Message(RecordDict({"arrays": after, "m": MetricRecord({"num-examples": 3})}), reply_to=message)

    adapters = {name for name in before if "lora_" in name}
    assert len(adapters) == 4
    for patterns in (["lora_*"], ["*lora_*"]):
        grid = stage(2, train, folder=patterns[0].strip("*_"))
        result = played(grid, rounds=1, release=patterns, arrays=before)
        sold = {n for _, _, answers in grid.seen for a in answers if "update" in a.content for n in a.content["update"]}
        assert sold == adapters
        assert result.records[0].delivered.all()
        for name in before:
            same = np.array_equal(result.arrays[name].numpy(), before[name].numpy())
            assert same == (name not in adapters), name
    wrapped.load_state_dict(result.arrays.to_torch_state_dict())  # and it is a model again


def test_nothing_of_what_the_app_says_passes(stage):
    grid = stage(3)
    played(grid)
    answers = [answer for _, _, found in grid.seen for answer in found]
    assert {name for answer in answers for name in answer.content} == {"bid", "head", "delivery", "update"}
    assert all(one.dtype == "float32" for a in answers if "update" in a.content for one in a.content["update"].values())
    assert not any(answer.content.metric_records for answer in answers)


def raises(message, context):
    raise RuntimeError("my records are secret")


def ends(message, context):
    raise SystemExit(3)


def not_finite(message, context):
    answer = honest_train(message, context)
    answer.content["arrays"]["fc.weight"] = Array(np.full((3, 4), np.nan, np.float32))
    return answer


def other_shape(message, context):
    answer = honest_train(message, context)
    answer.content["arrays"]["fc.weight"] = Array(np.ones((4, 3), np.float32))
    return answer


def lost_tensor(message, context):
    return Message(RecordDict({"arrays": record_of(other=np.ones(3))}), reply_to=message)


def nothing(message, context):
    return Message(RecordDict(), reply_to=message)


def two_records(message, context):
    answer = honest_train(message, context)
    answer.content["more"] = record_of(x=np.ones(3))
    return answer


def integers(message, context):
    answer = honest_train(message, context)
    answer.content["arrays"]["fc.bias"] = Array(np.array([1, 2, 3]))
    return answer


def form(answer):
    return {name: (one.shape, one.dtype, len(one.data)) for name, one in answer.content["update"].items()}


@pytest.mark.parametrize(
    "train",
    [raises, ends, not_finite, other_shape, lost_tensor, nothing, two_records, integers],
    ids=lambda f: f.__name__,
)
def test_a_train_function_that_fails_reveals_nothing(stage, tmp_path, train):
    """Its answer has the form of any other, it is charged, and no word of it leaves."""
    grid = stage(2, train)
    result = played(grid, rounds=1)
    good = stage(2, folder="good")
    played(good, rounds=1)
    for (_, _, (bad,)), (_, _, (fine,)) in zip(grid.seen, good.seen, strict=True):
        assert sorted(bad.content) == sorted(fine.content)
        if "update" in bad.content:
            assert form(bad) == form(fine)
    assert result.records[0].delivered.all()
    assert accounts(tmp_path) == {0: 1, 1: 1}


def test_before_the_charge_nothing_is_trained(stage, tmp_path):
    """Every order that is refused leaves the app untouched."""
    calls = []

    def train(message, context):
        calls.append(message)
        return honest_train(message, context)

    poor = stage(2, train, minimum_price=1e6)
    result = played(poor, rounds=1)
    assert {state for state in result.records[0].state if state} == {AwardState.VOIDED}
    assert "price" in result.records[0].reason[0]
    assert calls == []
    assert accounts(tmp_path) == {0: 0, 1: 0}


def swapped(name, change):
    """A grid that changes one record of orders on their way."""

    class Swapping(InProcessGrid):
        def answer(self, message):
            if "order" in message.content:
                message.content = RecordDict({**dict(message.content), name: change(message.content[name])})
            return super().answer(message)

    return Swapping


def other_listing(record):
    rows = json.loads(record["json"])
    return ConfigRecord({"json": json.dumps(rows[:-1], separators=(",", ":"))})


def with_statistics(record):
    rows = [*json.loads(record["json"]), ["bn.running_mean", [2], "float32"]]
    return ConfigRecord({"json": json.dumps(rows, separators=(",", ":"))})


def wider(record):
    return ArrayRecord({**dict(record), "fc.weight": Array(np.zeros((3, 5), np.float32))})


def endless(record):
    return ArrayRecord({**dict(record), "fc.weight": Array(np.full((3, 4), np.inf, np.float32))})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config", lambda record: ConfigRecord(dict(record) | {"lr": 50.0})),
        ("config", lambda record: ConfigRecord(dict(record) | {"server-round": 1.0})),
        ("tensors", other_listing), ("tensors", with_statistics), ("tensors", lambda r: ConfigRecord({"json": "[]"})),
        ("arrays", wider), ("arrays", endless),
    ],
)  # fmt: skip
def test_an_order_on_other_terms_than_announced_is_refused(stage, tmp_path, name, change):
    grid = stage(2)
    hostile = swapped(name, change)(grid.app, 2)
    result = played(hostile, rounds=1)
    assert not result.records[0].delivered.any()
    assert result.spent_micros == 0
    assert accounts(tmp_path) == {0: 0, 1: 0}


def test_plain_training_and_evaluation_are_refused(stage):
    grid = stage(1)
    for kind in ("train", "evaluate"):
        content = RecordDict({"arrays": start(), "config": ConfigRecord(dict(CONFIG))})
        (answer,) = grid.send_and_receive([Message(content, 1000, kind)])
        assert unpack(Refusal, answer) is not None
        assert set(answer.content) == {"refusal"}


class ReadsLosses(FedAvg):
    def aggregate_train(self, server_round, replies):
        assert [reply.content["metrics"]["loss"] for reply in replies]


def replaced(**values):
    """The usual arrays, some of them full of one number."""
    return ArrayRecord({**dict(start()), **record_of(**{n: np.full((3, 4), v, np.float32) for n, v in values.items()})})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"release": ["fc.*", "lora_*"]}, "release"), ({"release": []}, "release"), ({"release": "fc.*"}, "release"),
        ({"release": ["bn.num_*"]}, "release"), ({"arrays": record_of(n=np.arange(3))}, "release"),
        ({"config": {"lr": float("nan")}}, "train_config"), ({"config": {"blob": b"1"}}, "train_config"),
        ({"config": {"text": "x" * 3000}}, "train_config"), ({"perturbation": "none"}, "perturbation"),
        ({"auction": "nobody"}, "auction"), ({"budget_per_round": -1.0}, "budget"), ({"inner": "FedAvg"}, "strategy"),
        ({"aggregation": "average-of-everything"}, "aggregation"), ({"clip": 0.0}, "clip"),
        ({"inner": FedAvg(fraction_train=0.0)}, "strategy"), ({"inner": FedAvg(arrayrecord_key="order")}, "record"),
        ({"inner": QFedAvg(0.1)}, "strategy.*without owners' metrics"), ({"inner": ReadsLosses()}, "strategy.*'loss'"),
        ({"arrays": replaced(fc__weight=np.nan)}, "initial_arrays.*NaN in fc"),
        ({"arrays": replaced(fc__weight=1e10)}, "initial_arrays.*within"),
        ({"arrays": replaced(frozen=np.nan), "release": ["fc.*"]}, "initial_arrays.*NaN in frozen"),
        ({"arrays": {"fc.weight": np.zeros(3)}}, "initial_arrays.*ArrayRecord"), ({"release": [3]}, "release"),
        ({"arrays": record_of(**{f"{i}{'x' * 900}": np.zeros(1) for i in range(1100)})}, "release.*1100 tensors"),
        ({"config": {"n": 2**63}}, "train_config"), ({"config": {"text": "\ud800"}}, "train_config"),
        ({"evaluate": lambda index, arrays: 0.5}, "evaluate_fn"), ({"evaluate": 3}, "evaluate_fn"),
        ({"rounds": 0}, "rounds"), ({"timeout": "60"}, "timeout"), ({"bid_seconds": float("inf")}, "bid_seconds"),
        ({"auction": 3}, "auction.*run"), ({"aggregation": 3}, "aggregation.*weights"), ({"seed": -1}, "seed"),
        ({"perturbation": 3}, "perturbation.*privatize"), ({"budget_per_round": 0.0}, "budget_per_round"),
        ({"buyer": "escrow"}, "buyer"), ({"buyer": "b" * 201}, "buyer"), ({"task": "t" * 151}, "task"),
        ({"task": "a/0"}, "task"), ({"known_nodes": {"a": 1}}, "known_nodes"), ({"state": 3}, "state"),
        ({"state": "/proc/nobody"}, "state"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anybody_is_asked(stage, tmp_path, changes, field):
    grid, ledger = stage(3), MemoryLedger()
    with pytest.raises(FlmarketError, match=field):
        played(grid, ledger=ledger, **changes)
    assert grid.seen == []
    assert ledger.head().size == 0
    assert accounts(tmp_path) == {}


def test_other_things_that_are_no_ledger_and_no_market_are_refused(stage):
    for made in (lambda: Market(budget_per_round=1.0, ledger=3), lambda: MarketStrategy(FedAvg(), market=None)):
        with pytest.raises(InvalidInput, match=r"ledger|market"):
            made()


def test_a_strategy_is_tried_on_a_copy(stage):
    """What it remembers begins with the first round, also where it cannot be copied and so is not tried."""

    class Counts(FedAvg):
        seen = ()
        held = None

        def aggregate_train(self, server_round, replies):
            self.seen = (*self.seen, len(list(replies)))
            return super().aggregate_train(server_round, replies)

    for held in (None, threading.Lock()):
        inner = Counts()
        inner.held = held
        played(stage(3, folder=f"held-{held is None}"), inner, auction="all-in", budget_per_round=1e5)
        assert inner.seen == (3, 3)


def test_numbers_without_a_shape_and_names_like_patterns_are_sold(stage):
    def train(message, context):
        arrays = {name: Array(np.asarray(one.numpy() + 1)) for name, one in message.content["arrays"].items()}
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    grid = stage(2, train)
    arrays = ArrayRecord({name: Array(np.array(1.0, np.float32)) for name in ("layer[0].w*", "scale")})
    result = played(grid, arrays=arrays, release=["layer[0].w*", "scale"])
    assert {tuple(one.shape) for one in result.arrays.values()} == {()}
    assert all(one.numpy() != 1 for one in result.arrays.values())
    assert result.records[0].delivered.all()


def test_what_may_be_tied_is_told(stage, caplog):
    """Of weights under two names a loaded state dict keeps the last; zeros are no sign of it."""
    arrays = record_of(a=np.arange(3.0), b=np.arange(3.0), c=np.zeros(3), d=np.zeros(3), e=np.arange(3))
    for release, told in ((["a"], True), (["a", "b"], True), (["b"], False), (["c"], False)):
        found = twins(arrays, Tensors.chosen(arrays, release))
        assert found == ([["a", "b"]] if told else [])


def test_an_owner_whose_answer_would_come_too_late_is_not_charged(stage, tmp_path):
    """Her answers leave after a time of her own; an order that ends before is not carried out in vain."""
    grid = stage(2)
    file = tmp_path / "owners" / "owner.toml"
    file.write_text("answer_seconds = 100.0\n" + file.read_text())
    result = played(grid, rounds=1, timeout=100)
    assert {state for state in result.records[0].state if state} == {AwardState.VOIDED}
    assert "answers leave 100 s after an order" in result.records[0].reason[0]
    assert accounts(tmp_path) == {0: 0, 1: 0}


def test_a_cap_ends_what_is_sold(stage):
    grid = stage(2, cap=5.0)
    result = played(grid, rounds=4, budget_per_round=1000.0)
    total = sum(award.epsilon for award in result.awards if award.owner == "owner-0")
    assert 4.0 < total <= 5.0 + 1e-9
    assert not result.records[-1].delivered.any()


def test_nodes_without_an_owner_file_say_so(monkeypatch, caplog):
    monkeypatch.delenv("FLMARKET_OWNER_FILE", raising=False)
    app = ClientApp(mods=[owner_guard()])
    app.train()(honest_train)
    with caplog.at_level("INFO", logger="flwr"):
        logging.getLogger("flwr").propagate = True
        result = played(InProcessGrid(app, 2), rounds=1)
    assert not result.records[0].bidders.size
    assert "bids: 0 of 2 nodes" in caplog.text
    assert "2 × the owner's machine could not carry it out (ConfigError)" in caplog.text


def test_an_app_without_the_guard_is_told_from_one_that_abstains(caplog):
    app = ClientApp()
    app.train()(honest_train)
    logging.getLogger("flwr").propagate = True
    with caplog.at_level("INFO", logger="flwr"):
        assert not played(InProcessGrid(app, 2), rounds=1).records[0].bidders.size
    assert "owner_guard() among its mods" in caplog.text


def test_a_train_function_may_change_what_it_is_sent(stage):
    """In one process all owners are sent the same records; hers to change is a copy."""

    def train(message, context):
        message.content["config"]["lr"] = 99.0
        message.content["arrays"]["fc.weight"] = Array(np.ones((3, 4), np.float32))
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    result = played(stage(3, train), auction="all-in", budget_per_round=1e5)
    assert all(record.delivered.all() for record in result.records)


def test_one_order_sent_many_times_at_once_is_carried_out_once(stage, tmp_path):
    """By threads that all ask before the first is answered; everybody else is told that it was."""
    asked, answers = [], []

    class Impatient(InProcessGrid):
        def answer(self, message):
            if not {"order", "arrays"} <= set(message.content):
                return super().answer(message)
            again = [
                Message(RecordDict(dict(message.content)), message.metadata.dst_node_id, "train") for _ in range(6)
            ]
            threads = [
                threading.Thread(target=lambda m=m: answers.extend(super(Impatient, self).answer(m))) for m in again
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return super().answer(message)

    def train(message, context):
        asked.append(message)
        time.sleep(0.2)
        return honest_train(message, context)

    played(Impatient(stage(1, train).app, 1), FedAvg(min_available_nodes=1, min_train_nodes=1), rounds=1)
    assert len(asked) == 1
    assert sorted("update" in answer.content for answer in answers) == [False] * 5 + [True]
    assert {unpack(Refusal, one).code for one in answers if "update" not in one.content} == {"replay"}
    assert accounts(tmp_path) == {0: 1}


def test_whose_machine_it_is(stage, tmp_path, monkeypatch):
    """The node's own configuration goes first, then the environment; a server's configuration is never looked at."""
    from flmarket.flower.owner import owner_at

    stage(1)
    path = tmp_path / "owners" / "owner.toml"
    mine = tmp_path / "mine.toml"
    mine.write_text(path.read_text().replace("owner = 0", "owner = 7"))
    grid = InProcessGrid(ClientApp(), 3)
    context = grid.contexts[1002]
    assert owner_at(context, path).number == 2
    monkeypatch.setenv("FLMARKET_OWNER_FILE", str(mine))
    assert owner_at(context, path).number == 7
    context.node_config["owner-file"] = str(path)
    assert owner_at(context, path).number == 0
    assert owner_at(context, path).data_size == 50
    context.run_config["owner-file"] = "nowhere.toml"
    assert owner_at(context).number == 0


def test_one_record_is_shared_by_all_messages_of_a_round(stage):
    grid = stage(6)
    played(grid, rounds=1)
    orders = [content for _, content, _ in grid.seen if "order" in content]
    assert len(orders) > 1
    assert len({id(content["arrays"]) for content in orders}) == 1
    assert len({id(content["config"]) for content in orders}) == 1


def test_a_strategy_that_changes_its_configuration_announces_it(stage):
    class Decaying(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            config["lr"] = 0.5 / server_round
            return super().configure_train(server_round, arrays, config, grid)

    grid = stage(2)
    result = played(grid, Decaying(), rounds=3)
    assert all(record.delivered.any() for record in result.records)
    rates = {
        content["order"]["round-index"]: content["config"]["lr"] for _, content, _ in grid.seen if "order" in content
    }
    assert rates == {0: 0.5, 1: 0.25, 2: 0.5 / 3}


def test_unknown_nodes_are_not_heard(stage):
    result = played(stage(4), rounds=1, known_nodes={1001: 1, 1003: 2})
    assert result.records[0].bidders.tolist() == [1]


class PowerCut(BaseException):
    pass


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_buyer_who_dies_anywhere_goes_on(stage, tmp_path, cut):
    """The process ends at the n-th message; the same command goes on, with FedAdam's momenta, and pays once."""

    class Cut(type(stage(3))):
        left = cut

        def push_messages(self, messages):
            for message in list(messages):
                self.left -= 1
                if self.left == 0:
                    raise PowerCut
                yield from super().push_messages([message])

    grid, ledger = Cut(stage(3).app, 3), MemoryLedger()
    again = {"ledger": ledger, "state": tmp_path / "state", "release": ["fc.*"], "rounds": 2}
    with pytest.raises(PowerCut):
        played(grid, FedAdam(), **again)
    result = played(grid, FedAdam(), **again)
    ledger.verify()
    paid = [award.owner for award in result.awards if award.state is AwardState.POSTED]
    assert len(paid) == len(result.awards) == sum(int(record.delivered.sum()) for record in result.records)
    assert accounts(tmp_path) == {number: paid.count(f"owner-{number}") for number in range(3)}
    ended = Tensors.chosen(start(), ["fc.*"]).flat(result.arrays)
    assert_allclose(ended, by_hand(FedAdam(), result, grid), rtol=1e-4, atol=1e-5)


def test_a_task_s_name_is_used_once(stage, tmp_path):
    grid, ledger = stage(2), MemoryLedger()
    played(grid, rounds=1, ledger=ledger, task="mine")
    with pytest.raises(IdReused):
        played(grid, rounds=1, ledger=ledger, task="mine")
    played(grid, rounds=1, ledger=ledger, state=tmp_path / "s", task="other")
    with pytest.raises(InvalidInput, match="task"):
        played(grid, rounds=1, ledger=ledger, state=tmp_path / "s", task="third")


def test_it_learns(stage):
    """With much privacy sold, the mean of what came is where honest training goes."""
    far = float(np.abs(TARGET).mean())
    grid = stage(6, privacy_budget=40.0, cap=1e4)
    result = played(
        grid, rounds=4, release=["fc.weight"], auction="all-in", budget_per_round=1e5, clip=2.0, epsilon_per_round=40.0
    )
    assert np.abs(result.arrays["fc.weight"].numpy() - TARGET).mean() < 0.5 * far
