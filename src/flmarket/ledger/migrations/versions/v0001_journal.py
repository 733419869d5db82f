"""The journal: entries, accounts, inner nodes of the tree, and the triggers that guard them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from importlib.resources import files

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_WHOLE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_RESOLVED = sa.text("kind IN ('posted', 'voided', 'expired')")


def upgrade() -> None:
    """Make everything."""
    op.create_table(
        "ledger_accounts",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("balance", _WHOLE, nullable=False),
        sa.Column("last_seq", _WHOLE, nullable=False),
        sa.CheckConstraint("balance >= 0 OR name = 'bank'", name="ledger_accounts_overdrawn"),
        sqlite_strict=True,
    )
    _create_entries()
    op.create_table(
        "ledger_nodes",
        sa.Column("level", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("position", _WHOLE, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.CheckConstraint("level > 0 AND position >= 0 AND length(hash) = 64", name="ledger_nodes_hashed"),
        sqlite_strict=True,
    )
    for statement in _statements("up"):
        op.get_bind().exec_driver_sql(statement)


def downgrade() -> None:
    """Drop everything: the whole journal is lost."""
    for statement in _statements("down"):
        op.get_bind().exec_driver_sql(statement)
    for table in ("ledger_nodes", "ledger_entries", "ledger_accounts"):
        op.drop_table(table)


def _create_entries() -> None:
    op.create_table(
        "ledger_entries",
        sa.Column("seq", _WHOLE, primary_key=True, autoincrement=False),
        sa.Column("time_us", _WHOLE, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("ref", sa.Text, nullable=False),
        sa.Column("debit", sa.Text),
        sa.Column("credit", sa.Text),
        sa.Column("amount_micros", _WHOLE, nullable=False),
        sa.Column("owner", sa.Text),
        sa.Column("round_index", _WHOLE),
        sa.Column("spent_pico", _WHOLE),
        sa.Column("limit_pico", _WHOLE),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("previous", sa.Text, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.UniqueConstraint("ref", "kind", name="ledger_entries_once"),
        *(sa.CheckConstraint(rule, name=f"ledger_entries_{name}") for name, rule in _RULES.items()),
        sqlite_strict=True,
    )
    op.create_index(
        "ledger_entries_resolved_once",
        "ledger_entries",
        ["ref"],
        unique=True,
        sqlite_where=_RESOLVED,
        postgresql_where=_RESOLVED,
    )
    op.create_index("ledger_entries_owner", "ledger_entries", ["owner", "kind", "seq"])


_RULES = {
    "double_entry": "CASE WHEN kind IN ('cap', 'release')"
    " THEN debit IS NULL AND credit IS NULL AND amount_micros = 0"
    " ELSE debit IS NOT NULL AND credit IS NOT NULL AND debit <> credit"
    " AND amount_micros BETWEEN 0 AND 4611686018427387904 END",
    "kind": "CASE kind"
    " WHEN 'deposit' THEN debit = 'bank' AND credit NOT IN ('escrow', 'fees')"
    " WHEN 'withdrawal' THEN debit <> 'escrow' AND credit = 'bank'"
    " WHEN 'fee' THEN debit NOT IN ('bank', 'escrow') AND credit = 'fees'"
    " WHEN 'hold' THEN debit NOT IN ('bank', 'fees') AND credit = 'escrow'"
    " WHEN 'posted' THEN debit = 'escrow'"
    " WHEN 'voided' THEN debit = 'escrow'"
    " WHEN 'expired' THEN debit = 'escrow'"
    " ELSE kind IN ('cap', 'release') END",
    "within_cap": "CASE WHEN kind IN ('cap', 'release')"
    " THEN (kind = 'release' AND spent_pico IS NULL AND limit_pico IS NULL)"
    " OR (spent_pico IS NOT NULL AND limit_pico IS NOT NULL AND spent_pico BETWEEN 0 AND limit_pico)"
    " ELSE spent_pico IS NULL AND limit_pico IS NULL END",
    "parties": "(owner IS NULL) = (kind IN ('deposit', 'withdrawal', 'fee'))"
    " AND (round_index IS NULL) = (kind <> 'hold')",
    "hashed": "length(previous) = 64 AND length(hash) = 64",
}


def _statements(direction: str) -> Iterator[str]:
    """The triggers of this step for this database, one statement at a time where the driver wants that."""
    dialect = op.get_bind().dialect.name
    name = f"0001_{dialect}_{direction}.sql"
    script = (files("flmarket.ledger.migrations") / "sql" / name).read_text(encoding="utf-8")
    if dialect != "sqlite":
        yield script.replace("%", "%%")  # the driver reads a percent sign as a parameter
        return
    part = ""
    for line in script.splitlines(keepends=True):
        part += line
        if part.strip() and sqlite3.complete_statement(part):
            yield part
            part = ""
