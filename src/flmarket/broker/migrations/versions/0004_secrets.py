"""The service's secrets, and which key a session came from. Sessions end: nobody knows which key theirs came from."""

import secrets

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0004", "0003"


def upgrade() -> None:
    """Apply."""
    made = op.create_table(
        "broker_secrets",
        sa.Column("name", sa.String(length=24), primary_key=True),
        sa.Column("value", sa.LargeBinary(), nullable=False),
    )
    op.bulk_insert(made, [{"name": name, "value": secrets.token_bytes(32)} for name in ("keys", "pseudonyms")])
    op.execute("DELETE FROM broker_sessions")
    op.add_column("broker_sessions", sa.Column("key_id", sa.String(length=40), nullable=True, index=True))
