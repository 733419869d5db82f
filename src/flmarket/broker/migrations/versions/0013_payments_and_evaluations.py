"""Where payouts go, and buyers' own evaluation sets."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0013", "0012"


def upgrade() -> None:
    """Apply."""
    op.add_column("broker_parties", sa.Column("iban", sa.String(length=34), nullable=True))
    op.create_table(
        "broker_evaluations",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("data", sa.String(length=120), nullable=False),
        sa.Column("schema", sa.JSON(), nullable=True),
        sa.Column("examples", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("x", sa.LargeBinary(), nullable=False),
        sa.Column("y", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["party_id"], ["broker_parties.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_broker_evaluations_party_id"), "broker_evaluations", ["party_id"])


def downgrade() -> None:
    """Take it back. Tasks that are evaluated on a buyer's own set cannot be played any more."""
    op.drop_table("broker_evaluations")
    op.drop_column("broker_parties", "iban")
