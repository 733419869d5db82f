"""A buyer's own data: tables that her models are tested on, and the form of data that only owners have.

What is sent is text in fields, so that it works without scripts; with them a file can be chosen to fill a field. Tables
are read by `office.evaluations`, which names line and column of what it does not take.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import ValidationError

from flmarket.broker.office import evaluations, market
from flmarket.broker.requests import EvaluationRequest, SchemaRequest
from flmarket.broker.stamps import new_id
from flmarket.broker.web.pages.context import (
    Buyer,
    BuyerWrites,
    Form,
    PageRoute,
    Reader,
    TaskId,
    Typed,
    Visitor,
    ask,
    page,
)
from flmarket.broker.web.problems import attachment
from flmarket.files import csv_text

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_FIELDS = {"name": "set_name", "data": "data", "data.name": "data", "table": "table"}
_EXAMPLE = (
    '{"columns": [{"name": "radius", "unit": "mm", "offset": 14, "scale": 3.5}, '
    '{"name": "site", "values": ["left", "right"]}], "classes": ["benign", "malignant"]}'
)
Named = Annotated[str, Query(max_length=120)]


@router.get("/tasks/data")
def show(visitor: Buyer, reader: Typed) -> HTMLResponse:
    """One's own sets, and the form for another."""
    return _page(visitor, reader)


@router.get("/tasks/data/header.csv")
def header(visitor: Buyer, data: Named) -> Response:
    """The first line of a table for a data set."""
    text = csv_text(evaluations.header(visitor.broker, data), ())
    return attachment(text, "text/csv; charset=utf-8", f"{data}-header.csv")


@router.post("/tasks/data")
def add(visitor: BuyerWrites, reader: Form) -> Response:
    """Keep a set, once for each form."""
    values: dict[str, Any] = {"name": reader.text("set_name"), "table": reader.text("table")}
    values["schema"] = _schema(reader)
    values["data"] = "" if reader.text("schema") else reader.text("data")
    with reader.refusals("set_name", _FIELDS):
        wanted = reader.build(EvaluationRequest, _FIELDS, values=values)
        made = evaluations.add_set(*visitor.who, wanted, key=reader.once)
        return RedirectResponse(f"/tasks/data?done={made.id}", 303)
    return _page(visitor, reader)


@router.post("/tasks/data/{set_id}/remove")
def remove(visitor: BuyerWrites, set_id: TaskId, reader: Form) -> Response:
    """Forget a set."""
    if not reader.text("confirmed"):
        return ask(visitor, f"/tasks/data/{set_id}/remove", f"Remove {set_id[:40]} for good?", "/tasks/data", {})
    evaluations.remove_set(*visitor.who, set_id)
    return RedirectResponse("/tasks/data", 303)


def _schema(reader: Reader) -> SchemaRequest | None:
    text = reader.text("schema")
    if not text:
        return None
    try:
        return SchemaRequest.model_validate_json(text)
    except ValidationError as error:
        found = error.errors()[0]
        if found["type"] == "json_invalid":
            reader.errors["schema"] = "This is not JSON. The example shows what it looks like."
            return None
        where = " ".join(f"{part + 1}" if isinstance(part, int) else str(part) for part in found["loc"])
        said = str(found["msg"]).removeprefix("Value error, ") if found["type"] == "value_error" else "not accepted"
        reader.errors["schema"] = f"{where or 'The schema'}: {said}. The example shows what it looks like."
    return None


def _page(visitor: Visitor, reader: Reader) -> HTMLResponse:
    typed = reader.kept(("set_name", "data", "table", "schema", "done"))
    return page(
        visitor, "evaluations.html.j2", title="My data", errors=reader.errors, typed=typed, example=_EXAMPLE,
        sets=evaluations.list_sets(*visitor.who).items,
        offered=market.catalogue(visitor.broker).data_sets, idempotency_key=new_id("form"),
        flower=bool(visitor.broker.settings.superlink),
    )  # fmt: skip
