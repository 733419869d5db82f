"""The tables of the durable ledger. The triggers that guard them are in `migrations/sql`.

`ledger_entries` is the log and the truth. `ledger_accounts` (balances, kept by triggers) and `ledger_nodes` (inner
hashes of the tree) follow from it, and `verify` recomputes both.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

__all__ = ["accounts", "entries", "metadata", "nodes"]

metadata = MetaData()

# SQLite's STRICT tables know INTEGER and TEXT; its INTEGER has 64 bits.
_Whole = BigInteger().with_variant(Integer, "sqlite")

accounts = Table(
    "ledger_accounts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("balance", _Whole, nullable=False),
    Column("last_seq", _Whole, nullable=False),
    CheckConstraint("balance >= 0 OR name = 'bank'", name="ledger_accounts_overdrawn"),
    sqlite_strict=True,
)

entries = Table(
    "ledger_entries",
    metadata,
    Column("seq", _Whole, primary_key=True, autoincrement=False),
    Column("time_us", _Whole, nullable=False),
    Column("kind", Text, nullable=False),
    Column("ref", Text, nullable=False),
    Column("debit", Text),
    Column("credit", Text),
    Column("amount_micros", _Whole, nullable=False),
    Column("owner", Text),
    Column("round_index", _Whole),
    Column("spent_pico", _Whole),
    Column("limit_pico", _Whole),
    Column("detail", Text, nullable=False),
    Column("previous", Text, nullable=False),
    Column("hash", Text, nullable=False),
    UniqueConstraint("ref", "kind", name="ledger_entries_once"),
    Index(
        "ledger_entries_resolved_once",
        "ref",
        unique=True,
        sqlite_where=text("kind IN ('posted', 'voided', 'expired')"),
        postgresql_where=text("kind IN ('posted', 'voided', 'expired')"),
    ),
    Index("ledger_entries_owner", "owner", "kind", "seq"),
    CheckConstraint(
        "CASE WHEN kind IN ('cap', 'release')"
        " THEN debit IS NULL AND credit IS NULL AND amount_micros = 0"
        " ELSE debit IS NOT NULL AND credit IS NOT NULL AND debit <> credit"
        " AND amount_micros BETWEEN 0 AND 4611686018427387904 END",
        name="ledger_entries_double_entry",
    ),
    CheckConstraint(
        "CASE kind"
        " WHEN 'deposit' THEN debit = 'bank' AND credit NOT IN ('escrow', 'fees')"
        " WHEN 'withdrawal' THEN debit <> 'escrow' AND credit = 'bank'"
        " WHEN 'fee' THEN debit NOT IN ('bank', 'escrow') AND credit = 'fees'"
        " WHEN 'hold' THEN debit NOT IN ('bank', 'fees') AND credit = 'escrow'"
        " WHEN 'posted' THEN debit = 'escrow'"
        " WHEN 'voided' THEN debit = 'escrow'"
        " WHEN 'expired' THEN debit = 'escrow'"
        " ELSE kind IN ('cap', 'release') END",
        name="ledger_entries_kind",
    ),
    CheckConstraint(
        "CASE WHEN kind IN ('cap', 'release')"
        " THEN (kind = 'release' AND spent_pico IS NULL AND limit_pico IS NULL)"
        " OR (spent_pico IS NOT NULL AND limit_pico IS NOT NULL AND spent_pico BETWEEN 0 AND limit_pico)"
        " ELSE spent_pico IS NULL AND limit_pico IS NULL END",
        name="ledger_entries_within_cap",
    ),
    CheckConstraint(
        "(owner IS NULL) = (kind IN ('deposit', 'withdrawal', 'fee')) AND (round_index IS NULL) = (kind <> 'hold')",
        name="ledger_entries_parties",
    ),
    CheckConstraint("length(previous) = 64 AND length(hash) = 64", name="ledger_entries_hashed"),
    sqlite_strict=True,
)

nodes = Table(
    "ledger_nodes",
    metadata,
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("position", _Whole, primary_key=True, autoincrement=False),
    Column("hash", Text, nullable=False),
    CheckConstraint("level > 0 AND position >= 0 AND length(hash) = 64", name="ledger_nodes_hashed"),
    sqlite_strict=True,
)
