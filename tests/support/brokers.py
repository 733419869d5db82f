"""For all tests that want a broker: one on each kind of database, parties with keys, a real server on loopback."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker, Party
from flmarket.broker.office import parties, statements
from flmarket.broker.requests import BidRequest, TaskRequest, Valuation
from flmarket.broker.settings import Settings
from flmarket.broker.work.worker import Worker
from flmarket.engines.config import BrokerSection, TaskSection

MONEY = 1_000_000_000_000
PATIENCE = 600.0  # these machines may be busy; a quiet one needs a tenth


@dataclass(frozen=True)
class Person:
    party: Party
    key: str

    @property
    def headers(self):
        return {"Authorization": f"Bearer {self.key}"}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/broker.db"
    return request.getfixturevalue("postgres")(tables=False)


@pytest.fixture
def broker(url):
    """On both databases; no worker: tests play the tasks themselves."""
    made = Broker.open(Settings(database_url=url, run_worker=False))
    yield made
    made.close()


@pytest.fixture
def small(tmp_path):
    """On SQLite only, for what does not depend on the database."""
    made = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/broker.db", run_worker=False))
    yield made
    made.close()


def join(broker, role, name=None):
    view = parties.create_party(broker, None, role=role, name=name or role)
    key = parties.issue_key(broker, None, view.id, label="test").key
    if role == "buyer":
        parties.deposit(broker, None, view.id, MONEY)
    if role == "owner":  # more than a market suggests, so that tests may play many rounds
        statements.set_cap(broker, Party(view.id, role, view.name), 100.0)
    return Person(Party(view.id, role, view.name), key)


@pytest.fixture(scope="session")
def joined():
    """Registers a party: joined(broker, role)."""
    return join


@pytest.fixture(scope="session")
def order():
    """A small task: order(rounds=3, …); keys of [task] and [broker] may be given without their section."""

    def make(**changes):
        values = {
            "task": {"name": "test", "rounds": 3, "bidders_per_round": 8, "budget_per_round": 100.0},
            "data": {"name": "breast-cancer", "owners": 12, "minimum": 5, "sigma": 0.5},
            "owners": {"valuations": ["linear", "quadratic", "sqrt"]},
            "training": {"average": True},
            "broker": {},
        }
        for key, value in changes.items():
            if key in TaskSection.model_fields:
                values["task"][key] = value
            elif key in BrokerSection.model_fields:
                values["broker"][key] = value
            else:
                values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
        return TaskRequest.model_validate(values)

    return make


@pytest.fixture(scope="session")
def cheap_bid():
    """A bid that wins wherever a bid can win."""

    def make(epsilon=1.0, rate=0.01, **changes):
        return BidRequest(valuation=Valuation(kind="linear", rate=rate), privacy_budget=epsilon, **changes)

    return make


@pytest.fixture
def play():
    """Plays all tasks that are due: play(broker)."""

    def run(broker):
        worker = Worker(broker)
        worker.run_until_idle()
        worker.stop()

    return run


@contextlib.contextmanager
def serving(app):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        quiet = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 1}
        config = uvicorn.Config(app, ws="none", proxy_headers=False, **quiet)
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def serve():
    """Serves an application on loopback: with serve(app) as address."""
    return serving


@pytest.fixture
def http(small):
    """A client of a server over `small`."""
    with serving(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield client


def await_true(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")
