"""`flmarket ledger …`: the commands and their options; the work is in `ledger_work`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
KnownHead = Annotated[Path | None, typer.Option("--head", help="A head that was published or kept before (JSON).")]
OutFile = Annotated[Path | None, typer.Option("--out", help="Write to this file instead of the screen.")]


@app.command(epilog="Example: `flmarket ledger verify --db sqlite:///market.db --head head.json`.")
def verify(db: Database = None, head: KnownHead = None, json: Json = False) -> None:
    """Replay every entry, and print the head; the first bad entry is named, and the exit code is then 9.

    Checked are hashes, balances, that every payment, refund and release has its award and terms, that no release gives
    away more than its award is for, that nobody passes her cap, and the nodes of the tree, none missing, none extra.
    In a broker's database, bills, statements and tasks must also be what the log makes them.
    """
    from flmarket.cli.ledger_work import run_verify

    run_verify(db, head, json)


@app.command(epilog="Example: `flmarket ledger show --account owner-3 --last 20`.")
def show(
    db: Database = None,
    account: Annotated[str | None, typer.Option(help="Only entries that touch this account or owner.")] = None,
    award: Annotated[str | None, typer.Option(help="Only entries of this award.")] = None,
    last: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, from the end.")] = 50,
    json: Json = False,
) -> None:
    """The latest entries of the log."""
    from flmarket.cli.ledger_work import run_show

    run_show(db, account, award, last, json)


@app.command(epilog="Example: `flmarket ledger balance owner-3 --db sqlite:///market.db --json`.")
def balance(
    account: Annotated[str | None, typer.Argument(help="One account; default all.")] = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """What accounts hold, and what owners with a registered cap have spent of it."""
    from flmarket.cli.ledger_work import run_balance

    run_balance(db, account, json)


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
    from flmarket.cli.ledger_work import run_check, run_receipt
    from flmarket.errors import InvalidInput

    if award is not None and check is None:
        run_receipt(db, award, head, out)
    elif check is not None and award is None:
        run_check(check, head, pending, json)
    else:
        raise InvalidInput("receipt", award, "either an award's id or --check FILE")


@app.command(epilog="Example: `flmarket ledger export --out journal.jsonl`.")
def export(db: Database = None, out: OutFile = None) -> None:
    """Every entry as one line of JSON, oldest first; the last line is the head."""
    from flmarket.cli.ledger_work import run_export

    run_export(db, out)


@app.command(epilog="Example: `flmarket ledger head > head.json`.")
def head(
    db: Database = None,
    size: Annotated[int | None, typer.Option(min=0, help="Of the first so many entries; default all.")] = None,
) -> None:
    """The head of the log as JSON: publish it, and the past cannot be changed unseen."""
    from flmarket.cli.ledger_work import run_head

    run_head(db, size)


@app.command(epilog="Example: `flmarket ledger migrate --db sqlite:///market.db`.")
def migrate(db: Database = None) -> None:
    """Make the tables, or bring those of an older version up to date."""
    from flmarket.cli.ledger_work import run_migrate

    run_migrate(db)
