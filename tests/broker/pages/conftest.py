"""The demo market on a real server, and a real Chromium that can reach nothing but this machine."""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select, update

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.demo import _join, seed_demo
from flmarket.broker.office import audits, offers, parties, tasks
from flmarket.broker.requests import AuditRequest, BidRequest, TaskRequest, Valuation
from flmarket.broker.settings import Settings
from flmarket.broker.tables import FlowerRun, TaskRow
from flmarket.broker.work.flower import runs
from flmarket.broker.work.flower.server import play_task
from flmarket.broker.work.worker import Worker
from flmarket.engines.config import MarketConfig
from flmarket.engines.flower import InProcessGrid, client_app
from flmarket.engines.flower.play import Dealer, store_spec

ARGUMENTS = (
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@dataclass(frozen=True)
class Demo:
    """A served demo market and its people."""

    address: str
    broker: Broker
    people: tuple

    def person(self, role):
        return next(one for one in self.people if one.party.role == role)


@pytest.fixture(scope="session")
def demo(tmp_path_factory, serve):
    """One market for all page tests: seeding it takes seconds."""
    folder = tmp_path_factory.mktemp("market")
    broker = Broker.open(Settings(database_url=f"sqlite:///{folder}/market.db", sign_ins_per_minute=10_000.0))
    people = seed_demo(broker, round_seconds=8.0)  # its tasks outlast the slowest run of all tests
    app = create_app(broker=broker)
    app.state.demo_people = people
    with serve(app) as address:
        yield Demo(address, broker, people)
    broker.close()


LONG_NAME = "Gesellschaft für außerordentlich lange Namen ohne Leerzeichen".ljust(80, "n")
MARKUP = "<b>bold</b>&<script>alert(1)</script>"
_HOME = {"name": "breast-cancer", "owners": 2, "partition": "equal"}
_NETWORK = {"name": "mlp", "hidden": [4]}  # in PyTorch
KINDS = {
    "auction": {"task": {"budget_per_round": 100}},
    "sampling": {"task": {"budget_per_round": 10}, "sampling": {"hard_cap": 20, "first_rate": 0.1}},
    "reward": {"reward": {"reward": 20}},
    "joint": {"joint": {"budget": 2000, "epsilon": 20}},
    "flower": {
        "kind": "auction", "task": {"budget_per_round": 100, "bidders_per_round": 2}, "data": _HOME, "model": _NETWORK,
        "broker": {"engine": "flower"},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Gallery(Demo):
    """A market in which all has happened, by people with the worst names; `tasks` by kind, all of them played."""

    tasks: dict


@pytest.fixture(scope="session")
def gallery(tmp_path_factory, serve):
    """One task of each kind of market, and one on Flower with a PyTorch model; nothing moves."""
    folder = tmp_path_factory.mktemp("gallery")
    settings = Settings(database_url=f"sqlite:///{folder}/market.db", run_worker=False, superlink="test")
    broker = Broker.open(
        settings.model_copy(update={"flower_folder": folder / "runs", "sign_ins_per_minute": 10_000.0})
    )
    names = {"buyer": LONG_NAME, "owner": MARKUP, "operator": "W" * 80}
    people = tuple(_join(broker, role, name, 8.0 if role == "owner" else None) for role, name in names.items())
    buyer, owner, desk = (one.party for one in people)
    parties.deposit(broker, None, buyer.id, 10**12)
    posted = {}
    for kind, market in KINDS.items():
        name = f"{kind} {MARKUP if kind == 'auction' else LONG_NAME}"[:80]
        order = (
            {"kind": kind, "data": _HOME | {"owners": 10}}
            | market
            | {"task": {"name": name, "rounds": 2} | market.get("task", {})}
        )
        posted[kind] = tasks.post_task(broker, buyer, TaskRequest.model_validate(order)).id
    bid = BidRequest(valuation=Valuation(kind="linear", rate=0.01), privacy_budget=0.5)
    offers.place_bid(broker, owner, posted["auction"], bid)
    audits.start_audit(broker, buyer, AuditRequest(auction="posted", profiles=5))
    _play(broker, folder, posted["flower"], desk)
    with serve(create_app(broker=broker)) as address:
        yield Gallery(address, broker, people, posted)
    broker.close()


def _play(broker, folder, flower, desk):
    """All tasks to their end, the one on Flower by nodes in this process."""
    sellers = {"valuations": ["linear"], "rate": [0.005, 0.01], "privacy_budget": [0.5, 0.9], "privacy_cap": 50.0}
    task = {"rounds": 2, "budget_per_round": 100.0, "bidders_per_round": 2}
    sold = {"task": task, "data": _HOME, "model": _NETWORK, "owners": sellers}
    spec = store_spec(MarketConfig.parse(sold).simulation(), folder)
    grid = InProcessGrid(client_app(Dealer(spec, folder / "owners")), 2)
    for number, node in enumerate(grid.contexts):
        clinic = _join(broker, "owner", f"Clinic {number}", 8.0).party
        parties.bind_node(broker, desk, clinic.id, node_id=str(node))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_flwr", _answer)
        worker = Worker(broker)
        worker.run_until_idle(300)
        worker._flower.join()
        worker.step()
        with broker.database.read() as session:
            attempt = session.get_one(FlowerRun, flower).attempt
        play_task(broker, grid, flower, attempt)
        with broker.database.write() as session:
            session.execute(update(TaskRow).values(next_at=0))
        worker.run_until_idle(300)
        worker._flower.join()
        worker.stop()
    with broker.database.read() as session:
        states = {row.name: (row.state, row.error) for row in session.scalars(select(TaskRow))}
    assert set(states.values()) == {("finished", "")}, states


def _answer(said, *_arguments):
    said.write_text('Successfully\n{"run-id": "7"}')
    return subprocess.Popen(["true"])


@pytest.fixture
def visit(demo):
    """A signed-in HTTP client: visit("buyer"); visit(None) is a stranger. Redirects are not followed."""
    clients = []

    def enter(role):
        client = httpx.Client(base_url=demo.address, timeout=30)
        clients.append(client)
        if role is not None:
            assert client.get(demo.person(role).link).status_code == 303
        return client

    yield enter
    for client in clients:
        client.close()


def chromium():
    """The browser's path: FLMARKET_CHROMIUM, or what is installed."""
    named = os.environ.get("FLMARKET_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        reason = "no Chromium: run tools/browser.sh or set FLMARKET_CHROMIUM to the path of one"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all journeys."""
    path = chromium()
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield launched
        launched.close()


@dataclass
class Window:
    """A page that notes what it should not see: requests elsewhere, errors in the console, broken policies."""

    page: object
    demo: Demo
    pictures: Path
    complaints: list = field(default_factory=list)

    def open(self, path):
        self.page.goto(self.demo.address + path)

    def sign_in(self, role):
        self.open(self.demo.person(role).link)

    def shoot(self, name, **options):
        self.page.mouse.move(0, 0)
        self.page.wait_for_timeout(350)  # charts have drawn and transitions have ended
        self.page.screenshot(path=self.pictures / f"web-{name}.png", **options)


@pytest.fixture(scope="session")
def axe():
    """The source of axe-core, which looks for what people with disabilities would stumble over."""
    return resources.files(pytest.importorskip("axe_playwright_python")).joinpath("axe.min.js").read_text()


@pytest.fixture
def window(browser, tmp_path, request):
    """A fresh window: window(width=390, color_scheme="dark"). Whatever it complains about fails the test."""
    opened = []
    pictures = Path(os.environ.get("FLMARKET_PICTURES") or tmp_path)

    def open_window(*, width=1200, height=860, market=None, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        made = Window(context.new_page(), market or request.getfixturevalue("demo"), pictures)
        made.page.set_default_timeout(60_000)
        made.page.on("request", lambda request: _local(made, request.url))
        made.page.on("console", lambda message: _quiet(made, message))
        made.page.on("pageerror", lambda error: made.complaints.append(f"script error: {error}"))
        opened.append((made, context))
        return made

    yield open_window
    for made, context in opened:
        context.close()
        assert made.complaints == []


def _local(window, url):
    if not url.startswith((f"{window.demo.address}/", "data:", "blob:")):
        window.complaints.append(f"a request elsewhere: {url}")


def _quiet(window, message):
    if message.type in ("error", "warning"):
        window.complaints.append(f"console {message.type}: {message.text}")
