"""The broker's own tables. Money and awards are not here: they are the ledger's, in the same database.

Times are milliseconds since 1970 (`stamps`), documents are JSON, vectors are bytes of little-endian float64. What a
round decided is copied into `releases` for listing; the ledger remains the authority on who was paid. A task's states:

    funding → queued → running → finished
                 │         ├───→ cancelled, expired (the deadline passed), failed
                 └─────────┘
"""

from dataclasses import fields
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnExpressionArgument,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Row,
    String,
    Text,
    UniqueConstraint,
    func,
    select,
)
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute, Mapped, Session, mapped_column

from flmarket.bids import FloatArray
from flmarket.broker.errors import KeyReused, NotFound
from flmarket.broker.stamps import iso

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Role = Literal["buyer", "owner", "operator"]
Rights = Literal["admin", "member", "viewer"]

PLAYABLE = ("queued", "running")
ACTIVE = ("funding", *PLAYABLE)

Id = String(40)
# SQLite counts up by itself only in a column that is exactly INTEGER.
Serial = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """All tables of the broker, with a prefix that keeps them apart from the ledger's."""


class PartyRow(Base):
    """Somebody who may sign in. An owner may have a SuperNode (`node_id`), which knows her by `owner_number`.

    The number is hers for ever, also without a node: award ids are made of it.
    """

    __tablename__ = "broker_parties"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    role: Mapped[Role] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[int] = mapped_column(BigInteger)
    active: Mapped[bool] = mapped_column(default=True)
    node_id: Mapped[str | None] = mapped_column(String(20), unique=True, index=True)
    owner_number: Mapped[int | None] = mapped_column(unique=True, index=True)
    iban: Mapped[str | None] = mapped_column(String(34))  # where her payouts go


class User(Base):
    """A person of a party, who signs in with the operator's identity provider: known by `issuer` and `subject` from her
    first time on, until then by an address that the provider says is hers.

    `rights`: admin (also the party's people, keys and hooks), member (everything else), viewer (looks only).
    """

    __tablename__ = "broker_users"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    name: Mapped[str] = mapped_column(String(80))
    email: Mapped[str] = mapped_column(String(254), index=True)
    rights: Mapped[Rights] = mapped_column(String(16))
    issuer: Mapped[str | None] = mapped_column(String(300))
    subject: Mapped[str | None] = mapped_column(String(255))
    created_at: Mapped[int] = mapped_column(BigInteger)
    removed_at: Mapped[int | None] = mapped_column(BigInteger)
    __table_args__ = (Index("ix_broker_users_subject", "issuer", "subject"),)


class ApiKey(Base):
    """A key: its id is public, its secret is known to the party alone; we keep a keyed hash (`keys`)."""

    __tablename__ = "broker_keys"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    label: Mapped[str] = mapped_column(String(80))
    hash: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[int] = mapped_column(BigInteger)
    revoked_at: Mapped[int | None] = mapped_column(BigInteger)


class SessionRow(Base):
    """A signed-in browser; the cookie's value is stored as a SHA-256 only. It ends with its key or its user, if it has
    one."""

    __tablename__ = "broker_sessions"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    key_id: Mapped[str | None] = mapped_column(Id, index=True)
    user_id: Mapped[str | None] = mapped_column(Id)
    csrf: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger)


class SignInLink(Base):
    """A link that signs a party in, once unless `reusable` (the demo's)."""

    __tablename__ = "broker_sign_in_links"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"))
    expires_at: Mapped[int] = mapped_column(BigInteger)
    reusable: Mapped[bool] = mapped_column(default=False)


class TaskRow(Base):
    """A buyer's order and how far it has come. `checkpoint` is the engine's state after `rounds_done` rounds."""

    __tablename__ = "broker_tasks"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    buyer_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    name: Mapped[str] = mapped_column(String(80))
    state: Mapped[str] = mapped_column(String(16), index=True)
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    rounds: Mapped[int]
    rounds_done: Mapped[int] = mapped_column(default=0)
    escrow_micros: Mapped[int] = mapped_column(BigInteger)
    spent_micros: Mapped[int] = mapped_column(BigInteger, default=0)
    refunded_micros: Mapped[int] = mapped_column(BigInteger, default=0)
    perturbation: Mapped[str] = mapped_column(String(40))
    dimension: Mapped[int]
    features: Mapped[int]
    tensors: Mapped[list[Any]] = mapped_column(JSON, server_default="[]")  # of the model: names and shapes, in order
    dtype: Mapped[str] = mapped_column(String(16), server_default="float64")
    classes: Mapped[list[str]] = mapped_column(JSON)
    baseline_accuracy: Mapped[float]
    created_at: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[int | None] = mapped_column(BigInteger)
    finished_at: Mapped[int | None] = mapped_column(BigInteger)
    deadline_at: Mapped[int] = mapped_column(BigInteger)
    next_at: Mapped[int] = mapped_column(BigInteger)
    accuracy: Mapped[float | None]
    error_bound: Mapped[float | None]
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    error: Mapped[str] = mapped_column(Text, default="")
    terms: Mapped[str | None] = mapped_column(Text, deferred=True)
    listing: Mapped[str | None] = mapped_column(Text, deferred=True)  # what both sides sign (`office.listing`)
    checkpoint: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    parameters: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    __table_args__ = (Index("ix_broker_tasks_created", "created_at", "id"),)

    @hybrid_property
    def left_micros(self) -> int:
        """What is still in escrow."""
        return self.escrow_micros - self.spent_micros - self.refunded_micros


class EvaluationSet(Base):
    """Records of a buyer's own that her models are tested on, as features and classes of the data set `data`; or, with
    `schema`, of data of her own, which only owners' machines hold."""

    __tablename__ = "broker_evaluations"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    name: Mapped[str] = mapped_column(String(80))
    data: Mapped[str] = mapped_column(String(120))
    schema: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    examples: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    x: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)
    y: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)
    created_at: Mapped[int] = mapped_column(BigInteger)


class Slot(Base):
    """One owner's place in a task: simulated while `party_id` is empty."""

    __tablename__ = "broker_slots"
    task_id: Mapped[str] = mapped_column(ForeignKey("broker_tasks.id"), primary_key=True)
    slot: Mapped[int] = mapped_column(primary_key=True)
    records: Mapped[int]
    party_id: Mapped[str | None] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    __table_args__ = (UniqueConstraint("task_id", "party_id", name="uq_broker_slots_party"),)


class Bid(Base):
    """A standing bid: it counts in every round until it is replaced or withdrawn. `terms`: the hash of the task's terms
    that its owner had before her when she placed it, if she said so."""

    __tablename__ = "broker_bids"
    task_id: Mapped[str] = mapped_column(ForeignKey("broker_tasks.id"), primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), primary_key=True, index=True)
    slot: Mapped[int]
    kind: Mapped[str] = mapped_column(String(16))
    rate: Mapped[float | None]
    grid: Mapped[list[float] | None] = mapped_column(JSON)
    values: Mapped[list[float] | None] = mapped_column(JSON)
    privacy_budget: Mapped[float]
    data_size: Mapped[int]
    placed_at: Mapped[int] = mapped_column(BigInteger)
    active: Mapped[bool] = mapped_column(default=True)
    terms: Mapped[str | None] = mapped_column(String(64))


class RoundRow(Base):
    """A round: `opened` holds its plan, so that playing it again gives the same awards."""

    __tablename__ = "broker_rounds"
    task_id: Mapped[str] = mapped_column(ForeignKey("broker_tasks.id"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    opened: Mapped[dict[str, Any] | None] = mapped_column(JSON, deferred=True)
    record: Mapped[dict[str, Any] | None] = mapped_column(JSON, deferred=True)
    bids: Mapped[int] = mapped_column(default=0)
    winners: Mapped[int] = mapped_column(default=0)
    delivered: Mapped[int] = mapped_column(default=0)
    budget_micros: Mapped[int] = mapped_column(BigInteger, default=0)
    spent_micros: Mapped[int] = mapped_column(BigInteger, default=0)
    error_bound: Mapped[float | None]
    accuracy: Mapped[float | None]
    balanced_accuracy: Mapped[float | None]
    loss: Mapped[float | None]
    opened_at: Mapped[int] = mapped_column(BigInteger)
    closed_at: Mapped[int | None] = mapped_column(BigInteger)


class Delivered(Base):
    """An update of a round under way that was checked and counts, whatever happens to the process that took it."""

    __tablename__ = "broker_deliveries"
    task_id: Mapped[str] = mapped_column(ForeignKey("broker_tasks.id"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[int] = mapped_column(primary_key=True)
    vector: Mapped[bytes] = mapped_column(LargeBinary)


class Release(Base):
    """What one winner of one round sold, as it was settled."""

    __tablename__ = "broker_releases"
    task_id: Mapped[str] = mapped_column(ForeignKey("broker_tasks.id"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[int] = mapped_column(primary_key=True)
    party_id: Mapped[str | None] = mapped_column(ForeignKey("broker_parties.id"))
    epsilon: Mapped[float]
    records: Mapped[float]
    weight: Mapped[float]
    price_micros: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text, default="")
    award_id: Mapped[str] = mapped_column(String(120))
    at: Mapped[int] = mapped_column(BigInteger)
    __table_args__ = (
        Index("ix_broker_releases_party_at", "party_id", "at"),
        Index("ix_broker_releases_place", "task_id", "slot", "index"),
        Index("ix_broker_releases_award", "award_id"),
    )


class DisputeRow(Base):
    """Somebody does not agree with how an award ended, or is about to end: open, deciding (the operator has said how,
    and it is being booked), decided. There is one for an award at most, and its id follows from the award's.

    Whether the award's price is frozen in escrow is the ledger's to say (`office.disputes`).
    """

    __tablename__ = "broker_disputes"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    award_id: Mapped[str] = mapped_column(String(120), unique=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("broker_tasks.id"), index=True)
    index: Mapped[int]
    slot: Mapped[int]
    owner_id: Mapped[str | None] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    buyer_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    opened_by: Mapped[str] = mapped_column(Id)
    price_micros: Mapped[int] = mapped_column(BigInteger)
    reason: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16), index=True)
    decision: Mapped[str] = mapped_column(String(16), default="")
    note: Mapped[str] = mapped_column(Text, default="")
    credited_micros: Mapped[int] = mapped_column(BigInteger, default=0)
    opened_at: Mapped[int] = mapped_column(BigInteger)
    decided_at: Mapped[int | None] = mapped_column(BigInteger)
    __table_args__ = (Index("ix_broker_disputes_opened", "opened_at", "id"),)


class Event(Base):
    """Something that happened in a task, for the live stream; ids only grow."""

    __tablename__ = "broker_events"
    id: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    task_id: Mapped[str] = mapped_column(ForeignKey("broker_tasks.id"))
    kind: Mapped[str] = mapped_column(String(24))
    data: Mapped[dict[str, Any]] = mapped_column(JSON)
    at: Mapped[int] = mapped_column(BigInteger)
    __table_args__ = (Index("ix_broker_events_task", "task_id", "id"),)


class FlowerRun(Base):
    """The Flower run of a task, as worker and run agree on it (`flower.tenancy`).

    `attempt` grows with every start, and only the run that carries it may write. `tries` counts starts since
    `rounds_done` was what it is here. `state`: submitted (asked of Flower), working (`holder` renews `expires_at`),
    ended (in order, or `error` says why not). `nodes` are the numbers of the owners who were connected when the run
    last looked.
    """

    __tablename__ = "broker_flower_runs"
    task_id: Mapped[str] = mapped_column(ForeignKey("broker_tasks.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    rounds_done: Mapped[int] = mapped_column(default=0)
    state: Mapped[str] = mapped_column(String(16), default="ended")
    run_id: Mapped[str] = mapped_column(String(20), default="")
    submitted_at: Mapped[int] = mapped_column(BigInteger, default=0)
    holder: Mapped[str] = mapped_column(String(64), default="")
    expires_at: Mapped[int] = mapped_column(BigInteger, default=0)
    error: Mapped[str] = mapped_column(Text, default="")
    nodes: Mapped[list[int] | None] = mapped_column(JSON)


class IdempotentCall(Base):
    """A write that carried an idempotency key, and what was answered; no status while it is under way."""

    __tablename__ = "broker_idempotency"
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(80), primary_key=True)
    request: Mapped[str] = mapped_column(String(64))
    status: Mapped[int | None]
    media_type: Mapped[str | None] = mapped_column(String(80))
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    at: Mapped[int] = mapped_column(BigInteger, index=True)


class AuditLog(Base):
    """Who did what, when, and how it ended. Rows are only ever added."""

    __tablename__ = "broker_audit_log"
    id: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    at: Mapped[int] = mapped_column(BigInteger, index=True)
    party_id: Mapped[str | None] = mapped_column(Id, index=True)
    user_id: Mapped[str | None] = mapped_column(Id)
    action: Mapped[str] = mapped_column(String(60))
    target: Mapped[str] = mapped_column(String(120), default="")
    outcome: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(Text, default="")


class AuditJob(Base):
    """A run of the auditor on a mechanism, in the queue, under way or done."""

    __tablename__ = "broker_audits"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    progress: Mapped[float] = mapped_column(default=0.0)
    note: Mapped[str] = mapped_column(String(200), default="")
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON, deferred=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    finished_at: Mapped[int | None] = mapped_column(BigInteger)


class PayoutRow(Base):
    """Money on its way out of the market: new (nothing moved yet), booked (withdrawn in the ledger, under this id),
    sent (the payout hook took it, or the operator said so), failed (the hook did not: it is still to be sent)."""

    __tablename__ = "broker_payouts"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    amount_micros: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))
    reference: Mapped[str] = mapped_column(String(80))
    note: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[int] = mapped_column(BigInteger)
    sent_at: Mapped[int | None] = mapped_column(BigInteger)


class Hook(Base):
    """Whom a party wants told of what: `kind` is webhook (an address that is posted to) or email. A webhook's secret
    follows from its id (`office.notices`)."""

    __tablename__ = "broker_hooks"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    party_id: Mapped[str] = mapped_column(ForeignKey("broker_parties.id"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    address: Mapped[str] = mapped_column(String(500))
    events: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[int] = mapped_column(BigInteger)
    removed_at: Mapped[int | None] = mapped_column(BigInteger)


class Notice(Base):
    """Something to be told to a hook, written in the transaction of what it tells: waiting, sent, or given up.

    The id follows from hook, event and subject: what is written twice is told once.
    """

    __tablename__ = "broker_notices"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    hook_id: Mapped[str] = mapped_column(ForeignKey("broker_hooks.id"))
    event: Mapped[str] = mapped_column(String(24))
    body: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    tries: Mapped[int] = mapped_column(default=0)
    error: Mapped[str] = mapped_column(String(300), default="")
    at: Mapped[int] = mapped_column(BigInteger)
    next_at: Mapped[int] = mapped_column(BigInteger)
    sent_at: Mapped[int | None] = mapped_column(BigInteger)
    __table_args__ = (
        Index("ix_broker_notices_due", "state", "next_at"), Index("ix_broker_notices_hook", "hook_id", "at"),
    )  # fmt: skip


class Fact(Base):
    """What was settled once for the whole market: `currency`."""

    __tablename__ = "broker_facts"
    name: Mapped[str] = mapped_column(String(24), primary_key=True)
    value: Mapped[str] = mapped_column(String(80))


class Secret(Base):
    """What only the service knows, by its use: `keys` (hashes of API keys), `pseudonyms` (owners' names in a task)."""

    __tablename__ = "broker_secrets"
    name: Mapped[str] = mapped_column(String(24), primary_key=True)
    value: Mapped[bytes] = mapped_column(LargeBinary)


class Lease(Base):
    """Which process works the queue (`holders`): `token` grows with every holder."""

    __tablename__ = "broker_leases"
    name: Mapped[str] = mapped_column(String(24), primary_key=True)
    holder: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[int] = mapped_column(BigInteger)
    token: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class Check(Base):
    """What a standing check found last (`reconcile`); an empty list is good news."""

    __tablename__ = "broker_checks"
    name: Mapped[str] = mapped_column(String(24), primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger)
    findings: Mapped[list[dict[str, str]]] = mapped_column(JSON)


Known = TypeVar("Known", bound=Base)


def row_of(session: Session, table: type[Known], identifier: str, called: str, *, of: str | None = None) -> Known:
    """The row with this id; NotFound if there is none, if it was removed, or is another party's than `of`."""
    row = session.get(table, identifier)
    removed = getattr(row, "removed_at", None) is not None
    if row is None or removed or of not in (None, getattr(row, "party_id", None)):
        raise NotFound(called, identifier)
    return row


def made_before(session: Session, table: type[Known], identifier: str, called: str, **asked: Any) -> Known | None:
    """The row that was made under this id, which follows from an idempotency key; KeyReused if that was a different
    one."""
    row = session.get(table, identifier)
    if row is not None and any(getattr(row, name) != value for name, value in asked.items()):
        raise KeyReused(f"this idempotency key belongs to another {called}")
    return row


def counted_by(session: Session, column: InstrumentedAttribute[str]) -> dict[str, int]:
    """How many rows there are, by what they have in a column."""
    found: dict[str, int] = dict(session.execute(select(column, func.count()).group_by(column)).all())
    return found


def how_many(session: Session, *which: ColumnExpressionArgument[bool]) -> int:
    """How many rows there are of which all of this holds."""
    return session.scalar(select(func.count()).where(*which)) or 0


def as_wire(kind: type[T], row: Base | Row[Any] | SimpleNamespace, /, **given: Any) -> T:
    """A row as the API says it: columns of the same names, times as RFC 3339, and what else is `given`."""
    plain, times = _columns(kind)
    known = {name: getattr(row, name) for name in plain if name not in given}
    known |= {name: iso(getattr(row, name)) for name in times if name not in given}
    return kind(**given, **known)


@cache
def _columns(kind: type[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a view that are as its row has them, and those that are times."""
    times = tuple(field.name for field in fields(kind) if field.name == "at" or field.name.endswith("_at"))
    return tuple(field.name for field in fields(kind) if field.name not in times), times


def vector_bytes(values: FloatArray) -> bytes:
    """Little-endian float64."""
    return np.ascontiguousarray(values, dtype="<f8").tobytes()


def vector(stored: bytes) -> FloatArray:
    """The vector that `vector_bytes` wrote."""
    return np.frombuffer(stored, dtype="<f8").astype(np.float64)
