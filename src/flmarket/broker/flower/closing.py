"""How the worker ends a Flower task that nobody is at work on: in order, or because its runs keep dying.

A round that is given up still pays for what was delivered: an owner whose update was checked and stored has released
it, whether a model came of it or not. All else is voided, and the rest of the escrow goes back. Every step may be
repeated after a crash.
"""

from __future__ import annotations

import logging

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import undefer

from flmarket.broker.checkpoints import order_of
from flmarket.broker.core import Broker
from flmarket.broker.endings import end_task
from flmarket.broker.flower.files import remove_secrets, task_folder
from flmarket.broker.flower.tenancy import run_of
from flmarket.broker.models import RoundRow, Slot, TaskRow
from flmarket.broker.round_rows import settle_round
from flmarket.engines.flower.store import RoundStore
from flmarket.errors import PrivacyBudgetExhausted, SettlementError
from flmarket.ledger import Award, AwardState, Release, Resolution
from flmarket.market import RoundRecord, award_id

__all__ = ["close_task", "give_up"]

log = logging.getLogger("flmarket.broker")
_GIVEN_UP = "the round was given up"


def close_task(broker: Broker, task_id: str, state: str, error: str = "") -> None:
    """Void what a run held without asking anybody to deliver, and end the task."""
    broker.books.void_pending([award.id for award in _awards(broker, task_id).values()], _GIVEN_UP)
    end_task(broker, task_id, state, error)
    remove_secrets(broker.settings.flower_folder, task_id)


def give_up(broker: Broker, task_id: str, error: str) -> None:
    """Pay for what was delivered in the round under way, and end the task as failed."""
    log.warning("task %s failed: %s", task_id, error)
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
    noise = broker.simulations.build(task_id, order_of(task)).perturbation
    delivered = _delivered(broker, task)
    for owner, award in _awards(broker, task_id).items():
        if award.state is not AwardState.PENDING:
            continue
        if owner in delivered:
            _pay(broker, award, Release(award.id, noise.name, noise.guarantee(award.epsilon)))
        else:
            broker.books.ledger.void(award.id, _GIVEN_UP)
    _book(broker, task_id)
    close_task(broker, task_id, "failed", error)


def _delivered(broker: Broker, task: TaskRow) -> set[int]:
    """Who delivered, by the last run's folder."""
    folder = task_folder(broker.settings.flower_folder, task.id) / "server"
    return set(RoundStore(folder).deliveries(task.rounds_done)) if folder.exists() else set()


def _pay(broker: Broker, award: Award, release: Release) -> None:
    """As far as the owner's registered cap allows."""
    ledger = broker.books.ledger
    try:
        ledger.resolve_many([Resolution(award.id, AwardState.POSTED, release=release)])
    except PrivacyBudgetExhausted as refusal:
        ledger.void(award.id, f"past the registered cap: {refusal}")


def _awards(broker: Broker, task_id: str) -> dict[int, Award]:
    """Those of the round under way by owner, as the ledger has them."""
    with broker.database.read() as session:
        index = session.get_one(TaskRow, task_id).rounds_done
        row = session.get(RoundRow, (task_id, index), options=[undefer(RoundRow.opened)])
        bidders = row.opened["bidders"] if row is not None and row.opened is not None else []
    found = {}
    for owner in bidders:
        try:
            found[owner] = broker.books.ledger.award(award_id(task_id, index, owner))
        except SettlementError:
            continue  # not a winner
    return found


def _book(broker: Broker, task_id: str) -> None:
    """The round's rows, if anything was paid in it: bill and statements say what the ledger says."""
    awards = _awards(broker, task_id)
    if not any(award.state is AwardState.POSTED for award in awards.values()):
        return
    with broker.database.write() as session:
        task = session.get_one(TaskRow, task_id)
        row = session.get_one(RoundRow, (task_id, task.rounds_done), options=[undefer(RoundRow.opened)])
        assert row.opened is not None
        bidders = row.opened["bidders"]
        ends = [awards.get(owner) for owner in bidders]
        record = RoundRecord(
            row.index,
            np.array(bidders, dtype=np.int64),
            np.array(row.opened["data_size"], dtype=np.float64),
            np.array(row.opened["epsilon"], dtype=np.float64),
            np.array(row.opened["price"], dtype=np.int64),
            tuple(None if end is None else end.state for end in ends),
            tuple("" if end is None else end.reason for end in ends),
            np.zeros(len(bidders)),
            row.budget_micros,
            float("inf"),
        )
        slots = session.scalars(select(Slot).where(Slot.task_id == task_id)).all()
        parties = {slot.slot: slot.party_id for slot in slots if slot.party_id is not None}
        settle_round(session, task_id, record, parties=parties, parameters=None)
        run_of(session, task_id).rounds_done = task.rounds_done  # no progress that would bring new tries
