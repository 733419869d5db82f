"""A round of the auction whose model is whatever the owners' ClientApps train, aggregated by any Flower strategy.

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
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.engines.flower.messages import RESERVED, TRAIN, Records, text_record
from flmarket.engines.flower.strategy import GridOwners
from flmarket.errors import InvalidInput
from flmarket.flower.records import RecordTerms
from flmarket.flower.tensors import TENSORS, UPDATE, AppModel, Tensors, as_floats, merged, settings
from flmarket.ledger import MICROS, Award, HoldReceipt
from flmarket.market.kind import Announcement, Bid, Order, RoundPlan
from flmarket.market.kinds.auction import AuctionKind, AuctionTerms
from flmarket.market.task import RoundRecord

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
_log = logging.getLogger("flwr")


class Nodes(Grid):
    """A grid for looking only: a strategy that configures a round sees who is there, and sends nothing by itself."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def get_node_ids(self) -> Iterable[int]:
        """Of the grid itself."""
        return self._grid.get_node_ids()

    @property
    def run(self) -> Any:
        """Of the grid itself."""
        return self._grid.run

    def create_message(self, *args: Any, **named: Any) -> Message:
        """Of the grid itself."""
        return self._grid.create_message(*args, **named)

    def set_run(self, *args: Any, **named: Any) -> NoReturn:
        """Not while a market is played."""
        raise InvalidInput("strategy", "use of the grid", "one that configures rounds and aggregates replies")

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        """Not while a market is played."""
        self.set_run()

    def pull_messages(self, message_ids: Iterable[str]) -> NoReturn:
        """Not while a market is played."""
        self.set_run()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> NoReturn:
        """Not while a market is played."""
        self.set_run()


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
        if self._configured < 0 and self.notes:
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
        found = None if self.evaluate is None else self.evaluate(self._configured + 1, self.now)
        if found is None:
            return {}
        self.metrics[self._configured + 1] = found
        return as_floats(found)

    def _moved(
        self,
        index: int,
        bidders: IntArray,
        sizes: FloatArray,
        epsilon: FloatArray,
        came: NDArray[np.bool_],
        updates: Mapping[int, FloatArray],
    ) -> FloatArray:
        """The market's weights, and the inner strategy's step on what they weigh."""
        weights = self.spec.aggregation.weights(epsilon, sizes)
        key, total = getattr(self.inner, "weighted_by_key", "num-examples"), float(sizes[came].sum())
        replies = [
            self._reply(owner, updates[owner], {key: weight * total})
            for owner, weight in zip(bidders.tolist(), weights.tolist(), strict=True)
            if weight > 0
        ]
        found, _ = self.inner.aggregate_train(self._configured + 1, replies)
        if found is not None:
            moved = self.tensors.flat(found)
            if not np.isfinite(moved).all():
                raise InvalidInput("strategy", type(self.inner).__name__, "a model of finite numbers")
            self.parameters = self.tensors.flat(self.tensors.named(moved))  # as it is sent
        return weights

    def _reply(self, owner: int, update: FloatArray, metrics: dict[str, float]) -> Message:
        """What a plain client would have sent: parameters, and for how many examples they count."""
        moved = -update if self.records is not None else update  # the guard's own steps say what to subtract
        arrays = merged(self.arrays, self.tensors, self.parameters + moved)
        asked = self.messages.get(self.node_of(owner) or 0) or next(iter(self.messages.values()))
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
