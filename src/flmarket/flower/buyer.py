"""The buyer's side of any Flower app: a strategy around the one she has, that pays for what it aggregates.

    strategy = MarketStrategy(FedAdam(), market=Market(budget_per_round=20.0, ledger="sqlite:///market.db"))
    result = strategy.start(grid, initial_arrays=arrays, train_config=config, num_rounds=10, evaluate_fn=evaluate)

Every round is the market's one round (`flmarket.market.round`) of the auction kind: bids, awards in escrow, orders,
checked deliveries, payment. Whom to ask and what to send says the inner strategy's `configure_train`, how the model
moves its `aggregate_train`; federated evaluation is left out, since owners' metrics would be releases without noise.
What cannot work is refused by `start` before anybody is asked.

What would break it: a budget that depends on bids. It is set here, before any is seen.

A round of the auction whose model is whatever the owners' ClientApps train, aggregated by any Flower strategy.

`AppAuction` is the auction kind with two things of its own. What it announces follows from the inner strategy's own
`configure_train`: its arrays, its configuration and whom it samples. And what moves the model is the inner strategy's
`aggregate_train`, on replies that look as if plain clients had sent them: parameters plus the released update, with
numbers of examples in the proportion of the market's weights. So averaging reproduces the market's aggregation, and
server optimisers work on it as post-processing, which costs no privacy.

A strategy may remember things (momenta). What it holds as numbers, arrays and texts is noted with every checkpoint, and
put back when a round is taken up in another process. What would break that: state in other objects, which begins anew.
"""

from __future__ import annotations

import base64
import copy
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import Strategy

from flmarket import aggregation, auctions, privacy
from flmarket.aggregation import Aggregation
from flmarket.aggregation.robust import RobustAggregation
from flmarket.bids import Auction, FloatArray, IntArray
from flmarket.engines.flower.messages import RESERVED, TRAIN, Records, text_record
from flmarket.engines.flower.strategy import GridAround, GridOwners, MarketLoop, tell_round
from flmarket.errors import InvalidInput
from flmarket.files import write_file
from flmarket.flower.tensors import (
    TENSORS,
    UPDATE,
    AppModel,
    RecordTerms,
    Tensors,
    as_floats,
    merged,
    settings,
    startable,
    twins,
)
from flmarket.learning import LocalTraining
from flmarket.ledger import (
    MICROS,
    Award,
    AwardState,
    HoldReceipt,
    Ledger,
    MemoryLedger,
    Receipt,
    SqlLedger,
    format_micros,
    to_micros,
)
from flmarket.ledger.rules import checked_name, checked_party
from flmarket.market.kind import Announcement, Bid, Order, RoundPlan, RoundRecord, Task
from flmarket.market.kinds.auction import AuctionKind, AuctionTerms
from flmarket.market.owner import LARGEST_PARAMETER
from flmarket.market.round import Rounds, new_task
from flmarket.market.store import FileStore, MemoryStore, RoundStore
from flmarket.privacy import (
    ApproxDp,
    Event,
    Perturbation,
    PureDp,
    RecordLevel,
    RecordNoise,
    Unit,
    Unprotected,
    is_sound,
)

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
_log = logging.getLogger("flwr")  # Flower's: what is said here appears in `flwr run --stream`


class Nodes(GridAround):
    """A grid for looking only: a strategy that configures a round sees who is there, and sends nothing by itself."""

    def set_run(self, *args: Any, **named: Any) -> NoReturn:
        """Not while a market is played."""
        raise InvalidInput("strategy", "use of the grid", "one that configures rounds and aggregates replies")

    push_messages = pull_messages = send_and_receive = set_run


class AppAuction(AuctionKind):
    """An auction for the updates of an app: `arrays` are all that it exchanges, `tensors` those that are sold."""

    def __init__(
        self,
        spec: AuctionTerms,
        buyer: str,
        *,
        tensors: Tensors,
        arrays: ArrayRecord,
        inner: Strategy,
        config: ConfigRecord,
        nodes: Grid,
        evaluate: Evaluate | None,
        records: RecordTerms | None = None,
    ) -> None:
        model = AppModel(tensors.shapes, tensors.flat(arrays))
        super().__init__(replace(spec, model=model), buyer)
        self.tensors, self.arrays, self.inner, self.config = tensors, arrays, inner, config
        self.nodes, self.evaluate, self.metrics = nodes, evaluate, dict[int, MetricRecord]()
        self.records = records
        self.content: Records = {}
        self.messages: dict[int, Message] = {}
        self.node_of: Callable[[int], int | None] = lambda owner: None
        self.keeps_notes = False
        self._configured, self._settings, self._fresh = -1, "", _noted(vars(inner))

    @property
    def now(self) -> ArrayRecord:
        """All arrays, as the model stands."""
        return merged(self.arrays, self.tensors, self.parameters)

    def configure(self, index: int) -> None:
        """Have the inner strategy configure a round, once: what is sent to whom."""
        if index == self._configured:
            return
        first_time = self._configured < 0
        if first_time and self.notes:
            self._take_up()
        made = list(self.inner.configure_train(index + 1, self.now, self.config, self.nodes))
        if not made:
            raise InvalidInput("strategy", type(self.inner).__name__, "one that trains with somebody (fraction_train)")
        first = made[0].content
        if any(one.content is not first and one.content != first for one in made[1:]):
            accepted = "one that sends the same arrays and configuration to all: terms are announced to everybody alike"
            raise InvalidInput("strategy", type(self.inner).__name__, accepted)
        if len(first.array_records) != 1 or len(first.config_records) > 1 or first.metric_records:
            raise InvalidInput("strategy", sorted(first), "one record of arrays and at most one of configuration")
        if taken := set(first) & (RESERVED | {TENSORS}):
            raise InvalidInput("record", min(taken), "a name that is not the market's own")
        (arrays,) = first.array_records.values()
        if Tensors.of(arrays, list(self.tensors.shapes)) != self.tensors:
            raise InvalidInput("strategy", type(self.inner).__name__, "one that sends the arrays that it was given")
        said = None if self.records is None else self.records.said
        self._settings = settings(self.tensors, next(iter(first.config_records.values()), None), said)
        configs = {name: ConfigRecord(dict(one)) for name, one in first.config_records.items()}  # not what may change
        self.content, self.messages = {**first, **configs}, {one.metadata.dst_node_id: one for one in made}
        self._configured = index
        if first_time:
            self._rehearse()

    def _rehearse(self) -> None:
        """Let a copy of the strategy aggregate made-up updates: what would fail then fails before anybody is asked.

        Strategies that read owners' metrics (QFedAvg's losses) would fail when everybody is paid.
        """
        try:
            inner = copy.deepcopy(self.inner)
        except Exception:  # it holds what cannot be copied: then only its own rounds show it
            return
        key, size, said = self._weighted_by, len(self.parameters), _log.disabled
        moved = [self.parameters + self.spec.perturbation.clip * (i + 1) / size for i in range(4)]
        replies = [
            self._reply(message, one, {key: float(i + 1)})
            for i, (message, one) in enumerate(zip(self.messages.values(), moved, strict=False))
        ]
        _log.disabled = True
        try:
            found, _ = inner.aggregate_train(self._configured + 1, replies)
            if found is not None:
                self.tensors.flat(found)
        except Exception as error:
            what = f"one that aggregates updates alone, without owners' metrics ({type(error).__name__}: {error})"
            raise InvalidInput("strategy", type(self.inner).__name__, what) from error
        finally:
            _log.disabled = said

    @property
    def _weighted_by(self) -> str:
        """The metric by which the inner strategy weighs replies."""
        return getattr(self.inner, "weighted_by_key", "num-examples")

    def announcement(self, index: int) -> Announcement:
        """The auction's, and the digest of what is sold and how it is trained."""
        self.configure(index)
        return replace(super().announcement(index), model="", settings=self._settings)

    def plan(self, index: int, bids: Mapping[int, Bid]) -> RoundPlan:
        """The auction's; it also settles which tensors the task is about."""
        self.terms = {"tensors": self.tensors.text}
        plan = super().plan(index, bids)
        held, budget = sum(order.price_micros for order in plan.orders), plan.deposit_micros
        _log.info("auction: %s winners, %.6g of %.6g in escrow", len(plan.orders), held / MICROS, budget / MICROS)
        return plan

    def measured(self) -> dict[str, float]:
        """By the buyer's own function."""
        found = self.evaluated(self._configured + 1)
        return {} if found is None else as_floats(found)

    def evaluated(self, index: int) -> MetricRecord | None:
        """What the buyer's own function says of the model as it stands after so many rounds, kept for the result."""
        found = None if self.evaluate is None else self.evaluate(index, self.now)
        if found is None:
            return None
        try:
            self.metrics[index] = MetricRecord(dict(found))
        except (TypeError, ValueError):
            raise InvalidInput("evaluate_fn", found, "a function that returns a MetricRecord, or None") from None
        return self.metrics[index]

    def _moved(
        self, index: int, bidders: IntArray, sizes: FloatArray, epsilon: FloatArray, updates: Mapping[int, FloatArray]
    ) -> FloatArray:
        """The market's weights, and the inner strategy's step on what they weigh."""
        weights = self.spec.aggregation.weights(epsilon, sizes)
        key, total = self._weighted_by, float(sizes[epsilon > 0].sum())
        sign = -1 if self.records is not None else 1  # the guard's own steps say what to subtract
        replies = [
            self._reply(self._asked(owner), self.parameters + sign * updates[owner], {key: weight * total})
            for owner, weight in zip(bidders.tolist(), weights.tolist(), strict=True)
            if weight > 0
        ]
        found, _ = self.inner.aggregate_train(self._configured + 1, replies)
        if found is not None:
            moved = self.tensors.flat(found)
            if not (np.abs(moved) <= LARGEST_PARAMETER).all():
                what = f"a model of numbers within ±{LARGEST_PARAMETER:g}: owners take no others"
                raise InvalidInput("strategy", type(self.inner).__name__, what)
            self.parameters = self.tensors.flat(self.tensors.named(moved))  # as it is sent
        return weights

    def _asked(self, owner: int) -> Message:
        """What the inner strategy would have sent to an owner."""
        return self.messages.get(self.node_of(owner) or 0) or next(iter(self.messages.values()))

    def _reply(self, asked: Message, parameters: FloatArray, metrics: dict[str, float]) -> Message:
        """What a plain client would have sent: parameters, and for how many examples they count."""
        arrays = merged(self.arrays, self.tensors, parameters)
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(dict(metrics))}), reply_to=asked)

    def close(self, plan: RoundPlan, updates: Mapping[int, FloatArray], awards: Mapping[int, Award]) -> RoundRecord:
        """The auction's, and a note of what the strategy remembers."""
        record = super().close(plan, updates, awards)
        if self.keeps_notes:
            changed = {name: one for name, one in _noted(vars(self.inner)).items() if self._fresh.get(name) != one}
            self.notes = {"strategy": changed, "config": dict(self.config)}
        return record

    def _take_up(self) -> None:
        """Go on from what a process before left."""
        if self.terms.get("tensors", self.tensors.text) != self.tensors.text:
            raise InvalidInput("state", "another model's", "the folder of a market for the same tensors")
        vars(self.inner).update(_read(self.notes["strategy"]))
        self.config = ConfigRecord(self.notes["config"])


class AppOwners(GridOwners):
    """Owners behind a guarded app: everything comes as `train`, and all messages of a round share one record."""

    types = dict.fromkeys(GridOwners.types, TRAIN)  # the one type that every app takes
    stranger = ": its app needs a train function, and owner_guard() among its mods"
    kind: AppAuction

    def asked(self) -> list[int]:
        """Whom the inner strategy sampled."""
        return list(self.kind.messages)

    def start(self, parameters: FloatArray) -> Records:
        """What the inner strategy sends."""
        return self.kind.content

    def order(self, order: Order, escrow: HoldReceipt | None) -> Records:
        """The order, and which tensors it is for."""
        return super().order(order, escrow) | {TENSORS: text_record(self.kind.tensors.text)}

    def vector(self, answer: Message) -> FloatArray:
        """The update of the tensors that were asked for, and of no others."""
        record = answer.content.array_records.get(UPDATE)
        if record is None or list(record) != list(self.kind.tensors.shapes):
            raise InvalidInput(UPDATE, None if record is None else list(record)[:20], "the tensors that were ordered")
        return self.kind.tensors.flat(record)


# --- what a strategy remembers, as JSON -------------------------------------------------------------------------------


def _noted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a strategy's attributes that are data."""
    noted = {}
    for name, value in values.items():
        if name == "current_arrays":  # Flower's own strategies set it anew for every round; it is the whole model
            continue
        try:
            noted[name] = _written(value)
        except TypeError:
            continue
    return noted


def _written(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fiub":
        array = np.asarray(value)
        return {"array": base64.b64encode(array.tobytes()).decode(), "type": array.dtype.str, "shape": array.shape}
    if isinstance(value, list | tuple):
        return {"list": [_written(one) for one in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _written(one) for key, one in value.items()}}
    if isinstance(value, ArrayRecord):
        return {"arrays": {key: _written(one.numpy()) for key, one in value.items()}}
    raise TypeError(type(value).__name__)


def _read(noted: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(one) for name, one in noted.items()}


def _value(one: Any) -> Any:
    if not isinstance(one, dict):
        return one
    if "array" in one:
        return np.frombuffer(base64.b64decode(one["array"]), dtype=one["type"]).reshape(one["shape"]).copy()
    if "list" in one:
        return [_value(item) for item in one["list"]]
    if "arrays" in one:
        return ArrayRecord({key: Array(_value(item)) for key, item in one["arrays"].items()})
    return _read(one["dict"])


RECOMMENDED = "recommended"
EVERYBODY = 10_000_000
LONGEST_TASK = 150  # an award's id has round and owner behind it
WORDS: dict[Unit, str] = {"update": "an owner's whole update", "record": "any one record of an owner"}


@dataclass(frozen=True, kw_only=True)
class Market:
    """What a buyer decides about money, mechanisms and privacy.

    `budget_per_round` is money; what is not spent stays with the buyer. `auction`, `aggregation` and `perturbation` are
    registered names (or objects). "recommended" noise is that of least energy for the model's size at
    `epsilon_per_round`, about what owners are expected to sell in a round. `clip` bounds how far one owner's update
    reaches, in the perturbation's own norm. At most `bidders_per_round` of those who bid take part, drawn by lot.

    `ledger` is a database URL or a ledger; without one the books are in memory and end with the process. `state` is a
    folder from which a run that was cut off goes on, under the same `task` name; without it a crash ends the task.
    Every task needs a name of its own in its ledger; one is made up unless given. `known_nodes` (node id → owner) hears
    those nodes only. Who has not bid after `bid_seconds` is not in the round.
    """

    budget_per_round: float
    auction: str | Auction = "posted"
    aggregation: str | Aggregation = "opt-aggr"
    perturbation: str | Perturbation = RECOMMENDED
    epsilon_per_round: float = 1.0
    clip: float = 1.0
    bidders_per_round: int = EVERYBODY
    ledger: Ledger | str | None = None
    state: str | Path | None = None
    task: str | None = None
    buyer: str = "buyer"
    known_nodes: Mapping[int, int] | None = None
    bid_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_seconds("bid_seconds", self.bid_seconds)
        checked_party("buyer", self.buyer)
        if self.task is not None:
            checked_name("task", self.task)
            if "/" in self.task or len(self.task) > LONGEST_TASK:
                raise InvalidInput("task", self.task, f"at most {LONGEST_TASK} characters, no / among them")
        if to_micros("budget_per_round", self.budget_per_round) < 1:
            raise InvalidInput("budget_per_round", self.budget_per_round, "money to buy with, of at least 0.000001")
        if not (self.ledger is None or isinstance(self.ledger, str) or hasattr(self.ledger, "has_task")):
            raise InvalidInput("ledger", self.ledger, "a database URL (sqlite:///market.db), a ledger, or None")
        if not isinstance(self.state, str | Path | None):
            raise InvalidInput("state", self.state, "a folder, or None")
        known = {} if self.known_nodes is None else self.known_nodes
        if not isinstance(known, Mapping) or not all(type(one) is int for pair in known.items() for one in pair):
            raise InvalidInput("known_nodes", known, "{node id: owner's number}, or None for whoever is there")
        self.terms("task", 1, 1)  # its own errors, before anything is started

    def terms(self, task: str, rounds: int, dimension: int, records: RecordTerms | None = None) -> AuctionTerms:
        """The market for updates of so many numbers, or for steps on records."""
        auction: Auction = _found("auction", self.auction, auctions, "run")
        rule: Aggregation = _found("aggregation", self.aggregation, aggregation, "weights")
        if isinstance(rule, RobustAggregation):
            raise InvalidInput("aggregation", rule.name, "weights; a robust choice is the inner strategy's (Krum, …)")
        wanted: str | Perturbation = self.perturbation
        if records is not None:
            if wanted not in (RECOMMENDED, RecordNoise.name):
                raise InvalidInput("perturbation", wanted, "none where records are protected: others hide updates")
            wanted = records.noise(self.clip)
        if wanted == RECOMMENDED:
            wanted = privacy.recommend(dimension, self.epsilon_per_round).name
        noise: Perturbation = _found("perturbation", wanted, privacy, "privatize", clip=self.clip)
        if not is_sound(noise) or isinstance(noise.guarantee(1.0), Unprotected):
            raise InvalidInput(
                "perturbation", noise.name, "one that is sound in finite precision: owners take no other"
            )
        posted = Task(
            name=task, rounds=rounds, bidders_per_round=self.bidders_per_round,
            budget_micros=to_micros("budget_per_round", self.budget_per_round),
        )  # fmt: skip
        return AuctionTerms(task=posted, auction=auction, aggregation=rule, perturbation=noise, seed=self.seed)


@dataclass
class Result(strategy.Result):
    """Flower's result (`arrays`, metrics by round), and the market's: its task, rounds, awards and their receipts.

    A receipt proves to anybody who trusts the ledger's head that its award was paid, and for what.
    """

    task: str = ""
    records: list[RoundRecord] = field(default_factory=list)
    awards: list[Award] = field(default_factory=list)
    receipts: dict[str, Receipt] = field(default_factory=dict)

    @property
    def spent_micros(self) -> int:
        """All payments."""
        return sum(record.spent_micros for record in self.records)

    @property
    def bill(self) -> str:
        """What was paid to whom for what, a line an award, as a table in Markdown."""
        unit: Unit = self.records[0].unit if self.records else "update"
        rows = [
            f"| round | owner | privacy (per round, of {WORDS[unit]}) | price | |",
            "| --: | :-- | :-- | --: | :-- |",
        ]
        for one in self.awards:
            end = one.state.value + (f": {one.reason}" if one.reason else "")
            price = format_micros(one.price_micros)
            rows.append(f"| {one.round_index + 1} | {one.owner} | {_said(one.loss)} | {price} | {end} |")
        return "\n".join([*rows, f"| all | | | {format_micros(self.spent_micros)} | paid |"])

    def __repr__(self) -> str:
        """Flower's, and what was paid."""
        paid = sum(one.state is AwardState.POSTED for one in self.awards)
        return f"{super().__repr__()}\nMarket {self.task}:\n\t{paid} awards paid, {format_micros(self.spent_micros)}\n"


class MarketStrategy(MarketLoop):
    """Any Flower strategy, with a market between it and its clients.

    `release` names the tensors that are sold, by patterns (`["head.*", "*lora_*"]`); without it they are all of
    floating point but the running statistics of normalisation layers, which are never sold. All others travel to owners
    as they are and come back to nobody.

    What ε is for is an owner's whole `update`, by whatever her app does, or any one `record`. For the latter owners'
    guards take the steps themselves (`owner_guard(model=…, records=…)`): plain descent on all records as `local` says,
    each one's gradient clipped to the market's `clip`, Gaussian noise at `delta` in every step. `train` is not called.
    """

    def __init__(
        self,
        inner: Strategy,
        *,
        market: Market,
        release: Sequence[str] | None = None,
        unit: Unit = "update",
        local: LocalTraining | None = None,
        delta: float = 1e-5,
    ) -> None:
        if not isinstance(inner, Strategy) or isinstance(inner, MarketStrategy):
            raise InvalidInput("strategy", type(inner).__name__, "a Flower strategy, such as FedAvg()")
        if unit not in ("update", "record") or (unit == "record") != (local is not None):
            what = "update; or record, with the steps that guards take, local=LocalTraining(steps=…, learning_rate=…)"
            raise InvalidInput("unit, local", (unit, local), what)
        if not isinstance(market, Market):
            raise InvalidInput("market", market, "a Market(budget_per_round=…)")
        self.inner, self.market, self.release = inner, market, release
        self.records = None if local is None else RecordTerms(local, delta)
        market.terms("task", 1, 1, self.records)  # its own errors, before anything is started

    def summary(self) -> None:
        """What is about to run."""
        market = self.market
        _log.info("\t├──> Market: %s within %s a round", market.auction, market.budget_per_round)
        _log.info("\t├──> No federated evaluation: owners' metrics would be releases without noise")
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Play the market, up to `num_rounds` rounds in all; owners have `timeout` seconds to train."""
        _check_seconds("timeout", timeout)
        if not (evaluate_fn is None or callable(evaluate_fn)):
            raise InvalidInput("evaluate_fn", evaluate_fn, "a function of the round's number and the arrays, or None")
        tensors = startable(initial_arrays, self.release)
        try:
            config = ConfigRecord(dict(train_config or {}))
        except (TypeError, ValueError) as error:
            raise InvalidInput("train_config", train_config, f"a ConfigRecord ({error})") from None
        settings(tensors, config, None if self.records is None else self.records.said)
        _log.info("Starting market around %s:", type(self.inner).__name__)
        with self._books() as (ledger, store, task):
            terms = self.market.terms(task, num_rounds, tensors.dimension, self.records)
            kind = AppAuction(
                terms, self.market.buyer, tensors=tensors, arrays=initial_arrays, inner=self.inner, config=config,
                nodes=Nodes(grid), evaluate=evaluate_fn, records=self.records,
            )  # fmt: skip
            owners = AppOwners(
                grid, kind.model, ledger.head, bid_seconds=self.market.bid_seconds, train_seconds=timeout,
                known_nodes=self.market.known_nodes,
            )  # fmt: skip
            owners.kind, kind.node_of, kind.keeps_notes = kind, owners.roster.node, store.durable
            self.summary()
            sold, noise = len(tensors.shapes), terms.perturbation
            _log.info(
                "\t└──> Sold: %s tensors, %s numbers, by %s, clip %g; ε is for %s",
                *(sold, tensors.dimension, noise.name, noise.clip, WORDS[kind.unit]),
            )
            for names in twins(initial_arrays, tensors):
                words = "%s hold the same numbers: if they are one tensor (tied weights), release the last alone"
                _log.warning(words, ", ".join(names))
            first = kind.evaluated(0)
            if first is not None:
                _log.info("Initial global evaluation results: %s", first)
            rounds = Rounds(kind, owners, ledger, store, progress=lambda record: tell_round(record, num_rounds))
            rounds.play(num_rounds)
            return self._result(kind, rounds, ledger)

    def _result(self, kind: AppAuction, rounds: Rounds, ledger: Ledger) -> Result:
        awards = [one for one in ledger.awards() if one.id.startswith(f"{kind.task}/")]
        result = Result(kind.now, task=kind.task, records=rounds.records, awards=awards)
        result.receipts = {one.id: ledger.receipt(one.id) for one in awards if one.state is AwardState.POSTED}
        if 0 in kind.metrics:
            result.evaluate_metrics_serverapp[0] = kind.metrics[0]
        for record in rounds.records:
            result.train_metrics_clientapp[record.index + 1] = _facts(record)
            told = kind.metrics.get(record.index + 1) or MetricRecord(dict(record.metrics))
            if told:
                result.evaluate_metrics_serverapp[record.index + 1] = told
        _log.info("Market %s ended: %s paid in all", kind.task, format_micros(result.spent_micros))
        return result

    @contextmanager
    def _books(self) -> Iterator[tuple[Ledger, RoundStore, str]]:
        """Ledger, store and the task's name; a name that the ledger knows is an error, unless its folder goes on."""
        market = self.market
        store: RoundStore = MemoryStore()
        name, begun = market.task or f"task-{secrets.token_hex(6)}", False
        if market.state is not None:
            folder = Path(market.state)
            try:
                store, label = FileStore(folder), folder / "task"
            except OSError as error:
                raise InvalidInput("state", str(folder), f"a folder that can be written ({error.strerror})") from None
            begun = label.exists()
            kept = label.read_text(encoding="utf-8") if begun else name
            if market.task not in (None, kept):
                raise InvalidInput("task", market.task, f"{kept!r}, which the folder {folder} is about")
            name = kept
        books = market.ledger
        if books is None:
            _log.warning("The market's books are in memory: they end with this process (Market(ledger=…))")
        ledger = SqlLedger(books) if isinstance(books, str) else MemoryLedger() if books is None else books
        try:
            if not begun:
                new_task(ledger, name)
                if market.state is not None:
                    write_file(Path(market.state) / "task", name)
            yield ledger, store, name
        finally:
            if isinstance(books, str) and isinstance(ledger, SqlLedger):
                ledger.close()


def _found(field: str, value: Any, known: Any, method: str, **settings: Any) -> Any:
    """What a registered name stands for, or the object itself."""
    if isinstance(value, str):
        return known.get(known.admit(value), **settings)
    if not callable(getattr(value, method, None)):
        raise InvalidInput(field, value, f"an object with {method}(), or one of {', '.join(known.names())}")
    return value


def _check_seconds(field: str, value: object) -> None:
    """A deadline that a message can carry."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidInput(field, value, "a positive number of seconds")


def _said(loss: Event) -> str:
    """A loss in the bill."""
    inner = loss.loss if isinstance(loss, RecordLevel) else loss
    if isinstance(inner, ApproxDp):
        return f"(ε, δ) = ({inner.epsilon:.4g}, {inner.delta:g})"
    return f"ε = {inner.epsilon:.4g}" if isinstance(inner, PureDp) else str(inner)


def _facts(record: RoundRecord) -> MetricRecord:
    """What a round cost and brought."""
    came = record.delivered
    return MetricRecord({
        "bidders": len(record.bidders), "winners": sum(state is not None for state in record.state),
        "delivered": int(came.sum()), "spent": record.spent_micros / 1e6,
        "epsilon-largest": float(record.loss[came].max(initial=0.0)),
    })  # fmt: skip
