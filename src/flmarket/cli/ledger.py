"""`flmarket ledger …`: check the books, look into them, hand out receipts and check those."""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flmarket import ledger
from flmarket.cli.output import answer, print_json, print_path, screen, table
from flmarket.cli.parties import Json
from flmarket.errors import ConfigError, InvalidInput
from flmarket.ledger import Award, Head, LedgerCorrupt, Release, SealedReceipt, format_micros, read_receipts
from flmarket.privacy import event_to_dict

if TYPE_CHECKING:
    from flmarket.client.wire import Finding
    from flmarket.ledger import SqlLedger

app = typer.Typer(
    name="ledger",
    help="The durable ledger: verify it, look into it, write and check receipts.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Database = Annotated[
    str | None, typer.Option("--db", help="sqlite:///FILE or postgresql+psycopg://…; else FLMARKET_LEDGER, market.db.")
]
KnownHead = Annotated[Path | None, typer.Option("--head", help="A head that was published or kept before (JSON).")]
OutFile = Annotated[Path | None, typer.Option("--out", help="Write to this file instead of the screen.")]


@app.command(epilog="Example: `flmarket ledger verify --db sqlite:///market.db --head head.json`.")
def verify(db: Database = None, head: KnownHead = None, json: Json = False) -> None:
    """Replay every entry, and print the head; the first bad entry is named, and the exit code is then 9.

    Checked are hashes, balances, that every payment, refund and release has its award and terms, that no release gives
    away more than its award is for, that nobody passes her cap, and the nodes of the tree, none missing, none extra.
    In a broker's database, bills, statements and tasks must also be what the log makes them.
    """
    known = _read_head(head)
    with _open(db) as books:
        found, balances = books.verify(known), books.balances()
        wrong = _broker_findings(books)
    if json:
        agreed = {} if wrong is None else {"findings": [asdict(one) for one in wrong]}
        print_json({"ok": not wrong, "head": found.to_dict(), "balances_micros": dict(balances), **agreed})
    if wrong:
        for one in () if json else wrong:
            screen.print(f"[red]{one.rule}[/] {one.subject}: {one.message}", soft_wrap=True, highlight=False)
        raise LedgerCorrupt(f"{len(wrong)} bills, statements or tasks say something else than the log")
    if json:
        return
    screen.print(f"[green]sound[/]: {found.size} entries, {len(balances)} accounts")
    if wrong is not None:
        screen.print("the broker's bills and statements agree with it")
    if known is not None:
        screen.print(f"begins with the {known.size} entries of the known head")
    screen.print(f"[bold]head[/]  {_line(found.to_dict())}", soft_wrap=True, highlight=False)


@app.command(epilog="Example: `flmarket ledger show --account owner-3 --last 20`.")
def show(
    db: Database = None,
    account: Annotated[str | None, typer.Option(help="Only entries that touch this account or owner.")] = None,
    award: Annotated[str | None, typer.Option(help="Only entries of this award.")] = None,
    last: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, from the end.")] = 50,
    json: Json = False,
) -> None:
    """The latest entries of the log."""
    with _open(db) as books:
        everything = account is None and award is None
        found = books.entries(max(0, books.head().size - last) if everything else 0)
        entries = [
            entry
            for entry in found
            if account in (None, entry.line.debit, entry.line.credit, entry.line.owner)
            and award in (None, entry.line.ref)
        ][-last:]
    listing = table("Entries", "entry", "time (UTC)", "kind", "id", "from", "to", "amount", "hash", text=6)
    for entry in entries:
        line = entry.line
        moved = format_micros(line.amount_micros) if line.debit is not None else ""
        time = datetime.fromtimestamp(entry.time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
        parties = (line.debit or line.owner or "", line.credit or "")
        listing.add_row(str(entry.seq), time, line.kind, line.ref, *parties, moved, entry.hash[:12])
    answer(json, {"entries": [entry.to_dict() for entry in entries]}, listing)


@app.command(epilog="Example: `flmarket ledger balance owner-3 --db sqlite:///market.db --json`.")
def balance(
    account: Annotated[str | None, typer.Argument(help="One account; default all.")] = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """What accounts hold, and what owners with a registered cap have spent of it."""
    with _open(db) as books:
        balances = dict(books.balances()) if account is None else {account: books.balance(account)}
        accounts = books.privacy_accounts(balances)
    listing = table("Balances", "account", "balance", "privacy spent (total)", "cap")
    for name, amount in sorted(balances.items()):
        given = (f"{of.spent:.6g}", str(of.cap)) if (of := accounts.get(name)) is not None else ("", "")
        listing.add_row(name, format_micros(amount), *given)
    privacy = {name: {"spent": of.spent, "cap": event_to_dict(of.cap)} for name, of in accounts.items()}
    answer(json, {"balances_micros": balances, "privacy": privacy}, listing)


@app.command(
    epilog="Examples: `flmarket ledger receipt task/0/3 --out receipt.json`; "
    "`flmarket ledger receipt --check receipt.json --head head.json` (needs no database)."
)
def receipt(
    award: Annotated[str | None, typer.Argument(help="The award's id.")] = None,
    db: Database = None,
    check: Annotated[Path | None, typer.Option("--check", help="Check this receipt instead.")] = None,
    head: KnownHead = None,
    pending: Annotated[bool, typer.Option("--pending", help="Accept one that shows no payment or refund yet.")] = False,
    out: OutFile = None,
    json: Json = False,
) -> None:
    """Write an award's receipt, or check one with nothing but the head; the exit code of a bad one is 9."""
    if award is not None and check is None:
        _write_receipt(db, award, head, out)
    elif check is not None and award is None:
        _check(check, head, pending, json)
    else:
        raise InvalidInput("receipt", award, "either an award's id or --check FILE")


@app.command(epilog="Example: `flmarket ledger export --out journal.jsonl`.")
def export(db: Database = None, out: OutFile = None) -> None:
    """Every entry as one line of JSON, oldest first; the last line is the head."""
    with _open(db) as books:
        head = books.head()
        entries = (_line(entry.to_dict()) for entry in books.entries(0, head.size))
        with nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in chain(entries, [_line({"head": head.to_dict()})]))
    if out is not None:
        print_path("journal", out)


@app.command(epilog="Example: `flmarket ledger head > head.json`.")
def head(
    db: Database = None,
    size: Annotated[int | None, typer.Option(min=0, help="Of the first so many entries; default all.")] = None,
) -> None:
    """The head of the log as JSON: publish it, and the past cannot be changed unseen."""
    with _open(db) as books:
        print_json(books.head(size).to_dict())


@app.command(epilog="Example: `flmarket ledger migrate --db sqlite:///market.db`.")
def migrate(db: Database = None) -> None:
    """Make the tables, or bring those of an older version up to date."""
    _open(db, create=True, upgrade=True).close()
    screen.print("the ledger is up to date")


def _write_receipt(db: str | None, award: str, head: Path | None, out: Path | None) -> None:
    """Write an award's receipt, for a known head or the newest."""
    known = _read_head(head)
    with _open(db) as books:
        made = books.receipt(award, None if known is None else known.size)
    made.check(known, pending=True)
    text = _line(made.to_dict())
    if out is None:
        print(text)
        return
    out.write_text(text + "\n", encoding="utf-8")
    print_path("receipt", out)


def _check(path: Path, head: Path | None, pending: bool, as_json: bool) -> None:
    """Check receipts without the log: one, or all in a file that a market handed out."""
    known = _read_head(head)
    for given in read_receipts(_read_json(path)):
        if isinstance(given, SealedReceipt):  # a buyer's: the entries are in the log, the terms are the broker's word
            given.check(known)
            facts, price = given.to_dict(), format_micros(given.price_micros)
            said: tuple[str, ...] = (
                f"[green]in the log[/]: award {given.award}, {len(given.entries)} entries",
                f"by the broker's word: {price} for {given.owner}, {given.loss}: {given.state}",
            )
        else:
            award, release = given.check(known, pending=pending)
            facts, price = _story(award, release) | {"head": given.head.to_dict()}, format_micros(award.price_micros)
            said = (
                f"[green]genuine[/]: award {award.id}, {price} from {award.buyer} for {award.owner}: {award.state}",
                *([] if release is None else [f"released: {release.mechanism}, {release.guarantee}"]),
            )
        answer(as_json, {"ok": True, "head_known": known is not None} | facts, *said)
        if known is None and not as_json:
            text = f"[yellow]compare[/] this head with the published one: {_line(given.head.to_dict())}"
            screen.print(text, soft_wrap=True, highlight=False)


def _broker_findings(books: "SqlLedger") -> "tuple[Finding, ...] | None":
    """What a broker's rows in this database say otherwise; None if it is no broker's."""
    from sqlalchemy import inspect

    if not inspect(books.engine).has_table("broker_tasks"):
        return None
    from flmarket.broker.office.reconcile import reconcile

    return reconcile(books.engine)


def _story(award: Award, release: Release | None) -> dict[str, Any]:
    guarantee = None if release is None else event_to_dict(release.guarantee)
    return {
        "award": award.id,
        "round": award.round_index,
        "buyer": award.buyer,
        "owner": award.owner,
        "loss": event_to_dict(award.loss),
        "price_micros": award.price_micros,
        "state": award.state,
        "reason": award.reason,
        "release": None if release is None else {"mechanism": release.mechanism, "guarantee": guarantee},
    }


def _open(db: str | None, *, create: bool = False, upgrade: bool = False) -> "SqlLedger":
    url = db or os.environ.get("FLMARKET_LEDGER") or "sqlite:///market.db"
    return ledger.SqlLedger(url, create=create, upgrade=upgrade)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("file", str(path), f"a JSON file ({error})") from None


def _read_head(path: Path | None) -> Head | None:
    """A head by itself, or inside what `verify --json`, `receipt` and the last line of `export` print."""
    if path is None:
        return None
    data = _read_json(path)
    return Head.from_dict(data.get("head", data) if isinstance(data, dict) else data)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
