"""The service: API, pages and worker in one ASGI application."""

import gc
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from sqlalchemy import func, select
from starlette.middleware.gzip import GZipMiddleware

from flmarket import __version__
from flmarket.broker.core import Broker
from flmarket.broker.errors import Unauthenticated
from flmarket.broker.office.operator import WORKER
from flmarket.broker.office.reconcile import RECONCILE
from flmarket.broker.settings import Settings
from flmarket.broker.stamps import now
from flmarket.broker.tables import ACTIVE, PLAYABLE, Check, Lease, TaskRow, counted_by
from flmarket.broker.web import api, pages, problems, routes, streams
from flmarket.broker.web.auth import COOKIE_SCHEME, CurrentBroker, Gate, get_gate
from flmarket.broker.web.middleware import BodyLimit, Observe
from flmarket.broker.web.oidc import Provider
from flmarket.broker.web.pages import rendering
from flmarket.broker.work.worker import Worker
from flmarket.client import wire

_ABOUT = (
    "Buyers post training tasks, data owners sell private updates, the operator proves that every rule was kept. "
    "Money is in whole micro-units. Every ε is per round unless it says total. Send `Idempotency-Key` with writes: "
    "the same key brings the same answer and nothing happens twice."
)


# --- for those who run the service: alive, ready, and in numbers ------------------------------------------------------

_health_routes = APIRouter(tags=["health"])


@dataclass(frozen=True)
class Health:
    """How the service is."""

    status: str


@_health_routes.get("/healthz")
async def alive() -> Health:
    """The process answers; it waits for no thread, and no crowd of requests can hold it up."""
    return Health("ok")


@_health_routes.get("/readyz", responses={503: {"model": Health, "description": "Not ready"}})
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


_METRICS = problems.file_response("text/plain") | {401: problems.PROBLEMS[401]}


@_health_routes.get("/metrics", response_class=Response, responses=_METRICS)
def metrics(request: Request, broker: CurrentBroker) -> Response:
    """Counters for Prometheus; with the setting `metrics_token`, for whoever sends it as a bearer token."""
    token, sent = broker.settings.metrics_token, request.headers.get("authorization", "")
    if token and not hmac.compare_digest(sent.encode("latin-1"), f"Bearer {token}".encode()):
        raise Unauthenticated("metrics are for whoever has the operator's metrics_token")
    told, states = broker.metrics, dict.fromkeys((*ACTIVE, *wire.ENDED), 0)
    told.streams.set(get_gate(request).streams.count)
    with broker.database.read() as session:
        states |= counted_by(session, TaskRow.state)
        left = select(func.sum(TaskRow.left_micros)).where(TaskRow.state.in_(PLAYABLE))
        told.escrow.set(session.scalar(left) or 0)
        books = session.get(Check, RECONCILE)
    for state, count in states.items():
        told.tasks.labels(state).set(count)
    told.findings.set(0 if books is None else len(books.findings))
    told.compared.set(0 if books is None else books.at / 1000)
    return Response(told.text(), media_type="text/plain; version=0.0.4")


# --- the application --------------------------------------------------------------------------------------------------


class _Service(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The API's description, with the problem document among its schemas; who may send a key may use a session."""
        if self.openapi_schema is None:
            made = get_openapi(title=self.title, version=self.version, description=self.description, routes=self.routes)
            schemas = made["components"]["schemas"]
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            problem = TypeAdapter(wire.Problem).json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(problem.pop("$defs", {}))
            schemas["Problem"] = problem
            made["components"]["securitySchemes"][COOKIE_SCHEME.scheme_name] = jsonable_encoder(
                COOKIE_SCHEME.model, by_alias=True, exclude_none=True
            )
            for operations in made["paths"].values():
                for operation in operations.values():
                    if "security" in operation:
                        operation["security"].append({COOKIE_SCHEME.scheme_name: []})
            self.openapi_schema = made
        return self.openapi_schema


class _Garbage:
    """Python's collector without its long pauses: a look at all that a market has made takes a tenth of a second, in
    which nobody is answered.

    What has outlived a full look is set aside (`gc.freeze`), so that the next one is at what came since. Little of that
    ever becomes garbage in a circle, which is all that the collector is for; an hour's worth is looked for in one go.
    """

    def __init__(self, every_seconds: float = 3600.0) -> None:
        self._every, self._before = every_seconds, gc.get_threshold()
        self._due = time.monotonic() + every_seconds
        gc.set_threshold(*self._before[:2], 50)  # full looks five times as rarely as usual
        gc.callbacks.append(self._looked)
        gc.collect()

    def close(self) -> None:
        """As it was before."""
        gc.callbacks.remove(self._looked)
        gc.unfreeze()
        gc.set_threshold(*self._before)

    def _looked(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start" and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            gc.unfreeze()  # for this look
        elif phase == "stop":
            gc.freeze()


def create_app(settings: Settings | None = None, *, broker: Broker | None = None, alone: bool = False) -> FastAPI:
    """The application; with `broker`, over one that is open already (and stays the caller's to close).

    `alone`: this process serves nothing else, and looks for garbage as `_Garbage` says.
    """
    given = broker
    broker = Broker.open(settings or Settings()) if broker is None else broker
    gate = Gate(broker.settings)
    worker = Worker(broker) if broker.settings.run_worker else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if alone:
            rendering.load_all()
        garbage = _Garbage() if alone else None
        if worker is not None:
            worker.start()
        yield
        if garbage is not None:
            garbage.close()
        gate.heavy.close()
        if worker is not None:
            worker.stop()
        if given is None:
            broker.close()

    app = _Service(
        title="flmarket broker",
        version=__version__,
        description=_ABOUT,
        openapi_url=f"{routes.API}/openapi.json",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.broker, app.state.gate, app.state.oidc = broker, gate, Provider.of(broker.settings)
    problems.install(app)
    pages.mount(app)
    routes.install(app, (_health_routes, *api.ROUTERS, streams.router, *pages.ROUTERS))
    app.add_middleware(BodyLimit, most=broker.settings.max_body_bytes, page=pages.too_large)
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)  # not of event streams
    app.add_middleware(Observe, metrics=broker.metrics)
    return app
