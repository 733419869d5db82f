"""Owners behind Flower's grid, and the strategy that plays the market's round with them.

`GridOwners` asks nodes (bids by QUERY, orders by TRAIN), by deadlines: who does not answer in time is not in the round.
All orders of a round share one record of parameters. What happens is told to Flower's own log, which
`flwr run --stream` shows. `KindStrategy` is a `flwr.serverapp.strategy.Strategy` whose `start` drives
`flmarket.market.Rounds`, which goes on where a crashed server stopped, keeps its books, and puts each delivery on disk
as it comes. Flower's own loop has nothing to add: its four questions get no answer here.

`exchange` asks many nodes at once and comes back on time. Flower's own `send_and_receive` sleeps three seconds between
looks over HTTP; this looks more often, and hands every answer over as it comes, so that a delivery is safe before the
slowest owner has answered. What has not come by the deadline does not count: messages carry the deadline as their time
to live, so Flower drops late answers too.

`Roster` maps nodes to owners. A node says whom it speaks for; the claim stands while that node is there. Two nodes that
claim one owner in the same roll-call both lose it. A broker who knows her owners passes `known` (node id → owner), and
other nodes are not heard. What would break it: SuperNodes without keys, where anybody can be a node; a deployment
registers keys (docs/flower.md).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore.run import Run

from flmarket.bids import FloatArray
from flmarket.engines.flower.messages import (
    BID,
    MASK,
    MASKED,
    RELEASE,
    TRAIN,
    VECTOR,
    Delivery,
    Records,
    Refusal,
    pack,
    parts,
    unpack,
    unpack_head,
    unpack_identity,
    unpack_stage,
    unpack_vector,
    unpack_words,
    vector_record,
)
from flmarket.errors import InvalidInput
from flmarket.learning import Model, dimension, from_named, to_named
from flmarket.ledger import Head, HoldReceipt, Ledger, format_micros
from flmarket.market import kind as market
from flmarket.market.kind import (
    Announcement,
    Bad,
    Bid,
    Delivered,
    MarketKind,
    Order,
    Refused,
    ReleasedUpdate,
    RoundRecord,
)
from flmarket.market.masking import INPUT, Reply
from flmarket.market.masking.broker import summed
from flmarket.market.owner import MASKING, REPLAY
from flmarket.market.round import Prove, Rounds
from flmarket.market.store import MemoryStore, RoundStore

_log = logging.getLogger("flwr")  # Flower's: what is said here appears in its streams
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5


class GridAround(Grid):
    """Another grid, seen through this one; subclasses say what passes, and how."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Run) -> None:
        """Of the grid itself."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Of the grid itself."""
        return self._grid.run

    def create_message(self, *args: Any, **named: Any) -> Message:
        """Of the grid itself."""
        return self._grid.create_message(*args, **named)

    def get_node_ids(self) -> Iterable[int]:
        """Of the grid itself."""
        return self._grid.get_node_ids()


def exchange(grid: Grid, messages: Iterable[Message], *, seconds: float) -> Iterator[list[Message]]:
    """Send, and hand over the answers that come within the time, as they come."""
    deadline = time.monotonic() + seconds
    waiting = {identifier for identifier in grid.push_messages(list(messages)) if identifier}
    wait = _FIRST_WAIT
    while waiting:
        came = []
        for answer in grid.pull_messages(waiting):
            if answer.metadata.reply_to_message_id in waiting:  # an answer counts once
                waiting.discard(answer.metadata.reply_to_message_id)
                came.append(answer)
        if came:
            yield came
            wait = _FIRST_WAIT
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            break
        time.sleep(min(wait, left))
        wait = min(1.5 * wait, _LONGEST_WAIT)


class Roster:
    """Which node speaks for which owner."""

    def __init__(self, known: Mapping[int, int] | None = None) -> None:
        self._known = None if known is None else dict(known)
        self._node_of: dict[int, int] = {}
        self._owner_of: dict[int, int] = {}

    def node(self, owner: int) -> int | None:
        """The owner's node, if she has one."""
        return self._node_of.get(owner)

    def owner(self, node: int) -> int | None:
        """Whom a node speaks for."""
        return self._owner_of.get(node)

    def roll_call(self, claims: Mapping[int, int], online: Iterable[int]) -> dict[int, int]:
        """Take claims (node → owner) and return those that stand."""
        there = set(online)
        self._node_of = {
            owner: node for owner, node in self._node_of.items() if node in there and claims.get(node, owner) == owner
        }
        wanted: dict[int, list[int]] = {}
        for node, owner in claims.items():
            if self._known is None or self._known.get(node) == owner:
                wanted.setdefault(owner, []).append(node)
        for owner, nodes in wanted.items():
            holder = self._node_of.get(owner)
            if holder is None and len(nodes) == 1:
                self._node_of[owner] = nodes[0]
            elif set(nodes) != {holder}:
                _log.warning("nodes %s all claim to be owner %s", nodes, owner)
        self._owner_of = {node: owner for owner, node in self._node_of.items()}
        return {node: owner for node, owner in claims.items() if self._node_of.get(owner) == node}


Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class GridOwners:
    """Owners at the nodes of a grid, who go by the ledger's `head`. `known_nodes` (node → owner) admits only those.

    Masked sums under way are kept in `store`, so that another process can go on with them.
    """

    types: ClassVar[Mapping[str, str]] = {BID: BID, TRAIN: TRAIN, RELEASE: RELEASE}
    stranger = ""  # what may be wrong with an app that answers in another way

    def __init__(
        self,
        grid: Grid,
        model: Model,
        head: Callable[[], Head],
        *,
        bid_seconds: float,
        train_seconds: float,
        known_nodes: Mapping[int, int] | None = None,
        store: RoundStore | None = None,
    ) -> None:
        self.store: RoundStore = MemoryStore() if store is None else store
        self.identities: dict[int, bytes] = {}
        self.grid, self.head, self.length = grid, head, dimension(model)
        self.dtype = str(np.dtype(getattr(model, "dtype", np.float64)))
        self.bid_seconds, self.train_seconds = bid_seconds, train_seconds
        self.roster, self._seen = Roster(known_nodes), dict[int, Head]()

    def wait_for(self, nodes: int) -> None:
        """Until so many nodes are there, or as long as bids may take."""
        deadline = time.monotonic() + self.bid_seconds
        while len(list(self.grid.get_node_ids())) < nodes and time.monotonic() < deadline:
            time.sleep(0.2)

    def bids(self, call: Announcement, accepts: Callable[[Bid], bool]) -> Mapping[int, Bid]:
        """The bids of whoever answers in time and speaks for one owner."""
        online, question = self.asked(), pack(call, head=self.head())
        bids, heads, keys = dict[int, Bid](), dict[int, Head](), dict[int, bytes]()
        others = Counter[str]()
        for answers in self._exchange(BID, call.round_index, dict.fromkeys(online, question)):
            for answer in answers:
                node = answer.metadata.src_node_id
                try:
                    bid, refusal = unpack(Bid, answer), unpack(Refusal, answer)
                    seen, key = (None, b"") if bid is None else (unpack_head(answer), unpack_identity(answer))
                except InvalidInput as error:
                    _log.warning("node %s: %s", node, error)
                    continue
                if refusal is not None:
                    others[refusal.reason] += 1
                elif bid is None:
                    found = answer.error.reason if answer.has_error() else "something else"
                    others[f"no bid but {found}{self.stranger}"] += 1
                elif call.trust != "local" and not key:
                    others["a bid for a masked sum without a key to be known by"] += 1
                elif not accepts(bid):
                    others["a bid that makes no sense"] += 1
                else:
                    bids[node], keys[node] = bid, key
                    if seen is not None:
                        heads[node] = seen
        _log.info("bids: %s of %s nodes", len(bids), len(online))
        for reason, times in others.most_common(5):
            _log.info("\t%s × %s", times, reason[:200])
        standing = self.roster.roll_call({node: bid.owner for node, bid in bids.items()}, online)
        self.identities |= {owner: keys[node] for node, owner in standing.items() if keys[node]}
        self._seen |= {owner: heads[node] for node, owner in standing.items() if node in heads}
        return {owner: bids[node] for node, owner in standing.items()}

    def train(
        self, call: Announcement, orders: Sequence[Order], parameters: FloatArray, bids: Sequence[Bid], prove: Prove
    ) -> Iterator[Mapping[int, market.Delivery]]:
        """Send orders with their proofs, and hand over what comes, as it comes."""
        self._find(call, orders)
        proofs, start = prove(orders, self._seen) if orders else {}, self.start(parameters)
        if any(order.share for order in orders):
            return self._summed(call, orders, parameters, proofs)
        return self._ask(TRAIN, orders, lambda order: start | self.order(order, proofs.get(order.award)))

    def _summed(
        self, call: Announcement, orders: Sequence[Order], parameters: FloatArray, proofs: Mapping[str, HoldReceipt]
    ) -> Iterator[Mapping[int, market.Delivery]]:
        """Have orders carried out of which only the sum is to be seen."""
        wanted = {order.owner: order for order in orders}

        def ask(stage: str, questions: Mapping[int, bytes]) -> Iterator[Mapping[int, Reply | Refused]]:
            trains, contents = stage == INPUT, dict[int, RecordDict]()
            for owner, question in questions.items():
                node, order = self.roster.node(owner), wanted.get(owner)
                if node is None or order is None:
                    continue
                start, proof = (parameters, proofs.get(order.award)) if trains else (None, None)
                contents[node] = pack(order, start, escrow=proof, stage=(stage, question), dtype=self.dtype)
            for answers in self._exchange(MASKED if trains else MASK, orders[0].round_index, contents):
                came = dict[int, Reply | Refused]()
                for answer in answers:
                    speaks = self.roster.owner(answer.metadata.src_node_id)
                    if speaks in wanted and not answer.has_error():
                        came[speaks] = _stage(answer, wanted[speaks], stage, self.length)
                yield came

        return summed(call, orders, self.identities, self.store, ask)

    def replay(self, call: Announcement, orders: Sequence[Order], parameters: FloatArray, bids: Sequence[Bid]) -> None:
        """Owners keep what they did."""

    def released(self, call: Announcement, orders: Sequence[Order]) -> Iterator[Mapping[int, market.Delivery]]:
        """Ask for releases of before."""
        if any(order.share for order in orders):  # nothing leaves alone: the sum is taken up again
            return iter(())
        self._find(call, orders)
        return self._ask(RELEASE, orders, lambda order: self.order(order, None))

    def state(self) -> bytes:
        """Owners keep theirs."""
        return b""

    def restore(self, state: bytes) -> None:
        """Owners keep theirs."""

    # what a subclass may say in its own way

    def asked(self) -> list[int]:
        """The nodes that are asked for bids."""
        return list(self.grid.get_node_ids())

    def start(self, parameters: FloatArray) -> Records:
        """What all orders of a round carry."""
        return {VECTOR: vector_record(parameters, self.dtype)}

    def order(self, order: Order, escrow: HoldReceipt | None) -> Records:
        """What one order, or the question for its release, carries besides."""
        return parts(order, escrow=escrow)

    def vector(self, answer: Message) -> FloatArray:
        """What an answer delivers; raises InvalidInput if that is no vector."""
        return unpack_vector(answer, self.length)

    def _find(self, call: Announcement, orders: Sequence[Order]) -> None:
        """A roll-call if somebody's node is not known: offers stand, so asking again changes nothing."""
        if any(self.roster.node(order.owner) is None for order in orders):
            self.bids(call, lambda bid: True)

    def _ask(
        self, kind: str, orders: Sequence[Order], content: Callable[[Order], Records]
    ) -> Iterator[Mapping[int, market.Delivery]]:
        if not orders:
            return
        wanted = {order.owner: order for order in orders}
        nodes = {node: order for order in orders if (node := self.roster.node(order.owner)) is not None}
        contents = {node: RecordDict(content(order)) for node, order in nodes.items()}
        for answers in self._exchange(kind, orders[0].round_index, contents):
            came: dict[int, market.Delivery] = {}
            for answer in answers:
                owner = self.roster.owner(answer.metadata.src_node_id)
                if owner in wanted and not answer.has_error():  # a crash at the other end is silence
                    came[owner] = self._delivery(answer, wanted[owner])
            yield came

    def _exchange(self, kind: str, index: int, contents: Mapping[int, RecordDict]) -> Iterator[list[Message]]:
        seconds = self.train_seconds if kind in (TRAIN, MASKED) else self.bid_seconds
        made = [
            Message(content, node, self.types.get(kind, kind), ttl=seconds, group_id=str(index))
            for node, content in contents.items()
        ]
        return exchange(self.grid, made, seconds=seconds)

    def _delivery(self, answer: Message, order: Order) -> Delivered | Bad | Refused:
        """What an owner's answer to an order is; the vector is not yet checked."""
        try:
            refusal, delivery = unpack(Refusal, answer), unpack(Delivery, answer)
            if refusal is not None:
                return Refused(refusal.code, refusal.reason, replayed=refusal.code == REPLAY)
            if delivery is None:
                return Bad("neither a delivery nor a refusal")
            if (delivery.release, delivery.owner) != (market.release_id(order), order.owner):
                return Bad("another award's")
            return Delivered(ReleasedUpdate(self.vector(answer)))
        except InvalidInput as problem:
            return Bad(str(problem))


def _stage(answer: Message, order: Order, stage: str, length: int) -> Reply | Refused:
    """What an owner's answer to a stage of a masked sum is; not yet checked."""
    try:
        refusal, delivery = unpack(Refusal, answer), unpack(Delivery, answer)
        if refusal is not None:
            return Refused(refusal.code, refusal.reason)
        if delivery is None or (delivery.release, delivery.owner) != (market.release_id(order), order.owner):
            return Refused(MASKING, f"the answer of owner {order.owner} is another award's, or none")
        name, body = unpack_stage(answer)
        if name != stage:
            return Refused(MASKING, f"owner {order.owner} answered the stage {name!r} when asked for {stage!r}")
        return body, unpack_words(answer, length)
    except InvalidInput as problem:
        return Refused(MASKING, f"the answer of owner {order.owner} is malformed: {problem}")


class MarketLoop(Strategy):
    """A strategy whose `start` plays the market's own rounds, so that Flower's loop has nothing to ask."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: `start` plays the market's own round."""
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Nothing: `start` plays the market's own round."""
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: the buyer evaluates on records of her own, owners' metrics would be releases without noise."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None


class KindStrategy(MarketLoop):
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
        self.known_nodes, self.progress = known_nodes, progress
        self.rounds: Rounds | None = None

    @property
    def records(self) -> list[RoundRecord]:
        """Of all rounds that are over."""
        return [] if self.rounds is None else self.rounds.records

    @property
    def timings(self) -> list[dict[str, float]]:
        """Seconds of each round that this object played, by step."""
        return [] if self.rounds is None else self.rounds.timings

    def summary(self) -> None:
        """One line on what is about to run."""
        _log.info("market %s: %s rounds of the %s kind", self.kind.task, self.kind.rounds, self.kind.name)

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
        """Play all rounds that are left; a fresh folder means all of them. Arrays are the model's, by name."""
        result, kind = Result(), self.kind
        if initial_arrays is not None:
            kind.parameters = from_named(kind.model, {name: one.numpy() for name, one in initial_arrays.items()})
        owners = GridOwners(
            grid, kind.model, self.ledger.head, bid_seconds=self.bid_seconds, known_nodes=self.known_nodes,
            train_seconds=self.train_seconds if timeout is None else timeout, store=self.store,
        )  # fmt: skip

        def tell(record: RoundRecord) -> None:
            result.train_metrics_clientapp[record.index + 1] = MetricRecord(
                {**record.metrics, "spent": record.spent_micros / 1e6}
            )
            evaluated = evaluate_fn(record.index + 1, self._arrays()) if evaluate_fn is not None else None
            if evaluated is not None:
                result.evaluate_metrics_serverapp[record.index + 1] = evaluated
            tell_round(record, kind.rounds)
            if self.progress is not None:
                self.progress(record)

        self.summary()
        owners.wait_for(self.nodes)
        self.rounds = Rounds(kind, owners, self.ledger, self.store, progress=tell)
        self.rounds.play(num_rounds)
        result.arrays = self._arrays()
        return result

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({name: Array(one) for name, one in to_named(self.kind.model, self.kind.parameters).items()})


def tell_round(record: RoundRecord, rounds: int) -> None:
    """A finished round, in Flower's log."""
    states: dict[str, int] = {}
    for state in record.state:
        if state is not None:
            states[state.value] = states.get(state.value, 0) + 1
    ends = ", ".join(f"{count} {state}" for state, count in states.items()) or "no awards"
    _log.info("[ROUND %s/%s] awards: %s; paid %s", record.index + 1, rounds, ends, format_micros(record.spent_micros))
    for reason in sorted({reason for reason in record.reason if reason}):
        _log.info("\t%s × %s", record.reason.count(reason), reason[:200])
    if record.metrics:
        _log.info("\t└──> MetricRecord: %s", record.metrics)
