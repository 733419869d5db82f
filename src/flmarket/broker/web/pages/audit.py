"""The audit page: run the auditor on an auction, and read its verdict in plain words."""

import math
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flmarket.audit import Bid, Example
from flmarket.audit.truthfulness import Result
from flmarket.broker.office import audits, market
from flmarket.broker.requests import AuditRequest
from flmarket.broker.web.pages.context import Form, PageRoute, SignedIn, SignedInWrites, Visitor, fragment, page
from flmarket.broker.web.pages.rendering import list_of
from flmarket.client import wire
from flmarket.report.audit_page import tell
from flmarket.report.formatting import count, percent, significant
from flmarket.trust import BIDS_ONLY

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_THOROUGHNESS = ((20, "quick, 20 auctions"), (100, "usual, 100 auctions"), (300, "thorough, 300 auctions"))
_CLAIMS = {
    "truthful": ("Nobody gains by lying", "nobody gains by lying"),
    "rational": ("Nobody is paid below cost", "nobody is paid below cost"),
    "budget_feasible": ("Payments stay within the budget", "payments stay within the budget"),
    "within_privacy_budget": ("Nobody gives up more privacy than she allows", "privacy limits are kept"),
}
_FOUND = {"truthful": "lies pay", "rational": "some are paid below cost", "budget_feasible": "it overspends the budget"}
_LEVELS = {"exact": "claimed without exception", "approximate": "claimed approximately", "none": "not claimed"}
_STYLES = {"holds": "kept", "contradicted": "broken", "no figure": "broken", "not claimed": "silent"}


@router.get("/audit")
def show(visitor: SignedIn, auction: str = "posted") -> HTMLResponse:
    """The form and one's own audits; the newest finished one is shown whole."""
    return _page(visitor, auction, None)


@router.get("/audit/{audit_id}")
def one(request: Request, audit_id: Annotated[str, Path(max_length=60)], visitor: SignedIn) -> HTMLResponse:
    """One audit; for HTMX, only its result so far."""
    audit = audits.get_audit(*visitor.who, audit_id)
    if request.headers.get("HX-Request"):
        return _result(visitor, audit)
    return _page(visitor, audit.auction, audit)


@router.post("/audit")
def start(request: Request, visitor: SignedInWrites, reader: Form) -> Response:
    """Queue a run of the auditor."""
    values: dict[str, Any] = {name: reader.text(name) for name in ("auction", "population")}
    values["profiles"], audit = reader.whole("profiles"), None
    with reader.refusals("_"):
        wanted = reader.build(AuditRequest, {name: name for name in values}, values=values)
        audit = audits.start_audit(*visitor.who, wanted)
    problem = next(iter(reader.errors.values()), "")
    if request.headers.get("HX-Request"):
        return _result(visitor, audit, problem)
    if audit is None:
        return _page(visitor, reader.text("auction"), None, problem)
    return RedirectResponse(f"/audit/{audit.id}", 303)


def _page(visitor: Visitor, auction: str, audit: wire.Audit | None, problem: str = "") -> HTMLResponse:
    past = audits.list_audits(*visitor.who).items
    if audit is None and past:
        audit = audits.get_audit(*visitor.who, past[0].id)
    return page(
        visitor,
        "audit.html.j2",
        title="Audit",
        auction=auction,
        catalogue=market.catalogue(visitor.broker),
        thoroughness=_THOROUGHNESS,
        in_use=sorted({one.auction for one in market.overview(*visitor.who).tasks if one.auction}),
        trust=BIDS_ONLY,
        status=422 if problem else 200,
        **_shown(audit, past, problem),
    )


def _result(visitor: Visitor, audit: wire.Audit | None, problem: str = "") -> HTMLResponse:
    """The result so far and, beside it, the list of audits as it is now."""
    past, status = audits.list_audits(*visitor.who).items, 422 if problem else 200
    shown = _shown(audit, past, problem, beside=True)
    return fragment(visitor, "_audit_result.html.j2", status=status, **shown)


def _shown(
    audit: wire.Audit | None, past: tuple[wire.Audit, ...], problem: str = "", *, beside: bool = False
) -> dict[str, Any]:
    verdict = None if audit is None or audit.report is None else _verdict(audit, audit.report)
    return {"audit": audit, "verdict": verdict, "problem": problem, "past": past, "beside": beside}


def _verdict(audit: wire.Audit, report: dict[str, Any]) -> dict[str, Any]:
    """A finished audit as the page tells it."""
    claims = [
        {"name": _CLAIMS[one.claim][0], "verdict": one.verdict, "level": _LEVELS[one.level], "evidence": one.evidence}
        | {"style": _STYLES[one.verdict]}
        for one in audit.claims
    ]
    broken = [_CLAIMS[one.claim][1] for one in audit.claims if _STYLES[one.verdict] == "broken"]
    silent = [one.claim for one in audit.claims if one.verdict == "not claimed"]
    truthful, rational, budget = report["truthful"], report["rational"], report["budget"]
    # Something that was found against what is not claimed is worth knowing all the same.
    against = {"truthful": truthful["owners_with_gain"], "rational": rational["violations"]}
    found = [_FOUND[claim] for claim in silent if against.get(claim, budget["violations"])]
    kept = f"{audit.auction} keeps what it claims" + (f", but {list_of(found)}" if found else "")
    log = report["search"]
    menus = log.get("by_menu", 0)
    whom = f"of {log['profiles'] * log['owners_per_profile']:,} owners" if menus else "owner"
    tried = (
        f"{count(log['misreports_per_owner'], 'lie')} tried for each {whom} in "
        f"{count(audit.profiles, 'random auction')} (population {audit.population}, seed {audit.seed})."
    )
    if menus:
        tried += f" For the {menus:,} others: the best item of the menu that each is shown, and eight lies."
    but = f" It does not claim that {list_of([_CLAIMS[claim][1] for claim in silent])}." if silent else ""
    worst = "–" if budget["worst_ratio"] is None else significant(budget["worst_ratio"])
    gained = (report["worst"]["gain"] or 0) > 0
    return {
        "headline": f"{audit.auction}: {count(len(broken), 'claim')} did not survive" if broken else kept,
        "story": f"It claims that {list_of(broken)}; a counterexample was found. {tried}"
        if broken
        else f"Nothing was found against any of its claims.{but} {tried}",
        "tone": "bad" if broken else "warn" if found else "good",
        "cards": (
            ("Auctions where a lie pays", _share(truthful["profiles_with_gain"]), "at least one owner gains"),
            ("Largest gain by lying", _share(truthful["max_regret_over_cost"]), "of the owner’s own cost"),
            ("Paid below cost", f"{rational['violations']:,}", f"of {rational['owners_checked']:,} honest owners"),
            ("Over budget", _share(budget["profiles_over"]), f"worst: {worst} × the budget"),
        ),
        "claims": claims,
        "tale_title": "The most profitable lie found" if gained else "No lie paid; the hardest case",
        "tale": tell(_example(report["worst"])),
    }


def _share(value: float | None) -> str:
    return "unbounded" if value is None else percent(value)


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
