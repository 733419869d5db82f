"""Runs of the auditor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "AuditPage",
    "AuditView",
    "ClaimView",
]


@dataclass(frozen=True)
class ClaimView:
    """One claim of a mechanism and what the audit found."""

    claim: str
    level: str
    verdict: str
    evidence: str


@dataclass(frozen=True)
class AuditView:
    """A run of the auditor. `report` is the whole report once the state is done."""

    id: str
    state: str
    auction: str
    population: str
    profiles: int
    seed: int
    progress: float
    note: str
    created_at: str
    finished_at: str | None
    claims: tuple[ClaimView, ...]
    report: dict[str, Any] | None


@dataclass(frozen=True)
class AuditPage:
    """Audits of a party, newest first, without the reports."""

    items: tuple[AuditView, ...]
