"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "broker_audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=True),
        sa.Column("action", sa.String(length=60), nullable=False),
        sa.Column("target", sa.String(length=120), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("broker_audit_log", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_broker_audit_log_at"), ["at"], unique=False)
        batch_op.create_index(batch_op.f("ix_broker_audit_log_party_id"), ["party_id"], unique=False)

    op.create_table(
        "broker_leases",
        sa.Column("name", sa.String(length=24), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "broker_parties",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "broker_audits",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("note", sa.String(length=200), nullable=False),
        sa.Column("report", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["party_id"],
            ["broker_parties.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("broker_audits", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_broker_audits_party_id"), ["party_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_broker_audits_state"), ["state"], unique=False)

    op.create_table(
        "broker_idempotency",
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("key", sa.String(length=80), nullable=False),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("media_type", sa.String(length=80), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["party_id"],
            ["broker_parties.id"],
        ),
        sa.PrimaryKeyConstraint("party_id", "key"),
    )
    with op.batch_alter_table("broker_idempotency", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_broker_idempotency_at"), ["at"], unique=False)

    op.create_table(
        "broker_keys",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("label", sa.String(length=80), nullable=False),
        sa.Column("hash", sa.String(length=200), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["party_id"],
            ["broker_parties.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("broker_keys", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_broker_keys_party_id"), ["party_id"], unique=False)

    op.create_table(
        "broker_sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("csrf", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["party_id"],
            ["broker_parties.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("broker_sessions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_broker_sessions_party_id"), ["party_id"], unique=False)

    op.create_table(
        "broker_sign_in_links",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("reusable", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["party_id"],
            ["broker_parties.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "broker_tasks",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("buyer_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("rounds_done", sa.Integer(), nullable=False),
        sa.Column("escrow_micros", sa.BigInteger(), nullable=False),
        sa.Column("spent_micros", sa.BigInteger(), nullable=False),
        sa.Column("refunded_micros", sa.BigInteger(), nullable=False),
        sa.Column("perturbation", sa.String(length=40), nullable=False),
        sa.Column("dimension", sa.Integer(), nullable=False),
        sa.Column("features", sa.Integer(), nullable=False),
        sa.Column("classes", sa.JSON(), nullable=False),
        sa.Column("baseline_accuracy", sa.Double(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("deadline_at", sa.BigInteger(), nullable=False),
        sa.Column("next_at", sa.BigInteger(), nullable=False),
        sa.Column("accuracy", sa.Double(), nullable=True),
        sa.Column("error_bound", sa.Double(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.LargeBinary(), nullable=True),
        sa.Column("parameters", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["buyer_id"],
            ["broker_parties.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("broker_tasks", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_broker_tasks_buyer_id"), ["buyer_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_broker_tasks_state"), ["state"], unique=False)

    op.create_table(
        "broker_bids",
        sa.Column("task_id", sa.String(length=40), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("rate", sa.Double(), nullable=True),
        sa.Column("grid", sa.JSON(), nullable=True),
        sa.Column("values", sa.JSON(), nullable=True),
        sa.Column("privacy_budget", sa.Double(), nullable=False),
        sa.Column("data_size", sa.Integer(), nullable=False),
        sa.Column("placed_at", sa.BigInteger(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["party_id"],
            ["broker_parties.id"],
        ),
        sa.ForeignKeyConstraint(
            ["task_id"],
            ["broker_tasks.id"],
        ),
        sa.PrimaryKeyConstraint("task_id", "party_id"),
    )
    with op.batch_alter_table("broker_bids", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_broker_bids_party_id"), ["party_id"], unique=False)

    op.create_table(
        "broker_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("task_id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=24), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["task_id"],
            ["broker_tasks.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("broker_events", schema=None) as batch_op:
        batch_op.create_index("ix_broker_events_task", ["task_id", "id"], unique=False)

    op.create_table(
        "broker_releases",
        sa.Column("task_id", sa.String(length=40), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=True),
        sa.Column("epsilon", sa.Double(), nullable=False),
        sa.Column("records", sa.Double(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("price_micros", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("award_id", sa.String(length=120), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["party_id"],
            ["broker_parties.id"],
        ),
        sa.ForeignKeyConstraint(
            ["task_id"],
            ["broker_tasks.id"],
        ),
        sa.PrimaryKeyConstraint("task_id", "index", "slot"),
    )
    with op.batch_alter_table("broker_releases", schema=None) as batch_op:
        batch_op.create_index("ix_broker_releases_party_at", ["party_id", "at"], unique=False)

    op.create_table(
        "broker_rounds",
        sa.Column("task_id", sa.String(length=40), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("opened", sa.JSON(), nullable=True),
        sa.Column("record", sa.JSON(), nullable=True),
        sa.Column("bids", sa.Integer(), nullable=False),
        sa.Column("winners", sa.Integer(), nullable=False),
        sa.Column("delivered", sa.Integer(), nullable=False),
        sa.Column("budget_micros", sa.BigInteger(), nullable=False),
        sa.Column("spent_micros", sa.BigInteger(), nullable=False),
        sa.Column("error_bound", sa.Double(), nullable=True),
        sa.Column("accuracy", sa.Double(), nullable=True),
        sa.Column("balanced_accuracy", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("opened_at", sa.BigInteger(), nullable=False),
        sa.Column("closed_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["task_id"],
            ["broker_tasks.id"],
        ),
        sa.PrimaryKeyConstraint("task_id", "index"),
    )
    op.create_table(
        "broker_slots",
        sa.Column("task_id", sa.String(length=40), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("records", sa.Integer(), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=True),
        sa.ForeignKeyConstraint(
            ["party_id"],
            ["broker_parties.id"],
        ),
        sa.ForeignKeyConstraint(
            ["task_id"],
            ["broker_tasks.id"],
        ),
        sa.PrimaryKeyConstraint("task_id", "slot"),
        sa.UniqueConstraint("task_id", "party_id", name="uq_broker_slots_party"),
    )
    with op.batch_alter_table("broker_slots", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_broker_slots_party_id"), ["party_id"], unique=False)


def downgrade() -> None:
    """Take back."""
    with op.batch_alter_table("broker_slots", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_broker_slots_party_id"))

    op.drop_table("broker_slots")
    op.drop_table("broker_rounds")
    with op.batch_alter_table("broker_releases", schema=None) as batch_op:
        batch_op.drop_index("ix_broker_releases_party_at")

    op.drop_table("broker_releases")
    with op.batch_alter_table("broker_events", schema=None) as batch_op:
        batch_op.drop_index("ix_broker_events_task")

    op.drop_table("broker_events")
    with op.batch_alter_table("broker_bids", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_broker_bids_party_id"))

    op.drop_table("broker_bids")
    with op.batch_alter_table("broker_tasks", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_broker_tasks_state"))
        batch_op.drop_index(batch_op.f("ix_broker_tasks_buyer_id"))

    op.drop_table("broker_tasks")
    op.drop_table("broker_sign_in_links")
    with op.batch_alter_table("broker_sessions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_broker_sessions_party_id"))

    op.drop_table("broker_sessions")
    with op.batch_alter_table("broker_keys", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_broker_keys_party_id"))

    op.drop_table("broker_keys")
    with op.batch_alter_table("broker_idempotency", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_broker_idempotency_at"))

    op.drop_table("broker_idempotency")
    with op.batch_alter_table("broker_audits", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_broker_audits_state"))
        batch_op.drop_index(batch_op.f("ix_broker_audits_party_id"))

    op.drop_table("broker_audits")
    op.drop_table("broker_parties")
    op.drop_table("broker_leases")
    with op.batch_alter_table("broker_audit_log", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_broker_audit_log_party_id"))
        batch_op.drop_index(batch_op.f("ix_broker_audit_log_at"))

    op.drop_table("broker_audit_log")
