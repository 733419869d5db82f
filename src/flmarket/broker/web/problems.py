"""Errors as RFC 9457 problem documents that name the field; never a trace, never what was sent."""

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from flmarket.broker.errors import BrokerError, TooMany, UnderWay
from flmarket.client import wire
from flmarket.errors import (
    DataUnavailable,
    FlmarketError,
    InvalidInput,
    MechanismViolation,
    PrivacyBudgetExhausted,
    SettlementError,
)
from flmarket.ledger.journal import LedgerUnavailable

log = logging.getLogger("flmarket.broker")
MEDIA_TYPE = "application/problem+json"
_DESCRIPTIONS = {
    400: "The body cannot be read",
    401: "No valid key or session",
    403: "Not for this role, or the CSRF token is missing",
    404: "No such object, or somebody else's",
    409: "The object's state does not allow it",
    413: "The body is too large",
    422: "A field is not accepted",
    429: "Too many requests",
}
_CONTENT = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": _CONTENT} for status, text in _DESCRIPTIONS.items()
}
_CONFLICTS = (SettlementError, PrivacyBudgetExhausted, MechanismViolation, DataUnavailable)


def file_response(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """How a route that answers with a file is described."""
    content = {one: {"schema": {"type": "object" if one == "application/json" else "string"}} for one in media_types}
    return {200: {"description": "The file", "content": content}}


def attachment(content: str | bytes, media_type: str, name: str) -> Response:
    """A file to keep."""
    return Response(content, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def problem(
    status: int, title: str, detail: str, found: Iterable[wire.FieldProblem] = (), headers: dict[str, str] | None = None
) -> JSONResponse:
    """A problem document."""
    content = asdict(wire.Problem(title, status, detail, tuple(found)))
    return JSONResponse(content, status, headers=headers, media_type=MEDIA_TYPE)


def from_error(error: FlmarketError) -> JSONResponse:
    """The answer to an error that was raised on purpose."""
    if isinstance(error, TooMany | UnderWay):
        wait = str(max(1, math.ceil(error.retry_after)))
        return problem(error.status, error.title, str(error), headers={"Retry-After": wait})
    if isinstance(error, BrokerError):
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        return problem(error.status, error.title, str(error), headers=headers)
    if isinstance(error, InvalidInput):
        field = error.field.removeprefix("task: ")
        return problem(422, "Not accepted", str(error), [wire.FieldProblem(field, f"expected {error.accepted}")])
    if isinstance(error, LedgerUnavailable):
        return problem(503, "Not now", str(error), headers={"Retry-After": "1"})
    if not isinstance(error, _CONFLICTS):
        log.error("an unforeseen refusal: %s", error)
    return problem(409, "Conflict", str(error))


async def _flmarket_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FlmarketError)
    return from_error(error)


async def _validation_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = [
        wire.FieldProblem(".".join(map(str, one["loc"][1:])) or str(one["loc"][0]), str(one["msg"])[:300])
        for one in error.errors()[:20]
    ]
    named = ", ".join(one.field for one in found[:3])
    return problem(422, "Not accepted", f"not accepted: {named}", found)


async def _http_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    titles = {404: "Not found", 405: "Method not allowed", 400: "Bad request"}
    answer = problem(error.status_code, titles.get(error.status_code, "Refused"), str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


def install(app: FastAPI) -> None:
    """Answer all errors of the API this way."""
    app.add_exception_handler(FlmarketError, _flmarket_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
