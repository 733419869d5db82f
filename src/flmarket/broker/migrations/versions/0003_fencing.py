"""A token in leases, and a place for what standing checks find."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    """Apply."""
    op.add_column("broker_leases", sa.Column("token", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "broker_checks",
        sa.Column("name", sa.String(length=24), primary_key=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
    )
