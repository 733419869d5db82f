"""Parties, their keys and their money.

A key is `flm_<id>_<secret>`, the secret 256 random bits, stored as an HMAC-SHA256 under a secret of the service. A slow
hash protects what people can remember; 256 random bits cannot be guessed at any speed, so a fast hash is right: every
request looks at the key as the database has it now, and a revoked one is refused at once, in every process. What would
break it: secrets that are not random. Older versions stored argon2id hashes; those are checked as they are, and
replaced when their key is next used.
"""

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Connection, SQLColumnExpression, String, bindparam, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker, Party, require, require_admin
from flmarket.broker.errors import ANSWERED, Conflict, KeyReused, Unauthenticated
from flmarket.broker.office.operator import note
from flmarket.broker.office.pseudonyms import reputations
from flmarket.broker.requests import DEFAULT_CAP_TOTAL, check_visible
from flmarket.broker.stamps import keyed_id, new_secret, now
from flmarket.broker.tables import (
    ApiKey,
    PartyRow,
    Role,
    SessionRow,
    SignInLink,
    TaskRow,
    User,
    as_wire,
    how_many,
    row_of,
)
from flmarket.client import wire
from flmarket.errors import SettlementError
from flmarket.privacy import PureDp


def create_party(broker: Broker, party: Party | None, *, role: Role, name: str, key: str | None = None) -> wire.Party:
    """The operator's: a new party; without a party, the service's own (first start, demo). The same `key` makes one."""
    if party is not None:
        require(party, "operator")
    check_visible("name", name)
    row = PartyRow(id=_keyed_id("p", party, key), role=role, name=name, created_at=now(), active=True)
    if role == "owner":
        with broker.database.read() as session:
            known = session.get(PartyRow, row.id)
        if known is None:  # else she may have changed it
            broker.books.ledger.register_cap(row.id, PureDp(DEFAULT_CAP_TOTAL))
    try:
        with broker.database.write() as session:
            session.add(row)
            note(session, party, "party.create", row.id, detail=role)
    except IntegrityError:  # the key came back
        with broker.database.read() as session:
            row = row_of(session, PartyRow, row.id, "party")
        if (row.role, row.name) != (role, name):
            raise KeyReused("this idempotency key belongs to another party") from None
    return as_wire(wire.Party, row)


def _keyed_id(kind: str, caller: Party | None, key: str | None) -> str:
    return keyed_id(kind, "" if caller is None else caller.id, key)


def my_view(broker: Broker, party: Party) -> wire.Party:
    """Who one is."""
    with broker.database.read() as session:
        return as_wire(wire.Party, row_of(session, PartyRow, party.id, "party"))


def list_parties(
    broker: Broker, party: Party, *, limit: int = 100, after: str | None = None, search: str = "", start: int = 0
) -> wire.PartyPage:
    """The operator's: all parties in the order of their ids, or those whose name or id holds `search`; from one on, or
    from the `start`-th on."""
    require(party, "operator")
    matches = PartyRow.name.icontains(search, autoescape=True) | PartyRow.id.startswith(search, autoescape=True)
    query = select(PartyRow).where(matches) if search else select(PartyRow)
    counted = select(func.count()).select_from(query.subquery())
    query = query.order_by(PartyRow.id).limit(limit + 1).offset(start)
    if after is not None:
        query = query.where(PartyRow.id > after)
    with broker.database.read() as session:
        rows = session.scalars(query).all()
        total = session.scalar(counted) or 0
        known = reputations(session, [row.id for row in rows[:limit] if row.role == "owner"])
    items = tuple(as_wire(wire.Party, row) for row in rows[:limit])
    return wire.PartyPage(items, items[-1].id if len(rows) > limit else None, total, known)


def reputation_of(broker: Broker, party: Party, party_id: str) -> wire.Reputation | None:
    """The operator's: how reliably an owner delivers; None of others."""
    require(party, "operator")
    with broker.database.read() as session:
        known = reputations(session, [party_id] if row_of(session, PartyRow, party_id, "party").role == "owner" else [])
    return known.get(party_id)


def party_view(broker: Broker, party: Party, party_id: str) -> tuple[wire.Party, wire.Account, wire.KeyPage]:
    """The operator's: one party with her money and her keys."""
    require(party, "operator")
    with broker.database.read() as session:
        row = row_of(session, PartyRow, party_id, "party")
    her = as_party(row)
    return as_wire(wire.Party, row), account(broker, her), list_keys(broker, her)


def reissue_key(broker: Broker, party: Party, party_id: str, *, key: str | None = None) -> wire.NewKey:
    """The operator's: all keys and sessions of a party end, and she gets a new key, whose secret is returned this once.
    The same `key` does it once: a repetition is refused."""
    require(party, "operator")
    require_admin(party)
    at, key_id = now(), _keyed_id("k", party, key)
    with broker.database.write() as session:
        _check_still_valid(session, party)
        row_of(session, PartyRow, party_id, "party")
        if session.get(ApiKey, key_id) is not None:
            raise Conflict("this was done already; the key was shown that once, so make another one if it is lost")
        live = ApiKey.party_id == party_id, ApiKey.revoked_at.is_(None)
        session.execute(update(ApiKey).where(*live).values(revoked_at=at))
        session.execute(delete(SessionRow).where(SessionRow.party_id == party_id))
        session.execute(delete(SignInLink).where(SignInLink.party_id == party_id))
        note(session, party, "key.reissue", party_id)
        return _add_key(broker, session, party, party_id, key_id, "reissued")


def set_active(broker: Broker, party: Party, party_id: str, *, active: bool) -> wire.Party:
    """The operator closes or reopens a party; nobody closes herself."""
    require(party, "operator")
    if party_id == party.id:
        raise Conflict("you cannot close or reopen yourself")
    with broker.database.write() as session:
        row = row_of(session, PartyRow, party_id, "party")
        row.active = active
        note(session, party, "party.open" if active else "party.close", party_id)
    return as_wire(wire.Party, row)


def bind_node(broker: Broker, party: Party, party_id: str, *, node_id: str, number: int | None = None) -> wire.Party:
    """The operator says which SuperNode is an owner's: the id that `flwr supernode register` printed for her key.

    She gets a number for life, which her own configuration names too; the next one unless `number` is given.
    """
    require(party, "operator")
    try:
        with broker.database.write() as session:
            row = row_of(session, PartyRow, party_id, "party")
            if row.role != "owner":
                raise Conflict(f"{party_id} is no owner")
            if row.owner_number is None:
                largest = session.scalar(select(func.max(PartyRow.owner_number)))
                row.owner_number = number if number is not None else 0 if largest is None else largest + 1
            elif number not in (None, row.owner_number):
                raise Conflict(f"{party_id} is owner {row.owner_number} for good")
            if row.node_id != node_id:
                row.node_id = node_id
                note(session, party, "node.bind", party_id, detail=f"node {node_id}, owner {row.owner_number}")
    except IntegrityError:
        raise Conflict("this node or this number is another owner's") from None
    return as_wire(wire.Party, row)


def unbind_node(broker: Broker, party: Party, party_id: str) -> wire.Party:
    """The owner takes no part in further rounds of Flower tasks; her number stays hers."""
    require(party, "operator")
    with broker.database.write() as session:
        row = row_of(session, PartyRow, party_id, "party")
        if row.node_id is not None:
            note(session, party, "node.unbind", party_id, detail=f"node {row.node_id}")
            row.node_id = None
    return as_wire(wire.Party, row)


def issue_key(broker: Broker, party: Party | None, party_id: str, *, label: str, key: str | None = None) -> wire.NewKey:
    """A new key, whose secret is returned this once; for oneself, or by the operator for anybody.

    The same idempotency `key` makes one: if its answer was lost, Conflict, and a key to revoke.
    """
    if party is not None:
        require_admin(party, of=party_id)
    key_id = _keyed_id("k", party, key)
    with broker.database.write() as session:
        if party is not None:
            _check_still_valid(session, party)
        row_of(session, PartyRow, party_id, "party")
        if session.get(ApiKey, key_id) is not None:
            raise Conflict(ANSWERED)
        valid, most = (ApiKey.party_id == party_id, ApiKey.revoked_at.is_(None)), broker.settings.max_keys_per_party
        if how_many(session, *valid) >= most:
            raise Conflict(f"a party has at most {most} valid keys: revoke one first")
        return _add_key(broker, session, party, party_id, key_id, label)


def _check_still_valid(session: Session, party: Party) -> None:
    if not may_act(session, party):
        raise Unauthenticated("the key is not valid any more")  # revoked since the request came in


def _add_key(
    broker: Broker, session: Session, party: Party | None, party_id: str, key_id: str, label: str
) -> wire.NewKey:
    secret = new_secret()
    hashed = hash_secret(broker.secrets.keys, key_id, secret)
    session.add(ApiKey(id=key_id, party_id=party_id, label=label, hash=hashed, created_at=now()))
    note(session, party, "key.create", key_id, detail=party_id)
    return wire.NewKey(key_id, label, format_key(key_id, secret))


def list_keys(broker: Broker, party: Party) -> wire.KeyPage:
    """One's own keys, without secrets."""
    with broker.database.read() as session:
        rows = session.scalars(select(ApiKey).where(ApiKey.party_id == party.id).order_by(ApiKey.created_at)).all()
    return wire.KeyPage(tuple(as_wire(wire.Key, row) for row in rows))


def revoke_key(broker: Broker, party: Party, key_id: str) -> wire.Key:
    """One's own key stops working at once, and with it every session that came from it."""
    require_admin(party)
    with broker.database.write() as session:
        row = row_of(session, ApiKey, key_id, "key", of=party.id)
        if row.revoked_at is None:
            row.revoked_at = now()
            session.execute(delete(SessionRow).where(SessionRow.key_id == key_id))
            note(session, party, "key.revoke", key_id)
    return as_wire(wire.Key, row)


def party_of_key(broker: Broker, key: str, *, before_slow_work: Callable[[], None] = lambda: None) -> Party:
    """Whose key this is; Unauthenticated for any key that is not valid now.

    `before_slow_work` is called, and may refuse, before a hash of an older version, which takes milliseconds.
    """
    parts = split_key(key)
    with broker.database.ask() as connection:
        found = None if parts is None else _valid_key(connection, parts[0])
    if parts is None or found is None:
        raise Unauthenticated("the key is not valid")
    stored, party = found
    if is_slow(stored):
        before_slow_work()
    if not verify_secret(broker.secrets.keys, parts[0], stored, parts[1]):
        raise Unauthenticated("the key is not valid")
    if is_slow(stored):  # store today's hash, unless the key was revoked meanwhile
        with broker.database.write() as session:
            if _valid_key(session.connection(), parts[0]) is None:
                raise Unauthenticated("the key is not valid")
            session.get_one(ApiKey, parts[0]).hash = hash_secret(broker.secrets.keys, *parts)
    return party


def may_act(session: Session, party: Party) -> bool:
    """Whether the party is active, and the key or the person that she came as still valid."""
    came = {"party": party.id, "key": party.key_id, "user": party.user_id}
    return session.connection().execute(_MAY_ACT, came).first() is not None


_KEY_HOLDS = ApiKey.id.is_not(None) & ApiKey.revoked_at.is_(None)
_PERSON_HOLDS = User.id.is_not(None) & User.removed_at.is_(None)


def acts(key_id: SQLColumnExpression[Any], user_id: SQLColumnExpression[Any]) -> ColumnElement[bool]:
    """That a party is not closed, nor the key or the person revoked that somebody came as, if she came as one."""
    return PartyRow.active & (key_id.is_(None) | _KEY_HOLDS) & (user_id.is_(None) | _PERSON_HOLDS)


_key_id, _user_id = bindparam("key", type_=String), bindparam("user", type_=String)
_MAY_ACT = (
    select(PartyRow.id)
    .outerjoin(ApiKey, ApiKey.id == _key_id)
    .outerjoin(User, User.id == _user_id)
    .where(PartyRow.id == bindparam("party"), acts(_key_id, _user_id))
)


def account(broker: Broker, party: Party) -> wire.Account:
    """One's own money: the balance, and what running tasks hold in escrow."""
    escrow = 0
    if party.role == "buyer":
        with broker.database.read() as session:
            escrow = int(session.scalar(_ESCROW, {"buyer": party.id}) or 0)
    return wire.Account(party.id, broker.books.ledger.balance(party.id), escrow)


_ESCROW = select(
    func.coalesce(func.sum(TaskRow.escrow_micros - TaskRow.spent_micros - TaskRow.refunded_micros), 0)
).where(TaskRow.buyer_id == bindparam("buyer"))  # of tasks that have ended only what is in dispute is left


def deposit(
    broker: Broker, party: Party | None, party_id: str, amount_micros: int, *, key: str | None = None
) -> wire.Account:
    """The operator books money that a buyer paid in; the same `key` of the same operator books it once."""
    if party is not None:
        require(party, "operator")
    with broker.database.read() as session:
        row = row_of(session, PartyRow, party_id, "party")
    if row.role != "buyer":
        raise Conflict(f"{row.name} is no buyer: deposits are for buyers")
    identifier = _keyed_id("d", party, key)
    try:
        broker.books.ledger.deposit(identifier, party_id, amount_micros)
    except SettlementError as error:
        if key is None:
            raise
        raise KeyReused(f"this idempotency key belongs to another deposit, nothing was booked ({error})") from None
    with broker.database.write() as session:
        note(session, party, "deposit", party_id, detail=f"{amount_micros} micro-units, {identifier}")
    return account(broker, as_party(row))


def as_party(row: PartyRow, key_id: str | None = None, user: User | None = None) -> Party:
    """The row as services know it, with the person who acts for it."""
    if user is None:
        return Party(row.id, row.role, row.name, key_id)
    return Party(row.id, row.role, row.name, key_id, user.id, user.rights)


_VALID_KEY = (
    select(ApiKey.hash, PartyRow.id, PartyRow.role, PartyRow.name)
    .join(PartyRow, ApiKey.party_id == PartyRow.id)
    .where(ApiKey.id == bindparam("key"), PartyRow.active, _KEY_HOLDS)
)


def _valid_key(connection: Connection, key_id: str) -> tuple[str, Party] | None:
    """A key's hash and its party, if neither was revoked or closed: as the database has it now, with every request."""
    found = connection.execute(_VALID_KEY, {"key": key_id}).one_or_none()
    return None if found is None else (found.hash, Party(found.id, found.role, found.name, key_id))


# --- keys -------------------------------------------------------------------------------------------------------------

_PREFIX = "flm_"
_FAST, _SLOW = "hmac-sha256$", "$argon2"


def format_key(key_id: str, secret: str) -> str:
    """The key as its holder keeps it."""
    return f"{_PREFIX}{key_id.removeprefix('k_')}_{secret}"


def split_key(key: str) -> tuple[str, str] | None:
    """Key id and secret, or None for what is not a key."""
    if not key.startswith(_PREFIX) or len(key) > 200 or not key.isascii():
        return None
    key_id, separator, secret = key.removeprefix(_PREFIX).partition("_")
    return (f"k_{key_id}", secret) if separator and key_id and secret else None


def hash_secret(service_secret: bytes, key_id: str, secret: str) -> str:
    """What is stored."""
    return _FAST + hmac.new(service_secret, f"{key_id}\0{secret}".encode(), hashlib.sha256).hexdigest()


def is_slow(stored: str) -> bool:
    """Whether checking a secret against this hash takes milliseconds of work."""
    return stored.startswith(_SLOW)


def verify_secret(service_secret: bytes, key_id: str, stored: str, secret: str) -> bool:
    """Whether the secret belongs to the stored hash."""
    if not is_slow(stored):
        return hmac.compare_digest(stored.encode(), hash_secret(service_secret, key_id, secret).encode())
    from argon2 import PasswordHasher
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        return PasswordHasher().verify(stored, secret)
    except (Argon2Error, InvalidHashError):
        return False
