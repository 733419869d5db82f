"""What a round leaves in the broker's tables at each of its steps, for whichever engine plays it.

Every function works in a transaction of the caller's, and writes what pages, bills, statements and the live stream
read. The ledger is the authority on money; these rows follow it. Repeating a step changes no row for the worse: a round
that is settled stays so, and an event that is said twice is read as the latest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session, undefer

from flmarket.broker.books import shown_epsilon, slot_account
from flmarket.broker.office.notices import announce_awards
from flmarket.broker.stamps import now
from flmarket.broker.tables import Event, Release, RoundRow, TaskRow, vector_bytes
from flmarket.ledger import Award, AwardState
from flmarket.market import RoundRecord
from flmarket.privacy import event_to_dict
from flmarket.report.formatting import finite_or_none

AWARDED = "awarded"
_SHOWN = 200


@dataclass(frozen=True)
class Winner:
    """An award as the live view shows it."""

    slot: int
    epsilon: float | None  # None if nothing bounds it
    price_micros: int
    loss: dict[str, Any]

    @classmethod
    def of(cls, slot: int, award: Award) -> Self:
        """An award's, of whoever is at that place."""
        return cls(slot, finite_or_none(shown_epsilon(award.loss)), award.price_micros, event_to_dict(award.loss))


def open_round(session: Session, task_id: str, index: int) -> None:
    """Bids are asked for."""
    if session.get(RoundRow, (task_id, index)) is None:
        session.add(RoundRow(task_id=task_id, index=index, state="open", opened_at=now()))
        add_event(session, task_id, index, "open", {})


def take_bids(session: Session, task_id: str, index: int, document: dict[str, Any], budget_micros: int) -> None:
    """Bids are in; `document` says whose (`bidders`), and whatever the engine needs to go on."""
    row, bids = session.get_one(RoundRow, (task_id, index)), len(document["bidders"])
    row.opened, row.state, row.bids, row.budget_micros = document, "bids", bids, budget_micros
    add_event(session, task_id, index, "bids", {"bids": bids, "budget_micros": budget_micros})


def award_round(session: Session, task_id: str, index: int, winners: Sequence[Winner]) -> None:
    """Prices are in escrow."""
    row = session.get_one(RoundRow, (task_id, index))
    row.state, row.winners = AWARDED, len(winners)
    held, shown = sum(one.price_micros for one in winners), [asdict(one) for one in winners[:_SHOWN]]
    add_event(session, task_id, index, "awards", {"awards": len(winners), "held_micros": held, "winners": shown})


def settle_round(
    session: Session,
    task_id: str,
    record: RoundRecord,
    *,
    parties: Mapping[int, str],
    parameters: NDArray[np.float64] | None,
    awards: Mapping[int, Award],
    checkpoint: bytes | None = None,
    pause_ms: int = 0,
    over: bool = False,
) -> list[Release] | None:
    """Awards are resolved and the model has moved; None, and nothing changed, if that was written before.

    `parameters` is the buyer's model now; None leaves the one that is there. `awards` are the round's, as the ledger
    has them: those that run on are not on the statements yet, those in dispute are, with their price in
    escrow. `over`: no round comes after this one.
    """
    index, at = record.index, now()
    task = session.get_one(TaskRow, task_id, with_for_update=True)
    if task.rounds_done > index:
        return None
    row = session.get_one(RoundRow, (task_id, index))
    bound = record.error_bound if np.isfinite(record.error_bound) else None
    row.state, row.closed_at = ("settled" if record.valid else "empty"), at
    row.delivered, row.spent_micros, row.error_bound = int(record.delivered.sum()), record.spent_micros, bound
    row.accuracy, row.loss = record.metrics.get("accuracy"), record.metrics.get("loss")
    row.balanced_accuracy = record.metrics.get("balanced_accuracy")
    places = {owner: k for k, owner in enumerate(record.bidders.tolist())}
    ended = []
    for owner, award in awards.items():
        k = places[owner]
        if award.state is AwardState.PENDING and record.state[k] is AwardState.PENDING:
            award = replace(award, reason=record.reason[k])  # it has one if it is in dispute, and ends with that
        if (award.state is not AwardState.PENDING or award.reason) and record.state[k] is not None:
            sold = {"records": float(record.data_size[k]), "weight": float(record.weights[k])}
            ended.append(_release(task_id, index, owner, award, at, party_id=parties.get(owner), **sold))
    session.add_all(ended)
    task.rounds_done, task.spent_micros = index + 1, task.spent_micros + record.spent_micros
    task.rounds = index + 1 if over else task.rounds
    task.checkpoint, task.next_at = checkpoint, at + pause_ms
    if parameters is not None:
        task.parameters, task.accuracy, task.error_bound = vector_bytes(parameters), row.accuracy, bound
    announce_awards(session, "payment", task, index, awards.values(), state=AwardState.POSTED)
    told = {name: getattr(row, name) for name in ("delivered", "winners", "spent_micros", "accuracy", "error_bound")}
    add_event(session, task_id, index, "settled", told | {"rounds_done": index + 1, "rounds": task.rounds})
    return ended


def void_round(session: Session, task: TaskRow, awards: Mapping[int, Award]) -> tuple[RoundRow, list[Release]] | None:
    """The task ends in the middle of a round: its awards are booked as the ledger has them, and no model comes of it.

    A round that nobody had bid in is forgotten, unless awards of earlier rounds end in it. Whatever was paid is on the
    bill, once. Returns the round and what ended with it, unless there was none.
    """
    row, at = session.get(RoundRow, (task.id, task.rounds_done), options=[undefer(RoundRow.opened)]), now()
    told = set(session.scalars(select(Release.award_id).where(Release.task_id == task.id)))
    awards = {owner: award for owner, award in awards.items() if award.id not in told}
    if not awards and (row is None or row.opened is None):
        if row is not None:
            session.delete(row)
        return None
    if row is None:
        row = RoundRow(task_id=task.id, index=task.rounds_done, opened_at=at)
        session.add(row)
    opened = row.opened or session.get_one(RoundRow, (task.id, 0), options=[undefer(RoundRow.opened)]).opened
    opened = opened or {"bidders": [], "data_size": []}
    records = dict(zip(opened["bidders"], opened["data_size"], strict=True))
    posted = [award for award in awards.values() if award.state is AwardState.POSTED]
    row.state, row.closed_at, row.winners = "void", at, len(awards)
    row.delivered, row.spent_micros = len(posted), sum(award.price_micros for award in posted)
    task.spent_micros += row.spent_micros
    announce_awards(session, "payment", task, row.index, posted, state=AwardState.POSTED)
    ended = []
    for owner, award in awards.items():
        party = None if award.owner == slot_account(task.id, owner) else award.owner
        sold = {"records": float(records[owner]), "weight": 0.0}
        ended.append(_release(task.id, row.index, owner, award, at, party_id=party, **sold))
    session.add_all(ended)
    return row, ended


def add_event(session: Session, task_id: str, index: int, kind: str, data: dict[str, Any]) -> None:
    """Tell those who watch."""
    session.add(Event(task_id=task_id, kind=kind, data={"round": index, **data}, at=now()))


def _release(task_id: str, index: int, slot: int, award: Award, at: int, **more: Any) -> Release:
    """What an award's owner sold, as the ledger has it."""
    told = {"state": award.state.value, "reason": award.reason, "award_id": award.id, "at": at}
    sold = {"epsilon": shown_epsilon(award.loss), "price_micros": award.price_micros}
    return Release(task_id=task_id, index=index, slot=slot, **sold, **told, **more)
