"""Who is asking: an API key in the Authorization header, or a session cookie; for the API and the pages alike.

A cookie is sent by browsers whether or not the person meant it, so a write that comes with one must also carry the
session's token (header `X-CSRF-Token`, or the form field that pages pass to `check_csrf`).

Strangers are counted by the address at the other end of the connection. What `X-Forwarded-For` says counts only if that
address is a proxy's that the operator named; a server in front of the application must not put it there by itself.
"""

import base64
import hmac
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

from fastapi import Depends, Request, Response
from fastapi.security import APIKeyCookie, HTTPBearer
from fastapi.security.base import SecurityBase

from flmarket.broker.core import Broker, Party
from flmarket.broker.errors import Forbidden, Unauthenticated
from flmarket.broker.office.parties import party_of_key
from flmarket.broker.office.sessions import SignedIn, session_of, still_signed_in
from flmarket.broker.settings import Settings
from flmarket.broker.web.limits import Buckets, HeavyWork, Streams
from flmarket.client import wire
from flmarket.errors import ConfigError

COOKIE = "flmarket_session"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_FOR_ALL = ("/sign-out", "/api/v1/session")


@dataclass(frozen=True)
class Auth:
    """Who is asking, and the session if it is a browser."""

    party: Party
    session: wire.Session | None = None
    cookie: str | None = None

    def still_holds(self, broker: Broker) -> bool:
        """Whether the key or the session is valid now, for whatever goes on after the request began."""
        return still_signed_in(broker, self.party, self.cookie)


class Gate:
    """The limits at the door, one for each service."""

    def __init__(self, settings: Settings) -> None:
        self.parties = Buckets(settings.requests_per_second, settings.request_burst)
        self.strangers = Buckets(settings.anonymous_requests_per_second, settings.anonymous_burst)
        self.sign_ins = Buckets(settings.sign_ins_per_minute / 60, settings.sign_ins_per_minute)
        self.streams = Streams(settings.max_streams, settings.max_streams_per_party)
        self.heavy = HeavyWork(settings.heavy_workers, settings.max_heavy_waiting)
        self.proxies = tuple(_network(one) for one in settings.trusted_proxies)


def get_broker(request: Request) -> Broker:
    """The service's broker."""
    broker: Broker = request.app.state.broker
    return broker


def get_gate(request: Request) -> Gate:
    """The service's limits."""
    gate: Gate = request.app.state.gate
    return gate


def client_address(request: Request) -> str:
    """Whose address limits count: the peer's, or what the trusted proxies say, the nearest of them first."""
    address, proxies = request.client.host if request.client else "unknown", get_gate(request).proxies
    if not proxies:
        return address
    said = [one.strip() for line in request.headers.getlist("x-forwarded-for") for one in line.split(",")]
    while said and _within(address, proxies):
        address = said.pop()
    return address[:64]


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        accepted = "an address such as 10.0.0.7, or a network such as 10.0.0.0/24"
        raise ConfigError("trusted proxy", text, accepted) from None


def _within(address: str, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    try:
        return any(ipaddress.ip_address(address) in network for network in networks)
    except ValueError:
        return False


def authenticate(request: Request) -> Auth:
    """Who is asking, once for each request; Unauthenticated, Forbidden or TooMany otherwise."""
    known: Auth | None = getattr(request.state, "auth", None)
    if known is not None:
        return known
    broker, gate = get_broker(request), get_gate(request)
    try:
        auth = _identify(request, broker, gate)
    except Unauthenticated:
        gate.strangers.take(client_address(request))
        raise
    gate.parties.take(auth.party.id)
    request.state.auth = auth
    check_rights(auth, request)
    if auth.session is not None and request.method not in SAFE:
        check_csrf(auth, request.headers.get("x-csrf-token", ""))
    return auth


def check_rights(auth: Auth, request: Request) -> None:
    """Forbidden if somebody who may only look wants to change something; signing out she may."""
    if auth.party.rights == "viewer" and request.method not in SAFE and request.url.path not in _FOR_ALL:
        raise Forbidden("you may look, not act: an admin of your organisation can change that")


def check_csrf(auth: Auth, token: str) -> None:
    """Forbidden unless the token is the session's, as it is or masked."""
    if auth.session is not None and not hmac.compare_digest(_unmasked(token.encode()), auth.session.csrf.encode()):
        raise Forbidden("the CSRF token is missing or wrong: reload the page")


def masked(token: str) -> str:
    """A session's token for one page: random, and different on each. Pages are compressed, and what is the same on all
    of them can be guessed from the lengths of many (the BREACH attack)."""
    text = token.encode()
    pad = secrets.token_bytes(len(text))
    return base64.urlsafe_b64encode(pad + _mixed(text, pad)).decode() if text else ""


def _unmasked(token: bytes) -> bytes:
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
    except ValueError:
        return token
    half = len(raw) // 2
    return _mixed(raw[half:], raw[:half]) if len(token) > 100 and len(raw) == 2 * half else token


def _mixed(text: bytes, pad: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(text, pad, strict=True))


def set_cookie(response: Response, settings: Settings, signed_in: SignedIn) -> None:
    """Hand the session to the browser: not readable by scripts, not sent from other sites."""
    age, secure = int(settings.session_seconds), settings.secure_cookies
    response.set_cookie(COOKIE, signed_in.cookie, max_age=age, httponly=True, samesite="lax", secure=secure, path="/")


def clear_cookie(response: Response, settings: Settings) -> None:
    """Take the session from the browser."""
    response.delete_cookie(COOKIE, httponly=True, samesite="lax", secure=settings.secure_cookies, path="/")


def _identify(request: Request, broker: Broker, gate: Gate) -> Auth:
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("send your key as: Authorization: Bearer flm_…")
        counted = partial(gate.strangers.take, client_address(request))
        return Auth(party_of_key(broker, key.strip(), before_slow_work=counted))
    cookie = request.cookies.get(COOKIE)
    if cookie:
        party, session = session_of(broker, cookie)
        return Auth(party, session, cookie)
    raise Unauthenticated("sign in, or send a key as: Authorization: Bearer flm_…")


class _Scheme(SecurityBase):
    """A dependency that the API's description shows as the need for a key; `COOKIE_SCHEME` does as well."""

    model = HTTPBearer(description="An API key: flm_<id>_<secret>", bearerFormat="flm_…").model
    scheme_name = "HTTPBearer"


COOKIE_SCHEME = APIKeyCookie(name=COOKIE, description="A session from POST /api/v1/session")


class _Caller(NamedTuple):
    """Broker and party, as services take them first."""

    broker: Broker
    party: Party


# Dependencies are coroutines that do not wait, as `routes` wants them; each that they had themselves would cost time.
class _AuthOf(_Scheme):
    async def __call__(self, request: Request) -> Auth:
        """`authenticate` as a dependency."""
        return authenticate(request)


class _CallerOf(_Scheme):
    async def __call__(self, request: Request) -> _Caller:
        """Who is asking, and whom."""
        return _Caller(get_broker(request), authenticate(request).party)


async def current_broker(request: Request) -> Broker:
    """`get_broker` as a dependency."""
    return get_broker(request)


CurrentAuth = Annotated[Auth, Depends(_AuthOf())]
Caller = Annotated[_Caller, Depends(_CallerOf())]
CurrentBroker = Annotated[Broker, Depends(current_broker)]
