"""The client and its commands against a real service on loopback."""

import io
import json
import subprocess
import sys
import warnings

import httpx
import numpy as np
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.settings import Settings
from flmarket.client import BrokerClient, BrokerRefused, BrokerUnreachable
from flmarket.errors import ConfigError
from flmarket.ledger import Receipt


@pytest.fixture(scope="module")
def command():
    """The whole command in this process; typer itself uses what click has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from flmarket.cli.app import app
    return app


@pytest.fixture(scope="module")
def market(tmp_path_factory, joined, serve):
    """A service with a worker; yields its address, a buyer and an owner."""
    path = tmp_path_factory.mktemp("client")
    broker = Broker.open(Settings(database_url=f"sqlite:///{path}/b.db", stream_poll_seconds=0.02, worker_pause=0.02))
    buyer, owner = joined(broker, "buyer"), joined(broker, "owner")
    with serve(create_app(broker=broker)) as address:
        yield address, buyer, owner
    broker.close()


def document(order, **changes):
    return order(**changes).model_dump(mode="json")


def test_a_buyer_and_an_owner_meet(market, order, tmp_path):
    address, buyer, owner = market
    with BrokerClient(address, buyer.key) as shop, BrokerClient(address, owner.key) as clinic:
        assert shop.me().role == "buyer"
        before = shop.account().balance_micros
        task = shop.post_task(document(order, bidders_per_round=12, round_seconds=0.5))
        assert task.id in [one.id for one in shop.tasks()]
        offer = next(one for one in clinic.offers() if one.task_id == task.id)
        assert (offer.auction, offer.truthful) == ("posted", "exact")
        bid = clinic.bid(task.id, {"kind": "linear", "rate": 0.01}, privacy_budget=0.5)
        assert bid.active
        kinds = [event.kind for event in shop.follow(task.id)]
        assert kinds[-1] == "finished"
        assert kinds.count("settled") == 3
        done = shop.task(task.id)
        assert done.ended
        assert shop.account().balance_micros == before - done.spent_micros
        bill = shop.bill(task.id)
        assert sum(line.spent_micros for line in bill.lines) == done.spent_micros
        assert [one.index for one in shop.rounds(task.id)] == [0, 1, 2]
        statement = clinic.statement()
        assert statement.earned_micros > 0
        assert statement.releases[-1].epsilon_total == pytest.approx(clinic.privacy().spent_epsilon_total)
        assert clinic.statement_csv().count("\n") == len(statement.releases) + 1
        first = statement.releases[0]
        award, _ = Receipt.from_dict(clinic.receipts(task.id, first.index)[0]).check()
        assert award.id == first.award_id
        with np.load(io.BytesIO(shop.model(task.id))) as model:
            assert model["weights"].shape == (1, 30)
        assert shop.save_model(task.id, tmp_path / "m.safetensors").stat().st_size > 200
        assert clinic.set_cap(70.0).cap_epsilon_total == 70.0
        assert not clinic.withdraw(task.id).active


def test_refusals_name_the_field(market, order):
    address, buyer, owner = market
    with BrokerClient(address, buyer.key) as shop, BrokerClient(address, owner.key) as clinic:
        with pytest.raises(BrokerRefused) as refused:
            shop.post_task({"task": {"rounds": 0, "budget_per_round": 1}})
        assert refused.value.status == 422
        assert set(refused.value.fields) == {"task.rounds"}
        with pytest.raises(BrokerRefused) as refused:
            shop.task("../me")  # a part of a path, never a path
        assert refused.value.status == 404
        with pytest.raises(BrokerRefused) as refused:
            clinic.post_task(document(order))
        assert refused.value.status == 403
    with BrokerClient(address, "flm_a_b") as stranger, pytest.raises(BrokerRefused) as refused:
        stranger.account()
    assert refused.value.status == 401
    with BrokerClient("http://127.0.0.1:9", "k", retries=0) as lost, pytest.raises(BrokerUnreachable):
        lost.account()


def test_a_lost_answer_is_asked_for_again_and_nothing_happens_twice(market, order, monkeypatch):
    address, buyer, _ = market
    original, calls = httpx.Client.request, []

    def flaky(self, method, url, **options):
        answer = original(self, method, url, **options)
        calls.append(options["headers"]["Idempotency-Key"])
        if len(calls) == 1:
            raise httpx.ReadError("the answer was lost")
        if len(calls) == 2:  # as far as the service knows, the first is still at it
            return httpx.Response(409, headers={"Retry-After": "0"}, json={"title": "Conflict"})
        return answer

    with BrokerClient(address, buyer.key) as shop:
        before = {one.id for one in shop.tasks()}
        with monkeypatch.context() as patch:
            patch.setattr(httpx.Client, "request", flaky)
            task = shop.post_task(document(order, rounds=1))
        assert len(calls) == 3
        assert len(set(calls)) == 1
        assert {one.id for one in shop.tasks()} - before == {task.id}


def test_exploring_advice_and_audits(market, order):
    address, buyer, owner = market
    with BrokerClient(address, buyer.key) as shop, BrokerClient(address, owner.key) as clinic:
        points = shop.explore(document(order), [200_000_000, 100_000_000])
        assert [point.budget_micros for point in points] == [100_000_000, 200_000_000]
        assert "sure" in clinic.bid_help({"kind": "linear", "rate": 1.0}, privacy_budget=1.0).epsilon_words
        audit = clinic.audit("m1", profiles=1)
        assert clinic.get_audit(audit.id).auction == "m1"


def test_the_commands(market, command, order, tmp_path, capsys):
    address, buyer, owner = market

    def run(person, *words):
        command([*map(str, words), "--url", address, "--key", person.key], standalone_mode=False)
        return capsys.readouterr().out

    (tmp_path / "task.json").write_text(json.dumps(document(order, bidders_per_round=12)))
    (tmp_path / "task.toml").write_text('[task]\nname = "from a file"\nrounds = 1\nbudget_per_round = 100\n')
    assert "finished" in run(buyer, "buyer", "post", tmp_path / "task.toml", "--watch")
    task_id = json.loads(run(buyer, "buyer", "post", tmp_path / "task.json", "--json"))["id"]
    assert "round 3/3" in run(buyer, "buyer", "watch", task_id)
    assert "from a file" in run(buyer, "buyer", "tasks")
    assert "round 3 of 3" in run(buyer, "buyer", "task", task_id)
    assert "escrow 300.00 = spent" in run(buyer, "buyer", "bill", task_id)
    assert json.loads(run(buyer, "buyer", "account", "--json"))["balance_micros"] > 0
    assert "100.00" in run(buyer, "buyer", "explore", tmp_path / "task.toml", "--budget", 100)
    run(buyer, "buyer", "model", task_id, "--out", tmp_path / "model.npz")
    assert (tmp_path / "model.npz").exists()
    assert "Offers" in run(owner, "owner", "offers")
    assert "80" in run(owner, "owner", "cap", 80)
    assert json.loads(run(owner, "owner", "cap", "--json"))["cap_epsilon_total"] == 80
    assert "earned" in run(owner, "owner", "statement")
    run(owner, "owner", "statement", "--csv", tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().startswith("When,")
    assert "win" in run(owner, "owner", "advise", "--rate", 1, "--epsilon", 1)
    with pytest.raises(BrokerRefused, match="no offer"):
        run(owner, "owner", "bid", "t_nothing", "--rate", 1, "--epsilon", 1)
    with pytest.raises(ConfigError, match="--key"):
        command(["buyer", "tasks", "--url", address, "--key", ""], standalone_mode=False)


def test_a_cap_for_records_is_set_before_anything_is_sold(tmp_path, joined, serve, command, capsys):
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False))
    owner = joined(broker, "owner")
    with serve(create_app(broker=broker)) as address:

        def cap(*words):
            command(["owner", "cap", *words, "--json", "--url", address, "--key", owner.key], standalone_mode=False)
            said = json.loads(capsys.readouterr().out)
            return said["cap_epsilon_total"], said["unit"], said["delta"]

        assert cap("8", "--unit", "record", "--delta", "1e-6") == (8, "record", 1e-6)
        assert cap("9") == cap() == (9, "record", 1e-6)  # what is not said stays
        assert cap("3", "--unit", "update") == (3, "update", 0)
        with pytest.raises(BrokerRefused, match="delta"):
            cap("3", "--delta", "1e-6")
        with pytest.raises(BrokerRefused, match="unit"):
            cap("3", "--unit", "row")
        with pytest.raises(ConfigError, match="cap"):
            cap("--unit", "record")
    broker.close()


def test_the_client_needs_nothing_of_the_broker():
    heavy = ("flmarket.broker", "flmarket.engines", "fastapi", "sqlalchemy", "sklearn", "torch")
    code = f"import sys, flmarket.client; sys.exit(any(m.startswith({heavy}) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_newer_and_an_older_broker(market, monkeypatch):
    """Fields that the client does not know are ignored; one that it needs is missed by name."""
    address, buyer, _ = market
    answers = {"account": "p_1", "balance_micros": 3, "escrow_micros": 0, "credit_micros": 7}
    with BrokerClient(address, buyer.key) as shop:
        monkeypatch.setattr(shop, "_get", lambda *_: answers)
        assert shop.account().balance_micros == 3
        del answers["escrow_micros"]
        with pytest.raises(BrokerRefused, match="escrow_micros of Account"):
            shop.account()
