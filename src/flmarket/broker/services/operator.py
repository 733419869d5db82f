"""The operator's view of the queues and of the service's health."""

from __future__ import annotations

from sqlalchemy import func, make_url, select

from flmarket.broker.clock import iso, now
from flmarket.broker.core import Broker, Party, require
from flmarket.broker.models import AuditJob, Check, Lease, PartyRow, TaskRow
from flmarket.broker.reconcile import RECONCILE
from flmarket.broker.services.states import PLAYABLE
from flmarket.broker.services.views import FindingView, OperatorView
from flmarket.ledger import ESCROW

__all__ = ["WORKER", "status"]

WORKER = "worker"


def status(broker: Broker, party: Party) -> OperatorView:
    """Queues and health in one look."""
    require(party, "operator")
    at = now()
    with broker.database.read() as session:
        tasks = dict(session.execute(select(TaskRow.state, func.count()).group_by(TaskRow.state)).all())
        audits = dict(session.execute(select(AuditJob.state, func.count()).group_by(AuditJob.state)).all())
        roles = dict(session.execute(select(PartyRow.role, func.count()).group_by(PartyRow.role)).all())
        due = session.scalar(select(func.min(TaskRow.next_at)).where(TaskRow.state.in_(PLAYABLE)))
        lease, check = session.get(Lease, WORKER), session.get(Check, RECONCILE)
    return OperatorView(
        tasks,
        audits,
        roles,
        None if due is None else max(0, due - at) / 1000,
        None if due is None else max(0, at - due) / 1000,
        None if lease is None else lease.holder or None,
        lease is not None and lease.expires_at > at,
        make_url(broker.settings.database_url).get_backend_name(),
        broker.books.ledger.balance(ESCROW),
        broker.books.ledger.head().size,
        None if check is None else iso(check.at),
        () if check is None else tuple(FindingView(**one) for one in check.findings),
    )
