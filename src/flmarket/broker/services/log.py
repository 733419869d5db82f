"""The audit log: one line for each thing a party did or was refused. Never a secret, never a request's body."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from flmarket.broker.clock import iso, now
from flmarket.broker.core import Broker, Party, require
from flmarket.broker.models import AuditLog
from flmarket.broker.services.views import LogLine, LogPage

__all__ = ["audit_log", "note"]

_LONGEST = 500


def note(
    session: Session, party: Party | None, action: str, target: str = "", *, outcome: str = "ok", detail: str = ""
) -> None:
    """Add a line within the transaction of what it describes."""
    session.add(
        AuditLog(
            at=now(),
            party_id=None if party is None else party.id,
            action=action,
            target=target[:120],
            outcome=outcome,
            detail=detail[:_LONGEST],
        )
    )


def audit_log(
    broker: Broker, party: Party, *, limit: int = 100, before: int | None = None, about: str | None = None
) -> LogPage:
    """The operator's: newest first; `about` is a party or a target."""
    require(party, "operator")
    query = select(AuditLog).order_by(AuditLog.id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(AuditLog.id < before)
    if about is not None:
        query = query.where((AuditLog.party_id == about) | (AuditLog.target == about))
    with broker.database.read() as session:
        rows = session.scalars(query).all()
    lines = tuple(
        LogLine(row.id, iso(row.at) or "", row.party_id, row.action, row.target, row.outcome, row.detail)
        for row in rows[:limit]
    )
    return LogPage(lines, lines[-1].id if len(rows) > limit else None)
