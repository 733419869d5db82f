"""Writes that can be repeated: with the same `Idempotency-Key`, the first answer comes back and nothing happens twice.

Another request under the same key is refused (422), and so is a second one while the first is under way (409). Only
successes are kept; after an error the key is free again. An answer that holds a secret is not kept: its repetition is
refused. If the service died in between, the key can be used again after a minute (`cut_off_seconds`). What creates
something under such a key derives the new id from caller and key, so that the repetition finds what the first call
made, and refuses another request for as long as that is there. If the service was not dead but slow, and wakes up after
the repetition has begun, it writes nothing more: every writing transaction under a key, the ledger's included, begins
with a check that the key is still this request's (`database.fenced`).
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Header, Request, Response
from sqlalchemy import ColumnElement, Connection, delete, select, update
from sqlalchemy.exc import IntegrityError

from flmarket.broker.core import Broker, Party
from flmarket.broker.database import fenced
from flmarket.broker.errors import ANSWERED, Conflict, KeyReused, UnderWay
from flmarket.broker.stamps import now
from flmarket.broker.tables import IdempotentCall
from flmarket.broker.web.auth import SAFE, authenticate, get_broker
from flmarket.broker.web.routes import Handler, OneThreadRoute

_PATTERN = r"^[!-~]{1,80}$"
_MOST_KEPT = 1 << 20
_UNDER_WAY = "a request with this idempotency key is under way"

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", pattern=_PATTERN, description="Repeat a write safely: the same key, the same answer."
    ),
]


class IdempotentRoute(OneThreadRoute):
    """A route whose writes honour the key."""

    def look(self, request: Request) -> None:
        """Who asks."""
        authenticate(request)

    async def answer(self, request: Request, handle: Handler) -> Response:
        """The answer, from the memory of former ones if it is there."""
        key = request.headers.get("idempotency-key")
        if request.method in SAFE or key is None or not re.fullmatch(_PATTERN, key):
            return await handle(request)  # a malformed key is refused there, like any malformed field
        head = f"{request.method}\n{request.url.path}\n{request.url.query}\n".encode()
        digest = hashlib.sha256(head + await request.body()).hexdigest()
        party, broker = (await self.work(authenticate, request)).party, get_broker(request)
        begun = await self.work(_begin, broker, party, key, digest)
        if isinstance(begun, Response):
            return begun
        try:
            with fenced(begun.check):
                response = await handle(request)
        except BaseException:
            await self.work(begun.forget)
            raise
        if 200 <= response.status_code < 300 and len(response.body) <= _MOST_KEPT:
            await self.work(begun.finish, response, getattr(request.state, "secret_answer", False))
        else:
            await self.work(begun.forget)
        return response


def keep_secret(request: Request) -> None:
    """This answer holds a secret: do not keep it."""
    request.state.secret_answer = True


@dataclass(frozen=True)
class _Begun:
    """A request that has its key; `at`, when it got it, tells it from one that takes the key over later."""

    broker: Broker
    party_id: str
    key: str
    at: int

    @property
    def _mine(self) -> tuple[ColumnElement[bool], ...]:
        mine = IdempotentCall.party_id == self.party_id, IdempotentCall.key == self.key, IdempotentCall.at == self.at
        return (*mine, IdempotentCall.status.is_(None))

    def check(self, connection: Connection) -> None:
        """UnderWay if a repetition has the key now; it cannot get it before the transaction ends."""
        if connection.scalar(select(IdempotentCall.at).where(*self._mine).with_for_update(read=True)) is None:
            raise UnderWay("this request took so long that a repetition of it was begun: ask again")

    def finish(self, response: Response, secret: bool) -> None:
        """Keep what was answered."""
        body, kind = None if secret else bytes(response.body), response.headers.get("content-type")
        with self.broker.database.write() as session:
            kept = {"status": response.status_code, "body": body, "media_type": kind}
            session.execute(update(IdempotentCall).where(*self._mine).values(**kept))

    def forget(self) -> None:
        """Free the key."""
        with self.broker.database.write() as session:
            session.execute(delete(IdempotentCall).where(*self._mine))


def _begin(broker: Broker, party: Party, key: str, digest: str) -> Response | _Begun:
    try:
        with broker.database.write() as session:
            known, at = session.get(IdempotentCall, (party.id, key), with_for_update=True), now()
            if known is None:
                session.add(IdempotentCall(party_id=party.id, key=key, request=digest, at=at))
                return _Begun(broker, party.id, key, at)
            age = at - known.at
            settings = broker.settings
            if age <= 1000 * (settings.cut_off_seconds if known.status is None else settings.idempotency_seconds):
                return _kept(known, digest)
            known.request, known.status, known.at = digest, None, at
            return _Begun(broker, party.id, key, at)
    except IntegrityError:
        raise UnderWay(_UNDER_WAY) from None


def _kept(known: IdempotentCall, digest: str) -> Response:
    if known.request != digest:
        raise KeyReused("this idempotency key belongs to another request")
    if known.status is None:
        raise UnderWay(_UNDER_WAY)
    if known.body is None:
        raise Conflict(ANSWERED)
    return Response(known.body, known.status, {"Idempotent-Replayed": "true"}, known.media_type)
