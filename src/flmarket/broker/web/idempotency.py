"""Writes that can be repeated: with the same `Idempotency-Key`, the first answer comes back and nothing happens twice.

Another request under the same key is refused (422), and so is a second one while the first is under way (409). Only
successes are kept; after an error the key is free again. An answer that holds a secret is not kept: its repetition is
refused. If the service died in between, the key can be used again after a minute; what creates something under such a
key derives the new id from caller and key, so that the repetition finds what the first call made, and refuses another
request for as long as that is there.
"""

import hashlib
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Header, Request, Response
from fastapi.routing import APIRoute
from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError
from starlette.concurrency import run_in_threadpool

from flmarket.broker.core import Broker, Party
from flmarket.broker.errors import Conflict, KeyReused
from flmarket.broker.stamps import now
from flmarket.broker.tables import IdempotentCall
from flmarket.broker.web.auth import SAFE, authenticate, get_broker

_PATTERN = r"^[!-~]{1,80}$"
_ABANDONED_MS = 60_000
_MOST_KEPT = 1 << 20

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", pattern=_PATTERN, description="Repeat a write safely: the same key, the same answer."
    ),
]


class IdempotentRoute(APIRoute):
    """A route whose writes honour the key."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, behind the memory of former answers."""
        original = super().get_route_handler()

        async def handler(request: Request) -> Response:
            key = request.headers.get("idempotency-key")
            if request.method in SAFE or key is None or not re.fullmatch(_PATTERN, key):
                return await original(request)  # a malformed key is refused there, like any malformed field
            head = f"{request.method}\n{request.url.path}\n{request.url.query}\n".encode()
            digest = hashlib.sha256(head + await request.body()).hexdigest()
            party, broker = (await run_in_threadpool(authenticate, request)).party, get_broker(request)
            kept = await run_in_threadpool(_begin, broker, party, key, digest)
            if kept is not None:
                return kept
            try:
                response = await original(request)
            except BaseException:
                await run_in_threadpool(_forget, broker, party, key)
                raise
            if 200 <= response.status_code < 300 and len(response.body) <= _MOST_KEPT:
                secret = getattr(request.state, "secret_answer", False)
                await run_in_threadpool(_finish, broker, party, key, response, secret)
            else:
                await run_in_threadpool(_forget, broker, party, key)
            return response

        return handler


def keep_secret(request: Request) -> None:
    """This answer holds a secret: do not keep it."""
    request.state.secret_answer = True


def _begin(broker: Broker, party: Party, key: str, digest: str) -> Response | None:
    try:
        with broker.database.write() as session:
            known, at = session.get(IdempotentCall, (party.id, key)), now()
            if known is None:
                session.add(IdempotentCall(party_id=party.id, key=key, request=digest, at=at))
                return None
            age = at - known.at
            old = age > 1000 * broker.settings.idempotency_seconds or (known.status is None and age > _ABANDONED_MS)
            if not old:
                return _kept(known, digest)
            known.request, known.status, known.at = digest, None, at
    except IntegrityError:
        raise Conflict("a request with this idempotency key is under way") from None
    return None


def _kept(known: IdempotentCall, digest: str) -> Response:
    if known.request != digest:
        raise KeyReused("this idempotency key belongs to another request")
    if known.status is None:
        raise Conflict("a request with this idempotency key is under way")
    if known.body is None:
        raise Conflict("this was done already; its answer held a secret and is not kept")
    return Response(known.body, known.status, {"Idempotent-Replayed": "true"}, known.media_type)


def _finish(broker: Broker, party: Party, key: str, response: Response, secret: bool) -> None:
    with broker.database.write() as session:
        known = session.get_one(IdempotentCall, (party.id, key))
        known.status = response.status_code
        known.body = None if secret else bytes(response.body)
        known.media_type = response.headers.get("content-type")


def _forget(broker: Broker, party: Party, key: str) -> None:
    with broker.database.write() as session:
        session.execute(delete(IdempotentCall).where(IdempotentCall.party_id == party.id, IdempotentCall.key == key))
