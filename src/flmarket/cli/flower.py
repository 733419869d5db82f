"""`flmarket deploy` and `flmarket owner`: a deployment on this machine, and an owner's side of a real one."""

import math
import os
import signal
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flmarket.cli.output import errors, print_json, print_path, screen, show_trust, table, template
from flmarket.cli.parties import Json
from flmarket.errors import ConfigError
from flmarket.files import read_toml

if TYPE_CHECKING:
    from flmarket.engines import Spec
    from flmarket.engines.flower.deployment import Deployment
    from flmarket.engines.flower.files import OwnerFile
    from flmarket.ledger import DurableAccount
    from flmarket.trust import TrustWords

MOST_NODES = 50
MARKETS = {"auction": "auctions", "sampling": "client sampling", "reward": "the reward game", "joint": "joint DP"}
SECURE = "secure-aggregation"
# what an account for sums is capped in, and five owners of whom one may go
_ACCOUNT = ("privacy_cap = 40.0", "privacy_cap = 10.0\nprivacy_cap_delta = 1e-5")
owner_app = typer.Typer(help="An owner's side: her configuration, her SuperNode, what she has sold.")


def register(app: typer.Typer) -> None:
    """Add both to the command."""
    examples = "`flmarket deploy local`, `flmarket deploy local examples/joint.toml --nodes 4 --out out/joint`"
    examples += ", `flmarket deploy local --trust secure-aggregation --out out/sums`"
    app.command(epilog=f"Examples: {examples}.")(deploy)
    app.command()(new)
    app.add_typer(owner_app, name="owner")


def new(name: Annotated[str, typer.Argument(help="The app's name, and that of its folder.")]) -> None:
    """Write a Flower app that is a market: a PyTorch model, a training loop, and the five lines that sell it."""
    package, folder = name.replace("-", "_"), Path(name)
    if not package.isidentifier() or not package.islower():
        raise ConfigError("name", name, "small letters, digits and dashes, a letter first")
    if folder.exists():
        raise ConfigError("name", name, "a folder that does not exist yet")
    with as_file(files("flmarket.cli") / "templates" / "app") as source:
        for path in sorted(
            one for one in source.rglob("*") if one.suffix in (".py", ".toml") or one.name == ".gitignore"
        ):
            if {"__pycache__", "record"} & set(path.relative_to(source).parts):
                continue
            target = folder / str(path.relative_to(source)).replace("quickstart", package)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8").replace('name = "quickstart"', f'name = "{name}"')
            target.write_text(text.replace("quickstart", package), encoding="utf-8")
    print_path("app", folder)
    screen.print(
        f"Try it: flmarket deploy local {name} --rounds 2 --out out/{name}, or: flwr run {name} local --stream"
    )


def deploy(
    where: Annotated[str, typer.Argument(help="Only local: SuperLink and SuperNodes on this machine.")] = "local",
    market: Annotated[
        Path | None,
        typer.Argument(
            help="A market file of any kind, or the folder of a Flower app; without one, a small auction.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_NODES, help="Owners, each with a SuperNode; default 3, or what the file says."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; default 3, or what the file or app says.")] = None,
    run_config: Annotated[
        str, typer.Option(help="Settings of a Flower app, as `flwr run --run-config` takes them.", show_default=False)
    ] = "",
    market_file: Annotated[Path | None, typer.Option("--market", hidden=True)] = None,
    trust: Annotated[
        str | None,
        typer.Option(help="local: every update is private by itself. secure-aggregation: only their sum is ever seen."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for keys, owners, logs and the ledger.")] = Path("out/deploy"),
    seconds: Annotated[float, typer.Option(min=10, help="Give up after so long.")] = 900.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the split and what owners ask; noise is never seeded here.")
    ] = None,
    json: Json = False,
) -> None:
    """Try a real deployment: Flower processes with TLS and keys, real data, secure noise, a durable ledger.

    A folder whose run was cut off is played on: give the same `--out`, and nothing else.
    """
    from flmarket.engines.flower.deployment import Deployment

    if where != "local":
        raise ConfigError("deploy", where, "local; for other machines see docs/flower.md")
    if market is not None and market_file is not None:
        raise ConfigError("--market", str(market_file), "one market file")
    if trust not in (None, "local", SECURE):
        raise ConfigError("--trust", trust, f"local or {SECURE}")
    file = market or market_file
    if file is not None and file.is_dir():
        for name, given in (("--trust", trust), ("--seed", seed)):
            if given is not None:
                raise ConfigError(name, given, "left out: an app says for itself how it trains and what it buys")
        _deploy_app(file, nodes or 3, rounds, run_config, out, seconds, json)
        return
    if run_config:
        raise ConfigError("--run-config", run_config, "settings of a Flower app: name its folder")
    if (out / "ledger.db").exists():
        if (file, nodes, rounds, seed, trust) != (None,) * 5 or not (out / "market.toml").exists():
            accepted = "a folder without a ledger; or this one alone, to play on what was cut off there"
            raise ConfigError("--out", str(out), accepted)
        text = (out / "market.toml").read_text(encoding="utf-8")
        errors.print(f"playing on in {out}", soft_wrap=True)
    else:
        text = _market_text(file, nodes, rounds, seed, trust)
    with Deployment(out, text) as deployment:
        _begin(deployment)
        errors.print("running; logs are in", str(deployment.folder / "logs"))
        result = deployment.wait(seconds, lambda line: errors.print(line, soft_wrap=True, highlight=False))
    words = _trust(deployment.spec)
    facts = _facts(deployment, result) | {"model": str(_write_model(deployment, words))}
    if json:
        print_json(facts)
    else:
        _show(facts, words)


def _deploy_app(
    app: Path, nodes: int, rounds: int | None, settings: str, out: Path, seconds: float, json: bool
) -> None:
    """Somebody's own Flower app, with its owners as processes; what it says is shown as it comes."""
    from flmarket.engines.flower.deployment import AppDeployment

    if (out / "logs").exists():
        raise ConfigError("--out", str(out), "a folder without a deployment: an app starts anew")
    given = " ".join(filter(None, [settings, "" if rounds is None else f"num-server-rounds={rounds}"]))
    with AppDeployment(out, app=app, count=nodes, overrides=given) as deployment:
        _begin(deployment)
        deployment.wait(seconds, lambda line: print(line, file=sys.stderr, flush=True))
    owners = _owners(deployment)
    if json:
        print_json({"owners": owners})
    else:
        _show_owners(owners)


def _market_text(
    file: Path | None, nodes: int | None, rounds: int | None, seed: int | None, trust: str | None = None
) -> str:
    """The market to play: the small auction, or a file with what the command line changes in it."""
    import tomli_w

    from flmarket.engines.config import MarketConfig

    if file is None:
        masked = trust == SECURE
        text = template("market.toml").format(seed=seed or 0, rounds=rounds or 3, nodes=nodes or (5 if masked else 3))
        return f'trust = "{SECURE}"\n' + text.replace(*_ACCOUNT) if masked else text
    config = MarketConfig.load(file)  # its own errors first
    owners = nodes or config.data.owners
    if owners > MOST_NODES:
        raise ConfigError("data.owners", owners, f"at most {MOST_NODES} on one machine; --nodes 5 plays it with five")
    values = read_toml(file, "market file")
    changes: dict[tuple[str, str], Any] = {("data", "owners"): nodes, ("task", "rounds"): rounds}
    for section, key in (("owners", "bids"), ("data", "train"), ("data", "test")):
        named = values.get(section, {}).get(key)
        if named is not None:  # a path beside the file that was given
            changes[section, key] = str((file.parent / named).resolve())
    changed = {key: value for key, value in changes.items() if value is not None}
    if trust is not None:
        values["trust"] = trust
    elif seed is None and not changed:
        return file.read_text(encoding="utf-8-sig")
    for (section, key), value in changed.items():
        values.setdefault(section, {})[key] = value
    return tomli_w.dumps(values if seed is None else values | {"seed": seed})


def _begin(deployment: "Deployment") -> None:
    """Start everything; whatever interrupts this process stops it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    errors.print(
        f"[bold]{deployment.nodes} owners[/] in {deployment.folder}; every process carries the mark "
        f"FLMARKET_DEPLOYMENT={deployment.mark}"
    )
    deployment.prepare()
    deployment.start()
    deployment.run()


def _trust(spec: "Spec") -> "TrustWords":
    """What is private in this market, played by owners on machines of their own."""
    from flmarket.trust import AT_OWNERS_RAW, task_words

    kind = spec.kind()
    raw = getattr(spec, "unprotected", False)
    return AT_OWNERS_RAW if raw else task_words("flower", kind.name, kind.unit, kind.announcement(0).trust)


def _write_model(deployment: "Deployment", trust: "TrustWords") -> Path:
    """model.zip from what the server left on disk."""
    from flmarket.cli.markets import MODEL, write_model
    from flmarket.engines import MemoryOwners
    from flmarket.ledger import SqlLedger
    from flmarket.market import FileStore, Rounds

    spec, store = deployment.spec, FileStore(deployment.state / "server")
    with SqlLedger(deployment.ledger_url, create=False) as ledger:
        rounds = Rounds(spec.kind(), MemoryOwners(spec), ledger, store)
        rounds.resume()
        write_model(spec, deployment.folder, trust, rounds)
    return deployment.folder / MODEL


def _facts(deployment: "Deployment", result: dict[str, Any]) -> dict[str, Any]:
    from flmarket.ledger import SqlLedger
    from flmarket.market import owner_account

    with SqlLedger(deployment.ledger_url, create=False) as ledger:
        head = ledger.verify()
        balances = dict(ledger.balances())
        states = [award.state.value for award in ledger.awards()]
    owners = _owners(deployment)
    for one in owners:
        one["paid_micros"] = balances.get(owner_account(one["owner"]), 0)
    return {
        "rounds": result["rounds"],
        "accuracy": result["accuracy"],
        "baseline_accuracy": deployment.spec.data.baseline_accuracy,
        "awards": {state: states.count(state) for state in ("posted", "voided", "expired", "pending")},
        "balances_micros": balances,
        "owners": owners,
        "ledger": deployment.ledger_url,
        "ledger_entries": head.size,
        "ledger_head": head.root,
    }


def _owners(deployment: "Deployment") -> list[dict[str, Any]]:
    """What owners have sold, by their own records."""
    found = []
    for number, account in deployment.accounts().items():
        with account:
            found.append({"owner": number, "releases": len(list(account.releases())), **_privacy(account)})
    return found


def _privacy(account: "DurableAccount") -> dict[str, float]:
    """What an owner has sold and the most she sells, in her cap's own currency; a cap of ∞ is none."""
    from flmarket.ledger.entry import limit_of
    from flmarket.market.owner import UNLIMITED
    from flmarket.privacy import RecordLevel, Uncapped, ZCdp

    if isinstance(account.cap, Uncapped):
        return {"epsilon_total": account.spent, "epsilon_cap": math.inf}
    inner = account.cap.loss if isinstance(account.cap, RecordLevel) else account.cap
    name, limit = "rho" if isinstance(inner, ZCdp) else "epsilon", limit_of(account.cap)
    return {f"{name}_total": account.spent, f"{name}_cap": limit if limit < UNLIMITED else math.inf}


def _show(facts: dict[str, Any], trust: "TrustWords") -> None:
    awards = facts["awards"]
    screen.print(
        f"[bold]{facts['rounds']} rounds[/], accuracy {facts['accuracy'][-1]:.3f} (always the largest class: "
        f"{facts['baseline_accuracy']:.3f}); {awards['posted']} awards paid, "
        f"{awards['voided']} voided, {awards['expired']} expired"
    )
    _show_owners(facts["owners"])
    show_trust(trust)
    screen.print("In this try-out the machines are processes on this one, each with a folder of its own.")
    screen.print(f"ledger verified: {facts['ledger_entries']} entries; check it yourself with", soft_wrap=True)
    screen.print(f"  flmarket ledger verify --db {facts['ledger']}", soft_wrap=True, highlight=False)
    print_path("model      ", Path(facts["model"]))


def _show_owners(owners: list[dict[str, Any]]) -> None:
    """What each has sold, and got for it where that is known."""
    from flmarket.ledger import format_micros

    name, sign = ("rho", "ρ") if all("rho_cap" in one for one in owners) else ("epsilon", "ε")
    paid = ["paid"] if any("paid_micros" in one for one in owners) else []
    rows = table("Owners", "owner", "private releases", f"{sign} in total", f"{sign} cap", *paid)
    for one in owners:
        total, cap = f"{one[f'{name}_total']:.4f}", one[f"{name}_cap"]
        limit, earned = "none" if math.isinf(cap) else f"{cap:g}", [format_micros(one["paid_micros"])] if paid else []
        rows.add_row(str(one["owner"]), str(one["releases"]), total, limit, *earned)
    screen.print(rows)


@owner_app.command("init")
def owner_init(
    folder: Annotated[Path, typer.Argument(help="Where owner.toml and the key pair go.")],
    number: Annotated[int, typer.Option(min=0, help="Your number in the market.")] = 0,
    account: Annotated[
        str, typer.Option(help="Your account in the buyer's ledger, at a broker your party's id; owner-NUMBER if none.")
    ] = "",
) -> None:
    """Write an owner.toml to fill in, and make key pairs: for the SuperNode, and for masked sums."""
    from flmarket.engines.flower.certificates import node_keys
    from flmarket.engines.flower.files import write_identity
    from flmarket.market import owner_account

    path = folder / "owner.toml"
    if path.exists():
        raise ConfigError("folder", str(folder), "a folder without an owner.toml")
    keys = node_keys(folder, "key")
    write_identity(folder)
    text = template("owner.toml").format(number=number, account=account or owner_account(number))
    path.write_text(text, encoding="utf-8")
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
    from flmarket.engines.flower import QUIET
    from flmarket.engines.flower.files import OwnerFile

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
def owner_status(file: Annotated[Path, typer.Argument(help="Your owner.toml.")], json: Json = False) -> None:
    """What you have sold so far, by your own record."""
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


def _takes_part(own: "OwnerFile") -> str:
    """Which markets a file is for, and what keeps her out of the others."""
    out = own.stays_out()
    lines = [f"takes part in: {', '.join(MARKETS[market] for market, why in out.items() if not why)}"]
    return "\n".join(lines + [f"not in {MARKETS[market]}: {why}" for market, why in out.items() if why])
