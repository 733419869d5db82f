"""Several people in a party, who sign in by themselves; sessions and the audit log say who of them."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0011", "0010"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "broker_users",
        sa.Column("id", sa.String(length=40), primary_key=True),
        sa.Column("party_id", sa.String(length=40), sa.ForeignKey("broker_parties.id"), nullable=False, index=True),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("email", sa.String(length=254), nullable=False, index=True),
        sa.Column("rights", sa.String(length=16), nullable=False),
        sa.Column("issuer", sa.String(length=300), nullable=True),
        sa.Column("subject", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=True),
    )
    op.create_index("ix_broker_users_subject", "broker_users", ["issuer", "subject"])
    op.add_column("broker_sessions", sa.Column("user_id", sa.String(length=40), nullable=True))
    op.add_column("broker_audit_log", sa.Column("user_id", sa.String(length=40), nullable=True))
