"""A round as it happens: complete when the page is first served, then the parts that changed, over one event stream.

A scene is a round at one moment, from the events of its task: four stages, a bar of money, a board of bidders; and the
log. Scenes are pure functions of what services return. What a buyer sees is what she may know: sealed bids are only
counted, winners are places in the task.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from flmarket.broker.office import tasks
from flmarket.broker.requests import order_of, task_words_of
from flmarket.broker.tables import PLAYABLE
from flmarket.broker.web.api import Start
from flmarket.broker.web.pages.context import BuyerOrOperator, PageRoute, Visitor, page, render_for
from flmarket.broker.web.pages.rendering import Chart, KindWords, kind_words, loss_words
from flmarket.broker.web.pages.tasks import TaskId, accuracy_chart, mechanism
from flmarket.broker.web.streams import News, streaming
from flmarket.client import wire
from flmarket.client.wire import ENDED
from flmarket.ledger import AwardState
from flmarket.report.formatting import money, rate
from flmarket.trust import TrustWords

# --- a round at one moment --------------------------------------------------------------------------------------------

_SEATS = 120
_ENDINGS = {
    "finished": "The task is finished",
    "cancelled": "The task was cancelled",
    "expired": "The deadline passed",
    "failed": "The task failed",
}
_STAGES = ("open", "bids", "awards", "updates", "settled")


@dataclass(frozen=True)
class Latest:
    """The round that the latest event belongs to: its number from 0, and what each of its events said."""

    index: int
    known: dict[str, dict[str, Any]]

    @property
    def settled(self) -> bool:
        """Whether it is over."""
        return "settled" in self.known


@dataclass(frozen=True)
class Stage:
    """One of the four steps of a round."""

    name: str
    icon: str
    state: str
    figure: str
    say: str


@dataclass(frozen=True)
class Seat:
    """One bidder on the board."""

    name: str
    state: str
    first: str
    second: str


@dataclass(frozen=True)
class Part:
    """A part of the round's budget."""

    label: str
    colour: str
    micros: int


@dataclass(frozen=True)
class Scene:
    """A round at one moment."""

    number: int
    of: int
    stages: tuple[Stage, ...]
    parts: tuple[Part, ...]
    budget_micros: int
    seats: tuple[Seat, ...]
    left_out: int
    words: KindWords

    @property
    def shares(self) -> list[tuple[float, str]]:
        """The budget's parts for the bar."""
        return [(part.micros / max(self.budget_micros, 1), part.colour) for part in self.parts if part.colour != "rule"]

    @property
    def money_label(self) -> str:
        """The bar in words."""
        parts = ", ".join(f"{money(part.micros)} {part.label}" for part in self.parts)
        return f"Of {money(self.budget_micros)}: {parts}"


@dataclass(frozen=True)
class Line:
    """One line of the log."""

    at: str
    text: str


def latest_round(happened: Sequence[wire.Progress]) -> Latest:
    """The round that is under way, or the last one."""
    in_rounds = [event for event in happened if event.kind in _STAGES]
    index = in_rounds[-1].data["round"] if in_rounds else 0
    return Latest(index, {event.kind: event.data for event in in_rounds if event.data["round"] == index})


def make_scene(task: wire.Task, latest: Latest, awards: tuple[wire.Award, ...]) -> Scene:
    """The round as it stands; `awards` are known once it is settled."""
    known, order = latest.known, order_of(task.request)
    words = kind_words(order.kind)
    reached = max((_STAGES.index(kind) for kind in known), default=-1)
    bids, offered = known.get("bids", {}), known.get("awards", {})
    budget = order.budget_micros
    over = latest.settled and (bool(awards) or not words.lasting)  # else its awards run on
    seats = [
        _seat(one["owner"], "won", one.get("loss"), one["epsilon"], f"{money(one['price_micros'])} held")
        for one in offered.get("winners", [])
    ]
    if over:
        paid = {one.award_id: f"{money(one.price_micros)} paid" for one in awards if one.state == AwardState.POSTED}
        seats = [
            _seat(one.owner, one.state, one.loss, one.epsilon, paid.get(one.award_id, "money back")) for one in awards
        ]
    sold = len(awards) if over else offered.get("awards", 0)
    others = max(0, bids.get("bids", 0) - sold)
    blank = ("A bidder", "lost", "not bought", "") if reached >= 2 else ("Sealed bid", "bid", "not opened yet", "")
    shown = [*seats, *[Seat(*blank)] * others][:_SEATS]
    return Scene(
        latest.index + 1,
        task.rounds,
        _stages(known, reached, task_words_of(order), words),
        _parts(budget, offered, awards, settled=over),
        budget,
        tuple(shown),
        sold + others - len(shown),
        words,
    )


def _stages(known: dict[str, dict[str, Any]], reached: int, trust: TrustWords, words: KindWords) -> tuple[Stage, ...]:
    bids, awards = known.get("bids"), known.get("awards")
    updates, settled = known.get("updates"), known.get("settled")
    won = "awards for all rounds" if words.lasting else "who sells, what and at which price"
    if awards is not None:
        held = money(awards["held_micros"])
        won = f"awards for all rounds; {held} in escrow" if words.lasting else f"{words.won}; {held} put into escrow"
    paid = "each award resolves once"
    if settled is not None:
        running = words.lasting and not settled["spent_micros"]
        paid = f"paid so far; {settled['delivered']}" if running else f"paid for {settled['delivered']}"
        paid += " checked updates"
    stages = (
        (words.first, "tag", f"{bids['bids']}" if bids else "–", words.came if bids else words.waiting),
        ("Awards", "coins", f"{awards['awards']}" if awards else "–", won),
        ("Updates", "box", f"{updates['delivered']} of {updates['awards']}" if updates else "–", trust.update),
        ("Settlement", "ledger", money(settled["spent_micros"]) if settled else "–", paid),
    )
    states = ["done" if reached >= step else "active" if reached == step - 1 else "waiting" for step in range(1, 5)]
    return tuple(
        Stage(name, icon, state, figure, say) for state, (name, icon, figure, say) in zip(states, stages, strict=True)
    )


def _parts(budget: int, offered: dict[str, Any], awards: tuple[wire.Award, ...], *, settled: bool) -> tuple[Part, ...]:
    held = offered.get("held_micros", 0)
    paid = sum(one.price_micros for one in awards if one.state == AwardState.POSTED)
    return (
        Part("paid", "teal", paid),
        Part("in escrow", "blue", 0 if settled else held),
        Part("returned", "rust", held - paid if settled else 0),
        Part("not awarded", "rule", max(0, budget - held)),
    )


def _seat(name: str, state: str, loss: Mapping[str, Any] | None, number: float | None, price: str) -> Seat:
    """A tile has little room: her name in the task alone, or her place, or her name as the operator knows it; her loss
    may break before its δ and nowhere else."""
    short = name.removeprefix("owner-")
    shown = f"Owner {short}" if short.isdigit() else short[:1].upper() + short[1:] if short == name else short
    return Seat(shown, state, loss_words(loss or {}, number).replace(" ", "\u00a0").replace("\u00a0at", " at"), price)


def lines(happened: Iterable[wire.Progress], kind: str = "auction") -> list[Line]:
    """Events of a task of some kind as lines of the log."""
    words = kind_words(kind)
    return [Line(event.at, text) for event in happened if (text := _tell(event, words))]


def _tell(event: wire.Progress, words: KindWords) -> str:
    """An event in words; empty for one that says nothing by itself."""
    data = event.data
    number, whole = data.get("round", 0) + 1, " in total" if words.lasting else ""
    if event.kind == "queued":
        return f"Posted: {data['rounds']} rounds, the whole budget in escrow."
    if event.kind == "running":
        return "The first round begins."
    if event.kind == "bids":
        return f"Round {number}: {data['bids']} {words.event} for {money(data['budget_micros'])}{whole}."
    if event.kind == "awards" and words.lasting:
        return f"Round {number}: {data['awards']} awards for all rounds, {money(data['held_micros'])} in escrow."
    if event.kind == "awards":
        won = "bids won" if words.won == "won" else "awards"
        return f"Round {number}: {data['awards']} {won}, {money(data['held_micros'])} into escrow."
    if event.kind == "updates":
        return f"Round {number}: {data['delivered']} of {data['awards']} updates arrived."
    if event.kind == "settled":
        reached = "" if data.get("accuracy") is None else f"; accuracy {rate(data['accuracy'])}"
        return f"Round {number} settled: {money(data['spent_micros'])} paid{reached}."
    if event.kind in ENDED:
        why = f": {data['error']}" if data.get("error") else ""
        return f"{_ENDINGS[event.kind]}{why}; {money(data['refunded_micros'])} went back to the buyer."
    return ""


# --- the page and its stream ------------------------------------------------------------------------------------------

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_LOG = 40
_RECENT = 160


@router.get("/tasks/{task_id}/live")
def live(task_id: TaskId, visitor: BuyerOrOperator) -> HTMLResponse:
    """The latest round, and live from there on if the task is running."""
    task = tasks.get_task(visitor.broker, visitor.party, task_id)
    happened = _history(visitor, task_id)
    last, order = happened[-1].id if happened else 0, order_of(task.request)
    return page(
        visitor,
        "live.html.j2",
        title=f"{task.name}, live",
        task=task,
        order=order,
        mechanism=mechanism(task),
        words=kind_words(order.kind),
        trust=task_words_of(order),
        running=task.state in PLAYABLE,
        stream=f"/tasks/{task_id}/stream?after={last}",
        scene=_scene(visitor, task, happened),
        chart=_chart(visitor, task),
        lines=lines(reversed(happened[-_LOG:]), order.kind),
    )


@router.get("/tasks/{task_id}/stream")
def stream(request: Request, task_id: TaskId, visitor: BuyerOrOperator, after: Start = 0) -> StreamingResponse:
    """The parts of the page that changed, as server-sent events; a browser that reconnects goes on where it was."""
    task = tasks.get_task(visitor.broker, visitor.party, task_id)
    resumed = request.headers.get("last-event-id", "")
    last = int(resumed) if re.fullmatch(r"\d{1,15}", resumed) else after
    recent: list[wire.Progress] = []

    def look() -> News | None:
        """None once whoever looks is signed out, or her key or she herself was barred."""
        nonlocal recent, last
        if visitor.auth is None or not visitor.auth.still_holds(visitor.broker):
            return None
        if not recent:
            recent = _history(visitor, task_id)
            new = [event for event in recent if event.id > last]
        else:
            new = list(tasks.events(visitor.broker, visitor.party, task_id, after=max(last, recent[-1].id)))
            recent = [*recent, *new][-_RECENT:]
        last = new[-1].id if new else last
        text = _changes(visitor, task, recent, new) if new else ""
        ended = bool(recent) and recent[-1].kind in ENDED
        return News(text + (_message("finished", "", last) if ended else ""), ended)

    return streaming(request, visitor.broker, visitor.party.id, look, retry_ms=1500)


def _changes(visitor: Visitor, task: wire.Task, recent: list[wire.Progress], new: list[wire.Progress]) -> str:
    """The parts of the page that some new events change."""
    scene = _scene(visitor, task, recent)
    made = [
        ("title", render_for(visitor, "_live_title.html.j2", scene=scene)),
        ("round", render_for(visitor, "_live_round.html.j2", scene=scene)),
        ("log", render_for(visitor, "_live_log.html.j2", lines=lines(reversed(new), order_of(task.request).kind))),
    ]
    if any(event.kind == "settled" for event in new):
        made.append(("curve", render_for(visitor, "_live_curve.html.j2", chart=_chart(visitor, task))))
    return "".join(_message(kind, html, new[-1].id) for kind, html in made)


def _message(kind: str, html: str, identifier: int) -> str:
    data = "".join(f"data: {line}\n" for line in html.splitlines() or [""])
    return f"id: {identifier}\nevent: {kind}\n{data}\n"


def _history(visitor: Visitor, task_id: str) -> list[wire.Progress]:
    """The events of the last rounds; a long task has more than anybody reads."""
    found: list[wire.Progress] = []
    while batch := tasks.events(visitor.broker, visitor.party, task_id, after=found[-1].id if found else 0, limit=1000):
        found = [*found, *batch][-_RECENT:]
    return found


def _chart(visitor: Visitor, task: wire.Task) -> Chart:
    played = tasks.rounds(visitor.broker, visitor.party, task.id).items
    return accuracy_chart([one for one in played if one.closed_at], task.baseline_accuracy)


def _scene(visitor: Visitor, task: wire.Task, happened: list[wire.Progress]) -> Scene:
    latest = latest_round(happened)
    over = latest.settled
    awards = tasks.round_detail(visitor.broker, visitor.party, task.id, latest.index).awards if over else ()
    return make_scene(task, latest, awards)
