"""The run that plays a task on Flower: a ServerApp that opens the broker's database and goes on where the task stands.

One round is one `MarketStrategy.start`, with the owners who have a node now. Its store and the ledger see to it that a
round that was cut off ends as it was decided; what the store says of settled rounds is then copied into the broker's
rows, in the same way whether this run played them or a former one that died before it could say so.

Between rounds the run looks whether the task was cancelled or its deadline has passed, and then ends; the worker closes
the task. A round with awards is always played to its end: owners may have delivered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from sqlalchemy import select

from flmarket.broker.core import Broker
from flmarket.broker.database import is_transient
from flmarket.broker.requests import order_of
from flmarket.broker.tables import PartyRow, RoundRow, Slot, TaskRow
from flmarket.broker.work.endings import INTERNAL, ending
from flmarket.broker.work.flower.files import RunFile, task_folder
from flmarket.broker.work.flower.ledger import RunLedger
from flmarket.broker.work.flower.market import TaskMarket, TooFewBids
from flmarket.broker.work.flower.tenancy import Tenancy
from flmarket.broker.work.round_rows import AWARDED, Winner, add_event, award_round, open_round, settle_round, take_bids
from flmarket.engines.flower.kinds import RoundPlan, record_from_dict
from flmarket.engines.flower.node import run_setting
from flmarket.engines.flower.strategy import MarketStrategy
from flmarket.errors import FlmarketError, SettlementError
from flmarket.market import FileStore

__all__ = ["TaskServer", "app", "play_task", "serve"]

_LOOK_SECONDS = 1.0
_WAIT_FOR_BIDS_SECONDS = 10.0
_LONGEST_REST_SECONDS = 30.0
log = logging.getLogger("flmarket.broker")

app = ServerApp()


@app.main()
def serve(grid: Grid, context: Context) -> None:
    """Play the task that the run's configuration names."""
    settings = RunFile.load(Path(run_setting(context, "broker"))).settings()
    broker = Broker.open(settings)
    try:
        play_task(broker, grid, run_setting(context, "task"), int(context.run_config["attempt"]))
    finally:
        broker.close()


def play_task(
    broker: Broker, grid: Grid, task_id: str, attempt: int, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Take the task and play the rounds that are left of it; on an error, the reason is written down for the worker."""
    settings = broker.settings
    # as long as a round can take by its deadlines, and as much again
    patience = 120.0 + 2 * (5 * settings.flower_bid_seconds + settings.flower_train_seconds)
    tenancy = Tenancy(broker, task_id, attempt, patience=patience)
    tenancy.take()
    try:
        with tenancy.renewing():
            TaskServer(broker, grid, tenancy, sleep=sleep).play()
    except FlmarketError as error:
        tenancy.end(str(error))
        raise
    except Exception:
        tenancy.end(INTERNAL)
        raise
    tenancy.end()


class TaskServer:
    """A task, its store and the grid."""

    def __init__(self, broker: Broker, grid: Grid, tenancy: Tenancy, *, sleep: Callable[[float], None]) -> None:
        self.broker, self.grid, self.tenancy, self.sleep = broker, grid, tenancy, sleep
        self.task_id = tenancy.task_id
        self.store = FileStore(task_folder(broker.settings.flower_folder, self.task_id) / "server")
        with broker.database.read() as session:
            self.order = order_of(session.get_one(TaskRow, self.task_id).spec)
        self.spec = broker.simulations.build(self.task_id, self.order)
        self.parties: dict[int, str] = {}

    def play(self) -> None:
        """All rounds that are left, or up to a cancellation or the deadline; faults of the database are waited out."""
        faults = 0
        while True:
            try:
                if not self._play_next():
                    return
                faults = 0
            except Exception as error:
                if not is_transient(error):
                    raise
                faults += 1
                log.warning("task %s: the database failed, its round is taken up again (%s)", self.task_id, error)
                self.sleep(min(_LONGEST_REST_SECONDS, 0.1 * 2**faults))

    def _play_next(self) -> bool:
        """One round, from wherever it stands; False if it is time to end."""
        self.tenancy.step()
        index = self.catch_up()
        if self.store.plan(index) is None and self._ended():
            return False
        due = time.monotonic() + self.order.broker.round_seconds
        try:
            self.round(index)
        except TooFewBids:
            due = max(due, time.monotonic() + _WAIT_FOR_BIDS_SECONDS)
        self._wait_until(due)
        return True

    def round(self, index: int) -> None:
        """Play one round, from wherever it stands, to its record in the store."""
        known = self._seat_owners()
        if self.store.plan(index) is None:
            with self.broker.database.write() as session:
                open_round(session, self.task_id, index)
        settings = self.broker.settings
        ledger = RunLedger(
            self.broker.books.ledger,
            self.task_id,
            self.parties.__getitem__,
            held=lambda winners: self._held(index, winners),
            delivered=lambda count: self._delivered(index, count),
        )
        strategy = MarketStrategy(
            self._market(),
            ledger,  # type: ignore[arg-type]  # the part of the protocol that the strategy uses
            self.store,
            bid_seconds=settings.flower_bid_seconds,
            train_seconds=settings.flower_train_seconds,
            nodes=self.order.broker.minimum_bids,
            known_nodes=known,
        )
        strategy.start(self.grid, num_rounds=index + 1)

    def catch_up(self) -> int:
        """Copy what the store has settled into the broker's rows; returns the round to play next."""
        with self.broker.database.read() as session:
            done = session.get_one(TaskRow, self.task_id).rounds_done
            row = session.get(RoundRow, (self.task_id, done))
            self._read_seats(session.scalars(select(Slot).where(Slot.task_id == self.task_id)).all())
        saved = self.store.checkpoint()
        reached = 0 if saved is None else saved.next_round
        awarded = row is not None and row.state == AWARDED
        if reached < done or (awarded and reached == done and self.store.plan(done) is None):
            raise SettlementError(f"the folder of task {self.task_id} does not hold the round that the books are at")
        for index in range(done, reached):
            assert saved is not None
            record = self.store.record(index)
            if record is None:
                raise SettlementError(f"the folder of task {self.task_id} does not hold the record of round {index}")
            market = self._market()
            market.parameters, market.history = saved.parameters, list(saved.history)
            with self.broker.database.write() as session:
                settle_round(
                    session,
                    self.task_id,
                    record_from_dict(record),
                    parties=self.parties,
                    parameters=market.buyers_model,
                )
        return reached

    def _market(self) -> TaskMarket:
        return TaskMarket(
            self.spec, minimum_bids=self.order.broker.minimum_bids, left=self._privacy_left, planned=self._planned
        )

    def _seat_owners(self) -> dict[int, int]:
        """Every owner with a node has a place, under her number; returns whose node is whose."""
        query = select(PartyRow).where(PartyRow.active, PartyRow.role == "owner", PartyRow.node_id.is_not(None))
        known = {}
        with self.broker.database.write() as session:
            for party in session.scalars(query):
                assert party.node_id is not None
                assert party.owner_number is not None
                known[int(party.node_id)] = party.owner_number
                if session.get(Slot, (self.task_id, party.owner_number)) is None:
                    session.add(Slot(task_id=self.task_id, slot=party.owner_number, records=0, party_id=party.id))
            session.flush()
            self._read_seats(session.scalars(select(Slot).where(Slot.task_id == self.task_id)).all())
        return known

    def _read_seats(self, slots: Sequence[Slot]) -> None:
        self.parties = {slot.slot: slot.party_id for slot in slots if slot.party_id is not None}

    def _privacy_left(self, owners: list[int]) -> dict[int, float]:
        accounts = self.broker.books.ledger.privacy_accounts(self.parties[owner] for owner in owners)
        found = {owner: accounts.get(self.parties[owner]) for owner in owners}
        return {owner: 0.0 if account is None else account.affordable() for owner, account in found.items()}

    def _planned(self, plan: RoundPlan) -> None:
        with self.broker.database.write() as session:
            take_bids(session, self.task_id, plan.index, plan.memory, plan.deposit_micros)

    def _held(self, index: int, winners: Sequence[Winner]) -> None:
        with self.broker.database.write() as session:
            if session.get_one(RoundRow, (self.task_id, index)).state != AWARDED:  # after a crash it may be
                award_round(session, self.task_id, index, winners)

    def _delivered(self, index: int, count: int) -> None:
        with self.broker.database.write() as session:
            awards = session.get_one(RoundRow, (self.task_id, index)).winners
            add_event(session, self.task_id, index, "updates", {"delivered": count, "awards": awards})

    def _ended(self) -> bool:
        with self.broker.database.read() as session:
            return ending(session, session.get_one(TaskRow, self.task_id)) is not None

    def _wait_until(self, due: float) -> None:
        """Keep the task's pace; a cancellation is seen at once."""
        while (left := due - time.monotonic()) > 0 and not self._ended():
            self.tenancy.step()
            self.sleep(min(left, _LOOK_SECONDS))
