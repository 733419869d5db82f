"""What every request passes: a limit on its body, headers that keep browsers strict, a count and one line in the log.

Written against ASGI itself, so that event streams are not buffered. The log has the route's template, never the path
or the query: those may hold a sign-in token.
"""

import logging
import time
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flmarket.broker.core import Metrics
from flmarket.broker.errors import TooLarge
from flmarket.broker.web.problems import problem

access = logging.getLogger("flmarket.access")

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
_NO_STORE = (b"cache-control", b"no-store")


class BodyLimit:
    """Reads the body up to the limit, then hands it on; 413 beyond, to people as `page` says it."""

    def __init__(self, app: ASGIApp, most: int, page: Callable[[Request, str], Response]) -> None:
        self.app, self.most, self.page = app, most, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        body, more = bytearray(), True
        too_large = not declared.isdigit() or int(declared) > self.most
        while more and not too_large:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client went away
            body += message.get("body", b"")
            more = message.get("more_body", False)
            too_large = len(body) > self.most
        if too_large:
            refusal = TooLarge(f"a body has at most {self.most} bytes")
            answer: Response = problem(refusal.status, refusal.title, str(refusal))
            if not scope["path"].startswith("/api/"):
                told = f"At most {self.most // 1024:,} KiB can be sent at once. Nothing was changed."
                answer = await run_in_threadpool(self.page, Request(scope), told)
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        handed = False

        async def whole() -> Message:
            nonlocal handed
            if handed:
                return await receive()
            handed = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self.app(scope, whole, send)


class Observe:
    """Counts and times every request by its route, and writes one line to the log. Every answer has strict headers, and
    answers about parties are not stored by anybody."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started = 500, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, given = message["status"], {name for name, _ in message["headers"]}
                strict = _HEADERS if scope["path"].startswith("/static/") else (*_HEADERS, _NO_STORE)
                message["headers"] = [*message["headers"], *(one for one in strict if one[0] not in given)]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            seconds, route = time.perf_counter() - started, getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.requests.labels(method, route, str(status)).inc()
            self.metrics.latency.labels(method, route).observe(seconds)
            auth = scope.get("state", {}).get("auth")
            party = "-" if auth is None else auth.party.id
            access.info("%s %s %d %.1fms %s", method, route, status, 1000 * seconds, party)
