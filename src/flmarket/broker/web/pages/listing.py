"""Tasks for everybody: the listing that both sides can sign, what it says side by side with others, and the facts that
every page about a task shows."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, Response

from flmarket.broker.core import Broker, Party
from flmarket.broker.office import listing, market
from flmarket.broker.tables import PLAYABLE
from flmarket.broker.web.pages.context import AnyVisitor, ByName, PageRoute, TaskId, page
from flmarket.broker.web.pages.rendering import when
from flmarket.broker.web.problems import attachment
from flmarket.client import wire
from flmarket.report.formatting import count, epsilon, money

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_MOST_COMPARED, _OFFERED = 4, 24
_SECTIONS = {
    "data": "Data that is asked for", "evaluation": "How the model is judged", "mechanism": "How it is bought",
    "privacy": "Privacy", "money": "Money", "model": "Model",
}  # fmt: skip
_READ = {  # the document's keys are in the order of the alphabet
    "data": ("set", "numbers in a record", "columns", "labels", "unit"),
    "mechanism": ("kind", "about", "auction", "aggregation", "guarantees"),
    "privacy": ("trust", "where", "protects", "unit", "against", "noise", "counted", "cap"),
}
_SAID = ("Money: price", "Money: budget", "Money: escrow", "Privacy: trust", "Privacy: protects", "Privacy: counted")
Compared = Annotated[list[str] | None, Query(max_length=12)]


@router.get("/market/compare")
def compare(visitor: AnyVisitor, task: Compared = None, q: ByName = "") -> HTMLResponse:
    """Some tasks side by side, as their terms say; fewer than two are chosen among all that are listed."""
    party = visitor.known
    wanted = list(dict.fromkeys(task or ()))[:_MOST_COMPARED]
    found = [listing.listing(visitor.broker, party, one) for one in wanted]
    tables = [dict(_lines(one)) for one in found]
    names = list(dict.fromkeys(name for table in tables for name in table))
    cells = {name: [table.get(name, "–") for table in tables] for name in names}
    rows = [(name, said, len(set(said)) > 1) for name, said in cells.items()]
    search = q.strip()
    offered = market.overview(visitor.broker, party, limit=_OFFERED, search=search).tasks if len(found) < 2 else ()
    return page(
        visitor, "compare.html.j2", title="Tasks side by side", listings=found, rows=rows, chosen=wanted, search=search,
        offered=offered,
    )  # fmt: skip


@router.get("/market/{task_id}")
def show(task_id: TaskId, visitor: AnyVisitor) -> HTMLResponse:
    """One task, for everybody."""
    party = visitor.known
    found = listing.listing(visitor.broker, party, task_id)
    return page(
        visitor,
        "listing.html.j2",
        title=found.name,
        listing=found,
        facts=facts(found, visitor.broker.currency),
        sections=_sections(found.terms),
        running=found.state in PLAYABLE,
    )


@router.get("/market/{task_id}/terms.json")
def terms(task_id: TaskId, visitor: AnyVisitor) -> Response:
    """The text whose hash is signed."""
    return attachment(listing.terms_text(visitor.broker, task_id), "application/json", f"terms-{task_id}.json")


def facts_of(broker: Broker, party: Party | None, task_id: str) -> list[tuple[str, str, str]]:
    """The strip of facts on pages about a task."""
    return facts(listing.listing(broker, party, task_id), broker.currency)


def facts(found: wire.Listing, currency: str) -> list[tuple[str, str, str]]:
    """What to know of a task at a glance: what, how much, and what that means."""
    privacy, spent = found.terms["privacy"], found.epsilon_most_total
    per = "in total" if found.terms["money"]["for"] == "all rounds" else "in total so far"
    missed = found.rounds_looked_at - found.rounds_delivered
    whole = f"; some were missing in {missed}" if missed else ""
    came = f"updates of the last {count(found.rounds_looked_at, 'round')}{whole}" if found.rounds_looked_at else (
        "no round has ended"
    )  # fmt: skip
    checked = "books not compared yet" if found.reconciled_at is None else (
        f"books {'agree' if found.agrees else 'DISAGREE'}, {when(found.reconciled_at)}"
    )  # fmt: skip
    return [
        ("Escrow locked", money(found.locked_micros), f"of {money(found.escrow_micros)} {currency}"),
        ("Delivered", f"{found.updates_delivered:,} of {found.updates_awarded:,}", came),
        ("ε sold by one owner", "no bound" if spent is None else epsilon(spent), f"at most, {per}; {privacy['cap']}"),
        ("Receipts", f"{found.receipts:,}", checked),
        ("Terms", found.terms_hash[:12], "SHA-256, begins so"),
        ("Price", found.terms["mechanism"]["auction"] or found.terms["mechanism"]["kind"], found.terms["price"]),
    ]


def _sections(terms: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The document as people read it; the whole of it is in the file."""
    told = []
    for key, title in _SECTIONS.items():
        found: Mapping[str, Any] = _money(terms) if key == "money" else terms[key]
        order, lines = _READ.get(key, ()), list[tuple[str, str]]()
        for name in sorted(found, key=lambda name: order.index(name) if name in order else len(order)):
            inside = found[name] if isinstance(found[name], Mapping) else {name: found[name]}
            known = [(one, value) for one, value in inside.items() if value not in ("", None, [])]
            lines += [(one[:1].upper() + one[1:], _text(value)) for one, value in known]
        told.append((title, lines))
    return told


def _money(terms: Mapping[str, Any]) -> dict[str, str]:
    found, unit = terms["money"], terms["money"]["currency"]
    return {
        "price": terms["price"], "budget": f"{found['budget']} {unit} for {found['for']}",
        "escrow": f"{found['escrow']} {unit}", "paid": found["paid"],
    }  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(str, value[:12]))
        return f"{shown} and {len(value) - 12} more" if len(value) > 12 else shown
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _lines(found: wire.Listing) -> list[tuple[str, str]]:
    """A listing as lines to compare."""
    terms = found.terms
    lines = [
        ("Buyer", terms["buyer"] or "not named"), ("Purpose", terms["purpose"] or "–"),
        ("Trust", terms["privacy"]["trust"]), ("Protects", f"one {terms['privacy']['protects']}"),
        ("Losses are counted", terms["privacy"]["counted"]), ("Rounds", f"{terms['rounds']:,}"),
        ("Budget", _money(terms)["budget"]), ("Escrow", _money(terms)["escrow"]), ("Price", terms["price"]),
    ]  # fmt: skip
    for title, rows in _sections(terms):
        named = [(f"{title}: {name[:1].lower()}{name[1:]}", value) for name, value in rows]
        lines += [(name, value) for name, value in named if name not in _SAID]
    rounds = count(found.rounds_looked_at, "round")
    done = f"{found.updates_delivered:,} of {found.updates_awarded:,} updates of the last {rounds}"
    return [*lines, ("Delivered", done), ("Terms hash", found.terms_hash[:16])]
