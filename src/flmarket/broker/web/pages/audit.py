"""The audit page: run the auditor on an auction, and read its verdict in plain words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flmarket.audit import Bid, Example
from flmarket.audit.example import Result
from flmarket.broker.errors import TooMany
from flmarket.broker.office import audits, market
from flmarket.broker.requests import AuditRequest
from flmarket.broker.web.pages.context import Form, PageRoute, Reader, SignedIn, SignedInWrites, Visitor, fragment, page
from flmarket.broker.web.pages.rendering import list_of
from flmarket.client import wire
from flmarket.report.audit_page import tell
from flmarket.report.formatting import count, percent, significant
from flmarket.trust import BIDS_ONLY

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_THOROUGHNESS = ((20, "quick, 20 auctions"), (100, "usual, 100 auctions"), (300, "thorough, 300 auctions"))
_FIELDS = {"auction": "auction", "population": "population", "profiles": "profiles"}
_CLAIMS = {
    "truthful": ("Nobody gains by lying", "nobody gains by lying"),
    "rational": ("Nobody is paid below cost", "nobody is paid below cost"),
    "budget_feasible": ("Payments stay within the budget", "payments stay within the budget"),
    "within_privacy_budget": ("Nobody gives up more privacy than she allows", "privacy limits are kept"),
}
_FOUND = {
    "truthful": "lies pay",
    "rational": "some are paid below cost",
    "budget_feasible": "it overspends the budget",
}
_LEVELS = {"exact": "claimed without exception", "approximate": "claimed approximately", "none": "not claimed"}
_STYLES = {"holds": "kept", "contradicted": "broken", "no figure": "broken", "not claimed": "silent"}


@dataclass(frozen=True)
class Claim:
    """One claim and what became of it."""

    name: str
    verdict: str
    level: str
    evidence: str
    style: str


@dataclass(frozen=True)
class Verdict:
    """A finished audit as the page tells it."""

    headline: str
    story: str
    tone: str
    cards: tuple[tuple[str, str, str], ...]
    claims: tuple[Claim, ...]
    tale_title: str
    tale: tuple[str, ...]


@router.get("/audit")
def show(visitor: SignedIn, auction: str = "posted") -> HTMLResponse:
    """The form and one's own audits; the newest finished one is shown whole."""
    return _page(visitor, auction, None)


@router.get("/audit/{audit_id}")
def one(request: Request, audit_id: Annotated[str, Path(max_length=60)], visitor: SignedIn) -> HTMLResponse:
    """One audit; for HTMX, only its result so far."""
    audit = audits.get_audit(visitor.broker, visitor.party, audit_id)
    if request.headers.get("HX-Request"):
        return _result(visitor, audit)
    return _page(visitor, audit.auction, audit)


@router.post("/audit")
def start(request: Request, visitor: SignedInWrites, form: Form) -> Response:
    """Queue a run of the auditor."""
    reader = Reader(form)
    values = {
        "auction": reader.text("auction"),
        "population": reader.text("population"),
        "profiles": reader.whole("profiles"),
    }
    wanted = reader.build(AuditRequest, values, _FIELDS)
    problem, audit = next(iter(reader.errors.values()), ""), None
    if wanted is not None:
        try:
            audit = audits.start_audit(visitor.broker, visitor.party, wanted)
        except TooMany as error:
            problem = f"{error}"
    if request.headers.get("HX-Request"):
        return _result(visitor, audit, problem)
    return RedirectResponse(f"/audit/{audit.id}" if audit else "/audit", 303)


def _page(visitor: Visitor, auction: str, audit: wire.Audit | None) -> HTMLResponse:
    past = audits.list_audits(visitor.broker, visitor.party).items
    if audit is None and past:
        audit = audits.get_audit(visitor.broker, visitor.party, past[0].id)
    return page(
        visitor,
        "audit.html.j2",
        title="Audit",
        auction=auction,
        catalogue=market.catalogue(visitor.broker),
        thoroughness=_THOROUGHNESS,
        in_use=sorted({task.auction for task in market.overview(visitor.broker, visitor.party).tasks}),
        past=past,
        audit=audit,
        verdict=None if audit is None else _verdict(audit),
        problem="",
        beside=False,
        trust=BIDS_ONLY,
    )


def _result(visitor: Visitor, audit: wire.Audit | None, problem: str = "") -> HTMLResponse:
    """The result so far and, beside it, the list of audits as it is now."""
    return fragment(
        visitor,
        "_audit_result.html.j2",
        status=422 if problem else 200,
        audit=audit,
        verdict=None if audit is None else _verdict(audit),
        problem=problem,
        past=audits.list_audits(visitor.broker, visitor.party).items,
        beside=True,
    )


def _verdict(audit: wire.Audit) -> Verdict | None:
    report = audit.report
    if report is None:
        return None
    claims = tuple(
        Claim(_CLAIMS[one.claim][0], one.verdict, _LEVELS[one.level], one.evidence, _STYLES[one.verdict])
        for one in audit.claims
    )
    broken = [_CLAIMS[one.claim][1] for one in audit.claims if _STYLES[one.verdict] == "broken"]
    silent = [one.claim for one in audit.claims if one.verdict == "not claimed"]
    found = [_FOUND[claim] for claim in silent if _violated(report, claim)]
    headline = (
        f"{audit.auction}: {count(len(broken), 'claim')} did not survive"
        if broken
        else f"{audit.auction} keeps what it claims, but {list_of(found)}"
        if found
        else f"{audit.auction} keeps what it claims"
    )
    gained = (report["worst"]["gain"] or 0) > 0
    return Verdict(
        headline,
        _story(audit, report, broken, silent),
        "bad" if broken else "warn" if found else "good",
        _cards(report),
        claims,
        "The most profitable lie found" if gained else "No lie paid; the hardest case",
        tuple(tell(_example(report["worst"]))),
    )


def _violated(report: dict[str, Any], claim: str) -> bool:
    """Whether something was found against what is not claimed, which is worth knowing all the same."""
    if claim == "truthful":
        return bool(report["truthful"]["owners_with_gain"])
    return bool(report["rational" if claim == "rational" else "budget"]["violations"])


def _story(audit: wire.Audit, report: dict[str, Any], broken: list[str], silent: list[str]) -> str:
    tried = (
        f"{count(report['search']['misreports_per_owner'], 'lie')} tried for each owner in "
        f"{count(audit.profiles, 'random auction')} (population {audit.population}, seed {audit.seed})."
    )
    if broken:
        return f"It claims that {list_of(broken)}; a counterexample was found. {tried}"
    but = f" It does not claim that {list_of([_CLAIMS[claim][1] for claim in silent])}." if silent else ""
    return f"Nothing was found against any of its claims.{but} {tried}"


def _cards(report: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    truthful, rational, budget = report["truthful"], report["rational"], report["budget"]
    return (
        ("Auctions where a lie pays", _share(truthful["profiles_with_gain"]), "at least one owner gains"),
        ("Largest gain by lying", _share(truthful["max_regret_over_cost"]), "of the owner’s own cost"),
        ("Paid below cost", f"{rational['violations']:,}", f"of {rational['owners_checked']:,} honest owners"),
        ("Over budget", _share(budget["profiles_over"]), f"worst: {_figure(budget['worst_ratio'])} × the budget"),
    )


def _share(value: float | None) -> str:
    return "unbounded" if value is None else percent(value)


def _figure(value: float | None) -> str:
    return "–" if value is None else significant(value)


def _example(data: dict[str, Any]) -> Example:
    """The report's worst case, from JSON, where what was infinite is null."""

    def bid(one: dict[str, Any]) -> Bid:
        return Bid(**one | {"grid": tuple(one["grid"]), "values": tuple(one["values"])})

    def result(one: dict[str, Any]) -> Result:
        known: dict[str, Any] = {name: -math.inf if value is None else value for name, value in one.items()}
        return Result(**known | {name: tuple(one[name]) for name in ("others_epsilon", "others_payment")})

    parsed: dict[str, Any] = {
        "bids": tuple(bid(one) for one in data["bids"]),
        "lie": bid(data["lie"]),
        "honest": result(data["honest"]),
        "lying": result(data["lying"]),
        "curve": None,  # the page tells the story in words
    }
    return Example(**data | parsed)
