"""`flmarket deploy` and `flmarket owner`: a deployment on this machine, and an owner's side of a real one."""

from __future__ import annotations

import math
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flmarket.engines.flower.deployment import Deployment
    from flmarket.engines.flower.files import OwnerFile
    from flmarket.ledger import DurableAccount

__all__ = ["register"]

MOST_NODES = 50
MARKETS = {"auction": "auctions", "sampling": "client sampling", "reward": "the reward game", "joint": "joint DP"}
OWNER_TEMPLATE = """\
# Your side of the market. Paths are relative to this file; `flmarket owner status` shows what you have sold.
owner = {number}                   # your number, as the broker registered you
account = "{account}"         # yours in the buyer's ledger: prices must be in escrow for it. A broker says which
data = "records.npz"        # x (records, features) and y (records,); or a .csv with the class in the last column
# classes = 2               # how many your records have; without it you bid for tasks with any number of classes
record = "record"           # your privacy account and journal: keep this folder for ever, and never restore a backup
# allow_raw = true          # client sampling: your updates may leave without any noise (needs [cap] none = true)
answer_seconds = 10.0       # answers leave so long after an order came, and time tells nothing; half is for training

[bid]
valuation = "linear"        # linear, quadratic, sqrt, exponential, step
rate = 1.0                  # what a record's privacy is worth to you
privacy_budget = 1.0        # the most ε you sell in one round; in the reward game: the most ρ in one task
# value = 2.0               # your cost of taking part (sampling, joint DP) or value of privacy (reward game)

[cap]
epsilon = 3.0               # the most ε you ever sell, to all buyers together. What it means: a suspicion of 50 : 50
                            # that your records are these and not others becomes at worst e^ε / (1 + e^ε) sure: 95 %
# delta = 1e-6              # with it: (ε, δ) over your lifetime; joint DP and the reward game need it, or rho instead
# none = true               # in place of epsilon: no cap at all, the only way to sell updates without noise

# [model]                   # what you train at home, if not the model that is announced
# kind = "softmax"          # or mlp, mnist-cnn, cifar-cnn (the torch extra), package.module:build
# steps = 5                 # or epochs
# batch_size = 32
# learning_rate = 0.1
# momentum = 0.9
"""

MARKET_TEMPLATE = """\
seed = {seed}

[task]
name = "tumour-diagnosis"
rounds = {rounds}
bidders_per_round = {nodes}
budget_factor = 0.8
learning_rate = 0.2

[data]
name = "breast-cancer"
owners = {nodes}
partition = "equal"

[owners]
privacy_cap = 10.0

[mechanism]
auction = "posted"
clip = 0.5
"""

owner_app = typer.Typer(help="An owner's side: her configuration, her SuperNode, what she has sold.")


def register(app: typer.Typer) -> None:
    """Add both to the command."""
    examples = "`flmarket deploy local`, `flmarket deploy local examples/jdp.toml --nodes 4 --rounds 2 --out out/joint`"
    app.command(epilog=f"Examples: {examples}.")(deploy)
    app.add_typer(owner_app, name="owner")


def deploy(
    where: Annotated[str, typer.Argument(help="Only local: SuperLink and SuperNodes on this machine.")] = "local",
    market: Annotated[
        Path | None, typer.Argument(help="A market file of any kind; without one, a small auction.", show_default=False)
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_NODES, help="Owners, each with a SuperNode; default 3, or what the file says."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; default 3, or what the file says.")] = None,
    market_file: Annotated[Path | None, typer.Option("--market", hidden=True)] = None,
    out: Annotated[Path, typer.Option(help="Folder for keys, owners, logs and the ledger.")] = Path("out/deploy"),
    seconds: Annotated[float, typer.Option(min=10, help="Give up after so long.")] = 900.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the split and what owners ask; noise is never seeded here.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Try a real deployment: Flower processes with TLS and keys, real data, secure noise, a durable ledger."""
    from flmarket.cli.output import errors, print_json
    from flmarket.engines.flower.deployment import Deployment
    from flmarket.errors import ConfigError

    if where != "local":
        raise ConfigError("deploy", where, "local; for other machines see docs/flower.md")
    if (out / "ledger.db").exists():
        raise ConfigError("--out", str(out), "a folder without a ledger: a deployment starts anew")
    if market is not None and market_file is not None:
        raise ConfigError("--market", str(market_file), "one market file")
    text = _market_text(market or market_file, nodes, rounds, seed)
    signal.signal(signal.SIGTERM, _interrupt)
    with Deployment(out, text) as deployment:
        errors.print(f"[bold]{deployment.nodes} owners[/] in {deployment.folder}; every process carries the mark "
                     f"FLMARKET_DEPLOYMENT={deployment.mark}")  # fmt: skip
        deployment.prepare()
        deployment.start()
        deployment.run()
        errors.print("running; logs are in", str(deployment.folder / "logs"))
        result = deployment.wait(seconds)
    facts = _facts(deployment, result)
    if json:
        print_json(facts)
    else:
        _show(facts)


def _market_text(file: Path | None, nodes: int | None, rounds: int | None, seed: int | None) -> str:
    """The market to play: the small auction, or a file with what the command line changes in it."""
    import tomli_w

    from flmarket.engines.config import MarketConfig
    from flmarket.errors import ConfigError

    if file is None:
        return MARKET_TEMPLATE.format(seed=seed or 0, rounds=rounds or 3, nodes=nodes or 3)
    config = MarketConfig.load(file)  # its own errors first
    owners = nodes or config.data.owners
    if owners > MOST_NODES:
        raise ConfigError("data.owners", owners, f"at most {MOST_NODES} on one machine; --nodes 5 plays it with five")
    text = file.read_text(encoding="utf-8")
    values = tomllib.loads(text)
    bids = values.get("owners", {}).get("bids")
    changes: dict[tuple[str, str], Any] = {("data", "owners"): nodes, ("task", "rounds"): rounds}
    if bids is not None:  # a path beside the file that was given
        changes["owners", "bids"] = str((file.parent / bids).resolve())
    changed = {key: value for key, value in changes.items() if value is not None}
    if seed is None and not changed:
        return text
    for (section, key), value in changed.items():
        values.setdefault(section, {})[key] = value
    return tomli_w.dumps(values if seed is None else values | {"seed": seed})


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _facts(deployment: Deployment, result: dict[str, Any]) -> dict[str, Any]:
    from flmarket.ledger import SqlLedger
    from flmarket.market import owner_account

    with SqlLedger(deployment.ledger_url, create=False) as ledger:
        head = ledger.verify()
        balances = dict(ledger.balances())
        states = [award.state.value for award in ledger.awards()]
    owners = []
    for number, account in deployment.accounts().items():
        with account:
            owners.append(
                {
                    "owner": number,
                    "releases": len(list(account.releases())),
                    **_privacy(account),
                    "paid_micros": balances.get(owner_account(number), 0),
                }
            )
    return {
        "rounds": result["rounds"],
        "accuracy": result["accuracy"],
        "awards": {state: states.count(state) for state in ("posted", "voided", "expired", "pending")},
        "balances_micros": balances,
        "owners": owners,
        "ledger": deployment.ledger_url,
        "ledger_entries": head.size,
        "ledger_head": head.root,
    }


def _privacy(account: DurableAccount) -> dict[str, float]:
    """What an owner has sold and the most she sells, in her cap's own currency; a cap of ∞ is none."""
    from flmarket.market.owner import UNLIMITED
    from flmarket.privacy import Uncapped, ZCdp

    if isinstance(account.cap, Uncapped):
        return {"epsilon_total": account.spent, "epsilon_cap": math.inf}
    name, limit = ("rho", account.cap.rho) if isinstance(account.cap, ZCdp) else ("epsilon", account.cap.epsilon)
    return {f"{name}_total": account.spent, f"{name}_cap": limit if limit < UNLIMITED else math.inf}


def _show(facts: dict[str, Any]) -> None:
    from flmarket.cli.output import screen, show_trust, table
    from flmarket.ledger import format_micros
    from flmarket.trust import AT_OWNERS, AT_OWNERS_RAW

    awards = facts["awards"]
    screen.print(
        f"[bold]{facts['rounds']} rounds[/], accuracy {facts['accuracy'][-1]:.3f}; {awards['posted']} awards paid, "
        f"{awards['voided']} voided, {awards['expired']} expired"
    )
    name, sign = ("rho", "ρ") if all("rho_cap" in one for one in facts["owners"]) else ("epsilon", "ε")
    rows = table("Owners", "owner", "private releases", f"{sign} in total", f"{sign} cap", "paid")
    for one in facts["owners"]:
        total, cap = f"{one[f'{name}_total']:.4f}", one[f"{name}_cap"]
        limit = "none" if math.isinf(cap) else f"{cap:g}"
        rows.add_row(str(one["owner"]), str(one["releases"]), total, limit, format_micros(one["paid_micros"]))
    screen.print(rows)
    raw = any(math.isinf(one.get("epsilon_total", 0.0)) for one in facts["owners"])
    show_trust(AT_OWNERS_RAW if raw else AT_OWNERS)
    screen.print("In this try-out the machines are processes on this one, each with a folder of its own.")
    screen.print(f"ledger verified: {facts['ledger_entries']} entries; check it yourself with", soft_wrap=True)
    screen.print(f"  flmarket ledger verify --db {facts['ledger']}", soft_wrap=True, highlight=False)


@owner_app.command("init")
def owner_init(
    folder: Annotated[Path, typer.Argument(help="Where owner.toml and the key pair go.")],
    number: Annotated[int, typer.Option(min=0, help="Your number in the market.")] = 0,
    account: Annotated[
        str, typer.Option(help="Your account in the buyer's ledger, at a broker your party's id; owner-NUMBER if none.")
    ] = "",
) -> None:
    """Write an owner.toml to fill in, and make a key pair for the SuperNode."""
    from flmarket.cli.output import print_path, screen
    from flmarket.engines.flower.certificates import node_keys
    from flmarket.errors import ConfigError
    from flmarket.market import owner_account

    path = folder / "owner.toml"
    if path.exists():
        raise ConfigError("folder", str(folder), "a folder without an owner.toml")
    keys = node_keys(folder, "key")
    path.write_text(OWNER_TEMPLATE.format(number=number, account=account or owner_account(number)), encoding="utf-8")
    print_path("configuration", path)
    print_path("public key   ", keys.public)
    screen.print("Send the public key to the broker; it registers it with: flwr supernode register key.pub")


@owner_app.command("run")
def owner_run(
    file: Annotated[Path, typer.Argument(help="Your owner.toml.")],
    superlink: Annotated[str, typer.Option(help="The broker's SuperLink, host:port.")],
    root_certificates: Annotated[Path, typer.Option(help="The authority that signed the broker's certificate.")],
    key: Annotated[Path | None, typer.Option(help="Your private key; default `key` beside the file.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="A free port on this machine, for its own use.")] = 9094,
) -> None:
    """Check the configuration and the data, then become the SuperNode that serves the market."""
    from flmarket.cli.output import errors
    from flmarket.engines.flower.files import OwnerFile
    from flmarket.engines.flower.play import QUIET

    path = file.resolve()
    own = OwnerFile.load(path)
    own.owner_at(path.parent)
    errors.print(_takes_part(own), soft_wrap=True)
    command = Path(sys.executable).parent / "flower-supernode"
    arguments = [
        str(command), "--superlink", superlink, "--root-certificates", str(root_certificates.resolve()),
        "--auth-supernode-private-key", str((key or path.parent / "key").resolve()), "--host", "127.0.0.1", "--port",
        str(port), "--node-config", f'owner-file="{path}"',
    ]  # fmt: skip
    scripts = f"{command.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.execve(command, arguments, os.environ | QUIET | {"PATH": scripts})  # noqa: S606 - one program, no shell


@owner_app.command("status")
def owner_status(
    file: Annotated[Path, typer.Argument(help="Your owner.toml.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """What you have sold so far, by your own record."""
    from flmarket.cli.output import print_json, screen, show_trust, table
    from flmarket.engines.flower.files import OwnerFile
    from flmarket.ledger import DurableAccount
    from flmarket.privacy import PureDp, event_to_dict
    from flmarket.trust import AT_OWNERS, AT_OWNERS_RAW, meaning_of

    path = file.resolve()
    own = OwnerFile.load(path)
    record = path.parent / own.record / f"owner-{own.owner}.account.sqlite"
    cap = own.cap.cap()
    releases: list[Any] = []
    spent = 0.0
    if record.exists():
        with DurableAccount.open(record) as account:
            releases, spent, cap = list(account.releases()), account.spent, account.cap
    if json:
        sold = [{"award": r.award_id, "buyer": r.buyer, "guarantee": event_to_dict(r.guarantee)} for r in releases]
        facts = {"owner": own.owner, "cap": event_to_dict(cap), "spent": spent, "stays_out": own.stays_out()}
        print_json(facts | {"releases": sold})
        return
    screen.print(_takes_part(own), soft_wrap=True)
    show_trust(AT_OWNERS_RAW if math.isinf(spent) else AT_OWNERS)
    if isinstance(cap, PureDp):
        screen.print(f"Your cap: {meaning_of(cap.epsilon)}", highlight=False, soft_wrap=True)
    rows = table(f"Owner {own.owner}: {spent:.6g} of {cap}", "award", "buyer", "gave away", text=3)
    for release in releases:
        rows.add_row(release.award_id, release.buyer, str(release.guarantee))
    screen.print(rows)


def _takes_part(own: OwnerFile) -> str:
    """Which markets a file is for, and what keeps her out of the others."""
    out = own.stays_out()
    lines = [f"takes part in: {', '.join(MARKETS[market] for market, why in out.items() if not why)}"]
    return "\n".join(lines + [f"not in {MARKETS[market]}: {why}" for market, why in out.items() if why])
