"""Disputes on pages: the form that opens one, the list of one's own, and the operator's decisions."""

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from flmarket.broker.core import Broker
from flmarket.broker.office import disputes
from flmarket.broker.requests import DecisionRequest, DisputeRequest
from flmarket.broker.stamps import iso, now
from flmarket.broker.web.pages.context import (
    Form,
    Operator,
    OperatorWrites,
    PageRoute,
    SignedIn,
    SignedInWrites,
    TaskId,
    Unit,
    Visitor,
    page,
    refused,
)
from flmarket.broker.web.pages.context import ask as ask_first
from flmarket.broker.web.pages.rendering import seconds
from flmarket.errors import FlmarketError
from flmarket.report.formatting import money

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 50
_TEXT = Unit(pattern="Plain text.")
Typed = Annotated[str, Query(max_length=1000)]
Award = Annotated[str, Query(max_length=120)]
Before = Annotated[str | None, Query(max_length=60)]


def disputable_since(broker: Broker) -> str:
    """When awards must have ended to be disputed still."""
    return iso(now() - int(1000 * broker.settings.dispute_seconds)) or ""


@router.get("/disputes")
def show(visitor: SignedIn, before: Before = None) -> HTMLResponse:
    """Those that concern one; all of them for the operator."""
    return _page(visitor, {}, before=before)


@router.get("/disputes/new")
def ask(visitor: SignedIn, award: Award = "", reason: Typed = "") -> HTMLResponse:
    """What is wrong with an award?"""
    return _page(visitor, {}, award=award, typed=reason)


@router.post("/disputes")
def open_one(visitor: SignedInWrites, reader: Form) -> Response:
    """Open it."""
    values = {"award_id": reader.text("award"), "reason": reader.text("reason")}
    fields = {"award_id": "award", "reason": "reason"}
    wanted = reader.build(DisputeRequest, values, fields, {"award": Unit(pattern="An award."), "reason": _TEXT})
    if wanted is not None:
        try:
            disputes.open_dispute(visitor.broker, visitor.party, wanted)
            return RedirectResponse("/disputes", 303)
        except FlmarketError as error:
            reader.errors["reason"] = refused(error)
    return _page(visitor, reader.errors, award=reader.text("award")[:120], typed=reader.text("reason"))


@router.get("/disputes/{dispute_id}")
def show_one(visitor: Operator, dispute_id: TaskId, note: Typed = "") -> HTMLResponse:
    """One to decide."""
    return _decision(visitor, dispute_id, {}, typed=note)


@router.post("/disputes/{dispute_id}")
def decide(visitor: OperatorWrites, dispute_id: TaskId, reader: Form) -> Response:
    """Pay or refund, with a note; once."""
    values = {"decision": reader.text("decision"), "note": reader.text("note")}
    wanted = reader.build(DecisionRequest, values, {"decision": "note", "note": "note"}, {"note": _TEXT})
    if wanted is not None and not reader.text("confirmed"):
        one = disputes.get_dispute(visitor.broker, visitor.party, dispute_id)
        whose = f"the owner of {one.task_name}" if wanted.decision == "pay" else "its buyer"
        asked = f"Decide for {whose}, about {money(one.price_micros)} {visitor.broker.currency}? It is final."
        return ask_first(visitor, f"/disputes/{dispute_id}", asked, f"/disputes/{dispute_id}", values)
    if wanted is not None:
        try:
            disputes.decide(visitor.broker, visitor.party, dispute_id, wanted)
            return RedirectResponse("/disputes", 303)
        except FlmarketError as error:
            reader.errors["note"] = refused(error)
    return _decision(visitor, dispute_id, reader.errors, typed=reader.text("note"))


def _page(
    visitor: Visitor, errors: dict[str, str], *, award: str = "", typed: str = "", before: str | None = None
) -> HTMLResponse:
    found = disputes.list_disputes(visitor.broker, visitor.party, limit=_SHOWN, before=before)
    return page(
        visitor, "disputes.html.j2", title="Disputes", status=422 if errors else 200, errors=errors, award=award,
        typed=typed, found=found, one=None, window=seconds(visitor.broker.settings.dispute_seconds),
    )  # fmt: skip


def _decision(visitor: Visitor, dispute_id: str, errors: dict[str, str], *, typed: str = "") -> HTMLResponse:
    one = disputes.get_dispute(visitor.broker, visitor.party, dispute_id)
    return page(
        visitor, "disputes.html.j2", title="A dispute", status=422 if errors else 200, errors=errors, award="",
        typed=typed, found=None, one=one, window="",
    )  # fmt: skip
