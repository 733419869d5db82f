"""A broker, its customers and what they bought: `flmarket serve`, `buyer …`, `owner …` and `model …`."""

from __future__ import annotations

import importlib.util
import io
import json as json_module
import logging
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from flmarket.cli.output import answer, errors, print_json, print_path, screen, show_trust, table
from flmarket.errors import ConfigError, InvalidInput, MissingDependency, needed
from flmarket.files import csv_text, write_file, write_files
from flmarket.ledger import format_micros
from flmarket.trust import AT_BROKER, AT_OWNERS, market_words, task_words

if TYPE_CHECKING:
    from flmarket.broker.demo import DemoParty
    from flmarket.client import BrokerClient, Task

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
    with needed("broker"):
        import uvicorn

        from flmarket.broker.app import create_app
        from flmarket.broker.core import Broker
        from flmarket.broker.settings import Settings
        from flmarket.broker.work.flower.files import check_connection
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
    with needed("broker"):
        from flmarket.broker.settings import Settings
    print(Settings.template())


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("--set", "…", "name=value, such as max_streams=50")
    return name.strip(), value.strip()


def _welcome(broker: object, address: str, demo: bool) -> tuple[DemoParty, ...]:
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


buyer = typer.Typer(help="Post tasks at a broker, watch them, and fetch the model.", no_args_is_help=True)
owner = typer.Typer(help="Sell private updates at a broker: offers, bids, statement.", no_args_is_help=True)

Url = Annotated[str, typer.Option(envvar="FLMARKET_URL", help="The broker's address.")]
Key = Annotated[str, typer.Option(envvar="FLMARKET_KEY", help="Your API key; better in the environment than here.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
TaskId = Annotated[str, typer.Argument(help="The task's id.")]
TaskFile = Annotated[Path, typer.Argument(help="A market file, as TOML or JSON (docs/broker.md).")]
_URL = "http://127.0.0.1:8642"


@buyer.command("post", epilog="Example: `flmarket buyer post task.toml --watch`.")
def post(
    file: TaskFile,
    url: Url = _URL,
    key: Key = "",
    watch: Annotated[bool, typer.Option("--watch", help="Stay and show each round.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="Posting again with the same one posts once.")] = None,
    json: Json = False,
) -> None:
    """Post a task; its budget goes into escrow."""
    with _client(url, key) as client:
        task = client.post_task(_read(file), idempotency_key=idempotency_key)
        if watch and not json:
            _watch(client, task.id)
            task = client.task(task.id)
        _show_task(task, json)


@buyer.command("tasks")
def tasks(url: Url = _URL, key: Key = "", json: Json = False) -> None:
    """My tasks, newest first."""
    with _client(url, key) as client:
        found = list(client.tasks())
    shown = table("Tasks", "id", "name", "state", "rounds", "spent", "escrow", "accuracy", text=3)
    for task in found:
        accuracy = "–" if task.accuracy is None else f"{task.accuracy:.3f}"
        amounts = (format_micros(task.spent_micros), format_micros(task.escrow_micros))
        shown.add_row(task.id, task.name, task.state, f"{task.rounds_done}/{task.rounds}", *amounts, accuracy)
    answer(json, {"tasks": [asdict(task) for task in found]}, shown)


@buyer.command("task")
def task(task_id: TaskId, url: Url = _URL, key: Key = "", json: Json = False) -> None:
    """One task."""
    with _client(url, key) as client:
        _show_task(client.task(task_id), json)


@buyer.command("watch")
def watch(task_id: TaskId, url: Url = _URL, key: Key = "") -> None:
    """Show each round of a task until it has ended."""
    with _client(url, key) as client:
        _watch(client, task_id)


@buyer.command("cancel")
def cancel(task_id: TaskId, url: Url = _URL, key: Key = "", json: Json = False) -> None:
    """Stop a task; the rest of its escrow comes back."""
    with _client(url, key) as client:
        _show_task(client.cancel(task_id), json)


@buyer.command("bill")
def bill(task_id: TaskId, url: Url = _URL, key: Key = "", json: Json = False) -> None:
    """What was paid for."""
    with _client(url, key) as client:
        found = client.bill(task_id)
    shown = table(f"Bill of {task_id} ({found.state})", "round", "budget", "spent", "deliveries", text=0)
    for line in found.lines:
        amounts = (format_micros(line.budget_micros), format_micros(line.spent_micros))
        shown.add_row(str(line.index), *amounts, str(line.deliveries))
    sums = (
        f"escrow {format_micros(found.escrow_micros)} = spent {format_micros(found.spent_micros)} "
        f"+ refunded {format_micros(found.refunded_micros)} + left {format_micros(found.left_micros)}"
    )
    answer(json, asdict(found), shown, sums)


@buyer.command(
    "model", epilog="Example: `flmarket buyer model t_… --out model.zip`, then `flmarket model card model.zip`."
)
def model(
    task_id: TaskId,
    out: Annotated[
        Path, typer.Option(help="A .zip with all that it takes to use it; or .npz or .safetensors, its weights.")
    ] = Path("model.zip"),
    url: Url = _URL,
    key: Key = "",
) -> None:
    """Download the trained model."""
    with _client(url, key) as client:
        print_path("model", client.save_model(task_id, out))


@buyer.command("explore", epilog="Example: `flmarket buyer explore task.toml --budget 50 --budget 200`.")
def explore(
    file: TaskFile,
    budget: Annotated[list[float], typer.Option(min=0, help="A budget a round, in currency units; repeat.")],
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Also train a little to estimate accuracy.")] = False,
    url: Url = _URL,
    key: Key = "",
    json: Json = False,
) -> None:
    """What different budgets would buy, before posting."""
    from flmarket.ledger import to_micros

    with _client(url, key) as client:
        points = client.explore(_read(file), [to_micros("--budget", one) for one in budget], accuracy=accuracy)
    columns = ("budget", "error bound", "spent", "winners", "mean ε per round", "accuracy")
    shown = table("A round at each budget", *columns, text=0)
    for point in points:
        bound = "–" if point.error_bound is None else f"{point.error_bound:.4g}"
        guess = "–" if point.accuracy is None else f"{point.accuracy:.3f}"
        amounts = (format_micros(point.budget_micros), bound, format_micros(point.spent_micros))
        shown.add_row(*amounts, f"{point.winners:.1f}", f"{point.mean_epsilon:.2f}", guess)
    answer(json, {"points": [asdict(point) for point in points]}, shown)


@buyer.command("account")
def account(url: Url = _URL, key: Key = "", json: Json = False) -> None:
    """My money."""
    with _client(url, key) as client:
        found = client.account()
    held = f"balance {format_micros(found.balance_micros)}, in escrow {format_micros(found.escrow_micros)}"
    answer(json, asdict(found), held)


@owner.command("offers")
def offers(url: Url = _URL, key: Key = "", json: Json = False) -> None:
    """Tasks that I can sell to."""
    with _client(url, key) as client:
        found = list(client.offers())
    shown = table("Offers", "id", "name", "auction", "truthful", "rounds", "budget a round", "places", "where", text=4)
    for one in found:
        place = f"mine: {one.slot}" if one.slot is not None else f"{one.places_free} free"
        budget = format_micros(one.budget_micros_per_round)
        played = f"{one.rounds_done}/{one.rounds}"
        shown.add_row(one.task_id, one.name, one.auction, one.truthful, played, budget, place, one.place)
    answer(json, {"offers": [asdict(one) for one in found]}, shown)
    for trust in (AT_BROKER, AT_OWNERS):
        if not json and any(one.place == trust.place for one in found):
            show_trust(trust)


@owner.command("bid", epilog="Example: `flmarket owner bid t_… --kind linear --rate 0.8 --epsilon 1.5`.")
def bid(
    task_id: TaskId,
    rate: Annotated[float, typer.Option(min=0, help="What your privacy is worth: the rate of the family.")],
    epsilon: Annotated[float, typer.Option(min=0.001, help="The most ε you sell a round.")],
    kind: Annotated[str, typer.Option(help="linear, quadratic, sqrt, exponential or step.")] = "linear",
    records: Annotated[int | None, typer.Option(min=1, help="How many of your records; default all.")] = None,
    url: Url = _URL,
    key: Key = "",
    json: Json = False,
) -> None:
    """Bid on a task, or replace the bid; it counts in every round."""
    with _client(url, key) as client:
        placed = client.bid(task_id, {"kind": kind, "rate": rate}, privacy_budget=epsilon, data_size=records)
    what = f"bid placed: up to ε = {placed.privacy_budget:g} per round on {placed.data_size} records"
    answer(json, asdict(placed), what)
    if not json:
        show_trust(AT_BROKER)  # in other tasks owners' own nodes bid


@owner.command("withdraw")
def withdraw(task_id: TaskId, url: Url = _URL, key: Key = "") -> None:
    """Stay out of a task's later rounds."""
    with _client(url, key) as client:
        client.withdraw(task_id)
    screen.print("withdrawn: later rounds go on without you")


@owner.command("advise", epilog="Example: `flmarket owner advise --rate 1 --epsilon 1`.")
def advise(
    rate: Annotated[float, typer.Option(min=0, help="The rate of the valuation's family.")],
    epsilon: Annotated[float, typer.Option(min=0.001, help="The most ε a round.")],
    kind: Annotated[str, typer.Option(help="linear, quadratic, sqrt, exponential or step.")] = "linear",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds you would bid in.")] = 1,
    auction: Annotated[str, typer.Option(help="The auction to try it in.")] = "posted",
    population: Annotated[str, typer.Option(help="The other bidders.")] = "flm22-iid",
    url: Url = _URL,
    key: Key = "",
    json: Json = False,
) -> None:
    """What a bid would earn under your cap, and what all you gave up means with it."""
    with _client(url, key) as client:
        valuation = {"kind": kind, "rate": rate}
        found = client.bid_help(
            valuation, privacy_budget=epsilon, rounds=rounds, auction=auction, population=population
        )
    answer(json, asdict(found), f"{found.words}\n\nWith what you gave up before: {found.epsilon_words}")
    if not json:
        show_trust(AT_BROKER)


@owner.command("statement")
def statement(
    csv: Annotated[Path | None, typer.Option(help="Write the statement as CSV here.")] = None,
    url: Url = _URL,
    key: Key = "",
    json: Json = False,
) -> None:
    """Everything I sold, earned and gave up."""
    with _client(url, key) as client:
        if csv is not None:
            csv.write_text(client.statement_csv(), encoding="utf-8", newline="")
            print_path("statement", csv)
            return
        found = client.statement()
    shown = table("Statement", "time", "task", "where", "round", "ε, round", "ε, total", "paid", "state", text=3)
    for one in found.releases[-50:]:
        spent = (f"{one.epsilon:.3f}", f"{one.epsilon_total:.3f}")
        shown.add_row(
            one.at, one.task_name, one.place, str(one.index), *spent, format_micros(one.paid_micros), one.state
        )
    earned = f"earned {format_micros(found.earned_micros)} for {found.deliveries} deliveries. {found.privacy.words}"
    answer(json, asdict(found), shown, earned)


@owner.command("cap")
def cap(
    total: Annotated[float | None, typer.Argument(min=0.001, help="The new cap on your total ε.")] = None,
    unit: Annotated[
        str | None, typer.Option(help="update, or record: ε of any one record; before anything is sold.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="With unit record: the δ of the total.")] = None,
    url: Url = _URL,
    key: Key = "",
    json: Json = False,
) -> None:
    """Show, or set, the most ε that I give up in total."""
    with _client(url, key) as client:
        if total is None and (unit, delta) != (None, None):
            raise ConfigError("cap", None, "the cap itself, with its unit or δ")
        found = client.privacy() if total is None else client.set_cap(total, unit=unit, delta=delta)
    answer(json, asdict(found), found.words)


def _client(url: str, key: str) -> BrokerClient:
    with needed("client"):
        from flmarket.client import BrokerClient
    if not key:
        raise ConfigError("--key", "", "your API key, as --key or in FLMARKET_KEY")
    return BrokerClient(url, key)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = json_module.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("task file", str(path), f"a readable UTF-8 file ({error})") from None
    except ValueError as error:
        raise ConfigError(str(path), str(error), "valid TOML or JSON") from None
    if not isinstance(found, dict):
        raise ConfigError(str(path), type(found).__name__, "an object")
    return found


def _show_task(task: Task, json: bool) -> None:
    if json:
        print_json(asdict(task))
        return
    accuracy = (
        "" if task.accuracy is None else f", accuracy {task.accuracy:.3f} (baseline {task.baseline_accuracy:.3f})"
    )
    spent, escrow = format_micros(task.spent_micros), format_micros(task.escrow_micros)
    screen.print(f"{task.id}  {task.name}: {task.state}, round {task.rounds_done} of {task.rounds}{accuracy}")
    screen.print(f"spent {spent} of {escrow}" + (f"; {task.error}" if task.error else ""))
    asked = task.request
    show_trust(task_words(asked["broker"]["engine"], asked["kind"], trust=asked.get("trust", "local")))


def _watch(client: BrokerClient, task_id: str) -> None:
    for event in client.follow(task_id):
        if event.kind == "settled":
            data = event.data
            screen.print(
                f"round {data['round'] + 1}/{data['rounds']}: {data['delivered']} of {data['winners']} delivered, "
                f"paid {format_micros(data['spent_micros'])}, accuracy {data['accuracy']:.3f}"
            )
        elif event.kind not in ("open", "bids", "awards", "updates"):
            screen.print(event.kind)


bought = typer.Typer(help="Use what was bought: its card, its answers, its files.", no_args_is_help=True)
Model = Annotated[Path, typer.Argument(help="A model.zip, its unpacked folder, or the folder of a run.")]
Which = Annotated[str | None, typer.Option(help="last or best; default the one that the card names.")]


@bought.command(epilog="Example: `flmarket model card out/run`.")
def card(place: Model, json: Json = False) -> None:
    """Task, mechanism, privacy, accuracy beside the baseline, bill."""
    from flmarket.learning.travel import Bundle
    from flmarket.report.model_card import card_text

    found = Bundle.read(place)
    if json:
        print_json(found.card)
    else:
        screen.print(card_text(found.card), markup=False, highlight=False)


@bought.command(epilog="Example: `flmarket model predict out/run test.csv --label y --out answers.csv`.")
def predict(
    place: Model,
    records: Annotated[Path, typer.Argument(help="Raw records: CSV, Parquet, or an npz with x.")],
    label: Annotated[str | None, typer.Option(help="A column with the true classes; y of an npz.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the classes here instead of to the screen.")] = None,
    checkpoint: Which = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="A package.module:build that the model may be built by; repeat.")
    ] = None,
    json: Json = False,
) -> None:
    """The class of each record, by the scaling and encoding that came with the model."""
    from flmarket.learning.travel import Bundle, read_raw

    found, raw = Bundle.read(place, allow=allow or ()), read_raw(records)
    truth = None if label is None else _labels(records, raw, label)
    answers = found.predict(raw, checkpoint)
    named = [found.classes[k] for k in answers.tolist()]
    text = csv_text(["class"], ([one] for one in named))
    if out is not None:
        write_file(out, text)
    elif not json:
        sys.stdout.write(text)
    facts: dict[str, Any] = {"records": len(named), "checkpoint": checkpoint or found.about["use"]}
    if truth is not None:
        facts["accuracy"] = float(np.mean(found.right(truth, answers)))
        if not json:
            errors.print(f"accuracy {facts['accuracy']:.4f} on {len(named)} records")
    if json:
        print_json(facts | ({"out": str(out)} if out is not None else {"classes": named}))


def _labels(path: Path, raw: Any, label: str) -> Any:
    if isinstance(raw, dict):
        if label not in raw:
            raise InvalidInput("--label", label, f"a column of the records: {', '.join(raw)}")
        return raw[label]
    with np.load(path, allow_pickle=False) as stored:
        if label not in stored:
            raise InvalidInput("--label", label, f"an array of the records: {', '.join(stored.files)}")
        return np.asarray(stored[label])


@bought.command(epilog="Examples: `flmarket model export out/run --out bought/`; `… --out weights.npz`.")
def export(
    place: Model,
    out: Annotated[Path, typer.Option(help="A folder for all files; or one .safetensors or .npz for the weights.")],
    checkpoint: Which = None,
) -> None:
    """The files of a model, checked first: weights, scaling, card, receipts and predict.py."""
    from flmarket.learning import predict as standalone
    from flmarket.learning.travel import Bundle

    found = Bundle.read(place)
    if out.suffix == ".npz":
        with io.BytesIO() as buffer:
            np.savez(buffer, allow_pickle=False, **found.weights(checkpoint))
            write_file(out, buffer.getvalue())
    elif out.suffix == ".safetensors":
        with needed("app", "safetensors"):
            from safetensors.numpy import save
        write_file(out, save({name: np.ascontiguousarray(part) for name, part in found.weights(checkpoint).items()}))
    elif out.exists() and not out.is_dir():
        raise ConfigError("--out", str(out), "a folder, or a file that ends in .safetensors or .npz")
    else:
        # the script is this installation's own: what a stranger's zip calls predict.py is not for running
        own = Path(standalone.__file__).read_bytes()
        write_files(out, {**found.files, standalone.SCRIPT: own})
    print_path("model", out)
