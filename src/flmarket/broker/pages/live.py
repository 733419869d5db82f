"""A round as it happens: complete when the page is first served, then the parts that changed, over one event stream."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator

import anyio
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from flmarket.broker.api.parameters import Start
from flmarket.broker.auth import get_gate
from flmarket.broker.pages.charts import Chart
from flmarket.broker.pages.context import BuyerOrOperator, PageRoute, Visitor, page, render_for
from flmarket.broker.pages.scenes import Scene, latest_round, lines, make_scene
from flmarket.broker.pages.tasks import TaskId, accuracy_chart
from flmarket.broker.services import tasks
from flmarket.broker.services.states import ENDED, PLAYABLE
from flmarket.broker.services.views import AwardView, EventView, TaskView
from flmarket.trust import task_words

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_LOG = 40
_RECENT = 160
_HEARTBEAT = 15.0


@router.get("/tasks/{task_id}/live")
def live(task_id: TaskId, visitor: BuyerOrOperator) -> HTMLResponse:
    """The latest round, and live from there on if the task is running."""
    task = tasks.get_task(visitor.broker, visitor.party, task_id)
    happened = _history(visitor, task_id)
    last = happened[-1].id if happened else 0
    return page(
        visitor,
        "live.html.j2",
        title=f"{task.name}, live",
        task=task,
        trust=task_words(task.request.engine),
        running=task.state in PLAYABLE,
        stream=f"/tasks/{task_id}/stream?after={last}",
        scene=_scene(visitor, task, happened),
        chart=_chart(visitor, task),
        lines=lines(reversed(happened[-_LOG:])),
    )


@router.get("/tasks/{task_id}/stream")
def stream(request: Request, task_id: TaskId, visitor: BuyerOrOperator, after: Start = 0) -> StreamingResponse:
    """The parts of the page that changed, as server-sent events; a browser that reconnects goes on where it was."""
    task = tasks.get_task(visitor.broker, visitor.party, task_id)
    resumed = request.headers.get("last-event-id", "")
    start = int(resumed) if re.fullmatch(r"\d{1,15}", resumed) else after
    streams, name = get_gate(request).streams, visitor.party.id
    streams.enter(name)

    async def parts() -> AsyncIterator[str]:
        try:
            async for text in _follow(visitor, task, start):
                yield text
        finally:
            streams.leave(name)

    return StreamingResponse(parts(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _follow(visitor: Visitor, task: TaskView, last: int) -> AsyncIterator[str]:
    settings = visitor.broker.settings
    until, beat = time.monotonic() + settings.stream_seconds, time.monotonic()
    yield "retry: 1500\n\n"
    recent = await run_in_threadpool(_history, visitor, task.id)
    new: list[EventView] | None = [event for event in recent if event.id > last]
    while new is not None and time.monotonic() < until:
        if new:
            last, beat = new[-1].id, time.monotonic()
            yield await run_in_threadpool(_changes, visitor, task, recent, new)
        if recent and recent[-1].kind in ENDED:
            yield _message("finished", "", last)
            return
        if time.monotonic() - beat > _HEARTBEAT:
            beat = time.monotonic()
            yield ": still here\n\n"
        await anyio.sleep(settings.stream_poll_seconds)
        new = await run_in_threadpool(_news, visitor, task.id, last)
        recent = [*recent, *(new or ())][-_RECENT:]


def _news(visitor: Visitor, task_id: str, last: int) -> list[EventView] | None:
    """What happened since; None once whoever looks is signed out, or her key or she herself was barred."""
    if visitor.auth is None or not visitor.auth.still_holds(visitor.broker):
        return None
    return list(tasks.events(visitor.broker, visitor.party, task_id, after=last))


def _changes(visitor: Visitor, task: TaskView, recent: list[EventView], new: list[EventView]) -> str:
    """The parts of the page that some new events change."""
    scene = _scene(visitor, task, recent)
    made = [
        ("title", render_for(visitor, "_live_title.html.j2", scene=scene)),
        ("round", render_for(visitor, "_live_round.html.j2", scene=scene)),
        ("log", render_for(visitor, "_live_log.html.j2", lines=lines(reversed(new)))),
    ]
    if any(event.kind == "settled" for event in new):
        made.append(("curve", render_for(visitor, "_live_curve.html.j2", chart=_chart(visitor, task))))
    return "".join(_message(kind, html, new[-1].id) for kind, html in made)


def _message(kind: str, html: str, identifier: int) -> str:
    data = "".join(f"data: {line}\n" for line in html.splitlines() or [""])
    return f"id: {identifier}\nevent: {kind}\n{data}\n"


def _history(visitor: Visitor, task_id: str) -> list[EventView]:
    """The events of the last rounds; a long task has more than anybody reads."""
    found: list[EventView] = []
    after = 0
    while True:
        batch = tasks.events(visitor.broker, visitor.party, task_id, after=after, limit=1000)
        found = [*found, *batch][-_RECENT:]
        if len(batch) < 1000:
            return found
        after = batch[-1].id


def _chart(visitor: Visitor, task: TaskView) -> Chart:
    played = tasks.rounds(visitor.broker, visitor.party, task.id).items
    return accuracy_chart([one for one in played if one.closed_at], task.baseline_accuracy)


def _scene(visitor: Visitor, task: TaskView, happened: list[EventView]) -> Scene:
    latest = latest_round(happened)
    awards: tuple[AwardView, ...] = ()
    if latest.settled:
        awards = tasks.round_detail(visitor.broker, visitor.party, task.id, latest.index).awards
    return make_scene(task, latest, awards)
