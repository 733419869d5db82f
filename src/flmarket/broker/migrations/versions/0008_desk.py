"""What parties sign and the operator pays out: terms that a bid accepts, payouts, the market's currency, nodes seen."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0008", "0007"


def upgrade() -> None:
    """Apply."""
    op.add_column("broker_flower_runs", sa.Column("nodes", sa.JSON(), nullable=True))
    op.add_column("broker_tasks", sa.Column("listing", sa.Text(), nullable=True))
    op.add_column("broker_bids", sa.Column("terms", sa.String(length=64), nullable=True))
    op.create_table(
        "broker_facts",
        sa.Column("name", sa.String(length=24), nullable=False),
        sa.Column("value", sa.String(length=80), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "broker_payouts",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("party_id", sa.String(length=40), nullable=False),
        sa.Column("amount_micros", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reference", sa.String(length=80), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("sent_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["party_id"], ["broker_parties.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_broker_payouts_party_id"), "broker_payouts", ["party_id"])
    op.create_index("ix_broker_tasks_created", "broker_tasks", ["created_at", "id"])


def downgrade() -> None:
    """Take back."""
    op.drop_index("ix_broker_tasks_created", table_name="broker_tasks")
    op.drop_table("broker_payouts")
    op.drop_table("broker_facts")
    op.drop_column("broker_bids", "terms")
    op.drop_column("broker_tasks", "listing")
    op.drop_column("broker_flower_runs", "nodes")
