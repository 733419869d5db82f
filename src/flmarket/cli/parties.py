"""`flmarket buyer …` and `flmarket owner …`: a broker's customers at the command line, through `flmarket.client`."""

import json as json_module
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flmarket.cli.output import answer, print_json, print_path, screen, show_trust, table
from flmarket.errors import ConfigError, MissingDependency
from flmarket.ledger import format_micros
from flmarket.trust import AT_BROKER, AT_OWNERS, task_words

if TYPE_CHECKING:
    from flmarket.client import BrokerClient, Task

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


def _client(url: str, key: str) -> "BrokerClient":
    try:
        from flmarket.client import BrokerClient
    except ImportError as error:
        raise MissingDependency(error.name or "httpx", "client") from None
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


def _show_task(task: "Task", json: bool) -> None:
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


def _watch(client: "BrokerClient", task_id: str) -> None:
    for event in client.follow(task_id):
        if event.kind == "settled":
            data = event.data
            screen.print(
                f"round {data['round'] + 1}/{data['rounds']}: {data['delivered']} of {data['winners']} delivered, "
                f"paid {format_micros(data['spent_micros'])}, accuracy {data['accuracy']:.3f}"
            )
        elif event.kind not in ("open", "bids", "awards", "updates"):
            screen.print(event.kind)
