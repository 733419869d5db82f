"""What a round keeps while it is played: the deliveries that came, and the terms that a task has settled once."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0007", "0006"


def upgrade() -> None:
    """Apply."""
    op.add_column("broker_tasks", sa.Column("terms", sa.Text(), nullable=True))
    op.create_table(
        "broker_deliveries",
        sa.Column("task_id", sa.String(length=40), sa.ForeignKey("broker_tasks.id"), primary_key=True),
        sa.Column("index", sa.Integer(), primary_key=True),
        sa.Column("slot", sa.Integer(), primary_key=True),
        sa.Column("vector", sa.LargeBinary(), nullable=False),
    )
