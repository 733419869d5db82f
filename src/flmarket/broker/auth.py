"""Who is asking: an API key in the Authorization header, or a session cookie; for the API and the pages alike.

A cookie is sent by browsers whether or not the person meant it, so a write that comes with one must also carry the
session's token (header `X-CSRF-Token`, or the form field that pages pass to `check_csrf`).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.security import APIKeyCookie, HTTPBearer

from flmarket.broker.core import Broker, Party
from flmarket.broker.errors import Forbidden, Unauthenticated
from flmarket.broker.limits import Buckets, Streams
from flmarket.broker.services.parties import party_of_key
from flmarket.broker.services.sessions import SignedIn, session_of
from flmarket.broker.services.views import SessionView
from flmarket.broker.settings import Settings

__all__ = [
    "COOKIE",
    "Auth",
    "CurrentParty",
    "Gate",
    "authenticate",
    "check_csrf",
    "clear_cookie",
    "get_broker",
    "set_cookie",
]

COOKIE = "flmarket_session"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Auth:
    """Who is asking, and the session if it is a browser."""

    party: Party
    session: SessionView | None = None
    cookie: str | None = None


class Gate:
    """The limits at the door, one for each service."""

    def __init__(self, settings: Settings) -> None:
        self.parties = Buckets(settings.requests_per_second, settings.request_burst)
        self.strangers = Buckets(settings.anonymous_requests_per_second, settings.anonymous_burst)
        self.sign_ins = Buckets(settings.sign_ins_per_minute / 60, settings.sign_ins_per_minute)
        self.streams = Streams(settings.max_streams, settings.max_streams_per_party)


def get_broker(request: Request) -> Broker:
    """The service's broker."""
    broker: Broker = request.app.state.broker
    return broker


def get_gate(request: Request) -> Gate:
    """The service's limits."""
    gate: Gate = request.app.state.gate
    return gate


def client_address(request: Request) -> str:
    """The peer's address, for limits."""
    return request.client.host if request.client else "unknown"


def authenticate(request: Request) -> Auth:
    """Who is asking, once for each request; Unauthenticated, Forbidden or TooMany otherwise."""
    known: Auth | None = getattr(request.state, "auth", None)
    if known is not None:
        return known
    broker, gate = get_broker(request), get_gate(request)
    try:
        auth = _identify(request, broker)
    except Unauthenticated:
        gate.strangers.take(client_address(request))
        raise
    gate.parties.take(auth.party.id)
    request.state.auth = auth
    if auth.session is not None and request.method not in SAFE:
        check_csrf(auth, request.headers.get("x-csrf-token", ""))
    return auth


def check_csrf(auth: Auth, token: str) -> None:
    """Forbidden unless the token is the session's."""
    if auth.session is not None and not hmac.compare_digest(token.encode(), auth.session.csrf.encode()):
        raise Forbidden("the CSRF token is missing or wrong: reload the page")


def set_cookie(response: Response, settings: Settings, signed_in: SignedIn) -> None:
    """Hand the session to the browser: not readable by scripts, not sent from other sites."""
    response.set_cookie(
        COOKIE,
        signed_in.cookie,
        max_age=int(settings.session_seconds),
        httponly=True,
        samesite="lax",
        secure=settings.secure_cookies,
        path="/",
    )


def clear_cookie(response: Response, settings: Settings) -> None:
    """Take the session from the browser."""
    response.delete_cookie(COOKIE, httponly=True, samesite="lax", secure=settings.secure_cookies, path="/")


def _identify(request: Request, broker: Broker) -> Auth:
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("send your key as: Authorization: Bearer flm_…")
        return Auth(party_of_key(broker, key.strip()))
    cookie = request.cookies.get(COOKIE)
    if cookie:
        party, session = session_of(broker, cookie)
        return Auth(party, session, cookie)
    raise Unauthenticated("sign in, or send a key as: Authorization: Bearer flm_…")


_bearer = HTTPBearer(auto_error=False, description="An API key: flm_<id>_<secret>", bearerFormat="flm_…")
_cookie = APIKeyCookie(name=COOKIE, auto_error=False, description="A session from POST /api/v1/session")


def current_auth(
    request: Request, _key: Annotated[object, Depends(_bearer)], _session: Annotated[object, Depends(_cookie)]
) -> Auth:
    """`authenticate` as a dependency; the two schemes are there for the API's description."""
    return authenticate(request)


# Dependencies that wait for nothing are coroutines: FastAPI would hand a plain function to a thread.
async def current_party(auth: Annotated[Auth, Depends(current_auth)]) -> Party:
    """The party alone."""
    return auth.party


async def current_broker(request: Request) -> Broker:
    """`get_broker` as a dependency."""
    return get_broker(request)


CurrentAuth = Annotated[Auth, Depends(current_auth)]
CurrentParty = Annotated[Party, Depends(current_party)]
CurrentBroker = Annotated[Broker, Depends(current_broker)]
