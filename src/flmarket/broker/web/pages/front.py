"""The front door: what is on the market and how a round works, signing in and out, and what leads nowhere."""

from __future__ import annotations

from dataclasses import dataclass

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
    Reader,
    SignedInWrites,
    Visitor,
    fragment,
    local_path,
    page,
)
from flmarket.broker.web.pages.rendering import theme_css, tone
from flmarket.client import wire
from flmarket.trust import AT_BROKER, AT_OWNERS, market_words

__all__ = ["last_router", "router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)
last_router = APIRouter(route_class=PageRoute, include_in_schema=False)  # answers every address that nobody else did

_SHOWN = 24
_CURVE = 50  # rounds in the small picture of a tile


@dataclass(frozen=True)
class Tile:
    """A task on the front page. Accuracy and money only for whoever may see them."""

    task: wire.MarketTask
    href: str
    accuracy: float | None = None
    curve: tuple[float, ...] = ()
    spent_micros: int | None = None


@router.get("/")
def front(visitor: AnyVisitor) -> HTMLResponse:
    """The market; strangers all see the same one, which may be a second old."""
    if visitor.auth is not None:
        return _front(visitor)
    body = visitor.broker.recent.get("front page", lambda: bytes(_front(visitor).body))
    return HTMLResponse(body, headers={"Cache-Control": "no-store"})


def _front(visitor: Visitor) -> HTMLResponse:
    view, tiles = _market(visitor)
    catalogue = market.catalogue(visitor.broker)
    return page(
        visitor,
        "market.html.j2",
        title="Market",
        view=view,
        tiles=tiles,
        tone=tone,
        head=ledger.head(visitor.broker),
        live=view.tasks_running > 0,
        at_home=bool(visitor.broker.settings.superlink),
        trust=market_words(on_owners_machines=bool(visitor.broker.settings.superlink)),
        step=(AT_OWNERS if visitor.broker.settings.superlink else AT_BROKER).update,
        bought=_bought(view),
        mechanisms=catalogue.auctions,
        kinds=[one for one in catalogue.kinds if one.name != "auction"],
    )


def _bought(view: wire.Market) -> str:
    """Where the updates that were bought were made."""
    own = view.releases - view.releases_simulated
    if not view.releases:
        return "none yet"
    return f"{view.releases_simulated:,} {AT_BROKER.place}" + (f", {own:,} {AT_OWNERS.place}" if own else "")


@router.get("/market/tasks")
def front_tasks(visitor: AnyVisitor) -> HTMLResponse:
    """The tasks again, while some are running."""
    return fragment(visitor, "_tasks.html.j2", tiles=_market(visitor)[1], tone=tone)


def _market(visitor: Visitor) -> tuple[wire.Market, tuple[Tile, ...]]:
    party = None if visitor.auth is None else visitor.auth.party
    view = market.overview(visitor.broker, party, limit=_SHOWN)
    return view, _tiles(visitor.broker, party, view)


def _tiles(broker: Broker, party: Party | None, view: wire.Market) -> tuple[Tile, ...]:
    order = sorted(view.tasks, key=lambda task: task.state not in PLAYABLE)  # running ones first, else newest first
    return tuple(_tile(broker, party, task) for task in order)


def _tile(broker: Broker, party: Party | None, task: wire.MarketTask) -> Tile:
    role = None if party is None else party.role
    visible = task.mine or role == "operator"
    href = f"/tasks/{task.id}" if visible else f"/owner/bid?task={task.id}" if role == "owner" and task.open else ""
    if party is None or not visible:
        return Tile(task, href)
    played = tasks.rounds(broker, party, task.id, start=max(0, task.rounds_done - _CURVE)).items
    curve = tuple(one.accuracy for one in played if one.accuracy is not None)
    spent = tasks.get_task(broker, party, task.id).spent_micros
    return Tile(task, href, curve[-1] if curve else None, curve, spent)


# --- signing in and out -----------------------------------------------------------------------------------------------


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


# --- the style sheet, and addresses that lead nowhere -----------------------------------------------------------------


@last_router.get("/theme.css")
def theme() -> Response:
    """The report's colours; the address changes with the content."""
    return Response(
        theme_css(), media_type="text/css", headers={"Cache-Control": "public, max-age=31536000, immutable"}
    )


@last_router.get("/{path:path}")
def nowhere(request: Request, path: str) -> Response:
    """No such page. Programs, which ask below /api, get the API's own answer."""
    if path == "api" or path.startswith("api/"):
        raise HTTPException(404, "there is no such address")
    raise NotFound("page", path)
