"""The demo market on a real server, and a real Chromium that can reach nothing but this machine."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.demo import seed_demo
from flmarket.broker.settings import Settings

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


@pytest.fixture
def window(browser, demo, tmp_path):
    """A fresh window: window(width=390, color_scheme="dark"). Whatever it complains about fails the test."""
    opened = []
    pictures = Path(os.environ.get("FLMARKET_PICTURES") or tmp_path)

    def open_window(*, width=1200, height=860, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        made = Window(context.new_page(), demo, pictures)
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
