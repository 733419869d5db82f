"""The operator's desk: queues and health, and the audit log, one line for each thing a party did or was refused.

In the log there is never a secret and never a request's body.
"""

from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, func, insert, make_url, select
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.office.reconcile import RECONCILE
from flmarket.broker.office.runs import runs
from flmarket.broker.stamps import iso, now
from flmarket.broker.tables import (
    PLAYABLE,
    AuditJob,
    AuditLog,
    Check,
    DisputeRow,
    Lease,
    Notice,
    PartyRow,
    PayoutRow,
    TaskRow,
    User,
    as_wire,
    counted_by,
)
from flmarket.client import wire
from flmarket.ledger import ESCROW
from flmarket.report.formatting import count

WORKER = "worker"
_LONGEST = 500
_DAY_MS, _LATE_MS = 86_400_000, 120_000
_LINE = insert(AuditLog)


def note(
    session: Session, party: Party | None, action: str, target: str = "", *, outcome: str = "ok", detail: str = ""
) -> None:
    """Add a line within the transaction of what it describes."""
    who, person = (None, None) if party is None else (party.id, party.user_id)
    line = {"at": now(), "party_id": who, "user_id": person, "action": action, "target": target[:120]}
    session.connection().execute(_LINE, line | {"outcome": outcome, "detail": detail[:_LONGEST]})


def audit_log(
    broker: Broker, party: Party, *, limit: int = 100, before: int | None = None, about: str | None = None
) -> wire.LogPage:
    """The operator's: who did what, newest first; `about` is a party or a target, by id or by part of a name."""
    require(party, "operator")
    query = select(AuditLog).order_by(AuditLog.id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(AuditLog.id < before)
    if about is not None:
        named = select(PartyRow.id).where(PartyRow.name.icontains(about, autoescape=True))
        tasks = select(TaskRow.id).where(TaskRow.name.icontains(about, autoescape=True))
        people = select(User.id).where(User.name.icontains(about, autoescape=True))
        party_is = (AuditLog.party_id == about) | AuditLog.party_id.in_(named) | AuditLog.user_id.in_(people)
        target_is = (AuditLog.target == about) | AuditLog.target.in_(named) | AuditLog.target.in_(tasks)
        query = query.where(party_is | target_is)
    with broker.database.read() as session:
        rows = session.scalars(query).all()
        ids = {"party": "party_id", "about": "target", "person": "user_id"}
        names = names_of(session, {getattr(row, column) or "" for row in rows for column in ids.values()})
    lines = tuple(
        as_wire(wire.LogLine, row, **{of: names.get(getattr(row, column) or "", "") for of, column in ids.items()})
        for row in rows[:limit]
    )
    return wire.LogPage(lines, lines[-1].id if len(rows) > limit else None)


def names_of(
    session: Session,
    ids: Collection[str],
    tables: Sequence[type[PartyRow | TaskRow | User]] = (PartyRow, TaskRow, User),
) -> dict[str, str]:
    """The names of parties, people and tasks among some ids."""
    wanted = list(ids)
    found: dict[str, str] = {}
    for table in tables:
        found |= {one.id: one.name for one in session.execute(select(table.id, table.name).where(table.id.in_(wanted)))}
    return found


def status(broker: Broker, party: Party) -> wire.Operations:
    """Queues and health in one look."""
    require(party, "operator")
    at = now()
    with broker.database.read() as session:
        tasks, audits = counted_by(session, TaskRow.state), counted_by(session, AuditJob.state)
        roles = counted_by(session, PartyRow.role)
        due = session.scalar(select(func.min(TaskRow.next_at)).where(TaskRow.state.in_(PLAYABLE)))
        locked = session.scalar(select(func.sum(TaskRow.left_micros)).where(TaskRow.state.in_(PLAYABLE))) or 0
        lease, check = session.get(Lease, WORKER), session.get(Check, RECONCILE)
        flower = runs(broker, session)
        alive = lease is not None and lease.expires_at > at
        alerts = _alerts(session, at, alive=alive, due=due, check=check, flower=flower)
    return wire.Operations(
        tasks,
        audits,
        roles,
        None if due is None else max(0, due - at) / 1000,
        None if due is None else max(0, at - due) / 1000,
        None if lease is None else lease.holder or None,
        alive,
        make_url(broker.settings.database_url).get_backend_name(),
        broker.books.ledger.balance(ESCROW),
        broker.books.ledger.head().size,
        None if check is None else iso(check.at),
        () if check is None else tuple(wire.Finding(**one) for one in check.findings),
        flower,
        alerts,
        int(locked),
    )


def _alerts(
    session: Session, at: int, *, alive: bool, due: int | None, check: Check | None, flower: Sequence[wire.FlowerRun]
) -> tuple[wire.Alert, ...]:
    """What somebody has to see to, the worst first."""

    findings = 0 if check is None else len(check.findings)
    late = 0 if due is None else max(0, at - due)
    idle = [run.task_id for run in flower if not run.at_work]
    stuck, first = len(idle), next(iter(idle), "")
    waiting = PayoutRow.state.in_(("booked", "failed")) & (PayoutRow.created_at < at - 3 * _DAY_MS)
    asked: tuple[ColumnElement[bool], ...] = (
        (TaskRow.state == "failed") & (TaskRow.finished_at > at - _DAY_MS), (PayoutRow.state == "failed") | waiting,
        (Notice.state == "given up") & (Notice.at > at - 7 * _DAY_MS), DisputeRow.state != "decided",
    )  # fmt: skip
    counted = (select(func.count()).where(one).scalar_subquery() for one in asked)
    failed, unsent, lost, disputed = session.execute(select(*counted)).one()
    told = (
        (findings, f"Bills and ledger do not agree in {count(findings, 'place')}.", "/ledger"),
        (due is not None and not alive, "Nobody works the queue: no round is played.", "/operator"),
        (alive and late > _LATE_MS, f"Rounds are {count(late // 60_000, 'minute')} behind.", "/operator"),
        (stuck, f"{count(stuck, 'Flower task')} under way that nobody plays.", f"/operator/runs/{first}"),
        (failed, f"{count(failed, 'task')} failed in the last day.", "/operator#queue"),
        (unsent, f"{count(unsent, 'payout')} could not be sent, or waited for three days.", "/operator/payouts"),
        (disputed, f"{count(disputed, 'dispute')} to decide.", "/disputes"),
        (lost, f"{count(lost, 'notice')} given up in the last week: nobody took them.", "/operator/log"),
    )
    return tuple(wire.Alert(text, path) for so, text, path in told if so)
