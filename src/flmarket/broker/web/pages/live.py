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

from flmarket.broker.office import listing, tasks
from flmarket.broker.requests import order_of, trust_of
from flmarket.broker.tables import PLAYABLE
from flmarket.broker.web.api import Start
from flmarket.broker.web.auth import client_address
from flmarket.broker.web.pages.context import AnyVisitor, BuyerOrOperator, PageRoute, TaskId, Visitor, page, render_for
from flmarket.broker.web.pages.listing import facts_of
from flmarket.broker.web.pages.rendering import Chart, KindWords, condition, kind_words, loss_words
from flmarket.broker.web.pages.tasks import accuracy_chart, mechanism
from flmarket.broker.web.streams import News, streaming
from flmarket.client import wire
from flmarket.client.wire import ENDED
from flmarket.ledger import AwardState
from flmarket.report.formatting import adding_up, money, rate
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
_COLOURS = {"paid": "teal", "in escrow": "blue", "returned": "rust", "not awarded": "rule"}


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
class Scene:
    """A round at one moment; `parts` are those of its budget, in micro-units."""

    number: int
    of: int
    stages: tuple[Stage, ...]
    parts: Mapping[str, int]
    budget_micros: int
    seats: tuple[Seat, ...] | None
    left_out: int
    words: KindWords

    @property
    def shares(self) -> list[tuple[float, str]]:
        """The budget's parts for the bar."""
        whole = max(self.budget_micros, 1)
        return [(micros / whole, _COLOURS[one]) for one, micros in self.parts.items() if one != "not awarded"]

    @property
    def amounts(self) -> list[tuple[str, str, str]]:
        """The parts as label, amount and colour; what is shown of them adds up to what is shown of the budget."""
        return [(one, text, _COLOURS.get(one, "")) for one, text in adding_up(self.budget_micros, self.parts)]

    @property
    def money_label(self) -> str:
        """The bar in words."""
        return f"Of {money(self.budget_micros)}: {', '.join(f'{text} {label}' for label, text, _ in self.amounts)}"


def latest_round(happened: Sequence[wire.Progress]) -> Latest:
    """The round that is under way, or the last one."""
    in_rounds = [event for event in happened if event.kind in _STAGES]
    index = in_rounds[-1].data["round"] if in_rounds else 0
    return Latest(index, {event.kind: event.data for event in in_rounds if event.data["round"] == index})


def make_scene(task: wire.Task, latest: Latest, awards: tuple[wire.Award, ...], *, public: bool = False) -> Scene:
    """The round as it stands; `awards` are known once it is settled. What is `public` has no board of sellers."""
    known, order = latest.known, order_of(task.request)
    words = kind_words(order.kind)
    reached = max((_STAGES.index(kind) for kind in known), default=-1)
    bids, offered = known.get("bids", {}), known.get("awards", {})
    budget = order.budget_micros
    spent = known.get("settled", {}).get("spent_micros", 0)
    held = offered.get("held_micros", 0)
    over = latest.settled and (bool(awards or spent) or not words.lasting)  # else its awards run on
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
        _stages(known, reached, trust_of(order), words, idle=task.run is not None and not task.run.at_work),
        {
            "paid": spent,
            "in escrow": 0 if over else held,
            "returned": held - spent if over else 0,
            "not awarded": max(0, budget - held),
        },
        budget,
        None if public else tuple(shown),
        sold + others - len(shown),
        words,
    )


def _stages(
    known: dict[str, dict[str, Any]], reached: int, trust: TrustWords, words: KindWords, *, idle: bool
) -> tuple[Stage, ...]:
    """`idle`: nobody plays the task now, so nobody is waited for."""
    waiting = "nobody has been asked: no run is at work" if idle else words.waiting
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
        (words.first, "tag", f"{bids['bids']}" if bids else "–", words.came if bids else waiting),
        ("Awards", "coins", f"{awards['awards']}" if awards else "–", won),
        ("Updates", "box", f"{updates['delivered']} of {updates['awards']}" if updates else "–", trust.update),
        ("Settlement", "ledger", money(settled["spent_micros"]) if settled else "–", paid),
    )
    now = -2 if idle else reached
    states = ["done" if reached >= step else "active" if now == step - 1 else "waiting" for step in range(1, 5)]
    return tuple(
        Stage(name, icon, state, figure, say) for state, (name, icon, figure, say) in zip(states, stages, strict=True)
    )


def _seat(name: str, state: str, loss: Mapping[str, Any] | None, number: float | None, price: str) -> Seat:
    """A tile has little room: her name in the task alone, or her place, or her name as the operator knows it; her loss
    may break before its δ and nowhere else."""
    short = name.removeprefix("owner-")
    shown = f"Owner {short}" if short.isdigit() else short[:1].upper() + short[1:] if short == name else short
    return Seat(shown, state, loss_words(loss or {}, number).replace(" ", "\u00a0").replace("\u00a0at", " at"), price)


def lines(happened: Iterable[wire.Progress], kind: str = "auction") -> list[tuple[str, str]]:
    """Events of a task of some kind as lines of the log: when, and what happened."""
    words = kind_words(kind)
    return [(event.at, text) for event in happened if (text := _tell(event, words))]


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


@dataclass(frozen=True)
class Sight:
    """A task as somebody may see it: as its buyer and the operator do, or as everybody does (`public`)."""

    visitor: Visitor
    task_id: str
    public: bool

    @property
    def path(self) -> str:
        """Where its pages are."""
        return f"/{'market' if self.public else 'tasks'}/{self.task_id}"

    def task(self) -> wire.Task:
        """How it is now."""
        if self.public:
            return listing.public_task(self.visitor.broker, self.task_id)
        return tasks.get_task(*self.visitor.who, self.task_id)

    def events(self, after: int | None = None) -> list[wire.Progress]:
        """What happened after an event; without one, lately: a long task has more than anybody reads."""
        if self.public:
            return list(listing.public_events(self.visitor.broker, self.task_id, after=after, limit=_RECENT))
        broker, party = self.visitor.who
        return list(tasks.events(broker, party, self.task_id, after=after, limit=_RECENT))

    def scene(self, task: wire.Task, happened: list[wire.Progress]) -> Scene:
        """The round that is under way."""
        latest = latest_round(happened)
        awards: tuple[wire.Award, ...] = ()
        if latest.settled and not self.public:
            found = tasks.round_detail(*self.visitor.who, task.id, latest.index, limit=_SEATS)
            awards = found.awards
        return make_scene(task, latest, awards, public=self.public)

    def chart(self, task: wire.Task) -> Chart | None:
        """Accuracy by round, which is the buyer's."""
        if self.public:
            return None
        played = tasks.rounds(*self.visitor.who, task.id).items
        return accuracy_chart([one for one in played if one.closed_at], task.baseline_accuracy)

    def may_look(self) -> bool:
        """Whether it still is hers to see: she may be signed out, or her key or she herself barred."""
        return self.public or (self.visitor.auth is not None and self.visitor.auth.still_holds(self.visitor.broker))


@router.get("/tasks/{task_id}/live")
def live(task_id: TaskId, visitor: BuyerOrOperator) -> HTMLResponse:
    """The latest round, and live from there on if the task is running."""
    return _page(Sight(visitor, task_id, False))


@router.get("/market/{task_id}/live")
def public_live(task_id: TaskId, visitor: AnyVisitor) -> HTMLResponse:
    """The same for everybody, in counts and sums."""
    return _page(Sight(visitor, task_id, True))


@router.get("/tasks/{task_id}/stream")
def stream(request: Request, task_id: TaskId, visitor: BuyerOrOperator, after: Start = 0) -> StreamingResponse:
    """The parts of the page that changed, as server-sent events; a browser that reconnects goes on where it was."""
    return _stream(request, Sight(visitor, task_id, False), after, visitor.party.id)


@router.get("/market/{task_id}/stream")
def public_stream(request: Request, task_id: TaskId, visitor: AnyVisitor, after: Start = 0) -> StreamingResponse:
    """The same for everybody."""
    name = f"stranger at {client_address(request)}" if visitor.auth is None else visitor.auth.party.id
    return _stream(request, Sight(visitor, task_id, True), after, name)


def _page(sight: Sight) -> HTMLResponse:
    task, happened = sight.task(), sight.events()
    last, order = happened[-1].id if happened else 0, order_of(task.request)
    return page(
        sight.visitor,
        "live.html.j2",
        title=f"{task.name}, live",
        task=task,
        order=order,
        mechanism=mechanism(task),
        words=kind_words(order.kind),
        trust=trust_of(order),
        running=task.state in PLAYABLE,
        path=sight.path,
        stream=f"{sight.path}/stream?after={last}",
        scene=sight.scene(task, happened),
        chart=sight.chart(task),
        lines=lines(reversed(happened[-_LOG:]), order.kind),
        facts=facts_of(sight.visitor.broker, sight.visitor.known, task.id),
    )


def _stream(request: Request, sight: Sight, after: int, name: str) -> StreamingResponse:
    task = sight.task()
    resumed = request.headers.get("last-event-id", "")
    last = int(resumed) if re.fullmatch(r"\d{1,15}", resumed) else after
    recent: list[wire.Progress] = []
    shown: tuple[str, str] | None = None  # the page may have been served before

    def condition_changes() -> str:
        """Of a Flower task: whether anybody plays it now."""
        nonlocal task, shown
        if task.run is not None:
            task = sight.task()
            if condition(task) != shown:
                shown = condition(task)
                made = ("dot", "_live_dot.html.j2"), ("status", "_live_status.html.j2")
                live = {"task": task, "running": task.state in PLAYABLE}
                return "".join(_message(kind, render_for(sight.visitor, part, **live), last) for kind, part in made)
        return ""

    def look() -> News | None:
        nonlocal recent, last
        if not sight.may_look():
            return None
        news = condition_changes()
        if not recent:
            recent = sight.events()
            new = [event for event in recent if event.id > last]
        else:
            new = sight.events(after=max(last, recent[-1].id))
            recent = [*recent, *new][-_RECENT:]
        last = new[-1].id if new else last
        text = news + (_changes(sight, task, recent, new) if new or (news and recent) else "")
        ended = bool(recent) and recent[-1].kind in ENDED
        return News(text + (_message("finished", "", last) if ended else ""), ended)

    return streaming(request, sight.visitor.broker, name, look, retry_ms=1500)


def _changes(sight: Sight, task: wire.Task, recent: list[wire.Progress], new: list[wire.Progress]) -> str:
    """The parts of the page that some new events change."""
    scene, visitor = sight.scene(task, recent), sight.visitor
    made = [
        ("title", render_for(visitor, "_live_title.html.j2", scene=scene)),
        ("round", render_for(visitor, "_live_round.html.j2", scene=scene)),
        ("log", render_for(visitor, "_live_log.html.j2", lines=lines(reversed(new), order_of(task.request).kind))),
    ]
    if any(event.kind == "settled" for event in new):
        made.append(("curve", render_for(visitor, "_live_curve.html.j2", chart=sight.chart(task))))
    return "".join(_message(kind, html, recent[-1].id) for kind, html in made)


def _message(kind: str, html: str, identifier: int) -> str:
    data = "".join(f"data: {line}\n" for line in html.splitlines() or [""])
    return f"id: {identifier}\nevent: {kind}\n{data}\n"
