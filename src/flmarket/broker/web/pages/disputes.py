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
    Reader,
    SignedIn,
    SignedInWrites,
    TaskId,
    Typed,
    Unit,
    Visitor,
    ask,
    page,
)
from flmarket.broker.web.pages.rendering import seconds
from flmarket.report.formatting import money

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 50
_TEXT = Unit(pattern="Plain text.")
Before = Annotated[str | None, Query(max_length=60)]


def disputable_since(broker: Broker) -> str:
    """When awards must have ended to be disputed still."""
    return iso(now() - int(1000 * broker.settings.dispute_seconds)) or ""


@router.get("/disputes")
@router.get("/disputes/new")
def show(visitor: SignedIn, reader: Typed, before: Before = None) -> HTMLResponse:
    """Those that concern one, all of them for the operator; and what is wrong with an award, if one is named."""
    return _page(visitor, reader, before)


@router.post("/disputes")
def open_one(visitor: SignedInWrites, reader: Form) -> Response:
    """Open it."""
    fields = {"award_id": "award", "reason": "reason"}
    with reader.refusals("reason"):
        wanted = reader.build(DisputeRequest, fields, {"award": Unit(pattern="An award."), "reason": _TEXT})
        disputes.open_dispute(*visitor.who, wanted)
        return RedirectResponse("/disputes", 303)
    return _page(visitor, reader)


@router.get("/disputes/{dispute_id}")
def show_one(visitor: Operator, dispute_id: TaskId, reader: Typed) -> HTMLResponse:
    """One to decide."""
    one = disputes.get_dispute(*visitor.who, dispute_id)
    return page(
        visitor, "disputes.html.j2", title="A dispute", errors=reader.errors, typed=reader.text("note"), one=one
    )


@router.post("/disputes/{dispute_id}")
def decide(visitor: OperatorWrites, dispute_id: TaskId, reader: Form) -> Response:
    """Pay or refund, with a note; once."""
    values = reader.kept(("decision", "note"))
    with reader.refusals("note"):
        wanted = reader.build(DecisionRequest, {"decision": "note", "note": "note"}, {"note": _TEXT}, values)
        if not reader.text("confirmed"):
            one = disputes.get_dispute(*visitor.who, dispute_id)
            whose = f"the owner of {one.task_name}" if wanted.decision == "pay" else "its buyer"
            asked = f"Decide for {whose}, about {money(one.price_micros)} {visitor.broker.currency}? It is final."
            return ask(visitor, f"/disputes/{dispute_id}", asked, f"/disputes/{dispute_id}", values)
        disputes.decide(*visitor.who, dispute_id, wanted)
        return RedirectResponse("/disputes", 303)
    return show_one(visitor, dispute_id, reader)


def _page(visitor: Visitor, reader: Reader, before: str | None = None) -> HTMLResponse:
    return page(
        visitor,
        "disputes.html.j2",
        title="Disputes",
        errors=reader.errors,
        award=reader.text("award")[:120],
        typed=reader.text("reason"),
        one=None,
        found=disputes.list_disputes(*visitor.who, limit=_SHOWN, before=before),
        window=seconds(visitor.broker.settings.dispute_seconds),
    )
