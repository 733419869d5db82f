"""The front door: what is on the market and how a round works, signing in and out, and what leads nowhere."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from flmarket.broker.core import Broker, Party
from flmarket.broker.errors import Forbidden, NotFound, Unauthenticated
from flmarket.broker.office import ledger, market, sessions, tasks
from flmarket.broker.tables import PLAYABLE
from flmarket.broker.web.auth import clear_cookie, client_address, get_gate, set_cookie
from flmarket.broker.web.pages.context import (
    AnyVisitor,
    Form,
    PageRoute,
    SignedInWrites,
    Visitor,
    fragment,
    local_path,
    page,
)
from flmarket.broker.web.pages.rendering import theme_css
from flmarket.client import wire
from flmarket.trust import AT_BROKER, AT_OWNERS, market_words

router = APIRouter(route_class=PageRoute, include_in_schema=False)
last_router = APIRouter(route_class=PageRoute, include_in_schema=False)  # answers every address that nobody else did

_SHOWN = 24
_CURVE = 50  # rounds in the small picture of a tile


@router.get("/")
def front(visitor: AnyVisitor) -> HTMLResponse:
    """The market; strangers all see the same one, which may be a second old."""
    if visitor.auth is not None:
        return _front(visitor)
    body = visitor.broker.recent.get("front page", lambda: bytes(_front(visitor).body))
    return HTMLResponse(body, headers={"Cache-Control": "no-store"})


def _front(visitor: Visitor) -> HTMLResponse:
    view, tiles = _market(visitor)
    catalogue, at_home = market.catalogue(visitor.broker), bool(visitor.broker.settings.superlink)
    own, bought = view.releases - view.releases_simulated, "none yet"
    if view.releases:  # where they were made
        bought = f"{view.releases_simulated:,} {AT_BROKER.place}" + (f", {own:,} {AT_OWNERS.place}" if own else "")
    return page(
        visitor,
        "market.html.j2",
        title="Market",
        view=view,
        tiles=tiles,
        head=ledger.head(visitor.broker),
        live=view.tasks_running > 0,
        at_home=at_home,
        trust=market_words(on_owners_machines=at_home),
        step=(AT_OWNERS if at_home else AT_BROKER).update,
        bought=bought,
        mechanisms=catalogue.auctions,
        kinds=[one for one in catalogue.kinds if one.name != "auction"],
    )


@router.get("/market/tasks")
def front_tasks(visitor: AnyVisitor) -> HTMLResponse:
    """The tasks again, while some are running."""
    return fragment(visitor, "_tasks.html.j2", tiles=_market(visitor)[1])


def _market(visitor: Visitor) -> tuple[wire.Market, list[dict[str, Any]]]:
    """The market, and its tasks for the page: running ones first, else newest first."""
    party = None if visitor.auth is None else visitor.auth.party
    view = market.overview(visitor.broker, party, limit=_SHOWN)
    order = sorted(view.tasks, key=lambda task: task.state not in PLAYABLE)
    return view, [_tile(visitor.broker, party, task) for task in order]


def _tile(broker: Broker, party: Party | None, task: wire.MarketTask) -> dict[str, Any]:
    """A task on the front page; accuracy and money only for whoever may see them."""
    if party is None or not (task.mine or party.role == "operator"):
        return {"task": task, "href": f"/market/{task.id}", "accuracy": None, "spent_micros": None}
    played = tasks.rounds(broker, party, task.id, start=max(0, task.rounds_done - _CURVE)).items
    curve = [one.accuracy for one in played if one.accuracy is not None]
    spent = tasks.get_task(broker, party, task.id).spent_micros
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


# --- the style sheet, and addresses that lead nowhere -----------------------------------------------------------------


@last_router.get("/theme.css")
def theme() -> Response:
    """The report's colours; the address changes with the content."""
    kept = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(theme_css(), media_type="text/css", headers=kept)


@last_router.get("/{path:path}")
def nowhere(request: Request, path: str) -> Response:
    """No such page. Programs, which ask below /api, get the API's own answer."""
    if path == "api" or path.startswith("api/"):
        raise HTTPException(404, "there is no such address")
    raise NotFound("page", path)
