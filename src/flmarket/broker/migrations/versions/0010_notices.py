"""Whom to tell (hooks) and what is still to be told (notices, the outbox)."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0010", "0008"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "broker_hooks",
        sa.Column("id", sa.String(length=40), primary_key=True),
        sa.Column("party_id", sa.String(length=40), sa.ForeignKey("broker_parties.id"), nullable=False, index=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("address", sa.String(length=500), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=True),
    )
    op.create_table(
        "broker_notices",
        sa.Column("id", sa.String(length=40), primary_key=True),
        sa.Column("hook_id", sa.String(length=40), sa.ForeignKey("broker_hooks.id"), nullable=False),
        sa.Column("event", sa.String(length=24), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(length=300), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("next_at", sa.BigInteger(), nullable=False),
        sa.Column("sent_at", sa.BigInteger(), nullable=True),
    )
    op.create_index("ix_broker_notices_due", "broker_notices", ["state", "next_at"])
    op.create_index("ix_broker_notices_hook", "broker_notices", ["hook_id", "at"])
