"""`flmarket serve`: the broker on this machine, with an empty market or the demo's."""

import importlib.util
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flmarket.cli.output import errors, screen
from flmarket.errors import ConfigError, MissingDependency
from flmarket.trust import market_words

if TYPE_CHECKING:
    from flmarket.broker.demo import DemoParty

_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    host: str,
    port: int,
    given: Mapping[str, Any],
    *,
    demo: bool = False,
    settings_file: Path | None = None,
    more: Sequence[str] = (),
) -> None:
    """Open the market, print how to sign in, and serve until interrupted.

    `given` are the settings that have an option of their own, `more` any others as "name=value".
    """
    try:
        import uvicorn

        from flmarket.broker.app import create_app
        from flmarket.broker.core import Broker
        from flmarket.broker.settings import Settings
        from flmarket.broker.work.flower.files import check_connection
    except ImportError as error:
        raise MissingDependency(error.name or "fastapi", "broker") from None
    settings = Settings.read(settings_file, {**dict(map(_pair, more)), **given})
    if demo and host not in _LOCAL:
        raise ConfigError("--host", host, "this machine only (127.0.0.1) for the demo, whose keys are printed")
    if settings.superlink:
        if importlib.util.find_spec("flwr") is None:
            raise MissingDependency("flwr", "flower")
        check_connection(settings.superlink)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    with ExitStack() as stack:
        if demo and "database_url" not in settings.model_fields_set:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flmarket-"))
            settings = settings.model_copy(update={"database_url": f"sqlite:///{folder}/flmarket-broker.db"})
        broker = Broker.open(settings)
        stack.callback(broker.close)
        app = create_app(broker=broker, alone=True)
        if people := _welcome(broker, f"http://{host}:{port}", demo):
            from flmarket.broker.demo import Demo

            app.state.demo_people = people  # the pages list them for signing in with one click
            alive = Demo(broker, people, told=lambda people: setattr(app.state, "demo_people", people))
            alive.start()
            stack.callback(alive.stop)
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            ws="none",
            log_level="warning",
            access_log=False,  # its lines would hold sign-in tokens; the service logs routes instead
            server_header=False,
            proxy_headers=False,  # it would believe whoever is on this machine; the service asks trusted proxies alone
            timeout_graceful_shutdown=3,
        )
        uvicorn.Server(config).run()


def show_settings() -> None:
    """Print a settings file with every setting and its default."""
    try:
        from flmarket.broker.settings import Settings
    except ImportError as error:
        raise MissingDependency(error.name or "pydantic-settings", "broker") from None
    print(Settings.template())


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("--set", "…", "name=value, such as max_streams=50")
    return name.strip(), value.strip()


def _welcome(broker: object, address: str, demo: bool) -> "tuple[DemoParty, ...]":
    """Say where the market is and how to sign in; returns the people of a demo."""
    from flmarket.broker.core import Broker
    from flmarket.broker.demo import find_demo, is_empty, seed_demo
    from flmarket.broker.office import parties, sessions

    assert isinstance(broker, Broker)
    screen.print(market_words(on_owners_machines=bool(broker.settings.superlink)), highlight=False)
    people: tuple[DemoParty, ...] = ()
    empty = is_empty(broker)
    if demo:
        with errors.status("Seeding the demo market (some seconds) …"):
            people = seed_demo(broker) if empty else find_demo(broker)
    if people:
        print("Sign in by opening a link, or use the key with the API:\n")
        for one in people:  # whole and on lines of their own, so that they can be copied
            print(f"{one.party.name} ({one.party.role})\n  {address}{one.link}\n  {one.key}")
        print()
    elif empty:
        view = parties.create_party(broker, None, role="operator", name="Operator")
        key = parties.issue_key(broker, None, view.id, label="first").key
        link = sessions.link_path(sessions.make_link(broker, view.id))
        screen.print("A new market. Its operator's key, shown this once:")
        print(key)
        screen.print(f"Sign in within ten minutes: {address}{link}", soft_wrap=True)
    screen.print(f"The market is open at {address} (Ctrl+C ends)")
    return people
