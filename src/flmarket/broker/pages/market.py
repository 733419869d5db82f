"""The front page: what is on the market, how a round works, and what each auction guarantees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from flmarket.broker.core import Broker, Party
from flmarket.broker.pages.context import AnyVisitor, PageRoute, Visitor, fragment, page
from flmarket.broker.pages.words import tone
from flmarket.broker.services import ledger, market, tasks
from flmarket.broker.services.states import PLAYABLE
from flmarket.broker.services.views import MarketTask, MarketView
from flmarket.trust import AT_BROKER, AT_OWNERS, market_words

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 24
_CURVE = 50  # rounds in the small picture of a tile


@dataclass(frozen=True)
class Tile:
    """A task on the front page. Accuracy and money only for whoever may see them."""

    title: str
    href: str
    state: str
    tone: str
    place: str
    data: str
    owners: int
    round: int
    rounds: int
    mechanism: str
    budget_micros: int
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
    return page(
        visitor,
        "market.html.j2",
        title="Market",
        view=view,
        tiles=tiles,
        head=ledger.head(visitor.broker),
        live=view.tasks_running > 0,
        at_home=bool(visitor.broker.settings.superlink),
        trust=market_words(on_owners_machines=bool(visitor.broker.settings.superlink)),
        step=(AT_OWNERS if visitor.broker.settings.superlink else AT_BROKER).update,
        bought=_bought(view),
        mechanisms=market.catalogue(visitor.broker).auctions,
    )


def _bought(view: MarketView) -> str:
    """Where the updates that were bought were made."""
    own = view.releases - view.releases_simulated
    if not view.releases:
        return "none yet"
    return f"{view.releases_simulated:,} {AT_BROKER.place}" + (f", {own:,} {AT_OWNERS.place}" if own else "")


@router.get("/market/tasks")
def front_tasks(visitor: AnyVisitor) -> HTMLResponse:
    """The tasks again, while some are running."""
    return fragment(visitor, "_tasks.html.j2", tiles=_market(visitor)[1])


def _market(visitor: Visitor) -> tuple[MarketView, tuple[Tile, ...]]:
    party = None if visitor.auth is None else visitor.auth.party
    view = market.overview(visitor.broker, party, limit=_SHOWN)
    return view, _tiles(visitor.broker, party, view)


def _tiles(broker: Broker, party: Party | None, view: MarketView) -> tuple[Tile, ...]:
    order = sorted(view.tasks, key=lambda task: task.state not in PLAYABLE)  # running ones first, else newest first
    return tuple(_tile(broker, party, task) for task in order)


def _tile(broker: Broker, party: Party | None, task: MarketTask) -> Tile:
    role = None if party is None else party.role
    visible = task.mine or role == "operator"
    href = f"/tasks/{task.id}" if visible else f"/owner/bid?task={task.id}" if role == "owner" and task.open else ""
    tile = Tile(
        task.name, href, task.state, tone(task.state), task.place, task.data,
        task.owners, task.rounds_done, task.rounds,
        task.auction, task.budget_micros_per_round,
    )  # fmt: skip
    if party is None or not visible:
        return tile
    played = tasks.rounds(broker, party, task.id, start=max(0, task.rounds_done - _CURVE)).items
    curve = tuple(one.accuracy for one in played if one.accuracy is not None)
    spent = tasks.get_task(broker, party, task.id).spent_micros
    return replace(tile, accuracy=curve[-1] if curve else None, curve=curve, spent_micros=spent)
