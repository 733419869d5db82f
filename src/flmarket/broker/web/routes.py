"""How a request finds its route, and the thread that answers it.

A route whose function waits for nothing is answered in one thread from beginning to end: who asks, what she sent, the
work, the answer. FastAPI would hand each plain dependency and function to a thread of its own and come back in between,
which costs more than most of the work. Dependencies are therefore coroutines that may ask the database but never wait:
in such a thread a coroutine that waits is an error, and everywhere else `look` has asked before them.
"""

from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from flmarket.broker.web.auth import SAFE

API = "/api/v1"
P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class OneThreadRoute(APIRoute):
    """A route that is answered in one thread, or, if its function is a coroutine that waits, by the event loop."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.waits = iscoroutinefunction(endpoint)
        super().__init__(path, endpoint if self.waits else _at_once(endpoint), **options)

    def look(self, request: Request) -> None:
        """What dependencies ask the database; they must find it in `request.state` afterwards."""

    async def answer(self, request: Request, handle: Handler) -> Response:
        """The answer, by FastAPI's handler; what a route adds around it is here."""
        return await handle(request)

    async def work(self, job: Callable[P, T], /, *values: P.args, **named: P.kwargs) -> T:
        """Do something that takes time, from `answer`."""
        return await run_in_threadpool(job, *values, **named) if self.waits else job(*values, **named)

    def get_route_handler(self) -> Handler:
        """FastAPI's handler with ours around it."""
        handle = super().get_route_handler()

        async def looked(request: Request) -> Response:
            await run_in_threadpool(self.look, request)
            return await handle(request)

        async def wait(request: Request) -> Response:
            return await self.answer(request, looked)

        async def hand_over(request: Request) -> Response:
            if request.method not in SAFE:
                await request.body()  # whoever reads it later need not wait
            return await run_in_threadpool(_finish, self.answer(request, handle))

        return wait if self.waits else hand_over


def _at_once(endpoint: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """FastAPI calls coroutines where it is."""

    @wraps(endpoint)
    async def run(*values: P.args, **named: P.kwargs) -> T:
        return endpoint(*values, **named)

    return run


def _finish(begun: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        begun.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    begun.close()
    raise RuntimeError("something waits in a route that is answered in one thread")


# --- finding a route --------------------------------------------------------------------------------------------------


def install(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Add these routers' routes, which know their whole paths; looked at after all that the application has."""
    for router in routers:
        app.router.routes.extend(router.routes)
    app.router.middleware_stack = _Shortcut(app.router)


class _Shortcut:
    """Finds a route among those that begin alike: trying all of them takes longer than many an answer. What is not
    among them (another method, a mount, no such address) goes the long way."""

    def __init__(self, router: APIRouter) -> None:
        self._long_way = router.middleware_stack
        self._alike: dict[str, list[Route]] = {}
        for route in router.routes:
            if isinstance(route, Route) and not _beginning(route.path).startswith("{"):
                self._alike.setdefault(_beginning(route.path), []).append(route)

    def find(self, scope: Scope) -> tuple[Route, Scope] | None:
        """The route and what it reads in the path."""
        for route in self._alike.get(_beginning(scope["path"]), ()):
            match, read = route.matches(scope)
            if match is Match.FULL:
                return route, read
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        found = self.find(scope) if scope["type"] == "http" else None
        if found is None:
            await self._long_way(scope, receive, send)
        else:
            scope.update(found[1])
            await found[0].handle(scope, receive, send)


def _beginning(path: str) -> str:
    """The first part of a path that is not the API's own."""
    return path.removeprefix(API).partition("/")[2].partition("/")[0]
