"""A network and the machines on it: Flower's grid as the market's server has it, and owners' nodes as they fail.

Every message may be lost, doubled, delayed, delivered after its time. What answers is the shipped guard
(`flmarket.engines.flower.OwnerGuard`) on the owner's own files; `Node` crashes it between any two statements, sets its
clock wrong, takes it away for a while, puts an older journal in the place of hers, and lets owners lie after the guard
has answered. Whatever leaves a node is seen by the watch first.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from flmarket.bids import FloatArray
from flmarket.engines.flower import InProcessGrid, OwnerGuard
from flmarket.engines.flower.messages import BID, RELEASE, TRAIN, Delivery, pack, unpack, unpack_vector
from flmarket.errors import FlmarketError, PrivacyBudgetExhausted
from flmarket.learning import Purpose, Records
from flmarket.ledger import DurableAccount
from flmarket.market import Announcement, Bid, Order, Owner, kinds
from flmarket.market import record as records
from flmarket.market.kind import release_id
from flmarket.privacy import Cap, Event, NoiseSource, PureDp, RecordLevel, SimulationNoise, ZCdp, event_to_dict
from flmarket.simulator.watch import Sold, Watch, pure
from flmarket.simulator.world import Chance, Clock, Crash, Disk, FailingConnection

LIES = ("nan", "short", "long", "another award's", "no vector")
_TTL = 20.0


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedOwner(Owner):
    """An owner as on a node, so she asks for proof; her draws follow the run's seed, and never repeat."""

    touched: Callable[[], None]
    draws: Callable[[], int]

    @property
    def simulated(self) -> bool:
        """She takes nobody's word."""
        return False

    def records(self, count: int) -> Records:
        """See `Owner`; somebody looks on."""
        self.touched()
        return super().records(count)

    def noise(self, order: Order) -> NoiseSource:
        """See `Owner`."""
        return SimulationNoise(np.random.default_rng(self.draws()))

    def stream(self, order: Order, purpose: Purpose) -> np.random.Generator:
        """See `Owner`."""
        return np.random.default_rng(self.draws())


class Node:
    """One owner's machine."""

    def __init__(self, owner: Callable[[Node], WatchedOwner], path: Path, lies: bool, chance: Chance) -> None:
        self.path, self.chance, self.skew = path, chance, 0.0
        self.disk = Disk(chance, "node crash", "node error")
        self.owner, self.lies, self.away_until, self.restored = owner(self), lies, 0.0, False
        self.last: tuple[Delivery, FloatArray] | None = None
        self._guard = OwnerGuard(lambda _: self.owner)
        self._context = Context(run_id=1, node_id=1 + self.number, node_config={}, state=RecordDict(), run_config={})

    @property
    def number(self) -> int:
        """Her number in every market."""
        return self.owner.number

    def answer(self, message: Message) -> Message | None:
        """What the guard answers; None if the machine ends meanwhile."""
        try:
            self._open()
            return self._guard(message, self._context, _nobody)
        except Crash:
            self.restart()
            return None

    def restart(self) -> None:
        """The machine ends and starts again: what was not committed is gone."""
        found = records._open.pop(self.path, None)
        if found is not None:
            found.close()
        self.disk.dead = False

    def touched(self, watch: Watch) -> None:
        """Her records are read: the release that was begun last is charged, and not finished."""
        found = records._open[self.path]
        journal, account = (_real(one) for one in (found.journal, found.account))
        newest = journal.execute("select id, vector from releases order by rowid desc limit 1").fetchone()
        if newest is None or newest[1] is not None:
            watch.broke("touched", f"the records of owner {self.number} are read, and no release is under way")
        elif account.execute("SELECT 1 FROM releases WHERE award_id = ?", (newest[0],)).fetchone() is None:
            watch.broke("touched", f"the records of owner {self.number} are read for {newest[0]}, which is not charged")

    def change_cap(self, cap: Cap) -> bool:
        """She sets another cap by herself; False if she has given more already."""
        self.restart()
        try:
            with DurableAccount.open(self.path.with_suffix(".account.sqlite"), self.owner.cap) as account:
                account.change_cap(cap)
        except PrivacyBudgetExhausted:
            return False
        self.owner = replace(self.owner, cap=cap)
        return True

    def keep_journal(self) -> None:
        """A backup of her journal."""
        self._open()
        backup = sqlite3.connect(self.path.with_suffix(".backup"))
        _real(records._open[self.path].journal).backup(backup)
        backup.close()

    def restore_journal(self) -> bool:
        """The journal as it was at the backup, the account as it is: she forgets claims, not charges."""
        backup, journal = self.path.with_suffix(".backup"), self.path.with_suffix(".journal.sqlite")
        if not backup.exists():
            return False
        self.restart()
        for beside in ("-wal", "-shm"):
            journal.with_name(journal.name + beside).unlink(missing_ok=True)
        shutil.copyfile(backup, journal.with_suffix(".new"))
        journal.with_suffix(".new").replace(journal)
        self.restored = True
        return True

    def lie(self, answer: Message, message: Message) -> Message | None:
        """What a lying owner sends instead of a delivery; None if she does not lie this time."""
        delivery = unpack(Delivery, answer) if answer.has_content() else None
        if delivery is None:
            return None
        vector, before, self.last = unpack_vector(answer), self.last, (delivery, unpack_vector(answer))
        if not self.lies or not self.chance.happens("hostile owner"):
            return None
        how, order = self.chance.choice("lie", LIES), unpack(Order, message)
        if how == "long" and order is not None and order.market == "sampling":
            how = "nan"  # without a clip any length is in form
        if how == "another award's" and (before is None or before[0] == delivery):
            how = "nan"
        if how == "another award's" and before is not None:
            return Message(pack(*before), reply_to=message)
        if how == "no vector":
            return Message(pack(delivery), reply_to=message)
        false = {"nan": vector * np.nan, "short": vector[:-1], "long": vector + 1e12}[how]
        return Message(pack(delivery, false), reply_to=message)

    def _open(self) -> None:
        self.disk.spared = True  # the guard opens them again, and that may fail
        found = records.open_record(self.path, self.owner.cap)
        self.disk.spared = False
        for part in (found.journal, found.account):
            if not isinstance(vars(part)["_connection"], FailingConnection):
                vars(part)["_connection"] = FailingConnection(vars(part)["_connection"], self.disk)


def _real(part: object) -> sqlite3.Connection:
    found: sqlite3.Connection = getattr(vars(part)["_connection"], "real", vars(part)["_connection"])
    return found


def _nobody(message: Message, context: Context) -> Message:
    raise NotImplementedError


@dataclass(frozen=True)
class Sent:
    """A question on its way."""

    message: Message
    node: Node
    order: Order | None
    server: bool


class Network(InProcessGrid):
    """Flower's grid for every server of the run, with the nodes behind it."""

    def __init__(self, nodes: dict[int, Node], clock: Clock, chance: Chance, watch: Watch) -> None:
        super().__init__(lambda message, context: message, 0)  # type: ignore[arg-type]
        self.nodes, self.clock, self.chance, self.watch = nodes, clock, chance, watch
        self.trains: list[Message] = []  # what servers have sent, for somebody to send again
        self.calls: list[Message] = []
        self._sent: dict[str, Sent] = {}
        self._number = itertools.count(1)
        self._came: dict[str, tuple[Message, str]] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Whoever is there."""
        return [number for number, node in self.nodes.items() if node.away_until <= self.clock.now]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """On their way, each by itself."""
        return [self.send(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answers that are there; what a server is handed counts as having come."""
        found = []
        for identifier in list(message_ids):
            if identifier in self._came:
                answer, what = self._came.pop(identifier)
                order = self._sent[identifier].order
                if order is not None and what:
                    self.watch.handed[release_id(order)].add(what)
                found.append(answer)
        return found

    def send(self, message: Message, *, server: bool = True) -> str:
        """One message; `server` is the market's own, else somebody who has got hold of its connection."""
        identifier, node = str(next(self._number)), self.nodes[message.metadata.dst_node_id]
        message.metadata.__dict__["_message_id"] = identifier
        order = None
        with suppress(FlmarketError):
            order = unpack(Order, message)
        self._sent[identifier] = Sent(message, node, order, server)
        if server:
            {TRAIN: self.trains, BID: self.calls}.get(message.metadata.message_type, []).append(message)
        for _ in range(1 + self.chance.happens("message doubled")):
            if not self.chance.happens("message lost"):
                self.clock.at(self.clock.now + self._delay(), lambda: self._deliver(identifier))
        return identifier

    def _delay(self) -> float:
        if self.chance.happens("message late"):
            return self.chance.uniform("late", _TTL, 5 * _TTL)
        return self.chance.uniform("delay", 0.0, 8.0) if self.chance.happens("message delayed") else 0.01

    def _deliver(self, identifier: str) -> None:
        sent = self._sent[identifier]
        node = sent.node
        if node.away_until > self.clock.now:
            return
        self.clock.skew = node.skew
        try:
            answer = node.answer(sent.message)
        finally:
            self.clock.skew = 0.0
        if answer is None:
            return
        self._seen(sent, answer)
        false = node.lie(answer, sent.message)
        what = "bad" if false is not None else _kind(answer)
        if not self.chance.happens("message lost"):
            came = (answer if false is None else false), what
            self.clock.at(self.clock.now + self._delay(), lambda: self._arrive(identifier, came))

    def _arrive(self, identifier: str, came: tuple[Message, str]) -> None:
        self._came.setdefault(identifier, came)

    def _seen(self, sent: Sent, answer: Message) -> None:
        """What leaves a machine is looked at before anything can happen to it."""
        number, question = sent.node.number, sent.message.metadata.message_type
        if question == BID:
            call, bid = unpack(Announcement, sent.message), unpack(Bid, answer)
            if call is not None and bid is not None:
                self.watch.bids[number, call.task, call.round_index] = bid.privacy_budget, bid.data_size
        elif question in (TRAIN, RELEASE) and sent.order is not None and _kind(answer) == "good":
            order, owner = sent.order, sent.node.owner
            once = kinds.of(order.market).side.asks_once
            bid_for = self.watch.bids.get((number, order.task, 0 if once else order.round_index))
            self.watch.leaves(number, sold_by(owner, order), bid_for, unpack_vector(answer).tobytes())


def _kind(answer: Message) -> str:
    """ "good" for a delivery, "refused" for a refusal, "" for anything else."""
    if not answer.has_content():
        return ""
    names = answer.content.config_records
    return "good" if "delivery" in names else "refused" if "refusal" in names else ""


def sold_by(owner: Owner, order: Order) -> Sold:
    """What an order takes and what that costs her, by the formulas of the papers: linear valuations only."""
    loss = _plain(order)
    if order.market == "auction":
        amount = pure(loss)
        cost = float(owner.valuation.rate[0]) * amount * order.records
    elif order.market == "reward":
        amount = float(loss.get("rho", np.inf))
        cost = (owner.value or 0.0) * amount
    else:
        amount, cost = float(loss.get("epsilon", np.inf)), owner.value or 0.0
    return Sold(order.award, release_id(order), amount, order.records, order.price_micros, cost)


class Intruder:
    """Somebody who has the server's connection: old orders, changed terms, other prices, proofs of something else."""

    def __init__(self, network: Network, chance: Chance) -> None:
        self.network, self.chance = network, chance

    def act(self) -> str:
        """Send one message; returns what it was."""
        network, chance = self.network, self.chance
        if network.calls and chance.stream("intruder").random() < 0.3:
            return self._announce(chance.choice("intruder", network.calls))
        if not network.trains:
            return "nothing"
        return self._order(chance.choice("intruder", network.trains[-40:]))

    def _announce(self, before: Message) -> str:
        call = unpack(Announcement, before)
        assert call is not None
        changes: list[dict[str, object]] = [
            {"clip": call.clip * 100}, {"perturbation": ""}, {"rounds": call.rounds + 5}, {"buyer": "somebody"},
            {"round_index": call.round_index + 1}, {"task": f"{call.task}x"}, {"learning_rate": 1e6}, {},
        ]  # fmt: skip
        change = self.chance.choice("change", changes)
        changed = replace(call, **change)  # type: ignore[arg-type]
        node = before.metadata.dst_node_id
        self.network.send(Message(pack(changed, head=None), node, BID), server=False)
        return f"announces {change or 'the same again'} to node {node}"

    def _order(self, before: Message) -> str:
        order = unpack(Order, before)
        assert order is not None
        number = next(iter(event_values(order)), 1.0)
        more: Event = PureDp(2 * number)
        if isinstance(order.loss, ZCdp | RecordLevel):
            more = ZCdp(2 * number) if isinstance(order.loss, ZCdp) else RecordLevel(ZCdp(2 * number))
        other = self.chance.choice("other node", sorted(self.network.nodes))
        changes: list[dict[str, object]] = [
            {}, {"loss": more}, {"price_micros": order.price_micros // 2}, {"price_micros": 10 * order.price_micros},
            {"records": order.records + 1}, {"buyer": "somebody"}, {"learning_rate": 1e6}, {"owner": other},
            {"round_index": order.round_index + 1}, {"task": f"{order.task}x"}, {"award": f"{order.task}/9/{other}"},
            {"round_index": order.round_index + 1, "award": f"{order.task}/{order.round_index + 1}/{order.owner}"},
            {"loss": PureDp(1e-3)},
        ]  # fmt: skip
        change = self.chance.choice("change", changes)
        changed, node = replace(order, **change), before.metadata.dst_node_id  # type: ignore[arg-type]
        kind = self.chance.choice("change", [TRAIN, TRAIN, RELEASE])
        content = pack(changed, unpack_vector(before) if kind == TRAIN else None)
        proofs = [one for one in self.network.trains[-40:] if "escrow" in one.content.config_records]
        if kind == TRAIN and proofs and self.chance.stream("proof").random() < 0.8:
            own = "escrow" in before.content.config_records and self.chance.stream("proof").random() < 0.6
            proof = before if own else self.chance.choice("proof", proofs)
            content["escrow"] = proof.content.config_records["escrow"]
        self.network.send(Message(content, node, kind), server=False)
        return f"asks node {node} for {order.award} by {kind}, with {change or 'nothing changed'}"


def event_values(order: Order) -> list[float]:
    """The numbers of an order's loss."""
    return [value for value in _plain(order).values() if isinstance(value, float)]


def _plain(order: Order) -> dict[str, Any]:
    """An order's loss as values, of a record or not."""
    loss = event_to_dict(order.loss)
    inside: dict[str, Any] = loss.get("loss", loss)
    return inside
