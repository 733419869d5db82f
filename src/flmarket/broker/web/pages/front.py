"""The front door: what is on the market and how a round works, signing in and out, and what leads nowhere."""

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from flmarket.broker.errors import Forbidden, NotFound, Unauthenticated
from flmarket.broker.office import ledger, market, sessions, users
from flmarket.broker.web import oidc
from flmarket.broker.web.auth import clear_cookie, client_address, get_gate, set_cookie
from flmarket.broker.web.pages.context import (
    AnyVisitor,
    ByName,
    Form,
    PageNumber,
    PageRoute,
    Pages,
    SignedInWrites,
    Visitor,
    fragment,
    local_path,
    page,
)
from flmarket.broker.web.pages.rendering import render, sentence, theme_css
from flmarket.client import wire
from flmarket.trust import AT_BROKER, AT_OWNERS, market_words

router = APIRouter(route_class=PageRoute, include_in_schema=False)
last_router = APIRouter(route_class=PageRoute, include_in_schema=False)  # answers every address that nobody else did

_SHOWN = 24
_CURVE = 50  # rounds in the small picture of a tile


@router.get("/")
def front(visitor: AnyVisitor, q: ByName = "", page_number: PageNumber = 1) -> HTMLResponse:
    """The market; strangers who do not look for anything all see the same one, which may be a second old."""
    if visitor.auth is not None or q or page_number > 1:
        return _front(visitor, q, page_number)
    body = visitor.broker.recent.get("front page", lambda: bytes(_front(visitor, "", 1).body))
    return HTMLResponse(body, headers={"Cache-Control": "no-store"})


def _front(visitor: Visitor, search: str, number: int) -> HTMLResponse:
    with visitor.broker.database.moment():
        view, shown = _market(visitor, search, number)
    recent, catalogue = visitor.broker.recent, market.catalogue(visitor.broker)
    at_home = bool(visitor.broker.settings.superlink)
    own, bought = view.releases - view.releases_simulated, "none yet"
    if view.releases:  # where they were made
        bought = f"{view.releases_simulated:,} {AT_BROKER.place}" + (f", {own:,} {AT_OWNERS.place}" if own else "")
    return page(
        visitor,
        "market.html.j2",
        title="Market",
        view=view,
        **shown,
        entries=recent.get("entries", lambda: ledger.head(visitor.broker).entries),
        live=view.tasks_running > 0,
        at_home=at_home,
        trust=market_words(on_owners_machines=at_home),
        step=(AT_OWNERS if at_home else AT_BROKER).update,
        bought=bought,
        mechanisms=recent.get("mechanisms", lambda: render("_mechanisms.html.j2", mechanisms=catalogue.auctions)),
        kinds=[one for one in catalogue.kinds if one.name != "auction"],
    )


@router.get("/market/tasks")
def front_tasks(visitor: AnyVisitor, q: ByName = "", page_number: PageNumber = 1) -> HTMLResponse:
    """The tasks again, while some are running."""
    return fragment(visitor, "_tasks.html.j2", **_market(visitor, q, page_number)[1])


def _market(visitor: Visitor, search: str, number: int) -> tuple[wire.Market, dict[str, Any]]:
    """The market, and its tasks for the page; accuracy and money only for whoever may see them."""
    broker, party = visitor.broker, visitor.known
    search, start = search.strip(), (number - 1) * _SHOWN
    view = market.overview(broker, party, limit=_SHOWN, start=start, search=search)
    known: dict[str, tuple[int, list[float]]] = {}
    if party is not None and party.role != "owner":
        known = market.curves(broker, party, [task.id for task in view.tasks], rounds=_CURVE)
    pages = Pages(number, _SHOWN, view.total, "/", "#tasks", urlencode({"q": search}) if search else "")
    return view, {"tiles": [_tile(task, known.get(task.id)) for task in view.tasks], "pages": pages, "search": search}


def _tile(task: wire.MarketTask, inside: tuple[int, list[float]] | None) -> dict[str, Any]:
    """A task on the front page."""
    if inside is None:
        return {"task": task, "href": f"/market/{task.id}", "accuracy": None, "spent_micros": None}
    spent, curve = inside
    shown = {"accuracy": curve[-1] if curve else None, "curve": curve, "spent_micros": spent}
    return {"task": task, "href": f"/tasks/{task.id}", **shown}


# --- signing in and out -----------------------------------------------------------------------------------------------


@router.get("/sign-in")
def ask(visitor: AnyVisitor, next: str = "/") -> Response:
    """The form."""
    return _form(visitor, local_path(next))


@router.post("/sign-in")
def by_key(request: Request, visitor: AnyVisitor, reader: Form) -> Response:
    """Exchange a key for a session. There is no session yet to carry a token, so a form on another site is told apart
    by what browsers say of it."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("sign in on the market's own page")
    get_gate(request).sign_ins.take(client_address(request))
    target = local_path(reader.text("next", "/"))
    try:
        return _welcome(visitor, sessions.sign_in(visitor.broker, reader.text("key")), target)
    except Unauthenticated:
        return _form(visitor, target, "That key is not known here, or it was revoked.")


@router.get("/sign-in/oidc")
def leave(request: Request, visitor: AnyVisitor, next: str = "/") -> Response:
    """Off to the operator's identity provider."""
    get_gate(request).sign_ins.take(client_address(request))
    provider = _provider(request)
    try:
        address, kept = provider.leave(visitor.broker, local_path(next))
    except Unauthenticated as error:
        return _form(visitor, local_path(next), sentence(error))
    response = RedirectResponse(address, 303)
    secure = visitor.broker.settings.secure_cookies
    response.set_cookie(
        oidc.COOKIE, kept, max_age=oidc.LASTS, httponly=True, samesite="lax", secure=secure, path="/sign-in"
    )
    return response


@router.get(oidc.CALLBACK)
def come_back(request: Request, visitor: AnyVisitor, state: str = "", code: str = "") -> Response:
    """Back from there, with a code that the provider exchanges for its word on who this is."""
    get_gate(request).sign_ins.take(client_address(request))
    cookie, provider, broker = request.cookies.get(oidc.COOKIE, ""), _provider(request), visitor.broker
    try:
        claims, target = provider.come_back(broker, cookie, state=state[:200], code=code[:4000])
        made = users.sign_in_as(broker, issuer=claims.issuer, subject=claims.subject, email=claims.email)
        response = _welcome(visitor, made, local_path(target))
    except Unauthenticated as error:
        response = _form(visitor, "/", sentence(error))
    response.delete_cookie(oidc.COOKIE, path="/sign-in")
    return response


def _provider(request: Request) -> oidc.Provider:
    provider: oidc.Provider | None = request.app.state.oidc
    if provider is None:
        raise NotFound("page", "sign-in/oidc")
    return provider


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
    sessions.sign_out(*visitor.who, visitor.auth.cookie)
    response = RedirectResponse("/", 303)
    clear_cookie(response, visitor.broker.settings)
    return response


def _form(visitor: Visitor, target: str, error: str = "") -> Response:
    single = visitor.broker.settings.oidc_name if visitor.broker.settings.oidc_issuer else ""
    status = 401 if error else 200
    return page(visitor, "signin.html.j2", title="Sign in", status=status, next=target, error=error, single=single)


def _welcome(visitor: Visitor, signed_in: sessions.SignedIn, target: str) -> Response:
    response = RedirectResponse(target, 303)
    set_cookie(response, visitor.broker.settings, signed_in)
    return response


# --- the style sheet, and addresses that lead nowhere -----------------------------------------------------------------


@last_router.get("/theme.css")
def theme() -> Response:
    """The report's colours; the address changes with the content."""
    kept = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(theme_css(), media_type="text/css", headers=kept)


@last_router.get("/{path:path}")
def nowhere(request: Request, path: str) -> Response:
    """No such page. Programs, which ask below /api, get the API's own answer."""
    if path.startswith("api/"):
        raise HTTPException(404, "there is no such address")
    raise NotFound("page", path)
