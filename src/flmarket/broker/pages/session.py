"""Signing in and out: an API key, or a link from the operator, becomes a session cookie."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from flmarket.broker.auth import clear_cookie, client_address, get_gate, set_cookie
from flmarket.broker.errors import Forbidden, Unauthenticated
from flmarket.broker.pages.context import AnyVisitor, Form, PageRoute, SignedInWrites, Visitor, page
from flmarket.broker.pages.forms import Reader, local_path
from flmarket.broker.services import sessions

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/sign-in")
def ask(visitor: AnyVisitor, next: str = "/") -> Response:
    """The form."""
    return _form(visitor, local_path(next))


@router.post("/sign-in")
def by_key(request: Request, visitor: AnyVisitor, form: Form) -> Response:
    """Exchange a key for a session."""
    _same_site(request)
    get_gate(request).sign_ins.take(client_address(request))
    reader = Reader(form)
    target = local_path(reader.text("next", "/"))
    try:
        return _welcome(visitor, sessions.sign_in(visitor.broker, reader.text("key")), target)
    except Unauthenticated:
        return _form(visitor, target, "That key is not known here, or it was revoked.")


@router.get("/sign-in/{token}")
def by_link(request: Request, visitor: AnyVisitor, token: str, next: str = "/") -> Response:
    """Exchange a link's token for a session."""
    get_gate(request).sign_ins.take(client_address(request))
    try:
        return _welcome(visitor, sessions.redeem_link(visitor.broker, token), local_path(next))
    except Unauthenticated:
        return _form(visitor, local_path(next), "That link is not valid any more. Ask the operator for a new one.")


@router.post("/sign-out")
def sign_out(visitor: SignedInWrites) -> Response:
    """End the session."""
    assert visitor.auth is not None
    assert visitor.auth.cookie is not None
    sessions.sign_out(visitor.broker, visitor.party, visitor.auth.cookie)
    response = RedirectResponse("/", 303)
    clear_cookie(response, visitor.broker.settings)
    return response


def _form(visitor: Visitor, target: str, error: str = "") -> Response:
    return page(visitor, "signin.html.j2", title="Sign in", status=401 if error else 200, next=target, error=error)


def _welcome(visitor: Visitor, signed_in: sessions.SignedIn, target: str) -> Response:
    response = RedirectResponse(target, 303)
    set_cookie(response, visitor.broker.settings, signed_in)
    return response


def _same_site(request: Request) -> None:
    """There is no session yet to carry a token, so a form on another site is told apart by what browsers say of it."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("sign in on the market's own page")
