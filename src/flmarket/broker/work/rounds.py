"""One round of a task, in steps that are each stored before the next begins.

    open ─► bids ─► awards ─► updates ─► settled

`play_round` is a generator that stops after each step, so that the worker can serve other tasks in between and people
can watch. The bids of a round are stored before it is cleared, and the engine's state after the round before it; a
round that was cut off is therefore played again from its bids, to the same awards and releases, and the ledger, whose
ids are the same, pays nobody twice. How awards end is the ledger's word, also after an owner has changed her cap; the
model is made of what was paid for. The last step writes everything a round changed in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import undefer

from flmarket.bids import BidProfile, Kind, Valuations
from flmarket.broker.books import TaskLedger, slot_account
from flmarket.broker.core import Broker
from flmarket.broker.requests import TaskRequest, order_of
from flmarket.broker.tables import Bid, RoundRow, Slot, TaskRow
from flmarket.broker.work.checkpoints import opened_from, opened_to, state_from, state_to
from flmarket.broker.work.round_rows import AWARDED, Winner, add_event, award_round, open_round, settle_round, take_bids
from flmarket.engines import OpenRound, Simulation, SimulationRun
from flmarket.ledger import AwardState
from flmarket.market import Round, RoundRecord
from flmarket.privacy import PrivacyAccount, PureDp

__all__ = ["NotEnoughBids", "play_round"]


class NotEnoughBids(Exception):
    """The round waits: fewer owners bid than the task asks for."""


@dataclass
class _Playing:
    """What one run of a round needs."""

    task: TaskRow
    order: TaskRequest
    index: int
    run: SimulationRun
    ledger: TaskLedger
    parties: dict[int, str]
    awarded: bool


def play_round(broker: Broker, task_id: str) -> Iterator[str]:
    """Play the task's next round, yielding the name of each step once it is stored, from the first that was not."""
    _check_enough_bids(broker, task_id)
    playing, stored = _prepare(broker, task_id)
    run, index = playing.run, playing.index
    if stored is None:
        _open(broker, playing)
        yield "open"
        opened = _take_bids(broker, playing)
        if opened is None:
            _settle(broker, playing, run.skip(index))
            return
        yield "bids"
    else:
        opened = _resume(playing, stored)
    round_ = run.clear(opened)
    playing.ledger.flush_holds()
    if not playing.awarded:
        _awarded(broker, playing, round_)
        yield "awards"
    released = _collect(run, round_)
    _event(broker, playing, "updates", {"delivered": len(round_.updates), "awards": len(round_.awards)})
    yield "updates"
    delivered = {round_.awards[owner] for owner in round_.updates}
    playing.ledger.settle(delivered=delivered, released={round_.awards[owner] for owner in released})
    for owner, award in round_.awards.items():
        if playing.ledger.award(award).state is not AwardState.POSTED:
            round_.updates.pop(owner, None)
    _settle(broker, playing, run.close(round_))


def _check_enough_bids(broker: Broker, task_id: str) -> None:
    """NotEnoughBids for a round that is open and still waits, before anything is loaded for it."""
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
        need = order_of(task.spec).broker
        row = session.get(RoundRow, (task_id, task.rounds_done))
        if not need.simulated and row is not None and row.state == "open":
            count = select(func.count()).select_from(Bid).where(Bid.task_id == task_id, Bid.active)
            if (session.scalar(count) or 0) < need.minimum_bids:
                raise NotEnoughBids


def _prepare(broker: Broker, task_id: str) -> tuple[_Playing, dict[str, Any] | None]:
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id, options=[undefer(TaskRow.checkpoint)])
        slots = session.scalars(select(Slot).where(Slot.task_id == task_id, Slot.party_id.is_not(None))).all()
        row = session.get(RoundRow, (task_id, task.rounds_done), options=[undefer(RoundRow.opened)])
        stored = None if row is None else row.opened
    order = order_of(task.spec)
    simulation = broker.simulations.build(task_id, order)
    parties = {slot.slot: slot.party_id for slot in slots if slot.party_id is not None}
    ledger = TaskLedger(
        broker.books.ledger,
        task_id,
        lambda owner: parties.get(owner) or slot_account(task_id, owner),
        available_micros=task.escrow_micros - task.spent_micros,
        mechanism=simulation.perturbation.name,
        guarantee=simulation.perturbation.guarantee,
    )
    run = SimulationRun(simulation, ledger)  # type: ignore[arg-type]  # the part of the protocol that a market uses
    if task.checkpoint is not None:
        run.restore(state_from(task.checkpoint))
    awarded = row is not None and row.state == AWARDED
    return _Playing(task, order, task.rounds_done, run, ledger, parties, awarded), stored


def _open(broker: Broker, playing: _Playing) -> None:
    task_id, index = playing.task.id, playing.index
    with broker.database.write() as session:
        open_round(session, task_id, index)


def _take_bids(broker: Broker, playing: _Playing) -> OpenRound | None:
    """The bids that stand now, drawn and stored; None if nobody can sell."""
    task_id, index, run = playing.task.id, playing.index, playing.run
    with broker.database.read() as session:
        standing = session.scalars(select(Bid).where(Bid.task_id == task_id, Bid.active)).all()
        for slot in session.scalars(select(Slot).where(Slot.task_id == task_id, Slot.party_id.is_not(None))):
            assert slot.party_id is not None
            playing.parties[slot.slot] = slot.party_id  # whoever came while the round was open
    if not playing.order.broker.simulated and len(standing) < playing.order.broker.minimum_bids:
        raise NotEnoughBids
    by_party = broker.books.privacy_of([bid.party_id for bid in standing])
    privacy = {bid.slot: by_party[bid.party_id] for bid in standing}
    _use_privacy(run, privacy)
    run.owners.bids = _profile(run.spec, standing)
    taken = set(playing.parties) - {bid.slot for bid in standing}
    everybody = np.arange(run.spec.bids.n) if playing.order.broker.simulated else np.array(sorted(privacy), dtype=int)
    opened = run.open(index, among=np.setdiff1d(everybody, np.array(sorted(taken), dtype=int)))
    if opened is None:
        return None
    document = opened_to(opened) | {"privacy": {str(slot): list(pair) for slot, pair in privacy.items()}}
    document["parties"] = {str(slot): party for slot, party in playing.parties.items()}
    with broker.database.write() as session:
        take_bids(session, task_id, index, document, opened.budget_micros)
    return opened


def _resume(playing: _Playing, stored: dict[str, Any]) -> OpenRound:
    """The bids as they were when the round was cut off, with the owners' accounts as they were then."""
    opened = opened_from(stored)
    _use_privacy(playing.run, {int(slot): tuple(pair) for slot, pair in stored["privacy"].items()})
    playing.parties.clear()
    playing.parties.update({int(slot): party for slot, party in stored["parties"].items()})
    playing.run.owners.offers[opened.bidders] += 1
    return opened


def _use_privacy(run: SimulationRun, privacy: dict[int, Any]) -> None:
    """Registered owners bring their lifetime accounts from the ledger, over all tasks."""
    for slot, (cap, spent) in privacy.items():
        account = PrivacyAccount(PureDp(cap or 1e-9))
        if spent > 0:
            account.compose(PureDp(min(spent, cap or 1e-9)))
        run.owners.use_account(slot, account)


def _profile(simulation: Simulation, standing: Any) -> BidProfile:
    """Everybody's bids: as simulated, except for the places of owners with a bid of their own."""
    bids = simulation.bids
    kind, rate = bids.valuations.kind.copy(), bids.valuations.rate.copy()
    budget, size = bids.privacy_budget.copy(), bids.data_size.copy()
    tables = {}
    for bid in standing:
        budget[bid.slot], size[bid.slot] = bid.privacy_budget, bid.data_size
        if bid.kind == "tabulated":
            tables[bid.slot] = Valuations.tabulated([bid.grid], [bid.values])
        else:
            kind[bid.slot], rate[bid.slot] = int(Kind[bid.kind.upper()]), bid.rate
    if not tables:
        return BidProfile(Valuations(kind, rate), budget, size)
    owners = range(bids.n)
    parts = [tables.get(slot) or Valuations(kind[slot : slot + 1], rate[slot : slot + 1]) for slot in owners]
    return BidProfile(Valuations.concatenate(parts), budget, size)


def _awarded(broker: Broker, playing: _Playing, round_: Round) -> None:
    bidders, epsilon, price = round_.bidders.tolist(), round_.epsilon.tolist(), round_.price_micros.tolist()
    winners = [Winner(*one) for one in zip(bidders, epsilon, price, strict=True) if one[0] in round_.awards]
    with broker.database.write() as session:
        award_round(session, playing.task.id, playing.index, winners)


def _collect(run: SimulationRun, round_: Round) -> list[int]:
    """Take deliveries; returns the owners who released something, whether it can be used or not."""
    before = {owner: run.owners.accounts[owner].releases for owner in round_.awards}
    run.collect(round_)
    return [owner for owner, count in before.items() if run.owners.accounts[owner].releases > count]


def _settle(broker: Broker, playing: _Playing, record: RoundRecord) -> None:
    run = playing.run
    with broker.database.write() as session:
        settle_round(
            session,
            playing.task.id,
            record,
            parties=playing.parties,
            parameters=run.buyers_model(),
            checkpoint=state_to(run.state()),
            pause_ms=int(1000 * playing.order.broker.round_seconds / 5),
        )
    broker.metrics.count_round(valid=record.valid, paid_micros=record.spent_micros)


def _event(broker: Broker, playing: _Playing, kind: str, data: dict[str, Any]) -> None:
    with broker.database.write() as session:
        add_event(session, playing.task.id, playing.index, kind, data)
