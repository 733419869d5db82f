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
        sa.Column("name", sa.String(length=24), primary_key=True),
        sa.Column("value", sa.String(length=80), nullable=False),
    )
    op.create_table(
        "broker_payouts",
        sa.Column("id", sa.String(length=40), primary_key=True),
        sa.Column("party_id", sa.String(length=40), sa.ForeignKey("broker_parties.id"), nullable=False, index=True),
        sa.Column("amount_micros", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reference", sa.String(length=80), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("sent_at", sa.BigInteger(), nullable=True),
    )
    op.create_index("ix_broker_tasks_created", "broker_tasks", ["created_at", "id"])
