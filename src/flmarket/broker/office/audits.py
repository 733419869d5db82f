"""The auditor as a service: ask for a run, read the verdict. The worker plays one run at a time."""

from sqlalchemy import select

from flmarket.broker.core import Broker, Party
from flmarket.broker.errors import TooMany
from flmarket.broker.office.operator import note
from flmarket.broker.requests import AuditRequest
from flmarket.broker.stamps import keyed_id, now
from flmarket.broker.tables import AuditJob, as_wire, how_many, made_before, row_of
from flmarket.client import wire


def start_audit(broker: Broker, party: Party, request: AuditRequest, *, key: str | None = None) -> wire.Audit:
    """Queue a run of the auditor; the same `key` queues it once."""
    audit_id, asked = keyed_id("a", party.id, key), request.model_dump(mode="json")
    with broker.database.write() as session:
        known = made_before(session, AuditJob, audit_id, "audit", request=asked)
        if known is not None:
            return _view(known, whole=True)
        waiting = how_many(session, AuditJob.party_id == party.id, AuditJob.state.in_(("queued", "running")))
        if waiting >= broker.settings.max_active_audits:
            raise TooMany(f"at most {broker.settings.max_active_audits} audits of a party wait at a time", 10.0)
        job = AuditJob(id=audit_id, party_id=party.id, state="queued", request=asked, note="waiting", report=None)
        job.created_at = now()
        session.add(job)
        note(session, party, "audit.start", audit_id, detail=request.auction)
    broker.wake.set()
    return _view(job, whole=True)


def list_audits(broker: Broker, party: Party, *, limit: int = 50) -> wire.AuditPage:
    """One's own runs, newest first."""
    query = select(AuditJob).where(AuditJob.party_id == party.id).order_by(AuditJob.created_at.desc()).limit(limit)
    with broker.database.read() as session:
        return wire.AuditPage(tuple(_view(job, whole=False) for job in session.scalars(query)))


def get_audit(broker: Broker, party: Party, audit_id: str) -> wire.Audit:
    """One's own run, or any for the operator."""
    with broker.database.read() as session:
        whose = None if party.role == "operator" else party.id
        return _view(row_of(session, AuditJob, audit_id, "audit", of=whose), whole=True)


def _view(job: AuditJob, *, whole: bool) -> wire.Audit:
    report = job.report if whole else None
    claims = tuple(wire.Claim(**claim) for claim in (report or {}).get("claims", ()))
    asked = AuditRequest.model_validate(job.request).model_dump(exclude={"owners"})
    return as_wire(wire.Audit, job, **asked, claims=claims, report=report)
