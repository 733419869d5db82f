"""A task's rounds: the market's own driver (`flmarket.market.Rounds`) on the broker's tables, ledger and owners.

`SqlStore` keeps what a round must not lose where pages, bills and the live stream read it. `TaskOwners` are a task's
owners in this process: registered ones by their standing bids and their accounts in the ledger, the others simulated.
`play_round` is the driver's generator with the broker's events between its steps, so that the worker can serve other
tasks in between and people can watch. A round that was cut off goes on from its plan, by whichever process.

Awards are paid by the task's account, which holds its budget since it was posted, to a party's account or, for a
simulated owner, `<task>/owner-<place>`.

What a round leaves in the tables at each of its steps is the same for whichever engine plays it (`open_round` to
`void_round`): what pages, bills, statements and the live stream read. The ledger is the authority on money; these rows
follow it. Repeating a step changes no row for the worse: a round that is settled stays so, and an event that is said
twice is read as the latest.

Rounds and tasks end in the same way for every engine (`begin` to `end_task`). A round that has been awarded is played
to its end, whatever its buyer or the clock says meanwhile: owners may have delivered. One that has not is undone when
its task ends. Which of the two follows from what is stored, so it is the same whether or not a crash came in between;
and what is written about a round that is undone is what the ledger says.

A task ends in three steps: what is still held of its round goes back to it, everything left goes back to the buyer,
its rows are written in one transaction. The first two may be repeated, the last happens once. The price of an award in
dispute stays in escrow beyond that, until the operator decides (`office.disputes`).
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from sqlalchemy import ColumnExpressionArgument, delete, select
from sqlalchemy.orm import Session, undefer

from flmarket.bids import FloatArray
from flmarket.broker.books import shown_epsilon, slot_account
from flmarket.broker.core import Broker
from flmarket.broker.office.notices import announce_awards, announce_caps, announce_end, listeners
from flmarket.broker.office.offers import valuations_of
from flmarket.broker.office.operator import note
from flmarket.broker.requests import order_of
from flmarket.broker.stamps import now
from flmarket.broker.tables import Bid as BidRow
from flmarket.broker.tables import (
    Delivered,
    Event,
    PartyRow,
    Release,
    RoundRow,
    Slot,
    TaskRow,
    how_many,
    vector,
    vector_bytes,
)
from flmarket.client.wire import ENDED
from flmarket.engines import MemoryOwners, Spec
from flmarket.errors import InvalidInput
from flmarket.ledger import Award, AwardState, Resolution
from flmarket.market import (
    Announcement,
    Bid,
    Checkpoint,
    Guard,
    MarketKind,
    RoundPlan,
    RoundRecord,
    Rounds,
    TooFewBids,
    award_id,
    resolve_each,
)
from flmarket.market.owner import Owner
from flmarket.market.record import MemoryRecord
from flmarket.privacy import PrivacyAccount, PureDp, event_to_dict
from flmarket.report.formatting import finite_or_none

AWARDED = "awarded"
_SHOWN = 200
_EXCHANGE = -1  # nobody's place: among deliveries, where a masked sum under way is kept
INTERNAL = "an internal error; the operator's log has the details"
_GIVEN_UP = "the round was given up"


def open_round(session: Session, task_id: str, index: int) -> None:
    """Bids are asked for."""
    if session.get(RoundRow, (task_id, index)) is None:
        session.add(RoundRow(task_id=task_id, index=index, state="open", opened_at=now()))
        add_event(session, task_id, index, "open", {})


def award_round(session: Session, task_id: str, index: int, awards: Mapping[int, Award]) -> None:
    """Prices are in escrow. The live view shows whose, and for which ε: None if nothing bounds it."""
    row = session.get_one(RoundRow, (task_id, index))
    row.state, row.winners = AWARDED, len(awards)
    held = sum(one.price_micros for one in awards.values())
    shown = [
        {"slot": slot, "epsilon": finite_or_none(shown_epsilon(one.loss)), "price_micros": one.price_micros}
        | {"loss": event_to_dict(one.loss)}
        for slot, one in islice(awards.items(), _SHOWN)
    ]
    add_event(session, task_id, index, "awards", {"awards": len(awards), "held_micros": held, "winners": shown})


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


class SqlStore:
    """One task's rounds in the broker's tables. Who may write is the worker's lease, or a run's tenancy."""

    durable = True

    def __init__(
        self, broker: Broker, task_id: str, kind: MarketKind, parties: dict[int, str], pause_ms: int = 0
    ) -> None:
        self.broker, self.task_id, self.kind, self.parties, self.pause_ms = broker, task_id, kind, parties, pause_ms

    def lock(self) -> None:
        """The lease does."""

    def unlock(self) -> None:
        """The lease does."""

    def checkpoint(self) -> Checkpoint | None:
        """After the last round that is over; a typed error for a task that another version has begun otherwise."""
        with self.broker.database.read() as session:
            task = session.get_one(TaskRow, self.task_id, options=[undefer(TaskRow.checkpoint)])
            row = session.get(RoundRow, (self.task_id, task.rounds_done), options=[undefer(RoundRow.opened)])
        saved: dict[str, Any] = {}
        if task.checkpoint is not None:
            with np.load(io.BytesIO(task.checkpoint), allow_pickle=False) as file:
                saved = {name: file[name] for name in file.files}
        planned = row is None or row.opened is None or "plan" in row.opened
        if not planned or (task.rounds_done and "notes" not in saved):
            raise InvalidInput("task", self.task_id, "one that this version has begun: it cannot be played on")
        if not saved:
            return None
        notes, owners = json.loads(saved["notes"].tobytes()), saved["owners"].tobytes()
        history = list(saved["history"])
        return Checkpoint(task.rounds_done, saved["parameters"], history, notes, owners, saved.get("best"))

    def terms(self) -> dict[str, Any]:
        """What holds for all rounds; empty while that is not settled."""
        with self.broker.database.read() as session:
            found = session.get_one(TaskRow, self.task_id, options=[undefer(TaskRow.terms)]).terms
        return {} if found is None else dict(json.loads(found))

    def plan(self, index: int) -> RoundPlan | None:
        """What was decided for a round, if it was; whose place is whose stands with it."""
        with self.broker.database.read() as session:
            row = session.get(RoundRow, (self.task_id, index), options=[undefer(RoundRow.opened)])
        opened = None if row is None else row.opened
        if opened is None or "plan" not in opened:
            return None
        self.parties.clear()
        self.parties.update({int(slot): party for slot, party in opened["parties"].items()})
        return RoundPlan.from_dict(json.loads(opened["plan"]))

    def deliveries(self, index: int) -> dict[int, FloatArray]:
        """Checked deliveries of a round so far."""
        of_round = Delivered.task_id == self.task_id, Delivered.index == index, Delivered.slot != _EXCHANGE
        query = select(Delivered).where(*of_round)
        with self.broker.database.read() as session:
            return {row.slot: vector(row.vector) for row in session.scalars(query)}

    def record(self, index: int) -> RoundRecord | None:
        """Rows tell; the driver needs none of them to go on."""
        return None

    def save_plan(self, plan: RoundPlan, terms: dict[str, Any]) -> None:
        """With the terms that it follows from, in one transaction."""
        owners = plan.memory.get("bidders") or [order.owner for order in plan.orders]
        sizes = plan.memory.get("data_size") or [order.records for order in plan.orders]
        document = {
            "bidders": owners, "data_size": sizes, "plan": json.dumps(plan.to_dict()),
            "parties": {str(slot): party for slot, party in self.parties.items()},
        }  # fmt: skip
        with self.broker.database.write() as session:
            row = session.get_one(RoundRow, (self.task_id, plan.index))
            row.opened, row.state, row.bids, row.budget_micros = document, "bids", len(owners), plan.deposit_micros
            told = {"bids": row.bids, "budget_micros": row.budget_micros}
            add_event(session, self.task_id, plan.index, "bids", told)
            if terms:
                session.get_one(TaskRow, self.task_id).terms = json.dumps(terms)

    def save_deliveries(self, index: int, vectors: Mapping[int, FloatArray]) -> None:
        """From here on these count."""
        with self.broker.database.write() as session:
            for slot, update in vectors.items():
                session.merge(
                    Delivered(task_id=self.task_id, index=index, slot=slot, vector=vector_bytes(np.asarray(update)))
                )

    def exchange(self, index: int) -> bytes:
        """A masked sum of the round under way, if there is one."""
        with self.broker.database.read() as session:
            row = session.get(Delivered, (self.task_id, index, _EXCHANGE))
            return b"" if row is None else row.vector

    def save_exchange(self, index: int, state: bytes) -> None:
        """How far it has come, until the round is over."""
        with self.broker.database.write() as session:
            session.merge(Delivered(task_id=self.task_id, index=index, slot=_EXCHANGE, vector=state))

    def save_round(self, record: RoundRecord, checkpoint: Checkpoint) -> None:
        """Everything that a round changed, in one transaction: awards are resolved and the model has moved.

        An award that is pending is in dispute, and on the statements with its price in escrow; if awards are lasting it
        runs on, and is not on them yet (such a one cannot be disputed).
        """
        books, lasting = self.broker.books, self.kind.side.lasting
        awards = books.round_awards({i: self.kind.award_id(record.index, i) for i in record.bidders.tolist()})
        with self.broker.database.read() as session:
            told = listeners(session, [self.parties[i] for i in awards if i in self.parties])
        privacy = books.privacy_of(told) if told else {}
        with self.broker.database.write() as session:
            announce_caps(session, privacy)
            session.execute(delete(Delivered).where(Delivered.task_id == self.task_id))
            task = session.get_one(TaskRow, self.task_id, with_for_update=True)
            if task.rounds_done > record.index:
                return  # it was written before
            row = session.get_one(RoundRow, (self.task_id, record.index))
            ended = self._settle(session, task, row, record, awards)
            task.checkpoint = _packed(checkpoint)
        self.broker.metrics.count_round(row, ended, lasting=lasting)

    def _settle(
        self, session: Session, task: TaskRow, row: RoundRow, record: RoundRecord, awards: Mapping[int, Award]
    ) -> list[Release]:
        """A round's rows, as the record and the ledger have it."""
        at, index = now(), record.index
        bound = record.error_bound if np.isfinite(record.error_bound) else None
        row.state, row.closed_at = ("settled" if record.valid else "empty"), at
        row.delivered, row.spent_micros, row.error_bound = int(record.delivered.sum()), record.spent_micros, bound
        row.accuracy, row.loss = record.metrics.get("accuracy"), record.metrics.get("loss")
        row.balanced_accuracy = record.metrics.get("balanced_accuracy")
        places = {owner: k for k, owner in enumerate(record.bidders.tolist())}
        ended = []
        for owner, award in awards.items():
            k = places[owner]
            if award.state is AwardState.PENDING:
                if self.kind.side.lasting:
                    continue
                award = replace(award, reason=record.reason[k])  # in dispute: how it would have ended
            if record.state[k] is not None:
                sold = {"records": float(record.data_size[k]), "weight": float(record.weights[k])}
                ended.append(_release(task.id, index, owner, award, at, party_id=self.parties.get(owner), **sold))
        session.add_all(ended)
        task.rounds_done, task.spent_micros = index + 1, task.spent_micros + record.spent_micros
        task.rounds = index + 1 if self.kind.done else task.rounds
        task.next_at = at + self.pause_ms
        if self.kind.buyers_model is not None:
            task.parameters, task.accuracy = vector_bytes(self.kind.buyers_model), row.accuracy
            task.error_bound = bound
        announce_awards(session, "payment", task, index, awards.values(), state=AwardState.POSTED)
        told = {
            name: getattr(row, name) for name in ("delivered", "winners", "spent_micros", "accuracy", "error_bound")
        }
        add_event(session, task.id, index, "settled", told | {"rounds_done": index + 1, "rounds": task.rounds})
        return ended


def _packed(checkpoint: Checkpoint) -> bytes:
    out, notes = io.BytesIO(), np.frombuffer(json.dumps(checkpoint.notes).encode(), dtype=np.uint8)
    history = np.array(checkpoint.history).reshape(-1, checkpoint.parameters.size)
    owners = np.frombuffer(checkpoint.owners, dtype=np.uint8)
    best = {} if checkpoint.best is None else {"best": checkpoint.best}
    np.savez_compressed(
        out, parameters=checkpoint.parameters, history=history, notes=notes, owners=owners, allow_pickle=False, **best
    )
    return out.getvalue()


def _standing(task_id: str) -> tuple[ColumnExpressionArgument[bool], ...]:
    """Bids that count: not withdrawn, and of parties that are not closed, who cannot sign in to withdraw theirs."""
    open_ = select(PartyRow.id).where(PartyRow.active)
    return BidRow.task_id == task_id, BidRow.active, BidRow.party_id.in_(open_)


class TaskOwners(MemoryOwners):
    """A task's owners in this process. `parties` says whose places are taken; it is read again for every round."""

    def __init__(self, broker: Broker, task_id: str, spec: Spec, parties: dict[int, str], *, simulated: bool) -> None:
        super().__init__(spec)
        self.broker, self.task_id, self.parties, self.simulated = broker, task_id, parties, simulated

    def guard(self, number: int) -> Guard:
        """A registered owner's account is her cap in the ledger and what she has spent of it, over all tasks."""
        if number not in self._guards and number in self.parties:
            cap, spent = self.broker.books.privacy(self.parties[number], "update")
            self._register(number, self.spec.owner(number), cap, spent)
        return super().guard(number)

    def bids(self, call: Announcement, accepts: Callable[[Bid], bool]) -> Mapping[int, Bid]:
        """Standing bids, cut to what accounts allow; a place that nobody took bids if it is simulated."""
        with self.broker.database.read() as session:
            standing = session.scalars(select(BidRow).where(*_standing(self.task_id))).all()
            taken = session.scalars(select(Slot).where(Slot.task_id == self.task_id, Slot.party_id.is_not(None))).all()
        self.parties.clear()
        self.parties.update({slot.slot: slot.party_id for slot in taken if slot.party_id is not None})
        privacy = self.broker.books.privacy_of([bid.party_id for bid in standing], "update")
        for bid in standing:
            owner, size = self.spec.owner(bid.slot), bid.data_size
            asks = replace(owner, x=owner.x[:size], y=owner.y[:size], privacy_budget=bid.privacy_budget)
            self._register(bid.slot, replace(asks, valuation=valuations_of(bid)), *privacy[bid.party_id])
        found, bidding = super().bids(call, accepts), {bid.slot for bid in standing}
        away = set(self.parties) - bidding
        return {slot: bid for slot, bid in found.items() if slot not in away and (self.simulated or slot in bidding)}

    def _register(self, number: int, owner: Owner, cap: float | None, spent: float) -> None:
        account = PrivacyAccount(PureDp(cap or 1e-9))
        if spent > 0:
            account.compose(PureDp(min(spent, cap or 1e-9)))
        self.records[number] = record = MemoryRecord(account)
        self._guards[number] = Guard(replace(owner, cap=account.cap), record)
        self._stale.add(number)


def play_round(broker: Broker, task_id: str) -> Iterator[str]:
    """Play the task's next round, yielding the name of each step once it is stored, from the first that was not."""
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
        row = session.get(RoundRow, (task_id, task.rounds_done))
        bids = how_many(session, *_standing(task_id))
    order = order_of(task.spec)
    waits = order.broker.minimum_bids if not order.broker.simulated else 0
    if bids < waits and (row is None or row.state == "open"):  # before anything is loaded for it
        with broker.database.write() as session:
            open_round(session, task_id, task.rounds_done)
        raise TooFewBids
    spec, parties = broker.simulations.build(task_id, order), dict[int, str]()
    kind = spec.kind(buyer=task_id)
    owners = TaskOwners(broker, task_id, spec, parties, simulated=order.broker.simulated)
    store = SqlStore(broker, task_id, kind, parties, pause_ms=int(1000 * order.broker.round_seconds / 5))
    rounds = Rounds(
        kind, owners, broker.books.ledger, store, deposits=False, minimum_bids=waits,
        account_of=lambda owner: parties.get(owner) or slot_account(task_id, owner),
    )  # fmt: skip
    yield from steps_with_events(broker, task_id, rounds, rounds.resume())


def steps_with_events(broker: Broker, task_id: str, rounds: Rounds, index: int) -> Iterator[str]:
    """The driver's steps, with what the tables say of each besides what its store keeps; the last one is silent."""
    for step in rounds.steps(index):
        if step == "settled":
            return
        with broker.database.write() as session:
            if step == "open":
                open_round(session, task_id, index)
            elif step == "awards" and session.get_one(RoundRow, (task_id, index)).state != AWARDED:
                held = {owner: award for owner, award in rounds.awards.items() if award.state is AwardState.PENDING}
                award_round(session, task_id, index, held)
                task = session.get_one(TaskRow, task_id)
                announce_awards(session, "award", task, index, held.values(), state=AwardState.PENDING)
            elif step == "updates":
                counts = {"delivered": len(rounds.updates), "awards": len(rounds.awards)}
                add_event(session, task_id, index, "updates", counts)
        yield step


def begin(session: Session, task: TaskRow) -> None:
    """A queued task is running from its worker's first look at it."""
    if task.state == "queued":
        task.state, task.started_at = "running", now()
        session.add(Event(task_id=task.id, kind="running", data={"rounds": task.rounds}, at=now()))


def ending(session: Session, task: TaskRow) -> str | None:
    """The state that the task ends in if it is time; None while there is a round to be played."""
    row = session.get(RoundRow, (task.id, task.rounds_done))
    if row is not None and row.state == AWARDED:
        return None
    if task.rounds_done >= task.rounds:
        return "finished"
    if task.rounds_done and order_of(task.spec).lasting:  # what was awarded is for all rounds
        return None
    if task.cancel_requested:
        return "cancelled"
    return "expired" if task.deadline_at < now() else None


def open_awards(broker: Broker, task_id: str) -> dict[int, Award]:
    """The awards of the task's round under way by owner, as the ledger has them."""
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
        first = 0 if order_of(task.spec).lasting else task.rounds_done
        row = session.get(RoundRow, (task_id, first), options=[undefer(RoundRow.opened)])
        bidders = row.opened["bidders"] if row is not None and row.opened is not None else []
    return broker.books.round_awards({owner: award_id(task_id, first, owner) for owner in bidders})


def end_task(broker: Broker, task_id: str, state: str, error: str = "") -> None:
    """Undo the round under way, give the rest of the escrow back and close the task; repeating it changes nothing."""
    with broker.database.read() as session:
        task = session.get_one(TaskRow, task_id)
    if task.state in ENDED:
        return
    awards = open_awards(broker, task_id)
    pending = [owner for owner, award in awards.items() if award.state is AwardState.PENDING]
    voids = [Resolution(awards[owner].id, AwardState.VOIDED, _GIVEN_UP) for owner in pending]
    awards |= dict(zip(pending, resolve_each(broker.books.ledger, voids), strict=True))
    refunded = broker.books.refund(task_id, task.buyer_id)
    with broker.database.write() as session:
        task = session.get_one(TaskRow, task_id, with_for_update=True)
        if task.state in ENDED:
            return
        void = void_round(session, task, awards)
        task.state, task.error, task.finished_at = state, error[:2000], now()
        task.refunded_micros += refunded  # beside what decided disputes gave back
        session.add(Event(task_id=task_id, kind=state, data={"refunded_micros": refunded, "error": error}, at=now()))
        announce_end(session, task)
        note(session, None, f"task.{state}", task_id, outcome="failed" if error else "ok", detail=error)
    if void is not None:
        row, ended = void
        broker.metrics.count_round(row, ended, lasting=order_of(task.spec).lasting)
