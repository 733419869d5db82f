"""Owners' SuperNodes, and the Flower runs of tasks."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    """Apply."""
    # Not in a batch, which would make the table anew on SQLite: other tables' rows refer to it.
    op.add_column("broker_parties", sa.Column("node_id", sa.String(length=20), nullable=True))
    op.add_column("broker_parties", sa.Column("owner_number", sa.Integer(), nullable=True))
    op.create_index("ix_broker_parties_node_id", "broker_parties", ["node_id"], unique=True)
    op.create_index("ix_broker_parties_owner_number", "broker_parties", ["owner_number"], unique=True)
    op.create_table(
        "broker_flower_runs",
        sa.Column("task_id", sa.String(length=40), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("rounds_done", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("run_id", sa.String(length=20), nullable=False),
        sa.Column("submitted_at", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["broker_tasks.id"]),
        sa.PrimaryKeyConstraint("task_id"),
    )


def downgrade() -> None:
    """Take back."""
    op.drop_table("broker_flower_runs")
    op.drop_index("ix_broker_parties_owner_number", "broker_parties")
    op.drop_index("ix_broker_parties_node_id", "broker_parties")
    op.drop_column("broker_parties", "owner_number")
    op.drop_column("broker_parties", "node_id")
