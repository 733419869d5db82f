"""The service: API, pages and worker in one ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from flmarket import __version__
from flmarket.broker.core import Broker
from flmarket.broker.settings import Settings
from flmarket.broker.web import api, health, pages, problems, streams
from flmarket.broker.web.auth import Gate
from flmarket.broker.web.middleware import BodyLimit, Observe, SecureHeaders
from flmarket.broker.work.worker import Worker
from flmarket.client import wire

__all__ = ["create_app"]

API = "/api/v1"
_ABOUT = (
    "Buyers post training tasks, data owners sell private updates, the operator proves that every rule was kept. "
    "Money is in whole micro-units. Every ε is per round unless it says total. Send `Idempotency-Key` with writes: "
    "the same key brings the same answer and nothing happens twice."
)


class _Service(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The API's description, with the problem document among its schemas."""
        if self.openapi_schema is None:
            made = get_openapi(title=self.title, version=self.version, description=self.description, routes=self.routes)
            schemas = made["components"]["schemas"]
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            problem = TypeAdapter(wire.Problem).json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(problem.pop("$defs", {}))
            schemas["Problem"] = problem
            self.openapi_schema = made
        return self.openapi_schema


def create_app(settings: Settings | None = None, *, broker: Broker | None = None) -> FastAPI:
    """The application; with `broker`, over one that is open already (and stays the caller's to close)."""
    given = broker
    broker = Broker.open(settings or Settings()) if broker is None else broker
    gate = Gate(broker.settings)
    worker = Worker(broker) if broker.settings.run_worker else None

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if worker is not None:
            worker.start()
        yield
        gate.heavy.close()
        if worker is not None:
            worker.stop()
        if given is None:
            broker.close()

    app = _Service(
        title="flmarket broker",
        version=__version__,
        description=_ABOUT,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.broker, app.state.gate = broker, gate
    problems.install(app)
    app.include_router(health.router)
    for router in (
        api.sign_in_routes,
        api.account_routes,
        api.task_routes,
        streams.router,
        api.owner_routes,
        api.audit_routes,
        api.operator_routes,
    ):
        app.include_router(router, prefix=API)
    pages.mount(app)
    app.add_middleware(BodyLimit, most=broker.settings.max_body_bytes)
    app.add_middleware(SecureHeaders)
    app.add_middleware(Observe, metrics=broker.metrics)
    return app
