"""The run that plays a task on Flower: a ServerApp that opens the broker's database and goes on where the task stands.

One round is one `Rounds`, as the worker plays them too, with the owners who have a node now. The broker's tables
(`SqlStore`) and the ledger see to it that a round that was cut off ends as it was decided.

Between rounds the run looks whether the task was cancelled or its deadline has passed, and then ends; the worker closes
the task. A round with awards is always played to its end: owners may have delivered.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from sqlalchemy import select

from flmarket.broker.core import Broker
from flmarket.broker.database import is_transient
from flmarket.broker.office.runs import HAS_NODE
from flmarket.broker.requests import order_of
from flmarket.broker.tables import PartyRow, Slot, TaskRow
from flmarket.broker.work.flower.files import load_in_run
from flmarket.broker.work.flower.tenancy import Tenancy
from flmarket.broker.work.rounds import INTERNAL, SqlStore, ending, steps_with_events
from flmarket.engines.flower.node import run_setting
from flmarket.engines.flower.strategy import GridOwners
from flmarket.errors import FlmarketError
from flmarket.market import Announcement, Bid, Rounds, TooFewBids, kinds
from flmarket.market.owner import LEAST_EPSILON
from flmarket.privacy import PrivacyAccount, unit_of

_LOOK_SECONDS = 1.0
_WAIT_FOR_BIDS_SECONDS = 10.0
_LONGEST_REST_SECONDS = 30.0
log = logging.getLogger("flmarket.broker")

app = ServerApp()


@app.main()
def serve(grid: Grid, context: Context) -> None:
    """Play the task that the run's configuration names."""
    settings = load_in_run(Path(run_setting(context, "broker")))
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


class RegisteredOwners(GridOwners):
    """Owners with a node and a cap in this broker's ledger.

    Their bids are cut by their own guards, and once more to what their registered caps still allow over all tasks. Both
    caps hold: she may have sold elsewhere, and the broker need not believe her guard.
    """

    broker: Broker
    parties: dict[int, str]

    def bids(self, call: Announcement, accepts: Callable[[Bid], bool]) -> Mapping[int, Bid]:
        """Bids within registered caps."""
        found = super().bids(call, accepts)
        accounts = self.broker.books.ledger.privacy_accounts(self.parties[owner] for owner in found)
        most = {owner: self._left(accounts.get(self.parties[owner]), bid, call) for owner, bid in found.items()}
        return {
            owner: replace(bid, privacy_budget=min(bid.privacy_budget, most[owner]))
            for owner, bid in found.items()
            if most[owner] >= LEAST_EPSILON
        }

    @staticmethod
    def _left(account: PrivacyAccount | None, bid: Bid, call: Announcement) -> float:
        """The most ε that a registered account still allows; nothing if it counts another unit than is sold here."""
        side = kinds.of(call.market).side
        if account is None or unit_of(account.cap) != side.unit(call):
            return 0.0
        guarantee, releases = side.whole(call, account.cap, bid.data_size)
        most = max(bid.privacy_budget, LEAST_EPSILON)
        return account.affordable(releases, guarantee=guarantee, least=LEAST_EPSILON, most=most)


class TaskServer:
    """A task and the grid."""

    def __init__(self, broker: Broker, grid: Grid, tenancy: Tenancy, *, sleep: Callable[[float], None]) -> None:
        self.broker, self.grid, self.tenancy, self.sleep = broker, grid, tenancy, sleep
        self.task_id = tenancy.task_id
        with broker.database.read() as session:
            self.order = order_of(session.get_one(TaskRow, self.task_id).spec)
        self.spec = broker.simulations.build(self.task_id, self.order)
        self.parties: dict[int, str] = {}
        self._nodes: dict[int, int] = {}

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
        rounds = self._rounds()
        index = rounds.resume()
        if rounds.store.plan(index) is None and self._ended():
            return False
        due = time.monotonic() + self.order.broker.round_seconds
        try:
            assert isinstance(rounds.owners, GridOwners)
            self._look_around()
            rounds.owners.wait_for(self.order.broker.minimum_bids)
            self._look_around()
            for _ in steps_with_events(self.broker, self.task_id, rounds, index):
                self.tenancy.step()
        except TooFewBids:
            due = max(due, time.monotonic() + _WAIT_FOR_BIDS_SECONDS)
        self._wait_until(due)
        return True

    def _rounds(self) -> Rounds:
        settings, kind, known = self.broker.settings, self.spec.kind(buyer=self.task_id), self._seat_owners()
        ledger, store = self.broker.books.ledger, SqlStore(self.broker, self.task_id, kind, self.parties)
        owners = RegisteredOwners(
            self.grid, kind.model, ledger.head, bid_seconds=settings.flower_bid_seconds,
            train_seconds=settings.flower_train_seconds, known_nodes=known, store=store,
        )  # fmt: skip
        owners.broker, owners.parties = self.broker, self.parties
        return Rounds(
            kind, owners, ledger, store, account_of=self.parties.__getitem__, deposits=False,
            minimum_bids=self.order.broker.minimum_bids,
        )  # fmt: skip

    def _look_around(self) -> None:
        """Which owners' nodes are connected."""
        online = set(self.grid.get_node_ids())
        self.tenancy.saw(sorted(owner for node, owner in self._nodes.items() if node in online))

    def _seat_owners(self) -> dict[int, int]:
        """Every owner with a node has a place, under her number; returns whose node is whose."""
        query = select(PartyRow).where(*HAS_NODE)
        known = {}
        with self.broker.database.write() as session:
            for party in session.scalars(query):
                assert party.node_id is not None
                assert party.owner_number is not None
                known[int(party.node_id)] = party.owner_number
                if session.get(Slot, (self.task_id, party.owner_number)) is None:
                    session.add(Slot(task_id=self.task_id, slot=party.owner_number, records=0, party_id=party.id))
            session.flush()
            slots = session.scalars(select(Slot).where(Slot.task_id == self.task_id)).all()
        self.parties.clear()
        self.parties.update({slot.slot: slot.party_id for slot in slots if slot.party_id is not None})
        self._nodes = known
        return known

    def _ended(self) -> bool:
        with self.broker.database.read() as session:
            return ending(session, session.get_one(TaskRow, self.task_id)) is not None

    def _wait_until(self, due: float) -> None:
        """Keep the task's pace; a cancellation is seen at once."""
        while (left := due - time.monotonic()) > 0 and not self._ended():
            self.tenancy.step()
            self.sleep(min(left, _LOOK_SECONDS))
