"""The operator's side: health, the audit log, the ledger."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FindingView",
    "LedgerCheck",
    "LedgerEntry",
    "LedgerHead",
    "LedgerPage",
    "LogLine",
    "LogPage",
    "OperatorView",
]


@dataclass(frozen=True)
class LogLine:
    """One line of the audit log."""

    id: int
    at: str
    party_id: str | None
    action: str
    target: str
    outcome: str
    detail: str


@dataclass(frozen=True)
class LogPage:
    """Lines of the audit log, newest first."""

    items: tuple[LogLine, ...]
    next: int | None


@dataclass(frozen=True)
class FindingView:
    """Something in which the broker's rows and the ledger do not agree."""

    rule: str
    subject: str
    message: str


@dataclass(frozen=True)
class OperatorView:
    """The service at a glance; `findings` are those of the standing check at `reconciled_at`."""

    tasks: dict[str, int]
    audits: dict[str, int]
    parties: dict[str, int]
    next_round_in_seconds: float | None
    oldest_waiting_seconds: float | None
    worker: str | None
    worker_alive: bool
    database: str
    escrow_micros: int
    ledger_entries: int
    reconciled_at: str | None
    findings: tuple[FindingView, ...]


@dataclass(frozen=True)
class LedgerCheck:
    """What a replay of the whole log found, and whether bills and statements follow from it; `root` commits to it."""

    ok: bool
    message: str
    entries: int
    root: str
    findings: tuple[FindingView, ...] = ()


@dataclass(frozen=True)
class LedgerHead:
    """A commitment to the whole log."""

    entries: int
    last: str
    root: str


@dataclass(frozen=True)
class LedgerEntry:
    """One entry of the ledger's log."""

    seq: int
    at: str
    kind: str
    ref: str
    debit: str | None
    credit: str | None
    amount_micros: int
    owner: str | None
    hash: str


@dataclass(frozen=True)
class LedgerPage:
    """Entries of the log, newest first."""

    items: tuple[LedgerEntry, ...]
    next: int | None
