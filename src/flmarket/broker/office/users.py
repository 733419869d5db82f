"""A party's people: who may sign in for her, and what each of them may do.

An admin (or the operator) enters somebody by name and mail address. She signs in with the operator's identity provider;
the first time she is found by her address, if the provider says that it is verified, and from then on by what the
provider calls her (`issuer`, `sub`), which never changes hands. Nobody gets in who was not entered.

What would break it: a provider that calls addresses verified that are not.
"""

from sqlalchemy import select
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker, Party, require_admin
from flmarket.broker.errors import Conflict, Unauthenticated
from flmarket.broker.office.operator import note
from flmarket.broker.office.parties import as_party
from flmarket.broker.office.sessions import SignedIn, start_session
from flmarket.broker.requests import RightsRequest, UserRequest, check_visible
from flmarket.broker.stamps import keyed_id, now
from flmarket.broker.tables import PartyRow, SessionRow, User, as_wire, how_many, made_before, row_of
from flmarket.client import wire

_MOST = 200
_STRANGER = "nobody entered you here: ask an admin of your organisation, or the operator"


def add_user(broker: Broker, party: Party, party_id: str, request: UserRequest, *, key: str | None = None) -> wire.User:
    """Enter somebody of one's own party, or as the operator of any; the same `key` does it once."""
    require_admin(party, of=party_id)
    check_visible("name", request.name)
    user_id, email = keyed_id("u", party.id, key), request.email.lower()
    with broker.database.write() as session:
        row_of(session, PartyRow, party_id, "party")
        row = made_before(session, User, user_id, "person", party_id=party_id, email=email)
        if row is None:
            there = User.removed_at.is_(None)
            if session.scalars(select(User.id).where(User.email == email, there)).first() is not None:
                raise Conflict("somebody with this address is entered already")
            if how_many(session, User.party_id == party_id, there) >= _MOST:
                raise Conflict(f"a party has at most {_MOST} people")
            row = User(id=user_id, party_id=party_id, name=request.name, email=email, rights=request.rights)
            row.created_at, row.issuer, row.subject, row.removed_at = now(), None, None, None
            session.add(row)
            note(session, party, "user.add", user_id, detail=f"{request.rights} of {party_id}")
    return _view(row)


def list_users(broker: Broker, party: Party) -> wire.UserPage:
    """One's own party's people."""
    mine = User.party_id == party.id, User.removed_at.is_(None)
    with broker.database.read() as session:
        rows = session.scalars(select(User).where(*mine).order_by(User.name, User.id)).all()
    return wire.UserPage(tuple(map(_view, rows)))


def set_rights(broker: Broker, party: Party, user_id: str, request: RightsRequest) -> wire.User:
    """What she may do from her next click on; nobody changes her own."""
    require_admin(party)
    with broker.database.write() as session:
        row = _own(session, party, user_id)
        row.rights = request.rights
        note(session, party, "user.rights", user_id, detail=request.rights)
    return _view(row)


def remove_user(broker: Broker, party: Party, user_id: str) -> wire.User:
    """She is signed out at once, and cannot sign in any more; nobody removes herself."""
    require_admin(party)
    with broker.database.write() as session:
        row = _own(session, party, user_id)
        row.removed_at = now()
        for one in session.scalars(select(SessionRow).where(SessionRow.user_id == user_id)):
            session.delete(one)
        note(session, party, "user.remove", user_id)
    return _view(row)


def sign_in_as(broker: Broker, *, issuer: str, subject: str, email: str | None) -> SignedIn:
    """A session for whom the identity provider vouches; `email` only if it says that it is verified."""
    there = User.removed_at.is_(None)
    with broker.database.write() as session:
        row = session.scalars(select(User).where(User.issuer == issuer, User.subject == subject, there)).first()
        if row is None and email:
            unknown = User.email == email.lower(), User.issuer.is_(None), there
            row = session.scalars(select(User).where(*unknown).with_for_update()).first()
            if row is not None:
                row.issuer, row.subject = issuer, subject
        party = None if row is None else session.get_one(PartyRow, row.party_id)
        if row is None or party is None or not party.active:
            raise Unauthenticated(_STRANGER)
        who = as_party(party, None, row)
    return start_session(broker, who, "sign-in.oidc")


def _own(session: Session, party: Party, user_id: str) -> User:
    row = row_of(session, User, user_id, "user", of=party.id)
    if user_id == party.user_id:
        raise Conflict("you cannot do this to yourself: another admin can")
    return row


def _view(row: User) -> wire.User:
    return as_wire(wire.User, row, known=row.subject is not None)
