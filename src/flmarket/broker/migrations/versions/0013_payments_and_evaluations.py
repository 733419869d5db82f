"""Where payouts go, and buyers' own evaluation sets."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0013", "0012"


def upgrade() -> None:
    """Apply."""
    op.add_column("broker_parties", sa.Column("iban", sa.String(length=34), nullable=True))
    op.create_table(
        "broker_evaluations",
        sa.Column("id", sa.String(length=40), primary_key=True),
        sa.Column("party_id", sa.String(length=40), sa.ForeignKey("broker_parties.id"), nullable=False, index=True),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("data", sa.String(length=120), nullable=False),
        sa.Column("schema", sa.JSON(), nullable=True),
        sa.Column("examples", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("x", sa.LargeBinary(), nullable=False),
        sa.Column("y", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
    )
