"""Owners' SuperNodes, and the Flower runs of tasks."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    """Apply."""
    # Not in a batch, which would make the table anew on SQLite: other tables' rows refer to it.
    op.add_column("broker_parties", sa.Column("node_id", sa.String(length=20), nullable=True, unique=True, index=True))
    op.add_column("broker_parties", sa.Column("owner_number", sa.Integer(), nullable=True, unique=True, index=True))
    op.create_table(
        "broker_flower_runs",
        sa.Column("task_id", sa.String(length=40), sa.ForeignKey("broker_tasks.id"), primary_key=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("rounds_done", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("run_id", sa.String(length=20), nullable=False),
        sa.Column("submitted_at", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
    )
