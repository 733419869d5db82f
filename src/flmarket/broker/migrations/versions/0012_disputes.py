"""Disputes about single awards; and indices by which an award, and the last awards of an owner, are found."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0012", "0011"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "broker_disputes",
        sa.Column("id", sa.String(length=40), primary_key=True),
        sa.Column("award_id", sa.String(length=120), nullable=False, unique=True),
        sa.Column("task_id", sa.String(length=40), sa.ForeignKey("broker_tasks.id"), nullable=False, index=True),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("owner_id", sa.String(length=40), sa.ForeignKey("broker_parties.id"), nullable=True, index=True),
        sa.Column("buyer_id", sa.String(length=40), sa.ForeignKey("broker_parties.id"), nullable=False, index=True),
        sa.Column("opened_by", sa.String(length=40), nullable=False),
        sa.Column("price_micros", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False, index=True),
        sa.Column("decision", sa.String(length=16), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("credited_micros", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.BigInteger(), nullable=False),
        sa.Column("decided_at", sa.BigInteger(), nullable=True),
    )
    op.create_index("ix_broker_disputes_opened", "broker_disputes", ["opened_at", "id"])
    op.create_index("ix_broker_releases_place", "broker_releases", ["task_id", "slot", "index"])
    op.create_index("ix_broker_releases_award", "broker_releases", ["award_id"])
