"""The market at a glance, for everybody; and the names that a task may use."""

from functools import lru_cache

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from flmarket import aggregation, auctions, populations
from flmarket.broker.core import Broker, Party
from flmarket.broker.office.runs import run_of_task
from flmarket.broker.requests import FLOWER, order_of, public_terms, pure_perturbations
from flmarket.broker.tables import PLAYABLE, PartyRow, Release, RoundRow, Slot, TaskRow, as_wire
from flmarket.client import wire
from flmarket.ledger import AwardState
from flmarket.market import kinds


def overview(broker: Broker, party: Party | None, *, limit: int = 50) -> wire.Market:
    """The latest tasks as everybody may know them, signed in or not. No accuracy, no names of buyers or owners."""
    with broker.database.read() as session:
        rows = session.scalars(
            select(TaskRow).where(TaskRow.state != "funding").order_by(TaskRow.created_at.desc()).limit(limit)
        ).all()
        by_state = dict(session.execute(select(TaskRow.state, func.count()).group_by(TaskRow.state)).all())
        settled = session.scalar(select(func.count()).where(RoundRow.state == "settled")) or 0
        delivered = select(func.coalesce(func.sum(Release.price_micros), 0), func.count()).where(
            Release.state == AwardState.POSTED.value
        )
        paid, deliveries = session.execute(delivered).one()
        at_home = delivered.join(TaskRow, Release.task_id == TaskRow.id).where(
            TaskRow.spec["broker"]["engine"].as_string() == FLOWER
        )
        _, from_owners = session.execute(at_home).one()
        owners = session.scalar(select(func.count()).where(PartyRow.role == "owner", PartyRow.active)) or 0
        listed = tuple(_task(broker, session, row, party) for row in rows)
    running, finished = sum(by_state.get(state, 0) for state in PLAYABLE), by_state.get("finished", 0)
    bought = (int(paid), deliveries, deliveries - from_owners)
    return wire.Market(listed, running, finished, settled, *bought, owners)


def kind_of(broker: Broker, task_id: str) -> str | None:
    """A task's kind of market, if there is such a task."""
    with broker.database.read() as session:
        row = session.get(TaskRow, task_id)
    return None if row is None else order_of(row.spec).kind


def registered_places(broker: Broker, task_id: str) -> int:
    """How many places of a task registered owners have taken; the others, if there are any, are simulated."""
    taken = select(func.count()).where(Slot.task_id == task_id, Slot.party_id.is_not(None))
    with broker.database.read() as session:
        return session.scalar(taken) or 0


def catalogue(broker: Broker) -> wire.Catalogue:
    """What there is, and what each auction claims."""
    sets = broker.simulations.data_sets
    mechanisms = _mechanisms(auctions.names())
    return wire.Catalogue(
        mechanisms, aggregation.names(), pure_perturbations(), populations.names(), sets, broker.simulations.models,
        tuple(wire.KindLine(name, kinds.about(name), kinds.of(name).side.lasting) for name in kinds.names()),
    )  # fmt: skip


@lru_cache(maxsize=4)
def _mechanisms(names: tuple[str, ...]) -> tuple[wire.Mechanism, ...]:
    found = ((name, auctions.get(name).guarantees) for name in names)
    return tuple(
        wire.Mechanism(name, *map(str, (one.truthful, one.rational, one.budget_feasible, one.source, one.assumes)))
        for name, one in found
    )


def _task(broker: Broker, session: Session, row: TaskRow, party: Party | None) -> wire.MarketTask:
    order = order_of(row.spec)
    return as_wire(
        wire.MarketTask,
        row,
        **public_terms(order),
        owners=order.data.owners,
        open=order.kind == "auction" and order.broker.open and row.state in PLAYABLE,
        mine=party is not None and row.buyer_id == party.id,
        kind=order.kind,
        budget_micros_total=order.escrow_micros,
        run=run_of_task(broker, session, row),
    )
