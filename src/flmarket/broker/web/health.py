"""For those who run the service: alive, ready, and in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from sqlalchemy import func, select

from flmarket.broker.office.operator import WORKER
from flmarket.broker.stamps import now
from flmarket.broker.tables import Lease, TaskRow
from flmarket.broker.web.auth import CurrentBroker, get_gate
from flmarket.broker.web.problems import file_response

__all__ = ["router"]

router = APIRouter(tags=["health"])


@dataclass(frozen=True)
class Health:
    """How the service is."""

    status: str


@router.get("/healthz")
async def alive() -> Health:
    """The process answers; it waits for no thread, and no crowd of requests can hold it up."""
    return Health("ok")


@router.get("/readyz", responses={503: {"model": Health, "description": "Not ready"}})
def ready(broker: CurrentBroker, response: Response) -> Health:
    """The database answers, and somebody works the queue if this service should."""
    try:
        with broker.database.read() as session:
            lease = session.get(Lease, WORKER)
    except Exception:
        response.status_code = 503
        return Health("the database does not answer")
    if broker.settings.run_worker and (lease is None or lease.expires_at < now()):
        response.status_code = 503
        return Health("nobody works the queue")
    return Health("ready")


@router.get("/metrics", response_class=Response, responses=file_response("text/plain"))
def metrics(request: Request, broker: CurrentBroker) -> Response:
    """Counters for Prometheus."""
    broker.metrics.streams.set(get_gate(request).streams.count)
    with broker.database.read() as session:
        for state, count in session.execute(select(TaskRow.state, func.count()).group_by(TaskRow.state)):
            broker.metrics.tasks.labels(state).set(count)
    return Response(broker.metrics.text(), media_type="text/plain; version=0.0.4")
