"""How the runs of Flower tasks are, as far as the broker can tell: a run that nobody started plays no round, whatever a
task's state says. Read from the row that worker and run agree on (`work.flower.tenancy`); nothing is asked of Flower.

What would break it: clocks of service and run that differ by more than the lease.
"""

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from flmarket.broker.core import Broker, Party, require
from flmarket.broker.errors import NotFound
from flmarket.broker.requests import FLOWER
from flmarket.broker.stamps import iso, now
from flmarket.broker.tables import PLAYABLE, FlowerRun, PartyRow, TaskRow, as_wire, how_many
from flmarket.client import wire

SUBMITTED, WORKING, ENDED = "submitted", "working", "ended"
_MOST_NODES = 500
HAS_NODE = PartyRow.role == "owner", PartyRow.active, PartyRow.node_id.is_not(None)  # who may play in Flower tasks


def run_of_task(broker: Broker, session: Session, task: TaskRow, *, whole: bool = False) -> wire.FlowerRun | None:
    """How a Flower task's run is; None for other tasks, and for those that have ended. `whole`: with what Flower said,
    which is for the operator."""
    return runs_of_tasks(broker, session, [task], whole=whole).get(task.id)


def runs_of_tasks(
    broker: Broker, session: Session, tasks: Iterable[TaskRow], *, whole: bool = False
) -> dict[str, wire.FlowerRun]:
    """The same of many tasks, by their ids, in as few queries as of one."""
    wanted = [task for task in tasks if task.state in PLAYABLE and task.spec["broker"]["engine"] == FLOWER]
    if not wanted:
        return {}
    known = session.scalars(select(FlowerRun).where(FlowerRun.task_id.in_([task.id for task in wanted])))
    rows = {run.task_id: run for run in known}
    owners = how_many(session, *HAS_NODE)
    return {task.id: _view(broker, task, rows.get(task.id), owners, whole=whole) for task in wanted}


def _view(broker: Broker, task: TaskRow, run: FlowerRun | None, owners: int, *, whole: bool) -> wire.FlowerRun:
    state, words = _told(broker, run, owners, int(task.spec["broker"].get("minimum_bids", 1)))
    nodes = None if run is None or run.nodes is None else len(run.nodes)
    told = "" if run is None or not whole else run.error
    tries, run_id = (0, "") if run is None else (run.attempt, run.run_id)
    return wire.FlowerRun(task.id, state, words, run_id, tries, owners, nodes, told)


def runs(broker: Broker, session: Session) -> tuple[wire.FlowerRun, ...]:
    """Of all Flower tasks that are under way; the operator's."""
    on_flower = TaskRow.spec["broker"]["engine"].as_string() == FLOWER
    under_way = select(TaskRow).where(TaskRow.state.in_(PLAYABLE), on_flower).order_by(TaskRow.created_at)
    return tuple(runs_of_tasks(broker, session, session.scalars(under_way), whole=True).values())


def run_detail(broker: Broker, party: Party, task_id: str) -> wire.RunDetail:
    """The operator's: a Flower task's latest run and whose nodes it saw."""
    require(party, "operator")
    with broker.database.read() as session:
        task = session.get(TaskRow, task_id)
        if task is None or task.spec["broker"]["engine"] != FLOWER:
            raise NotFound("run", task_id)
        row = session.get(FlowerRun, task_id)
        bound = select(PartyRow).where(*HAS_NODE).order_by(PartyRow.owner_number)
        owners = session.scalars(bound.limit(_MOST_NODES)).all()
        view = run_of_task(broker, session, task, whole=True)
        name, state = task.name, task.state
    seen = None if row is None or row.nodes is None else set(row.nodes)
    nodes = tuple(
        as_wire(wire.RunNode, one, party_id=one.id, connected=None if seen is None else one.owner_number in seen)
        for one in owners
    )
    run = row or FlowerRun(attempt=0, run_id="", submitted_at=0, error="")
    asked_at = iso(run.submitted_at) if run.submitted_at else None
    return wire.RunDetail(task_id, name, state, view, run.attempt, run.run_id, asked_at, run.error, nodes)


def _told(broker: Broker, run: FlowerRun | None, owners: int, needed: int) -> tuple[str, str]:
    if not broker.settings.superlink:
        return "unreachable", "This service was started without a SuperLink: no run can be started, no round is played."
    if run is None or not run.attempt:
        return "waiting", "No run has been asked for yet."
    asked = f"asked {run.attempt} times" if run.attempt > 1 else "asked once"
    if run.state == WORKING:
        if run.expires_at <= now():
            return "silent", "Its run has stopped answering; another one is started."
        seen = None if run.nodes is None else len(run.nodes)
        if seen is not None and seen < needed:
            return "lonely", f"Its run is at work but no round begins: {seen} of {owners} owners’ nodes are connected."
        return "working", "Its run is at work" + ("." if seen is None else f", {seen} of {owners} nodes are connected.")
    if not run.run_id and run.error:
        return "unreachable", f"The SuperLink starts no run ({asked}): no round is played until it does."
    if run.state == SUBMITTED:
        return "starting", f"The SuperLink was {asked} for a run, which has not begun: no round is played yet."
    if run.error:
        return "broken", f"Its run ended with an error ({asked}); another one is started."
    return "waiting", "No run is at work; one is asked for."
