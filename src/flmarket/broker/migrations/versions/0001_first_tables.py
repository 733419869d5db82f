"""The first tables."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None

_ID, _STATE, _HASH, _TIME, _MICROS = sa.String(40), sa.String(16), sa.String(64), sa.BigInteger(), sa.BigInteger()
_WHOLE, _TEXT, _JSON, _BYTES, _FLAG = sa.Integer(), sa.Text(), sa.JSON(), sa.LargeBinary(), sa.Boolean()
_REAL: sa.Double[float] = sa.Double()
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _null(kind: Any) -> sa.Column[Any]:
    return sa.Column(kind, nullable=True)


def _of(table: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(_ID, sa.ForeignKey(f"broker_{table}.id"), nullable=nullable)


def _create(table: str, key: tuple[str, ...], /, *more: sa.schema.SchemaItem, **columns: Any) -> None:
    """A table with these columns, which need a value unless they say otherwise."""
    made = []
    for name, kind in columns.items():
        column = kind if isinstance(kind, sa.Column) else sa.Column(kind, nullable=False)
        column.name = column.key = name
        made.append(column)
    op.create_table(f"broker_{table}", *made, sa.PrimaryKeyConstraint(*key), *more)


def _index(table: str, *columns: str) -> None:
    for column in columns:
        op.create_index(f"ix_broker_{table}_{column}", f"broker_{table}", [column])


def upgrade() -> None:
    """Apply."""
    _create(
        "audit_log", ("id",), id=_SERIAL, at=_TIME, party_id=_null(_ID), action=sa.String(60), target=sa.String(120),
        outcome=_STATE, detail=_TEXT,
    )  # fmt: skip
    _create("leases", ("name",), name=sa.String(24), holder=_HASH, expires_at=_TIME)
    _create("parties", ("id",), id=_ID, role=_STATE, name=sa.String(80), created_at=_TIME, active=_FLAG)
    _create(
        "audits", ("id",), id=_ID, party_id=_of("parties"), state=_STATE, request=_JSON, progress=_REAL,
        note=sa.String(200), report=_null(_JSON), created_at=_TIME, finished_at=_null(_TIME),
    )  # fmt: skip
    _create(
        "idempotency", ("party_id", "key"), party_id=_of("parties"), key=sa.String(80), request=_HASH,
        status=_null(_WHOLE), media_type=_null(sa.String(80)), body=_null(_BYTES), at=_TIME,
    )  # fmt: skip
    _create(
        "keys", ("id",), id=_ID, party_id=_of("parties"), label=sa.String(80), hash=sa.String(200), created_at=_TIME,
        revoked_at=_null(_TIME),
    )  # fmt: skip
    _create("sessions", ("id",), id=_HASH, party_id=_of("parties"), csrf=_HASH, created_at=_TIME, expires_at=_TIME)
    _create("sign_in_links", ("id",), id=_HASH, party_id=_of("parties"), expires_at=_TIME, reusable=_FLAG)
    _create(
        "tasks", ("id",), id=_ID, buyer_id=_of("parties"), name=sa.String(80), state=_STATE, spec=_JSON, rounds=_WHOLE,
        rounds_done=_WHOLE, escrow_micros=_MICROS, spent_micros=_MICROS, refunded_micros=_MICROS,
        perturbation=sa.String(40), dimension=_WHOLE, features=_WHOLE, classes=_JSON, baseline_accuracy=_REAL,
        created_at=_TIME, started_at=_null(_TIME), finished_at=_null(_TIME), deadline_at=_TIME, next_at=_TIME,
        accuracy=_null(_REAL), error_bound=_null(_REAL), cancel_requested=_FLAG, error=_TEXT, checkpoint=_null(_BYTES),
        parameters=_null(_BYTES),
    )  # fmt: skip
    _create(
        "bids", ("task_id", "party_id"), task_id=_of("tasks"), party_id=_of("parties"), slot=_WHOLE, kind=_STATE,
        rate=_null(_REAL), grid=_null(_JSON), values=_null(_JSON), privacy_budget=_REAL, data_size=_WHOLE,
        placed_at=_TIME, active=_FLAG,
    )  # fmt: skip
    _create("events", ("id",), id=_SERIAL, task_id=_of("tasks"), kind=sa.String(24), data=_JSON, at=_TIME)
    _create(
        "releases", ("task_id", "index", "slot"), task_id=_of("tasks"), index=_WHOLE, slot=_WHOLE,
        party_id=_of("parties", nullable=True), epsilon=_REAL, records=_REAL, weight=_REAL, price_micros=_MICROS,
        state=_STATE, reason=_TEXT, award_id=sa.String(120), at=_TIME,
    )  # fmt: skip
    _create(
        "rounds", ("task_id", "index"), task_id=_of("tasks"), index=_WHOLE, state=_STATE, opened=_null(_JSON),
        record=_null(_JSON), bids=_WHOLE, winners=_WHOLE, delivered=_WHOLE, budget_micros=_MICROS, spent_micros=_MICROS,
        error_bound=_null(_REAL), accuracy=_null(_REAL), balanced_accuracy=_null(_REAL), loss=_null(_REAL),
        opened_at=_TIME, closed_at=_null(_TIME),
    )  # fmt: skip
    _create(
        "slots", ("task_id", "slot"), sa.UniqueConstraint("task_id", "party_id", name="uq_broker_slots_party"),
        task_id=_of("tasks"), slot=_WHOLE, records=_WHOLE, party_id=_of("parties", nullable=True),
    )  # fmt: skip
    _index("audit_log", "at", "party_id")
    _index("audits", "party_id", "state")
    _index("idempotency", "at")
    _index("tasks", "buyer_id", "state")
    for table in ("keys", "sessions", "bids", "slots"):
        _index(table, "party_id")
    op.create_index("ix_broker_events_task", "broker_events", ["task_id", "id"])
    op.create_index("ix_broker_releases_party_at", "broker_releases", ["party_id", "at"])
