"""What `flmarket ledger …` does: check the books, look into them, hand out receipts and check those."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flmarket import ledger
from flmarket.cli.output import print_json, print_path, screen, table
from flmarket.errors import ConfigError
from flmarket.ledger import Award, Entry, Head, LedgerCorrupt, Receipt, Release, SealedReceipt, format_micros
from flmarket.privacy import event_to_dict

if TYPE_CHECKING:
    from flmarket.broker.office.reconcile import Finding
    from flmarket.ledger import SqlLedger

__all__ = ["run_balance", "run_check", "run_export", "run_head", "run_migrate", "run_receipt", "run_show", "run_verify"]


def run_verify(db: str | None, head: Path | None, as_json: bool) -> None:
    """Replay the log, against a known head if there is one; in a broker's database, compare bills and statements."""
    known = _read_head(head)
    with _open(db) as books:
        found, balances = books.verify(known), books.balances()
        wrong = _broker_findings(books)
    if as_json:
        agreed = {} if wrong is None else {"findings": [asdict(one) for one in wrong]}
        print_json({"ok": not wrong, "head": found.to_dict(), "balances_micros": dict(balances), **agreed})
    if wrong:
        for one in () if as_json else wrong:
            screen.print(f"[red]{one.rule}[/] {one.subject}: {one.message}", soft_wrap=True, highlight=False)
        raise LedgerCorrupt(f"{len(wrong)} bills, statements or tasks say something else than the log")
    if as_json:
        return
    screen.print(f"[green]sound[/]: {found.size} entries, {len(balances)} accounts")
    if wrong is not None:
        screen.print("the broker's bills and statements agree with it")
    if known is not None:
        screen.print(f"begins with the {known.size} entries of the known head")
    screen.print(f"[bold]head[/]  {_line(found.to_dict())}", soft_wrap=True, highlight=False)


def run_show(db: str | None, account: str | None, award: str | None, last: int, as_json: bool) -> None:
    """The latest entries, or those that match."""
    with _open(db) as books:
        everything = account is None and award is None
        found = books.entries(max(0, books.head().size - last) if everything else 0)
        entries = [entry for entry in found if _touches(entry, account, award)][-last:]
    if as_json:
        print_json({"entries": [entry.to_dict() for entry in entries]})
        return
    listing = table("Entries", "entry", "time (UTC)", "kind", "id", "from", "to", "amount", "hash", text=6)
    for entry in entries:
        line = entry.line
        moved = format_micros(line.amount_micros) if line.debit is not None else ""
        time = datetime.fromtimestamp(entry.time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
        parties = (line.debit or line.owner or "", line.credit or "")
        listing.add_row(str(entry.seq), time, line.kind, line.ref, *parties, moved, entry.hash[:12])
    screen.print(listing)


def run_balance(db: str | None, account: str | None, as_json: bool) -> None:
    """Balances, and privacy totals of owners with a cap."""
    with _open(db) as books:
        balances = dict(books.balances()) if account is None else {account: books.balance(account)}
        caps = {name: cap for name in balances if (cap := books.cap(name)) is not None}
        spent = {name: books.privacy_spent(name) for name in caps}
    if as_json:
        privacy = {name: {"spent": spent[name], "cap": event_to_dict(cap)} for name, cap in caps.items()}
        print_json({"balances_micros": balances, "privacy": privacy})
        return
    listing = table("Balances", "account", "balance", "privacy spent (total)", "cap")
    for name, amount in sorted(balances.items()):
        given = (f"{spent[name]:.6g}", str(caps[name])) if name in caps else ("", "")
        listing.add_row(name, format_micros(amount), *given)
    screen.print(listing)


def run_receipt(db: str | None, award: str, head: Path | None, out: Path | None) -> None:
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


def run_check(path: Path, head: Path | None, pending: bool, as_json: bool) -> None:
    """Check a receipt without the log."""
    known, data = _read_head(head), _read_json(path)
    if isinstance(data, dict) and data.get("sealed"):
        _check_sealed(SealedReceipt.from_dict(data), known, as_json)
        return
    given = Receipt.from_dict(data)
    award, release = given.check(known, pending=pending)
    if as_json:
        print_json(
            {"ok": True, "head_known": known is not None, **_story(award, release), "head": given.head.to_dict()}
        )
        return
    price = format_micros(award.price_micros)
    screen.print(f"[green]genuine[/]: award {award.id}, {price} from {award.buyer} for {award.owner}: {award.state}")
    if release is not None:
        screen.print(f"released: {release.mechanism}, {release.guarantee}")
    _compare(given.head, known)


def _check_sealed(given: SealedReceipt, known: Head | None, as_json: bool) -> None:
    """What a buyer has: the award's entries are in the log; its terms are the broker's word."""
    given.check(known)
    if as_json:
        print_json({"ok": True, "head_known": known is not None} | given.to_dict())
        return
    price = format_micros(given.price_micros)
    screen.print(f"[green]in the log[/]: award {given.award}, {len(given.entries)} entries")
    screen.print(f"by the broker's word: {price} for {given.owner}, {given.loss}: {given.state}")
    _compare(given.head, known)


def _compare(carried: Head, known: Head | None) -> None:
    if known is None:
        text = f"[yellow]compare[/] this head with the published one: {_line(carried.to_dict())}"
        screen.print(text, soft_wrap=True, highlight=False)


def run_export(db: str | None, out: Path | None) -> None:
    """The log as lines of JSON, the head last."""
    with _open(db) as books:
        head = books.head()
        entries = (_line(entry.to_dict()) for entry in books.entries(0, head.size))
        lines = chain(entries, [_line({"head": head.to_dict()})])
        if out is None:
            _write(lines, sys.stdout)
            return
        with out.open("w", encoding="utf-8") as file:
            _write(lines, file)
    print_path("journal", out)


def run_head(db: str | None, size: int | None) -> None:
    """The head, now or then."""
    with _open(db) as books:
        print_json(books.head(size).to_dict())


def run_migrate(db: str | None) -> None:
    """Bring the schema up to date."""
    books = _open(db, create=True, upgrade=True)
    books.close()
    screen.print("the ledger is up to date")


def _broker_findings(books: SqlLedger) -> tuple[Finding, ...] | None:
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


def _touches(entry: Entry, account: str | None, award: str | None) -> bool:
    line = entry.line
    return account in (None, line.debit, line.credit, line.owner) and award in (None, line.ref)


def _open(db: str | None, *, create: bool = False, upgrade: bool = False) -> SqlLedger:
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


def _write(lines: Iterable[str], file: Any) -> None:
    file.writelines(f"{line}\n" for line in lines)
