"""How reliably owners deliver: so many of the last 20 awards that have ended, paid ones count as delivered.

One rule for owners, buyers and the operator. An award that was voided (refused, bad, given up with its round) or came
too late counts as not delivered, whoever's fault it was; one whose price is still in escrow, in dispute or not, is not
counted yet. A registered owner is judged by her awards in all tasks, a simulated one by those of her place in the task.

Each owner costs the database 20 rows of an index, however many awards she has had.
"""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Integer, bindparam, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from flmarket.broker.tables import PartyRow, Release, Slot
from flmarket.client import wire
from flmarket.ledger import AwardState

WINDOW = 20
_one = aliased(Release, name="one")


def reputations(session: Session, parties: Collection[str]) -> dict[str, wire.Reputation]:
    """Of registered owners, by their ids."""
    found = session.execute(_OF_PARTIES, {"parties": list(parties), "window": WINDOW})
    return {party: reputation(delivered, ended) for party, delivered, ended in found}


def simulated_reputations(session: Session, task_id: str, slots: Collection[int]) -> dict[int, wire.Reputation]:
    """Of simulated owners, by their places in a task."""
    hers = _one.task_id == Slot.task_id, _one.slot == Slot.slot, _one.party_id.is_(None)
    query = select(Slot.slot, *_counts(Slot, *hers, order=(_one.index,)))
    found = session.execute(query.where(Slot.task_id == task_id, Slot.slot.in_(list(slots))), {"window": WINDOW})
    return {slot: reputation(delivered, ended) for slot, delivered, ended in found}


def reputation(delivered: int, ended: int) -> wire.Reputation:
    """The figures and their words, which say over how many awards they are."""
    if not ended:
        words = f"No award has ended yet; the last {WINDOW} count."
    elif ended < WINDOW:
        words = f"Delivered {delivered} of {ended} so far; the last {WINDOW} awards count."
    else:
        words = f"Delivered {delivered} of the last {WINDOW} awards."
    return wire.Reputation(int(delivered), int(ended), WINDOW, words)


def _counts(
    outer: Any, *hers: ColumnElement[bool], order: tuple[InstrumentedAttribute[Any], ...]
) -> tuple[ColumnElement[int], ColumnElement[int]]:
    ended = select(_one.state).where(*hers, _one.state != AwardState.PENDING.value)
    last = (
        ended.order_by(*(column.desc() for column in order))
        .limit(bindparam("window", type_=Integer))
        .correlate(outer)
        .subquery()
    )
    posted = last.c.state == AwardState.POSTED.value
    return (
        select(func.count().filter(posted)).select_from(last).scalar_subquery(),
        select(func.count()).select_from(last).scalar_subquery(),
    )


BY_PARTY = _counts(PartyRow, _one.party_id == PartyRow.id, order=(_one.at, _one.task_id, _one.index))
_OF_PARTIES = select(PartyRow.id, *BY_PARTY).where(PartyRow.id.in_(bindparam("parties", expanding=True)))
