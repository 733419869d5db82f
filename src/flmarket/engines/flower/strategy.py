"""A Flower strategy that buys: bids by QUERY, an auction, escrow, TRAIN for winners only, settlement on delivery.

It is a `flwr.serverapp.strategy.Strategy` and runs in Flower's own loop; its `start` adds what a market needs beyond
it: it goes on where a crashed server stopped, keeps its deadlines, and puts each delivery on disk as it comes. A round:

    1 announce, collect bids (query.bid)          by a deadline; who does not answer is not in the round
    2 decide, write the plan down                 from here the round is the same after any crash
    3 bring the budget in, hold every award       by ids that follow from task, round and owner: repeatable
    4 send orders (train), check deliveries       by a deadline; a bad one voids its award, a good one is stored
    5 aggregate, pay, expire what did not come    repeatable, from the stored deliveries
    6 write the record and the next model         the round is over

After a crash from step 3 on, owners whose award is open are asked for what they may have released already
(query.release), and only then to train. One who says that she has released meanwhile, to an order of the dead server
that reached her late, is asked once more. So an owner who released is paid even if the server that asked is gone.

What would break it: a ledger that is not the one the awards were held in. Folder and ledger belong together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from flmarket.engines.flower.deliveries import Bad, Delivered, Refused, checked_delivery
from flmarket.engines.flower.exchange import Roster, exchange
from flmarket.engines.flower.kinds import MarketKind, RoundPlan, record_from_dict, record_to_dict
from flmarket.engines.flower.messages import (
    BID,
    RELEASE,
    REPLAY,
    TRAIN,
    Bid,
    Order,
    pack,
    unpack,
    unpack_head,
)
from flmarket.engines.flower.store import Checkpoint, RoundStore
from flmarket.errors import InvalidInput, PrivacyBudgetExhausted
from flmarket.ledger import Award, AwardState, Head, HoldReceipt, Ledger, Resolution
from flmarket.market import RoundRecord, owner_account, resolve_each

__all__ = ["MarketStrategy"]

FloatArray = NDArray[np.float64]
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
_log = logging.getLogger(__name__)
_NAME = "parameters"


class MarketStrategy(Strategy):
    """Plays a market kind on a grid, with a ledger for the money and a store for what a crash must not lose.

    `bid_seconds` and `train_seconds` are the deadlines. `nodes` waits for so many nodes before the first round.
    `progress` is called with every finished round's record.
    """

    def __init__(
        self,
        kind: MarketKind,
        ledger: Ledger,
        store: RoundStore,
        *,
        bid_seconds: float = 60.0,
        train_seconds: float = 600.0,
        nodes: int = 1,
        known_nodes: Mapping[int, int] | None = None,
        progress: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        if not (bid_seconds > 0 and train_seconds > 0 and nodes >= 1):
            raise InvalidInput("deadlines, nodes", (bid_seconds, train_seconds, nodes), "positive numbers")
        self.kind, self.ledger, self.store = kind, ledger, store
        self.bid_seconds, self.train_seconds, self.nodes = bid_seconds, train_seconds, nodes
        self.roster, self.progress = Roster(known_nodes), progress
        self.records: list[RoundRecord] = []
        self.seconds: dict[str, float] = {}
        self.timings: list[dict[str, float]] = []
        self._plan: RoundPlan | None = None
        self._awards: dict[int, Award] = {}
        self._open: dict[int, Order] = {}
        self._updates: dict[int, FloatArray] = {}
        self._to_fetch: set[int] = set()
        self._seen: dict[int, Head] = {}
        self._grid: Grid | None = None

    # Flower's four questions and its loop

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Steps 1 to 3, and the messages of step 4."""
        index, self._grid = server_round - 1, grid
        self.seconds = {"bids": 0.0}
        begun = time.perf_counter()
        saved = self.store.plan(index)
        if saved is None:
            bids = self._collect_bids(index, grid) if self.kind.asks(index) else {}
            self.seconds["bids"] = time.perf_counter() - begun
            settled = dict(self.kind.terms)
            plan = self.kind.plan(index, bids)
            if self.kind.terms != settled:
                self.store.save_terms(self.kind.terms)
            self.store.save_plan(index, plan.to_dict())
        else:
            plan = RoundPlan.from_dict(saved)
        self._plan, self._updates = plan, self.store.deliveries(index)
        self._hold(plan)
        if any(self.roster.node(owner) is None for owner in self._open):
            self._collect_bids(index if self.kind.asks(index) else 0, grid)  # a roll-call: offers stand
        if saved is not None:
            self._fetch(grid, set(self._open), voids=False)
        return self._messages(TRAIN, self.train_seconds, self.kind.parameters)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The rest of step 4, then 5 and 6."""
        assert self._plan is not None
        assert self._plan.index == server_round - 1
        self._receive(list(replies))
        if self._to_fetch and self._grid is not None:
            self._fetch(self._grid, self._to_fetch, voids=True)
        self._settle(self._plan)
        record = self.kind.close(self._plan, self._updates, self._awards)
        self._finish(record)
        metrics = MetricRecord({**record.metrics, "spent": record.spent_micros / 1e6})
        return self._arrays(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: the buyer evaluates on records of her own, owners' metrics would be releases without noise."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None

    def summary(self) -> None:
        """One line on what is about to run."""
        _log.info("market %s: %s rounds of %s", self.kind.task, self.kind.rounds, type(self.kind).__name__)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Play all rounds that are left; a fresh folder means all of them."""
        if timeout is not None:
            self.train_seconds = timeout
        self.store.lock()
        try:
            first = self._resume(initial_arrays)
            self.summary()
            self._await_nodes(grid)
            result = Result()
            result.arrays = self._arrays()
            for server_round in range(first + 1, (num_rounds or self.kind.rounds) + 1):
                if self.kind.done:
                    break
                self._play(server_round, grid, result, evaluate_fn)
            return result
        finally:
            self.store.unlock()

    # the steps

    def _play(self, server_round: int, grid: Grid, result: Result, evaluate_fn: Evaluate | None) -> None:
        """One round of `start`, timed."""
        started = time.perf_counter()
        messages = self.configure_train(server_round, result.arrays, ConfigRecord(), grid)
        sent = time.perf_counter()
        exchange(grid, messages, seconds=self.train_seconds, receive=self._receive)
        trained = time.perf_counter()
        arrays, metrics = self.aggregate_train(server_round, [])
        closed = time.perf_counter()
        bids = self.seconds["bids"]
        self.seconds = {
            "bids": bids,
            "decide": sent - started - bids,
            "train": trained - sent,
            "close": closed - trained,
        }
        self.timings.append(self.seconds)
        assert arrays is not None  # a closed round has a model, the old one at least
        result.arrays = arrays
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        evaluated = evaluate_fn(server_round, arrays) if evaluate_fn is not None else None
        if evaluated is not None:
            result.evaluate_metrics_serverapp[server_round] = evaluated

    def _resume(self, initial: ArrayRecord | None) -> int:
        """Take up the last checkpoint; returns the round to play next."""
        self.kind.terms = self.store.terms() or {}
        saved = self.store.checkpoint()
        if saved is None:
            if initial is not None:
                self.kind.parameters = np.asarray(initial[_NAME].numpy(), dtype=np.float64)
            return 0
        if saved.parameters.shape != (self.kind.dimension,):
            raise InvalidInput("checkpoint", saved.parameters.shape, f"{self.kind.dimension} parameters")
        self.kind.parameters, self.kind.history, self.kind.notes = saved.parameters, list(saved.history), saved.notes
        self.store.tidy(saved.next_round)
        kept = (self.store.record(index) for index in range(saved.next_round))
        self.records = [record_from_dict(record) for record in kept if record is not None]
        return saved.next_round

    def _await_nodes(self, grid: Grid) -> None:
        deadline = time.monotonic() + self.bid_seconds
        while len(list(grid.get_node_ids())) < self.nodes and time.monotonic() < deadline:
            time.sleep(0.2)

    def _collect_bids(self, index: int, grid: Grid) -> dict[int, Bid]:
        online, bids, call = list(grid.get_node_ids()), {}, self.kind.announcement(index)
        content = partial(pack, call, head=self.ledger.head())
        messages = [Message(content(), node, BID, ttl=self.bid_seconds, group_id=str(index)) for node in online]
        heads: dict[int, Head] = {}

        def receive(answers: list[Message]) -> None:
            for answer in answers:
                node = answer.metadata.src_node_id
                try:
                    bid, seen = unpack(Bid, answer), unpack_head(answer) if answer.has_content() else None
                except InvalidInput as error:
                    _log.warning("node %s: %s", node, error)
                    continue
                if bid is not None and self.kind.accepts(bid):
                    bids[node] = bid
                    if seen is not None:
                        heads[node] = seen

        exchange(grid, messages, seconds=self.bid_seconds, receive=receive)
        standing = self.roster.roll_call({node: bid.owner for node, bid in bids.items()}, online)
        called = {owner: bids[node] for node, owner in standing.items()}
        self._seen |= {owner: heads[node] for node, owner in standing.items() if node in heads}
        if call.perturbation:
            return called
        # the ledger pays an owner with a registered cap for releases on record only, and raw updates are none
        return {owner: bid for owner, bid in called.items() if self.ledger.cap(owner_account(owner)) is None}

    def _hold(self, plan: RoundPlan) -> None:
        """Money in, awards held; then `_open` are the orders whose award is open and whose delivery has not come."""
        if plan.deposit_id:
            self.ledger.deposit(plan.deposit_id, self.kind.buyer, plan.deposit_micros)
        held = self.ledger.hold_many(self.kind.award(order) for order in plan.orders) if plan.orders else ()
        self._awards = {order.owner: award for order, award in zip(plan.orders, held, strict=True)}
        for order in plan.orders:
            if order.owner in self._updates:
                self._book(order)
        self._open = {
            order.owner: order
            for order in plan.orders
            if order.owner not in self._updates and self._awards[order.owner].state is AwardState.PENDING
        }

    def _book(self, order: Order) -> None:
        """Enter what a stored delivery gave away; past a cap that the owner registered, the award is void."""
        release, state = self.kind.release(order), self._awards[order.owner].state
        if state not in (AwardState.PENDING, AwardState.POSTED):  # a former run found her cap passed: that stands
            del self._updates[order.owner]
            return
        if release is None or state is AwardState.POSTED:
            return
        try:
            self.ledger.release(release)
        except PrivacyBudgetExhausted as refusal:
            self._awards[order.owner] = self.ledger.void(order.award, f"past the registered cap: {refusal}")
            del self._updates[order.owner]

    def _settle(self, plan: RoundPlan) -> None:
        """Resolve the round's open awards, all or none."""
        ends = self.kind.resolutions(plan, self._updates, self._awards)
        resolved = {award.id: award for award in resolve_each(self.ledger, ends)}
        self._awards = {owner: resolved.get(award.id, award) for owner, award in self._awards.items()}

    def _fetch(self, grid: Grid, owners: set[int], *, voids: bool) -> None:
        """Ask for what was released before; with `voids`, who does not have it loses the award."""
        messages = self._messages(RELEASE, self.bid_seconds, None, owners)
        self._to_fetch = set()
        exchange(grid, messages, seconds=self.bid_seconds, receive=partial(self._receive, voids=voids))

    def _messages(
        self, kind: str, seconds: float, parameters: FloatArray | None, owners: set[int] | None = None
    ) -> list[Message]:
        made = []
        wanted = [order for order in self._open.values() if owners is None or order.owner in owners]
        proofs = self._proofs(wanted) if kind == TRAIN else {}
        for order in wanted:
            node = self.roster.node(order.owner)
            if node is not None:
                content, group = pack(order, parameters, escrow=proofs.get(order.award)), str(order.round_index)
                made.append(Message(content, node, kind, ttl=seconds, group_id=group))
        return made

    def _proofs(self, orders: list[Order]) -> dict[str, HoldReceipt]:
        """That prices are in escrow, from the head on that each owner goes by, unless it is another log's."""
        awards = [order.award for order in orders]
        since = {order.award: self._seen[order.owner] for order in orders if order.owner in self._seen}
        try:
            return self.ledger.hold_receipts(awards, since)
        except InvalidInput:
            _log.warning("somebody goes by a head that is not of this ledger")
        return self.ledger.hold_receipts(awards, {a: head for a, head in since.items() if self._is_ours(head)})

    def _is_ours(self, head: Head) -> bool:
        try:
            return self.ledger.head(head.size) == head
        except InvalidInput:
            return False

    def _receive(self, answers: list[Message], voids: bool = True) -> None:
        """Answers to orders: deliveries are checked, stored, then booked; refusals and bad deliveries void awards."""
        assert self._plan is not None
        delivered = {}
        for answer in answers:
            owner = self.roster.owner(answer.metadata.src_node_id)
            order = None if owner is None else self._open.get(owner)
            if order is None or answer.has_error():
                continue  # not a winner, settled already, or a crash at the other end: silence, the award expires
            limit = self.kind.largest_norm(order)
            came = checked_delivery(answer, order, length=self.kind.dimension, largest_norm=limit)
            if isinstance(came, Delivered):
                delivered[order.owner] = came.vector
            elif isinstance(came, Refused) and came.code == REPLAY and answer.metadata.message_type == TRAIN:
                self._to_fetch.add(order.owner)
            elif voids:
                left = self.kind.left(order) if isinstance(came, Bad) else None
                end = Resolution(order.award, AwardState.VOIDED, came.reason, left)
                (self._awards[order.owner],) = resolve_each(self.ledger, [end])
                del self._open[order.owner]
        if delivered:
            self.store.save_deliveries(self._plan.index, delivered)
            self._updates.update(delivered)
            for owner in delivered:
                self._book(self._open.pop(owner))

    def _finish(self, record: RoundRecord) -> None:
        assert self._plan is not None
        index = self._plan.index
        self.store.save_record(index, record_to_dict(record))
        history = np.array(self.kind.history).reshape(-1, self.kind.dimension)
        self.store.save_checkpoint(Checkpoint(index + 1, self.kind.parameters, history, self.kind.notes))
        self.records.append(record)
        self._plan, self._open, self._awards, self._updates = None, {}, {}, {}
        self._to_fetch = set()
        if self.progress is not None:
            self.progress(record)

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({_NAME: Array(np.asarray(self.kind.parameters))})
