"""A task's progress as server-sent events: all that happened after `Last-Event-ID`, then whatever happens.

Before it looks for events a stream asks again whether its key or session is valid; when it is not, the stream ends."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from flmarket.broker.core import Broker
from flmarket.broker.office import tasks
from flmarket.broker.tables import ENDED
from flmarket.broker.web.api import Identifier, Start
from flmarket.broker.web.auth import Auth, CurrentAuth, CurrentBroker, get_gate
from flmarket.broker.web.limits import Streams
from flmarket.broker.web.problems import PROBLEMS
from flmarket.client import wire

__all__ = ["router"]

router = APIRouter(tags=["tasks"], responses=PROBLEMS)
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
    streams = get_gate(request).streams
    streams.enter(auth.party.id)
    first = max(after, int(last_event_id or 0))
    headers = {"X-Accel-Buffering": "no"}
    return StreamingResponse(
        _follow(broker, auth, task_id, first, streams),
        media_type="text/event-stream",
        headers=headers,
    )


async def _follow(broker: Broker, auth: Auth, task_id: str, last: int, streams: Streams) -> AsyncIterator[str]:
    started = beat = time.monotonic()
    try:
        yield "retry: 2000\n\n"
        while time.monotonic() - started < broker.settings.stream_seconds:
            news = await run_in_threadpool(_news, broker, auth, task_id, last)
            if news is None:
                return
            state, found = news
            for event in found:
                last, beat = event.id, time.monotonic()
                yield _format(event)
            if not found and state in ENDED:
                yield f"event: end\ndata: {json.dumps({'state': state})}\n\n"
                return
            if time.monotonic() - beat > _HEARTBEAT:
                beat = time.monotonic()
                yield ": still here\n\n"
            await anyio.sleep(broker.settings.stream_poll_seconds)
    finally:
        streams.leave(auth.party.id)


def _news(broker: Broker, auth: Auth, task_id: str, last: int) -> tuple[str, tuple[wire.Progress, ...]] | None:
    """The task's state and what happened since; None if whoever asked may not know any more."""
    if not auth.still_holds(broker):
        return None
    state = tasks.get_task(broker, auth.party, task_id).state
    return state, tasks.events(broker, auth.party, task_id, after=last)


def _format(event: wire.Progress) -> str:
    data = json.dumps({"at": event.at, **event.data})
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n"
