"""Several people in a party, who sign in by themselves; sessions and the audit log say who of them."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0011", "0010"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "broker_users",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("email", sa.String(length=254), nullable=False),
        sa.Column("rights", sa.String(length=16), nullable=False),
        sa.Column("issuer", sa.String(length=300), nullable=True),
        sa.Column("subject", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["party_id"], ["broker_parties.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_broker_users_party_id"), "broker_users", ["party_id"])
    op.create_index(op.f("ix_broker_users_email"), "broker_users", ["email"])
    op.create_index("ix_broker_users_subject", "broker_users", ["issuer", "subject"])
    op.add_column("broker_sessions", sa.Column("user_id", sa.String(length=40), nullable=True))
    op.add_column("broker_audit_log", sa.Column("user_id", sa.String(length=40), nullable=True))


def downgrade() -> None:
    """Take it back; people's sessions end, as nobody could say whose they are."""
    op.execute("DELETE FROM broker_sessions WHERE user_id IS NOT NULL")
    op.drop_column("broker_audit_log", "user_id")
    op.drop_column("broker_sessions", "user_id")
    op.drop_table("broker_users")
