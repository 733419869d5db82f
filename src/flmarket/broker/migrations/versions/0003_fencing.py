"""A token in leases, and a place for what standing checks find."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("broker_leases", sa.Column("token", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "broker_checks",
        sa.Column("name", sa.String(length=24), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )


def downgrade() -> None:
    """Take back."""
    op.drop_table("broker_checks")
    op.drop_column("broker_leases", "token")
