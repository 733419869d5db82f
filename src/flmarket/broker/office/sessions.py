"""Signing in to the pages: a key, or a link that the operator handed out, exchanged for a session.

The cookie's value is 256 random bits of which only a SHA-256 is stored. Each session has a token against forged
requests; whoever writes by cookie must send it too. A session that a key began ends with the key, one of a person when
she is removed.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, select

from flmarket.broker.core import Broker, Party
from flmarket.broker.errors import NotFound, Unauthenticated
from flmarket.broker.office.operator import note
from flmarket.broker.office.parties import acts, as_party, may_act, party_of_key
from flmarket.broker.stamps import new_secret, now
from flmarket.broker.tables import ApiKey, PartyRow, Rights, SessionRow, SignInLink, User, as_wire
from flmarket.client import wire

_SHORT = 20  # characters of a session's stored hash that name it to its owner
_LISTED = 200


@dataclass(frozen=True)
class SignedIn:
    """A session as its browser knows it: `cookie` is a secret."""

    cookie: str
    view: wire.Session


def sign_in(broker: Broker, key: str) -> SignedIn:
    """A session for the holder of this key, for as long as the key is valid."""
    return start_session(broker, party_of_key(broker, key), "sign-in.key")


def make_link(broker: Broker, party_id: str, *, seconds: float = 600.0, reusable: bool = False) -> str:
    """A token that signs a party in; the operator passes it on. Works once unless reusable."""
    token = new_secret()
    with broker.database.write() as session:
        expires = now() + int(seconds * 1000)
        session.add(SignInLink(id=_digest(token), party_id=party_id, expires_at=expires, reusable=reusable))
    return token


def link_path(token: str) -> str:
    """Where the pages redeem a token."""
    return f"/sign-in/{token}"


def redeem_link(broker: Broker, token: str) -> SignedIn:
    """A session for the party whose link this is."""
    with broker.database.write() as session:
        link = session.get(SignInLink, _digest(token))
        party = None if link is None else session.get(PartyRow, link.party_id)
        if link is None or party is None or not party.active or link.expires_at < now():
            raise Unauthenticated("the link is not valid any more")
        if not link.reusable:
            session.delete(link)
    return start_session(broker, as_party(party), "sign-in.link")


def session_of(broker: Broker, cookie: str) -> tuple[Party, wire.Session]:
    """Who is signed in with this cookie."""
    with broker.database.ask() as connection:
        found = _valid_session(connection, cookie)
    if found is None:
        raise Unauthenticated("the session is not valid any more: sign in again")
    rights: Rights = "admin" if found.user_id is None else found.rights
    who = Party(found.id, found.role, found.name, found.key_id, found.user_id, rights)
    return who, _view(found, found, who)


def still_signed_in(broker: Broker, party: Party, cookie: str | None) -> bool:
    """Whether what a party came with, a key or this cookie, still holds: for what goes on after the request began."""
    with broker.database.read() as session:
        return may_act(session, party) if cookie is None else _valid_session(session.connection(), cookie) is not None


def sign_out(broker: Broker, party: Party, cookie: str) -> None:
    """End the session."""
    with broker.database.write() as session:
        session.execute(delete(SessionRow).where(SessionRow.id == _digest(cookie), SessionRow.party_id == party.id))
        note(session, party, "sign-out")


def start_session(broker: Broker, party: Party, action: str) -> SignedIn:
    """A session for somebody who has shown who she is."""
    cookie, at = new_secret(), now()
    row = SessionRow(id=_digest(cookie), party_id=party.id, key_id=party.key_id, csrf=new_secret(), created_at=at)
    row.user_id = party.user_id
    row.expires_at = at + int(broker.settings.session_seconds * 1000)
    with broker.database.write() as session:
        if not may_act(session, party):
            raise Unauthenticated("the key is not valid any more")  # revoked in between
        session.execute(delete(SessionRow).where(SessionRow.expires_at < at))
        session.add(row)
        found = session.get_one(PartyRow, party.id)
        note(session, party, action)
    return SignedIn(cookie, _view(row, found, party))


def list_sessions(broker: Broker, party: Party, cookie: str | None = None) -> wire.SessionPage:
    """One's own open sessions, or for an admin all of her party's; `cookie` says which is the one that asks."""
    mine = SessionRow.party_id == party.id, SessionRow.expires_at >= now()
    query = select(SessionRow).where(*mine).order_by(SessionRow.created_at.desc())
    if party.rights != "admin":
        query = query.where(SessionRow.user_id == party.user_id)
    here = None if cookie is None else _digest(cookie)
    with broker.database.read() as session:
        rows = session.scalars(query.limit(_LISTED)).all()
        names = {row.user_id: session.get_one(User, row.user_id).name for row in rows if row.user_id is not None}
    items = []
    for row in rows:
        how = "key" if row.key_id else "link" if row.user_id is None else "single sign-on"
        shown = {"id": row.id[:_SHORT], "user": names.get(row.user_id or "", ""), "how": how, "current": row.id == here}
        items.append(as_wire(wire.OpenSession, row, **shown))
    return wire.SessionPage(tuple(items))


def end_session(broker: Broker, party: Party, session_id: str) -> None:
    """End a session of one's own, or as an admin any of one's party's, at once."""
    if len(session_id) != _SHORT:
        raise NotFound("session", session_id)
    found = SessionRow.party_id == party.id, SessionRow.id.startswith(session_id, autoescape=True)
    with broker.database.write() as session:
        row = session.scalars(select(SessionRow).where(*found)).one_or_none()
        if row is None or (party.rights != "admin" and row.user_id != party.user_id):
            raise NotFound("session", session_id)
        session.delete(row)
        note(session, party, "session.end", party.id)


_SESSION = (
    select(PartyRow.__table__, SessionRow.key_id, SessionRow.user_id, SessionRow.csrf, SessionRow.expires_at)
    .add_columns(User.rights)
    .join(PartyRow, PartyRow.id == SessionRow.party_id)
    .outerjoin(ApiKey, ApiKey.id == SessionRow.key_id)
    .outerjoin(User, User.id == SessionRow.user_id)
    .where(SessionRow.id == bindparam("id"), SessionRow.expires_at >= bindparam("now"))
    .where(acts(SessionRow.key_id, SessionRow.user_id))
)


def _valid_session(connection: Connection, cookie: str) -> Row[Any] | None:
    """A session with its party, as the database has them now, with every request."""
    return connection.execute(_SESSION, {"id": _digest(cookie), "now": now()}).one_or_none()


def _view(row: SessionRow | Row[Any], party: PartyRow | Row[Any], who: Party) -> wire.Session:
    return as_wire(wire.Session, row, party=as_wire(wire.Party, party), rights=who.rights)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
