"""A task's progress as server-sent events: all that happened after `Last-Event-ID`, then whatever happens.

Before it looks for events a stream asks again whether its key or session is valid; when it is not, the stream ends."""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from flmarket.broker.core import Broker
from flmarket.broker.office import tasks
from flmarket.broker.web.api import Identifier, Start
from flmarket.broker.web.auth import CurrentAuth, CurrentBroker, get_gate
from flmarket.broker.web.problems import PROBLEMS
from flmarket.broker.web.routes import API, OneThreadRoute
from flmarket.client.wire import ENDED

router = APIRouter(prefix=API, tags=["tasks"], route_class=OneThreadRoute, responses=PROBLEMS)
_HEARTBEAT = 15.0
_EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Grows; send the last one as Last-Event-ID."},
        "event": {"type": "string", "description": "What happened: open, bids, awards, updates, settled, … end."},
        "data": {"type": "string", "description": "A JSON object with the time, the round and the figures."},
        "retry": {"type": "string"},
    },
}
_DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The stream", "content": {"text/event-stream": {"schema": _EVENT}}}
}


@dataclass(frozen=True)
class News:
    """What to send now, as server-sent events; `ended` if nothing will follow."""

    text: str
    ended: bool = False


def streaming(
    request: Request, broker: Broker, name: str, look: Callable[[], News | None], *, retry_ms: int
) -> StreamingResponse:
    """Whatever `look` finds, again and again; until it finds the end, or None because who asked may not know any more.

    One of so many streams, of the service and of `name`; `look` runs in a thread.
    """
    streams, settings = get_gate(request).streams, broker.settings
    streams.enter(name)

    async def follow() -> AsyncIterator[str]:
        started = beat = time.monotonic()
        try:
            yield f"retry: {retry_ms}\n\n"
            while time.monotonic() - started < settings.stream_seconds:
                news = await run_in_threadpool(look)
                if news is None:
                    return
                if news.text or time.monotonic() - beat > _HEARTBEAT:
                    beat = time.monotonic()
                    yield news.text or ": still here\n\n"
                if news.ended:
                    return
                await anyio.sleep(settings.stream_poll_seconds)
        finally:
            streams.leave(name)

    return StreamingResponse(follow(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


@router.get("/tasks/{task_id}/events", response_class=StreamingResponse, responses=_DESCRIBED)
def events(
    request: Request,
    broker: CurrentBroker,
    auth: CurrentAuth,
    task_id: Identifier,
    after: Start = 0,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", pattern=r"^\d{1,15}$")] = None,
) -> StreamingResponse:
    """Follow a task. Ends with the event `end` when the task has ended; browsers resume by themselves."""
    tasks.get_task(broker, auth.party, task_id)  # foreign tasks are refused before the stream begins
    last = max(after, int(last_event_id or 0))

    def look() -> News | None:
        nonlocal last
        if not auth.still_holds(broker):
            return None
        state = tasks.get_task(broker, auth.party, task_id).state
        found = tasks.events(broker, auth.party, task_id, after=last)
        last = found[-1].id if found else last
        if not found and state in ENDED:
            return News(f"event: end\ndata: {json.dumps({'state': state})}\n\n", ended=True)
        told = ((one, json.dumps({"at": one.at, **one.data})) for one in found)
        return News("".join(f"id: {one.id}\nevent: {one.kind}\ndata: {data}\n\n" for one, data in told))

    return streaming(request, broker, auth.party.id, look, retry_ms=2000)
