"""The market at a glance, for everybody; and the names that a task may use."""

from collections.abc import Sequence
from functools import lru_cache

from sqlalchemy import ColumnElement, Integer, bindparam, case, func, select

from flmarket import aggregation, auctions, populations
from flmarket.broker.core import Broker, Party
from flmarket.broker.office.runs import runs_of_tasks
from flmarket.broker.requests import FLOWER, TaskRequest, order_of, public_terms, pure_perturbations
from flmarket.broker.tables import PLAYABLE, PartyRow, Release, RoundRow, Slot, TaskRow, as_wire, counted_by, how_many
from flmarket.client import wire
from flmarket.ledger import AwardState
from flmarket.market import kinds


def overview(broker: Broker, party: Party | None, *, limit: int = 50, start: int = 0, search: str = "") -> wire.Market:
    """Tasks as everybody may know them, signed in or not: those under way first, else newest first, from the `start`-th
    on, or those whose name holds `search`. No accuracy, no names of buyers or owners. The sums may be seconds old."""
    query, count = _SHOWN, _COUNT
    if search:
        named = TaskRow.name.icontains(search, autoescape=True) | (TaskRow.id == search)
        query, count = query.where(named), count.where(named)
    with broker.database.read() as session:
        rows = session.scalars(query, {"limit": limit, "start": start}).all()
        total = session.scalar(count) or 0
        runs = runs_of_tasks(broker, session, rows)
    listed = tuple(_task(broker.order(row), row, party, runs.get(row.id)) for row in rows)
    return wire.Market(listed, *broker.recent.get("market", lambda: _sums(broker)), total)


_order = case((TaskRow.state.in_(PLAYABLE), 0), else_=1), TaskRow.created_at.desc(), TaskRow.id
_SHOWN = (
    select(TaskRow)
    .where(TaskRow.state != "funding")
    .order_by(*_order)
    .limit(bindparam("limit", type_=Integer))
    .offset(bindparam("start", type_=Integer))
)
_COUNT = select(func.count()).select_from(TaskRow).where(TaskRow.state != "funding")


def _sums(broker: Broker) -> tuple[int, int, int, int, int, int, int]:
    """Tasks under way and finished, rounds settled, what was paid and delivered, of that simulated, and owners. They
    look at every award there is, so they are worked out rarely."""
    with broker.database.read() as session:
        by_state = counted_by(session, TaskRow.state)
        settled = how_many(session, RoundRow.state == "settled")
        delivered = select(Release.task_id, func.coalesce(func.sum(Release.price_micros), 0), func.count())
        delivered = delivered.where(Release.state == AwardState.POSTED.value).group_by(Release.task_id)
        sold = session.execute(delivered).all()
        on_flower = TaskRow.spec["broker"]["engine"].as_string() == FLOWER
        at_home = set(session.scalars(select(TaskRow.id).where(on_flower)))
        owners = how_many(session, PartyRow.role == "owner", PartyRow.active)
    running, finished = sum(by_state.get(state, 0) for state in PLAYABLE), by_state.get("finished", 0)
    paid, deliveries = sum(int(amount) for _, amount, _ in sold), sum(count for _, _, count in sold)
    simulated = sum(count for task, _, count in sold if task not in at_home)
    return running, finished, settled, paid, deliveries, simulated, owners


def curves(broker: Broker, party: Party, task_ids: Sequence[str], *, rounds: int) -> dict[str, tuple[int, list[float]]]:
    """Of those of these tasks that the party may see inside: what was paid, and the accuracy of the latest rounds."""
    mine: ColumnElement[bool] = TaskRow.id.in_(task_ids)
    if party.role != "operator":
        mine &= TaskRow.buyer_id == party.id
    lately = (RoundRow.index >= TaskRow.rounds_done - rounds) & RoundRow.accuracy.is_not(None)
    played = select(RoundRow.task_id, RoundRow.accuracy).join(TaskRow, RoundRow.task_id == TaskRow.id)
    with broker.database.read() as session:
        found = {
            one: (paid, list[float]())
            for one, paid in session.execute(select(TaskRow.id, TaskRow.spent_micros).where(mine))
        }
        for task_id, accuracy in session.execute(played.where(mine, lately).order_by(RoundRow.task_id, RoundRow.index)):
            found[task_id][1].append(float(accuracy or 0.0))
    return found


def kind_of(broker: Broker, task_id: str) -> str | None:
    """A task's kind of market, if there is such a task."""
    with broker.database.read() as session:
        row = session.get(TaskRow, task_id)
    return None if row is None else order_of(row.spec).kind


def registered_places(broker: Broker, task_id: str) -> int:
    """How many places of a task registered owners have taken; the others, if there are any, are simulated."""
    with broker.database.read() as session:
        return how_many(session, Slot.task_id == task_id, Slot.party_id.is_not(None))


def catalogue(broker: Broker) -> wire.Catalogue:
    """The names that a task may use, and what each auction claims."""
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


def _task(order: TaskRequest, row: TaskRow, party: Party | None, run: wire.FlowerRun | None) -> wire.MarketTask:
    return as_wire(
        wire.MarketTask,
        row,
        **public_terms(order),
        owners=order.data.owners,
        open=order.kind == "auction" and order.broker.open and row.state in PLAYABLE,
        mine=party is not None and row.buyer_id == party.id,
        kind=order.kind,
        budget_micros_total=order.escrow_micros,
        run=run,
    )
